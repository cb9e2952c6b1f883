"""Arrays that `forward` stored outside ctx, in a global or an object, and that `backward` or `jvp` read there.

Such an array is not a residual: it is the stopped input, or was computed from it, and so has no derivative. A rule
that depends on one is right only at first order, and only in the program that `forward` ran in.

# Note: found by dependence, not by a search

    inputs --stop--> forward stores x or cos(x) somewhere
    residuals, cotangents --> backward --> results

The eqns that compute the results are followed back, through values that can have a derivative, to the residuals and
cotangents. A path that reaches the `stop` of this call instead starts at a stored array. A value of a finished jaxpr
was stored, or captured by the rule.

If `forward` and the rule run eagerly, there are no eqns. Then, in nested derivatives only, weak references track the
arrays of `forward`, and the rule gets copies. If one of them is alive when the rule runs, the rule is staged: the
arrays that it reads are the consts of its jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import jax

from jaxfn._compat import (
    Var,
    constant_of,
    depend_on_only,
    has_escaped,
    is_staged,
    operands_of,
    staged_atom,
    staged_under,
    traced_eqns_of_each,
    variables_under_tracers,
)
from jaxfn._jaxpr import stage
from jaxfn._primitives import stop_p
from jaxfn._tree import is_inexact, is_traced


class Outside(NamedTuple):
    """The inputs that stored arrays depend on, and whether the rule reads an array of a finished jaxpr."""

    inputs: Sequence[Any] = ()
    has_escaped: bool = False


def find_outside(stopped: Collection[Any], operands: Sequence[Any], results: Sequence[Any]) -> Outside:
    """Follows results of a rule back to arrays that were stored outside ctx.

    Args:
      stopped: The variables of the stopped inputs.
      operands: The residuals and the cotangents or tangents.
      results: The results of the rule, `None` for zero.
    """
    known = variables_under_tracers(operands, and_tangents=True)  # one eqn may compute a value and its tangent
    if depend_on_only(results, known):  # as nearly always
        return Outside()
    outer: list[Any] = [x for x in map(staged_under, results) if is_staged(x)]
    pending: dict[Any, Any] = {}

    def add(arrays: Sequence[Any]) -> None:
        for x in arrays:
            if isinstance(v := staged_atom(x), Var) and v not in known and is_inexact(x.dtype):
                if (const := constant_of(x)) is None:
                    pending[v] = x
                elif is_traced(const):
                    outer.append(staged_under(const))  # a const is a value of the enclosing jaxpr

    for eqns in traced_eqns_of_each():
        new, outer = outer, []
        add([x for x in new if is_staged(x)])
        while pending and (eqn := next(eqns, None)) is not None:
            if eqn.primitive is stop_p and any(v in stopped for v in eqn.outvars):
                pairs = zip(eqn.outvars, operands_of(eqn), strict=True)
                return Outside([x for v, x in pairs if v in pending and is_inexact(x.dtype)])
            if [pending.pop(v) for v in eqn.outvars if v in pending]:
                add(operands_of(eqn))
        outer += pending.values()
        pending.clear()
        if any(map(has_escaped, outer)):
            return Outside(has_escaped=True)
    return Outside()


class LiveArrays:
    """The concrete arrays that exist when this is created."""

    def __init__(self) -> None:
        self._before = jax.live_arrays()  # the arrays themselves, so that no `id` is reused

    def new(self, inputs: Sequence[Any]) -> tuple[ReferenceType[Any], ...]:
        """Returns weak references to the arrays created since then, and to those under the tracers of the inputs."""
        before = set(map(id, self._before))
        new = [x for x in jax.live_arrays() if id(x) not in before]
        return tuple(ref(x) for x in (*new, *map(staged_under, inputs)) if is_inexact(x.dtype) and not is_traced(x))


def run_watched(
    rule: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    residuals: Sequence[Any],
    vectors: Sequence[Any],
    watched: Sequence[ReferenceType[Any]],
) -> tuple[list[Any], bool]:
    """Runs `backward` or `jvp`; returns its results, and whether they depend on a watched array."""
    alive = [x for x in (own() for own in watched) if x is not None]
    if not alive:
        return rule(residuals, vectors), False
    is_nonzero: list[list[bool]] = []
    nonzero = [x for x in vectors if x is not None]

    def flat(*arrays: Any) -> tuple[list[Any], tuple[()]]:
        values = iter(arrays[len(residuals) :])
        results = rule(arrays[: len(residuals)], [None if x is None else next(values) for x in vectors])
        is_nonzero.append([x is not None for x in results])
        return [x for x in results if x is not None], ()

    try:
        staged, consts = stage(flat, [*residuals, *nonzero])
    except _NEEDS_VALUES:  # arrays that a rule with value-dependent branches reads are not found
        return rule(residuals, vectors), False
    results = iter(staged.evaluate(consts, [*residuals, *nonzero])[0])
    used = map(staged_under, staged.used_constants(consts))
    uses_watched = any(x is y for x in used for y in alive)
    return [next(results) if flag else None for flag in is_nonzero[0]], uses_watched


class NeedsValuesError(Exception):
    """Code needs the values of an array that is traced to a jaxpr, and might run on a concrete one."""


_NEEDS_VALUES = (
    NeedsValuesError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
