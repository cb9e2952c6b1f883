"""Pooling over windows of the last one, two or three axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.derivative import apply_vjp
from jaxfn._torch.operations.promotion import is_inexact
from jaxfn._torch.operations.table import operation, register_all


class Windows(NamedTuple):
    """The windows along one axis.

    Attributes:
      places: the input's places that every window sees, (windows, places), some of them before it or behind.
      inside: which of them are inside the input.
    """

    places: np.ndarray[Any, Any]
    inside: np.ndarray[Any, Any]


def _each(given: Sequence[int], count: int) -> list[int]:
    return [*given] * count if len(given) == 1 else [*given]


def _length(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Counts the windows; with `ceil_mode`, the last may hang over the padded end but not begin there."""
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


def _sliding(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Windows:
    starts = np.arange(_length(length, kernel, stride, padding, dilation, ceil_mode)) * stride - padding
    places = starts[:, None] + np.arange(kernel) * dilation
    return Windows(places, (places >= 0) & (places < length))


def _adaptive(length: int, windows: int) -> Windows:
    """`windows` of nearly equal length that cover an axis."""
    number = np.arange(windows)
    starts, ends = number * length // windows, -(-(number + 1) * length // windows)
    places = starts[:, None] + np.arange((ends - starts).max(initial=0))
    return Windows(np.clip(places, 0, max(length - 1, 0)), places < ends[:, None])


def _max_over(x: Array, windows: Sequence[Windows]) -> tuple[Array, Array]:
    """The largest element of every window, the first of equals, and its place among the input's flat spatial axes.

    The last axis first, so that of equals in several rows the one in the first row is found.
    """
    largest, places = lax.stop_gradient(x), _places(x, len(windows))
    for axis in reversed(range(-len(windows), 0)):
        largest, places = _max_along(largest, places, x.ndim + axis, windows[axis])
    return (_largest_elements(len(windows), x, largest, places) if is_inexact(x) else largest), places


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _largest_elements(spatial: int, x: Array, largest: Array, places: Array) -> Array:
    """The largest elements, which lie at these places of `x`: that is all that their derivative needs."""
    return largest


@_largest_elements.defjvp
def _largest_elements_jvp(spatial: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _largest_elements(spatial, *primals), _elements_at(tangents[0], primals[2], spatial)


def _places(x: Array, spatial: int) -> Array:
    """The place of every element among the flat spatial axes."""
    shape = x.shape[-spatial:]
    return jnp.broadcast_to(lax.iota(np.int32, math.prod(shape)).reshape(shape), x.shape)


def _elements_at(x: Array, places: Array, spatial: int) -> Array:
    """The elements of `x` at places among its flat spatial axes."""
    flat, where = (a.reshape(*a.shape[:-spatial], math.prod(a.shape[-spatial:])) for a in (x, places))
    return jnp.take_along_axis(flat, where, -1, mode="clip").reshape(places.shape)


# In so many steps a window's largest element is found one after the other, without an array of all windows' elements.
_MOST_STEPS = 16


def _max_along(x: Array, places: Array, axis: int, windows: Windows) -> tuple[Array, Array]:
    """The largest element along one axis of every window, nan before all others, and what `places` says of it."""
    low = max(0, -windows.places.min(initial=0))
    high = max(0, windows.places.max(initial=0) + 1 - x.shape[axis])
    config = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    x, places = (lax.pad(values, np.zeros((), values.dtype), config) for values in (x, places))
    shape = (-1, *[1] * (x.ndim - axis - 1))
    first = windows.inside.argmax(1).reshape(shape)
    if windows.places.shape[1] > _MOST_STEPS:
        seen, seen_places = (jnp.take(values, windows.places + low, axis) for values in (x, places))
        seen_places = jnp.broadcast_to(seen_places, seen.shape)
        inside = windows.inside.reshape(*windows.inside.shape, *shape[1:])
        best = jnp.argmax(jnp.where(inside, seen, -np.inf if is_inexact(x) else jnp.iinfo(x.dtype).min), axis + 1)
        best = jnp.expand_dims(jnp.maximum(best, first), axis + 1)
        found = (jnp.take_along_axis(values, best, axis + 1) for values in (seen, seen_places))
        largest, place = (values.squeeze(axis + 1) for values in found)
        return largest, place
    best, place = (_seen(values, windows.places[:, 0] + low, axis) for values in (x, places))
    for i in range(1, windows.places.shape[1]):
        seen, seen_place = (_seen(values, windows.places[:, i] + low, axis) for values in (x, places))
        is_better = _is_larger(seen, best)
        if not windows.inside.all():
            is_better = (is_better | (first == i)) & windows.inside[:, i].reshape(shape)
        best, place = jnp.where(is_better, seen, best), jnp.where(is_better, seen_place, place)
    return best, place


def _is_larger(x: Array, y: Array) -> Array:
    """Whether `x` is larger, elementwise, with nan as the largest of all."""
    return (x > y) | (jnp.isnan(x) & ~jnp.isnan(y)) if is_inexact(x) else x > y


def _seen(x: Array, places: np.ndarray[Any, Any], axis: int) -> Array:
    """One element for each window; a slice, where the windows lie in regular distances."""
    steps = np.unique(np.diff(places)) if len(places) > 1 else np.ones(len(places), int)
    if len(steps) == 1 and steps[0] > 0:
        return lax.slice_in_dim(x, int(places[0]), int(places[-1]) + 1, int(steps[0]), axis)
    return jnp.take(x, places, axis)


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
    return _max_over(x, [_sliding(length, k, s, p, d, ceil_mode) for length, k, s, p, d in axes])


def max_pool_backward(spatial: int, gradient: Array, x: Array, *options: Any) -> Array:
    """The gradient of every window added to the element that was the window's largest, by the last of the options."""
    rows = math.prod(x.shape[:-spatial])
    flat = jnp.zeros((rows, math.prod(x.shape[-spatial:])), gradient.dtype)
    at = jnp.arange(rows)[:, None], options[-1].reshape(rows, -1)
    return flat.at[at].add(gradient.reshape(rows, -1)).reshape(x.shape)


@operation("aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def adaptive_max_pool(x: Array, output_size: Sequence[int]) -> tuple[Array, Array]:
    lengths = x.shape[-len(output_size) :]
    return _max_over(x, [_adaptive(*axis) for axis in zip(lengths, output_size, strict=True)])


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
    window, strides = (*[1] * first, *kernel), (*[1] * first, *steps)
    total = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, strides, config)
    divisor = jnp.asarray(divisor if divisor_override is None else divisor_override, x.dtype)
    return total / divisor if is_inexact(x) else lax.div(total, jnp.broadcast_to(divisor, total.shape))


def avg_pool_backward(spatial: int, gradient: Array, x: Array, *options: Any) -> Array:
    return apply_vjp(lambda x: avg_pool(spatial, x, *options), gradient, x)


@operation("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
def adaptive_avg_pool(x: Array, output_size: Sequence[int]) -> Array:
    """A mean over a box is a mean of means: one axis after the other."""
    for axis, windows in enumerate(output_size, x.ndim - len(output_size)):
        places, inside = _adaptive(x.shape[axis], windows)
        shape = (*inside.shape, *[1] * (x.ndim - axis - 1))
        seen = jnp.where(inside.reshape(shape), jnp.take(x, places, axis), 0)
        counts = inside.sum(1).reshape(-1, *[1] * (x.ndim - axis - 1))
        x = jnp.sum(seen, axis + 1) / jnp.asarray(counts, x.dtype)
    return x


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
        }
    )
