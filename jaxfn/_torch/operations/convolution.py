"""Convolutions of one to three spatial axes, plain and transposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.platforms import by_platform
from jaxfn._torch.operations.promotion import half_to_single
from jaxfn._torch.operations.table import composite

Pads = Sequence[tuple[int, int]]
# The stride, padding, dilation and output padding of a transposed convolution along each axis, and its groups.
_Options = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], int]


@composite("aten.convolution", accepts_half=True)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: bool,
) -> Array:
    spatial = x.ndim - 2
    stride, padding, dilation, output_padding = (
        [*options_of_forward] * spatial if len(options_of_forward) == 1 else [*options_of_forward]
        for options_of_forward in (stride, padding, dilation, output_padding)
    )
    if transposed:
        of_transposed = stride, padding, dilation, output_padding, groups
        y = by_platform(partial(_transposed_on_cpu, of_transposed), partial(_transposed, of_transposed), x, weight)
    else:
        options = stride, [(p, p) for p in padding], dilation, groups
        plain, on_cpu = partial(_plain, *options), partial(_plain_on_cpu, *options)
        is_slow = _is_slow_on_cpu(x, weight, jax.eval_shape(plain, x, weight), stride, groups)
        y = by_platform(on_cpu, plain, x, weight) if is_slow else plain(x, weight)
    return y if bias is None else y + bias.reshape(-1, *[1] * spatial)


def _plain(stride: Sequence[int], pads: Pads, dilation: Sequence[int], groups: int, x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, stride, pads, None, dilation, feature_group_count=groups)


def _transposed(options: _Options, x: Array, weight: Array) -> Array:
    """Applies the kernel's mirror image to the input with stride - 1 zeros between its elements."""
    stride, padding, dilation, output_padding, groups = options
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    kernel = jnp.flip(_swap_channels(weight, groups), range(2, x.ndim))
    return lax.conv_general_dilated(x, kernel, [1] * len(pads), pads, stride, dilation, feature_group_count=groups)


def _swap_channels(weight: Array, groups: int) -> Array:
    """Converts the weight of a transposed convolution (in, out / groups, ...) to (out, in / groups, ...)."""
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    return jnp.swapaxes(grouped, 1, 2).reshape(-1, grouped.shape[1], *weight.shape[2:])


# ---------------------------------------------------------------------------------------------------------- on a CPU
#
# XLA has fast code for convolutions over up to two axes, with one group and a kernel that is not mirrored. Others
# run in plain loops, as do derivatives that are such convolutions. Here they are composed of fast ones.

# The largest number of products that a depthwise convolution is written as.
_MOST_PRODUCTS = 128


def _is_slow_on_cpu(x: Array, kernel: Array, y: Any, stride: Sequence[int], groups: int) -> bool:
    """Whether XLA's convolution or its derivative is slow."""
    spatial = kernel.shape[2:]
    if groups > 1 and kernel.shape[1] == 1:
        return math.prod(spatial) <= _MOST_PRODUCTS
    has_patches = math.prod(stride) > 1 and [*spatial] == [*stride]
    # XLA mirrors the kernel in the derivative of the weight if the result is larger than the input.
    return groups > 1 or len(spatial) == 3 or has_patches or math.prod(y.shape[2:]) > math.prod(x.shape[2:])


def _plain_on_cpu(
    stride: Sequence[int], pads: Pads, dilation: Sequence[int], groups: int, x: Array, kernel: Array
) -> Array:
    dtype = x.dtype
    x, kernel = half_to_single((x, kernel))
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in pads)])
    # The barrier prevents XLA from making the padding a part of the convolution again.
    return _unpadded(stride, dilation, groups, lax.optimization_barrier(x), kernel).astype(dtype)


def _unpadded(stride: Sequence[int], dilation: Sequence[int], groups: int, x: Array, kernel: Array) -> Array:
    spatial = kernel.shape[2:]
    if groups > 1 and kernel.shape[1] == 1 and math.prod(spatial) <= _MOST_PRODUCTS:
        return _depthwise(stride, dilation, x, kernel)
    if groups > 1:
        parts = zip(jnp.split(x, groups, 1), jnp.split(kernel, groups), strict=True)
        return jnp.concatenate([_unpadded(stride, dilation, 1, *part) for part in parts], 1)
    if len(spatial) == 3:
        return _over_two_axes(stride, dilation, x, kernel)
    if [*spatial] == [*stride] and set(dilation) == {1}:
        return _of_patches(x, kernel)
    return _plain(stride, [(0, 0)] * len(spatial), dilation, 1, x, kernel)


def _shifted(x: Array, axis: int, offset: int, length: int, stride: int) -> Array:
    """Returns the elements of an axis that one element of the kernel meets."""
    return lax.slice_in_dim(x, offset, offset + (length - 1) * stride + 1, stride, axis)


def _depthwise(stride: Sequence[int], dilation: Sequence[int], x: Array, kernel: Array) -> Array:
    """Adds the products of the input with each element of the kernel."""
    n, channels, *spatial = x.shape
    lengths = _result_lengths(x, kernel, stride, dilation)
    x = x.reshape(n, channels, 1, *spatial)
    kernel = kernel.reshape(channels, -1, *kernel.shape[2:])
    products: list[Array] = []
    for element in np.ndindex(*kernel.shape[2:]):
        part = x
        for axis, (i, d, length, s) in enumerate(zip(element, dilation, lengths, stride, strict=True), 3):
            part = _shifted(part, axis, i * d, length, s)
        products.append(part * kernel[(..., *element)].reshape(channels, -1, *[1] * len(lengths)))
    return lax.collapse(reduce(add, products), 1, 3)


def _over_two_axes(stride: Sequence[int], dilation: Sequence[int], x: Array, kernel: Array) -> Array:
    """Adds convolutions over two axes, one for each element of the kernel along the third, its shortest."""
    axis = min(range(2, 5), key=lambda axis: kernel.shape[axis])
    length = _result_lengths(x, kernel, stride, dilation)[axis - 2]
    s, d = stride[axis - 2], dilation[axis - 2]
    others = [i for i in range(3) if i != axis - 2]
    stride, dilation = [stride[i] for i in others], [dilation[i] for i in others]
    x = jnp.moveaxis(x, axis, 0)
    parts: list[Array] = []
    for i in range(kernel.shape[axis]):
        part = _shifted(x, 0, i * d, length, s)
        parts.append(_unpadded(stride, dilation, 1, lax.collapse(part, 0, 2), lax.index_in_dim(kernel, i, axis, False)))
    total = reduce(add, parts)
    return jnp.moveaxis(total.reshape(length, x.shape[1], *total.shape[1:]), 0, axis)


def _of_patches(x: Array, kernel: Array) -> Array:
    """Convolves with a stride as long as the kernel: one matrix product of patches."""
    n, channels, *lengths = x.shape
    sizes = kernel.shape[2:]
    counts = [length // size for length, size in zip(lengths, sizes, strict=True)]
    used = (slice(count * size) for count, size in zip(counts, sizes, strict=True))
    shape = [part for pair in zip(counts, sizes, strict=True) for part in pair]
    patches = x[(..., *used)].reshape(n, channels, *shape)
    within = tuple(range(3, patches.ndim, 2))
    y = jnp.tensordot(patches, kernel, ((1, *within), (1, *range(2, kernel.ndim))))
    return jnp.moveaxis(y, -1, 1)


def _result_lengths(x: Array, kernel: Array, stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    axes = zip(x.shape[2:], kernel.shape[2:], stride, dilation, strict=True)
    return [(length - d * (k - 1) - 1) // s + 1 for length, k, s, d in axes]


def _transposed_on_cpu(options: _Options, x: Array, weight: Array) -> Array:
    """Computes the results of each remainder by the stride as channels of one plain convolution."""
    stride, padding, dilation, output_padding, groups = options
    spatial = x.ndim - 2
    kernel = _swap_channels(weight, groups)
    sizes = [d * (k - 1) + 1 for d, k in zip(dilation, kernel.shape[2:], strict=True)]
    counts = [-(-size // s) for size, s in zip(sizes, stride, strict=True)]
    fill = [(0, c * s - size, d - 1) for c, s, size, d in zip(counts, stride, sizes, dilation, strict=True)]
    kernel = lax.pad(kernel, np.zeros((), kernel.dtype), [(0, 0, 0), (0, 0, 0), *fill])
    channels, per_group = kernel.shape[:2]
    kernel = kernel.reshape(channels, per_group, *(part for pair in zip(counts, stride, strict=True) for part in pair))
    remainders, quotients = range(3, kernel.ndim, 2), range(2, kernel.ndim, 2)
    kernel = jnp.flip(kernel, quotients).transpose(0, *remainders, 1, *quotients)
    axes = zip(x.shape[2:], stride, sizes, padding, output_padding, strict=True)
    lengths = [(n - 1) * s + size - 2 * p + o for n, s, size, p, o in axes]
    # The first and the last multiple of the stride that the result needs, counted from before the padding.
    firsts = [p // s for p, s in zip(padding, stride, strict=True)]
    lasts = [(p + length - 1) // s for p, length, s in zip(padding, lengths, stride, strict=True)]
    pads = [(c - 1 - first, last + 1 - n) for c, first, last, n in zip(counts, firsts, lasts, x.shape[2:], strict=True)]
    y = _plain_on_cpu([1] * spatial, pads, [1] * spatial, groups, x, kernel.reshape(-1, per_group, *counts))
    covered = [n * s for n, s in zip(y.shape[2:], stride, strict=True)]
    y = y.reshape(len(y), channels, *stride, *y.shape[2:])
    y = y.transpose(0, 1, *(axis for i in range(2, 2 + spatial) for axis in (i + spatial, i)))
    before = [p - first * s for p, first, s in zip(padding, firsts, stride, strict=True)]
    inside = (slice(b, b + length) for b, length in zip(before, lengths, strict=True))
    return y.reshape(len(y), channels, *covered)[(..., *inside)]


@composite("aten.convolution_backward", accepts_half=True)
def convolution_backward(
    gradient: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    *options: Any,
) -> tuple[Array | None, ...]:
    """Computes the gradients that the last option selects; the other options are those of `convolution`."""
    *options_of_forward, output_mask = options

    def forward(x: Array, weight: Array) -> Array:
        return convolution(x, weight, None, *options_of_forward)

    grad_x, grad_weight = jax.vjp(forward, x, weight)[1](gradient)
    grad_bias = jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    gradients = zip((grad_x, grad_weight, grad_bias), output_mask, strict=True)
    return tuple(grad if want else None for grad, want in gradients)
