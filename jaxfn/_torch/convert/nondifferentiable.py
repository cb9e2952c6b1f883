"""Arrays that raise when they are differentiated, where the derivative would differ from torch's."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxfn._primitives import DeferredError, error_tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def nondifferentiable(error: DeferredError, x: jax.Array) -> jax.Array:
    """Returns `x`. Raises `error` if JAX differentiates by it."""
    return x


@nondifferentiable.defjvp
def _(error: DeferredError, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], error_tangent(jax.typeof(tangents[0]), tangents, error)
