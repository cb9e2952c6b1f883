"""Sorting, order statistics and cumulative operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.dims import vector
from jaxfn._torch.operations.promotion import is_inexact
from jaxfn._torch.operations.reductions import accumulated, chosen
from jaxfn._torch.operations.table import operation


@operation("aten.sort.default")
def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Always stable, nan counting as the largest number."""
    order = jnp.argsort(vector(x), dim, stable=True, descending=descending)
    return jnp.take_along_axis(vector(x), order, dim).reshape(x.shape), order.reshape(x.shape)


@operation("aten.sort.stable")
def sort_stable(x: Array, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return sort(x, dim, descending)


@operation("aten.topk")
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    values, order = sort(x, dim, largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(order, 0, k, axis=dim)


@operation("aten.kthvalue")
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = jnp.argsort(x, dim, stable=True)
    return chosen(x, lax.slice_in_dim(order, k - 1, k, axis=dim), dim, keepdim)


@operation("aten.median.dim")
def median_dim(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower one of two middle elements; nan if there is one."""
    return _middle(x, dim, keepdim, skip_nan=False)


@operation("aten.nanmedian.dim")
def nanmedian_dim(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    return _middle(x, dim, keepdim, skip_nan=True)


@operation("aten.median.default")
def median(x: Array) -> Array:
    return _shared(x, median_dim(x.reshape(-1), 0, False)[0])


@operation("aten.nanmedian.default")
def nanmedian(x: Array) -> Array:
    return _shared(x, nanmedian_dim(x.reshape(-1), 0, False)[0])


def _shared(x: Array, chosen: Array) -> Array:
    """`chosen`, an element of `x`, with its derivative in equal parts to all elements that equal it."""
    chosen, fixed = lax.stop_gradient(chosen), lax.stop_gradient(x)
    equal = (fixed == chosen) | ((fixed != fixed) & (chosen != chosen))
    # 0 in value; the difference of an inf or a nan from itself is not.
    change = jnp.where(equal & jnp.isfinite(fixed), x - fixed, 0) if is_inexact(x) else jnp.zeros_like(x)
    return chosen + (change.sum() / jnp.maximum(equal.sum(), 1)).astype(x.dtype)


def _middle(x: Array, dim: int, keepdim: bool, *, skip_nan: bool) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = jnp.argsort(x, dim, stable=True)
    missing = jnp.isnan(x).sum(dim, keepdims=True) if is_inexact(x) else jnp.zeros((), int)
    length = x.shape[dim]
    position = jnp.maximum(length - missing - 1, 0) // 2 if skip_nan else (length - 1) // 2
    if not skip_nan:
        # The first nan comes behind all numbers.
        position = jnp.where(missing > 0, length - missing, position)
    shape = [1 if axis == dim % x.ndim else size for axis, size in enumerate(x.shape)]
    return chosen(x, jnp.take_along_axis(order, jnp.broadcast_to(position, shape), dim), dim, keepdim)


@operation("aten.mode")
def mode(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The smallest of the most frequent values, and the last place where it is."""
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    ordered, order = sort(x, dim)
    same = jnp.expand_dims(ordered, dim % x.ndim) == jnp.expand_dims(ordered, dim % x.ndim + 1)
    most = jnp.argmax(same.sum(dim % x.ndim), dim, keepdims=True)
    # Sorting is stable: of equal values the last in order is the last in place.
    last = most + jnp.take_along_axis(same.sum(dim % x.ndim), most, dim) - 1
    return chosen(x, jnp.take_along_axis(order, last, dim), dim, keepdim)


@operation("aten.cumsum")
def cumsum(x: Array, dim: int, dtype: Any = None) -> Array:
    x = accumulated(x, dtype)
    return jnp.cumsum(vector(x), dim).reshape(x.shape)


@operation("aten.cumprod")
def cumprod(x: Array, dim: int, dtype: Any = None) -> Array:
    x = accumulated(x, dtype)
    return jnp.cumprod(vector(x), dim).reshape(x.shape)


@operation("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    flat = vector(x)
    if jnp.iscomplexobj(x):
        return lax.associative_scan(jnp.logaddexp, flat, axis=dim).reshape(x.shape)
    return lax.cumlogsumexp(flat, dim % flat.ndim).reshape(x.shape)


@operation("aten.cummax")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, jnp.greater_equal)


@operation("aten.cummin")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, jnp.less_equal)


def _running(x: Array, dim: int, better: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """The best element so far, the last of equals, and its place; from a nan on, nan."""
    flat = vector(x)

    def later(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        wins = better(second[0], first[0]) | (second[0] != second[0])
        return jnp.where(wins, second[0], first[0]), jnp.where(wins, second[1], first[1])

    places = lax.broadcasted_iota(int, flat.shape, dim % flat.ndim)
    order = lax.associative_scan(later, (lax.stop_gradient(flat), places), axis=dim % flat.ndim)[1]
    return jnp.take_along_axis(flat, order, dim).reshape(x.shape), order.reshape(x.shape)


@operation("aten.histogram.bin_ct")
def histogram(
    x: Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    """How many elements lie in each of `bins` bins, and where those end."""
    weights = None if weight is None else weight.reshape(-1)
    edges = _edges(x, bins, range)
    return jnp.histogram(x.reshape(-1), edges, weights=weights, density=density)[0], edges


def _edges(x: Array, bins: int, bounds: Sequence[float] | None) -> Array:
    low, high = (x.min(), x.max()) if bounds is None else (jnp.asarray(end, x.dtype) for end in bounds)
    half = jnp.where(low == high, 0.5, 0).astype(x.dtype)
    return _linspace(low - half, high + half, bins + 1)


def _linspace(low: Array, high: Array, count: int) -> Array:
    """Numbers at equal distances, from the nearer end each, as torch has them."""
    step, places = (high - low) / max(count - 1, 1), np.arange(count)
    return jnp.where(places < count // 2, low + step * places, high - step * (count - 1 - places)).astype(low.dtype)


@operation("aten.histogram.bins_tensor")
def histogram_of_bins(
    x: Array, bins: Array, *, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    weights = None if weight is None else weight.reshape(-1)
    return jnp.histogram(x.reshape(-1), bins, weights=weights, density=density)[0], bins


@operation("aten._histogramdd_bin_edges")
def histogram_edges(
    x: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> list[Array]:
    """Where the bins end along each axis, which the columns of `x` are."""
    columns = x.reshape(-1, x.shape[-1]).T
    bounds = [None] * len(bins) if range is None else zip(range[::2], range[1::2], strict=True)
    return [_edges(column, count, ends) for column, count, ends in zip(columns, bins, bounds, strict=True)]


def histogramdd(x: Array, edges: Sequence[Array], weight: Array | None, density: bool) -> Array:
    weights = None if weight is None else weight.reshape(-1)
    return jnp.histogramdd(x.reshape(-1, x.shape[-1]), list(edges), weights=weights, density=density)[0]


@operation("aten._histogramdd_from_bin_cts")
def histogramdd_of_counts(
    x: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    return histogramdd(x, histogram_edges(x, bins, range=range), weight, density)


@operation("aten._histogramdd_from_bin_tensors")
def histogramdd_of_edges(
    x: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False
) -> Array:
    return histogramdd(x, bins, weight, density)


@operation("aten.histc")
def histc(x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    bounds = (x.min(), x.max()) if low == high else (low, high)
    return jnp.histogram(x, bins, bounds)[0]
