"""The layers of the code: what may import what, and where unpromised names of JAX and torch are reached."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import jaxfn

ROOT = Path(jaxfn.__file__).parent
MODULES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}

# From the bottom up. A module belongs to the longest of these that it begins with.
LAYERS = [
    ("jaxfn._compat", "jaxfn._traces", "jaxfn._captures", "jaxfn._version"),
    ("jaxfn._jaxpr",),
    ("jaxfn._tree",),
    (
        "jaxfn._observe",
        "jaxfn._signature",
        "jaxfn._sharding_rule",
        "jaxfn._mesh_types",
        "jaxfn._diagnostics",
        "jaxfn._reports",
    ),
    ("jaxfn._primitives", "jaxfn._linearity", "jaxfn._partition"),
    ("jaxfn._context", "jaxfn._apply_types", "jaxfn._boundary", "jaxfn._hooks", "jaxfn._once_differentiable"),
    ("jaxfn._methods",),
    ("jaxfn._vmap_method",),
    ("jaxfn._forward_pass",),
    ("jaxfn._parts",),
    ("jaxfn._intermediates",),
    ("jaxfn._rule",),
    ("jaxfn._function",),
    ("jaxfn._functional",),
    ("jaxfn._torch._compat", "jaxfn._torch.values"),
    ("jaxfn._torch.operations",),
    ("jaxfn._torch.graph",),
    ("jaxfn._torch.trace",),
    ("jaxfn._torch.source",),
    ("jaxfn._torch.convert",),
    ("jaxfn._torch",),
    ("jaxfn._check",),
    ("jaxfn._gradcheck.problem", "jaxfn._gradcheck.report"),
    ("jaxfn._gradcheck", "jaxfn._inspection", "jaxfn._kernelcheck", "jaxfn._parity"),
    ("jaxfn",),
]


def layer_of(module):
    names = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    parts = module.split(".")
    return next(names[name] for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in names)


def file_of(name):
    """The module that a dotted name denotes, or that contains it."""
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


def test_modules_import_from_their_own_layer_and_from_below():
    upwards = [
        (module, other) for module in MODULES for other in imports_of(module) if layer_of(other) > layer_of(module)
    ]
    assert not upwards


def test_no_circle_of_imports():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()


def test_names_that_jax_and_torch_do_not_promise_are_reached_in_four_modules():
    patterns = {
        r"(from|import) jax\._src": (),
        r"\bjax\.(interpreters|extend)\b": ("jaxfn._compat", "jaxfn._traces"),
        r"\.(parent_trace|tangent_trace|batch_dim)\b": ("jaxfn._traces",),
        r"(?<!jaxfn\._)\btorch\._[A-Za-z]": ("jaxfn._torch._compat",),
    }
    code = {module: path.read_text() for module, path in MODULES.items()}
    found = [(m, p) for p, allowed in patterns.items() for m in MODULES if m not in allowed and re.search(p, code[m])]
    assert not found
    attributes = {m: {n.attr for n in ast.walk(ast.parse(code[m])) if isinstance(n, ast.Attribute)} for m in MODULES}
    assert not [m for m in MODULES if "_src" in attributes[m]]


def test_one_name_is_one_class():
    classes = [
        node.name.lstrip("_")
        for path in MODULES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in classes if classes.count(name) > 1}
