"""Reading and writing elements by index tensors and masks.

torch raises for an index out of range. Here reading returns NaN, or the smallest integer, and writing does nothing.
Which indices are out of range depends on the operation: negative ones count from the end only where they do in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfn._torch.operations.dims import along, vector
from jaxfn._torch.operations.platforms import along_axis
from jaxfn._torch.operations.promotion import half_to_single, result_type
from jaxfn._torch.operations.shapes import to_dtype
from jaxfn._torch.operations.table import data_movement, mark_unsupported, operation
from jaxfn._torch.values.errors import TranslationError

Indices = Sequence[Array | None]

mark_unsupported(
    "the size of its result depends on the values of its inputs, and JAX compiles for known sizes; `torch.where` "
    "does not change the size",
    "aten.nonzero",
    "aten.where.default",
    "aten.masked_select",
    "aten.unique_consecutive",
    "aten._unique",
    "aten._unique2",
    "aten.unique_dim",
)
mark_unsupported(
    "the size of its result depends on the largest value, whatever `minlength` is, and JAX compiles for known sizes; "
    "`torch.zeros(n).index_add_(0, values, weights)` counts n values",
    "aten.bincount",
)
mark_unsupported(
    "the size of its result depends on the values of its inputs, and JAX compiles for known sizes; with "
    "`output_size=` it is known",
    "aten.repeat_interleave.Tensor",
)


@operation("aten.repeat_interleave.Tensor")
def repeat_interleave(repeats: Array, *, output_size: int) -> Array:
    """Returns each index as often as `repeats` says; all out of range if those are not `output_size` in total."""
    indices = jnp.repeat(np.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)
    return jnp.where(repeats.sum() == output_size, indices, repeats.shape[0])


def read(x: Array, at: Any, *, wraps: bool = False) -> Array:
    """Returns `x[at]`, filled where an index is out of range. A negative one is out of range unless it `wraps`."""
    return x.at[at].get(mode="fill", wrap_negative_indices=wraps)


@data_movement("aten.index", "aten._unsafe_index")
def index(x: Array, indices: Indices) -> Array:
    if any(_is_mask(i) for i in indices):
        raise TranslationError(
            "indexing with a boolean mask gives a result whose size depends on the mask's values, and JAX compiles for "
            "known sizes; use `torch.where(mask, x, 0)`"
        )
    return read(x, _positions(indices), wraps=True)


def _is_mask(indices: Array | None) -> bool:
    return indices is not None and indices.dtype.name in ("bool", "uint8")


def _positions(indices: Indices) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@data_movement("aten.index_put", "aten._unsafe_index_put")
def index_put(x: Array, indices: Indices, values: Array, accumulate: bool = False, *_: Any) -> Array:
    values = to_dtype(values, x.dtype)
    if any(_is_mask(i) for i in indices):
        return _mask_put(x, indices, values, accumulate)
    return combine(x, _positions(indices), values, "add" if accumulate else "set", wraps=True)


def _mask_put(x: Array, indices: Indices, values: Array, accumulate: bool) -> Array:
    """Writes where a mask is true. The mask is alone, or between full slices."""
    masks = [i for i in indices if i is not None]
    if len(masks) > 1:
        raise TranslationError("index_put with a boolean mask and another index is not supported: use `torch.where`")
    mask = masks[0].astype(bool)
    first = next(i for i, part in enumerate(indices) if part is not None)
    behind = x.ndim - first - mask.ndim
    # With the mask's axes as one axis, x is (before..., elements, behind...).
    elements = x.reshape(*x.shape[:first], mask.size, *x.shape[first + mask.ndim :])
    if not values.size:  # The mask is false everywhere.
        return x
    if values.ndim > behind and values.shape[-behind - 1] != 1:
        # One value for each true element of the mask, in order.
        order = jnp.cumsum(mask.reshape(-1)) - 1
        values = jnp.take(values, order, -behind - 1)
    chosen = mask.reshape(-1, *[1] * behind)
    return jnp.where(chosen, elements + values if accumulate else values, elements).reshape(x.shape)


@data_movement("aten.masked_scatter")
def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    mask = jnp.broadcast_to(mask, shape)
    order = jnp.cumsum(mask.reshape(-1)).reshape(shape) - 1
    values = jnp.take(source.reshape(-1), order) if source.size else jnp.zeros(shape, x.dtype)
    return jnp.where(mask, values.astype(x.dtype), x)


@data_movement("aten.masked_scatter_backward")
def masked_scatter_backward(gradient: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """Returns the gradient of `source`, in order; unused elements get 0."""
    mask = jnp.broadcast_to(mask, gradient.shape).reshape(-1)
    order = jnp.where(mask, jnp.cumsum(mask) - 1, math.prod(sizes))
    flat = jnp.zeros(math.prod(sizes), gradient.dtype)
    return flat.at[order].set(gradient.reshape(-1), mode="drop").reshape(tuple(sizes))


@data_movement("aten.take")
def take(x: Array, indices: Array) -> Array:
    return read(x.reshape(-1), indices, wraps=True)


@data_movement("aten.put")
def put(x: Array, indices: Array, source: Array, accumulate: bool = False) -> Array:
    how = "add" if accumulate else "set"
    return combine(x.reshape(-1), indices.reshape(-1), source.reshape(-1), how, wraps=True).reshape(x.shape)


@data_movement("aten.index_select")
def index_select(x: Array, dim: int, indices: Array) -> Array:
    def read_along(x: Array, axis: int, indices: Array) -> Array:
        return read(x, along(x, axis, indices))

    rows = along_axis(read_along, vector(x), dim % max(x.ndim, 1), vector(indices))
    return rows.reshape(()) if x.ndim == 0 else rows


def _along(x: Array, dim: int, indices: Array) -> tuple[Any, ...]:
    """Returns the index that reads `x` at `indices` along `dim`, and at their own position along the other axes."""
    grids: list[Any] = list(np.ix_(*(np.arange(length) for length in indices.shape)))
    grids[dim] = indices
    return tuple(grids)


@operation("aten.gather")
def gather(x: Array, dim: int, indices: Array, sparse_grad: bool = False) -> Array:
    if x.ndim == 0 or indices.ndim == 0:
        return read(vector(x), vector(indices)).reshape(indices.shape)
    return read(x, _along(x, dim, indices))


# The method of `.at[...]` for each of torch's reductions.
_COMBINE = {
    "sum": "add",
    "add": "add",
    "prod": "multiply",
    "multiply": "multiply",
    "amax": "max",
    "amin": "min",
    None: "set",
}


@data_movement("aten.scatter")
def scatter(x: Array, dim: int, indices: Array, source: Any, reduce: str | None = None) -> Array:
    """Writes `source` (a number, or a tensor, which is read as far as `indices` reach) to `x` along `dim`."""
    flat, positions = vector(x), vector(indices)
    values = jnp.asarray(source, x.dtype)
    if values.ndim:
        values = values[tuple(slice(length) for length in indices.shape)]
    return combine(flat, _along(flat, dim, positions), values, _COMBINE[reduce]).reshape(x.shape)


def combine(x: Array, at: Any, values: Array, how: str, *, wraps: bool = False) -> Array:
    """Returns `x` with `values` written to, added to or otherwise combine with `x[at]`; the sum of booleans is "or".

    Nothing is written where an index is out of range. A negative one is out of range unless it `wraps`.
    """
    if x.dtype == np.bool_:
        how = {"add": "max", "multiply": "min"}.get(how, how)
    if how != "set":
        x, values = half_to_single((x, values))
    return getattr(x.at[at], how)(values, mode="drop", wrap_negative_indices=wraps)


@data_movement("aten.scatter_add")
def scatter_add(x: Array, dim: int, indices: Array, source: Array) -> Array:
    return scatter(x, dim, indices, source, "add")


@operation("aten.scatter_reduce.two")
def scatter_reduce(x: Array, dim: int, indices: Array, source: Array, reduce: str, include_self: bool = True) -> Array:
    if reduce == "mean":
        ones = jnp.ones(indices.shape, x.dtype)
        counts = scatter(jnp.full_like(x, int(include_self)), dim, indices, ones, "sum")
        total = scatter_reduce(x, dim, indices, source, "sum", include_self)
        counts = jnp.maximum(counts, 1)
        return total / counts if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.floor_divide(total, counts)
    if not include_self:
        x = scatter(x, dim, indices, _neutral(reduce, x.dtype))
    return scatter(x, dim, indices, source, reduce)


def _neutral(reduce: str, dtype: Any) -> Any:
    """Returns the neutral element of `reduce`."""
    if reduce in ("sum", "prod"):
        return int(reduce == "prod")
    if dtype == np.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max
    return -np.inf if reduce == "amax" else np.inf


@operation("aten.index_add")
def index_add(x: Array, dim: int, indices: Array, source: Array, alpha: Any = 1) -> Array:
    flat = vector(x)
    at = along(flat, dim, vector(indices))
    return combine(flat, at, vector(source) * jnp.asarray(alpha, x.dtype), "add").reshape(x.shape)


@data_movement("aten.index_copy")
def index_copy(x: Array, dim: int, indices: Array, source: Array) -> Array:
    flat = vector(x)
    return combine(flat, along(flat, dim, vector(indices)), vector(source), "set").reshape(x.shape)


@data_movement("aten.index_fill")
def index_fill(x: Array, dim: int, indices: Array, value: Any) -> Array:
    flat = vector(x)
    at = along(flat, dim, vector(indices))
    return combine(flat, at, jnp.asarray(value, x.dtype), "set", wraps=True).reshape(x.shape)


@operation("aten.index_reduce")
def index_reduce(x: Array, dim: int, indices: Array, source: Array, reduce: str, include_self: bool = True) -> Array:
    flat, dim = vector(x), dim % max(x.ndim, 1)
    source = vector(source)
    shape = [1] * flat.ndim
    shape[dim] = -1
    spread = jnp.broadcast_to(indices.reshape(shape), source.shape)
    return scatter_reduce(flat, dim, spread, source, reduce, include_self).reshape(x.shape)


@data_movement("aten.embedding")
def embedding(weight: Array, indices: Array, padding_idx: int = -1, *_: Any) -> Array:
    """Returns rows of `weight`. The row at `padding_idx` gets no gradient."""
    rows = read(weight, indices)
    if padding_idx == -1:
        return rows
    return jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


@operation("aten.embedding_renorm")
def embedding_renorm(weight: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """Scales the indexed rows that are longer than `max_norm` to that length."""
    norms = jnp.linalg.norm(weight, norm_type, 1, keepdims=True)
    is_used = combine(jnp.zeros((weight.shape[0], 1), bool), indices.reshape(-1), jnp.ones((), bool), "set")
    return jnp.where(is_used & (norms > max_norm), weight * (max_norm / (norms + 1e-7)), weight)


@operation("aten.embedding_dense_backward")
def embedding_dense_backward(
    gradient: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    rows = gradient.reshape(-1, gradient.shape[-1])
    flat = indices.reshape(-1)
    is_counted = flat != padding_idx
    if scale_grad_by_freq:
        counts = combine(jnp.zeros(num_weights, rows.dtype), flat, jnp.ones((), rows.dtype), "add")
        rows = rows / counts[flat][:, None]
    zeros = jnp.zeros((num_weights, rows.shape[-1]), rows.dtype)
    return combine(zeros, flat, jnp.where(is_counted[:, None], rows, 0), "add")


@operation("aten.searchsorted")
def searchsorted(
    boundaries: Array,
    values: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Array:
    values = jnp.asarray(values)
    dtype = result_type(boundaries, values)
    boundaries, values = boundaries.astype(dtype), values.astype(dtype)
    if sorter is not None:
        boundaries = gather(boundaries, boundaries.ndim - 1, sorter)

    def find(edges: Array, x: Array) -> Array:
        return jnp.searchsorted(edges, x, "right" if right or side == "right" else "left")

    if boundaries.ndim == 1:
        return find(boundaries, values)
    rows = math.prod(boundaries.shape[:-1])
    found = jax.vmap(find)(boundaries.reshape(rows, -1), values.reshape(rows, -1))
    return found.reshape(values.shape)


@operation("aten.bucketize")
def bucketize(values: Any, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    return searchsorted(boundaries, values, out_int32, right)
