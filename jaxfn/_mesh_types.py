"""Sharding of values by their types: over explicit mesh axes, and over the manual axes of `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxfn._compat import varying_axes


def is_sharded(value: Any) -> bool:
    """Whether an array is sharded over explicit mesh axes, so that not every reshape of it has a sharding."""
    sharding = jax.typeof(value).sharding
    return bool(sharding.mesh.explicit_axes) and any(axis is not None for axis in sharding.spec)


def pcast_like(value: jax.Array, aval: Any) -> jax.Array:
    """Makes a value vary over all manual mesh axes over which another one varies."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def match_tangent(tangent: jax.Array, aval: Any) -> jax.Array:
    """Shards a tangent like its output; it may vary over more manual axes."""
    return pcast_like(_reshard(tangent, aval.sharding), aval)


def match_cotangents(cotangents: Sequence[jax.Array | None], avals: Sequence[Any]) -> list[jax.Array | None]:
    """Shards each cotangent like its input, varying over the manual axes of the input.

    A gradient of a weight that is replicated over a manual axis is the sum over its devices, as `jax.shard_map` with
    `check_vma=True` requires. Over explicit axes a gradient is often sharded like the output that it comes from, such
    as that of a bias which was broadcast along a sharded axis.
    """
    return [None if x is None else _match_cotangent(x, aval) for x, aval in zip(cotangents, avals, strict=True)]


def _match_cotangent(cotangent: jax.Array, aval: Any) -> jax.Array:
    surplus = varying_axes(jax.typeof(cotangent)) - varying_axes(aval)
    if surplus:
        cotangent = jax.lax.psum(cotangent, tuple(sorted(surplus)))
    # The sharding of a cotangent is that of the value with `reduced` and `unreduced` axes swapped.
    return pcast_like(_reshard(cotangent, aval.to_ct_aval().sharding), aval)


def _reshard(value: jax.Array, sharding: Any) -> jax.Array:
    if not sharding.mesh.explicit_axes or jax.typeof(value).sharding.spec == sharding.spec:
        return value
    return jax.sharding.reshard(value, sharding)
