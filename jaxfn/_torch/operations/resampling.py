"""Interpolation, padding by reflection and replication, and sampling at points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._mesh_types import is_sharded
from jaxfn._primitives import LinearMap, bind_linear_map
from jaxfn._torch.operations.derivative import apply_vjp
from jaxfn._torch.operations.platforms import lower_by_platform
from jaxfn._torch.operations.table import composite, data_movement, register_all

Table = np.ndarray[Any, Any]
# For an axis (length, new length, align_corners, scale factor or None), the input indices of each new element and their
# weights, both of shape (new length, number of indices).
Method = Callable[[int, int, bool, "float | None", Any], tuple[Table, Table]]


def _step(length: int, new: int, align_corners: bool, scale: float | None, dtype: Any) -> Any:
    """Returns the distance, in the input, between neighbours in the result, in torch's precision."""
    if align_corners:
        return dtype(length - 1) / dtype(new - 1) if new > 1 else dtype(0)
    return dtype(1.0 / scale) if scale else dtype(length) / dtype(new)


def _nearest(length: int, new: int, align_corners: bool, scale: float | None, dtype: Any) -> tuple[Table, Table]:
    indices = np.floor(np.arange(new, dtype=np.float32) * _step(length, new, False, scale, np.float32))
    return np.minimum(indices.astype(int), length - 1)[:, None], np.ones((new, 1))


def _nearest_exact(length: int, new: int, align_corners: bool, scale: float | None, dtype: Any) -> tuple[Table, Table]:
    step = _step(length, new, False, scale, np.float32)
    indices = np.floor((np.arange(new, dtype=np.float32) + np.float32(0.5)) * step)
    return np.minimum(indices.astype(int), length - 1)[:, None], np.ones((new, 1))


def _source(length: int, new: int, align_corners: bool, scale: float | None, dtype: Any) -> Table:
    step = _step(length, new, align_corners, scale, dtype)
    number = np.arange(new, dtype=dtype)
    return step * number if align_corners else step * (number + dtype(0.5)) - dtype(0.5)


def _linear(length: int, new: int, align_corners: bool, scale: float | None, dtype: Any) -> tuple[Table, Table]:
    source = np.maximum(_source(length, new, align_corners, scale, dtype), 0)
    below = np.minimum(np.floor(source).astype(int), length - 1)
    share = np.clip(source - below, 0, 1)
    return np.stack((below, np.minimum(below + 1, length - 1)), -1), np.stack((1 - share, share), -1)


def _cubic(length: int, new: int, align_corners: bool, scale: float | None, dtype: Any) -> tuple[Table, Table]:
    source = _source(length, new, align_corners, scale, dtype)
    below = np.floor(source)
    offsets = np.arange(-1, 3)
    indices = np.clip(below[:, None].astype(int) + offsets, 0, length - 1)
    return indices, cubic_weights(source - below, np)


def cubic_weights(share: Any, namespace: Any) -> Any:
    """Returns the weights of Keys' cubic convolution (a = -0.75), for a point `share` after the second element."""
    a = -0.75
    far = [share + 1, 2 - share]
    near = [share, 1 - share]
    outer = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in far]
    inner = [((a + 2) * d - (a + 3)) * d * d + 1 for d in near]
    return namespace.stack((outer[0], inner[0], inner[1], outer[1]), -1)


def _linear_antialiased(
    length: int, new: int, align_corners: bool, scale: float | None, dtype: Any
) -> tuple[Table, Table]:
    """Returns the weights of a triangle filter, as wide as the step when shrinking."""
    step = float(_step(length, new, align_corners, scale, np.float64))
    reach = max(step, 1.0)
    centers = step * (np.arange(new) + 0.5)
    first = np.maximum((centers - reach + 0.5).astype(int), 0)
    last = np.minimum((centers + reach + 0.5).astype(int), length)
    indices = first[:, None] + np.arange((last - first).max())
    weights = np.maximum(1 - np.abs((indices - centers[:, None] + 0.5) / reach), 0) * (indices < last[:, None])
    return np.minimum(indices, length - 1), weights / weights.sum(1, keepdims=True)


# For each term of a sum, a CPU multiplies so many elements of a matrix.
_ELEMENTS_PER_TERM = 32

# Sums of up to this many terms are written term by term, without an array of all terms.
_MOST_TERMS = 16


def _resample(x: Array, axis: int, table: tuple[Table, Table]) -> Array:
    """Returns weighted sums of elements along an axis. An index after the end reads 0."""
    indices, weights = table
    shape = (-1, *[1] * (x.ndim - axis - 1))
    if indices.shape[1] > _MOST_TERMS:
        seen = jnp.take(x, indices, axis, mode="fill", fill_value=0)
        return jnp.sum(seen * jnp.asarray(weights, x.dtype).reshape(*weights.shape, *shape[1:]), axis + 1)
    # Without weights of 0, which would spread NaN and inf.
    if indices.shape[1] == 1 and (weights == 1).all():
        times = len(indices) // max(x.shape[axis], 1)
        if not is_sharded(x) and np.array_equal(indices[:, 0], np.arange(x.shape[axis]).repeat(times)):
            shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
            return lax.collapse(jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape), axis, axis + 2)
        return jnp.take(x, indices[:, 0], axis, mode="fill", fill_value=0)
    columns = zip(indices.T, weights.T, strict=True)
    parts = [
        jnp.take(x, index, axis, mode="fill", fill_value=0) * jnp.asarray(weight, x.dtype).reshape(shape)
        for index, weight in columns
    ]
    return sum(parts[1:], parts[0])


def _resample_by_platform(x: Array, axis: int, table: tuple[Table, Table]) -> Array:
    """Computes `_resample`. On a CPU a product with a matrix is faster than to read each term, if few elements are 0.

    Those would spread NaN and inf.
    """
    indices, weights = table
    resample, length = partial(_resample, axis=axis, table=table), x.shape[axis]
    if indices.shape[1] == 1 or not 0 < length <= _ELEMENTS_PER_TERM * indices.shape[1]:
        return resample(x)
    matrix = np.zeros((len(indices), length + 1))
    np.add.at(matrix, (np.arange(len(indices))[:, None], indices), weights)

    def product(x: Array) -> Array:
        rows, factor = x.reshape(-1, length, math.prod(x.shape[axis + 1 :])), jnp.asarray(matrix[:, :-1], x.dtype)
        exactly = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        if rows.shape[2] == 1:
            return exactly(rows[..., 0], factor.T)
        # Copies of the matrix cost less than to transpose the result.
        return exactly(jnp.broadcast_to(factor, (len(rows), *factor.shape)), rows)

    def on_cpu(x: Array) -> Array:
        # Flat results have one layout. XLA would transpose others for one of the branches.
        def flat(compute: Callable[[Array], Array], x: Array) -> Array:
            return compute(x).ravel()

        sums = lax.cond(jnp.isfinite(x).all(), partial(flat, product), partial(flat, resample), x)
        return sums.reshape(*x.shape[:axis], len(indices), *x.shape[axis + 1 :])

    return lower_by_platform(on_cpu, resample, x)


class _Resampling(LinearMap):
    """The interpolation along one axis. Its transpose reads too, since to write to indices is slow."""

    def __init__(self, x: Array, axis: int, table: tuple[Table, Table]) -> None:
        self._axis = axis
        self._table = table
        self._transposed = _transpose(table, x.shape[axis])
        aval = jax.typeof(x)
        self.avals = [aval.update(shape=(*x.shape[:axis], len(table[0]), *x.shape[axis + 1 :]))]

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Array]) -> list[Array]:
        return [_resample_by_platform(tangents[0], self._axis, self._table)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Array | None]:
        return [_resample_by_platform(cotangents[0], self._axis, self._transposed)]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(resampling: _Resampling, x: Array) -> Array:
    return resampling.apply((), [x])[0]


@_apply.defjvp
def _apply_jvp(resampling: _Resampling, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _apply(resampling, *primals), bind_linear_map(resampling, (), tangents)[0]


def _transpose(table: tuple[Table, Table], length: int) -> tuple[Table, Table]:
    """Returns the table of the transpose, filled up with an index after the end."""
    sources, weights = (part.ravel() for part in table)
    order = np.argsort(sources, kind="stable")[: np.count_nonzero(sources < length)]
    counts = np.bincount(sources[order], minlength=length)
    column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = length, max(counts.max(initial=0), 1)
    indices, transposed_weights = np.full(shape, len(table[0])), np.ones(shape)
    indices[sources[order], column] = order // table[0].shape[1]
    transposed_weights[sources[order], column] = weights[order]
    return indices, transposed_weights


def weighted_sums(x: Array, axis: int, table: tuple[Table, Table]) -> Array:
    """Returns sums of elements along an axis, of the indices and with the weights in a table. Indices may repeat.

    An index after the end reads 0.
    """
    return _apply(_Resampling(x, axis, table), x)


def _upsample(
    method: Method, x: Array, size: Sequence[int], align_corners: bool, scales: Sequence[float | None]
) -> Array:
    precision = np.float64 if x.dtype == np.float64 else np.float32
    for axis, (new, scale) in enumerate(zip(size, scales, strict=True), 2):
        x = weighted_sums(x, axis, method(x.shape[axis], new, align_corners, scale, precision))
    return x


def _upsample_aligned(
    method: Method, x: Array, size: Sequence[int], align_corners: bool, *scales: float | None
) -> Array:
    return _upsample(method, x, size, align_corners, scales or [None] * len(size))


def _upsample_unaligned(method: Method, x: Array, size: Sequence[int], *scales: float | None) -> Array:
    return _upsample(method, x, size, False, scales or [None] * len(size))


def _backward(
    forward: Callable[..., Array], gradient: Array, size: Sequence[int], input_size: Sequence[int], *options: Any
) -> Array:
    """Transposes the interpolation, which is linear."""
    zeros = jnp.zeros(tuple(input_size), gradient.dtype)
    return apply_vjp(lambda x: forward(x, size, *options).astype(gradient.dtype), gradient, zeros)


_METHODS: dict[str, Callable[..., Array]] = {
    "upsample_linear1d": partial(_upsample_aligned, _linear),
    "upsample_bilinear2d": partial(_upsample_aligned, _linear),
    "upsample_trilinear3d": partial(_upsample_aligned, _linear),
    "upsample_bicubic2d": partial(_upsample_aligned, _cubic),
    "_upsample_bilinear2d_aa": partial(_upsample_aligned, _linear_antialiased),
    **{f"upsample_nearest{n}d": partial(_upsample_unaligned, _nearest) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": partial(_upsample_unaligned, _nearest_exact) for n in (1, 2, 3)},
}

for _name, _forward in _METHODS.items():
    register_all(
        {
            f"aten.{_name}": _forward,
            f"aten.{_name}_backward": partial(_backward, _forward),
        },
        is_composite=True,
    )


def _pad(indices: Callable[[Table, int], Table], x: Array, padding: Sequence[int]) -> Array:
    """Takes the elements at the indices that `indices` maps into the array; torch lists the last axis first."""
    for number in range(len(padding) // 2):
        axis = x.ndim - 1 - number
        before, after = padding[2 * number : 2 * number + 2]
        length = x.shape[axis]
        at = np.arange(-before, length + after)
        if is_sharded(x):  # JAX does not concatenate parts with different shardings
            x = jnp.take(x, indices(at, length), axis)
            continue
        edges = (jnp.take(x, indices(part, length), axis) for part in (at[at < 0], at[at >= length]))
        first = min(max(-before, 0), length)
        middle = lax.slice_in_dim(x, first, max(min(length, length + after), first), axis=axis)
        x = jnp.concatenate([next(edges), middle, next(edges)], axis)
    return x


def _reflect(indices: Table, length: int) -> Table:
    """Mirrors indices at the first and the last element."""
    return length - 1 - np.abs(length - 1 - np.abs(indices))


def _replicate(indices: Table, length: int) -> Table:
    return np.clip(indices, 0, length - 1)


def _pad_backward(forward: Callable[..., Array], gradient: Array, x: Array, padding: Sequence[int]) -> Array:
    return apply_vjp(lambda x: forward(x, padding), gradient, x)


for _name, _map_indices in (("reflection", _reflect), ("replication", _replicate)):
    for _n in (1, 2, 3):
        _forward = partial(_pad, _map_indices)
        register_all({f"aten.{_name}_pad{_n}d": _forward}, accepts_half=True, is_composite=True)
        register_all({f"aten.{_name}_pad{_n}d_backward": partial(_pad_backward, _forward)}, is_composite=True)


@data_movement("aten.constant_pad_nd")
def constant_pad_nd(x: Array, padding: Sequence[int], value: Any = 0) -> Array:
    pads = [(padding[i], padding[i + 1], 0) for i in range(0, len(padding), 2)]
    config = [*[(0, 0, 0)] * (x.ndim - len(pads)), *reversed(pads)]
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


@composite("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sample(x: Array, grid: Array, interpolation: int, padding: int, align_corners: bool) -> Array:
    """Samples x (N, C, ...) at the points `grid` (N, ..., axes), with coordinates from -1 to 1, the last axis first.

    `interpolation` is 0 for linear, 1 for nearest, 2 for cubic; `padding` is 0 for zeros, 1 for the border, 2 for
    reflection.
    """
    lengths = x.shape[2:]
    points = [grid[..., -1 - axis] for axis in range(len(lengths))]
    points = [
        (p + 1) / 2 * (n - 1) if align_corners else ((p + 1) * n - 1) / 2 for p, n in zip(points, lengths, strict=True)
    ]
    clip = partial(_clip_to_image, padding=padding, align_corners=align_corners)
    if interpolation != 2:
        points = [clip(p, n) for p, n in zip(points, lengths, strict=True)]
    choices: list[list[tuple[Array, Any]]] = []
    for p, n in zip(points, lengths, strict=True):
        below = jnp.floor(lax.stop_gradient(p))
        if interpolation == 1:
            choices.append([(jnp.round(lax.stop_gradient(p)), 1)])
        elif interpolation == 0:
            choices.append([(below, below + 1 - p), (below + 1, p - below)])
        else:
            weights = cubic_weights(p - below, jnp)
            choices.append([(clip(below + k - 1, n), weights[..., k]) for k in range(4)])
    total = jnp.zeros((), x.dtype)
    for corner in itertools.product(*choices):
        total = total + _corner(x, [index for index, _ in corner]) * _product(corner)[:, None]
    return total


def _product(corner: Sequence[tuple[Array, Any]]) -> Any:
    weight = jnp.ones_like(corner[0][0])
    for _, factor in corner:
        weight = weight * factor
    return weight


def _corner(x: Array, indices: Sequence[Array]) -> Array:
    """Returns the elements of every channel at `indices`, and 0 outside."""
    exists = jnp.ones(indices[0].shape, bool)
    clipped: list[Array] = []
    for index, length in zip(indices, x.shape[2:], strict=True):
        exists &= (index >= 0) & (index <= length - 1)
        clipped.append(jnp.clip(jnp.nan_to_num(index), 0, length - 1).astype(int))
    number = jnp.arange(len(x)).reshape(-1, *[1] * (indices[0].ndim - 1))
    values = jnp.moveaxis(x, 1, -1)[(number, *clipped)]
    return jnp.moveaxis(jnp.where(exists[..., None], values, 0), -1, 1)


def _clip_to_image(point: Array, length: int, *, padding: int, align_corners: bool) -> Array:
    if padding == 0:
        return point
    if padding == 2:
        low, high = (0, 2 * (length - 1)) if align_corners else (-1, 2 * length - 1)
        span, start = (high - low) / 2, low / 2
        if span == 0:
            return jnp.zeros_like(point)
        distance = jnp.abs(point - start)
        turns = jnp.floor(distance / span)
        extra = distance - turns * span
        point = jnp.where(turns % 2 == 0, extra + start, span - extra + start)
    # Beyond a border the derivative is 0.
    return jnp.where(point <= 0, 0, jnp.where(point >= length - 1, length - 1, point))


@composite("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def grid_sample_backward(gradient: Array, x: Array, grid: Array, *options: Any) -> tuple[Array | None, Array | None]:
    """Computes the gradients that the last option selects; the other options are those of `grid_sample`."""
    *sampling_options, output_mask = options

    def forward(x: Array, grid: Array) -> Array:
        return grid_sample(x, grid, *sampling_options)

    grad_x, grad_grid = jax.vjp(forward, x, grid)[1](gradient)
    return grad_x if output_mask[0] else None, grad_grid if output_mask[1] else None
