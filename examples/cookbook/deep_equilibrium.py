"""A deep equilibrium layer: the network's output is the fixed point of one block, however many times that takes.

    python examples/cookbook/deep_equilibrium.py

Autodiff saves every pass through the block. At the fixed point z = block(weights, x, z) the gradient is one linear
equation in the block's transposed Jacobian, which is solved by iteration too.
Claim: the saved bytes do not depend on the number of iterations, and the gradients are those through all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn

Block = Callable[[Any, jax.Array, jax.Array], jax.Array]  # of weights, x and z


def iterate(step: Callable[[jax.Array], jax.Array], start: jax.Array, tolerance: float, most: int) -> jax.Array:
    """Repeats the step until the largest change is below the tolerance."""

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        z, before, count = state
        return (jnp.max(jnp.abs(z - before)) > tolerance) & (count < most)

    def advance(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        z, _, count = state
        return step(z), z, count + 1

    return jax.lax.while_loop(unfinished, advance, (step(start), start, 1))[0]


class FixedPoint(jaxfn.Function):
    """Solves z = block(weights, x, z). The block is a contraction in z; weights are any pytree."""

    @staticmethod
    def forward(ctx, block: Block, weights: Any, x: jax.Array, tolerance: float = 1e-6, most: int = 1000) -> jax.Array:
        z = iterate(lambda z: block(weights, x, z), jnp.zeros_like(x), tolerance, most)
        ctx.save_for_backward(z)
        ctx.static = block, tolerance, most
        ctx.weights, ctx.x = weights, x  # a pytree of arrays may be an attribute
        return z

    @staticmethod
    def backward(ctx, grad_z: jax.Array) -> tuple[None, Any, jax.Array, None, None]:
        (z,) = ctx.saved_tensors
        block, tolerance, most = ctx.static
        _, pullback = jax.vjp(block, ctx.weights, ctx.x, z)
        # dz = J dz + d(block), so the gradient that reaches the block is u = grad_z + J.T u.
        u = iterate(lambda u: grad_z + pullback(u)[2], grad_z, tolerance, most)
        grad_weights, grad_x, _ = pullback(u)
        return None, grad_weights, grad_x, None, None


def block(weights: dict[str, jax.Array], x: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.tanh(z @ weights["inner"] + x + weights["bias"])


def unrolled(weights: dict[str, jax.Array], x: jax.Array, steps: int) -> jax.Array:
    """Returns the fixed point by a loop, which autodiff goes through, for comparison."""
    return jax.lax.scan(lambda z, _: (block(weights, x, z), None), jnp.zeros_like(x), length=steps)[0]


def main(batch: int = 16, width: int = 32) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    inner = jax.random.normal(keys[0], (width, width))
    weights = {"inner": 0.8 * inner / jnp.linalg.norm(inner, 2), "bias": jax.random.normal(keys[1], (width,))}
    x = jax.random.normal(keys[2], (batch, width))

    def implicit(weights: dict[str, jax.Array], most: int = 1000) -> jax.Array:
        return jnp.mean(FixedPoint.apply(block, weights, x, most=most) ** 2)

    def plain(weights: dict[str, jax.Array], steps: int = 100) -> jax.Array:
        return jnp.mean(unrolled(weights, x, steps) ** 2)

    grads, expected = jax.jit(jax.grad(implicit))(weights), jax.jit(jax.grad(plain))(weights)
    difference = max(float(jnp.max(jnp.abs(grads[name] - expected[name]))) for name in grads)
    saved = [jaxfn.residuals(lambda w: implicit(w, most), weights).total_bytes for most in (10, 1000)]
    saved_by_plain = [jaxfn.residuals(lambda w: plain(w, steps), weights).total_bytes for steps in (10, 1000)]
    print(f"gradients off by {difference:.0e} from those through 100 passes")
    print(f"saved by 10 and by 1000 passes: {saved[0]:,} and {saved[1]:,} bytes; by plain JAX: {saved_by_plain}")
    assert difference < 1e-6
    assert saved[0] == saved[1] < saved_by_plain[0] < saved_by_plain[1] / 50


if __name__ == "__main__":
    main()
