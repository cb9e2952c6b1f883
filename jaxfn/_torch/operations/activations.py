"""Activation functions and losses that core ATen does not decompose, or not with all derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch import ties
from jaxfn._torch.operations.table import composite, mark_unsupported, register_all

register_all({"aten.silu": jax.nn.silu})
register_all({"aten.hardtanh": ties.clamp_to_bounds, "aten.softplus": ties.softplus}, is_composite=True)


@composite("aten.relu")
@jax.custom_jvp
def relu(x: Array) -> Array:
    return jnp.maximum(x, 0)


@relu.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Computes `jax.nn.relu`, with torch's derivative at NaN, which it passes on."""
    (x,), (tangent,) = primals, tangents
    return relu(x), lax.select(x <= 0, lax.full_like(tangent, 0), tangent)


@composite("aten.huber_loss")
def huber_loss(x: Array, target: Array, reduction: int = 1, delta: float = 1.0) -> Array:
    """Squares differences below `delta`: torch's decomposition squares their size, without a second derivative at 0."""
    difference = x - target
    return _reduced(ties.huber(difference, delta), difference, reduction)


def _reduced(losses: Array, difference: Array, reduction: int) -> Array:
    losses = losses.astype(difference.dtype)
    return losses if not reduction else losses.mean() if reduction == 1 else losses.sum()


@composite("aten.smooth_l1_loss")
def smooth_l1_loss(x: Array, target: Array, reduction: int = 1, beta: float = 1.0) -> Array:
    if not beta:  # the absolute difference, whose derivative at 0 is -1 in torch
        difference = x - target
        return _reduced(jnp.where(difference <= 0, -difference, difference), difference, reduction)
    return huber_loss(x, target, reduction, beta) / beta


@composite("aten._softmax")
def softmax(x: Array, dim: int, half_to_float: Any = False) -> Array:
    return jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)


@composite("aten._safe_softmax")
def safe_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    """Returns 0 where all elements are minus infinity."""
    x = x if dtype is None else x.astype(dtype)
    empty = jnp.all(x == -np.inf, dim if x.ndim else None, keepdims=True)
    return jnp.where(empty, 0, softmax(jnp.where(empty, 0, x), dim))


@composite("aten._log_softmax")
def log_softmax(x: Array, dim: int, half_to_float: Any = False) -> Array:
    return jax.nn.log_softmax(x, dim) if x.ndim else jnp.zeros_like(x)


@composite("aten._softmax_backward_data")
def softmax_backward(gradient: Array, output: Array, dim: int, dtype: Any) -> Array:
    weighted = gradient * output
    return weighted - output * jnp.sum(weighted, dim if output.ndim else None, keepdims=True)


@composite("aten._log_softmax_backward_data")
def log_softmax_backward(gradient: Array, output: Array, dim: int, dtype: Any) -> Array:
    return gradient - jnp.exp(output) * jnp.sum(gradient, dim if output.ndim else None, keepdims=True)


@composite("aten.gelu")
def gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@composite("aten.elu")
def elu(x: Array, alpha: float, scale: float, input_scale: float) -> Array:
    return scale * ties.elu(x, alpha, input_scale)


@composite("aten.celu")
def celu(x: Array, alpha: float = 1.0) -> Array:
    """Computes `elu` with a continuous derivative. That of torch's decomposition is NaN where `exp` overflows."""
    return ties.elu(x, alpha, 1 / alpha)


@composite("aten.log_sigmoid_forward")
def log_sigmoid(x: Array) -> tuple[Array, Array]:
    """Returns also what torch's backward would use. torch's decomposition has no second derivative at 0."""
    return jax.nn.log_sigmoid(x), jnp.exp(-jnp.abs(x))


@composite("aten.leaky_relu")
def leaky_relu(x: Array, negative_slope: float) -> Array:
    return jnp.where(x > 0, x, x * negative_slope)


@composite("aten.hardsigmoid")
def hardsigmoid(x: Array) -> Array:
    """Computes a piecewise-linear sigmoid. torch's derivative at both ends is 0."""
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5))


@composite("aten.hardswish")
def hardswish(x: Array) -> Array:
    """Computes `x * hardsigmoid(x)`. torch's derivative is 0 at the lower end and 1 at the upper one."""
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


mark_unsupported("rrelu has no translation", "aten.rrelu_with_noise_backward")
mark_unsupported(
    "torch's decomposition of it counts labels after the first -1",
    "aten.multilabel_margin_loss_forward",
    "aten.multilabel_margin_loss_backward",
)


@composite("aten.threshold")
def threshold(x: Array, limit: float, value: float) -> Array:
    return jnp.where(x <= limit, jnp.asarray(value, x.dtype), x)


@composite("aten.hardshrink")
def hardshrink(x: Array, limit: float) -> Array:
    return jnp.where((x >= -limit) & (x <= limit), 0, x)


@composite("aten.hardshrink_backward", "aten.softshrink_backward")
def shrink_backward(gradient: Array, x: Array, limit: float) -> Array:
    return jnp.where((x >= -limit) & (x <= limit), 0, gradient)


@composite("aten.softshrink")
def softshrink(x: Array, limit: float) -> Array:
    return jnp.where(x > limit, x - limit, jnp.where(x < -limit, x + limit, x * 0))


@composite("aten.logit")
def logit(x: Array, eps: float | None) -> Array:
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))
