"""Training through rounding: 4-bit weights by the straight-through estimator.

    python examples/cookbook/straight_through_quantization.py

Rounding has derivative zero, so weights before it do not learn. The estimator treats it as the identity where the codes
reach, and as a constant beyond.
Why a Function: the rule is written explicitly, holds in both modes and at every order, and saves one byte for each
weight.
Claim: descent finds a teacher's 4-bit weights to the last code, where autodiff does not move; the Hessian is that of
least squares.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


class Quantize(jaxfn.Function):
    """Rounds x to a multiple of `step`, by codes of `bits` bits."""

    generate_jvp_rule = True  # forward mode by this rule too

    @staticmethod
    def forward(ctx, x: jax.Array, step: float, bits: int) -> jax.Array:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        codes = jnp.round(x / step)
        ctx.save_for_backward(reached=(low <= codes) & (codes <= high))
        return jnp.clip(codes, low, high) * step

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None, None]:
        return jnp.where(ctx.saved_variables.reached, grad_output, 0), None, None


def plain(x: jax.Array, step: float, bits: int) -> jax.Array:
    """Returns equal numbers in plain JAX, for comparison."""
    return jnp.clip(jnp.round(x / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step


def main(num_weights: int = 64, step: float = 0.25, bits: int = 4) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = jax.random.normal(keys[0], (8 * num_weights, num_weights)) / (8 * num_weights) ** 0.5
    teacher = plain(jax.random.normal(keys[1], (num_weights,)), step, bits)
    start = 0.1 * jax.random.normal(keys[2], (num_weights,))

    def loss(weight: jax.Array, quantize=Quantize.apply) -> jax.Array:
        return jnp.sum((inputs @ (quantize(weight, step, bits) - teacher)) ** 2) / 2

    gradient = jax.jit(jax.grad(loss))
    weight = start
    for _ in range(400):
        weight = weight - 0.1 * gradient(weight)

    wrong_codes = jnp.sum(Quantize.apply(weight, step, bits) != teacher)
    saved = jaxfn.residuals(Quantize.apply, start, step, bits, argnums=0).total_bytes
    print(f"{num_weights} weights of {bits} bits, learned from a teacher's outputs: {wrong_codes} codes wrong")
    print(f"  saved for backward: {saved} bytes")
    assert jnp.all(jax.grad(loss)(start, plain) == 0)
    assert wrong_codes == 0
    assert jnp.allclose(jax.hessian(loss)(start), inputs.T @ inputs, atol=1e-5)
    assert saved == num_weights


if __name__ == "__main__":
    main()
