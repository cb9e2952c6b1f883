"""Sorting, order statistics and cumulative operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.dims import vector
from jaxfn._torch.operations.promotion import is_inexact
from jaxfn._torch.operations.reductions import accumulated, chosen
from jaxfn._torch.operations.table import enter_all, operation


@operation("aten.sort")
def sort(x: Array, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Array, Array]:
    """Always stable, nan counting as the largest number."""
    order = jnp.argsort(vector(x), dim, stable=True, descending=descending)
    return jnp.take_along_axis(vector(x), order, dim).reshape(x.shape), order.reshape(x.shape)


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


def middle_of_all(skip_nan: bool, x: Array) -> Array:
    """The lower one of two middle elements of all."""
    return _shared(x, middle(skip_nan, x.reshape(-1), 0)[0])


def _shared(x: Array, chosen: Array) -> Array:
    """`chosen`, an element of `x`, with its derivative in equal parts to all elements that equal it."""
    chosen, fixed = lax.stop_gradient(chosen), lax.stop_gradient(x)
    equal = (fixed == chosen) | ((fixed != fixed) & (chosen != chosen))
    # 0 in value; the difference of an inf or a nan from itself is not.
    change = jnp.where(equal & jnp.isfinite(fixed), x - fixed, 0) if is_inexact(x) else jnp.zeros_like(x)
    return chosen + (change.sum() / jnp.maximum(equal.sum(), 1)).astype(x.dtype)


def middle(skip_nan: bool, x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower one of two middle elements, and its place; nan if there is one and it is not skipped."""
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


enter_all(
    {
        "aten.median.dim": partial(middle, False),
        "aten.nanmedian.dim": partial(middle, True),
        "aten.median.default": partial(middle_of_all, False),
        "aten.nanmedian.default": partial(middle_of_all, True),
    }
)


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


def cumulated(function: Callable[..., Array], x: Array, dim: int, *, dtype: Any = None) -> Array:
    """What a function such as `jnp.cumsum` gives along an axis."""
    return function(vector(accumulated(x, dtype)), dim).reshape(x.shape)


@operation("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    flat = vector(x)
    if jnp.iscomplexobj(x):
        return lax.associative_scan(jnp.logaddexp, flat, axis=dim).reshape(x.shape)
    return lax.cumlogsumexp(flat, dim % flat.ndim).reshape(x.shape)


def cumulative_extreme(better: Callable[..., Array], x: Array, dim: int) -> tuple[Array, Array]:
    """The best element so far, the last of equals, and its place; from a nan on, nan."""
    flat = vector(x)

    def later(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        wins = better(second[0], first[0]) | (second[0] != second[0])
        return jnp.where(wins, second[0], first[0]), jnp.where(wins, second[1], first[1])

    places = lax.broadcasted_iota(int, flat.shape, dim % flat.ndim)
    order = lax.associative_scan(later, (lax.stop_gradient(flat), places), axis=dim % flat.ndim)[1]
    return jnp.take_along_axis(flat, order, dim).reshape(x.shape), order.reshape(x.shape)


enter_all(
    {
        "aten.cumsum": partial(cumulated, jnp.cumsum),
        "aten.cumprod": partial(cumulated, jnp.cumprod),
        "aten.cummax": partial(cumulative_extreme, jnp.greater_equal),
        "aten.cummin": partial(cumulative_extreme, jnp.less_equal),
    }
)


@operation("aten.histogram")
def histogram(
    x: Array,
    bins: int | Array = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> tuple[Array, Array]:
    """How many elements lie in each bin, and where those end; `bins` is their number, or where they end."""
    weights = None if weight is None else weight.reshape(-1)
    edges = _edges(x, bins, range) if isinstance(bins, int) else bins
    return jnp.histogram(x.reshape(-1), edges, weights=weights, density=density)[0], edges


def _edges(x: Array, bins: int, bounds: Sequence[float] | None) -> Array:
    low, high = (x.min(), x.max()) if bounds is None else (jnp.asarray(end, x.dtype) for end in bounds)
    half = jnp.where(low == high, 0.5, 0).astype(x.dtype)
    return _linspace(low - half, high + half, bins + 1)


def _linspace(low: Array, high: Array, count: int) -> Array:
    """Numbers at equal distances, from the nearer end each, as torch has them."""
    step, places = (high - low) / max(count - 1, 1), np.arange(count)
    return jnp.where(places < count // 2, low + step * places, high - step * (count - 1 - places)).astype(low.dtype)


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


@operation("aten._histogramdd_from_bin_cts")
def histogramdd_of_counts(
    x: Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Array | None = None,
    density: bool = False,
) -> Array:
    return histogramdd(x, histogram_edges(x, bins, range=range), weight=weight, density=density)


@operation("aten._histogramdd_from_bin_tensors")
def histogramdd(x: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False) -> Array:
    weights = None if weight is None else weight.reshape(-1)
    return jnp.histogramdd(x.reshape(-1, x.shape[-1]), list(bins), weights=weights, density=density)[0]


@operation("aten.histc")
def histc(x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    bounds = (x.min(), x.max()) if low == high else (low, high)
    return jnp.histogram(x, bins, bounds)[0]
