"""Random numbers, drawn by JAX. The distributions are torch's, the numbers are not.

Every function takes a separate key first, which `TranslatedGraph` derives from the call's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfn._torch import ties
from jaxfn._torch.operations.table import operation


def _uniform(key: Array, shape: Sequence[int], dtype: Any, low: float = 0.0, high: float = 1.0) -> Array:
    """Draws uniform numbers; for complex dtypes, both parts."""
    dtype = np.float32 if dtype is None else dtype
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.uniform(key, tuple(shape), dtype, low, high)
    real, imag = jax.random.uniform(key, (2, *shape), jnp.finfo(dtype).dtype, low, high)
    return jax.lax.complex(real, imag)


def _normal(key: Array, shape: Sequence[int], dtype: Any) -> Array:
    """Draws normal numbers; for complex dtypes, both parts share the variance."""
    return jax.random.normal(key, tuple(shape), np.float32 if dtype is None else dtype)


@operation("aten.rand", draws=True)
def rand(key: Array, size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return _uniform(key, size, dtype)


@operation("aten.randn", draws=True)
def randn(key: Array, size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return _normal(key, size, dtype)


@operation("aten.rand_like", draws=True)
def rand_like(key: Array, x: Array, dtype: Any = None) -> Array:
    return _uniform(key, x.shape, dtype or x.dtype)


@operation("aten.randn_like", draws=True)
def randn_like(key: Array, x: Array, dtype: Any = None) -> Array:
    return _normal(key, x.shape, dtype or x.dtype)


@operation("aten.randint", draws=True)
def randint(key: Array, *arguments: Any, dtype: Any = None) -> Array:
    """Draws integers below a number, or from one number up to another. The last argument is the size."""
    *bounds, size = arguments
    low, high = (0, *bounds)[-2:]
    is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    return jax.random.randint(
        key, tuple(size), low, high, dtype if is_integer else jax.dtypes.canonicalize_dtype(np.int64)
    )


@operation("aten.randint_like", draws=True)
def randint_like(key: Array, x: Array, *bounds: Any, dtype: Any = None) -> Array:
    return randint(key, *bounds, x.shape, dtype=dtype or x.dtype)


@operation("aten.randperm", draws=True)
def randperm(key: Array, n: int, dtype: Any = None) -> Array:
    return jax.random.permutation(key, n)


@operation("aten.bernoulli", draws=True)
def bernoulli(key: Array, x: Array, p: Any = None) -> Array:
    """Draws with the probabilities `x`, or with `p` in the shape of `x`."""
    return jax.random.bernoulli(key, x if p is None else p, x.shape).astype(x.dtype)


@operation("aten.native_dropout", draws=True)
def native_dropout(key: Array, x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    return (x, jnp.ones(x.shape, bool)) if train is False else ties.dropout(key, x, p)


@operation("aten.uniform", draws=True)
def uniform(key: Array, x: Array, low: float = 0.0, high: float = 1.0) -> Array:
    return _uniform(key, x.shape, x.dtype, low, high)


@operation("aten.normal_functional", draws=True)
def normal_functional(key: Array, x: Array, mean: float = 0.0, std: float = 1.0) -> Array:
    return mean + std * _normal(key, x.shape, x.dtype)


@operation("aten.normal.float_float", draws=True)
def normal_float_float(key: Array, mean: float, std: float, size: Sequence[int], dtype: Any = None) -> Array:
    return mean + std * _normal(key, size, dtype)


@operation("aten.normal.Tensor_Tensor", "aten.normal.Tensor_float", "aten.normal.float_Tensor", draws=True)
def normal(key: Array, mean: Any, std: Any) -> Array:
    """Draws normal numbers. Either parameter may be a Python number."""
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    return mean + std * jax.random.normal(key, shape, jnp.result_type(mean, std, np.float32))


@operation("aten.exponential", draws=True)
def exponential(key: Array, x: Array, rate: float = 1.0) -> Array:
    return jax.random.exponential(key, x.shape, x.dtype) / rate


@operation("aten.cauchy", draws=True)
def cauchy(key: Array, x: Array, median: float = 0.0, sigma: float = 1.0) -> Array:
    return median + sigma * jax.random.cauchy(key, x.shape, x.dtype)


@operation("aten.log_normal", draws=True)
def log_normal(key: Array, x: Array, mean: float = 1.0, std: float = 2.0) -> Array:
    return jnp.exp(normal_functional(key, x, mean, std))


@operation("aten.geometric", draws=True)
def geometric(key: Array, x: Array, p: float) -> Array:
    return jax.random.geometric(key, p, x.shape).astype(x.dtype)


@operation("aten.multinomial", draws=True)
def multinomial(key: Array, weights: Array, num_samples: int, replacement: bool = False) -> Array:
    """Draws indices by the largest logits with Gumbel noise; without replacement by the `num_samples` largest."""
    logits = jnp.log(weights)
    if replacement:
        shape = (num_samples, *weights.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(key, logits, shape=shape), 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, weights.shape, logits.dtype), num_samples)[1]
