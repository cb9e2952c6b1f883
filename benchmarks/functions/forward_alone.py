"""The operations of each forward, without any rule: what an eager call costs at least, one operation at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def relu(x):
    return jnp.where(x > 0, x, 0.0)


def swish(x):
    return x * jax.nn.sigmoid(x)


def straight_through(x):
    return jnp.round(x * 16) / 16


def linear(input, weight, bias):
    return input @ weight.T + bias
