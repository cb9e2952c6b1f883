"""The user's `vmap` static method, as JAX's `custom_vmap` around `forward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfn._arguments import Form
from jaxfn._context import FunctionCtx
from jaxfn._leaves import Layout, is_array_leaf, is_none
from jaxfn._methods import Methods
from jaxfn._outputs import Outputs, Returned, take_apart


class VmapInfo(NamedTuple):
    """What `vmap` is told of the batch.

    Attributes:
      batch_size: how many examples there are.
      randomness: torch's `randomness` argument. JAX has none (its keys are explicit), so it is torch's default.
    """

    batch_size: int
    randomness: str = "error"


class _Call(Protocol):
    """What is needed of a way of calling a Function."""

    @property
    def name(self) -> str: ...
    @property
    def methods(self) -> Methods: ...
    @property
    def form(self) -> Form: ...
    @property
    def layouts(self) -> tuple[Layout, ...]: ...
    def inputs(self, arrays: Sequence[Any]) -> tuple[Any, ...]: ...
    def closes_over_tracers(self) -> bool: ...


def forward_with_vmap(call: _Call, ctx: FunctionCtx, arrays: Sequence[Any]) -> Returned:
    """Runs `forward` (and `setup_context`) so that batching it calls `vmap`."""
    problem = call.methods.why_vmap_is_refused()
    if problem is not None:
        return call.methods.forward(ctx, call.form, call.inputs(_refusing_batching(problem)(*arrays)))

    def alone(*arrays: Any) -> Outputs:
        returned = call.methods.forward_alone(call.form, call.inputs(arrays))
        return Outputs(returned.arrays, returned.layout)

    forward = custom_vmap(alone)

    @forward.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[Outputs, Outputs]:
        return _batched_by_user(call, axis_size, in_batched, arrays)

    if not call.closes_over_tracers():  # which a custom_jvp must not, where they are differentiated
        forward = _with_derivative_of(alone, forward)
    outputs = forward(*arrays)
    value = outputs.layout.merge(outputs.arrays)
    return call.methods.set_up(ctx, call.inputs(arrays), take_apart(value))


def _with_derivative_of(alone: Callable[..., Outputs], forward: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """`forward`, which calls the user's `vmap`, with the derivative of what it computes.

    JAX cannot differentiate a batched custom_vmap twice (0.10.0 to 0.12.0).
    """

    @jax.custom_jvp
    def differentiable(*arrays: Any) -> Outputs:
        return forward(*arrays)

    @differentiable.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Outputs, Outputs]:
        return differentiable(*primals), jax.jvp(alone, primals, tangents)[1]

    return differentiable


def _refusing_batching(problem: str) -> Any:
    @custom_vmap
    def same(*arrays: Any) -> Any:
        return arrays

    @same.def_vmap
    def _(*_: Any) -> Any:
        raise RuntimeError(problem)

    return same


def _batched_by_user(
    call: _Call, axis_size: int, in_batched: Sequence[bool], arrays: Sequence[Any]
) -> tuple[Outputs, Outputs]:
    """The outputs for a batch, the batch at axis 0, and for each array leaf whether it has one."""
    dims = iter([0 if is_batched else None for is_batched in in_batched])
    in_dims = tuple(layout.merge_or_none(islice(dims, layout.num_arrays)) for layout in call.layouts)
    vmap: Any = call.methods.vmap
    result = vmap(VmapInfo(axis_size), in_dims, *call.inputs(arrays))
    if not isinstance(result, tuple) or len(result) != 2:
        raise RuntimeError(
            f"{call.name}.vmap is expected to return two values, the output and its out_dims, which have the output's "
            f"structure; got {_described(result)}."
        )
    output, out_dims = result
    returned = take_apart(output)
    out_axes = _axes(call.name, out_dims, returned)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(returned.arrays, out_axes, strict=True)]
    _check_sizes(call.name, moved, out_axes, axis_size)
    batched = [axis is not None for axis in out_axes]
    return Outputs(moved, returned.layout), Outputs(batched, returned.layout)


def _described(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _axes(name: str, out_dims: Any, returned: Returned) -> list[int | None]:
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
