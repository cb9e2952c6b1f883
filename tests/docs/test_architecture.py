"""The floors of the house: what may import what, and where unpromised names of JAX and torch are reached."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import jaxfn

ROOT = Path(jaxfn.__file__).parent
MODULES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}

# From the ground up. A module belongs to the longest of these that it begins with.
FLOORS = [
    ("jaxfn._compat", "jaxfn._frames", "jaxfn._observation", "jaxfn._watch"),
    ("jaxfn._values",),
    ("jaxfn._primitives",),
    ("jaxfn._protocol",),
    ("jaxfn._run", "jaxfn._signatures"),
    ("jaxfn._derivatives",),
    ("jaxfn._function",),
    ("jaxfn._functional",),
    ("jaxfn._torch._compat", "jaxfn._torch.values"),
    ("jaxfn._torch.operations",),
    ("jaxfn._torch.graph",),
    ("jaxfn._torch.trace",),
    ("jaxfn._torch.adopt",),
    ("jaxfn._torch",),
    ("jaxfn._gradcheck.problem", "jaxfn._gradcheck.report"),
    ("jaxfn._gradcheck.numbers",),
    ("jaxfn._gradcheck", "jaxfn._inspection", "jaxfn._kernelcheck", "jaxfn._parity"),
    ("jaxfn",),
]


def floor_of(module):
    names = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    parts = module.split(".")
    return next(names[name] for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in names)


def file_of(name):
    """The module that a dotted name stands for, or lies in."""
    while name:
        for module in (name, f"{name}.__init__"):
            if module in MODULES:
                return module
        name = name.rpartition(".")[0]
    return None


def imports_of(module):
    """The modules of jaxfn that one imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return set(map(file_of, names)) - {module, None}


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_from_their_own_floor_and_from_below(module):
    upwards = [other for other in imports_of(module) if floor_of(other) > floor_of(module)]
    assert not upwards


def test_no_circle_of_imports():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_unpromised_names_are_reached_in_two_places(module):
    code = MODULES[module].read_text()
    assert not re.search(r"(from|import) jax\._src", code)
    if module != "jaxfn._compat":
        assert not re.search(r"\bjax\.(interpreters|extend)\b", code)
    if module != "jaxfn._torch._compat":
        assert not re.search(r"(?<!jaxfn\._)\btorch\._[A-Za-z]", code)
