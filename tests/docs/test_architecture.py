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
    ("jaxfn._torch.ties",),
    ("jaxfn._torch.operations",),
    ("jaxfn._torch.graph",),
    ("jaxfn._torch.trace",),
    ("jaxfn._torch.convert",),
    ("jaxfn._torch",),
    ("jaxfn._check",),
    ("jaxfn._gradcheck.problem", "jaxfn._gradcheck.report"),
    ("jaxfn._gradcheck", "jaxfn._inspection", "jaxfn._kernelcheck", "jaxfn._parity", "jaxfn._port"),
    ("jaxfn", "jaxfn._port.command"),
]

# What the port imports in addition to `jaxfn` itself, and who imports the port when a user asks for it.
PORT_IMPORTS = {
    "jaxfn._check.arguments": "as_arguments as_function require_numbers",
    "jaxfn._check.draws": "draw",
    "jaxfn._check.staging": "JaxprFunction stage",
    "jaxfn._compat": "dce_jaxpr eqn_source_line lower_jaxpr name_p record_source_lines",
    "jaxfn._inspection.interpreter": "EqnInterpreter",
    "jaxfn._jaxpr": "all_eqns needed_eqns open_jaxpr",
    "jaxfn._parity.backends": "Measurements draw_grad_outputs draw_tensor function_name output_leaves to_numpy "
    "torch_grad torch_vjp",
    "jaxfn._parity.comparison": "compare errors noise_of_zero rounding",
    "jaxfn._parity.inputs": "Array Inputs",
    "jaxfn._parity.report": "Deviation ParitycheckReport uncompared_row",
    "jaxfn._parity.torch_results": "decode_value encode_value import_torch read_file torch_versions write_file",
    "jaxfn._reports": "Report aligned first_line html_table preformatted public small",
    "jaxfn._torch": "conversion_of ties",
    "jaxfn._torch._compat": "scripted_function",
    "jaxfn._torch.graph.source_lines": "is_user_code source_line",
    "jaxfn._torch.ties": "CLAMP vector_norm with_index",
    "jaxfn._torch.values.arrays": "to_jax to_torch with_arrays",
    "jaxfn._torch.values.errors": "DataDependentError TranslationError",
    "jaxfn._tree": "is_array_leaf is_inexact is_key",
}
PORT_USERS = {
    "jaxfn.__init__",
    "jaxfn.reports",
    "jaxfn._cli",
    "jaxfn._parity.paritycheck",
    "jaxfn._parity.torch_results",
}


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


def imported_names(nodes):
    """The dotted names that nodes of a syntax tree import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(module, only_at_once=False):
    """The modules of jaxfn that one imports, wherever in it, or when it is imported itself."""
    tree = ast.parse(MODULES[module].read_text())
    names = imported_names(tree.body if only_at_once else ast.walk(tree))
    return set(map(file_of, names)) - {module, None}


def test_modules_import_from_their_own_layer_and_from_below():
    upwards = [
        (module, other) for module in MODULES for other in imports_of(module) if layer_of(other) > layer_of(module)
    ]
    assert not upwards


def test_no_circle_of_imports():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()


def is_port(name):
    return name.startswith("jaxfn._port.")


def test_the_port_can_be_cut_off():
    trees = [ast.parse(path.read_text()) for module, path in MODULES.items() if is_port(module)]
    names = {name for tree in trees for name in imported_names(ast.walk(tree)) if name.startswith("jaxfn.")}
    expected = {f"{module}.{name}" for module, names in PORT_IMPORTS.items() for name in names.split()}
    assert {name for name in names if not is_port(name)} == expected
    others = [module for module in MODULES if not is_port(module)]
    assert {module for module in others if any(map(is_port, imports_of(module)))} == PORT_USERS
    assert not [module for module in others if any(map(is_port, imports_of(module, only_at_once=True)))]


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
