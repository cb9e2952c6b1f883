"""Sorting, order statistics and cumulative operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxfn._torch.operations.dims import vector
from jaxfn._torch.operations.promotion import is_inexact
from jaxfn._torch.operations.reductions import cast_for_accumulation, take_extreme
from jaxfn._torch.operations.table import operation, register_all


@operation("aten.sort")
def sort(x: Array, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Array, Array]:
    """Sorts stably. NaN counts as the largest number."""
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
    return take_extreme(x, lax.slice_in_dim(order, k - 1, k, axis=dim), dim, keepdim)


def median_of_all(skip_nan: bool, x: Array) -> Array:
    """Returns the lower median of all elements."""
    return _spread_derivative(x, median(skip_nan, x.reshape(-1), 0)[0])


def _spread_derivative(x: Array, value: Array) -> Array:
    """Returns `value`, an element of `x`, with its derivative divided equally among all elements that equal it."""
    value, fixed = lax.stop_gradient(value), lax.stop_gradient(x)
    equal = (fixed == value) | ((fixed != fixed) & (value != value))
    # The value is 0. The difference of an inf or a NaN from itself is not.
    change = jnp.where(equal & jnp.isfinite(fixed), x - fixed, 0) if is_inexact(x) else jnp.zeros_like(x)
    return value + (change.sum() / jnp.maximum(equal.sum(), 1)).astype(x.dtype)


def median(skip_nan: bool, x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """Returns the lower median and its index; NaN if there is one and it is not skipped."""
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = jnp.argsort(x, dim, stable=True)
    missing = jnp.isnan(x).sum(dim, keepdims=True) if is_inexact(x) else jnp.zeros((), int)
    length = x.shape[dim]
    position = jnp.maximum(length - missing - 1, 0) // 2 if skip_nan else (length - 1) // 2
    if not skip_nan:
        # The first NaN follows all numbers.
        position = jnp.where(missing > 0, length - missing, position)
    shape = [1 if axis == dim % x.ndim else size for axis, size in enumerate(x.shape)]
    return take_extreme(x, jnp.take_along_axis(order, jnp.broadcast_to(position, shape), dim), dim, keepdim)


register_all(
    {
        "aten.median.dim": partial(median, False),
        "aten.nanmedian.dim": partial(median, True),
        "aten.median.default": partial(median_of_all, False),
        "aten.nanmedian.default": partial(median_of_all, True),
    }
)


def apply_cumulative(function: Callable[..., Array], x: Array, dim: int, *, dtype: Any = None) -> Array:
    """Applies a function such as `jnp.cumsum` along an axis."""
    return function(vector(cast_for_accumulation(x, dtype)), dim).reshape(x.shape)


@operation("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    flat = vector(x)
    if jnp.iscomplexobj(x):
        return lax.associative_scan(jnp.logaddexp, flat, axis=dim).reshape(x.shape)
    return lax.cumlogsumexp(flat, dim % flat.ndim).reshape(x.shape)


def cumulative_extreme(better: Callable[..., Array], x: Array, dim: int) -> tuple[Array, Array]:
    """Returns the best element so far, the last one of equals, and its index; NaN from the first NaN on."""
    flat = vector(x)

    def later(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        wins = better(second[0], first[0]) | (second[0] != second[0])
        return jnp.where(wins, second[0], first[0]), jnp.where(wins, second[1], first[1])

    indices = lax.broadcasted_iota(int, flat.shape, dim % flat.ndim)
    order = lax.associative_scan(later, (lax.stop_gradient(flat), indices), axis=dim % flat.ndim)[1]
    return jnp.take_along_axis(flat, order, dim).reshape(x.shape), order.reshape(x.shape)


register_all(
    {
        "aten.cumsum": partial(apply_cumulative, jnp.cumsum),
        "aten.cumprod": partial(apply_cumulative, jnp.cumprod),
        "aten.cummax": partial(cumulative_extreme, jnp.greater_equal),
        "aten.cummin": partial(cumulative_extreme, jnp.less_equal),
    }
)


@operation("aten.histc")
def histc(x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    bounds = (x.min(), x.max()) if low == high else (low, high)
    return jnp.histogram(x, bins, bounds)[0]
