"""Measurements as files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS = ("functions", "checking", "training", "operations", "kernels")
FUNCTIONS, CHECKING, TRAINING, OPERATIONS, KERNELS = PARTS
FOLDER = Path(__file__).with_name("results")
_VARIES = "load_before"


def path_for(environment: Mapping[str, Any]) -> Path:
    """Returns the file for a machine's figures, which has its name."""
    is_cpu = environment["backend"] == "cpu"
    name = f"{environment['processor']}, {environment['cpus']} cores" if is_cpu else environment["device"]
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def update(path: Path, environment: Mapping[str, Any], quick: bool, parts: Mapping[str, Any]) -> None:
    """Writes parts into a file. Other parts stay if versions and machine are equal."""
    content = load(path) if path.exists() else {}
    same = {k: v for k, v in environment.items() if k != _VARIES}
    if content.get("quick") != quick or {k: v for k, v in content["environment"].items() if k != _VARIES} != same:
        content = {}
    content |= {"environment": environment, "quick": quick, **parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Loads a file."""
    return json.loads(path.read_text())


def load_all() -> list[dict[str, Any]]:
    """Loads the figures of every machine, those without an accelerator first."""
    contents = [load(path) for path in sorted(FOLDER.glob("*.json"))]
    return sorted(contents, key=lambda content: content["environment"]["backend"] != "cpu")
