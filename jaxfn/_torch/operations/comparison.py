"""Comparison, logic and bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxfn._torch.operations.promotion import promoted, result_type
from jaxfn._torch.operations.table import enter_all, operation

enter_all(
    {
        "aten.eq": promoted(jnp.equal),
        "aten.ne": promoted(jnp.not_equal),
        "aten.lt": promoted(jnp.less),
        "aten.le": promoted(jnp.less_equal),
        "aten.gt": promoted(jnp.greater),
        "aten.ge": promoted(jnp.greater_equal),
        "aten.logical_and": jnp.logical_and,
        "aten.logical_or": jnp.logical_or,
        "aten.logical_xor": jnp.logical_xor,
        "aten.logical_not": jnp.logical_not,
        "aten.bitwise_and": promoted(jnp.bitwise_and),
        "aten.bitwise_or": promoted(jnp.bitwise_or),
        "aten.bitwise_xor": promoted(jnp.bitwise_xor),
        "aten.bitwise_not": jnp.bitwise_not,
        "aten.bitwise_left_shift": promoted(jnp.left_shift),
        "aten.__lshift__": promoted(jnp.left_shift),
        "aten.bitwise_right_shift": promoted(jnp.right_shift),
        "aten.__rshift__": promoted(jnp.right_shift),
        "aten.isnan": jnp.isnan,
        "aten.isinf": jnp.isinf,
        "aten.isposinf": jnp.isposinf,
        "aten.isneginf": jnp.isneginf,
    },
    takes_half=True,
)


@operation("aten.where.self")
def where(condition: Array, x: Any, y: Any) -> Array:
    dtype = result_type(x, y)
    return jnp.where(condition, jnp.asarray(x, dtype), jnp.asarray(y, dtype))


@operation("aten.masked_fill")
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)
