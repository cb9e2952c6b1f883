"""docs/errors.md has what is raised today."""

import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "error_gallery.py"
spec = importlib.util.spec_from_file_location("error_gallery", SCRIPT)
error_gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(error_gallery)


def test_the_gallery_is_current():
    """`python docs/scripts/error_gallery.py` writes it again."""
    page = error_gallery.PAGE.read_text()
    assert error_gallery.gallery(page) == page


def test_messages_are_written_and_replaced():
    mistake = "```python\n@jaxfn.function\ndef f(ctx, x): ...\n\nf()\n```\n"
    written = error_gallery.gallery(f"# A\n\n{mistake}\n# B\n")
    assert (
        written == f"# A\n\n{mistake}\n```text\nTypeError: f.apply(x): missing a required argument: 'x'\n```\n\n# B\n"
    )
    assert error_gallery.gallery(written.replace("missing", "lacking")) == written


def test_a_program_that_raises_nothing_is_reported():
    with pytest.raises(AssertionError, match="raises nothing"):
        error_gallery.gallery("```python\nx = 1\n```\n")


def test_each_message_names_its_function():
    """Or the member of ctx that was misused, whose line is in the traceback."""
    found = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", error_gallery.PAGE.read_text(), re.DOTALL)
    assert len(found) > 20
    for code, message in found:
        names = re.findall(r"^ *(?:class|def) (\w+)|ctx\.(save\w+)", code, re.MULTILINE)
        assert any(name and name.removesuffix("_variables") in message for pair in names for name in pair), message
