"""Runs a program once more as JAX code, and brings values out of it from wherever they are: loops, branches, devices.

# Note: a value comes out with an axis for each loop around it

Values cannot leave a `scan`, a `cond` or a `shard_map` by themselves, so each is written anew with more results:

    scan         its values are further outputs, stacked along an axis for the steps
    while        they are carried along: those of one step, which the `Probe` chooses
    cond         every branch returns the values of all branches, `Probe.absent` for those of the others
    shard_map    an axis for the devices comes first
    jit          what it calls has further results; outside of `jit` it is written in its place, if that is the same
    other calls  what they call is written in their place

So no callback is needed, and what comes out is part of the program, under `jit` and on every device. A value is found
again by its path: numbers of equations and of the programs that they run, from outside, and its place in the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxfn._compat import (
    carry_out,
    is_plain_jit,
    is_variable,
    jit_options,
    manual_axes,
    named_as,
    platforms_of_branches,
    scan_sizes,
    stages_constants,
)
from jaxfn._inspection.subprograms import Subprogram, any_equation, subprograms, unknown_programs
from jaxfn._primitives.attach import attach
from jaxfn._primitives.refusal import Refusal
from jaxfn._values.arrays import is_inexact

Path = tuple[int, ...]
Harvest = dict[Path, Any]


class Probe:
    """What is brought out of a program.

    Attributes:
      keeps_rules: whether the program can be differentiated as before. Calls with a custom derivative are then made as
        they are, and what they call is written a second time for its values.
    """

    keeps_rules: bool = False

    def is_wanted(self, equation: Any) -> bool:
        """Whether an equation has values to be brought out."""
        raise NotImplementedError

    def values(self, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Its values."""
        raise NotImplementedError

    def absent(self, value: Any) -> Any:
        """What stands for a value of this type where it is not computed."""
        raise NotImplementedError

    def later(self, before: Harvest, now: Harvest) -> Harvest:
        """Which of the values of two steps of a `while` loop are kept."""
        raise NotImplementedError

    def check_unreachable(self, jaxpr: Any, what: str) -> None:
        """Raises where a program has values that are wanted and cannot be brought out, because of what it is."""

    def argument_values(self, jaxpr: Any, arguments: Sequence[Any]) -> dict[int, Any]:
        """What is wanted of the arguments of a program inside, by their places."""
        return {}


def harvest(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], probe: Probe, path: Path = ()
) -> tuple[list[Any], Harvest]:
    """The results of a program, and the values that the probe wants."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    given = probe.argument_values(jaxpr, arguments) if path else {}
    harvested: Harvest = {(*path, -1, place): value for place, value in given.items()}

    def read(atom: Any) -> Any:
        return values[atom] if is_variable(atom) else atom.val

    for number, equation in enumerate(jaxpr.eqns):
        operands, own = [read(atom) for atom in equation.invars], (*path, number)
        programs = subprograms(equation)
        if any(any_equation(program.jaxpr, probe.is_wanted) for program in programs):
            with named_as(equation, is_of_jaxpr=True):
                results, inner = harvest_programs(equation, operands, probe, own)
            harvested |= inner
        else:
            for name, program in unknown_programs(equation):
                probe.check_unreachable(program, name)
            results = _carried_out(equation, programs, operands)
        if probe.is_wanted(equation):
            harvested |= {(*own, -1, i): value for i, value in enumerate(probe.values(equation, operands, results))}
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars], harvested


def _carried_out(equation: Any, programs: list[Subprogram], operands: list[Any]) -> Sequence[Any]:
    def run(*operands: Any) -> Sequence[Any]:
        return list(carry_out(equation, operands, is_of_jaxpr=True))

    is_on_devices = bool(programs) and programs[0].kind == "shard_map"
    return (_compiled(run) if is_on_devices else run)(*operands)


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, which JAX does not run eagerly: in a `shard_map` it refuses a custom_vjp then (0.10.0 to 0.12.0)."""
    return run if stages_constants() else jax.jit(run)


def harvest_programs(
    equation: Any, operands: Sequence[Any], probe: Probe, path: Path = ()
) -> tuple[Sequence[Any], Harvest]:
    """The same of an equation that runs programs."""
    programs = subprograms(equation)
    return _KINDS[programs[-1].kind](equation, programs, list(operands), probe, path)


def _inner(program: Subprogram, arguments: Sequence[Any], probe: Probe, path: Path) -> tuple[list[Any], Harvest]:
    return harvest(program.jaxpr, program.consts, arguments, probe, path)


def _jit(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[Sequence[Any], Harvest]:
    def run(*operands: Any) -> tuple[tuple[Any, ...], Harvest]:
        results, harvested = _inner(programs[0], operands, probe, (*path, 0))
        return tuple(results), harvested

    if is_plain_jit(equation) and not stages_constants():  # it would be compiled anew at every call
        return run(*operands)
    run.__name__ = run.__qualname__ = equation.params["name"]
    return jax.jit(run, **jit_options(equation))(*operands)


def _call(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[Sequence[Any], Harvest]:
    given = [operands[i] for i in programs[0].operands]
    if not probe.keeps_rules:
        return _inner(programs[0], given, probe, (*path, 0))
    results, harvested = _inner(programs[0], jax.lax.stop_gradient(given), probe, (*path, 0))
    if not equation.effects:
        return carry_out(equation, operands, is_of_jaxpr=True), harvested
    floating = [x for x in operands if is_inexact(jax.typeof(x).dtype)]
    return attach(results, (), floating, Refusal(NotImplementedError, _HAS_EFFECTS), made_is_detached=True), harvested


_HAS_EFFECTS = (
    "A function that logs and has effects was put into with_logs and is differentiated outside of it, where forward "
    "would have to run twice. Differentiate inside: jaxfn.with_logs(jax.value_and_grad(f))."
)


def _checkpoint(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[list[Any], Harvest]:
    params = equation.params

    def rematerialized(*operands: Any) -> Any:
        return _inner(programs[0], operands, probe, (*path, 0))

    if params.get("differentiated", False):  # so that it is not merged with the first computation
        return rematerialized(*(jax.lax.optimization_barrier(operands) if params["prevent_cse"] else operands))
    return jax.checkpoint(rematerialized, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)


def _scan(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[list[Any], Harvest]:
    params, (program,), (num_consts, num_carry) = equation.params, programs, scan_sizes(equation)
    consts, carry, xs = _parted(operands, num_consts, num_carry)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], Harvest]]:
        results, harvested = _inner(program, [*consts, *carry, *xs], probe, (*path, 0))
        return results[:num_carry], (results[num_carry:], harvested)

    carry, (ys, harvested) = jax.lax.scan(
        body, carry, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys], harvested


def _parted(operands: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return operands[:first], operands[first : first + second], operands[first + second :]


def _while(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[list[Any], Harvest]:
    cond, body = programs
    probe.check_unreachable(cond.jaxpr, "the condition of a while loop")
    num_of_cond, num_of_body = len(cond.operands) - len(equation.outvars), len(body.operands) - len(equation.outvars)
    of_cond, of_body, init = _parted(operands, num_of_cond, num_of_body)

    def step(carry: list[Any]) -> tuple[list[Any], Harvest]:
        return _inner(body, [*of_body, *carry], probe, (*path, 1))

    def goes_on(state: Any) -> Any:
        return _inner(cond, [*of_cond, *state[0]], probe, path)[0][0]

    def next_state(state: Any) -> Any:
        carry, now = step(state[0])
        return carry, probe.later(state[1], now)

    nothing = {key: probe.absent(value) for key, value in jax.eval_shape(step, init)[1].items()}
    return jax.lax.while_loop(goes_on, next_state, (init, nothing))


def _cond(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[list[Any], Harvest]:
    index, *operands = operands

    def of_branch(number: int, *operands: Any) -> Harvest:
        return _inner(programs[number], operands, probe, (*path, number))[1]

    absent: Harvest = {}
    for i in range(len(programs)):
        absent |= jax.eval_shape(partial(of_branch, i), *operands)

    def branch(number: int, program: Subprogram) -> Any:
        def run(*operands: Any) -> tuple[list[Any], Harvest]:
            results, harvested = _inner(program, operands, probe, (*path, number))
            return results, {key: harvested[key] if key in harvested else probe.absent(absent[key]) for key in absent}

        return run

    branches = [branch(i, program) for i, program in enumerate(programs)]
    platforms = platforms_of_branches(equation)
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    chosen = {name: run for names, run in zip(platforms, branches, strict=True) for name in names or ["default"]}
    return jax.lax.platform_dependent(*operands, **chosen)


def _shard_map(
    equation: Any, programs: list[Subprogram], operands: list[Any], probe: Probe, path: Path
) -> tuple[Sequence[Any], Harvest]:
    params, axes = equation.params, manual_axes(equation)
    names = tuple(name for name in params["mesh"].axis_names if name in axes)

    def body(*operands: Any) -> tuple[tuple[Any, ...], Harvest]:
        results, harvested = _inner(programs[0], operands, probe, (*path, 0))
        return tuple(results), {key: value[None] for key, value in harvested.items()}

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(names)),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    return _compiled(mapped)(*operands)


_KINDS = {
    "jit": _jit,
    "call": _call,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


class Place(NamedTuple):
    """Where a value comes from.

    Attributes:
      equation: the equation that it is of.
      number: which of the equation's values it is.
      around: the equations that it lies in, from outside, each with the program of it.
    """

    equation: Any
    number: int
    around: list[tuple[Any, Subprogram]]

    @property
    def names(self) -> str:
        """The names of all of them, as in compiled programs."""
        equations = [*(equation for equation, _ in self.around), self.equation]
        return "/".join(filter(None, (str(equation.source_info.name_stack) for equation in equations)))


def place_of(jaxpr: Any, path: Path) -> Place:
    """The place of a value that was harvested from a program."""
    around: list[tuple[Any, Subprogram]] = []
    *outer, number, _, index = path
    for equation_number, program_number in zip(outer[::2], outer[1::2], strict=True):
        equation = jaxpr.eqns[equation_number]
        around.append((equation, subprograms(equation)[program_number]))
        jaxpr = around[-1][1].jaxpr
    return Place(jaxpr.eqns[number], index, around)
