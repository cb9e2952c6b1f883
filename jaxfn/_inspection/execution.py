"""`Execution`: runs a program one operation after the other, and notes what is not finite.

Loops are run step by step, and of a `cond` the branch that is taken. XLA would need minutes to compile a program that
also brings out whether each of some thousand values is finite; single operations it has compiled before. Only what a
`shard_map` runs is compiled as a whole, by way of `harvest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import carry_out, is_variable, named_as, scan_sizes, while_sizes
from jaxfn._inspection.harvest import Harvest, Path, Probe, harvest_programs, parted
from jaxfn._inspection.subprograms import Subprogram, subprograms
from jaxfn._values.arrays import is_inexact
from jaxfn._values.varying import zeros_in_place_of


class Noted(NamedTuple):
    """The first NaN of a value, or else its first infinity.

    Attributes:
      number: "nan", "inf" or "-inf".
      shape: of the value.
      place: the index of the number.
    """

    number: str
    shape: tuple[int, ...]
    place: tuple[int, ...]

    def told(self, operation: str) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
        """What is told of it, with the operation that made it."""
        return self.number, operation, self.shape, self.place


def first_not_finite(value: Any) -> Noted | None:
    """The first NaN of an array, or else its first infinity, if any."""
    if not np.size(value) or not is_inexact(jax.typeof(value).dtype) or bool(_is_finite(value)):
        return None
    value = np.asarray(value)
    nans = np.isnan(value)
    index = tuple(np.argwhere(nans if nans.any() else ~np.isfinite(value))[0])
    return Noted(_name(value[index]), value.shape, tuple(map(int, index)))


@jax.jit
def _is_finite(value: Any) -> Any:
    return jnp.isfinite(value).all()


def _name(number: Any) -> str:
    return "nan" if np.isnan(number) else "inf" if number.real > 0 else "-inf"


_HAVE_STEPS = ("scan", "while", "shard_map")


class Frame(NamedTuple):
    """A program in the midst of the programs that run it, in one of its steps.

    Attributes:
      jaxpr: the program.
      path: numbers of equations, and of the programs that they run, from outside.
      steps: which step of each loop, in the order in which they run, and which device of each `shard_map`.
      outer: the frame of the equation that runs it, that equation's number, and the program; `None` for the whole.
      is_last: whether no other step follows.
    """

    jaxpr: Any
    path: Path
    steps: tuple[int, ...]
    outer: tuple[Frame, int, Subprogram] | None
    is_last: bool = True

    @property
    def step(self) -> int:
        """Which step of the innermost loop."""
        return self.steps[-1]

    @property
    def order(self) -> tuple[int, ...]:
        """Comes before that of another frame where this one runs first."""
        if self.outer is None:
            return ()
        frame, number, _ = self.outer
        return (*frame.order, number, self.step if len(self.steps) > len(frame.steps) else 0)


class Execution:
    """One run of a program.

    Args:
      jaxpr, consts: the program.
      arguments: its arguments.

    Attributes:
      noted: by path and steps of a frame, and variable, what is not finite.
      selected: by the same, of what a `select_n` made: which operand that number is of.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> None:
        self.noted: dict[tuple[Path, tuple[int, ...], Any], Noted] = {}
        self.selected: dict[tuple[Path, tuple[int, ...], Any], int] = {}
        self._num_steps: dict[tuple[Path, tuple[int, ...]], int] = {}  # of the programs that ran
        self._compiled: dict[int, Callable[..., tuple[Sequence[Any], Harvest]]] = {}
        self._run(jaxpr, consts, arguments, (), ())

    def frames_inside(self, frame: Frame, number: int) -> Iterator[Frame]:
        """The frames of the programs that an equation has run, in order."""
        for i, program in enumerate(subprograms(frame.jaxpr.eqns[number])):
            path = (*frame.path, number, i)
            num_steps = self._num_steps.get((path, frame.steps), 0)
            for step in range(num_steps):
                steps = (*frame.steps, step) if program.kind in _HAVE_STEPS else frame.steps
                yield Frame(program.jaxpr, path, steps, (frame, number, program), step == num_steps - 1)

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], path: Path, steps: tuple[int, ...]
    ) -> list[Any]:
        values: dict[Any, Any] = {}

        def bind(variables: Sequence[Any], new: Sequence[Any]) -> None:
            for variable, value in zip(variables, new, strict=True):
                values[variable] = value
                noted = first_not_finite(value)
                if noted is not None:
                    self.noted[path, steps, variable] = noted

        def read(atom: Any) -> Any:
            return values[atom] if is_variable(atom) else atom.val

        bind([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments])
        for number, equation in enumerate(jaxpr.eqns):
            operands, programs = [read(atom) for atom in equation.invars], subprograms(equation)
            if programs:
                with named_as(equation, is_of_jaxpr=True):
                    results = self._run_programs(equation, programs, operands, (*path, number), steps)
            else:
                results = carry_out(equation, operands, is_of_jaxpr=True)
            bind(equation.outvars, results)
            key = (path, steps, equation.outvars[0]) if equation.outvars else None
            if equation.primitive.name == "select_n" and key in self.noted:
                which = np.asarray(operands[0])
                self.selected[key] = 1 + int(which[self.noted[key].place] if which.ndim else which)
        return [read(atom) for atom in jaxpr.outvars]

    def _run_programs(
        self, equation: Any, programs: list[Subprogram], operands: list[Any], path: Path, steps: tuple[int, ...]
    ) -> Sequence[Any]:
        kind = programs[-1].kind
        if kind == "scan":
            return self._run_scan(equation, programs[0], operands, path, steps)
        if kind == "while":
            return self._run_while(equation, programs, operands, path, steps)
        if kind == "shard_map":
            return self._run_on_devices(equation, operands, path, steps)
        taken = int(operands[0]) if kind == "cond" else 0
        program = programs[taken]
        return self._run_step(program, [operands[i] for i in program.operands], (*path, taken), steps)

    def _run_step(
        self, program: Subprogram, operands: Sequence[Any], path: Path, steps: tuple[int, ...], step: int | None = None
    ) -> list[Any]:
        self._num_steps[path, steps] = 1 if step is None else step + 1
        return self._run(program.jaxpr, program.consts, operands, path, steps if step is None else (*steps, step))

    def _run_scan(
        self, equation: Any, program: Subprogram, operands: list[Any], path: Path, steps: tuple[int, ...]
    ) -> list[Any]:
        num_consts, num_carry = scan_sizes(equation)
        length: Any = program.length
        consts, carry, xs = parted(operands, num_consts, num_carry)
        stacked: list[list[Any]] = []
        for step in range(length):
            place = length - 1 - step if program.is_reversed else step
            own = [jax.lax.index_in_dim(x, place, keepdims=False) for x in xs]
            results = self._run_step(program, [*consts, *carry, *own], (*path, 0), steps, step)
            carry = results[:num_carry]
            stacked.append(results[num_carry:])
        if not length:
            return [*carry, *(jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars[num_carry:])]
        return [*carry, *map(jnp.stack, zip(*(stacked[::-1] if program.is_reversed else stacked), strict=True))]

    def _run_while(
        self, equation: Any, programs: list[Subprogram], operands: list[Any], path: Path, steps: tuple[int, ...]
    ) -> Sequence[Any]:
        cond, body = programs
        of_cond, of_body, carry = parted(operands, *while_sizes(equation))
        step = 0
        while bool(self._run(cond.jaxpr, cond.consts, [*of_cond, *carry], (*path, 0), (*steps, step))[0]):
            carry = self._run_step(body, [*of_body, *carry], (*path, 1), steps, step)
            step += 1
        return carry

    def _run_on_devices(self, equation: Any, operands: list[Any], path: Path, steps: tuple[int, ...]) -> Sequence[Any]:
        if id(equation) not in self._compiled:  # which is run once for each step of loops around it

            def run(*operands: Any) -> tuple[Sequence[Any], Harvest]:
                return harvest_programs(equation, operands, _FirstNumbers())

            self._compiled[id(equation)] = jax.jit(run)
        results, harvested = self._compiled[id(equation)](*operands)
        for inner, states in jax.device_get(harvested).items():
            for where in np.argwhere(states[..., 0] >= 0):
                self._note_inside(subprograms(equation), inner, list(where), states[tuple(where)], path, steps)
        return results

    def _note_inside(
        self,
        programs: Sequence[Subprogram],
        inner: Path,
        where: list[int],
        state: Any,
        path: Path,
        steps: tuple[int, ...],
    ) -> None:
        """Notes a value inside of what was harvested: by its path there, and where it is in the axes of steps."""
        program, path, inner = programs[inner[0]], (*path, inner[0]), inner[1:]
        length: Any = program.length
        step = 0
        if program.kind in ("scan", "shard_map"):
            step = length - 1 - int(where.pop(0)) if program.is_reversed else int(where.pop(0))
        steps_inside = (*steps, step) if program.kind in _HAVE_STEPS else steps
        num_steps = length if program.kind == "scan" else step + 1
        self._num_steps[path, steps] = max(num_steps, self._num_steps.get((path, steps), 0))
        if inner[0] == -1:
            variable = program.jaxpr.invars[inner[1]]
        elif inner[1] == -1:
            variable = program.jaxpr.eqns[inner[0]].outvars[inner[2]]
        else:
            deeper = subprograms(program.jaxpr.eqns[inner[0]])
            self._note_inside(deeper, inner[1:], where, state, (*path, inner[0]), steps_inside)
            return
        shape = variable.aval.shape
        index = tuple(map(int, np.unravel_index(int(state[0]), shape)))
        self.noted[path, steps_inside, variable] = Noted(("nan", "inf", "-inf")[state[1]], shape, index)


class _FirstNumbers(Probe):
    """For each value, the flat index of the first NaN, or else first infinity, or -1; and of which kind it is."""

    def is_wanted(self, equation: Any) -> bool:
        return any(is_inexact(v.aval.dtype) for v in equation.outvars if hasattr(v.aval, "dtype"))

    def values(self, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        return [_first_number(x) for x in results]

    def argument_values(self, jaxpr: Any, arguments: Sequence[Any]) -> dict[int, Any]:
        return {i: _first_number(x) for i, x in enumerate(arguments)}

    def absent(self, value: Any) -> Any:
        return zeros_in_place_of(value) + _NOTHING

    def later(self, before: Harvest, now: Harvest) -> Harvest:
        """Those of the first step that has something."""
        has_something = jnp.stack([(state[..., 0] >= 0).any() for state in before.values()]).any()
        return {key: jnp.where(has_something, before[key], now[key]) for key in now}


_NOTHING = np.array([-1, 0], np.int32)


def _first_number(x: Any) -> Any:
    if not np.size(x) or not is_inexact(jax.typeof(x).dtype):
        return jnp.asarray(_NOTHING)
    x = jnp.ravel(x)
    nans = jnp.isnan(x)
    bad = jnp.where(nans.any(), nans, ~jnp.isfinite(x))
    first = jnp.argmax(bad)
    kind = jnp.where(jnp.isnan(x[first]), 0, jnp.where(jnp.real(x[first]) > 0, 1, 2))
    return jnp.where(bad.any(), jnp.stack([first, kind]), _NOTHING).astype(jnp.int32)
