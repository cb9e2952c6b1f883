"""Convolutions of one to three spatial axes, plain and transposed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._mesh_types import pcast_like
from jaxfn._torch.operations.multilinear import multilinear
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

# The largest number of products that a convolution is written as: with one input channel for each group, and with more.
_MOST_PRODUCTS, _MOST_PRODUCTS_OF_CHANNELS = 128, 48
# The largest product of input and output channels of a group, for which matrix products would be faster.
_MOST_PAIRS = 32


def _is_product(kernel: Array, groups: int) -> bool:
    """Whether a grouped convolution is computed as a sum of products."""
    products, channels = math.prod(kernel.shape[1:]), kernel.shape[1]
    if channels == 1:
        return groups > 1 and products <= _MOST_PRODUCTS
    return products <= _MOST_PRODUCTS_OF_CHANNELS and kernel.shape[0] // groups * channels <= _MOST_PAIRS and groups > 1


def _is_slow_on_cpu(x: Array, kernel: Array, y: Any, stride: Sequence[int], groups: int) -> bool:
    """Whether XLA's convolution or its derivative is slow."""
    spatial = kernel.shape[2:]
    if groups > 1 and kernel.shape[1] == 1:
        return _is_product(kernel, groups)
    is_pointwise, has_patches = math.prod(spatial) == 1, math.prod(stride) > 1 and [*spatial] == [*stride]
    # XLA mirrors the kernel in the derivative of the weight if the result is larger than the input.
    is_product_of_matrices = is_pointwise or has_patches
    return groups > 1 or len(spatial) == 3 or is_product_of_matrices or math.prod(y.shape[2:]) > math.prod(x.shape[2:])


def _plain_on_cpu(
    stride: Sequence[int], pads: Pads, dilation: Sequence[int], groups: int, x: Array, kernel: Array
) -> Array:
    dtype = x.dtype
    x, kernel = half_to_single((x, kernel))
    if _is_product(kernel, groups):
        return _multiply(_Steps(stride, pads, dilation, groups), x, kernel).astype(dtype)
    x = _pad(x, pads)
    # The barrier prevents XLA from making the padding a part of the convolution again.
    return _unpadded(stride, dilation, groups, lax.optimization_barrier(x), kernel).astype(dtype)


def _pad(x: Array, pads: Pads) -> Array:
    return lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in pads)])


def _unpadded(stride: Sequence[int], dilation: Sequence[int], groups: int, x: Array, kernel: Array) -> Array:
    spatial = kernel.shape[2:]
    if groups > 1:
        parts = zip(jnp.split(x, groups, 1), jnp.split(kernel, groups), strict=True)
        return jnp.concatenate([_unpadded(stride, dilation, 1, *part) for part in parts], 1)
    if math.prod(spatial) == 1:
        return _pointwise(stride, x, kernel)
    if len(spatial) == 3:
        return _over_two_axes(stride, dilation, x, kernel)
    if [*spatial] == [*stride] and set(dilation) == {1}:
        return _of_patches(x, kernel)
    return _plain(stride, [(0, 0)] * len(spatial), dilation, 1, x, kernel)


def _shifted(x: Array, axis: int, offset: int, length: int, stride: int) -> Array:
    """Returns the elements of an axis that one element of the kernel meets."""
    return lax.slice_in_dim(x, offset, offset + (length - 1) * stride + 1, stride, axis)


class _Steps(NamedTuple):
    """The stride, the padding and the dilation along each axis, and the number of groups."""

    stride: Sequence[int]
    pads: Pads
    dilation: Sequence[int]
    groups: int


def _multiply(steps: _Steps, x: Array, kernel: Array) -> Array:
    """Convolves by a sum of products, one for each element of the kernel of a group."""
    gradients = partial(_gradient_of_input, steps), partial(_gradient_of_kernel, steps)
    return multilinear(partial(_sum_of_products, steps), gradients, x, kernel)


def _sum_of_products(steps: _Steps, x: Array, kernel: Array) -> Array:
    # The barrier prevents XLA from padding again for each product.
    x = _with_groups(lax.optimization_barrier(_pad(x, steps.pads)), 1, steps.groups)
    kernel = _with_groups(kernel, 0, steps.groups)
    lengths = _result_lengths(x[:, 0], kernel[0], steps.stride, steps.dilation)
    products: list[Array] = []
    for channel, *element in np.ndindex(*kernel.shape[2:]):
        part = lax.slice_in_dim(x, channel, channel + 1, axis=2)
        for axis, (i, d, length, s) in enumerate(zip(element, steps.dilation, lengths, steps.stride, strict=True), 3):
            part = _shifted(part, axis, i * d, length, s)
        products.append(part * kernel[(..., channel, *element)].reshape(*kernel.shape[:2], *[1] * len(lengths)))
    return lax.collapse(reduce(add, products), 1, 3)


def _with_groups(x: Array, axis: int, groups: int) -> Array:
    """Splits an axis into groups and the channels of each."""
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def _gradient_of_input(steps: _Steps, x: Array, kernel: Array, gradient: Array) -> Array:
    """Convolves the gradient of the result, with stride - 1 zeros between its elements, with the mirrored kernel."""
    axes = zip(x.shape[2:], kernel.shape[2:], gradient.shape[2:], *steps[:3], strict=True)
    pads = [(d * (k - 1) - low, n - 1 + low - (m - 1) * s) for n, k, m, s, (low, _), d in axes]
    spread = [(0, 0, 0), (0, 0, 0), *((0, 0, s - 1) for s in steps.stride)]
    gradient = lax.pad(gradient, np.zeros((), gradient.dtype), spread)
    mirrored = jnp.flip(_swap_channels(kernel, steps.groups), range(2, x.ndim))
    return _multiply(steps._replace(stride=[1] * len(pads), pads=pads), gradient, mirrored)


def _gradient_of_kernel(steps: _Steps, x: Array, kernel: Array, gradient: Array) -> Array:
    def gradient_of_x(x: Array, gradient: Array, of_result: Array) -> Array:
        return _gradient_of_input(steps, x, of_result, gradient)

    def gradient_of_gradient(x: Array, gradient: Array, of_result: Array) -> Array:
        return _multiply(steps, x, of_result)

    function = partial(_correlate, steps, kernel.shape)
    return multilinear(function, (gradient_of_x, gradient_of_gradient), x, gradient)


def _correlate(steps: _Steps, shape: Sequence[int], x: Array, gradient: Array) -> Array:
    """Sums products of the input with the gradient of the result for each element of a kernel of shape `shape`.

    A loop over the rows of the gradient adds each one's products to one array for each element, with vector
    instructions. XLA's sums over the last axis use none.
    """
    if not gradient.size:
        return jnp.zeros(shape, gradient.dtype)
    x, gradient = (_with_groups(y, 1, steps.groups) for y in (_pad(x, steps.pads), gradient))
    (*outer, last), (*strides, s), (*dilations, d) = shape[2:], steps.stride, steps.dilation
    *lengths, length = gradient.shape[3:]
    # The rows of the input that each row of the gradient meets, one for each element of the kernel's outer axes.
    first = np.indices((len(x), *lengths)).reshape(1 + len(outer), -1, 1)
    offsets = np.indices((1, *outer)).reshape(1 + len(outer), 1, -1)
    scale, reach = (np.reshape([1, *values], (-1, 1, 1)) for values in (strides, dilations))
    met = np.ravel_multi_index(tuple(first * scale + offsets * reach), (len(x), *x.shape[3:-1]))
    rows, gradients = (jnp.moveaxis(y, (1, 2), (-3, -2)).reshape(-1, *y.shape[1:3], y.shape[-1]) for y in (x, gradient))

    def add_row(totals: Sequence[Array], row: tuple[Array, Array]) -> tuple[list[Array], None]:
        gradient, met = row
        seen = [lax.dynamic_index_in_dim(rows, met[i], keepdims=False) for i in range(len(met))]
        elements = itertools.product(range(shape[1]), seen, range(last))
        parts = (_shifted(row[:, c : c + 1], 2, i * d, length, s) for c, row, i in elements)
        return [total + part * gradient for total, part in zip(totals, parts, strict=True)], None

    zeros = pcast_like(pcast_like(jnp.zeros(gradients.shape[1:], x.dtype), jax.typeof(x)), jax.typeof(gradient))
    totals, _ = lax.scan(add_row, [zeros] * math.prod(shape[1:]), (gradients, jnp.asarray(met)))
    return jnp.stack([total.sum(-1) for total in totals], -1).reshape(shape)


def _over_two_axes(stride: Sequence[int], dilation: Sequence[int], x: Array, kernel: Array) -> Array:
    """Convolves over two axes, with the elements that the kernel meets along the third, its shortest, as channels."""
    axis = min(range(2, 5), key=lambda axis: kernel.shape[axis])
    length = _result_lengths(x, kernel, stride, dilation)[axis - 2]
    s, d = stride[axis - 2], dilation[axis - 2]
    others = [i for i in range(3) if i != axis - 2]
    stride, dilation = [stride[i] for i in others], [dilation[i] for i in others]
    x, kernel = jnp.moveaxis(x, axis, 1), jnp.moveaxis(kernel, axis, 1)
    met = jnp.concatenate([_shifted(x, 1, i * d, length, s) for i in range(kernel.shape[1])], 2)
    # The barrier prevents XLA from concatenating again for each use.
    met = lax.optimization_barrier(lax.collapse(met, 0, 2))
    y = _unpadded(stride, dilation, 1, met, lax.collapse(kernel, 1, 3))
    return jnp.moveaxis(y.reshape(len(x), length, *y.shape[1:]), 1, axis)


def _pointwise(stride: Sequence[int], x: Array, kernel: Array) -> Array:
    """Convolves with a kernel of one element: a matrix product for each position."""
    x = x[(..., *(slice(None, None, s) for s in stride))]
    matrix, columns = kernel.reshape(kernel.shape[:2]), lax.collapse(x, 2)
    if matrix.size > columns.shape[2] * sum(matrix.shape):
        y = jnp.moveaxis(jnp.tensordot(matrix, columns, (1, 1)), 0, 1)
    else:  # Copies of the matrix cost less than to transpose the result.
        y = jnp.broadcast_to(matrix, (len(x), *matrix.shape)) @ columns
    return y.reshape(*y.shape[:2], *x.shape[2:])


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
    """Computes a transposed convolution. Its gradients are those of the plain convolution that it transposes.

    With groups the weight's gradient is faster by remainders.
    """
    stride, padding, dilation, output_padding, groups = options
    pads = [(p, p - o) for p, o in zip(padding, output_padding, strict=True)]
    plain = partial(_plain_on_cpu, stride, pads, dilation, groups)

    def gradient_of_input(x: Array, weight: Array, gradient: Array) -> Array:
        return plain(gradient, weight)

    def gradient_of_weight(x: Array, weight: Array, gradient: Array) -> Array:
        if groups > 1:
            return jax.vjp(partial(_by_remainders, options, x), weight)[1](gradient)[0]
        return jax.vjp(partial(plain, gradient), weight)[1](x)[0]

    return multilinear(partial(_by_remainders, options), (gradient_of_input, gradient_of_weight), x, weight)


def _by_remainders(options: _Options, x: Array, weight: Array) -> Array:
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
