"""Functions with torch's values and derivatives at ties, bounds and zeros, where JAX has others.

`operations/` registers them, and modules that `port` writes copy their text. So each uses only JAX, NumPy and others of
them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfn._torch._compat import CLAMP_SPLITS_TIES


def absolute(x: jax.Array) -> jax.Array:
    """Returns |x|. All derivatives are 0 at 0, and the first one at NaN."""
    if jnp.iscomplexobj(x):
        return jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    return x * lax.stop_gradient(jnp.where(jnp.isnan(x), 0, jnp.sign(x)))


def power(x: Any, exponent: Any) -> jax.Array:
    """Returns x ** exponent, with the derivative of an integer power where the exponent is one."""
    is_integer = isinstance(exponent, (int, float)) and float(exponent).is_integer() and abs(exponent) <= 64
    return jnp.power(x, int(exponent) if is_integer else exponent)


def floor_divide(x: Any, y: Any) -> jax.Array:
    """Returns the floor of x / y, infinite for a division of floats by 0, with derivative 0."""
    x, y = lax.stop_gradient(x), lax.stop_gradient(y)
    is_floating = jnp.issubdtype(jnp.result_type(x, y), jnp.floating)
    return jnp.where(y == 0, x / y, jnp.floor_divide(x, y)) if is_floating else jnp.floor_divide(x, y)


def clamp_to_input(x: jax.Array, low: Any = None, high: Any = None) -> jax.Array:
    """Clamps. At a bound the derivative is that of x."""
    x = x if low is None else jnp.where((x < low) | jnp.isnan(low), low, x)
    return x if high is None else jnp.where((x > high) | jnp.isnan(high), high, x)


def clamp_to_bounds(x: jax.Array, low: Any = None, high: Any = None) -> jax.Array:
    """Clamps. At a bound the derivative by x is 0."""
    x = x if low is None else jnp.where((x <= low) | jnp.isnan(low), low, x)
    return x if high is None else jnp.where((x >= high) | jnp.isnan(high), high, x)


# The clamp with numbers as bounds; torch 2.15 changed its derivative.
CLAMP = clamp_to_bounds if CLAMP_SPLITS_TIES else clamp_to_input


def elu(x: jax.Array, alpha: float = 1.0, rate: float = 1.0) -> jax.Array:
    """Returns x, or alpha * (exp(rate * x) - 1) where x is negative. At 0 it is a line with the slope of that side."""
    is_negative = x < 0
    line = jnp.where(x == 0, alpha * rate * x, x)
    return jnp.where(is_negative, alpha * jnp.expm1(rate * jnp.where(is_negative, x, 0)), line)


def softplus(x: jax.Array, beta: float = 1.0, threshold: float = 20.0) -> jax.Array:
    """Returns log(1 + exp(beta * x)) / beta, and x above the threshold."""
    is_linear = x * beta > threshold
    return jnp.where(is_linear, x, jnp.log1p(jnp.exp(jnp.where(is_linear, 0, x) * beta)) / beta)


def huber(x: jax.Array, delta: float = 1.0) -> jax.Array:
    """Returns x ** 2 / 2 for |x| below delta, and a line above."""
    is_inside = jnp.abs(x) < delta
    return jnp.where(is_inside, jnp.square(jnp.where(is_inside, x, 0)) / 2, delta * (jnp.abs(x) - delta / 2))


def root(x: jax.Array) -> jax.Array:
    """Returns the square root. Its derivative at 0 is 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def vector_norm(x: jax.Array, ord: float = 2, axis: Any = None, keepdims: bool = False) -> jax.Array:
    """Returns the norm of vectors along some axes. Its derivative at 0 is 0."""
    size = absolute(x)
    if ord in (np.inf, -np.inf):
        return (jnp.max if ord > 0 else jnp.min)(size, axis, keepdims=keepdims)
    if ord == 0:
        return jnp.sum(x != 0, axis, keepdims=keepdims).astype(size.dtype)
    if ord == 1:
        return jnp.sum(size, axis, keepdims=keepdims)
    total = jnp.sum(jnp.real(x * jnp.conj(x)) if ord == 2 else size**ord, axis, keepdims=keepdims)
    return jnp.where(total == 0, 0 if ord > 0 else np.inf, jnp.where(total == 0, 1, total) ** (1 / ord))


def with_index(x: jax.Array, index: jax.Array, axis: int, keepdims: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the elements that an index selects along an axis, and the index. The derivative goes to them."""
    values = jnp.take_along_axis(x, index, axis)
    return (values, index) if keepdims else (values.squeeze(axis), index.squeeze(axis))


def hermitian(x: jax.Array) -> jax.Array:
    """Returns the Hermitian matrix that has the lower triangle of x. Derivatives are spread over both."""
    half, symmetric = jnp.tril(x, -1), (x + x.mT.conj()) / 2
    diagonal = jnp.diagonal(x, axis1=-2, axis2=-1).real[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
    return symmetric + lax.stop_gradient(half + half.mT.conj() + diagonal - symmetric)


def dropout(key: jax.Array, x: jax.Array, p: float) -> tuple[jax.Array, jax.Array]:
    """Sets elements to 0 with probability p, and divides the other ones by 1 - p. Returns also which these are."""
    mask = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(mask, x / (1 - p) if p < 1 else 0, 0), mask
