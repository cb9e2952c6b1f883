"""Backward operations, implemented by `jax.vjp` of the forward ones."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array


def apply_vjp(forward: Callable[[Array], Array], gradient: Array, x: Array) -> Array:
    """Returns the gradient at `x` for a gradient of `forward(x)`."""
    return jax.vjp(forward, x)[1](gradient)[0]
