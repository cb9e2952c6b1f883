"""The user's `vmap` static method, as JAX's `custom_vmap` around `forward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfn._primitives.attach import Rule, attach, detach
from jaxfn._protocol.context import FunctionCtx
from jaxfn._protocol.outputs import OutputLayout, Outputs, Returned, take_apart
from jaxfn._run.call import Call
from jaxfn._run.record import Record
from jaxfn._values.arrays import is_array_leaf, is_boxed_array, is_inexact, is_none


class VmapInfo(NamedTuple):
    """What `vmap` is told of the batch.

    Attributes:
      batch_size: how many examples there are.
      randomness: torch's `randomness` argument. JAX has none (its keys are explicit), so it is torch's default.
    """

    batch_size: int
    randomness: str = "error"


def forward_with_vmap(call: Call, ctx: FunctionCtx, arrays: Sequence[Any]) -> Returned:
    """Runs `forward` (and `setup_context`) so that batching it calls `vmap`."""
    problem = call.methods.why_vmap_is_refused()
    if problem is not None:
        arrays = _refusing_batching(problem)(*arrays)
        inputs = call.inputs(arrays)
        returned = call.methods.forward(ctx, call.form, inputs)
        call.refuse_changed_inputs(inputs, arrays, returned.originals)
        return returned

    layouts: list[OutputLayout] = []

    def program(*arrays: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        inputs = call.inputs(arrays)
        returned = call.methods.forward_alone(call.form, inputs)
        call.refuse_changed_inputs(inputs, arrays, returned.originals)
        layouts.append(returned.layout)
        return returned.arrays, ()

    record = Record(program, arrays, ())  # so that a derivative does not run forward again

    def alone(*arrays: Any) -> Outputs:
        return Outputs(layouts[0], record.perform(arrays)[0])

    forward = custom_vmap(alone)

    @forward.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[Outputs, Outputs]:
        return _batched_by_user(call, axis_size, in_batched, arrays)

    has_derivative = any(is_inexact(x.dtype) for x in arrays) and not any(call.are_refs)
    outputs = forward(*(detach(arrays) if has_derivative else arrays))
    if has_derivative:
        outputs = Outputs(outputs.layout, attach(outputs.arrays, (), arrays, _derivative_of(alone)))
    value = outputs.layout.merge(outputs.arrays)
    return call.methods.set_up(ctx, call.inputs(arrays), take_apart(value))


def _derivative_of(function: Callable[..., Outputs]) -> Rule:
    """A rule for `attach`: what the user's `vmap` made has the derivative of what it stands for.

    JAX cannot differentiate a batched custom_vmap twice (0.10.0 to 0.12.0).
    """

    def rule(
        made: Sequence[Any], kept: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def of_moving(*values: Any) -> Sequence[Any]:
            arrays = list(inputs)
            for i, value in zip(moving, values, strict=True):
                arrays[i] = value
            return list(function(*arrays).arrays)

        pushed = jax.jvp(of_moving, [inputs[i] for i in moving], [tangents[i] for i in moving])[1]
        return attach(made, kept, inputs, rule), pushed

    return rule


def _refusing_batching(problem: str) -> Any:
    @custom_vmap
    def same(*arrays: Any) -> Any:
        return arrays

    @same.def_vmap
    def _(*_: Any) -> Any:
        raise RuntimeError(problem)

    return same


def _batched_by_user(
    call: Call, axis_size: int, in_batched: Sequence[bool], arrays: Sequence[Any]
) -> tuple[Outputs, Outputs]:
    """The outputs for a batch, the batch at axis 0, and for each array leaf whether it has one."""
    places = iter(range(len(in_batched)))
    of_inputs = tuple(layout.merge_or_none(islice(places, layout.num_arrays)) for layout in call.layouts)

    def dim(place: Any) -> int | None:
        (place,) = jax.tree_util.tree_leaves(place)  # of a box, of the one array in it
        return 0 if in_batched[place] else None

    in_dims = jax.tree_util.tree_map(dim, of_inputs, is_leaf=is_boxed_array)
    vmap: Any = call.methods.vmap
    with jax.named_scope(call.scopes.vmap):
        result = vmap(VmapInfo(axis_size), in_dims, *call.inputs(arrays))
    if not isinstance(result, tuple) or len(result) != 2:
        raise RuntimeError(
            f"{call.name}.vmap is expected to return two values, the output and its out_dims, which have the output's "
            f"structure; got {_described(result)}."
        )
    output, out_dims = result
    returned = take_apart(output)
    out_axes = _batch_axes(call.name, out_dims, returned)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(returned.arrays, out_axes, strict=True)]
    _check_sizes(call.name, moved, out_axes, axis_size)
    batched = [axis is not None for axis in out_axes]
    return Outputs(returned.layout, moved), Outputs(returned.layout, batched)


def _described(value: object) -> str:
    if is_array_leaf(value):
        return "an array"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _batch_axes(name: str, out_dims: Any, returned: Returned) -> list[int | None]:
    """The batch axis of each array leaf of the outputs; one of `out_dims` may stand for a whole subtree."""
    if type(out_dims) is tuple and returned.container not in (None, tuple):
        make: Any = returned.container
        out_dims = make(*out_dims) if len(out_dims) == len(returned.layouts) else out_dims
    try:
        spread = jax.tree_util.tree_broadcast(out_dims, returned.value, is_leaf=is_none)
    except ValueError as error:
        raise RuntimeError(
            f"{name}.vmap returned out_dims {out_dims!r}, which do not have the output's structure: {error}"
        ) from None
    axes, leaves = (jax.tree_util.tree_leaves(tree, is_leaf=is_none) for tree in (spread, returned.value))
    found = [axis for axis, leaf in zip(axes, leaves, strict=True) if is_array_leaf(leaf)]
    for position, (axis, x) in enumerate(zip(found, returned.arrays, strict=True)):
        if axis is not None and (type(axis) is not int or not -x.ndim <= axis < x.ndim):
            raise RuntimeError(
                f"{name}.vmap returned out_dims {out_dims!r}, but {axis!r} is no axis of its output (array "
                f"{position}) of shape {x.shape}. Each is an axis of that array, or None where it has no batch."
            )
    return found


def _check_sizes(name: str, moved: Sequence[Any], axes: Sequence[int | None], axis_size: int) -> None:
    for position, (x, axis) in enumerate(zip(moved, axes, strict=True)):
        if axis is not None and x.shape[0] != axis_size:
            raise RuntimeError(
                f"{name}.vmap returned an output (array {position}) of size {x.shape[0]} along its out_dims axis "
                f"{axis}: expected the batch size {axis_size}."
            )
