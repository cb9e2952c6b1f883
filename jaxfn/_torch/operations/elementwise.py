"""Arithmetic, rounding and elementary functions, element by element."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch import ties
from jaxfn._torch._compat import CLAMP_SPLITS_TIES
from jaxfn._torch.operations.primitives import add as add_arrays
from jaxfn._torch.operations.primitives import multiply, subtract, true_divide
from jaxfn._torch.operations.promotion import (
    as_dtype,
    compute_dtype,
    is_inexact,
    is_number,
    promote,
    promote_to_inexact,
    result_type,
    to_inexact,
)
from jaxfn._torch.operations.table import operation, register_all

register_all(
    {
        "aten.abs": ties.absolute,
        "aten.acos": jnp.arccos,
        "aten.acosh": jnp.arccosh,
        "aten.asin": jnp.arcsin,
        "aten.asinh": jnp.arcsinh,
        "aten.atan": jnp.arctan,
        "aten.atanh": jnp.arctanh,
        "aten.ceil": jnp.ceil,
        "aten.cos": jnp.cos,
        "aten.cosh": jnp.cosh,
        "aten.exp": jnp.exp,
        "aten.exp2": jnp.exp2,
        "aten.expm1": jnp.expm1,
        "aten.floor": jnp.floor,
        "aten.log": jnp.log,
        "aten.log10": jnp.log10,
        "aten.log1p": jnp.log1p,
        "aten.log2": jnp.log2,
        "aten.neg": jnp.negative,
        "aten.sin": jnp.sin,
        "aten.sinh": jnp.sinh,
        "aten.sqrt": jnp.sqrt,
        "aten.tan": jnp.tan,
        "aten.tanh": jnp.tanh,
        "aten.trunc": jnp.trunc,
        "aten.mul": promote(multiply),
        "aten.deg2rad": promote_to_inexact(jnp.deg2rad),
        "aten.rad2deg": promote_to_inexact(jnp.rad2deg),
        "aten.reciprocal": promote_to_inexact(jnp.reciprocal),
        "aten.rsqrt": promote_to_inexact(lax.rsqrt),
        "aten.sigmoid": promote_to_inexact(lax.logistic),
        "aten.frexp": jnp.frexp,
        "aten.signbit": jnp.signbit,
    }
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_of_sum(base: float, x: Array, y: Array) -> Array:
    """Computes the logarithm of the sum of two powers of `base`, which is 2 or e. JAX's derivative is wrong at inf."""
    return jnp.logaddexp2(x, y) if base == 2 else jnp.logaddexp(x, y)


@log_of_sum.defjvp
def _log_of_sum_jvp(base: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    x, y = primals
    ahead = np.log(base).astype(x.dtype) * (y - x)
    return log_of_sum(base, x, y), tangents[0] * lax.logistic(-ahead) + tangents[1] * lax.logistic(ahead)


register_all(
    {
        "aten.atan2": promote_to_inexact(jnp.arctan2),
        "aten.copysign": promote_to_inexact(jnp.copysign),
        "aten.gcd": promote(jnp.gcd),
        "aten.hypot": promote_to_inexact(jnp.hypot),
        "aten.lcm": promote(jnp.lcm),
        "aten.maximum": promote(jnp.maximum),
        "aten.minimum": promote(jnp.minimum),
        "aten.remainder": promote(jnp.remainder),
        "aten.logaddexp": promote_to_inexact(functools.partial(log_of_sum, np.e)),
        "aten.logaddexp2": promote_to_inexact(functools.partial(log_of_sum, 2)),
        "aten.heaviside": promote(jnp.heaviside),
    },
    accepts_half=True,
)


@operation("aten.sign", "aten.sgn")
def sign(x: Array) -> Array:
    """Returns 0 for a real NaN."""
    if x.dtype == np.bool_:
        return x
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.sign(x)


@operation("aten.add", accepts_half=True)
def add(x: Any, y: Any, alpha: Any = 1) -> Array:
    return _sum(x, y) if not isinstance(alpha, Array) and alpha == 1 else _scaled_sum(x, y, alpha)


@operation("aten.sub", accepts_half=True)
def sub(x: Any, y: Any, alpha: Any = 1) -> Array:
    return _difference(x, y) if not isinstance(alpha, Array) and alpha == 1 else _scaled_sum(x, y, -alpha)


_sum, _difference = promote(add_arrays), promote(subtract)


@promote
def _scaled_sum(x: Array, y: Array, alpha: Array) -> Array:
    return x + alpha * y


@operation("aten.rsub", accepts_half=True)
def rsub(x: Any, y: Any, alpha: Any = 1) -> Array:
    return sub(y, x, alpha)


@operation("aten.div")
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Array:
    """Divides; `rounding_mode` is `None`, "trunc" (towards zero) or "floor"."""
    dtype = result_type(x, y)
    x, y = as_dtype(x, dtype), as_dtype(y, dtype)
    if rounding_mode is None:
        return true_divide(to_inexact(x), to_inexact(y))
    if rounding_mode == "floor":
        return ties.floor_divide(x, y)
    return lax.div(*jnp.broadcast_arrays(x, y)) if jnp.issubdtype(dtype, jnp.integer) else jnp.trunc(x / y)


@operation("aten.floor_divide")
def floor_divide(x: Any, y: Any) -> Array:
    return div(x, y, "floor")


@operation("aten.nextafter", accepts_half=True)
def nextafter(x: Array, y: Array) -> Array:
    """Computes the next number. JAX has no derivative of it; torch's is that of x where there is a step."""
    dtype = result_type(x, y)
    x, y = as_dtype(x, dtype), as_dtype(y, dtype)
    fixed = lax.stop_gradient(x)
    step = jnp.nextafter(fixed, lax.stop_gradient(y))
    return step + jnp.where(jnp.isfinite(x) & (x != y), x - fixed, 0)


@operation("aten.fmod", accepts_half=True)
@promote
def fmod(x: Array, y: Array) -> Array:
    return lax.rem(*jnp.broadcast_arrays(x, y))


@operation("aten.pow", accepts_half=True)
def power(x: Any, exponent: Any) -> Array:
    if isinstance(exponent, (int, float)):
        dtype = result_type(x, exponent)
        if jnp.issubdtype(dtype, jnp.floating):
            with np.errstate(over="ignore"):
                exponent = dtype.type(exponent).item()  # torch rounds it
        return ties.power(as_dtype(x, dtype).astype(compute_dtype(dtype)), exponent)
    return _power(x, exponent)


@promote
def _power(x: Array, exponent: Array) -> Array:
    if is_inexact(x):
        return jnp.power(x, exponent)
    # A negative power of an integer, truncated, is 0 unless the base is 1 or -1.
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, 1 - 2 * (exponent % 2), 0))
    return jnp.where(exponent < 0, inverse, jnp.power(x, jnp.maximum(exponent, 0)))


@operation("aten.fmax", accepts_half=True)
@promote
def fmax(x: Array, y: Array) -> Array:
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@operation("aten.fmin", accepts_half=True)
@promote
def fmin(x: Array, y: Array) -> Array:
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


# A bound that does not fit raises, as in torch.
_clamp = promote(ties.CLAMP, cast=jnp.asarray)


@operation("aten.clamp", "aten.clamp_min", accepts_half=True)
def clamp(x: Array, low: Any, high: Any = None) -> Array:
    """Clamps. The derivative at a bound is a convention, which torch changed in 2.15."""
    if CLAMP_SPLITS_TIES and not (is_number(low) and is_number(high)):
        return _clamp_to_halves(x, low, high)
    if not (is_number(low) or is_number(high)):
        # Where both bounds are equal, torch drops the derivative of the lower one.
        low = jnp.where(low == high, lax.stop_gradient(low), low)
    return _clamp(x, low, high)


@functools.partial(promote, cast=jnp.asarray)
def _clamp_to_halves(x: Array, low: Array | None, high: Array | None) -> Array:
    """Clamps. At a bound x and the bound have half of the derivative each; x has all of it if the bounds are equal."""
    if low is None:
        return x if high is None else jnp.minimum(x, high)
    if high is None:
        return jnp.maximum(x, low)
    return jnp.where(low == high, ties.clamp_to_input(x, low, high), jnp.minimum(jnp.maximum(x, low), high))


@operation("aten.clamp_max", accepts_half=True)
def clamp_max(x: Array, high: Any) -> Array:
    return clamp(x, None, high)


@operation("aten.frac")
def frac(x: Array) -> Array:
    return x - jnp.trunc(x)


@operation("aten.round")
def round_half_to_even(x: Array, decimals: int = 0) -> Array:
    if not is_inexact(x):
        return x
    if decimals >= 0:
        scale = jnp.asarray(10.0**decimals, x.dtype)
        return jnp.round(x * scale) / scale
    scale = jnp.asarray(10.0**-decimals, x.dtype)
    return jnp.round(x / scale) * scale


@operation("aten.ldexp")
def ldexp(x: Array, exponent: Array) -> Array:
    dtype = result_type(x, exponent, 1.0)
    return jnp.asarray(x, dtype) * jnp.power(jnp.asarray(2, dtype), exponent.astype(dtype))


@operation("aten.lerp")
def lerp(x: Array, end: Array, weight: Any) -> Array:
    weight = jnp.asarray(weight, x.dtype)
    difference = end - x
    # From the nearer end, so that both ends are exact.
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * difference, end - difference * (1 - weight))


@operation("aten.addcmul")
def addcmul(x: Array, first: Array, second: Array, value: Any = 1) -> Array:
    return add(x, jnp.multiply(first, second), value)


@operation("aten.addcdiv")
def addcdiv(x: Array, first: Array, second: Array, value: Any = 1) -> Array:
    return add(x, div(first, second), value)


@operation("aten.nan_to_num")
def nan_to_num(x: Array, nan: float | None, posinf: float | None, neginf: float | None) -> Array:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf) if is_inexact(x) else x
