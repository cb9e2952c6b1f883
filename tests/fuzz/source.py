"""A program as a complete Python program, which says what differs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence

from tests.fuzz import compare
from tests.fuzz.functions import (
    FunctionSpec,
    arguments_of,
    indented,
    tuple_of,
    value_of,
    write_factory,
    write_function,
    write_hand_written,
)
from tests.fuzz.functions import write_twin as write_plain
from tests.fuzz.infer import Scope, types_of
from tests.fuzz.measures import HELPERS, source_of
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import Argument, Block, Call, Operation, Program, Statement, Wrap

Twin = Callable[[FunctionSpec, str], list[str]]
"""Lines that define, under a name, the twin of a Function."""

POLICIES = {
    "none": "",
    "nothing": ", policy=jax.checkpoint_policies.nothing_saveable",
    "everything": ", policy=jax.checkpoint_policies.everything_saveable",
    "dots": ", policy=jax.checkpoint_policies.dots_saveable",
    "named": ', policy=jax.checkpoint_policies.save_only_these_names("named")',
}

_IMPORTS = """import jax, jaxfn
import jax.custom_batching
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import stop_gradient
"""

_COMPARISON = """
got, want = ({run} for side in (FUNCTIONS, TWINS))
print("jaxfn:", got, "twins:", want, sep="\\n")
message = {difference}
assert not message, message
"""


def write(program: Program, twin: Twin | None = None) -> str:
    """Source that defines `program(functions) -> run`, `FUNCTIONS`, `TWINS`, `ARGUMENTS` and `measured(run)`."""
    scope = types_of(program)
    specs = program.functions
    names = {spec: f"F{i}" for i, spec in enumerate(specs)}
    twin = twin or (write_hand_written if program.stateful else write_plain)
    sections: list[Sequence[str]] = []
    for spec, name in names.items():
        sections.append(write_factory(write_function(spec, name), spec, name, value_of(spec, name)))
        sections.append(write_factory(twin(spec, f"T{name[1:]}"), spec, f"T{name[1:]}", f"T{name[1:]}"))
    lowered = [name.lower() for name in names.values()]
    body = _block(program.block, "run", names, scope)
    sections.append([f"def program({', '.join(lowered)}):", *indented([*body, "", "return run"])])
    makers = [_value(spec, name) for spec, name in names.items()]
    twins = [f"make_T{n[1:]}" if spec.mathematics.closed else f"T{n[1:]}" for spec, n in names.items()]
    sections.append([
        f"FUNCTIONS = {tuple_of(makers)}", f"TWINS = {tuple_of(twins)}",
        f"ARGUMENTS = {tuple_of([_argument(a) for a in program.arguments])}",
    ])  # fmt: skip
    sections.append(_measure(program))
    text = "\n\n\n".join("\n".join(section) for section in sections)
    return f"{_IMPORTS}\n{_helpers(text)}\n{text}\n"


def write_alone(program: Program, tolerance: float) -> str:
    """The source with the devices that it needs, and the comparison, which raises where something differs."""
    devices = max([wrap.options.devices for wrap in program.wraps], default=1)
    setting = f'jax.config.update("jax_num_cpu_devices", {devices})\n' if devices > 1 else ""
    text = write(program).replace(_IMPORTS, _IMPORTS + "\n" + setting if setting else _IMPORTS)
    functions, run = [compare.difference], "measured(program(*side))(*ARGUMENTS)"
    call = f"difference(got, want, {tolerance})"
    if program.stateful:
        functions = [compare.result_and_runs, compare.is_of_one_draw, compare.difference_of_counts]
        run = "result_and_runs(measured(program(*side)), ARGUMENTS, RUNS)"
        call = f"difference_of_counts(got, want, *ARGUMENTS, {tolerance})"
    sources = ["from typing import Any\n", *map(inspect.getsource, functions)]
    return text + "\n\n" + "\n\n".join(sources) + _COMPARISON.format(run=run, difference=call)


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
    return ["def measured(run):", *indented(lines)]


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
        lines += indented(_statement(statement, names, scope))
    results = [f'jax.lax.psum({r}, "d")' if label and _is_summed(r, label, scope) else r for r in block.results]
    return [*lines, f"    return {tuple_of(results)}"]


def _is_summed(name: str, label: str, scope: Scope) -> bool:
    """Whether a result differs between devices and has no axis to be concatenated along."""
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


# What calls a block `f` under its transformation; `first` is the first input, `tail` the others, each after a comma.
_CALLS = {
    "jit": "jax.jit({f})({inputs})",
    "checkpoint": "jax.checkpoint({f}{policy})({inputs})",
    "vmap": "jax.vmap({f}, in_axes={options.in_axes}, out_axes={options.out_axes})({inputs})",
    "scan": "jax.lax.scan(lambda carry, x: {f}(carry, x{constants}), {first}, {second})",
    "map": "jax.lax.map(lambda xs: {f}(*xs), {all_inputs})",
    "cond": "jax.lax.cond(jnp.sum({first}) > 0.1, {f}, lambda x, *others: {f}(0.5 * x, *others), {inputs})",
    "fori": "(jax.lax.fori_loop(0, {options.length}, lambda i, x: {f}(x{tail})[0], {first}),)",
    "while": "(jax.lax.while_loop(lambda state: state[0] < {options.length}, "
    "lambda state: (state[0] + 1, {f}(state[1]{tail})[0]), (0, {first}))[1],)",
    "gradient": "(jax.grad(lambda *p: loss_of({f}(*p)))({inputs}),)",
    "pushed": "jax.jvp(lambda x: {f}(x{tail}), ({first},), (jnp.cos({first}),))[1]",
    "sharded jit": "jax.jit({f}, in_shardings={shardings})({inputs})",
    "shard_map": "jax.shard_map({f}, mesh=sharding({options.devices}).mesh, in_specs={in_specs}, "
    "out_specs={out_specs}, check_vma={options.check_vma})({inputs})",
}


def _applied(wrap: Wrap, scope: Scope) -> str:
    """The line that calls a block under its transformation."""
    options, results = wrap.options, [scope[name] for name in wrap.block.results]
    is_split = [axis == 0 for axis in options.in_axes]
    sharding = f"sharding({options.devices}"
    call = _CALLS[wrap.kind].format(
        f=wrap.label,
        options=options,
        inputs=", ".join(wrap.inputs),
        all_inputs=tuple_of(wrap.inputs),
        first=wrap.inputs[0],
        second=wrap.inputs[1] if len(wrap.inputs) > 1 else "",
        tail="".join(f", {name}" for name in wrap.inputs[1:]),
        constants="".join(f", {name}" for name in wrap.inputs[2:]),
        policy=POLICIES[options.policy],
        shardings=tuple_of([f"{sharding}, 'd')" if split else f"{sharding})" for split in is_split]),
        in_specs=tuple_of([_spec(split) for split in is_split]),
        out_specs=tuple_of([_spec(bool(t.rank) and wrap.label in t.batches) for t in results]),
    )
    return f"{tuple_of(wrap.outputs)} = {call}"


def _spec(is_split: bool) -> str:
    return 'jax.P("d")' if is_split else "jax.P()"
