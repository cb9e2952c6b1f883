"""docs/reports.ipynb has the outputs of today, as far as they do not depend on the machine and the versions."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "notebook.py"
spec = importlib.util.spec_from_file_location("notebook", SCRIPT)
notebook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebook)

CELLS = json.loads(notebook.NOTEBOOK.read_text())["cells"]
HAS_TORCH = importlib.util.find_spec("torch") is not None


def without_numbers(text):
    """The text of an output in which numbers, versions and the paths of a plot are equal everywhere."""
    text = re.sub(r"<svg.*</svg>", "<svg>", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?(\+cpu)?|inf|nan)\b", "#", text))


def outputs(cell):
    return [without_numbers("".join(text)) for output in cell["outputs"] for text in output["data"].values()]


def test_the_notebook_has_the_outputs_of_today():
    """`python docs/scripts/notebook.py` writes them. Without torch, its last cells do not run."""
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    first_of_torch = next(i for i, cell in enumerate(code) if "import torch\n" in cell["source"])
    expected = code if HAS_TORCH else code[:first_of_torch]
    executed = copy.deepcopy(expected)
    notebook.execute(executed)
    assert list(map(outputs, executed)) == list(map(outputs, expected))


def test_it_shows_each_kind_of_report():
    shown = ["".join(output["data"]["text/html"]) for cell in CELLS for output in cell.get("outputs", [])]
    texts = ["gradcheck of", "saved_tensors", "kernelcheck of", "paritycheck of", "as torch traced it"]
    assert len(shown) == 5 and all(text in html for text, html in zip(texts, shown, strict=True))
    assert "<svg" in shown[0] and all("<table>" in html for html in shown[1:4])


def test_outputs_that_differ_are_noticed():
    assert without_numbers("error  1.2e-07 <svg>a</svg>") == without_numbers("error 3 <svg>b</svg>")
    assert without_numbers("2 FAILED") != without_numbers("2 passed")
    value = notebook.evaluate("x = 2\nx + 1", {}, "cell")
    assert value == 3 and notebook.evaluate("x = 2", {}, "cell") is None
