"""Random choices inside a network: one-hot samples with the gradient of a softmax (Jang et al., 2017).

    python examples/cookbook/gumbel_straight_through.py

Why a Function: `hard + soft - stop_gradient(soft)`, the usual way, returns numbers that are nearly 0 and 1, and saves
what autodiff of the softmax saves. Here the sample is exact, and the probabilities are saved.
Claim: samples are exactly one-hot and as frequent as they should be, the gradient is the softmax's, and descent through
samples finds the best of eight choices in a lottery.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


class HardMax(jaxfn.Function):
    """1 for the largest entry along the last axis, 0 for others, with the backward of softmax(x / temperature)."""

    @staticmethod
    def forward(ctx, x: jax.Array, temperature: float) -> jax.Array:
        ctx.save_for_backward(soft=jax.nn.softmax(x / temperature))
        ctx.temperature = temperature
        return jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1], dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
        soft = ctx.saved_variables.soft
        mean = jnp.sum(soft * grad_output, -1, keepdims=True)
        return soft * (grad_output - mean) / ctx.temperature, None


def sample(logits: jax.Array, key: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Draws one-hot samples with probabilities softmax(logits): the largest of logits with Gumbel noise."""
    return HardMax.apply(logits + jax.random.gumbel(key, logits.shape, logits.dtype), temperature)


def usual_sample(logits: jax.Array, key: jax.Array, temperature: float = 1.0) -> jax.Array:
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    soft = jax.nn.softmax(noisy / temperature)
    hard = jax.nn.one_hot(jnp.argmax(noisy, -1), logits.shape[-1], dtype=logits.dtype)
    return hard + soft - jax.lax.stop_gradient(soft)


def main(samples: int = 20_000, choices: int = 8) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    logits = jax.random.normal(keys[0], (choices,))
    many = jnp.broadcast_to(logits, (samples, choices))
    ours, usual = sample(many, keys[1]), usual_sample(many, keys[1])
    assert jnp.all((ours == 0) | (ours == 1)) and jnp.all(ours.sum(1) == 1)
    p = jax.nn.softmax(logits)
    frequency_error = jnp.max(jnp.abs(ours.mean(0) - p) / jnp.sqrt(p * (1 - p) / samples))

    prizes = jax.random.uniform(keys[2], (choices,))

    def loss(logits: jax.Array, key: jax.Array, sample=sample) -> jax.Array:
        return -jnp.mean(sample(jnp.broadcast_to(logits, (32, choices)), key, 0.5) @ prizes)

    difference = jax.grad(loss)(logits, keys[1]) - jax.grad(loss)(logits, keys[1], usual_sample)
    trained = jax.lax.fori_loop(
        0, 500, lambda i, logits: logits - jax.grad(loss)(logits, jax.random.fold_in(keys[2], i)), jnp.zeros(choices)
    )
    inexact = jnp.sum((usual != 0) & (usual != 1))
    chosen = jax.nn.softmax(trained)[jnp.argmax(prizes)]
    print(f"{samples} samples: all exactly one-hot, frequencies within {frequency_error:.1f} standard deviations")
    print(f"  the usual way: {inexact} of {many.size} entries are neither 0 nor 1")
    print(f"  probability of the best choice after training: {chosen:.2f}")
    assert frequency_error < 4
    assert jnp.max(jnp.abs(difference)) < 1e-6
    assert inexact > 0
    assert chosen > 0.95
    assert jaxfn.residuals(sample, many, keys[1], argnums=0).total_bytes == many.nbytes


if __name__ == "__main__":
    main()
