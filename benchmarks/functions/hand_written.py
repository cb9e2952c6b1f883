"""The Functions with `jax.custom_vjp`, as a JAX user would write them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.support.cases import CASES, rule

_HAND_WRITTEN = {case.name: case.hand_written for case in CASES}

relu = _HAND_WRITTEN["relu"]
swish = _HAND_WRITTEN["swish"]
# Its backward has no guards: plain custom_vjp does not say which gradients are needed, and XLA drops the others.
linear = _HAND_WRITTEN["linear"]


def twice_swish(x):
    """Computes swish twice in plain JAX, since a `custom_vjp` has no forward mode."""
    return x * jax.nn.sigmoid(x)


straight_through = rule(
    lambda x: jnp.round(x * 16) / 16, lambda x: (jnp.round(x * 16) / 16, None), lambda _, grad_output: (grad_output,)
)
