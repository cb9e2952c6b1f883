"""Every row of docs/contract.md has a test that is marked with it, and marks name rows that stand there."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISED, _, NOT_THERE_YET = (ROOT / "docs" / "contract.md").read_text().partition("\n## Not there yet\n")


def rows_in(text):
    return re.findall(r"^- \*\*([A-Z]\d+[a-z]?)\*\* ", text, re.MULTILINE)


def marked_rows(code):
    """The rows that tests of a module are marked with, and those that its tests without `slow` are.

    Read and not imported, as tests of torch are there without torch too.
    """
    found, found_quickly = set(), set()
    for test in ast.parse(code).body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            marks = {ast.unparse(getattr(mark, "func", mark)): mark for mark in test.decorator_list}
            if "row" in marks:
                rows = {argument.value for argument in marks["row"].args}
                found |= rows
                found_quickly |= rows if "slow" not in marks else set()
    return found, found_quickly


ROWS = rows_in(PROMISED)


@functools.cache
def rows_of_all_tests():
    """The `marked_rows` of all test files."""
    modules = [marked_rows(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    return tuple(set().union(*rows) for rows in zip(*modules, strict=True))


def test_rows_are_found_and_each_occurs_once():
    assert rows_in("- **B7** a row\n  **C1** not one\n- **D5b** another\n- **Bold** no row") == ["B7", "D5b"]
    everywhere = ROWS + rows_in(NOT_THERE_YET)
    assert len(everywhere) == len(set(everywhere))
    assert len(re.findall(r"^- \*\*", PROMISED + NOT_THERE_YET, re.MULTILINE)) == len(everywhere)
    assert {name[0] for name in ROWS} >= set("ABCDEFGH")


def test_marks_are_found():
    code = '@row("B4", "E1b")\n@slow\ndef test_a(): ...\n@EACH\n@row("B7")\ndef test_b(): ...\ndef test_c(): ...'
    assert marked_rows(code) == ({"B4", "E1b", "B7"}, {"B7"})


def test_each_row_has_a_test():
    """One at least that runs without `--all`."""
    assert not [name for name in ROWS if name not in rows_of_all_tests()[1]]


def test_marks_name_rows():
    """Tested rows are promised, and no longer listed as missing."""
    assert sorted(rows_of_all_tests()[0].difference(ROWS)) == []
