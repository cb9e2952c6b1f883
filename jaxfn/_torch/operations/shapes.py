"""Views, joining and splitting: operations that move elements and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._mesh_types import pcast_like
from jaxfn._torch.operations.derivative import apply_vjp
from jaxfn._torch.operations.dims import along, axes
from jaxfn._torch.operations.multilinear import multilinear
from jaxfn._torch.operations.platforms import by_platform
from jaxfn._torch.operations.promotion import result_type
from jaxfn._torch.operations.table import data_movement, operation, register_all


def identity(x: Array) -> Array:
    """Returns `x`. JAX arrays are immutable, so a copy is the array itself."""
    return x


register_all(
    {
        "aten.alias": identity,
        "aten.clone": identity,
        "aten.detach": lax.stop_gradient,
        "aten.tril": jnp.tril,
        "aten.triu": jnp.triu,
        "aten.diagonal": jnp.diagonal,
    },
    accepts_half=True,
)
register_all({"aten.repeat": jnp.tile})  # Its derivative is a sum.


@data_movement("aten.roll")
def roll(x: Array, shifts: Sequence[int], dims: Sequence[int]) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@data_movement("aten._to_copy", "prims.convert_element_type")
def to_dtype(x: Array, dtype: Any = None, *_: Any) -> Array:
    if dtype is None:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return x != 0 if dtype == np.bool_ else jnp.real(x).astype(dtype)
    is_rounded = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer)
    return _to_integer(x, np.dtype(dtype)) if is_rounded else x.astype(dtype)


def _to_integer(x: Array, dtype: np.dtype[Any]) -> Array:
    """Casts floating-point numbers to integers. Out of range, the result is that of an x86 processor.

    That is the lowest number, or the last bits of a 32-bit conversion if the dtype has fewer bits.
    """
    if dtype.itemsize < 4:
        return _to_integer(x, np.dtype(np.int32)).astype(dtype)
    if dtype.name not in ("int32", "int64"):
        return x.astype(dtype)
    lowest = jnp.iinfo(dtype).min
    # The highest integer is not a floating-point number, but the one above it is.
    fits = (x >= float(lowest)) & (x < -float(lowest))
    return jnp.where(fits, x.astype(dtype), lowest)


@operation("aten.copy")
def copy(x: Array, source: Array, *_: Any) -> Array:
    return jnp.broadcast_to(to_dtype(source, x.dtype), x.shape)


@data_movement("aten.view", "aten._unsafe_view", "aten._reshape_alias")
def view(x: Array, size: Sequence[int], *_: Any) -> Array:
    return x.reshape(tuple(size)) if -1 in size else lax.reshape(x, tuple(size))


@data_movement("aten.permute")
def permute(x: Array, dims: Sequence[int]) -> Array:
    return lax.transpose(x, axes(x, dims) if dims else ())


@data_movement("aten.t")
def t(x: Array) -> Array:
    return lax.transpose(x, tuple(reversed(range(x.ndim))))


@data_movement("aten.unsqueeze")
def unsqueeze(x: Array, dim: int) -> Array:
    return lax.expand_dims(x, [dim])


@data_movement("aten.view.dtype")
def view_dtype(x: Array, dtype: Any) -> Array:
    """Reinterprets the bits as another dtype. The last axis shrinks or grows with the size of an element."""
    ratio = np.dtype(dtype).itemsize / x.dtype.itemsize
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], -1, round(ratio))
    bits = lax.bitcast_convert_type(x, dtype)
    return bits.reshape(*bits.shape[:-2], -1) if ratio < 1 else bits


@operation("aten.expand")
def expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    new = len(size) - x.ndim
    shape = [x.shape[i - new] if length == -1 else length for i, length in enumerate(size)]
    return jnp.broadcast_to(x, shape)


@data_movement("aten.transpose")
def transpose(x: Array, first: int, second: int) -> Array:
    order = list(range(x.ndim))
    if order:
        order[first], order[second] = order[second], order[first]
    return lax.transpose(x, order)


@data_movement("aten.squeeze")
def squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    return lax.squeeze(x, [axis for axis in _named_axes(x, dim) if x.shape[axis] == 1])


def _named_axes(x: Array, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    # An empty list means no axis here, but all axes in a reduction.
    return () if isinstance(dim, Sequence) and not dim else axes(x, dim)


@data_movement("aten.flip")
def flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, _named_axes(x, tuple(dims))) if x.ndim else x


@data_movement("aten.cat")
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    dtype = result_type(*tensors)
    # torch skips tensors of shape (0,), whatever the shape of the others.
    operands = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    return jnp.concatenate([x.astype(dtype) for x in operands], dim)


@data_movement("aten.stack")
def stack(tensors: Sequence[Array], dim: int) -> Array:
    dtype = result_type(*tensors)
    return jnp.stack([x.astype(dtype) for x in tensors], dim)


@data_movement("aten.split_with_sizes")
def split_with_sizes(x: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1], dim) if len(sizes) > 1 else [x]


@data_movement("aten.split.Tensor", "aten.unsafe_split.Tensor")
def split(x: Array, size: int, dim: int) -> list[Array]:
    length = x.shape[dim]
    return jnp.split(x, tuple(range(size, length, size)), dim) if size else [x]


@data_movement("aten.unbind")
def unbind(x: Array, dim: int) -> list[Array]:
    return [lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])]


@data_movement("aten.select")
def select(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


@data_movement("aten.slice")
def slice_of(x: Array, dim: int, start: int | None, end: int | None, step: int) -> Array:
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, start, max(start, end), step, dim)


@data_movement("aten.narrow.default")
def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    return slice_of(x, dim, start, start % max(x.shape[dim], 1) + length if start < 0 else start + length, 1)


@data_movement("aten.unfold")
def unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Returns windows of `size` elements along `dim`, `step` apart, as a new last axis."""
    if x.ndim == 0:
        return x.reshape(1)[:size]
    axis = dim % x.ndim

    def take(x: Array) -> Array:
        starts = np.arange(0, x.shape[axis] - size + 1, step)
        return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), axis), axis + 1, -1)

    def join_blocks(x: Array) -> Array:
        """Computes `take` from blocks of `step` elements, so that the derivative adds arrays, and does not scatter."""
        count, per_window = (x.shape[axis] - size) // step + 1, -(-size // step)
        blocks = count - 1 + per_window
        rows = jnp.moveaxis(x, axis, -1)
        surplus = (0, blocks * step - x.shape[axis], 0)
        rows = lax.pad(rows, np.zeros((), x.dtype), [*[(0, 0, 0)] * (x.ndim - 1), surplus])
        rows = rows.reshape(*rows.shape[:-1], blocks, step)
        parts = [rows[..., i : i + count, :] for i in range(per_window)]
        return jnp.moveaxis(jnp.concatenate(parts, -1)[..., :size], -2, axis)

    def gradient_on_cpu(x: Array, gradient: Array) -> Array:
        return apply_vjp(join_blocks, gradient, x)

    def on_cpu(x: Array) -> Array:
        return multilinear(take, [gradient_on_cpu], x)

    return by_platform(on_cpu if 0 < size <= 16 * step else take, take, x)


@data_movement("aten.im2col")
def im2col(
    x: Array, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Array:
    """Returns the elements of every window of the last two axes (..., channels * kernel elements, windows)."""
    x = lax.pad(x, np.zeros((), x.dtype), [*[(0, 0, 0)] * (x.ndim - 2), *((p, p, 0) for p in padding)])
    for axis, k, d, s in zip((-2, -1), kernel, dilation, stride, strict=True):
        count = (x.shape[axis] - d * (k - 1) - 1) // s + 1
        # The axis of a window's elements comes before the axes of the image.
        if (s, d) == (k, 1):
            blocks = lax.slice_in_dim(x, 0, count * k, axis=axis)
            x = jnp.moveaxis(blocks.reshape(*x.shape[:axis], count, k, *x.shape[x.ndim + axis + 1 :]), axis, -3)
        else:
            length = (count - 1) * s + 1
            x = jnp.stack([lax.slice_in_dim(x, i * d, i * d + length, s, axis) for i in range(k)], -3)
    x = lax.collapse(x, x.ndim - 2)
    return lax.collapse(x, x.ndim - 4, x.ndim - 1)


@operation("aten.col2im")
def col2im(x: Array, size: Sequence[int], kernel: Sequence[int], *options: Sequence[int]) -> Array:
    """Adds the elements of every window to an image."""
    image = jnp.zeros((*x.shape[:-2], x.shape[-2] // math.prod(kernel), *size), x.dtype)
    image = pcast_like(image, jax.typeof(x))
    return apply_vjp(lambda image: im2col(image, kernel, *options), x, image)


@data_movement("aten.as_strided", reads_storage=True)
def as_strided(x: Array, elements: np.ndarray[Any, Any]) -> Array:
    return x.reshape(-1)[elements]


@data_movement("aten.as_strided_scatter", reads_storage=True)
def as_strided_scatter(x: Array, source: Array, elements: np.ndarray[Any, Any]) -> Array:
    return x.reshape(-1).at[elements].set(to_dtype(source, x.dtype)).reshape(x.shape)


@data_movement("aten.slice_scatter")
def slice_scatter(x: Array, source: Array, dim: int, start: int | None, end: int | None, step: int) -> Array:
    return x.at[along(x, dim, slice(start, end, step))].set(to_dtype(source, x.dtype))


@data_movement("aten.select_scatter")
def select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    return x.at[along(x, dim, index)].set(to_dtype(source, x.dtype))


@data_movement("aten.diagonal_scatter")
def diagonal_scatter(x: Array, source: Array, offset: int, first: int, second: int) -> Array:
    matrices = jnp.moveaxis(x, (first, second), (-2, -1))
    rows = np.arange(source.shape[-1]) + max(-offset, 0)
    columns = np.arange(source.shape[-1]) + max(offset, 0)
    written = matrices.at[..., rows, columns].set(to_dtype(source, x.dtype))
    return jnp.moveaxis(written, (-2, -1), (first, second))
