"""Manual mesh axes that values vary over, inside `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax

from jaxfn._compat import varying_axes


def widened(value: jax.Array, aval: Any) -> jax.Array:
    """Makes a value vary over all the manual mesh axes that another one varies over."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def match_varying(cotangent: jax.Array, aval: Any) -> jax.Array:
    """Makes a cotangent vary over the manual mesh axes that its input varies over, and no others.

    A gradient for a weight that is replicated over a mesh axis is the sum of what each device has; without this,
    `shard_map(check_vma=True)` refuses the rule.
    """
    surplus = varying_axes(jax.typeof(cotangent)) - varying_axes(aval)
    if surplus:
        cotangent = jax.lax.psum(cotangent, tuple(sorted(surplus)))
    return widened(cotangent, aval)
