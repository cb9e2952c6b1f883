"""Evaluation of a jaxpr that also returns values from inside its loops, branches and devices.

# Note: a harvested value has an axis for each enclosing loop

Values cannot leave a `scan`, a `cond` or a `shard_map`, so each is staged again with more results:

    scan         the values are further outputs, stacked along an axis for the steps
    while        they are part of the carry: the values of one step, which the `Probe` chooses
    cond         every branch returns the values of all branches, `Probe.absent` for those of the others
    shard_map    an axis for the devices comes first
    jit          the called function has further results; outside `jit` it is inlined, if it has no options
    other calls  the called function is inlined

So no callback is needed, and harvested values are results of the program, under `jit` and on every device. A value is
identified by its path: indices of eqns and of their sub-jaxprs, the outermost first, and its index in the last eqn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxfn._compat import (
    eqn_scope,
    eval_eqn,
    is_plain_jit,
    jit_options,
    lower_jaxpr,
    manual_axes,
    platforms_of_branches,
)
from jaxfn._jaxpr import SubJaxpr, eval_jaxpr_with, jaxprs_in_params, open_jaxpr, subjaxprs
from jaxfn._primitives import DeferredError, guard
from jaxfn._traces import staging_trace
from jaxfn._tree import is_inexact

Path = tuple[int, ...]
Harvest = dict[Path, Any]


class Probe:
    """A choice of the values to harvest from a jaxpr.

    Attributes:
      keeps_rules: whether the result can be differentiated. Then calls with a custom derivative are evaluated
        unchanged, and the called function is evaluated a second time for its values.
      types: the types of the values inside eqns that have been traced, by the path of the eqn.
    """

    keeps_rules: bool = False

    def __init__(self) -> None:
        self.types: dict[Path, Harvest] = {}

    def is_wanted(self, eqn: Any) -> bool:
        """Whether an eqn has values to harvest."""
        raise NotImplementedError

    def values(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns the values of an eqn to harvest."""
        raise NotImplementedError

    def absent(self, value: Any) -> Any:
        """Returns the substitute for a value of this type that is not computed."""
        raise NotImplementedError

    def later(self, before: Harvest, now: Harvest) -> Harvest:
        """Chooses between the values of two steps of a `while` loop."""
        raise NotImplementedError

    def check_unreachable(self, jaxpr: Any, what: str) -> None:
        """Raises if a jaxpr that cannot be harvested, described by `what`, has values to harvest."""


def any_eqn(jaxpr: Any, condition: Callable[[Any], bool]) -> bool:
    """Whether an eqn of a jaxpr, or of a sub-jaxpr, fulfils the condition."""
    return any(condition(eqn) or any(any_eqn(sub.jaxpr, condition) for sub in subjaxprs(eqn)) for eqn in jaxpr.eqns)


def _unhandled_subjaxprs(eqn: Any) -> Iterator[tuple[str, Any]]:
    """Yields the jaxprs in an eqn, at any depth, that `subjaxprs` has no rule for, with the primitive's name."""
    inner = [sub.jaxpr for sub in subjaxprs(eqn)]
    if not inner:
        inner = [open_jaxpr(lower_jaxpr(jaxpr))[0] for jaxpr in jaxprs_in_params(eqn)]
        yield from ((eqn.primitive.name, jaxpr) for jaxpr in inner)
    for jaxpr in inner:
        for inner_eqn in jaxpr.eqns:
            yield from _unhandled_subjaxprs(inner_eqn)


def harvest(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], probe: Probe, path: Path = ()
) -> tuple[list[Any], Harvest]:
    """Returns the outputs of a jaxpr and the harvested values."""
    harvested: Harvest = {}

    def eval_and_harvest(index: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        eqn_path, inner = (*path, index), subjaxprs(eqn)
        if any(any_eqn(sub.jaxpr, probe.is_wanted) for sub in inner):
            with eqn_scope(eqn):
                results, harvested_inside = harvest_subjaxprs(eqn, operands, probe, eqn_path)
            harvested.update(harvested_inside)
        else:
            for name, unhandled in _unhandled_subjaxprs(eqn):
                probe.check_unreachable(unhandled, name)
            results = _eval_unchanged(eqn, inner, operands)
        if probe.is_wanted(eqn):
            harvested.update({(*eqn_path, -1, i): x for i, x in enumerate(probe.values(eqn, operands, results))})
        return results

    return eval_jaxpr_with(eval_and_harvest, jaxpr, consts, arguments), harvested


def _eval_unchanged(eqn: Any, inner: list[SubJaxpr], operands: list[Any]) -> Sequence[Any]:
    def run(*operands: Any) -> Sequence[Any]:
        return list(eval_eqn(eqn, operands))

    is_on_devices = bool(inner) and inner[0].kind == "shard_map"
    return (_compiled(run) if is_on_devices else run)(*operands)


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled: eagerly, JAX rejects a custom_vjp inside a `shard_map` (0.10.0 to 0.12.0)."""
    return jax.jit(run) if staging_trace() is None else run


def harvest_subjaxprs(
    eqn: Any, operands: Sequence[Any], probe: Probe, path: Path = ()
) -> tuple[Sequence[Any], Harvest]:
    """Evaluates an eqn that runs sub-jaxprs and returns its results and the values harvested in these."""
    inside = _Inside(eqn, subjaxprs(eqn), list(operands), probe, path)
    return _KINDS[inside.inner[-1].kind](inside)


@dataclass(frozen=True, eq=False)
class _Inside:
    """An eqn that runs sub-jaxprs: its results and the values harvested in these, by the kind of eqn."""

    eqn: Any
    inner: list[SubJaxpr]
    operands: list[Any]
    probe: Probe
    path: Path

    def of(self, number: int, arguments: Sequence[Any]) -> tuple[list[Any], Harvest]:
        """Returns the outputs of one of the sub-jaxprs, and the values harvested there."""
        sub = self.inner[number]
        return harvest(sub.jaxpr, sub.consts, arguments, self.probe, (*self.path, number))

    def _types(self, harvest_all: Callable[[], Harvest]) -> Harvest:
        """Returns the types of harvested values, found once: nested branches would be traced twice at each level."""
        if self.path not in self.probe.types:
            self.probe.types[self.path] = jax.eval_shape(harvest_all)
        return self.probe.types[self.path]

    def results_of_first(self, *arguments: Any) -> tuple[tuple[Any, ...], Harvest]:
        """Returns the outputs of the first sub-jaxpr, and the values harvested there."""
        results, harvested = self.of(0, arguments)
        return tuple(results), harvested

    def jit(self) -> tuple[Sequence[Any], Harvest]:
        if is_plain_jit(self.eqn) and staging_trace() is None:  # it would be compiled again at every call
            return self.results_of_first(*self.operands)

        def run(*operands: Any) -> tuple[Sequence[Any], Harvest]:
            return self.results_of_first(*operands)

        run.__name__ = run.__qualname__ = self.eqn.params["name"]
        return jax.jit(run, **jit_options(self.eqn))(*self.operands)

    def call(self) -> tuple[Sequence[Any], Harvest]:
        operands = [self.operands[i] for i in self.inner[0].operands]
        if not self.probe.keeps_rules:
            return self.of(0, operands)
        results, harvested = self.of(0, jax.lax.stop_gradient(operands))
        if not self.eqn.effects:
            return eval_eqn(self.eqn, self.operands), harvested
        floating = [x for x in self.operands if is_inexact(jax.typeof(x).dtype)]
        error = DeferredError(NotImplementedError, _HAS_EFFECTS)
        return guard(results, floating, error), harvested

    def checkpoint(self) -> tuple[Sequence[Any], Harvest]:
        params, operands = self.eqn.params, self.operands
        prevent_cse = params["prevent_cse"]
        if params.get("differentiated", False):  # so that XLA does not merge it with the first computation
            return self.results_of_first(*(jax.lax.optimization_barrier(operands) if prevent_cse else operands))
        return jax.checkpoint(self.results_of_first, prevent_cse=prevent_cse, policy=params["policy"])(*operands)

    def scan(self) -> tuple[Sequence[Any], Harvest]:
        params, num_carry = self.eqn.params, len(self.inner[0].carried)
        consts, carry, xs = split_operands(self.operands, self.inner[0].num_consts, num_carry)

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], Harvest]]:
            results, harvested = self.of(0, [*consts, *carry, *xs])
            return results[:num_carry], (results[num_carry:], harvested)

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, harvested) = jax.lax.scan(body, carry, xs, **options)
        return [*carry, *ys], harvested

    def while_loop(self) -> tuple[Sequence[Any], Harvest]:
        cond, body = self.inner
        self.probe.check_unreachable(cond.jaxpr, "the condition of a while loop")
        of_cond, of_body, init = split_operands(self.operands, cond.num_consts, body.num_consts)

        def step(carry: list[Any]) -> tuple[list[Any], Harvest]:
            return self.of(1, [*of_body, *carry])

        def condition(state: Any) -> Any:
            return self.of(0, [*of_cond, *state[0]])[0][0]

        def next_state(state: Any) -> Any:
            carry, now = step(state[0])
            return carry, self.probe.later(state[1], now)

        absent = {key: self.probe.absent(value) for key, value in self._types(lambda: step(init)[1]).items()}
        return jax.lax.while_loop(condition, next_state, (init, absent))

    def cond(self) -> tuple[Sequence[Any], Harvest]:
        index, *operands = self.operands

        def harvested_anywhere() -> Harvest:
            return {key: x for number in range(len(self.inner)) for key, x in self.of(number, operands)[1].items()}

        absent = self._types(harvested_anywhere)

        def branch(number: int, *operands: Any) -> tuple[list[Any], Harvest]:
            results, harvested = self.of(number, operands)
            return results, {
                key: harvested[key] if key in harvested else self.probe.absent(absent[key]) for key in absent
            }

        branches = [partial(branch, number) for number in range(len(self.inner))]
        platforms = platforms_of_branches(self.eqn)
        if platforms is None:
            return jax.lax.switch(index, branches, *operands)
        chosen = {name: run for names, run in zip(platforms, branches, strict=True) for name in names or ["default"]}
        return jax.lax.platform_dependent(*operands, **chosen)

    def shard_map(self) -> tuple[Sequence[Any], Harvest]:
        params, axes = self.eqn.params, manual_axes(self.eqn)
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
    "with_logs(f) was differentiated, where f logs and has effects: forward would run twice. Differentiate inside: "
    "jaxfn.with_logs(jax.value_and_grad(f))."
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


def split_operands(operands: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits operands into the first ones, the next ones, and the rest."""
    return operands[:first], operands[first : first + second], operands[first + second :]


class EqnLocation(NamedTuple):
    """The location of a harvested value.

    Attributes:
      eqn: the eqn.
      value_index: the index among the values of the eqn.
      enclosing: the enclosing eqns, the outermost first, each with its sub-jaxpr.
    """

    eqn: Any
    value_index: int
    enclosing: list[tuple[Any, SubJaxpr]]

    @property
    def names(self) -> str:
        """The name stack of the eqn, including those of the enclosing eqns."""
        eqns = [*(eqn for eqn, _ in self.enclosing), self.eqn]
        return "/".join(filter(None, (str(eqn.source_info.name_stack) for eqn in eqns)))


def location_of(jaxpr: Any, path: Path) -> EqnLocation:
    """Returns the location of a harvested value."""
    enclosing: list[tuple[Any, SubJaxpr]] = []
    *outer, number, _, index = path
    for eqn_index, sub_index in zip(outer[::2], outer[1::2], strict=True):
        eqn = jaxpr.eqns[eqn_index]
        enclosing.append((eqn, subjaxprs(eqn)[sub_index]))
        jaxpr = enclosing[-1][1].jaxpr
    return EqnLocation(jaxpr.eqns[number], index, enclosing)
