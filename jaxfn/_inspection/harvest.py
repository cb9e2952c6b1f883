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
from dataclasses import dataclass
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
    while_sizes,
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
    inside = _Inside(equation, subprograms(equation), list(operands), probe, path)
    return _KINDS[inside.programs[-1].kind](inside)


@dataclass(frozen=True, eq=False)
class _Inside:
    """An equation that runs programs; what it gives and what is harvested in these, by the kind of equation."""

    equation: Any
    programs: list[Subprogram]
    operands: list[Any]
    probe: Probe
    path: Path

    def of(self, number: int, arguments: Sequence[Any]) -> tuple[list[Any], Harvest]:
        """The results of one of the programs, and what is harvested there."""
        program = self.programs[number]
        return harvest(program.jaxpr, program.consts, arguments, self.probe, (*self.path, number))

    def results_of_first(self, *arguments: Any) -> tuple[tuple[Any, ...], Harvest]:
        """The same of the first program."""
        results, harvested = self.of(0, arguments)
        return tuple(results), harvested

    def jit(self) -> tuple[Sequence[Any], Harvest]:
        if is_plain_jit(self.equation) and not stages_constants():  # it would be compiled anew at every call
            return self.results_of_first(*self.operands)

        def run(*operands: Any) -> tuple[Sequence[Any], Harvest]:
            return self.results_of_first(*operands)

        run.__name__ = run.__qualname__ = self.equation.params["name"]
        return jax.jit(run, **jit_options(self.equation))(*self.operands)

    def call(self) -> tuple[Sequence[Any], Harvest]:
        given = [self.operands[i] for i in self.programs[0].operands]
        if not self.probe.keeps_rules:
            return self.of(0, given)
        results, harvested = self.of(0, jax.lax.stop_gradient(given))
        if not self.equation.effects:
            return carry_out(self.equation, self.operands, is_of_jaxpr=True), harvested
        floating = [x for x in self.operands if is_inexact(jax.typeof(x).dtype)]
        refusal = Refusal(NotImplementedError, _HAS_EFFECTS)
        return attach(results, (), floating, refusal), harvested

    def checkpoint(self) -> tuple[Sequence[Any], Harvest]:
        params, operands = self.equation.params, self.operands
        prevent_cse = params["prevent_cse"]
        if params.get("differentiated", False):  # so that it is not merged with the first computation
            return self.results_of_first(*(jax.lax.optimization_barrier(operands) if prevent_cse else operands))
        return jax.checkpoint(self.results_of_first, prevent_cse=prevent_cse, policy=params["policy"])(*operands)

    def scan(self) -> tuple[Sequence[Any], Harvest]:
        params, (num_consts, num_carry) = self.equation.params, scan_sizes(self.equation)
        consts, carry, xs = parted(self.operands, num_consts, num_carry)

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], Harvest]]:
            results, harvested = self.of(0, [*consts, *carry, *xs])
            return results[:num_carry], (results[num_carry:], harvested)

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, harvested) = jax.lax.scan(body, carry, xs, **options)
        return [*carry, *ys], harvested

    def while_loop(self) -> tuple[Sequence[Any], Harvest]:
        self.probe.check_unreachable(self.programs[0].jaxpr, "the condition of a while loop")
        of_cond, of_body, init = parted(self.operands, *while_sizes(self.equation))

        def step(carry: list[Any]) -> tuple[list[Any], Harvest]:
            return self.of(1, [*of_body, *carry])

        def goes_on(state: Any) -> Any:
            return self.of(0, [*of_cond, *state[0]])[0][0]

        def next_state(state: Any) -> Any:
            carry, now = step(state[0])
            return carry, self.probe.later(state[1], now)

        nothing = {key: self.probe.absent(value) for key, value in jax.eval_shape(step, init)[1].items()}
        return jax.lax.while_loop(goes_on, next_state, (init, nothing))

    def cond(self) -> tuple[Sequence[Any], Harvest]:
        index, *operands = self.operands
        absent: Harvest = {}
        for number in range(len(self.programs)):
            absent |= jax.eval_shape(partial(self.of, number), operands)[1]

        def branch(number: int, *operands: Any) -> tuple[list[Any], Harvest]:
            results, harvested = self.of(number, operands)
            return results, {
                key: harvested[key] if key in harvested else self.probe.absent(absent[key]) for key in absent
            }

        branches = [partial(branch, number) for number in range(len(self.programs))]
        platforms = platforms_of_branches(self.equation)
        if platforms is None:
            return jax.lax.switch(index, branches, *operands)
        chosen = {name: run for names, run in zip(platforms, branches, strict=True) for name in names or ["default"]}
        return jax.lax.platform_dependent(*operands, **chosen)

    def shard_map(self) -> tuple[Sequence[Any], Harvest]:
        params, axes = self.equation.params, manual_axes(self.equation)
        names = tuple(name for name in params["mesh"].axis_names if name in axes)

        def body(*operands: Any) -> tuple[tuple[Any, ...], Harvest]:
            results, harvested = self.results_of_first(*operands)
            return results, {key: value[None] for key, value in harvested.items()}

        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec(names)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )
        return _compiled(mapped)(*self.operands)


_HAS_EFFECTS = (
    "A function that logs and has effects was put into with_logs and is differentiated outside of it, where forward "
    "would have to run twice. Differentiate inside: jaxfn.with_logs(jax.value_and_grad(f))."
)
_KINDS = {
    "jit": _Inside.jit,
    "call": _Inside.call,
    "checkpoint": _Inside.checkpoint,
    "scan": _Inside.scan,
    "while": _Inside.while_loop,
    "cond": _Inside.cond,
    "shard_map": _Inside.shard_map,
}


def parted(operands: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """So many operands, so many more, and the others."""
    return operands[:first], operands[first : first + second], operands[first + second :]


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
