"""What a run of `forward` saves, taken apart: which residual is which input, output or intermediate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxfn._protocol.context import FunctionCtx, SavedNames, saved_by
from jaxfn._protocol.hooks import Hooks
from jaxfn._values.arrays import as_array
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout, split_saved


class ResidualSource(NamedTuple):
    """Where a residual comes from.

    Attributes:
      kind: "input", "output" or "intermediate".
      place: its index among those.
      is_packed: whether it passes the saved-tensor hooks.
    """

    kind: str
    place: int
    is_packed: bool


class Saved(NamedTuple):
    """What a ctx keeps for `backward` and `jvp`, less its arrays.

    A saved input or output is not stored again: the residual *is* that input or output, and so it differentiates as
    that. An intermediate ("intermediate") differentiates through the operations that made it.

    Attributes:
      names: what the kept values are called.
      layouts: one per kept value.
      sources: where each residual comes from.
      order: for each array leaf of the kept values, which residual it is.
    """

    names: SavedNames
    layouts: list[Layout]
    sources: list[ResidualSource]
    order: list[int]


def save(
    ctx: FunctionCtx, inputs: Sequence[Any], outputs: Sequence[Any], hooks: Hooks | None
) -> tuple[Saved, list[jax.Array]]:
    """What this ctx keeps, and the intermediates among it."""
    names, values = saved_by(ctx)
    known = {id(x): ("output", i) for i, x in enumerate(outputs)}
    for i, x in enumerate(inputs):
        known[id(x)] = ("input", i)
    intermediates: list[Any] = []
    layouts: list[Layout] = []
    places: dict[ResidualSource, int] = {}
    order: list[int] = []
    for position, value in enumerate(values):
        # Looking at an input or output again would cost more than asking first.
        arrays, layout = ((value,), ARRAY_LAYOUT) if id(value) in known else split_saved(value)
        layouts.append(layout)
        is_packed = hooks is not None and position < names.num_for_backward
        for array in arrays:
            if id(array) not in known:
                known[id(array)] = ("intermediate", len(intermediates))
                intermediates.append(array)
            source = ResidualSource(*known[id(array)], is_packed)
            order.append(places.setdefault(source, len(places)))
    return Saved(names, layouts, list(places), order), [as_array(x) for x in intermediates]
