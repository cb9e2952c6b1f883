"""Reading and writing elements by index tensors and masks.

torch raises for an index out of range. Here reading returns NaN, or the smallest integer, and writing does nothing.
Which indices are out of range depends on the operation: negative ones count from the end only where they do in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfn._torch.operations.dims import along, vector
from jaxfn._torch.operations.platforms import along_axis, by_platform
from jaxfn._torch.operations.promotion import half_to_single, is_inexact, result_type
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
    """Returns `x[at]`, filled where an index is out of range. A negative one is out of range unless it `wraps`.

    JAX's mode "fill" looks for such indices by a reduction, which takes longer on a CPU than to read the elements.
    """
    at = at if isinstance(at, tuple) else (at,)
    if not x.size:
        return x.at[at].get(mode="fill", wrap_negative_indices=wraps)
    is_inside, existing = np.ones((), bool), [*at]
    arrays = [axis for axis, i in enumerate(at) if not isinstance(i, slice)]
    for axis in arrays:
        if isinstance(i := at[axis], Array):
            existing[axis] = i = jnp.where(i < 0, i + x.shape[axis], i) if wraps else i
            is_inside = is_inside & (i >= 0) & (i < x.shape[axis])
    # An index out of range reads some element here, and its gradient is dropped.
    values = x.at[tuple(existing)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    # The axes of the indices follow the slices before them, or are the first ones if slices separate them.
    first = arrays[0] if arrays[-1] - arrays[0] < len(arrays) else 0
    behind = values.ndim - first - max(np.ndim(at[axis]) for axis in arrays)
    is_inside = jnp.expand_dims(is_inside, range(np.ndim(is_inside), np.ndim(is_inside) + behind))
    if not is_inexact(x):
        lowest = True if x.dtype == np.bool_ else jnp.iinfo(x.dtype).min or jnp.iinfo(x.dtype).max
        return jnp.where(is_inside, values, jnp.asarray(lowest, x.dtype))
    # A sum, as the derivative of `where` would select from the whole gradient. Adding -0 changes no number.
    zero = complex(-0.0, -0.0) if jnp.iscomplexobj(x) else -0.0
    return values + jnp.where(is_inside, jnp.asarray(zero, x.dtype), jnp.asarray(np.nan, x.dtype))


@data_movement("aten.index", "aten._unsafe_index")
def index(x: Array, indices: Indices) -> Array:
    if any(_is_mask(i) for i in indices):
        raise TranslationError(
            "indexing with a boolean mask gives a result whose size depends on the mask's values, and JAX compiles for "
            "known sizes; use `torch.where(mask, x, 0)`"
        )
    given = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if len(given) == 1 and given[0][1].ndim == 1:
        return _read_along(x, *given[0], wraps=True)
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
    rows = _read_along(vector(x), dim % max(x.ndim, 1), vector(indices))
    return rows.reshape(()) if x.ndim == 0 else rows


def _read_along(x: Array, axis: int, indices: Array, wraps: bool = False) -> Array:
    def read_at(x: Array, axis: int, indices: Array) -> Array:
        return read(x, along(x, axis, indices), wraps=wraps)

    # To move the axis costs a copy of `x`.
    is_moved = indices.size > x.shape[axis] // 8
    return along_axis(read_at, x, axis, indices) if is_moved else read_at(x, axis, indices)


def _along(x: Array, dim: int, indices: Array) -> tuple[Any, ...]:
    """Returns the index that reads `x` at `indices` along `dim`, and at their own position along the other axes."""
    grids: list[Any] = list(np.ix_(*(np.arange(length) for length in indices.shape)))
    grids[dim] = indices
    return tuple(grids)


@operation("aten.gather")
def gather(x: Array, dim: int, indices: Array, sparse_grad: bool = False) -> Array:
    if x.ndim == 0 or indices.ndim == 0:
        return read(vector(x), vector(indices)).reshape(indices.shape)

    def on_cpu(x: Array, indices: Array) -> Array:
        # One index is faster than one for each axis.
        grids = _along(x, dim, indices)
        strides = (math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim))
        flat = sum(i * stride for i, stride in zip(grids, strides, strict=True))
        is_inside = (indices >= 0) & (indices < x.shape[dim])
        return read(x.reshape(-1), jnp.where(is_inside, flat, -1))

    def elsewhere(x: Array, indices: Array) -> Array:
        return read(x, _along(x, dim, indices))

    return by_platform(on_cpu if x.size < 2**31 else elsewhere, elsewhere, x, indices)


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
    return _reduce(scatter, x, dim, indices, source, reduce, include_self)


def _reduce(
    write: Callable[..., Array], x: Array, dim: int, indices: Array, source: Array, reduce: str, include_self: bool
) -> Array:
    if reduce == "mean":
        counts = write(jnp.full_like(x, int(include_self)), dim, indices, jnp.ones((), x.dtype), "sum")
        total = _reduce(write, x, dim, indices, source, "sum", include_self)
        counts = jnp.maximum(counts, 1)
        return total / counts if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.floor_divide(total, counts)
    if not include_self:
        x = write(x, dim, indices, _neutral(reduce, x.dtype))
    return write(x, dim, indices, source, reduce)


def _neutral(reduce: str, dtype: Any) -> Any:
    """Returns the neutral element of `reduce`."""
    if reduce in ("sum", "prod"):
        return int(reduce == "prod")
    if dtype == np.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if reduce == "amax" else jnp.iinfo(dtype).max
    return -np.inf if reduce == "amax" else np.inf


def _write_along(x: Array, dim: int, indices: Array, source: Any, reduce: str | None = None) -> Array:
    """Writes slices of `source`, or a number, to `x` at `indices` along `dim`, combined as `scatter` does."""

    flat, indices, source = vector(x), vector(indices), jnp.asarray(source, x.dtype)
    axis, source = dim % flat.ndim, vector(source) if x.ndim == 0 else source

    def write(x: Array, indices: Array, source: Array, axis: int = axis) -> Array:
        return combine(x, along(x, axis, indices), source, _COMBINE[reduce])

    def write_moved(x: Array, indices: Array, source: Array) -> Array:
        source = jnp.moveaxis(source, axis, 0) if source.ndim else source
        return jnp.moveaxis(write(jnp.moveaxis(x, axis, 0), indices, source, 0), 0, axis)

    # On a CPU that is faster if the elements for one index are contiguous.
    written = by_platform(write_moved, write, flat, indices, source) if axis else write(flat, indices, source)
    return written.reshape(x.shape)


@operation("aten.index_add")
def index_add(x: Array, dim: int, indices: Array, source: Array, alpha: Any = 1) -> Array:
    return _write_along(x, dim, indices, source * jnp.asarray(alpha, x.dtype), "add")


@data_movement("aten.index_copy")
def index_copy(x: Array, dim: int, indices: Array, source: Array) -> Array:
    return _write_along(x, dim, indices, source)


@data_movement("aten.index_fill")
def index_fill(x: Array, dim: int, indices: Array, value: Any) -> Array:
    flat = vector(x)
    axis = dim % flat.ndim
    is_filled = combine(jnp.zeros(flat.shape[axis], bool), vector(indices), jnp.ones((), bool), "set", wraps=True)
    is_filled = is_filled.reshape(-1, *[1] * (flat.ndim - axis - 1))
    return jnp.where(is_filled, jnp.asarray(value, x.dtype), flat).reshape(x.shape)


@operation("aten.index_reduce")
def index_reduce(x: Array, dim: int, indices: Array, source: Array, reduce: str, include_self: bool = True) -> Array:
    return _reduce(_write_along, x, dim, indices, source, reduce, include_self)


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


# Up to so many boundaries, comparisons with all of them are faster than a search.
_MOST_COMPARISONS = 24


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

    method = "compare_all" if boundaries.shape[-1] <= _MOST_COMPARISONS else "scan"

    def find(edges: Array, x: Array) -> Array:
        return jnp.searchsorted(edges, x, "right" if right or side == "right" else "left", method=method)

    if boundaries.ndim == 1:
        return find(boundaries, values)
    rows = math.prod(boundaries.shape[:-1])
    found = jax.vmap(find)(boundaries.reshape(rows, -1), values.reshape(rows, -1))
    return found.reshape(values.shape)


@operation("aten.bucketize")
def bucketize(values: Any, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    return searchsorted(boundaries, values, out_int32, right)
