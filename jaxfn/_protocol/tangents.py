"""Tangents in torch's terms: what `jvp` is given, and what it returned, checked.

Every refusal is a row of `_MESSAGES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import jax

from jaxfn._compat import zeros_of
from jaxfn._protocol.outputs import OutputLayout
from jaxfn._protocol.structure import AvalLeaf, StructureError, paired_leaves
from jaxfn._values.arrays import as_array, is_array_leaf, is_inexact, is_key
from jaxfn._values.layouts import Layout
from jaxfn._values.varying import match_tangent

_MESSAGES: dict[str, tuple[type[Exception], str]] = {
    "count": (
        RuntimeError,
        "returned an invalid number of tangents: expected {expected}, one for each output of forward, got {got}. "
        "Return None for an output whose tangent is zero.",
    ),
    "type": (TypeError, "returned {got} as the tangent of {where}: expected an array of shape {shape} or None."),
    "integer": (
        RuntimeError,
        "returned a tangent different than None for {where}, which is not differentiable ({why}). Return None for it.",
    ),
    "structure": (
        RuntimeError,
        "returned a tangent for {where} that does not have that output's structure: {problem}. Any subtree of the "
        "tangent may be None.",
    ),
    "shape": (RuntimeError, "returned a tangent of shape {got} for {where}: expected the output's shape {expected}."),
    "complex": (
        TypeError,
        "returned a complex tangent ({got}) for {where}, which is real ({expected}). Return its .real.",
    ),
}


def _refuse(name: str, row: str, **facts: object) -> Exception:
    kind, text = _MESSAGES[row]
    return kind(f"{name}.jvp {text.format(**facts)}")


def input_tangents(
    tangents: Sequence[jax.Array | None], layouts: Sequence[Layout], avals: Sequence[Any], materialize: bool
) -> list[Any]:
    """One tangent for each input: of its structure, `None` for static leaves and whatever cannot be differentiated.

    Args:
      tangents: one for each array leaf of the inputs, `None` for zero.
      layouts: one per input.
      avals: the types of the array leaves.
      materialize: whether zeros are given as arrays; as `None` otherwise.
    """
    leaves = iter(
        [
            zeros_of(aval) if tangent is None and materialize and is_inexact(aval.dtype) else tangent
            for tangent, aval in zip(tangents, avals, strict=True)
        ]
    )
    given: list[Any] = []
    for layout in layouts:
        own = list(islice(leaves, layout.num_arrays))
        given.append(None if all(x is None for x in own) else layout.merge_or_none(iter(own)))
    return given


def output_tangents(name: str, returned: Any, outputs: OutputLayout, avals: Sequence[Any]) -> list[jax.Array | None]:
    """One tangent (or `None` for zero) for each array leaf of the outputs.

    Args:
      name: the Function's name.
      returned: what the user's `jvp` returned.
      outputs: the outputs' layout.
      avals: the types of their array leaves.

    Raises:
      RuntimeError, TypeError: see the table at the top of this module.
    """
    given = _one_per_output(name, returned, outputs)
    leaves = enumerate(avals)
    tangents: list[jax.Array | None] = []
    for position, (tangent, layout) in enumerate(zip(given, outputs.layouts, strict=True)):
        where = f"output {position}"
        own = [AvalLeaf(aval, i not in outputs.non_differentiable) for i, aval in islice(leaves, layout.num_arrays)]
        try:
            pieces = list(paired_leaves(tangent, layout.merge(iter(own)), layout))
        except StructureError as problem:
            raise _refuse(name, "structure", where=where, problem=problem) from None
        for path, piece, leaf in pieces:
            if isinstance(leaf, AvalLeaf):
                tangents.append(_tangent(name, piece, leaf.aval, leaf.is_wanted, where + path))
            elif piece is not None:
                raise _refuse(name, "integer", where=where + path, why=f"the Python value {leaf!r}")
    return tangents


def _one_per_output(name: str, returned: Any, outputs: OutputLayout) -> Sequence[Any]:
    expected = len(outputs.layouts)
    given = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else (returned,)
    if len(given) != expected:
        raise _refuse(name, "count", expected=expected, got=len(given))
    return given


def _tangent(name: str, tangent: Any, aval: Any, is_differentiable: bool, where: str) -> jax.Array | None:
    if tangent is None:
        return None
    if not is_array_leaf(tangent) or is_key(tangent):
        got = "a random key" if is_array_leaf(tangent) else f"a Python {type(tangent).__name__}"
        raise _refuse(name, "type", got=got, where=where, shape=aval.shape)
    if not is_differentiable or not is_inexact(aval.dtype):
        why = f"its dtype is {aval.dtype}" if is_differentiable else "it was marked so"
        raise _refuse(name, "integer", where=where, why=why)
    tangent = as_array(tangent)
    if tangent.dtype.kind == "c" and aval.dtype.kind != "c":
        raise _refuse(name, "complex", got=tangent.dtype, where=where, expected=aval.dtype)
    if tangent.shape != aval.shape:
        raise _refuse(name, "shape", got=tangent.shape, where=where, expected=aval.shape)
    return match_tangent(tangent.astype(aval.dtype), aval)
