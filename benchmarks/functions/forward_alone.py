"""The operations of each forward without a rule: a lower bound of the cost of an eager call."""

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
