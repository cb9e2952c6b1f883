"""Convolutions of one to three spatial axes, plain and transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfn._torch.operations.table import operation


@operation("aten.convolution", accepts_half=True)
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
        # The kernel's mirror image over the input with stride - 1 zeros between its elements.
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
        kernel = _mirror(weight, groups)
        window, spread = [1] * spatial, stride
    else:
        pads = [(p, p) for p in padding]
        kernel, window, spread = weight, stride, [1] * spatial
    y = lax.conv_general_dilated(x, kernel, window, pads, spread, dilation, feature_group_count=groups)
    return y if bias is None else y + bias.reshape(-1, *[1] * spatial)


def _mirror(weight: Array, groups: int) -> Array:
    """Converts the weight of a transposed convolution (in, out / groups, ...) to a plain one (out, in / groups,
    ...).
    """
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    kernel = jnp.swapaxes(grouped, 1, 2).reshape(-1, grouped.shape[1], *weight.shape[2:])
    return jnp.flip(kernel, range(2, kernel.ndim))


@operation("aten.convolution_backward", accepts_half=True)
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
