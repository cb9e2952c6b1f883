"""Comparison, logic and bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxfn._torch.operations.promotion import promote, result_type
from jaxfn._torch.operations.table import operation, register_all

register_all(
    {
        "aten.eq": promote(jnp.equal),
        "aten.ne": promote(jnp.not_equal),
        "aten.lt": promote(jnp.less),
        "aten.le": promote(jnp.less_equal),
        "aten.gt": promote(jnp.greater),
        "aten.ge": promote(jnp.greater_equal),
        "aten.logical_and": jnp.logical_and,
        "aten.logical_or": jnp.logical_or,
        "aten.logical_xor": jnp.logical_xor,
        "aten.logical_not": jnp.logical_not,
        "aten.bitwise_and": promote(jnp.bitwise_and),
        "aten.bitwise_or": promote(jnp.bitwise_or),
        "aten.bitwise_xor": promote(jnp.bitwise_xor),
        "aten.bitwise_not": jnp.bitwise_not,
        "aten.bitwise_left_shift": promote(jnp.left_shift),
        "aten.__lshift__": promote(jnp.left_shift),
        "aten.bitwise_right_shift": promote(jnp.right_shift),
        "aten.__rshift__": promote(jnp.right_shift),
        "aten.isnan": jnp.isnan,
        "aten.isinf": jnp.isinf,
        "aten.isposinf": jnp.isposinf,
        "aten.isneginf": jnp.isneginf,
    },
    accepts_half=True,
)


@operation("aten.where.self")
def where(condition: Array, x: Any, y: Any) -> Array:
    dtype = result_type(x, y)
    return jnp.where(condition, jnp.asarray(x, dtype), jnp.asarray(y, dtype))


@operation("aten.masked_fill")
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)
