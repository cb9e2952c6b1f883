"""Every row of docs/contract.md has a test that is named after it, and tests are named after rows that stand there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISED, _, NOT_THERE_YET = (ROOT / "docs" / "contract.md").read_text().partition("\n## Not there yet\n")
TESTS = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
}


def rows_in(text):
    return re.findall(r"^- \*\*([A-Z]\d+[a-z]?)\*\* ", text, re.MULTILINE)


def rows_of(test):
    """The rows that a test is named after: `test_B4_E1b_saved_bytes` is about two."""
    found = re.match(r"test_((?:[A-Z]\d+[a-z]?_)+)", test)
    return found[1].removesuffix("_").split("_") if found else []


ROWS = rows_in(PROMISED)
TESTED = {row for test in TESTS for row in rows_of(test)}


def test_rows_are_found_and_each_stands_once():
    assert rows_in("- **B7** a row\n  **C1** not one\n- **D5b** another\n- **Bold** no row") == ["B7", "D5b"]
    everywhere = ROWS + rows_in(NOT_THERE_YET)
    assert len(everywhere) == len(set(everywhere))
    assert len(re.findall(r"^- \*\*", PROMISED + NOT_THERE_YET, re.MULTILINE)) == len(everywhere)
    assert {row[0] for row in ROWS} >= set("ABCDEFGH")


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_test(row):
    assert row in TESTED


def test_tests_are_named_after_rows():
    """What is tested is promised, and no longer among what is not there yet."""
    assert rows_of("test_B4_E1b_saved_bytes") == ["B4", "E1b"] and rows_of("test_C_errors") == []
    assert sorted(TESTED.difference(ROWS)) == []
