"""Sorting, order statistics and cumulative operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._mesh_types import pcast_like
from jaxfn._torch import ties
from jaxfn._torch.operations.dims import vector
from jaxfn._torch.operations.elementwise import log_of_sum
from jaxfn._torch.operations.platforms import by_platform, lower_by_platform
from jaxfn._torch.operations.promotion import is_inexact, to_inexact
from jaxfn._torch.operations.reductions import cast_for_accumulation
from jaxfn._torch.operations.table import operation, register_all


def stable_order(x: Array, dim: int, descending: bool = False, count: int | None = None) -> Array:
    """Returns the indices that sort stably along an axis, the first `count` of them. NaN counts as the largest number.

    A CPU sorts integers without a function that compares, which is faster: here the order of the values is in the upper
    half of each integer, and the index in the lower half.
    """
    axis = dim % x.ndim
    count = x.shape[axis] if count is None else count
    dtype = jax.dtypes.canonicalize_dtype(np.int64)

    def elsewhere(x: Array) -> Array:
        order = jnp.argsort(x, axis, stable=True, descending=descending)
        # JAX types the indices as replicated, also if `x` varies over devices (0.10.0 to 0.12.0).
        return lax.slice_in_dim(pcast_like(order, jax.typeof(x)), 0, count, axis=axis)

    def on_cpu(x: Array) -> Array:
        keys = _sort_keys(x, descending)
        if count < x.shape[axis] // 8:
            largest_first = lax.bitcast_convert_type(_swap_negative(~keys), np.float32)
            # The barrier prevents XLA from sorting all elements where later code reads some of the result.
            found = lax.optimization_barrier(lax.top_k(jnp.moveaxis(largest_first, axis, -1), count))[1]
            return jnp.moveaxis(found, -1, axis).astype(dtype)
        with jax.enable_x64(True):
            pairs = keys.astype(np.int64) << 32 | lax.broadcasted_iota(np.int64, x.shape, axis)
            order = lax.sort(pairs, dimension=axis, is_stable=False) & 0xFFFFFFFF
            return lax.slice_in_dim(order, 0, count, axis=axis).astype(dtype)

    if not _has_sort_keys(x):
        return elsewhere(x)
    return lax.platform_dependent(lax.stop_gradient(x), cpu=on_cpu, default=elsewhere)


def _has_sort_keys(x: Array) -> bool:
    return x.dtype == np.float32 or np.can_cast(x.dtype, np.int32)


def _sort_keys(x: Array, descending: bool) -> Array:
    """Returns 32-bit integers in the order of `x`, which has no more bits."""
    if x.dtype == np.float32:
        canonical = jnp.where(x == 0, 0, jnp.where(jnp.isnan(x), np.nan, x))
        x = _swap_negative(lax.bitcast_convert_type(canonical, np.int32))
    return ~x.astype(np.int32) if descending else x.astype(np.int32)


def _swap_negative(bits: Array) -> Array:
    """Converts the bits of floating-point numbers to integers in their order, and back."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def index_at_rank(x: Array, rank: Any, dim: int) -> Array:
    """Returns the index of the element that stable sorting puts at `rank`, which has length 1 along the axis.

    A CPU does not sort: it finds the element's key, then its index among equals, bit by bit.
    """
    axis = dim % x.ndim
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    dtype = jax.dtypes.canonicalize_dtype(np.int64)

    def elsewhere(x: Array, rank: Array) -> Array:
        return jnp.take_along_axis(stable_order(x, axis), rank, axis)

    def count(mask: Array) -> Array:
        return jnp.sum(mask, axis, dtype=np.int32, keepdims=True)

    def largest(num_bits: int, holds: Callable[[Array], Array]) -> Array:
        """Returns the largest number that holds, of those with so many bits; all smaller ones hold."""

        def set_bit(i: Array, number: Array) -> Array:
            higher = number | np.uint32(1) << (num_bits - 1 - i).astype(np.uint32)
            return jnp.where(holds(higher), higher, number)

        return lax.fori_loop(0, num_bits, set_bit, pcast_like(jnp.zeros(shape, np.uint32), jax.typeof(x)))

    def on_cpu(x: Array, rank: Array) -> Array:
        keys = lax.bitcast_convert_type(_sort_keys(x, False), np.uint32) ^ np.uint32(1 << 31)
        key = largest(32, lambda number: count(keys < number) <= rank)
        rank_among_equals = rank - count(keys < key)
        indices = jnp.where(keys == key, lax.broadcasted_iota(np.uint32, x.shape, axis), x.shape[axis])
        num_bits = (x.shape[axis] - 1).bit_length()
        return largest(num_bits, lambda number: count(indices < number) <= rank_among_equals).astype(dtype)

    operands = lax.stop_gradient(x), jnp.broadcast_to(jnp.asarray(rank, np.int32), shape)
    return lower_by_platform(on_cpu, elsewhere, *operands) if _has_sort_keys(x) else elsewhere(*operands)


@operation("aten.sort")
def sort(x: Array, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Array, Array]:
    """Sorts stably. NaN counts as the largest number."""
    order = stable_order(vector(x), dim, descending)
    return jnp.take_along_axis(vector(x), order, dim).reshape(x.shape), order.reshape(x.shape)


@operation("aten.topk")
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = stable_order(x, dim, largest, k)
    return jnp.take_along_axis(x, order, dim), order


@operation("aten.kthvalue")
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    return ties.with_index(x, index_at_rank(x, k - 1, dim), dim, keepdim)


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
    missing = jnp.isnan(x).sum(dim, keepdims=True) if is_inexact(x) else jnp.zeros((), int)
    length = x.shape[dim]
    rank = jnp.maximum(length - missing - 1, 0) // 2 if skip_nan else (length - 1) // 2
    if not skip_nan:
        # The first NaN follows all numbers.
        rank = jnp.where(missing > 0, length - missing, rank)
    return ties.with_index(x, index_at_rank(x, rank, dim), dim, keepdim)


register_all(
    {
        "aten.median.dim": partial(median, False),
        "aten.nanmedian.dim": partial(median, True),
        "aten.median.default": partial(median_of_all, False),
        "aten.nanmedian.default": partial(median_of_all, True),
    }
)


# ---------------------------------------------------------------------------------------------- cumulative operations
#
# On a CPU these are loops along the axis, which run and compile faster than XLA's scans in log(n) passes.

# Takes the states, a row of every array, and its index; returns the new states and a row of every result.
_Step = Callable[[Sequence[Array], Sequence[Array], Array], tuple[Sequence[Array], Sequence[Array]]]


def _loop(step: _Step, initial: Sequence[Any], axis: int, *arrays: Array) -> list[Array]:
    """Applies `step` to the rows along an axis. The initial states are scalars."""
    rows = [jnp.moveaxis(x, axis, 0) for x in arrays]
    shape, aval = rows[0].shape[1:], jax.typeof(rows[0])
    states = [pcast_like(jnp.broadcast_to(value, shape), aval) for value in initial]
    numbered = [*rows, lax.iota(np.int32, len(rows[0]))]
    results = lax.scan(lambda states, row: step(states, row[:-1], row[-1]), states, numbered)[1]
    return [jnp.moveaxis(y, 0, axis) for y in results]


def cumulative(
    combine: Callable[..., Array],
    neutral: float,
    elsewhere: Callable[..., Array],
    x: Array,
    dim: int,
    *,
    dtype: Any = None,
) -> Array:
    """Applies `elsewhere`, such as `jnp.cumsum`, along an axis; on a CPU, `combine` to one row after the other."""
    flat = vector(cast_for_accumulation(x, dtype))
    axis = dim % flat.ndim

    def on_cpu(x: Array) -> Array:
        # Sums are in double precision, as in torch, since their terms may cancel.
        inside = jnp.promote_types(x.dtype, np.float64) if combine is lax.add and is_inexact(x) else x.dtype

        def step(totals: Sequence[Array], rows: Sequence[Array], _: Array) -> tuple[list[Array], list[Array]]:
            total = combine(totals[0], rows[0].astype(inside))
            return [total], [total.astype(x.dtype)]

        with jax.enable_x64(True):
            return _loop(step, [np.asarray(neutral, inside)], axis, x)[0]

    return by_platform(on_cpu, partial(elsewhere, axis=axis), flat).reshape(x.shape)


def _add_exponentials(total: Array, x: Array) -> Array:
    """Computes `log(exp(total) + exp(x))`. Of numbers that are all -inf, the last one has the whole derivative.

    Torch's is NaN there, although a single number is its own sum.
    """
    is_empty = total == -np.inf
    return jnp.where(is_empty, x, log_of_sum(np.e, jnp.where(is_empty, 0, total), x))


@operation("aten.logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    combine = jnp.logaddexp if jnp.iscomplexobj(x) else _add_exponentials
    return cumulative(combine, -np.inf, partial(lax.associative_scan, combine), x, dim)


def cumulative_extreme(better: Callable[..., Array], x: Array, dim: int) -> tuple[Array, Array]:
    """Returns the best element so far, the last one of equals, and its index; NaN from the first NaN on."""
    flat = vector(x)
    axis = dim % flat.ndim
    dtype = jax.dtypes.canonicalize_dtype(np.int64)

    def later(first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
        wins = better(second[0], first[0]) | (second[0] != second[0])
        return [jnp.where(wins, *pair) for pair in zip(second, first, strict=True)]

    def step(best: Sequence[Array], rows: Sequence[Array], k: Array) -> tuple[list[Array], list[Array]]:
        here = [rows[0], jnp.full_like(best[1], k)]
        best = [jnp.where(k == 0, *pair) for pair in zip(here, later(best, here), strict=True)]
        return best, best

    def elsewhere(x: Array) -> list[Array]:
        # The sum is sharded like `x`, as `jnp.where` requires.
        indices = lax.full_like(x, 0, dtype) + lax.broadcasted_iota(dtype, x.shape, axis)
        order = lax.associative_scan(later, (x, indices), axis=axis)[1]
        return [jnp.take_along_axis(x, order, axis), order]

    on_cpu = partial(_loop, step, [np.zeros((), flat.dtype), np.zeros((), dtype)], axis)
    values, order = lower_by_platform(on_cpu, elsewhere, lax.stop_gradient(flat))
    values = _best_so_far(axis, flat, values, order) if is_inexact(flat) else values
    return values.reshape(x.shape), order.reshape(x.shape)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _best_so_far(axis: int, x: Array, values: Array, order: Array) -> Array:
    """Returns `values`, the elements of `x` at the indices `order`, which determine its derivative."""
    return values


@_best_so_far.defjvp
def _best_so_far_jvp(axis: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    def step(tangent: Sequence[Array], rows: Sequence[Array], k: Array) -> tuple[list[Array], list[Array]]:
        tangent = [jnp.where(rows[1] == k, rows[0], tangent[0])]
        return tangent, tangent

    def on_cpu(tangent: Array, order: Array) -> Array:
        return _loop(step, [np.zeros((), tangent.dtype)], axis, tangent, order)[0]

    elsewhere = partial(jnp.take_along_axis, axis=axis)
    return _best_so_far(axis, *primals), by_platform(on_cpu, elsewhere, tangents[0], primals[2])


register_all(
    {
        "aten.cumsum": partial(cumulative, lax.add, 0, jnp.cumsum),
        "aten.cumprod": partial(cumulative, lax.mul, 1, jnp.cumprod),
        "aten.cummax": partial(cumulative_extreme, jnp.greater_equal),
        "aten.cummin": partial(cumulative_extreme, jnp.less_equal),
    }
)


@operation("aten.histc")
def histc(x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    """Counts elements in bins of equal width; NaN and elements out of range are in none."""
    x = lax.stop_gradient(to_inexact(x)).reshape(-1)
    first, last = (jnp.asarray(bound, x.dtype) for bound in (low, high))
    if low == high and x.size:
        first, last = x.min(), x.max()
    # Equal bounds are moved apart, as in torch.
    first, last = (jnp.where(first == last, bound + sign, bound) for bound, sign in ((first, -1), (last, 1)))
    numbers = ((x - first) * bins / (last - first)).astype(int)
    counted = jnp.where((x >= first) & (x <= last), jnp.minimum(numbers, bins - 1), bins)
    return jnp.zeros(bins, x.dtype).at[counted].add(1, mode="drop")
