"""Lambert's W, a holomorphic function of a complex number, with a rule in torch's convention for gradients.

    python examples/cookbook/holomorphic.py

W(z) solves w * exp(w) = z by an iteration that no autodiff in reverse goes through, and its derivative is known. In
torch the gradient of a real loss L is dL/dx + i dL/dy, so backward multiplies by the conjugate of the derivative, as in
torch code. `jax.grad` returns the conjugate of that, as for any JAX function.
Claim: `jax.grad(holomorphic=True)` is W', and steps against the conjugate of `jax.grad` lead to the minimum of a loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


class LambertW(jaxfn.Function):
    """The principal branch for complex numbers. It has no derivative at -1/e, where the branches meet."""

    @staticmethod
    def forward(ctx, z: jax.Array) -> jax.Array:
        # A series near the branch point, and elsewhere the asymptotic logarithm, to the right and to the left.
        p, log, log1p = jnp.sqrt(2 * (jnp.e * z + 1)), jnp.log(z), jnp.log(1 + z)
        large = jnp.where(z.real > 0, log1p * (1 - jnp.log(1 + log1p) / (2 + log1p)), log - jnp.log(log))
        start = jnp.where(jnp.abs(p) < 2.5, -1 + p - p**2 / 3, large)

        def halley(_, w: jax.Array) -> jax.Array:
            error = w * jnp.exp(w) - z
            slope = jnp.exp(w) * (w + 1)
            return w - error / (slope - (w + 2) * error / (2 * (w + 1)))

        w = jax.lax.fori_loop(0, 6, halley, start)
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        (w,) = ctx.saved_tensors
        return grad_output * jnp.conj(slope_of(w))

    @staticmethod
    def jvp(ctx, tangent: jax.Array) -> jax.Array:
        (w,) = ctx.saved_tensors
        return tangent * slope_of(w)  # tangents are not conjugated, in torch and here


def slope_of(w: jax.Array) -> jax.Array:
    """Returns dW/dz for w = W(z)."""
    return jnp.exp(-w) / (1 + w)


def main() -> None:
    with jax.enable_x64(True):
        z = jnp.array([0.3 + 0.2j, -0.2 + 1.5j, 4.0 - 3.0j, -2.0 + 0.1j, 1e-3j])
        w = jax.jit(LambertW.apply)(z)
        derivative = jax.grad(LambertW.apply, holomorphic=True)
        slope = jax.jit(jax.vmap(derivative))(z)
        second = jax.jit(jax.vmap(jax.grad(derivative, holomorphic=True)))(z)
        _, forward = jax.jvp(LambertW.apply, (z,), (1j * jnp.ones_like(z),))
        expected = -jnp.exp(-2 * w) * (w + 2) / (1 + w) ** 3
        print(f"w exp(w) - z off by {jnp.max(jnp.abs(w * jnp.exp(w) - z)):.0e}")
        assert jnp.max(jnp.abs(w * jnp.exp(w) - z)) < 1e-14
        assert jnp.allclose(slope, slope_of(w), rtol=1e-12) and jnp.allclose(second, expected, rtol=1e-12)
        assert jnp.allclose(forward, 1j * slope_of(w), rtol=1e-12)  # Cauchy and Riemann: along i, i times as much

        # A real loss: where is W(z) equal to 0.5 + 1i? At (0.5 + 1i) exp(0.5 + 1i).
        target = 0.5 + 1j

        def loss(z: jax.Array) -> jax.Array:
            return jnp.abs(LambertW.apply(z) - target) ** 2

        def descend(_, guess: jax.Array) -> jax.Array:
            return guess - 2 * jnp.conj(jax.grad(loss)(guess))  # the conjugate is torch's gradient

        guess = jax.lax.fori_loop(0, 100, descend, jnp.array(1.0 + 0j))
        print(f"gradient descent ends at {guess:.6f}, a loss of {loss(guess):.0e}")
        assert jnp.allclose(guess, target * jnp.exp(target), atol=1e-6)


if __name__ == "__main__":
    main()
