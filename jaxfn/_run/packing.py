"""Residuals under saved-tensor hooks: packed, and unpacked again, with the derivative of the arrays themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax

from jaxfn._compat import memory_space
from jaxfn._primitives.attach import attach, detach
from jaxfn._primitives.refusal import Refusal
from jaxfn._protocol.saved_tensor_hooks import Hooks
from jaxfn._run.forward import ResidualSource
from jaxfn._values.arrays import as_array, is_array_leaf, is_inexact, is_traced
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout, split


def pack(
    owner: str, hooks: Hooks, sources: Sequence[ResidualSource], residuals: Sequence[Any]
) -> tuple[list[Layout], list[Any]]:
    """What is kept of residuals: those that pass `pack_hook` as it made them, taken apart.

    Args:
      owner: the Function's name, for messages.
      hooks: the hooks.
      sources: where each residual comes from.
      residuals: the arrays.

    Returns:
      For each residual the layout of what is kept of it, and all arrays that are kept.
    """
    layouts: list[Layout] = []
    kept: list[Any] = []
    for source, residual in zip(sources, residuals, strict=True):
        leaves, layout = _packed(owner, hooks, residual) if source.is_packed else ([residual], ARRAY_LAYOUT)
        layouts.append(layout)
        kept += leaves
    return layouts, kept


def unpack(
    owner: str, hooks: Hooks, sources: Sequence[ResidualSource], layouts: Sequence[Layout], kept: Sequence[Any]
) -> list[Any]:
    """The residuals again; see `pack`."""
    remaining = iter(kept)
    leaves = [list(islice(remaining, layout.num_arrays)) for layout in layouts]
    return [
        _unpacked(owner, hooks, own, layout) if source.is_packed else own[0]
        for source, own, layout in zip(sources, leaves, layouts, strict=True)
    ]


def _packed(owner: str, hooks: Hooks, array: Any) -> tuple[list[Any], Layout]:
    """What `pack_hook` makes of a residual, taken apart."""
    if not is_traced(array):
        leaves, layout = split(hooks.pack(array))
        return [as_array(x) for x in leaves], layout
    leaves, layout = split(hooks.pack(as_array(*detach([array]))))
    return _carrying([as_array(x) for x in leaves], [array], owner), layout


def _unpacked(owner: str, hooks: Hooks, leaves: Sequence[Any], layout: Layout) -> Any:
    """The residual again."""
    is_live = any(map(is_traced, leaves))
    array = hooks.unpack(layout.merge(iter(detach(leaves) if is_live else leaves)))
    if not is_array_leaf(array):
        raise TypeError(
            f"{owner}: the unpack_hook of saved_tensors_hooks returned a {type(array).__name__}; expected the array "
            "that pack_hook was given."
        )
    array = as_array(array)
    return _carrying([array], leaves, owner)[0] if is_live else array


def _carrying(made: list[Any], sources: Sequence[Any], owner: str) -> list[Any]:
    """What a hook made, with the derivative of what it was made of."""
    if not any(is_inexact(x.dtype) for x in sources):
        return made
    alike = len(made) == len(sources) == 1 and is_inexact(made[0].dtype) and made[0].shape == sources[0].shape
    refusal = Refusal(
        NotImplementedError,
        f"{owner}: a second derivative goes through an array that saved_tensors_hooks packed into something other than "
        "one floating array of its shape, which has no derivative. Differentiate twice without the hooks, or let "
        "pack_hook return such an array.",
    )
    return attach(made, (), sources, _same_but_for_dtype if alike else refusal)


def _same_but_for_dtype(
    made: Sequence[Any], kept: Sequence[Any], sources: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    (source,), (tangent,) = sources, tangents
    tangent = tangent.astype(made[0].dtype)
    here, there = memory_space(source), memory_space(made[0])
    if here != there:
        tangent = jax.device_put(tangent, there, src=here)  # src is where its transpose goes back to
    return attach(made, (), sources, _same_but_for_dtype), [tangent]
