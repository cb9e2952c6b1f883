"""Fake quantization: rounding to the levels of an integer type, with torch's straight-through derivative."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from jaxfn._torch.operations.table import composite


def _quantize(x: Array, scale: Array, zero_point: Array, low: int, high: int) -> tuple[Array, Array]:
    """Returns the nearest level, and whether it is in range. The scale's reciprocal has single precision, as in
    torch.
    """
    scale = jnp.asarray(scale, np.float32)
    level = jnp.round(x * (1 / scale).astype(x.dtype)) + zero_point
    mask = (level >= low) & (level <= high)
    rounded = ((jnp.clip(level, low, high) - zero_point) * scale).astype(x.dtype)
    return stop_gradient(rounded) + jnp.where(mask, x - stop_gradient(x), 0), mask


@composite("aten.fake_quantize_per_tensor_affine_cachemask")
def per_tensor(x: Array, scale: float, zero_point: int, low: int, high: int) -> tuple[Array, Array]:
    return _quantize(x, jnp.asarray(scale), jnp.asarray(zero_point), low, high)


@composite("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_by_arrays(
    x: Array, scale: Array, zero_point: Array, enabled: Array, low: int, high: int
) -> tuple[Array, Array]:
    rounded, mask = _quantize(x, scale.reshape(()), zero_point.reshape(()), low, high)
    is_on = enabled.reshape(()) != 0
    return jnp.where(is_on, rounded, x), mask | ~is_on


@composite("aten.fake_quantize_per_channel_affine_cachemask")
def per_channel(x: Array, scale: Array, zero_point: Array, axis: int, low: int, high: int) -> tuple[Array, Array]:
    shape = [1] * x.ndim
    shape[axis] = -1
    return _quantize(x, scale.reshape(shape), zero_point.reshape(shape), low, high)
