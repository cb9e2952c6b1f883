"""Functions that written modules copy in addition to those of `ties.py`, since JAX has none like torch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfn._torch.ties import vector_norm, with_index


def median(x: jax.Array, axis: int, keepdims: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the lower median along an axis, or NaN if there is one, and its index."""
    num_numbers = (~jnp.isnan(x)).sum(axis, keepdims=True)
    k = jnp.where(num_numbers < x.shape[axis], num_numbers, (x.shape[axis] - 1) // 2)
    return with_index(x, jnp.take_along_axis(jnp.argsort(x, axis), k, axis), axis, keepdims)


def sum_to_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sums over the axes that a broadcast from a shape has added or stretched."""
    extra = x.ndim - len(shape)
    stretched = [i for i, n in enumerate(shape, extra) if n == 1 and x.shape[i] != 1]
    return x.sum((*range(extra), *stretched)).reshape(tuple(shape))


def svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns U, S and V of the reduced singular value decomposition."""
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    return u, s, vh.mT.conj()


def squeeze(x: jax.Array, axis: int | Sequence[int]) -> jax.Array:
    """Removes axes of length 1, and leaves other ones."""
    axes = [axis] if isinstance(axis, int) else axis
    return jnp.squeeze(x, tuple(i for i in axes if x.ndim and x.shape[i] == 1))


def flatten(x: jax.Array, start: int = 0, end: int = -1) -> jax.Array:
    """Merges the axes from `start` to `end`, inclusive."""
    end %= x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def unflatten(x: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
    """Splits an axis into several ones."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def split(x: jax.Array, size: int, axis: int = 0) -> list[jax.Array]:
    """Splits an axis into parts of a size; the last one may be smaller."""
    return jnp.split(x, list(range(size, x.shape[axis], size)), axis)


def expand(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Broadcasts x; -1 leaves an axis unchanged."""
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [old if new == -1 else new for old, new in zip(shape, sizes, strict=True)])


def windows(x: jax.Array, axis: int, size: int, step: int) -> jax.Array:
    """Returns the windows of a size along an axis, as a new last axis."""
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), axis), axis % x.ndim + 1, -1)


def at_along(x: jax.Array, axis: int, index: jax.Array) -> Any:
    """Returns `x.at` the elements that `index` selects along an axis, as in `jnp.take_along_axis`."""
    where: list[Any] = list(jnp.indices(index.shape, sparse=True))
    where[axis] = index
    return x.at[tuple(where)]


def at_index(x: jax.Array, axis: int, index: Any) -> Any:
    """Returns `x.at` some indices along an axis."""
    return x.at[(slice(None),) * (axis % x.ndim) + (index,)]


def grad_and_value(function: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
    """Returns a function that returns the gradients, and then the value."""

    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = jax.value_and_grad(function, argnums, has_aux)(*args, **kwargs)
        return gradients, value

    return run


def pairs(values: Any, n: int) -> tuple[Any, ...]:
    """Returns a number for each of n axes."""
    return (values,) * n if isinstance(values, (int, float)) else tuple(values) * (n if len(values) == 1 else 1)


def convolution(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> jax.Array:
    """Convolves the axes after the second one."""
    n = weight.ndim - 2
    pads = padding.upper() if isinstance(padding, str) else [(p, p) for p in pairs(padding, n)]
    options: Any = {"rhs_dilation": pairs(dilation, n), "feature_group_count": groups}
    y = lax.conv_general_dilated(x if x.ndim > n + 1 else x[None], weight, pairs(stride, n), pads, **options)
    y = y if x.ndim > n + 1 else y[0]
    return y if bias is None else y + bias.reshape(-1, *(1,) * n)


def convolution_input(input_size: Sequence[int], weight: jax.Array, gradient: jax.Array, **options: Any) -> jax.Array:
    """Returns the gradient of a convolution by its input."""
    x = jax.ShapeDtypeStruct(tuple(input_size), gradient.dtype)
    return jax.linear_transpose(partial(convolution, weight=weight, **options), x)(gradient)[0]


def convolution_weight(x: jax.Array, weight_size: Sequence[int], gradient: jax.Array, **options: Any) -> jax.Array:
    """Returns the gradient of a convolution by its weight."""
    weight = jax.ShapeDtypeStruct(tuple(weight_size), gradient.dtype)
    return jax.linear_transpose(partial(convolution, x, **options), weight)(gradient)[0]


def transposed_convolution(
    x: jax.Array, weight: jax.Array, bias: Any = None, *, output_padding: Any = 0, groups: int = 1, **options: Any
) -> jax.Array:
    """Returns the transpose of a convolution, applied to x."""
    n = weight.ndim - 2
    stride, padding, dilation = (options.get(name, x) for name, x in (("stride", 1), ("padding", 0), ("dilation", 1)))
    numbers = zip(*(pairs(z, n) for z in (stride, padding, dilation, output_padding)), strict=True)
    sizes = [
        (length - 1) * s - 2 * p + d * (k - 1) + extra + 1
        for length, k, (s, p, d, extra) in zip(x.shape[2:], weight.shape[2:], numbers, strict=True)
    ]
    y = convolution_input((x.shape[0], weight.shape[1] * groups, *sizes), weight, x, groups=groups, **options)
    return y if bias is None else y + bias.reshape(-1, *(1,) * n)


def unfold(x: jax.Array, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> jax.Array:
    """Returns the patches of images as columns."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (pairs(n, 2) for n in (kernel_size, dilation, padding, stride))
    x = jnp.pad(x, [(0, 0), (0, 0), (ph, ph), (pw, pw)])
    height, width = x.shape[2] - dh * (kh - 1), x.shape[3] - dw * (kw - 1)
    parts = [x[:, :, i * dh :, j * dw :][:, :, :height:sh, :width:sw] for i in range(kh) for j in range(kw)]
    return jnp.stack(parts, axis=2).reshape(x.shape[0], x.shape[1] * kh * kw, -1)


def fold(x: jax.Array, output_size: Any, kernel_size: Any, **options: Any) -> jax.Array:
    """Adds up the columns of patches to images: the transpose of `unfold`."""
    channels = x.shape[1] // int(np.prod(pairs(kernel_size, 2)))
    image = jax.ShapeDtypeStruct((x.shape[0], channels, *pairs(output_size, 2)), x.dtype)
    return jax.linear_transpose(partial(unfold, kernel_size=kernel_size, **options), image)(x)[0]


def pool(x: jax.Array, n: int, reduction: Any, kernel_size: Any, stride: Any = None, padding: Any = 0) -> jax.Array:
    """Reduces windows of the last n axes; `reduction` is `lax.max`, or `lax.add` for the mean."""
    outer = (1,) * (x.ndim - n)
    size, step = pairs(kernel_size, n), pairs(kernel_size if stride is None else stride, n)
    pads = [(0, 0)] * (x.ndim - n) + [(p, p) for p in pairs(padding, n)]
    initial = -jnp.inf if reduction is lax.max else 0.0
    y = lax.reduce_window(x, initial, reduction, outer + size, outer + step, pads)
    return y if reduction is lax.max else y / np.prod(size)


def resize(x: jax.Array, size: Any, scale: Any = None, method: str = "nearest") -> jax.Array:
    """Resizes the axes after the second one to the nearest elements, or by linear interpolation."""
    old, n = x.shape[2:], x.ndim - 2
    sizes = [int(a * b) for a, b in zip(old, pairs(scale, n), strict=True)] if size is None else pairs(size, n)
    for axis, length in enumerate(sizes, 2):
        if method == "nearest":
            x = jnp.take(x, np.arange(length) * x.shape[axis] // length, axis)
            continue
        step = x.shape[axis] / length if scale is None else 1 / pairs(scale, n)[axis - 2]
        position = np.maximum((np.arange(length) + 0.5) * step - 0.5, 0)
        low = np.minimum(position.astype(int), x.shape[axis] - 1)
        weight = jnp.asarray((position - low).reshape(-1, *(1,) * (x.ndim - axis - 1)), x.dtype)
        high = np.minimum(low + 1, x.shape[axis] - 1)
        x = jnp.take(x, low, axis) * (1 - weight) + jnp.take(x, high, axis) * weight
    return x


def pad(x: jax.Array, pads: Sequence[int], value: float = 0, mode: str = "constant") -> jax.Array:
    """Pads x; `pads` has two numbers for each axis, from the last one. Negative numbers crop."""
    config = [(0, 0, 0)] * (x.ndim - len(pads) // 2)
    config += [(pads[i], pads[i + 1], 0) for i in range(len(pads) - 2, -1, -2)]
    if mode == "constant":
        return lax.pad(x, jnp.asarray(value, x.dtype), config)
    modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    return jnp.pad(x, [(low, high) for low, high, _ in config], mode=modes[mode])


def layer_norm(x: jax.Array, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> jax.Array:
    """Normalizes the last axes, of the shape `shape`."""
    axes = tuple(range(-len([shape] if isinstance(shape, int) else shape), 0))
    mean = x.mean(axes, keepdims=True)
    y = (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def nll_loss(
    x: jax.Array, target: jax.Array, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> jax.Array:
    """Returns the loss of log-probabilities, with the classes in axis 1, and integer labels."""
    label = jnp.where(target == ignore_index, 0, target)
    weights = jnp.where(target == ignore_index, 0, 1 if weight is None else weight[label]).astype(x.dtype)
    loss = jnp.where(weights == 0, 0, -jnp.take_along_axis(x, jnp.expand_dims(label, 1), 1).squeeze(1) * weights)
    return loss.sum() / weights.sum() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def cosine_similarity(x: jax.Array, y: jax.Array, axis: int = 1, eps: float = 1e-8) -> jax.Array:
    """Returns the cosine of the angle between vectors along an axis."""
    norms = [jnp.maximum(vector_norm(z, axis=axis, keepdims=True), eps) for z in (x, y)]
    return (x / norms[0] * (y / norms[1])).sum(axis)


def pixel_shuffle(x: jax.Array, factor: int) -> jax.Array:
    """Moves channels to blocks of pixels."""
    *batch, c, h, w = x.shape
    y = x.reshape(-1, c // factor**2, factor, factor, h, w).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(*batch, c // factor**2, h * factor, w * factor)


def pixel_unshuffle(x: jax.Array, factor: int) -> jax.Array:
    """Moves blocks of pixels to channels."""
    *batch, c, h, w = x.shape
    y = x.reshape(-1, c, h // factor, factor, w // factor, factor).transpose(0, 1, 3, 5, 2, 4)
    return y.reshape(*batch, c * factor**2, h // factor, w // factor)


def rms_norm(x: jax.Array, shape: Any, weight: Any = None, eps: float | None = None) -> jax.Array:
    """Divides x by the root mean square of the last axes, of the shape `shape`."""
    axes = tuple(range(-len([shape] if isinstance(shape, int) else shape), 0))
    y = x * lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + (jnp.finfo(x.dtype).eps if eps is None else eps))
    return y if weight is None else y * weight


def group_norm(x: jax.Array, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> jax.Array:
    """Normalizes groups of channels."""
    z = x.reshape(x.shape[0], groups, -1)
    z = z - z.mean(2, keepdims=True)
    y = (z * lax.rsqrt(jnp.square(z).mean(2, keepdims=True) + eps)).reshape(x.shape)
    channels = (-1, *(1,) * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(channels)
    return y if bias is None else y + bias.reshape(channels)


def batch_norm(
    x: jax.Array, mean: jax.Array, var: jax.Array, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> jax.Array:
    """Normalizes channels by statistics."""
    channels = (-1, *(1,) * (x.ndim - 2))
    scale = lax.rsqrt(var + eps) if weight is None else lax.rsqrt(var + eps) * weight
    y = (x - mean.reshape(channels)) * scale.reshape(channels)
    return y if bias is None else y + bias.reshape(channels)


def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """Sets the elements that a mask selects to the first elements of another array, in order."""
    mask = jnp.broadcast_to(mask, x.shape)
    positions = jnp.cumsum(mask.reshape(-1)).reshape(x.shape) - 1
    return jnp.where(mask, source.reshape(-1)[positions], x)


def not_reached(line: str) -> Any:
    """Raises an error: no example reached this expression when the module was written."""
    raise NotImplementedError(f"no example reached {line}")
