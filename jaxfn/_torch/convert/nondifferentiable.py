"""Arrays that cannot be differentiated by, where a derivative would not be torch's."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxfn._primitives import DeferredError, error_tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def nondifferentiable(refusal: DeferredError, x: jax.Array) -> jax.Array:
    """An array that cannot be differentiated by."""
    return x


@nondifferentiable.defjvp
def _(refusal: DeferredError, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], error_tangent(jax.typeof(tangents[0]), tangents, refusal)
