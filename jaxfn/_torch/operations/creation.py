"""New tensors. Uninitialized ones are zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfn._torch.operations.table import operation, register_all

register_all(
    {
        "aten.empty": jnp.zeros,
        "aten.empty_like": jnp.zeros_like,
        "aten.eye": jnp.eye,
        "aten.fill": jnp.full_like,
        "aten.full_like": jnp.full_like,
        "aten.ones": jnp.ones,
        "aten.ones_like": jnp.ones_like,
        "aten.zero": jnp.zeros_like,
        "aten.zeros": jnp.zeros,
        "aten.zeros_like": jnp.zeros_like,
    }
)


@operation("aten.full", "aten.new_full")
def full(*arguments: Any, dtype: Any = None) -> Array:
    size, value = arguments[-2:]
    return jnp.full(tuple(size), value, dtype)


@operation("aten.empty_strided", "aten.empty_permuted")
def zeros(size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype or np.float32)


@operation("aten.new_zeros", "aten.new_empty", "aten.new_empty_strided")
def new_zeros(x: Array, size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype or x.dtype)


@operation("aten.new_ones")
def new_ones(x: Array, size: Sequence[int], dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype or x.dtype)


@operation("aten.arange")
def arange(*bounds: Any, dtype: Any = None) -> Array:
    """Takes an end, or a start and an end, or also a step. They are Python numbers, so NumPy computes in float64."""
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if dtype is None and all(isinstance(x, int) for x in (start, end, step)):
        dtype = np.int64
    count = max(int(np.ceil((end - start) / step)), 0)
    return jnp.asarray((start + step * np.arange(count)).astype(dtype or np.float32))


@operation("aten.tril_indices")
def tril_indices(rows: int, columns: int, offset: int = 0, dtype: Any = None) -> Array:
    return jnp.stack(jnp.tril_indices(rows, offset, columns))


@operation("aten.triu_indices")
def triu_indices(rows: int, columns: int, offset: int = 0, dtype: Any = None) -> Array:
    return jnp.stack(jnp.triu_indices(rows, offset, columns))
