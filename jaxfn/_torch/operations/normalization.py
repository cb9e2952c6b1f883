"""Normalization over layers, groups and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.table import operation

Optional = Array | None


def _moments(x: Array, over: Sequence[int], eps: float) -> tuple[Array, Array]:
    """Mean and one over the standard deviation, with the reduced axes kept."""
    mean = jnp.mean(x, over, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), over, keepdims=True)
    return mean, lax.rsqrt(variance + jnp.asarray(eps, x.dtype))


@operation("aten.native_layer_norm")
def layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[Array, Array, Array]:
    mean, rstd = _moments(x, range(x.ndim - len(normalized_shape), x.ndim), eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


@operation("aten.native_layer_norm_backward")
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


@operation("aten._weight_norm_interface")
def weight_norm(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    """`v` with the norms `g` over all axes but one, and the norms that it had."""
    over = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    norms = jnp.sqrt(jnp.sum(jnp.square(v), over, keepdims=True))
    return v * (g / norms), norms


@operation("aten._weight_norm_interface_backward")
def weight_norm_backward(gradient: Array, v: Array, g: Array, norms: Array, dim: int) -> tuple[Array, Array]:
    def forward(v: Array, g: Array) -> Array:
        return weight_norm(v, g, dim)[0]

    pull = jax.vjp(forward, v, g)[1]
    return pull(gradient.astype(jnp.result_type(v, g, norms)))


@operation("aten.native_group_norm")
def group_norm(
    x: Array, weight: Optional, bias: Optional, n: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Array, Array, Array]:
    grouped = x.reshape(n, groups, -1)
    mean, rstd = _moments(grouped, (2,), eps)
    y = _per_channel(((grouped - mean) * rstd).reshape(x.shape), weight, bias)
    return y, mean.reshape(n, groups), rstd.reshape(n, groups)


@operation("aten.native_group_norm_backward")
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
    shape = (-1, *[1] * (x.ndim - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


@operation("aten._native_batch_norm_legit_functional")
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
    """Output, mean and rstd of the batch (empty when not training), and the new running statistics."""
    if not training:
        none = jnp.zeros(0, running_mean.dtype)
        y = _batch_normalized(x, weight, bias, running_mean, lax.rsqrt(running_var + eps))
        return y, none, none, running_mean, running_var
    over = (0, *range(2, x.ndim))
    count = math.prod(x.shape[axis] for axis in over)
    mean, rstd = (moment.reshape(-1) for moment in _moments(x, over, eps))
    unbiased = jnp.var(x, over) * (count / max(count - 1, 1))
    y = _batch_normalized(x, weight, bias, mean, rstd)
    new_mean = momentum * mean + (1 - momentum) * running_mean
    return y, mean, rstd, new_mean, momentum * unbiased + (1 - momentum) * running_var


@operation("aten._batch_norm_with_update_functional")
def batch_norm_with_update(
    x: Array, weight: Optional, bias: Optional, running_mean: Array, running_var: Array, momentum: float, eps: float
) -> tuple[Array, ...]:
    """Batch norm when training; fourth of the results is memory for a backend's use, of which there is none here."""
    y, mean, rstd, *running = batch_norm_functional(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, rstd, jnp.zeros(0, np.uint8), *running


def _batch_normalized(x: Array, weight: Optional, bias: Optional, mean: Array, rstd: Array) -> Array:
    shape = (-1, *[1] * (x.ndim - 2))
    normal = (x - mean.reshape(shape)) * rstd.reshape(shape)
    return _per_channel(normal, weight, bias)


@operation("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Array, weight: Optional, bias: Optional, training: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    mean, rstd = (m.reshape(-1) for m in _moments(x, (0, *range(2, x.ndim)), eps))
    return _batch_normalized(x, weight, bias, mean, rstd), mean, rstd


@operation("aten._native_batch_norm_legit_no_training")
def batch_norm_no_training(
    x: Array, weight: Optional, bias: Optional, running_mean: Array, running_var: Array, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    y, mean, rstd, *_ = batch_norm_functional(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return y, mean, rstd
