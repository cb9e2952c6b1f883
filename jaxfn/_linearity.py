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

from jaxfn._leaves import is_inexact, is_key, is_traced


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
    "select_n": slice(1, None),
    "concatenate": slice(None),
    "pad": slice(None),
    "dynamic_update_slice": slice(0, 2),
    "scatter-add": slice(0, 3, 2),
    "scatter": slice(0, 3, 2),
}
# Zero where all of their operands are.
_KEEPING_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose", "neg", "copy", "pvary"}


def check_linear(function: Callable[..., Any], like: Sequence[Any], problem: str) -> None:
    """Raises `RuntimeError(problem)` where the function is seen not to be linear.

    What is not seen here, JAX refuses to transpose.

    Args:
      function: takes arrays, returns a list of arrays.
      like: arrays of the arguments' types.
      problem: the message.
    """
    closed = jax.make_jaxpr(function)(*like)
    kinds = _of_closed(closed, [_Kind.LINEAR] * len(like))
    if any(kind in (_Kind.CONSTANT, _Kind.OTHER) for kind in kinds):
        raise RuntimeError(problem)


def _of_closed(closed: Any, arguments: Sequence[_Kind]) -> list[_Kind]:
    return _of_jaxpr(closed.jaxpr, [_of_value(value) for value in closed.consts], arguments)


def _of_jaxpr(jaxpr: Any, consts: Sequence[_Kind], arguments: Sequence[_Kind]) -> list[_Kind]:
    """The kinds of a jaxpr's results."""
    kinds: dict[Any, _Kind] = dict(zip(jaxpr.invars, arguments, strict=True))
    kinds |= zip(jaxpr.constvars, consts, strict=True)

    def kind(atom: Any) -> _Kind:
        return _of_value(atom.val) if hasattr(atom, "val") else kinds[atom]

    for eqn in jaxpr.eqns:
        results = _of_equation(eqn, [kind(atom) for atom in eqn.invars])
        # What became an integer or a truth value has been rounded or compared.
        kinds |= {
            var: _Kind.OTHER if result is _Kind.LINEAR and not is_inexact(var.aval.dtype) else result
            for var, result in zip(eqn.outvars, results, strict=True)
        }
    return [kind(atom) for atom in jaxpr.outvars]


def _of_equation(eqn: Any, operands: list[_Kind]) -> list[_Kind]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _of_scan(eqn, operands)
    if name == "cond":
        return _of_branches(params["branches"], operands)
    body = params.get("jaxpr", params.get("call_jaxpr"))
    if body is not None and len(getattr(body, "jaxpr", body).invars) == len(operands):
        return _of_closed(body, operands) if hasattr(body, "consts") else _of_jaxpr(body, [], operands)
    if "body_jaxpr" in params and max(operands, default=_Kind.ZERO) >= _Kind.LINEAR:
        return [_Kind.OTHER] * len(eqn.outvars)  # a while loop, which JAX does not transpose
    return [_combined(name, operands)] * len(eqn.outvars)


def _of_scan(eqn: Any, operands: list[_Kind]) -> list[_Kind]:
    body = eqn.params["jaxpr"]
    # What is scanned over or stacked has an axis more outside than in the body. (How many operands are which is among
    # the parameters in 0.10 and in another form in 0.12.)
    num_carry = sum(_ndim(a) == _ndim(b) for a, b in zip(eqn.outvars, body.jaxpr.outvars, strict=True))
    last = sum(_ndim(a) == _ndim(b) for a, b in zip(eqn.invars, body.jaxpr.invars, strict=True))
    first = last - num_carry
    while True:  # until the carry is what it becomes
        results = _of_closed(body, operands)
        carry = [_one_of([before, after]) for before, after in zip(operands[first:last], results, strict=False)]
        if carry == operands[first:last]:
            return results
        operands = [*operands[:first], *carry, *operands[last:]]


def _ndim(atom: Any) -> int:
    return len(atom.aval.shape)


def _of_branches(branches: Sequence[Any], operands: list[_Kind]) -> list[_Kind]:
    index, *arguments = operands
    results = [_of_closed(branch, arguments) for branch in branches]
    return [_Kind.OTHER if index >= _Kind.LINEAR else _one_of(kinds) for kinds in zip(*results, strict=True)]


def _one_of(kinds: Sequence[_Kind]) -> _Kind:
    """Of what is one of these, or their sum."""
    return _Kind.OTHER if _Kind.LINEAR in kinds and _Kind.CONSTANT in kinds else max(kinds)


def _combined(primitive: str, operands: list[_Kind]) -> _Kind:
    if primitive in _COMBINING:
        joined = operands[_COMBINING[primitive]]
        chosen_by = [kind for i, kind in enumerate(operands) if i not in range(len(operands))[_COMBINING[primitive]]]
        return _Kind.OTHER if max(chosen_by, default=_Kind.ZERO) >= _Kind.LINEAR else _one_of(joined)
    most = max(operands, default=_Kind.CONSTANT)
    return most if most >= _Kind.LINEAR or primitive in _KEEPING_ZERO else _Kind.CONSTANT


def _of_value(value: Any) -> _Kind:
    is_known = not is_traced(value) and not is_key(value)
    return _Kind.ZERO if is_known and not np.any(np.asarray(value)) else _Kind.CONSTANT
