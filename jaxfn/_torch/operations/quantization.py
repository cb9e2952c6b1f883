"""Fake quantization: rounding to the levels of an integer type, with torch's straight-through derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from jaxfn._torch.operations.table import operation
from jaxfn._torch.values.errors import TranslationError


def _quantized(x: Array, scale: Array, zero_point: Array, low: int, high: int) -> tuple[Array, Array]:
    """The nearest level, and where there is one; torch has the scale and its reciprocal in single precision."""
    scale = jnp.asarray(scale, np.float32)
    level = jnp.round(x * (1 / scale).astype(x.dtype)) + zero_point
    mask = (level >= low) & (level <= high)
    rounded = ((jnp.clip(level, low, high) - zero_point) * scale).astype(x.dtype)
    return stop_gradient(rounded) + jnp.where(mask, x - stop_gradient(x), 0), mask


@operation("aten.fake_quantize_per_tensor_affine_cachemask")
def per_tensor(x: Array, scale: float, zero_point: int, low: int, high: int) -> tuple[Array, Array]:
    return _quantized(x, jnp.asarray(scale), jnp.asarray(zero_point), low, high)


@operation("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_by_arrays(
    x: Array, scale: Array, zero_point: Array, enabled: Array, low: int, high: int
) -> tuple[Array, Array]:
    rounded, mask = _quantized(x, scale.reshape(()), zero_point.reshape(()), low, high)
    is_on = enabled.reshape(()) != 0
    return jnp.where(is_on, rounded, x), mask | ~is_on


@operation("aten.fake_quantize_per_channel_affine_cachemask")
def per_channel(x: Array, scale: Array, zero_point: Array, axis: int, low: int, high: int) -> tuple[Array, Array]:
    shape = [1] * x.ndim
    shape[axis] = -1
    return _quantized(x, scale.reshape(shape), zero_point.reshape(shape), low, high)


@operation("aten._fused_moving_avg_obs_fq_helper_functional")
def observed(
    x: Array,
    observes: Array,
    quantizes: Array,
    low: Array,
    high: Array,
    scale: Array,
    zero_point: Array,
    weight: float,
    least: int,
    most: int,
    axis: int,
    per_row: bool = False,
    symmetric: bool = False,
) -> tuple[Array, ...]:
    """Fake quantization by moving averages of the extremes; then where it has a derivative, and all that has moved."""
    if not low.size:
        raise TranslationError(
            "fused_moving_avg_obs_fake_quant: an observer of each channel has buffers of size 0, which torch resizes "
            "in the first call, and JAX's shapes are static. Call the module once in torch before"
        )
    over = tuple(i for i in range(x.ndim) if not per_row or i != axis)
    extremes = jnp.min(stop_gradient(x), over), jnp.max(stop_gradient(x), over)
    is_observed, is_on = observes.reshape(()) != 0, quantizes.reshape(()) != 0
    low, high = (
        jnp.where(is_observed, _moved(average, value.reshape(average.shape), weight), average)
        for average, value in zip((low, high), extremes, strict=True)
    )
    scale, zero_point = (
        jnp.where(is_on, level.reshape(before.shape).astype(before.dtype), before)
        for level, before in zip(_levels(low, high, least, most, symmetric), (scale, zero_point), strict=True)
    )
    if per_row:
        rounded, mask = per_channel(x, scale, zero_point, axis, least, most)
    else:
        rounded, mask = _quantized(x, scale.reshape(()), zero_point.reshape(()), least, most)
    return jnp.where(is_on, rounded, x), mask | ~is_on, low, high, scale, zero_point


def _moved(average: Array, value: Array, weight: float) -> Array:
    """A moving average, which begins with the first value."""
    return jnp.where(jnp.isinf(average), value, average + jnp.asarray(weight, average.dtype) * (value - average))


# A smaller scale would be subnormal in half precision; torch has this number in single precision.
_SMALLEST_SCALE = np.float32(6.1e-5)


def _levels(low: Array, high: Array, least: int, most: int, symmetric: bool) -> tuple[Array, Array]:
    """Scale and zero point of the levels from `least` to `most`, which are to cover 0 and what is between two numbers.

    In double precision, as torch's, where JAX has it.
    """
    double = jax.dtypes.canonicalize_dtype(np.float64)
    is_symmetric = (low < 0) & (high > 0) & symmetric
    below, above = -((most - least) // 2 + 1), (most - least) // 2
    widest = jnp.maximum(jnp.abs(low / below), jnp.abs(high / above)).astype(double)
    low = jnp.minimum(jnp.where(is_symmetric, (widest * below).astype(low.dtype), low), 0)
    high = jnp.maximum(jnp.where(is_symmetric, (widest * above).astype(high.dtype), high), 0)
    scale = (high.astype(double) - low) / (most - least)
    single = scale.astype(np.float32)
    scale = jnp.where((single == 0) | jnp.isinf(1 / single), 0.1, scale)
    # The interval grows where the scale has to.
    single = scale.astype(np.float32)
    is_small = scale < _SMALLEST_SCALE
    wider = _SMALLEST_SCALE / single
    widest = _SMALLEST_SCALE * np.float32(most - least)
    low, high = (
        jnp.where(is_small, jnp.where(other == 0, sign * widest, end * wider), end)
        for sign, end, other in ((-1, low, high), (1, high, low))
    )
    scale = jnp.where(is_small, _SMALLEST_SCALE, scale)
    # Either end gives a zero point; torch takes the one whose terms are smaller.
    from_low, from_high = least - low / scale, most - high / scale
    is_lower = abs(least) - jnp.abs(low / scale) < abs(most) - jnp.abs(high / scale)
    zero_point = jnp.where(is_lower, from_low, from_high)
    zero_point = jnp.where((low < 0) & (high > 0) & symmetric, (least + most) / 2, zero_point)
    return scale, jnp.round(jnp.clip(zero_point, least, most))
