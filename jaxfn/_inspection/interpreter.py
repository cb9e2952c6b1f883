"""`EqnInterpreter`: evaluates a jaxpr eqn by eqn, and records values that are not finite.

Loops are evaluated step by step, and of a `cond` only the branch that is taken. XLA would need minutes to compile a
program that returns whether each of some thousand values is finite, but has compiled single operations before. A
`shard_map` counts as a single operation and is compiled as a whole, as JAX rejects a custom_vjp inside an eager one
(0.10.0 to 0.12.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import eqn_scope, eval_eqn
from jaxfn._inspection.harvest import Path, split_operands
from jaxfn._jaxpr import SubJaxpr, eval_jaxpr_with, subjaxprs
from jaxfn._tree import is_inexact


class NonFiniteValue(NamedTuple):
    """The first NaN of a value, or else its first infinity.

    Attributes:
      kind: "nan", "inf" or "-inf".
      shape: the shape of the value.
      indices: the index of the number.
    """

    kind: str
    shape: tuple[int, ...]
    indices: tuple[int, ...]

    def as_fields(self, operation: str) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
        """Returns the fields of `NanOrigin` from `kind` to `index`."""
        return self.kind, operation, self.shape, self.indices


def first_non_finite(value: Any) -> NonFiniteValue | None:
    """Returns the first NaN of an array, or else its first infinity, if any."""
    if not np.size(value) or not is_inexact(jax.typeof(value).dtype) or bool(_is_finite(value)):
        return None
    value = np.asarray(value)
    nans = np.isnan(value)
    index = tuple(np.argwhere(nans if nans.any() else ~np.isfinite(value))[0])
    return NonFiniteValue(_kind(value[index]), value.shape, tuple(map(int, index)))


@jax.jit
def _is_finite(value: Any) -> Any:
    return jnp.isfinite(value).all()


def _kind(number: Any) -> str:
    return "nan" if np.isnan(number) else "inf" if number.real > 0 else "-inf"


_HAVE_STEPS = ("scan", "while")


class Frame(NamedTuple):
    """One step of a jaxpr, inside the jaxprs that run it.

    Attributes:
      jaxpr: the jaxpr.
      path: indices of eqns and of their sub-jaxprs, the outermost first.
      steps: the step of each loop.
      outer: the frame of the eqn that runs it, that eqn's index, and the sub-jaxpr; `None` for the outermost jaxpr.
      is_last: whether no other step follows.
    """

    jaxpr: Any
    path: Path
    steps: tuple[int, ...]
    outer: tuple[Frame, int, SubJaxpr] | None
    is_last: bool = True

    @property
    def step(self) -> int:
        """The step of the innermost loop."""
        return self.steps[-1]

    @property
    def order(self) -> tuple[int, ...]:
        """A key that sorts frames by the order in which they are evaluated."""
        if self.outer is None:
            return ()
        frame, number, _ = self.outer
        return (*frame.order, number, self.step if len(self.steps) > len(frame.steps) else 0)


class EqnInterpreter:
    """One evaluation of a jaxpr.

    Args:
      jaxpr, consts: the jaxpr and its constants.
      arguments: its arguments.
      visit: called with each eqn, its operands and its results.

    Attributes:
      non_finite: values that are not finite, by path and steps of the frame, and variable.
      results: the outputs.
      selected: for results of `select_n` among them, the index of the operand that the number comes from.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        arguments: Sequence[Any],
        visit: Callable[[Any, Sequence[Any], Sequence[Any]], None] | None = None,
    ) -> None:
        self.non_finite: dict[tuple[Path, tuple[int, ...], Any], NonFiniteValue] = {}
        self.selected: dict[tuple[Path, tuple[int, ...], Any], int] = {}
        self._num_steps: dict[tuple[Path, tuple[int, ...]], int] = {}  # of the sub-jaxprs that ran
        self._shard_maps: dict[int, Callable[..., Sequence[Any]]] = {}  # compiled, by the id of their eqn
        self._visit = visit
        self.results = self._run(jaxpr, consts, arguments, (), ())

    def frames_inside(self, frame: Frame, number: int) -> Iterator[Frame]:
        """Yields the frames of the sub-jaxprs that an eqn has run, in order."""
        for i, sub in enumerate(subjaxprs(frame.jaxpr.eqns[number])):
            path = (*frame.path, number, i)
            num_steps = self._num_steps.get((path, frame.steps), 0)
            for step in range(num_steps):
                steps = (*frame.steps, step) if sub.kind in _HAVE_STEPS else frame.steps
                yield Frame(sub.jaxpr, path, steps, (frame, number, sub), step == num_steps - 1)

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], path: Path, steps: tuple[int, ...]
    ) -> list[Any]:
        def record(variables: Sequence[Any], values: Sequence[Any]) -> None:
            for variable, value in zip(variables, values, strict=True):
                non_finite = first_non_finite(value)
                if non_finite is not None:
                    self.non_finite[path, steps, variable] = non_finite

        def eval_and_record(index: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
            inner = subjaxprs(eqn)
            if inner:
                with eqn_scope(eqn):
                    results = self._run_subjaxprs(eqn, inner, operands, (*path, index), steps)
            else:
                results = eval_eqn(eqn, operands)
            record(eqn.outvars, results)
            if self._visit is not None:
                self._visit(eqn, operands, results)
            key = (path, steps, eqn.outvars[0]) if eqn.outvars else None
            if eqn.primitive is jax.lax.select_n_p and key in self.non_finite:
                which = np.asarray(operands[0])
                self.selected[key] = 1 + int(which[self.non_finite[key].indices] if which.ndim else which)
            return results

        record([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments])
        return eval_jaxpr_with(eval_and_record, jaxpr, consts, arguments)

    def _run_subjaxprs(
        self, eqn: Any, inner: list[SubJaxpr], operands: list[Any], path: Path, steps: tuple[int, ...]
    ) -> Sequence[Any]:
        kind = inner[-1].kind
        if kind == "scan":
            return self._run_scan(eqn, inner[0], operands, path, steps)
        if kind == "while":
            return self._run_while(inner, operands, path, steps)
        if kind == "shard_map":
            return self._run_shard_map(eqn, operands)
        taken = int(operands[0]) if kind == "cond" else 0
        sub = inner[taken]
        return self._run_step(sub, [operands[i] for i in sub.operands], (*path, taken), steps)

    def _run_step(
        self, sub: SubJaxpr, operands: Sequence[Any], path: Path, steps: tuple[int, ...], step: int | None = None
    ) -> list[Any]:
        self._num_steps[path, steps] = 1 if step is None else step + 1
        return self._run(sub.jaxpr, sub.consts, operands, path, steps if step is None else (*steps, step))

    def _run_scan(self, eqn: Any, sub: SubJaxpr, operands: list[Any], path: Path, steps: tuple[int, ...]) -> list[Any]:
        num_carry = len(sub.carried)
        length: Any = sub.length
        consts, carry, xs = split_operands(operands, sub.num_consts, num_carry)
        stacked: list[list[Any]] = []
        for step in range(length):
            index = length - 1 - step if sub.is_reversed else step
            slices = [jax.lax.index_in_dim(x, index, keepdims=False) for x in xs]
            results = self._run_step(sub, [*consts, *carry, *slices], (*path, 0), steps, step)
            carry = results[:num_carry]
            stacked.append(results[num_carry:])
        if not length:
            return [*carry, *(jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[num_carry:])]
        return [*carry, *map(jnp.stack, zip(*(stacked[::-1] if sub.is_reversed else stacked), strict=True))]

    def _run_while(
        self, inner: list[SubJaxpr], operands: list[Any], path: Path, steps: tuple[int, ...]
    ) -> Sequence[Any]:
        cond, body = inner
        of_cond, of_body, carry = split_operands(operands, cond.num_consts, body.num_consts)
        step = 0
        while bool(self._run(cond.jaxpr, cond.consts, [*of_cond, *carry], (*path, 0), (*steps, step))[0]):
            carry = self._run_step(body, [*of_body, *carry], (*path, 1), steps, step)
            step += 1
        return carry

    def _run_shard_map(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        def run(*operands: Any) -> Sequence[Any]:
            return list(eval_eqn(eqn, operands))

        if id(eqn) not in self._shard_maps:  # an enclosing loop evaluates the eqn at every step
            self._shard_maps[id(eqn)] = jax.jit(run)
        return self._shard_maps[id(eqn)](*operands)
