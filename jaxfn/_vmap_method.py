"""The user's `vmap` static method, as JAX's `custom_vmap` around `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfn._boundary import ForwardOutputs, OutputSpec, flatten_outputs
from jaxfn._context import FunctionCtx
from jaxfn._methods import UserMethods
from jaxfn._signature import InputSpec
from jaxfn._tree import is_array_leaf, is_none, is_wrapped_array


class VmapInfo(NamedTuple):
    """The description of the batch that `vmap` receives.

    Attributes:
      batch_size: The number of elements.
      randomness: torch's `randomness` argument. JAX has none (its keys are explicit), so it is torch's default.
    """

    batch_size: int
    randomness: str = "error"


@dataclass(eq=False)
class _Outputs:
    """The array leaves of the outputs with their spec: a pytree node."""

    spec: OutputSpec
    arrays: Sequence[Any]


jax.tree_util.register_pytree_node(_Outputs, attrgetter("arrays", "spec"), _Outputs)


def forward_with_vmap(methods: UserMethods, spec: InputSpec, ctx: FunctionCtx, arrays: Sequence[Any]) -> ForwardOutputs:
    """Runs `forward` (and `setup_context`) so that batching it calls `vmap`."""
    problem = methods.vmap_problem()
    if problem is not None:
        arrays = _raising_when_batched(problem)(*arrays)
        inputs = spec.unflatten(arrays)
        returned = methods.forward(ctx, spec, inputs)
        spec.check_inputs_unchanged(methods.name, inputs, arrays, returned.originals)
        return returned

    @custom_vmap
    def batchable(*arrays: Any) -> _Outputs:
        inputs = spec.unflatten(arrays)
        returned = methods.forward_alone(spec, inputs)
        spec.check_inputs_unchanged(methods.name, inputs, arrays, returned.originals)
        return _Outputs(returned.spec, returned.arrays)

    @batchable.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[_Outputs, _Outputs]:
        return _call_vmap(methods, spec, axis_size, in_batched, arrays)

    outputs = batchable(*arrays)
    return methods.set_up(ctx, spec.unflatten(arrays), flatten_outputs(outputs.spec.unflatten(outputs.arrays)))


def _raising_when_batched(problem: str) -> Any:
    @custom_vmap
    def identity(*arrays: Any) -> Any:
        return arrays

    @identity.def_vmap
    def _(*_: Any) -> Any:
        raise RuntimeError(problem)

    return identity


def _call_vmap(
    methods: UserMethods, spec: InputSpec, axis_size: int, in_batched: Sequence[bool], arrays: Sequence[Any]
) -> tuple[_Outputs, _Outputs]:
    """Calls the user's `vmap`; returns the outputs, batched at axis 0, and whether each array leaf is batched."""
    name = methods.name
    indices = iter(range(len(in_batched)))
    per_input = tuple(tree.unflatten_gradient(islice(indices, tree.num_arrays)) for tree in spec.trees)

    def dim(index: Any) -> int | None:
        (index,) = jax.tree_util.tree_leaves(index)  # of a wrapper, that of the one array in it
        return 0 if in_batched[index] else None

    in_dims = jax.tree_util.tree_map(dim, per_input, is_leaf=is_wrapped_array)
    vmap: Any = methods.vmap
    with jax.named_scope(f"{name}.vmap"):
        result = vmap(VmapInfo(axis_size), in_dims, *spec.unflatten(arrays))
    if not isinstance(result, tuple) or len(result) != 2:
        raise RuntimeError(
            f"{name}.vmap is expected to return two values, the output and its out_dims, which have the output's "
            f"structure; got {_description(result)}."
        )
    output, out_dims = result
    returned = flatten_outputs(output)
    dims = _batch_dims(name, out_dims, returned)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(returned.arrays, dims, strict=True)]
    for index, (x, d) in enumerate(zip(moved, dims, strict=True)):
        if d is not None and x.shape[0] != axis_size:
            raise RuntimeError(
                f"{name}.vmap returned an output (array {index}) of size {x.shape[0]} along its out_dims axis {d}: "
                f"expected the batch size {axis_size}."
            )
    return _Outputs(returned.spec, moved), _Outputs(returned.spec, [d is not None for d in dims])


def _description(value: object) -> str:
    if is_array_leaf(value):
        return "an array"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _batch_dims(name: str, out_dims: Any, returned: ForwardOutputs) -> list[int | None]:
    """Returns the batch axis of each array leaf of the outputs; one of `out_dims` may apply to a whole subtree."""
    if type(out_dims) is tuple and returned.spec.container not in (None, tuple):
        make: Any = returned.spec.container
        out_dims = make(*out_dims) if len(out_dims) == len(returned.spec.trees) else out_dims
    try:
        spread = jax.tree_util.tree_broadcast(out_dims, returned.value, is_leaf=is_none)
    except ValueError as error:
        raise RuntimeError(
            f"{name}.vmap returned out_dims {out_dims!r}, which do not have the output's structure: {error}"
        ) from None
    dims, leaves = (jax.tree_util.tree_leaves(tree, is_leaf=is_none) for tree in (spread, returned.value))
    found = [dim for dim, leaf in zip(dims, leaves, strict=True) if is_array_leaf(leaf)]
    for index, (dim, x) in enumerate(zip(found, returned.arrays, strict=True)):
        if dim is not None and (type(dim) is not int or not -x.ndim <= dim < x.ndim):
            raise RuntimeError(
                f"{name}.vmap returned out_dims {out_dims!r}, but {dim!r} is not an axis of its output (array {index}) "
                f"of shape {x.shape}. Each is an axis of that array, or None if it has no batch."
            )
    return found
