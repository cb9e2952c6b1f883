"""New tensors. Uninitialized ones are zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfn._torch.operations.table import operation


@operation("aten.full", "aten.new_full")
def full(*arguments: Any, dtype: Any = None) -> Array:
    size, value = arguments[-2:]
    return jnp.full(tuple(size), value, dtype)


@operation("aten.full_like")
def full_like(x: Array, value: Any, dtype: Any = None) -> Array:
    return jnp.full(x.shape, value, dtype or x.dtype)


@operation("aten.fill")
def fill(x: Array, value: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype)


@operation("aten.zeros_like", "aten.empty_like", "aten.zero")
def zeros_like(x: Array, dtype: Any = None) -> Array:
    return jnp.zeros(x.shape, dtype or x.dtype)


@operation("aten.ones_like")
def ones_like(x: Array, dtype: Any = None) -> Array:
    return jnp.ones(x.shape, dtype or x.dtype)


@operation("aten.zeros", "aten.empty", "aten.empty_strided", "aten.empty_permuted")
def zeros(size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype or np.float32)


@operation("aten.new_zeros", "aten.new_empty", "aten.new_empty_strided")
def new_zeros(x: Array, size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype or x.dtype)


@operation("aten.ones")
def ones(size: Sequence[int], *_: Any, dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype or np.float32)


@operation("aten.new_ones")
def new_ones(x: Array, size: Sequence[int], dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype or x.dtype)


@operation("aten.eye")
def eye(rows: int, columns: int | None = None, *, dtype: Any = None) -> Array:
    return jnp.eye(rows, columns, dtype=dtype or np.float32)


@operation("aten.arange.default")
def arange(end: Any, dtype: Any = None) -> Array:
    return arange_start_step(0, end, 1, dtype)


@operation("aten.arange.start")
def arange_start(start: Any, end: Any, dtype: Any = None) -> Array:
    return arange_start_step(start, end, 1, dtype)


@operation("aten.arange.start_step")
def arange_start_step(start: Any, end: Any, step: Any = 1, dtype: Any = None) -> Array:
    """The bounds are known, so the numbers are made here, in double precision."""
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
