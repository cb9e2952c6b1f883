"""Normalization over layers, groups and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.platforms import lower_by_platform
from jaxfn._torch.operations.table import composite

Optional = Array | None


class _Centered(NamedTuple):
    """An array minus its mean, with its mean and variance; the reduced axes have length 1.

    The centered array is used for the variance and for the output. Computed twice, it would be summed twice in reverse
    mode.
    """

    values: Array
    mean: Array
    variance: Array

    def rstd(self, eps: float) -> Array:
        """Returns one over the standard deviation."""
        return lax.rsqrt(self.variance + jnp.asarray(eps, self.values.dtype))


def _center(x: Array, over: Sequence[int]) -> _Centered:
    """Centers `x` over its last axes."""
    mean = _mean(x, over)
    values = x - mean
    return _Centered(values, mean, _mean(jnp.square(values), over))


def _mean(x: Array, over: Sequence[int]) -> Array:
    def on_cpu(x: Array) -> Array:
        # A product uses vector instructions, a sum over the last axis does not.
        rows = x.reshape(*x.shape[: x.ndim - len(over)], -1)
        total = jnp.matmul(rows, jnp.ones(rows.shape[-1], x.dtype), precision=lax.Precision.HIGHEST)
        mean = total / rows.shape[-1]
        return mean.reshape(*rows.shape[:-1], *[1] * len(over))

    return lower_by_platform(on_cpu, partial(jnp.mean, axis=tuple(over), keepdims=True), x)


@composite("aten.native_layer_norm")
def layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[Array, Array, Array]:
    centered = _center(x, range(x.ndim - len(normalized_shape), x.ndim))
    rstd = centered.rstd(eps)
    y = centered.values * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, centered.mean, rstd


@composite("aten.native_layer_norm_backward")
def layer_norm_backward(
    gradient: Array,
    x: Array,
    normalized_shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Optional,
    bias: Optional,
    output_mask: Sequence[bool],
) -> tuple[Optional, Optional, Optional]:
    outer = tuple(range(x.ndim - len(normalized_shape)))
    inner = tuple(range(len(outer), x.ndim))
    normal = (x - mean) * rstd
    scaled = gradient if weight is None else gradient * weight
    centered = scaled - jnp.mean(scaled, inner, keepdims=True)
    grad_x = rstd * (centered - normal * jnp.mean(scaled * normal, inner, keepdims=True))
    grad_weight = jnp.sum(gradient * normal, outer) if weight is not None else None
    grad_bias = jnp.sum(gradient, outer) if bias is not None else None
    first, second, third = output_mask
    return grad_x if first else None, grad_weight if second else None, grad_bias if third else None


@composite("aten._weight_norm_interface")
def weight_norm(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    """Returns `v` with the norms `g` over all axes but one, and its own norms."""
    over = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    norms = jnp.sqrt(jnp.sum(jnp.square(v), over, keepdims=True))
    return v * (g / norms), norms


@composite("aten._weight_norm_interface_backward")
def weight_norm_backward(gradient: Array, v: Array, g: Array, norms: Array, dim: int) -> tuple[Array, Array]:
    def forward(v: Array, g: Array) -> Array:
        return weight_norm(v, g, dim)[0]

    pull = jax.vjp(forward, v, g)[1]
    return pull(gradient.astype(jnp.result_type(v, g, norms)))


@composite("aten.native_group_norm")
def group_norm(
    x: Array, weight: Optional, bias: Optional, n: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Array, Array, Array]:
    grouped = x.reshape(n, groups, -1)
    centered = _center(grouped, (2,))
    rstd = centered.rstd(eps)
    y = _per_channel((centered.values * rstd).reshape(x.shape), weight, bias)
    return y, centered.mean.reshape(n, groups), rstd.reshape(n, groups)


@composite("aten.native_group_norm_backward")
def group_norm_backward(
    gradient: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Optional,
    n: int,
    channels: int,
    size: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Optional, Optional, Optional]:
    mean, rstd = mean.reshape(n, groups, 1), rstd.reshape(n, groups, 1)
    normal = (x.reshape(n, groups, -1) - mean) * rstd
    scaled = _per_channel(gradient, weight, None).reshape(n, groups, -1)
    centered = scaled - jnp.mean(scaled, 2, keepdims=True)
    grad_x = rstd * (centered - normal * jnp.mean(scaled * normal, 2, keepdims=True))
    over = (0, *range(2, x.ndim))
    first, second, third = output_mask
    return (
        grad_x.reshape(x.shape) if first else None,
        jnp.sum(gradient * normal.reshape(x.shape), over) if second else None,
        jnp.sum(gradient, over) if third else None,
    )


def _per_channel(x: Array, weight: Optional, bias: Optional) -> Array:
    x = x if weight is None else x * _along_channels(weight, x.ndim)
    return x if bias is None else x + _along_channels(bias, x.ndim)


def _along_channels(x: Array, ndim: int) -> Array:
    return x.reshape(1, -1, *[1] * (ndim - 2))


@composite("aten._native_batch_norm_legit_functional")
def batch_norm_functional(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, ...]:
    """Returns the output, mean and rstd of the batch (empty if not training), and the new running statistics."""
    if not training:
        none = jnp.zeros(0, running_mean.dtype)
        rstd = _along_channels(lax.rsqrt(running_var + eps), x.ndim)
        centered = x - _along_channels(running_mean, x.ndim)
        y = _per_channel(centered * _batch_factor(rstd, weight, x.ndim), None, bias)
        return y, none, none, running_mean, running_var
    over = (0, *range(2, x.ndim))
    count = math.prod(x.shape[axis] for axis in over)
    y, mean, rstd, variance = _normalize_by_batch(x, weight, bias, eps)
    unbiased = variance * (count / max(count - 1, 1))
    new_mean = momentum * mean + (1 - momentum) * running_mean
    new_var = momentum * unbiased + (1 - momentum) * running_var
    return y, mean, rstd, lax.stop_gradient(new_mean), lax.stop_gradient(new_var)


@composite("aten._batch_norm_with_update_functional")
def batch_norm_with_update(
    x: Array, weight: Optional, bias: Optional, running_mean: Array, running_var: Array, momentum: float, eps: float
) -> tuple[Array, ...]:
    """Computes batch norm in training. The fourth result is a backend's scratch memory, empty here."""
    y, mean, rstd, *running = batch_norm_functional(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, rstd, jnp.zeros(0, np.uint8), *running


def _normalize_by_batch(x: Array, weight: Optional, bias: Optional, eps: float) -> tuple[Array, Array, Array, Array]:
    """Returns the output, mean, rstd and variance of the batch.

    Note: the subtracted mean is a constant. Its derivative is in `offset`, the mean minus itself, which is zero; each
    formula holds for any subtracted value, and so at every order of derivative. In reverse mode the mean's gradient
    then uses the sums that `weight` and `bias` need. Through `x - mean` it would need one more sum over a whole array.
    """
    over = (0, *range(2, x.ndim))
    mean = jnp.mean(x, over, keepdims=True)
    constant = lax.stop_gradient(mean)
    centered, offset = x - constant, mean - constant
    variance = jnp.mean(jnp.square(centered), over, keepdims=True) - jnp.square(offset)
    rstd = lax.rsqrt(variance + jnp.asarray(eps, x.dtype))
    factor = _batch_factor(rstd, weight, x.ndim)
    shift = -offset * factor if bias is None else _along_channels(bias, x.ndim) - offset * factor
    return centered * factor + shift, mean.reshape(-1), rstd.reshape(-1), variance.reshape(-1)


def _batch_factor(rstd: Array, weight: Optional, ndim: int) -> Array:
    """Returns the product of both factors, one number for each channel, so that their derivatives share a sum."""
    return rstd if weight is None else rstd * _along_channels(weight, ndim)


@composite("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Array, weight: Optional, bias: Optional, training: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    y, mean, rstd, _ = _normalize_by_batch(x, weight, bias, eps)
    return y, mean, rstd


@composite("aten._native_batch_norm_legit_no_training")
def batch_norm_no_training(
    x: Array, weight: Optional, bias: Optional, running_mean: Array, running_var: Array, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    y, mean, rstd, *_ = batch_norm_functional(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return y, mean, rstd
