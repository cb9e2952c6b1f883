"""Where values lie on a mesh, as their types say it: explicit axes, and the manual ones of `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._compat import cotangent_sharding, varying_axes


def widened(value: jax.Array, aval: Any) -> jax.Array:
    """Makes a value vary over all the manual mesh axes that another one varies over."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def zeros_in_place_of(value: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of the same type: with its sharding over explicit mesh axes, varying over the same manual ones."""
    return widened(jnp.zeros_like(value), value)


def match_tangent(tangent: jax.Array, aval: Any) -> jax.Array:
    """Makes a tangent lie on the mesh as its output does, varying over the same manual axes at least."""
    return widened(_resharded(tangent, aval.sharding), aval)


def match_cotangents(cotangents: Sequence[jax.Array | None], avals: Sequence[Any]) -> list[jax.Array | None]:
    """Makes each cotangent lie on the mesh as its input does, varying over the same manual axes.

    A gradient for a weight that is replicated over a manual axis is the sum of what each device has; without this,
    `shard_map(check_vma=True)` refuses the rule. Over explicit axes a gradient often lies as the output does that it
    comes from, such as that of a bias which was broadcast along a sharded axis.
    """
    return [None if x is None else _match_cotangent(x, aval) for x, aval in zip(cotangents, avals, strict=True)]


def _match_cotangent(cotangent: jax.Array, aval: Any) -> jax.Array:
    surplus = varying_axes(jax.typeof(cotangent)) - varying_axes(aval)
    if surplus:
        cotangent = jax.lax.psum(cotangent, tuple(sorted(surplus)))
    return widened(_resharded(cotangent, cotangent_sharding(aval)), aval)


def _resharded(value: jax.Array, sharding: Any) -> jax.Array:
    if not sharding.mesh.explicit_axes or jax.typeof(value).sharding.spec == sharding.spec:
        return value
    return jax.sharding.reshard(value, sharding)
