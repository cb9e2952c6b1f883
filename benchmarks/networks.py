"""Networks that call a Function 64 times, and one training step of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CALLS = 64
_CHAIN_SHAPE = (256, 256)
_BATCH, _WIDTH = 64, 64

Forward = Callable[[Any, Any], jax.Array]


def activation_mlp(f: Callable[..., Any]) -> Forward:
    """An MLP with the Function as its activation."""

    def forward(layers: Any, x: Any) -> jax.Array:
        for weight, bias in layers:
            x = f(x @ weight + bias)
        return x

    return forward


def linear_mlp(f: Callable[..., Any]) -> Forward:
    """An MLP with the Function as its linear layer."""

    def forward(layers: Any, x: Any) -> jax.Array:
        for weight, bias in layers:
            x = jnp.tanh(f(x, weight, bias))
        return x

    return forward


def chain(f: Callable[..., Any]) -> Forward:
    """Chains calls of the Function; the argument of the first one is trained."""

    def forward(x: Any, _: Any) -> jax.Array:
        for _ in range(CALLS):
            x = f(x)
        return x

    return forward


def one_layer(f: Callable[..., Any]) -> Forward:
    """One layer and the Function, small enough for a whole Hessian."""

    def forward(weight: Any, x: Any) -> jax.Array:
        return f(x @ weight)

    return forward


def one_layer_args() -> tuple[Any, Any]:
    """Returns the weight, of 256 numbers, and a batch."""
    generator = np.random.default_rng(0)
    return _normal(generator, 16, 16) / 4, _normal(generator, _BATCH, 16)


def mlp_args() -> tuple[Any, Any]:
    """Returns layers whose activations neither vanish nor grow with the depth, and a batch."""
    generator = np.random.default_rng(0)
    layers = [
        (_normal(generator, _WIDTH, _WIDTH) * (2 / _WIDTH) ** 0.5, _normal(generator, _WIDTH) * 0.1)
        for _ in range(CALLS)
    ]
    return layers, _normal(generator, _BATCH, _WIDTH)


def chain_args() -> tuple[Any, Any]:
    """Returns the array that goes through the chain."""
    return _normal(np.random.default_rng(0), *_CHAIN_SHAPE), None


def _normal(generator: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)


def hessian(forward: Forward) -> Callable[[Any, Any], Any]:
    """Returns all second derivatives of the loss by the parameters: forward over reverse, as in `jax.hessian`."""

    def loss(parameters: Any, x: Any) -> jax.Array:
        return jnp.mean(forward(parameters, x) ** 2)

    return lambda parameters, x: jax.hessian(loss)(parameters, x)


def train_step(forward: Forward) -> Callable[[Any, Any], Any]:
    """Returns a step of gradient descent, a new function each time, so that JAX has no cached trace of it."""

    def loss(parameters: Any, x: Any) -> jax.Array:
        return jnp.mean(forward(parameters, x) ** 2)

    def step(parameters: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        return value, jax.tree.map(lambda p, g: p - 0.01 * g, parameters, gradients)

    return step
