"""The layers of the code: what may import what, and where unpromised names of JAX and torch are reached."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import jaxfn

ROOT = Path(jaxfn.__file__).parent
MODULES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}

# From the bottom up. A module belongs to the longest of these that it begins with.
LAYERS = [
    ("jaxfn._compat",),
    ("jaxfn._jaxpr",),
    ("jaxfn._tree",),
    ("jaxfn._observe", "jaxfn._signature", "jaxfn._mesh_types", "jaxfn._diagnostics"),
    ("jaxfn._primitives", "jaxfn._linearity"),
    ("jaxfn._context", "jaxfn._apply_types", "jaxfn._boundary", "jaxfn._hooks", "jaxfn._once_differentiable"),
    ("jaxfn._methods",),
    ("jaxfn._vmap_method", "jaxfn._outside"),
    ("jaxfn._forward_pass",),
    ("jaxfn._rule",),
    ("jaxfn._function",),
    ("jaxfn._functional",),
    ("jaxfn._torch._compat", "jaxfn._torch.values"),
    ("jaxfn._torch.operations",),
    ("jaxfn._torch.graph",),
    ("jaxfn._torch.trace",),
    ("jaxfn._torch.adopt",),
    ("jaxfn._torch",),
    ("jaxfn._gradcheck.problem", "jaxfn._gradcheck.report", "jaxfn._inspection.tables"),
    ("jaxfn._gradcheck.numbers",),
    ("jaxfn._gradcheck", "jaxfn._inspection", "jaxfn._kernelcheck", "jaxfn._parity"),
    ("jaxfn",),
]


def layer_of(module):
    names = {name: number for number, layer in enumerate(LAYERS) for name in layer}
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
def test_modules_import_from_their_own_layer_and_from_below(module):
    upwards = [other for other in imports_of(module) if layer_of(other) > layer_of(module)]
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


PAGE = ROOT.parent / "ARCHITECTURE.md"


def words_of(path):
    """The names that a module, or one of a folder, defines: functions, classes, methods, attributes, variables."""
    files = [path] if path.is_file() else path.rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assigned = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return defined | assigned | {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


ROWS = re.findall(r"^\| (?:\.\.\. )?(.*?) \| (.*) \|$", PAGE.read_text().split("| Where is |")[1], re.MULTILINE)


@pytest.mark.parametrize("what, places", ROWS, ids=[what for what, _ in ROWS])
def test_what_the_table_names_is_there(what, places):
    """`file.py` `name`: the name is defined in that file, or in a folder."""
    folder = path = None
    for word in re.findall(r"`([^`]+)`", places):
        if word.endswith(("/", ".py")):
            path = ROOT / word if (ROOT / word).exists() or folder is None else folder / word
            folder = path if path.is_dir() else folder
            assert path.exists(), word
        elif "aten." not in word:
            assert path is not None and word.rpartition(".")[2] in words_of(path), f"{word} in {path}"


SECTIONS = {text.split("\n")[0]: text for text in PAGE.read_text().split("\n## ")[1:]}
NAMES_IN_FILES = [
    (folder[1] if (folder := re.search(r"aths are relative to `jaxfn/([^`]*)`", text)) else "", name, file)
    for text in SECTIONS.values()
    for name, file in re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`", text)
]


@pytest.mark.parametrize("folder, name, file", NAMES_IN_FILES, ids=[f"{f}-{n}" for _, n, f in NAMES_IN_FILES])
def test_names_that_the_page_has_beside_a_file_are_there(folder, name, file):
    """`name` (`path/file.py`), in the folder that the section's paths are relative to."""
    assert name.rpartition(".")[2] in words_of(ROOT / folder / file)


FILES_OF_LAYERS = set(re.findall(r"`([\w/]+\.py)`", SECTIONS["The layers"]))


@pytest.mark.parametrize("file", sorted(FILES_OF_LAYERS))
def test_files_of_the_layers_are_there(file):
    assert (ROOT.parent / file).exists() or any(ROOT.rglob(file))


def test_one_name_is_one_class():
    """Rows and entries of reports, and the sides that they compare, are the same thing in each."""
    classes = [
        node.name.lstrip("_")
        for path in MODULES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in classes if classes.count(name) > 1} <= {"Row", "Entry", "Side"}
