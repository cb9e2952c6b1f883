"""Executes docs/reports.ipynb, without Jupyter, and writes the outputs of its cells into it. Needs torch.

python docs/scripts/notebook.py
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import matplotlib

NOTEBOOK = Path(__file__).parents[1] / "reports.ipynb"


def execute(cells: list[dict[str, Any]]) -> None:
    """Runs the code cells, in order, and replaces their outputs."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # equal plots have equal texts
    with matplotlib.rc_context({"svg.hashsalt": "jaxfn", "svg.fonttype": "none"}):
        for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
            value = evaluate("".join(cell["source"]), namespace, f"cell {number}")
            cell["execution_count"], cell["outputs"] = number, _outputs(value, number)


def evaluate(source: str, namespace: dict[str, Any], filename: str) -> Any:
    """Runs the source of a cell, and returns the value of its last line if that is an expression."""
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    exec(compile(ast.Module(statements, []), filename, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), filename, "eval"), namespace) if last else None


def _outputs(value: Any, number: int) -> list[dict[str, Any]]:
    if value is None:
        return []
    shown = {"text/html": value._repr_html_(), "text/plain": repr(value)}
    data = {kind: text.splitlines(keepends=True) for kind, text in shown.items()}
    return [{"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}]


if __name__ == "__main__":
    content = json.loads(NOTEBOOK.read_text())
    execute(content["cells"])
    NOTEBOOK.write_text(json.dumps(content, indent=1) + "\n")
