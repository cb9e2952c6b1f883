"""Whether user code that is going to be transposed is linear, constants added on included.

JAX refuses to transpose what is not even affine, but it drops an added constant in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from jaxfn._leaves import is_inexact, is_traced


class _Kind(IntEnum):
    """What a value is, as a function of the arguments."""

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2


# Their array operands are added, chosen among or laid side by side: one constant among them makes the result affine.
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
    """Raises `RuntimeError(problem)` where the function adds a constant to something linear, or returns one.

    Args:
      function: takes arrays, returns a list of arrays.
      like: arrays of the arguments' types.
      problem: the message.
    """
    closed = jax.make_jaxpr(function)(*like)
    kinds = _kinds_of_results(closed.jaxpr, closed.consts, [_Kind.LINEAR] * len(like), problem)
    if _Kind.CONSTANT in kinds:
        raise RuntimeError(problem)


def _kinds_of_results(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[_Kind], problem: str) -> list[_Kind]:
    kinds: dict[Any, _Kind] = dict(zip(jaxpr.invars, arguments, strict=True))
    kinds |= {var: _kind_of_value(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def kind(atom: Any) -> _Kind:
        return _kind_of_value(atom.val) if hasattr(atom, "val") else kinds[atom]

    for eqn in jaxpr.eqns:
        operands = [kind(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if inner is not None:
            results = _kinds_of_results(inner.jaxpr, inner.consts, operands, problem)
        else:
            results = [_combined(eqn.primitive.name, operands, problem)] * len(eqn.outvars)
        kinds |= zip(eqn.outvars, results, strict=True)
    return [kind(atom) for atom in jaxpr.outvars]


def _combined(primitive: str, operands: list[_Kind], problem: str) -> _Kind:
    joined = operands[_COMBINING[primitive]] if primitive in _COMBINING else []
    if _Kind.LINEAR in joined and _Kind.CONSTANT in joined:
        raise RuntimeError(problem)
    if _Kind.LINEAR in operands:
        return _Kind.LINEAR
    keeps_zero = joined if primitive in _COMBINING else operands if primitive in _KEEPING_ZERO else [_Kind.CONSTANT]
    return max(keeps_zero, default=_Kind.CONSTANT)


def _kind_of_value(value: Any) -> _Kind:
    is_known = not is_traced(value) and is_inexact(value.dtype)
    return _Kind.ZERO if is_known and not np.any(np.asarray(value)) else _Kind.CONSTANT
