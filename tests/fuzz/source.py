"""A program as Python source that runs by itself, and says what differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tests.fuzz.functions import FunctionSpec, arguments_of, value_of, write_by_hand, write_factory, write_function
from tests.fuzz.functions import write_twin as write_plain
from tests.fuzz.infer import Scope, types_of
from tests.fuzz.measures import HELPERS, source_of
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import Argument, Block, Call, Operation, Program, Statement, Wrap

Twin = Callable[[FunctionSpec, str], list[str]]
"""Lines that define, under a name, what stands beside a Function."""

POLICIES = {
    "none": "",
    "nothing": ", policy=jax.checkpoint_policies.nothing_saveable",
    "everything": ", policy=jax.checkpoint_policies.everything_saveable",
    "dots": ", policy=jax.checkpoint_policies.dots_saveable",
    "named": ', policy=jax.checkpoint_policies.save_only_these_names("kept")',
}

_IMPORTS = """import jax, jaxfn
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import stop_gradient
"""

_COMPARISON = """
got, want = measure(program(*FUNCTIONS)), measure(program(*TWINS))
print("jaxfn:", got, "twins:", want, sep="\\n")
assert jax.tree.structure(got) == jax.tree.structure(want)
for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol={tolerance}, atol={tolerance} * scale(want)
    )
"""

_COUNTS = """
def counted_runs(run):
    RUNS["count"] = 0
    f, counts = measured(run), []
    for _ in range(2):
        result = jax.block_until_ready(f(*ARGUMENTS))
        jax.effects_barrier()
        counts.append(RUNS["count"])
    return result, counts
"""

_COMPARISON_OF_COUNTS = """
(got, ours), (_, theirs) = counted_runs(program(*FUNCTIONS)), counted_runs(program(*TWINS))
print("forward ran", ours, "times with jaxfn, after one call and after two, and by hand", theirs, got)
assert ours == theirs
"""

_EULER = """if isinstance(got, tuple):
    np.testing.assert_allclose(got[0], jnp.vdot(got[1], ARGUMENTS[0]), rtol=1e-4, atol=1e-4)
"""

_SCALE = '''
def scale(tree):
    """The largest number in it, and at least 1."""
    sizes = [np.nanmax(np.abs(np.asarray(x, np.float32)), initial=1) for x in jax.tree.leaves(tree)]
    return max([x for x in sizes if np.isfinite(x)], default=1)
'''


def write(program: Program, twin: Twin | None = None) -> str:
    """Source that defines `program(functions) -> run`, `FUNCTIONS`, `TWINS`, `ARGUMENTS` and `measure(run)`."""
    scope = types_of(program)
    specs = program.functions
    names = {spec: f"F{i}" for i, spec in enumerate(specs)}
    twin = twin or (write_by_hand if program.stateful else write_plain)
    sections: list[Sequence[str]] = []
    for spec, name in names.items():
        sections.append(write_factory(write_function(spec, name), spec, name, value_of(spec, name)))
        sections.append(write_factory(twin(spec, f"T{name[1:]}"), spec, f"T{name[1:]}", f"T{name[1:]}"))
    lowered = [name.lower() for name in names.values()]
    body = _block(program.block, "run", names, scope)
    sections.append([f"def program({', '.join(lowered)}):", *_indented([*body, "", "return run"])])
    makers = [_value(spec, name) for spec, name in names.items()]
    twins = [f"make_T{n[1:]}" if spec.mathematics.closed else f"T{n[1:]}" for spec, n in names.items()]
    sections.append([
        f"FUNCTIONS = {_tuple(makers)}", f"TWINS = {_tuple(twins)}",
        f"ARGUMENTS = {_tuple([_argument(a) for a in program.arguments])}",
    ])  # fmt: skip
    sections.append(_measure(program))
    text = "\n\n\n".join("\n".join(section) for section in sections)
    return f"{_IMPORTS}\n{_helpers(text)}\n{text}\n"


def write_alone(program: Program, tolerance: float) -> str:
    """The same with the devices that it needs, and the comparison, which raises where something differs."""
    devices = max([wrap.options.devices for wrap in program.wraps], default=1)
    setting = f'jax.config.update("jax_num_cpu_devices", {devices})\n' if devices > 1 else ""
    text = write(program).replace(_IMPORTS, _IMPORTS + "\n" + setting if setting else _IMPORTS)
    if program.stateful:
        return text + "\n" + _COUNTS + "\n" + _COMPARISON_OF_COUNTS + _EULER
    return text + "\n" + _SCALE + "\n" + _COMPARISON.format(tolerance=tolerance)


def _measure(program: Program) -> list[str]:
    measure = program.measure
    derived = source_of(measure.name, program.stateful)
    lines = []
    if re.search(r"\bloss\b", derived):
        lines += ["def loss(*args):", "    return loss_of(run(*args))", ""]
    if "linear_loss" in derived:
        lines += ["def linear_loss(*args):", "    return weighted(run(*args))", ""]
    if "argnums" in derived:
        lines.append(f"argnums = {measure.argnums}")
    lines.append(f"return jax.jit({derived})" if measure.is_jitted else f"return {derived}")
    return [
        "def measured(run):", *_indented(lines), "", "",
        "def measure(run):", "    return measured(run)(*ARGUMENTS)",
    ]  # fmt: skip


def _helpers(text: str) -> str:
    """The helpers that a text uses, and those that these use."""
    used: set[str] = set()
    while True:
        everything = text + "".join(HELPERS[name] for name in used)
        more = {name for name in HELPERS if re.search(rf"\b{name}\b", everything)}
        if more <= used:
            return "\n".join(HELPERS[name] for name in HELPERS if name in used)
        used |= more


def _value(spec: FunctionSpec, name: str) -> str:
    return f"make_{name}" if spec.mathematics.closed else value_of(spec, name)


def _argument(argument: Argument) -> str:
    """An expression for an argument's value: floats away from zero, integers from -3 to 3."""
    shape, generator = argument.shape, f"np.random.default_rng({argument.seed})"
    if argument.dtype == "int32":
        return f"jnp.asarray({generator}.integers(-3, 4, {shape}), jnp.int32)"
    return f"jnp.asarray({generator}.uniform(-2, 2, {shape}), jnp.{argument.dtype})"


def _block(block: Block, name: str, names: dict[FunctionSpec, str], scope: Scope, label: str = "") -> list[str]:
    lines = [f"def {name}({', '.join(block.parameters)}):"]
    for statement in block.statements:
        lines += _indented(_statement(statement, names, scope))
    results = [f'jax.lax.psum({r}, "d")' if label and _is_summed(r, label, scope) else r for r in block.results]
    return [*lines, f"    return {_tuple(results)}"]


def _is_summed(name: str, label: str, scope: Scope) -> bool:
    """Whether a result differs between devices and has no axis to be put together along."""
    return label in scope[name].batches and not scope[name].rank


def _statement(statement: Statement, names: dict[FunctionSpec, str], scope: Scope) -> list[str]:
    if isinstance(statement, Operation):
        expression = OPERATIONS[statement.name].source.format(*statement.inputs)
        return [f"{statement.output} = {expression}"]
    if isinstance(statement, Call):
        function = names[statement.function].lower()
        closed = f"({', '.join(statement.closed)})" if statement.closed else ""
        call = f"{function}{closed}({arguments_of(statement.function, statement.inputs)})"
        return [f"{', '.join(statement.outputs)} = {call}"]
    is_manual = statement.kind == "shard_map"
    label = statement.label if is_manual else ""
    return [*_block(statement.block, statement.label, names, scope, label), _applied(statement, scope)]


def _applied(wrap: Wrap, scope: Scope) -> str:
    """The line that calls a block under its transformation."""
    f, inputs, options = wrap.label, ", ".join(wrap.inputs), wrap.options
    outputs, first, rest = _tuple(wrap.outputs), wrap.inputs[0], wrap.inputs[1:]
    tail = "".join(f", {name}" for name in rest)
    if wrap.kind == "jit":
        return f"{outputs} = jax.jit({f})({inputs})"
    if wrap.kind == "checkpoint":
        return f"{outputs} = jax.checkpoint({f}{POLICIES[options.policy]})({inputs})"
    if wrap.kind == "vmap":
        return f"{outputs} = jax.vmap({f}, in_axes={options.in_axes}, out_axes={options.out_axes})({inputs})"
    if wrap.kind == "scan":
        constants = "".join(f", {name}" for name in rest[1:])
        step = f"lambda carry, x: {f}(carry, x{constants})"
        return f"{outputs} = jax.lax.scan({step}, {first}, {rest[0]})"
    if wrap.kind == "map":
        return f"{outputs} = jax.lax.map(lambda xs: {f}(*xs), {_tuple(wrap.inputs)})"
    if wrap.kind == "cond":
        other = f"lambda x, *others: {f}(0.5 * x, *others)"
        return f"{outputs} = jax.lax.cond(jnp.sum({first}) > 0.1, {f}, {other}, {inputs})"
    if wrap.kind == "fori":
        return f"{outputs} = (jax.lax.fori_loop(0, {options.length}, lambda i, x: {f}(x{tail})[0], {first}),)"
    if wrap.kind == "while":
        step = f"lambda state: (state[0] + 1, {f}(state[1]{tail})[0])"
        loop = f"jax.lax.while_loop(lambda state: state[0] < {options.length}, {step}, (0, {first}))"
        return f"{outputs} = ({loop}[1],)"
    if wrap.kind == "gradient":
        return f"{outputs} = (jax.grad(lambda *p: loss_of({f}(*p)))({inputs}),)"
    if wrap.kind == "pushed":
        return f"{outputs} = jax.jvp(lambda x: {f}(x{tail}), ({first},), (jnp.cos({first}),))[1]"
    split = [("d",) if axis == 0 else () for axis in options.in_axes]
    if wrap.kind == "sharded jit":
        shardings = [f"sharding({options.devices}{', ' if s else ''}{repr('d') if s else ''})" for s in split]
        return f"{outputs} = jax.jit({f}, in_shardings={_tuple(shardings)})({inputs})"
    results = [scope[name] for name in wrap.block.results]
    specs = ['jax.P("d")' if s else "jax.P()" for s in split]
    out_specs = ['jax.P("d")' if t.rank and wrap.label in t.batches else "jax.P()" for t in results]
    mesh = f"sharding({options.devices}).mesh"
    arguments = f"mesh={mesh}, in_specs={_tuple(specs)}, out_specs={_tuple(out_specs)}, check_vma={options.check_vma}"
    return f"{outputs} = jax.shard_map({f}, {arguments})({inputs})"


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else line for line in lines]
