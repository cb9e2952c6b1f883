"""Checks whether user code that is going to be transposed is linear.

JAX raises for most nonlinear operations, but silently drops an added constant, and what passed through integers. Inside
a Function it transposes the rule, and does not look at the operations of `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from jaxfn._compat import (
    Primitive,
    add_jaxvals_p,
    eqn_source_line,
    has_transpose,
    make_jaxpr,
    record_source_lines,
    shape_struct,
    triangular_solve_p,
    tridiagonal_solve_p,
)
from jaxfn._jaxpr import (
    SubJaxpr,
    eval_jaxpr_with,
    identity_primitives,
    is_any_of,
    jaxprs_in_params,
    lookup,
    needed_eqns,
    open_jaxpr,
    primitives,
    subjaxprs,
)
from jaxfn._primitives import linear_map_p
from jaxfn._tree import is_inexact, is_key, is_traced


class _Kind(IntEnum):
    """The dependence of a value on the arguments."""

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2
    OTHER = 3


# These operands are added, selected or concatenated: a constant among linear ones makes the result affine.
_COMBINING = {
    add_jaxvals_p: slice(None),
    jax.lax.select_n_p: slice(1, None),
    jax.lax.dynamic_update_slice_p: slice(0, 2),
    **dict.fromkeys(primitives("add sub complex concatenate stack pad"), slice(None)),
    **dict.fromkeys(primitives("scatter_add scatter_sub scatter"), slice(0, 3, 2)),
}
# Linear in each operand where the others are constants.
_MULTIPLYING = primitives("mul dot_general conv_general_dilated ragged_dot_general")
# Linear in one operand where the others are constants, and zero with it.
_LINEAR_IN_FIRST = primitives("""
broadcast_in_dim convert_element_type reshape squeeze transpose neg copy pvary slice dynamic_slice rev split unstack
real imag conj fft reduce_sum cumsum reduce_window_sum reduce_precision sharding_constraint layout_constraint
reshard div gather scatter_mul select_and_scatter_add select_and_gather_add
all_gather all_gather_invariant all_to_all ppermute reduce_scatter pbroadcast
""")
_LINEAR_IN = dict.fromkeys(_LINEAR_IN_FIRST, 0) | {triangular_solve_p: 1, tridiagonal_solve_p: 3}
# Each result depends on one operand, that with its index.
_ONE_BY_ONE = primitives("optimization_barrier device_put psum psum_invariant")
# JAX's own primitives. One that is in none of the tables above, and that JAX cannot transpose, is not linear.
_OF_LAX = {x for module in (jax.lax, jax.lax.linalg) for x in vars(module).values() if isinstance(x, Primitive)}
# Their jaxprs are not inspected.
_OPAQUE = {linear_map_p, jax.lax.linear_solve_p, jax.lax.while_p}


def is_linear(function: Callable[..., Any], avals: Sequence[Any]) -> bool:
    """Whether no operation of a function is known to be nonlinear. JAX does not transpose the others.

    Args:
      function: Takes arrays and returns a list of arrays.
      avals: The types of its arguments.
    """
    jaxpr, consts = open_jaxpr(make_jaxpr(function, *map(shape_struct, avals)))
    kinds = _kinds_in_jaxpr(jaxpr, consts, [_Kind.LINEAR] * len(avals), [])
    return all(kind in (_Kind.ZERO, _Kind.LINEAR) for kind in kinds)


def describe_nonlinearity(function: Callable[..., Any], avals: Sequence[Any]) -> str:
    """Returns the first operation by which a result of a function is nonlinear, with its line of code."""
    with record_source_lines():  # JAX caches the jaxpr of one function object, with other lines
        jaxpr, consts = open_jaxpr(make_jaxpr(lambda *args: function(*args), *map(shape_struct, avals)))
    eqns, _ = needed_eqns(jaxpr, jaxpr.outvars)
    nonlinear: list[list[Any]] = []
    _kinds_in_jaxpr(jaxpr.replace(eqns=eqns), consts, [_Kind.LINEAR] * len(avals), nonlinear)
    if not nonlinear:
        return "a constant"
    # The jaxprs inside are cached too, so the line is that of the outermost eqn.
    names = " in ".join(f"'{eqn.primitive.name}'" for eqn in nonlinear[0])
    return f"{names} at {eqn_source_line(nonlinear[0][-1])}"


def _kinds_in_jaxpr(
    jaxpr: Any, consts: Sequence[Any], operands: Sequence[_Kind], nonlinear: list[list[Any]]
) -> list[_Kind]:
    """Returns the kinds of a jaxpr's outputs. Appends each eqn that makes a value nonlinear, after those inside it."""

    def eval_eqn(_: int, eqn: Any, operands: list[_Kind]) -> list[_Kind]:
        num_before = len(nonlinear)
        # An integer or boolean result has been rounded or compared.
        kinds = [
            _Kind.OTHER if kind is _Kind.LINEAR and not is_inexact(var.aval.dtype) else kind
            for var, kind in zip(eqn.outvars, _kinds_in_eqn(eqn, operands, nonlinear), strict=True)
        ]
        if _Kind.OTHER in kinds and _Kind.OTHER not in operands:
            inside = nonlinear[num_before] if len(nonlinear) > num_before else []
            nonlinear[num_before:] = [[*inside, eqn]]
        return kinds

    kinds_of_consts = list(map(_kind_of, consts))
    return eval_jaxpr_with(eval_eqn, jaxpr, kinds_of_consts, operands, lambda literal: _kind_of(literal.val))


def _kinds_in_eqn(eqn: Any, operands: list[_Kind], nonlinear: list[list[Any]]) -> list[_Kind]:
    inner = [] if is_any_of(eqn, _OPAQUE) else subjaxprs(eqn) or _called_with_operands(eqn)
    if not inner:
        return _kinds_in_operation(eqn, operands)
    if eqn.primitive is jax.lax.cond_p and operands[0] >= _Kind.LINEAR:
        return [_Kind.OTHER] * len(eqn.outvars)
    results = [_kinds_in_subjaxpr(sub, operands, nonlinear) for sub in inner]
    return [_kind_of_sum(kinds) for kinds in zip(*results, strict=True)]


def _kinds_in_subjaxpr(sub: SubJaxpr, operands: Sequence[_Kind], nonlinear: list[list[Any]]) -> list[_Kind]:
    arguments = [operands[i] for i in sub.operands]
    while True:  # until the kinds of the carry no longer change
        results, before = _kinds_in_jaxpr(sub.jaxpr, sub.consts, arguments, nonlinear), list(arguments)
        for result, argument in sub.carried:
            arguments[argument] = _kind_of_sum([before[argument], results[result]])
        if arguments == before:
            return results


def _called_with_operands(eqn: Any) -> list[SubJaxpr]:
    """Returns the jaxpr of an eqn without a rule, if it takes the operands; a kernel takes references instead."""
    for jaxpr, consts in map(open_jaxpr, jaxprs_in_params(eqn)):
        if len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars):
            return [SubJaxpr(jaxpr, consts, range(len(eqn.invars)), range(len(eqn.outvars)), "call")]
    return []


def _kind_of_sum(kinds: Sequence[_Kind]) -> _Kind:
    """Returns the kind of a value that is one of these or their sum; linear plus constant is affine, hence OTHER."""
    return _Kind.OTHER if _Kind.LINEAR in kinds and _Kind.CONSTANT in kinds else max(kinds)


def _kinds_in_operation(eqn: Any, operands: list[_Kind]) -> list[_Kind]:
    """Returns the kinds of one operation's results."""
    count = len(eqn.outvars)
    if is_any_of(eqn, _ONE_BY_ONE) or is_any_of(eqn, identity_primitives):
        return operands[:count]
    if eqn.primitive in (linear_map_p, jax.lax.linear_solve_p):  # linear in the last operands
        is_ours = eqn.primitive is linear_map_p
        num_others = eqn.params["num_res"] if is_ours else sum(eqn.params["const_lengths"])
        return [_linear_in(operands[num_others:], operands[:num_others])] * count
    if is_any_of(eqn, _MULTIPLYING):
        factors = sorted(operands)
        return [_Kind.ZERO if factors[0] is _Kind.ZERO else _linear_in(factors[-1:], factors[:-1])] * count
    combined = lookup(_COMBINING, eqn)
    if combined is not None:
        others = [kind for i, kind in enumerate(operands) if i not in range(len(operands))[combined]]
        return [_linear_in(operands[combined], others)] * count
    index = lookup(_LINEAR_IN, eqn)
    if index is not None:
        fills = eqn.primitive is jax.lax.gather_p and _is_number(eqn.params["fill_value"])
        joined = [operands[index], _Kind.CONSTANT] if fills else [operands[index]]
        return [_linear_in(joined, [*operands[:index], *operands[index + 1 :]])] * count
    most = max(operands, default=_Kind.ZERO)
    if most is _Kind.LINEAR and eqn.primitive is jax.lax.while_p:  # which JAX does not transpose
        return [_Kind.OTHER] * count
    if most is not _Kind.LINEAR:
        return [max(most, _Kind.CONSTANT)] * count
    if eqn.primitive not in _OF_LAX:  # a callback or a kernel, which its Function declares linear
        return [_Kind.LINEAR] * count
    if not has_transpose(eqn.primitive):
        return [_Kind.OTHER] * count
    kinds = [kind for atom, kind in zip(eqn.invars, operands, strict=True) if is_inexact(atom.aval.dtype)]
    return [_kind_of_sum(kinds)] * count


def _linear_in(joined: Sequence[_Kind], others: Sequence[_Kind]) -> _Kind:
    """Returns the kind of a result that is linear in the `joined` operands together if the others are constants."""
    return _Kind.OTHER if max(others, default=_Kind.ZERO) >= _Kind.LINEAR else _kind_of_sum(joined)


def _is_number(fill_value: Any) -> bool:
    """Whether out-of-bounds indices read a number, not zero or the NaN that shows a mistake."""
    return fill_value is not None and fill_value != 0 and not np.isnan(fill_value)


def _kind_of(value: Any) -> _Kind:
    is_known = not is_traced(value) and not (isinstance(value, jax.Array) and is_key(value))
    return _Kind.ZERO if is_known and not np.any(np.asarray(value)) else _Kind.CONSTANT
