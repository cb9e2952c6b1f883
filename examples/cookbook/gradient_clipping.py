"""Gradients clipped inside backward, at each step of a recurrent network.

    python examples/cookbook/gradient_clipping.py

In a network that amplifies, gradients grow at each step that they go back, until they are infinite. Clipping in the
optimizer is too late then: an infinite gradient has no direction left.
Why a Function: forward is the identity, and backward is not even linear in the gradient.
Claim: over 1000 steps plain gradients are not finite, with optax's clipping or without; clipped at each step they are,
and the network learns to repeat its input with a delay of one step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import jaxfn


@jaxfn.function
def clip_gradient(ctx, x: jax.Array, limit: float) -> jax.Array:
    """Returns x; its gradient is clipped to the length `limit`, for each vector along the last axis."""
    ctx.limit = limit
    return x


@clip_gradient.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
    norm = jnp.linalg.norm(grad_output, axis=-1, keepdims=True)
    return grad_output * (ctx.limit / jnp.maximum(norm, ctx.limit)), None


Weights = dict[str, jax.Array]


def loss(weights: Weights, heard: jax.Array, limit: float | None) -> jax.Array:
    """Returns the mean squared error of outputs that should repeat the previous input; `heard` is (steps, batch)."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if limit is not None:
            state = clip_gradient(state, limit)
        state = jnp.tanh(state @ weights["recurrent"] + x[:, None] * weights["input"])
        return state, state @ weights["output"]

    start = jnp.zeros((heard.shape[1], weights["input"].size))
    _, said = jax.lax.scan(step, start, heard)
    return jnp.mean((said[1:] - heard[:-1]) ** 2)


def main(steps: int = 1000, width: int = 32, limit: float = 1e-4) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "recurrent": 3 * jax.random.normal(keys[0], (width, width)) / width**0.5,
        "input": jax.random.normal(keys[1], (width,)),
        "output": 0.1 * jax.random.normal(keys[2], (width,)),
    }
    heard = jax.random.rademacher(keys[3], (steps, 16), jnp.float32)
    plain = jax.grad(loss)(weights, heard, None)
    clipped_late, _ = optax.clip_by_global_norm(1.0).update(plain, optax.EmptyState())

    optimizer = optax.adam(3e-3)
    memory = optimizer.init(weights)

    @jax.jit
    def step(weights: Weights, memory: optax.OptState):
        value, gradients = jax.value_and_grad(loss)(weights, heard, limit)
        updates, memory = optimizer.update(gradients, memory)
        return optax.apply_updates(weights, updates), memory, value, jnp.linalg.norm(gradients["recurrent"])

    losses, norms = [], []
    for _ in range(80):
        weights, memory, value, norm = step(weights, memory)
        losses.append(value)
        norms.append(norm)
    plain_norm = jnp.linalg.norm(plain["recurrent"])
    print(f"length of the gradient over {steps} steps: {plain_norm}; clipped at each: {max(norms):.2f} at most")
    print(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert not jnp.isfinite(plain_norm) and not jnp.all(jnp.isfinite(clipped_late["recurrent"]))
    assert max(norms) < 10
    assert losses[-1] < losses[0] / 10


if __name__ == "__main__":
    main()
