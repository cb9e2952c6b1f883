"""The user's `forward`, run once, as its author wrote it: no derivative is attached to what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxfn._protocol.context import ContextState, FunctionCtx
from jaxfn._protocol.marks import check_dirty, non_differentiable_positions
from jaxfn._protocol.outputs import Returned
from jaxfn._run.call import Call
from jaxfn._run.logging import hand_over_logs
from jaxfn._run.vmap import forward_with_vmap
from jaxfn._values.arrays import is_traced


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
        if call.closes_over_tracers():
            raise call.methods.out_of_reach("forward") from error
        raise
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
