"""Matrix products, decompositions and solvers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxfn._torch._operations._table import enter_all, operation

enter_all(
    {
        "aten.mm": jnp.matmul,
        "aten.bmm": jnp.matmul,
        "aten.mv": jnp.matmul,
        "aten.matmul": jnp.matmul,
        "aten.dot": jnp.dot,
        "aten.vdot": jnp.vdot,
    }
)


@operation("aten.addmm", "aten.addmv")
def addmm(x: Array, first: Array, second: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """`beta` 0 leaves `x` out, nan and all."""
    product = scaled(jnp.matmul(first, second), alpha)
    return product if beta == 0 else scaled(x, beta) + product


@operation("aten.baddbmm")
def baddbmm(x: Array, first: Array, second: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return addmm(x, first, second, beta=beta, alpha=alpha)


@operation("aten.addbmm")
def addbmm(x: Array, first: Array, second: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    product = scaled(jnp.einsum("bij,bjk->ik", first, second), alpha)
    return product if beta == 0 else scaled(x, beta) + product


def scaled(x: Array, factor: Any) -> Array:
    """`factor * x` in the dtype of `x`."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
