"""Manual mesh axes that values vary over, inside `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._compat import varying_axes


def widened(value: jax.Array, aval: Any) -> jax.Array:
    """Makes a value vary over all the manual mesh axes that another one varies over."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def zeros_in_place_of(value: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of the same type: with its sharding over explicit mesh axes, varying over the same manual ones."""
    return widened(jnp.zeros_like(value), value)


def match_varying(cotangent: jax.Array, aval: Any) -> jax.Array:
    """Makes a cotangent vary over the manual mesh axes that its input varies over, and no others.

    A gradient for a weight that is replicated over a mesh axis is the sum of what each device has; without this,
    `shard_map(check_vma=True)` refuses the rule.
    """
    surplus = varying_axes(jax.typeof(cotangent)) - varying_axes(aval)
    if surplus:
        cotangent = jax.lax.psum(cotangent, tuple(sorted(surplus)))
    return widened(cotangent, aval)
