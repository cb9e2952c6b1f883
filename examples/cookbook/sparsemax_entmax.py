"""Probabilities that may be exactly zero: alpha-entmax, from softmax (alpha near 1) to sparsemax (alpha = 2).

    python examples/cookbook/sparsemax_entmax.py

The threshold below which probabilities are zero is found by bisection (Peters et al., 2019).
Why a Function: JAX cannot differentiate a `while` loop in reverse, autodiff of a bisection of fixed length is wrong (it
goes through comparisons only), and the derivative needs nothing but the probabilities.
Claim: the saved bytes are those of the result, for 20 halvings and for 50; first and second derivatives are exact, in
both modes (`gradcheck`, `gradgradcheck`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


class Entmax(jaxfn.Function):
    """argmax over probabilities p of p @ x + (sum(p) - sum(p**alpha)) / (alpha * (alpha - 1)), along the last axis."""

    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, x: jax.Array, alpha: float, halvings: int) -> jax.Array:
        p = bisect(x, alpha, halvings)
        ctx.save_for_backward(p=p)  # the output: its own derivative is this rule again
        ctx.alpha = alpha
        return p

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None, None]:
        p = ctx.saved_variables.p
        # Zero where p is; the other `where` excludes 0 ** (1 - alpha) from the second derivative.
        slope = jnp.where(p > 0, jnp.where(p > 0, p, 1) ** (2 - ctx.alpha), 0)
        mean = jnp.sum(slope * grad_output, -1, keepdims=True) / jnp.sum(slope, -1, keepdims=True)
        return slope * (grad_output - mean), None, None


def bisect(x: jax.Array, alpha: float, halvings: int) -> jax.Array:
    scaled = (alpha - 1) * x
    top = jnp.max(scaled, -1, keepdims=True)

    def p_above(threshold: jax.Array) -> jax.Array:
        return jnp.maximum(scaled - threshold, 0) ** (1 / (alpha - 1))

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        is_low = jnp.sum(p_above(middle), -1, keepdims=True) >= 1
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    low, _ = jax.lax.fori_loop(0, halvings, halve, (top - 1, top))
    p = p_above(low)
    return p / jnp.sum(p, -1, keepdims=True)


def entmax(x: jax.Array, alpha: float = 1.5, halvings: int = 50) -> jax.Array:
    """Returns the entmax probabilities, for any alpha above 1."""
    return Entmax.apply(x, alpha, halvings)


def main() -> None:
    x = 2 * jax.random.normal(jax.random.key(0), (200, 30))
    zeros = {alpha: float(jnp.mean(entmax(x, alpha) == 0)) for alpha in (1.01, 1.5, 2.0)}
    saved = {halvings: jaxfn.residuals(entmax, x, 1.5, halvings, argnums=0).total_bytes for halvings in (20, 50)}

    def loss(x: jax.Array, function=entmax) -> jax.Array:
        return jnp.sum(jnp.cos(jnp.arange(x.size)).reshape(x.shape) * function(x, 1.5, 50))

    exact, autodiff = jax.grad(loss)(x), jax.grad(loss)(x, bisect)
    error = jnp.linalg.norm(autodiff - exact) / jnp.linalg.norm(exact)
    print(f"zeros among {x.shape[1]} probabilities: " + ", ".join(f"{z:.0%} for alpha = {a}" for a, z in zeros.items()))
    print(f"  saved for backward: {saved} bytes, by halvings; x has {x.nbytes}")
    print(f"  autodiff of the bisection is off by {error:.0%}")
    assert zeros[1.01] == 0 and 0.3 < zeros[1.5] < zeros[2.0]
    assert set(saved.values()) == {x.nbytes}
    assert error > 0.1
    with jax.enable_x64(True):
        inputs = jnp.array([[0.3, -1.2, 0.8, 0.5], [2.0, 0.1, 1.7, -0.4]])
        assert jaxfn.gradcheck(entmax, inputs, against="finite_differences", check_forward_ad=True)
        assert jaxfn.gradgradcheck(entmax, inputs)


if __name__ == "__main__":
    main()
