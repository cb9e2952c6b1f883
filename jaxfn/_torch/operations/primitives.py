"""Arithmetic of arrays by one `lax` primitive each.

Most functions of `jax.numpy` are `jit`s. JAX traces, linearizes and transposes each of them separately, which takes
longer than a primitive does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_Binary = Callable[[Any, Any], Array]


def _binary(primitive: _Binary, general: _Binary) -> _Binary:
    """Returns a function of two arrays; `general` is for arrays of different dtypes and for booleans."""

    def apply(x: Any, y: Any) -> Array:
        if x.dtype != y.dtype or x.dtype == np.bool_:
            return general(x, y)
        if x.ndim != y.ndim and x.ndim and y.ndim:
            x, y = (lax.broadcast_to_rank(operand, max(x.ndim, y.ndim)) for operand in (x, y))
        return primitive(x, y)  # It broadcasts scalars and axes of length 1.

    return apply


add = _binary(lax.add, jnp.add)
subtract = _binary(lax.sub, jnp.subtract)
multiply = _binary(lax.mul, jnp.multiply)
true_divide = _binary(lax.div, jnp.true_divide)  # of floating-point arrays


def matmul(x: Array, y: Array, dtype: Any = None) -> Array:
    """Multiplies two matrices, or batches of them; `dtype` is that of the result."""
    if x.dtype != y.dtype or x.ndim != y.ndim or x.ndim not in (2, 3):
        return jnp.matmul(x, y, preferred_element_type=dtype)
    batch = tuple(range(x.ndim - 2))
    contracted = (x.ndim - 1,), (y.ndim - 2,)
    return lax.dot_general(x, y, (contracted, (batch, batch)), preferred_element_type=dtype)
