"""Every recipe runs, and asserts its own claim; the table in the folder's README has all of them."""

import re

import pytest

from tests.support.marks import slow
from tests.support.recipes import FOLDER, NAMES, load


@slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_does_what_it_claims(name, capsys):
    recipe = load(name)
    assert capsys.readouterr().out == ""  # importing it does not run it
    recipe.main()
    assert capsys.readouterr().out != ""


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_shows_and_claims(name):
    source = (FOLDER / f"{name}.py").read_text()
    docstring = source.split('"""')[1]
    assert f"\n    python examples/cookbook/{name}.py\n" in docstring
    assert "\nClaim: " in docstring
    assert "assert " in source.partition("\ndef main(")[2]


def test_the_table_has_every_recipe():
    rows = re.findall(r"^\| \[([a-z0-9_]+)\]\(\1\.py\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == NAMES
