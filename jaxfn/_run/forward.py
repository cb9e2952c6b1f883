"""The user's `forward`, run once, as its author wrote it; what it returned, and what it saved.

No derivative is attached to what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxfn._protocol.context import ContextState, FunctionCtx, SavedNames, saved_by
from jaxfn._protocol.marks import check_dirty, non_differentiable_positions
from jaxfn._protocol.outputs import Returned
from jaxfn._protocol.saved_tensor_hooks import Hooks
from jaxfn._run.call import Call
from jaxfn._run.logging import hand_over_logs
from jaxfn._run.vmap import forward_with_vmap
from jaxfn._values.arrays import as_array, is_traced
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout, split_saved


def call_forward(
    call: Call, arrays: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[ContextState, FunctionCtx, Returned]:
    """Runs the user's forward with these arrays in their places: the ctx that it filled and its outputs."""
    state = ContextState(call.form, call.needs_input_grad(perturbed))
    ctx = FunctionCtx(state)
    if call.numbers and not any(perturbed):
        state.numbers = call.numbers
    try:
        if call.methods.vmap is not None and any(map(is_traced, arrays)):
            returned = forward_with_vmap(call, ctx, arrays)
        else:
            inputs = call.inputs(arrays)
            returned = call.methods.forward(ctx, call.form, inputs)
            if call.changeable:
                call.refuse_changed_inputs(inputs, arrays, returned.originals)
    except jax.errors.UnexpectedTracerError as error:
        raise call.methods.out_of_reach("forward") from error
    if state.dirty and check_dirty(call.name, state, arrays, returned.arrays):
        call.methods.warn_of_dirty()
    if state.non_differentiable:
        marked = non_differentiable_positions(call.name, state, returned.originals)
        returned = returned._replace(non_differentiable=marked)
    if state.logged:
        returned = returned._replace(arrays=hand_over_logs(call.name, "forward", state, returned.arrays))
    return state, ctx, returned


def undecorated(call: Call, arrays: Sequence[Any]) -> Any:
    """The outputs as the user's forward computes them, without the Function's rule."""
    _, _, returned = call_forward(call, arrays, call.unperturbed)
    return returned.layout.merge(returned.arrays)


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
