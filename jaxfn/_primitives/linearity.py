"""Whether user code that is going to be transposed is linear, constants added on included.

JAX refuses to transpose most of what is not linear, but it drops an added constant, and what went through integers, in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from jaxfn._compat import make_jaxpr
from jaxfn._values.arrays import is_inexact, is_key, is_traced


class _Kind(IntEnum):
    """What a value is, as a function of the arguments."""

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2
    OTHER = 3


# Their operands (some of them) are added, chosen among or laid side by side: a constant among linear ones makes the
# result affine.
_COMBINING = {
    "add": slice(None),
    "add_any": slice(None),
    "sub": slice(None),
    "complex": slice(None),
    "select_n": slice(1, None),
    "concatenate": slice(None),
    "stack": slice(None),
    "pad": slice(None),
    "dynamic_update_slice": slice(0, 2),
    "scatter-add": slice(0, 3, 2),
    "scatter-sub": slice(0, 3, 2),
    "scatter": slice(0, 3, 2),
}
# Linear in each operand where the others are constants.
_MULTIPLYING = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}
# Linear in one operand where the others are constants, and zero with it.
_LINEAR_IN_FIRST = """
broadcast_in_dim convert_element_type reshape squeeze transpose neg copy pvary slice dynamic_slice rev split unstack
real imag conj fft reduce_sum cumsum reduce_window_sum reduce_precision sharding_constraint layout_constraint
reshard div gather scatter-mul select_and_scatter_add select_and_gather_add
all_gather all_gather_invariant all_to_all ppermute reduce_scatter pbroadcast
"""
_LINEAR_IN = dict.fromkeys(_LINEAR_IN_FIRST.split(), 0) | {"triangular_solve": 1, "tridiagonal_solve": 3}
# Each result belongs to the operand in the same place.
_ONE_BY_ONE = {"attach", "stop", "optimization_barrier", "device_put", "psum", "psum_invariant", "mark"}


def is_linear(function: Callable[..., Any], like: Sequence[Any]) -> bool:
    """Whether nothing is seen in a function that is not linear.

    What is not seen here, JAX refuses to transpose.

    Args:
      function: takes arrays, returns a list of arrays.
      like: arrays of the arguments' types.
    """
    return all(kind in (_Kind.ZERO, _Kind.LINEAR) for kind in _kinds_of_results(function, like))


def _kinds_of_results(function: Callable[..., Any], like: Sequence[Any]) -> list[_Kind]:
    return _kinds_in_closed(make_jaxpr(function, *like), [_Kind.LINEAR] * len(like))


def _kinds_in_closed(closed: Any, arguments: Sequence[_Kind]) -> list[_Kind]:
    return _kinds_in_jaxpr(closed.jaxpr, [_kind_of(value) for value in closed.consts], arguments)


def _kinds_in_jaxpr(jaxpr: Any, consts: Sequence[_Kind], arguments: Sequence[_Kind]) -> list[_Kind]:
    """The kinds of a jaxpr's results."""
    kinds: dict[Any, _Kind] = dict(zip(jaxpr.invars, arguments, strict=True))
    kinds |= zip(jaxpr.constvars, consts, strict=True)

    def kind(atom: Any) -> _Kind:
        return _kind_of(atom.val) if hasattr(atom, "val") else kinds[atom]

    for eqn in jaxpr.eqns:
        results = _kinds_in_equation(eqn, [kind(atom) for atom in eqn.invars])
        # What became an integer or a truth value has been rounded or compared.
        kinds |= {
            var: _Kind.OTHER if result is _Kind.LINEAR and not is_inexact(var.aval.dtype) else result
            for var, result in zip(eqn.outvars, results, strict=True)
        }
    return [kind(atom) for atom in jaxpr.outvars]


def _kinds_in_equation(eqn: Any, operands: list[_Kind]) -> list[_Kind]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _kinds_in_scan(eqn, operands)
    if name == "cond":
        return _kinds_in_branches(params["branches"], operands)
    body = next((params[key] for key in ("jaxpr", "call_jaxpr", "callee") if key in params), None)
    if body is not None and len(getattr(body, "jaxpr", body).invars) == len(operands):
        return _kinds_in_closed(body, operands) if hasattr(body, "consts") else _kinds_in_jaxpr(body, [], operands)
    if "body_jaxpr" in params and max(operands, default=_Kind.ZERO) >= _Kind.LINEAR:
        return [_Kind.OTHER] * len(eqn.outvars)  # a while loop, which JAX does not transpose
    return _kinds_in_operation(eqn, operands)


def _kinds_in_scan(eqn: Any, operands: list[_Kind]) -> list[_Kind]:
    body = eqn.params["jaxpr"]
    # What is scanned over or stacked has an axis more outside than in the body. (How many operands are which is among
    # the parameters in 0.10 and in another form in 0.12.)
    num_carry = sum(_ndim(a) == _ndim(b) for a, b in zip(eqn.outvars, body.jaxpr.outvars, strict=True))
    last = sum(_ndim(a) == _ndim(b) for a, b in zip(eqn.invars, body.jaxpr.invars, strict=True))
    first = last - num_carry
    while True:  # until the carry is what it becomes
        results = _kinds_in_closed(body, operands)
        carry = [_kind_of_sum([before, after]) for before, after in zip(operands[first:last], results, strict=False)]
        if carry == operands[first:last]:
            return results
        operands = [*operands[:first], *carry, *operands[last:]]


def _ndim(atom: Any) -> int:
    return len(atom.aval.shape)


def _kinds_in_branches(branches: Sequence[Any], operands: list[_Kind]) -> list[_Kind]:
    index, *arguments = operands
    results = [_kinds_in_closed(branch, arguments) for branch in branches]
    return [_Kind.OTHER if index >= _Kind.LINEAR else _kind_of_sum(kinds) for kinds in zip(*results, strict=True)]


def _kind_of_sum(kinds: Sequence[_Kind]) -> _Kind:
    """Of what is one of these, or their sum."""
    return _Kind.OTHER if _Kind.LINEAR in kinds and _Kind.CONSTANT in kinds else max(kinds)


def _kinds_in_operation(eqn: Any, operands: list[_Kind]) -> list[_Kind]:
    """The kinds of what one operation returns."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _ONE_BY_ONE:
        return operands[:count]
    if name in ("linear", "custom_linear_solve"):  # what it is linear in comes last
        num_others = eqn.params["num_residuals"] if name == "linear" else sum(eqn.params["const_lengths"])
        return [_linear_in(operands[num_others:], operands[:num_others])] * count
    if name in _COMBINING:
        joined = operands[_COMBINING[name]]
        others = [kind for i, kind in enumerate(operands) if i not in range(len(operands))[_COMBINING[name]]]
        return [_linear_in(joined, others)] * count
    if name in _MULTIPLYING:
        factors = sorted(operands)
        return [_Kind.ZERO if factors[0] is _Kind.ZERO else _linear_in(factors[-1:], factors[:-1])] * count
    if name in _LINEAR_IN:
        place = _LINEAR_IN[name]
        fills = name == "gather" and _is_number(eqn.params["fill_value"])
        joined = [operands[place], _Kind.CONSTANT] if fills else [operands[place]]
        return [_linear_in(joined, [*operands[:place], *operands[place + 1 :]])] * count
    most = max(operands, default=_Kind.ZERO)
    if most is not _Kind.LINEAR:
        return [max(most, _Kind.CONSTANT)] * count
    # JAX transposes few of these, which must not add a constant then.
    beside = [kind for atom, kind in zip(eqn.invars, operands, strict=True) if is_inexact(atom.aval.dtype)]
    return [_kind_of_sum(beside)] * count


def _linear_in(joined: Sequence[_Kind], others: Sequence[_Kind]) -> _Kind:
    """Of what is linear in the `joined` operands together, where the others are constants."""
    return _Kind.OTHER if max(others, default=_Kind.ZERO) >= _Kind.LINEAR else _kind_of_sum(joined)


def _is_number(fill_value: Any) -> bool:
    """Whether what is read outside of an array is neither zero nor the NaN that shows a mistake."""
    return fill_value is not None and fill_value != 0 and not np.isnan(fill_value)


def _kind_of(value: Any) -> _Kind:
    is_known = not is_traced(value) and not (isinstance(value, jax.Array) and is_key(value))
    return _Kind.ZERO if is_known and not np.any(np.asarray(value)) else _Kind.CONSTANT
