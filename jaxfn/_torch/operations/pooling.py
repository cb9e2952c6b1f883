"""Pooling over windows of the last one, two or three axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._mesh_types import is_sharded
from jaxfn._torch.operations.derivative import apply_vjp
from jaxfn._torch.operations.multilinear import multilinear
from jaxfn._torch.operations.platforms import by_platform, lower_by_platform
from jaxfn._torch.operations.promotion import is_inexact
from jaxfn._torch.operations.resampling import weighted_sums
from jaxfn._torch.operations.table import composite, register_all


class Windows(NamedTuple):
    """The windows along one axis.

    Attributes:
      indices: The input indices of each window, (windows, elements); some are before the input's start or after its
        end.
      inside: Which of them are inside the input.
    """

    indices: np.ndarray[Any, Any]
    inside: np.ndarray[Any, Any]


def _each(values: Sequence[int], count: int) -> list[int]:
    return [*values] * count if len(values) == 1 else [*values]


def _length(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Returns the number of windows. With `ceil_mode` the last one may extend past the end, but not start there."""
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


def _sliding_windows(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Windows:
    starts = np.arange(_length(length, kernel, stride, padding, dilation, ceil_mode)) * stride - padding
    indices = starts[:, None] + np.arange(kernel) * dilation
    return Windows(indices, (indices >= 0) & (indices < length))


def _adaptive_windows(length: int, windows: int) -> Windows:
    """Returns `windows` windows of nearly equal length that cover an axis."""
    number = np.arange(windows)
    starts, ends = number * length // windows, -(-(number + 1) * length // windows)
    indices = starts[:, None] + np.arange((ends - starts).max(initial=0))
    return Windows(np.clip(indices, 0, max(length - 1, 0)), indices < ends[:, None])


def _max_over(x: Array, windows: Sequence[Windows]) -> tuple[Array, Array]:
    """Returns the largest element of every window, the first of equals, and its index among the flat spatial axes.

    The last axis is reduced first, so that of equal elements in several rows the one in the first row is found.
    """
    spatial = len(windows)
    last_first = range(spatial)[::-1]

    def find(along_axis: Callable[..., tuple[Array, Array]], order: Sequence[int], x: Array) -> tuple[Array, Array]:
        found = x, _flat_indices(x, spatial)
        for axis in order:
            found = along_axis(*found, x.ndim - spatial + axis, windows[axis])
        return found

    by_slices = [*map(_is_faster_by_slices, windows)]
    # Slices are compared by the indices of their elements, so that any order finds the first one.
    on_cpu = partial(find, _max_along_on_cpu, range(spatial) if all(by_slices) else last_first)
    elsewhere, fixed = partial(find, _max_along, last_first), lax.stop_gradient(x)
    largest, indices = lower_by_platform(on_cpu, elsewhere, fixed) if any(by_slices) else elsewhere(fixed)
    return (_largest_elements(spatial, x, largest, indices) if is_inexact(x) else largest), indices


def _is_faster_by_slices(windows: Windows) -> bool:
    """Whether windows are few, and long or not evenly spaced, so that they would be read by many slices or gathers."""
    count, length = windows.indices.shape
    is_slow = length >= count or len({*np.diff(windows.indices[:, 0])}) > 1
    return 0 < count <= _MOST_STEPS and is_slow and bool(windows.inside.any(1).all())


def _max_along_on_cpu(x: Array, indices: Array, axis: int, windows: Windows) -> tuple[Array, Array]:
    if not _is_faster_by_slices(windows):
        return _max_along(x, indices, axis, windows)
    highest = np.iinfo(indices.dtype).max
    found: list[tuple[Array, Array]] = []
    for row, inside in zip(*windows, strict=True):
        seen, numbers = (_take_one(y, row[inside], axis) for y in (x, indices))
        largest = jnp.max(seen, axis, keepdims=True)
        is_largest = (seen == largest) | (seen != seen)
        found.append((largest, jnp.min(jnp.where(is_largest, numbers, highest), axis, keepdims=True)))
    if len(found) == 1:
        return found[0]
    # The barriers prevent XLA from reducing again for each window along the next axis.
    largest, index = (lax.optimization_barrier(jnp.concatenate(parts, axis)) for parts in zip(*found, strict=True))
    return largest, index


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _largest_elements(spatial: int, x: Array, largest: Array, indices: Array) -> Array:
    """Returns `largest`, the elements of `x` at `indices`, which determine its derivative."""
    return largest


@_largest_elements.defjvp
def _largest_elements_jvp(spatial: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _largest_elements(spatial, *primals), _elements_at(tangents[0], primals[2], spatial)


def _flat_indices(x: Array, spatial: int) -> Array:
    """Returns the index of every element among the flat spatial axes."""
    shape = x.shape[-spatial:]
    return jnp.broadcast_to(lax.iota(np.int32, math.prod(shape)).reshape(shape), x.shape)


def _elements_at(x: Array, indices: Array, spatial: int) -> Array:
    """Returns the elements of `x` at indices among its flat spatial axes."""
    flat, where = (a.reshape(*a.shape[:-spatial], math.prod(a.shape[-spatial:])) for a in (x, indices))
    return jnp.take_along_axis(flat, where, -1, mode="clip").reshape(indices.shape)


# Windows up to this length are reduced one element at a time, without an array of all windows' elements.
_MOST_STEPS = 16


def _max_along(x: Array, indices: Array, axis: int, windows: Windows) -> tuple[Array, Array]:
    """Returns the largest element of every window along one axis, NaN first, and its entry in `indices`."""
    low = max(0, -windows.indices.min(initial=0))
    high = max(0, windows.indices.max(initial=0) + 1 - x.shape[axis])
    config = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    x, indices = (lax.pad(values, np.zeros((), values.dtype), config) for values in (x, indices))
    shape = (-1, *[1] * (x.ndim - axis - 1))
    first = windows.inside.argmax(1).reshape(shape)
    if windows.indices.shape[1] > _MOST_STEPS:
        seen, seen_indices = (jnp.take(values, windows.indices + low, axis) for values in (x, indices))
        seen_indices = jnp.broadcast_to(seen_indices, seen.shape)
        inside = windows.inside.reshape(*windows.inside.shape, *shape[1:])
        best = jnp.argmax(jnp.where(inside, seen, -np.inf if is_inexact(x) else jnp.iinfo(x.dtype).min), axis + 1)
        best = jnp.expand_dims(jnp.maximum(best, first), axis + 1)
        found = (jnp.take_along_axis(values, best, axis + 1) for values in (seen, seen_indices))
        largest, index = (values.squeeze(axis + 1) for values in found)
        return largest, index
    best, index = (_take_one(values, windows.indices[:, 0] + low, axis) for values in (x, indices))
    for i in range(1, windows.indices.shape[1]):
        seen, seen_index = (_take_one(values, windows.indices[:, i] + low, axis) for values in (x, indices))
        is_better = _is_larger(seen, best)
        if not windows.inside.all():
            is_better = (is_better | (first == i)) & windows.inside[:, i].reshape(shape)
        best, index = jnp.where(is_better, seen, best), jnp.where(is_better, seen_index, index)
    return best, index


def _is_larger(x: Array, y: Array) -> Array:
    """Whether `x` is larger, elementwise, with NaN as the largest value."""
    return (x > y) | (jnp.isnan(x) & ~jnp.isnan(y)) if is_inexact(x) else x > y


def _take_one(x: Array, indices: np.ndarray[Any, Any], axis: int) -> Array:
    """Takes one element for each window; by a slice, if the windows are evenly spaced."""
    steps = np.unique(np.diff(indices)) if len(indices) > 1 else np.ones(len(indices), int)
    if len(steps) == 1 and steps[0] > 0:
        return lax.slice_in_dim(x, int(indices[0]), int(indices[-1]) + 1, int(steps[0]), axis)
    return jnp.take(x, indices, axis)


def max_pool(
    spatial: int,
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Array, Array]:
    options = (_each(option, spatial) for option in (kernel_size, stride or kernel_size, padding, dilation))
    axes = zip(x.shape[-spatial:], *options, strict=True)
    return _max_over(x, [_sliding_windows(length, k, s, p, d, ceil_mode) for length, k, s, p, d in axes])


def max_pool_backward(spatial: int, gradient: Array, x: Array, *options: Any) -> Array:
    """Adds the gradient of every window to the element that was the largest, by the indices in the last option."""
    rows = math.prod(x.shape[:-spatial])
    flat = jnp.zeros((rows, math.prod(x.shape[-spatial:])), gradient.dtype)
    at = jnp.arange(rows)[:, None], options[-1].reshape(rows, -1)
    return flat.at[at].add(gradient.reshape(rows, -1)).reshape(x.shape)


@composite("aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def adaptive_max_pool(x: Array, output_size: Sequence[int]) -> tuple[Array, Array]:
    lengths = x.shape[-len(output_size) :]
    return _max_over(x, [_adaptive_windows(*axis) for axis in zip(lengths, output_size, strict=True)])


def avg_pool(
    spatial: int,
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    first = x.ndim - spatial
    kernel, steps, pads = (_each(option, spatial) for option in (kernel_size, stride or kernel_size, padding))
    divisor = np.ones((), int)
    config = [(0, 0)] * first
    for length, k, s, p in zip(x.shape[first:], kernel, steps, pads, strict=True):
        windows = _length(length, k, s, p, 1, ceil_mode)
        config.append((p, (windows - 1) * s + k - length - p))
        starts = np.arange(windows) * s - p
        low, high = (-p, length + p) if count_include_pad else (0, length)
        divisor = divisor[..., None] * (np.minimum(starts + k, high) - np.maximum(starts, low))
    total = _window_sums(x, [1] * first + kernel, [1] * first + steps, config)
    divisor = jnp.asarray(divisor if divisor_override is None else divisor_override, x.dtype)
    return total / divisor if is_inexact(x) else lax.div(total, jnp.broadcast_to(divisor, total.shape))


def _window_sums(x: Array, kernel: list[int], steps: list[int], pads: Sequence[tuple[int, int]]) -> Array:
    """Returns the sum of every window. XLA has no fast derivative of sums over windows of several axes on a CPU."""
    zero = np.zeros((), x.dtype)
    if kernel == steps and not is_sharded(x):
        x = lax.pad(x, zero, [(low, high, 0) for low, high in pads])
        return _block_sums(x.reshape([part for n, k in zip(x.shape, kernel, strict=True) for part in (n // k, k)]))

    def elsewhere(x: Array) -> Array:
        return lax.reduce_window(x, zero, lax.add, kernel, steps, pads)

    def on_cpu(x: Array) -> Array:
        for axis, (k, s, pad) in enumerate(zip(kernel, steps, pads, strict=True)):
            if (k, s, pad) != (1, 1, (0, 0)):
                sums, gradient = partial(_sums_along, axis, k, s, pad), partial(_gradient_of_sums, axis, k, s, pad[0])
                x = multilinear(sums, [gradient], x) if s > 1 else sums(x)
        return x

    return by_platform(on_cpu, elsewhere, x)


def _sums_along(axis: int, kernel: int, step: int, pad: tuple[int, int], x: Array) -> Array:
    window, strides, pads = [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], strides[axis], pads[axis] = kernel, step, pad
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, strides, pads)


def _gradient_of_sums(axis: int, kernel: int, step: int, low: int, x: Array, gradient: Array) -> Array:
    """Adds the gradients of all windows with an element: of as many for the first elements of each step, and others."""
    most, least = -(-kernel // step), kernel // step
    gradient = lax.optimization_barrier(gradient)  # so that XLA does not compute it again for each window
    sums = [_sums_along(axis, n, 1, (n - 1, most - 1), gradient) for n in (most, least) if n]
    first, rest = sums[0], sums[-1] if least else jnp.zeros_like(sums[0])
    is_first = np.arange(step) < kernel - (most - 1) * step
    is_first = is_first.reshape(step, *[1] * (x.ndim - axis - 1))
    spread = jnp.where(is_first, *(jnp.expand_dims(y, axis + 1) for y in (first, rest)))
    spread = lax.collapse(spread, axis, axis + 2)
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (-low, low + x.shape[axis] - spread.shape[axis], 0)
    return lax.optimization_barrier(lax.pad(spread, np.zeros((), x.dtype), config))


@jax.custom_jvp
def _block_sums(x: Array) -> Array:
    """Sums over every second axis. A sum of few slices is faster than a reduction, but its derivative is not."""
    for axis in range(1, x.ndim // 2 + 1):
        length = x.shape[axis]
        slices = [lax.index_in_dim(x, i, axis, False) for i in range(length if length <= _MOST_STEPS else 0)]
        x = reduce(lax.add, slices) if slices else x.sum(axis, dtype=x.dtype)
    return x


@_block_sums.defjvp
def _block_sums_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _block_sums(*primals), tangents[0].sum(range(1, tangents[0].ndim, 2))


def avg_pool_backward(spatial: int, gradient: Array, x: Array, *options: Any) -> Array:
    return apply_vjp(lambda x: avg_pool(spatial, x, *options), gradient, x)


@composite("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
def adaptive_avg_pool(x: Array, output_size: Sequence[int]) -> Array:
    """Computes means over one axis after the other, since a mean over a box is a mean of means."""
    axes = [*enumerate(output_size, x.ndim - len(output_size))]
    if not is_sharded(x) and all(count and x.shape[axis] and x.shape[axis] % count == 0 for axis, count in axes):
        return avg_pool(len(axes), x, [x.shape[axis] // count for axis, count in axes])

    for axis, count in reversed(axes):
        x = _means_along(x, axis, _adaptive_windows(x.shape[axis], count))
    return x


def _means_along(x: Array, axis: int, windows: Windows) -> Array:
    """Returns the mean of every window along one axis. On a CPU each of few means is computed separately."""
    counts = windows.inside.sum(1)
    indices = np.where(windows.inside, windows.indices, x.shape[axis])
    weights = np.broadcast_to(1 / np.maximum(counts, 1)[:, None], indices.shape)
    elsewhere = partial(weighted_sums, axis=axis, table=(indices, weights))

    def means(x: Array) -> Array:
        bounds = zip(indices[:, 0], indices[:, 0] + counts, strict=True)
        slices = (lax.slice_in_dim(x, *pair, axis=axis) for pair in bounds)
        # The barrier prevents XLA from computing the means again for each window along the next axis.
        return lax.optimization_barrier(jnp.concatenate([jnp.mean(part, axis, keepdims=True) for part in slices], axis))

    def gradient(x: Array, gradient: Array) -> Array:
        return apply_vjp(elsewhere, gradient, x)

    on_cpu = partial(multilinear, means, [gradient])

    return by_platform(on_cpu, elsewhere, x) if 0 < len(indices) <= _MOST_STEPS and x.size else elsewhere(x)


def adaptive_avg_pool_backward(spatial: int, gradient: Array, x: Array) -> Array:
    return apply_vjp(lambda x: adaptive_avg_pool(x, gradient.shape[-spatial:]), gradient, x)


for _n in (2, 3):
    register_all(
        {
            f"aten.max_pool{_n}d_with_indices": partial(max_pool, _n),
            f"aten.max_pool{_n}d_with_indices_backward": partial(max_pool_backward, _n),
            f"aten.adaptive_max_pool{_n}d_backward": partial(max_pool_backward, _n),
            f"aten.avg_pool{_n}d": partial(avg_pool, _n),
            f"aten.avg_pool{_n}d_backward": partial(avg_pool_backward, _n),
            f"aten._adaptive_avg_pool{_n}d_backward": partial(adaptive_avg_pool_backward, _n),
        },
        is_composite=True,
    )
