"""The square root of a positive definite matrix, with a Sylvester equation for its derivative at every order.

    python examples/cookbook/matrix_square_root.py

Autodiff through the eigendecomposition divides by differences of eigenvalues, and is nan where two are equal. The root
S satisfies dS @ S + S @ dS = dA, an equation with sums of positive numbers only. Its solution is a Function too, whose
rule is the equation itself, so no derivative of any order differentiates `eigh`.
Claim: right at the unit matrix, where all eigenvalues coincide, first and second derivative, forward and reverse.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxfn


class Lyapunov(jaxfn.Function):
    """The X with root @ X + X @ root = right, for a symmetric positive definite root."""

    @staticmethod
    def forward(ctx, root: jax.Array, right: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(root)
        solution = vectors @ (vectors.T @ right @ vectors / (values[:, None] + values)) @ vectors.T
        ctx.save_for_backward(root, solution)
        return solution

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, jax.Array]:
        root, solution = ctx.saved_tensors
        grad_right = Lyapunov.apply(root, grad_output)
        return -grad_right @ solution.T - solution.T @ grad_right, grad_right

    @staticmethod
    def jvp(ctx, root_tangent: jax.Array, right_tangent: jax.Array) -> jax.Array:
        root, solution = ctx.saved_tensors
        return Lyapunov.apply(root, right_tangent - root_tangent @ solution - solution @ root_tangent)


class SquareRoot(jaxfn.Function):
    """The symmetric positive definite S with S @ S = matrix."""

    @staticmethod
    def forward(ctx, matrix: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(matrix)
        root = vectors * jnp.sqrt(values) @ vectors.T
        ctx.save_for_backward(root)  # an output: its derivative is this rule again
        return root

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        (root,) = ctx.saved_tensors
        return Lyapunov.apply(root, grad_output)

    jvp = backward  # the equation is its own transpose


def plain_square_root(matrix: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(matrix)
    return vectors * jnp.sqrt(values) @ vectors.T


def frechet_distance(mean: jax.Array, covariance: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the squared distance of a normal distribution from one around 0, which rates generated images."""
    root = SquareRoot.apply(other)
    mixed = SquareRoot.apply(root @ covariance @ root)
    return mean @ mean + jnp.trace(covariance + other - 2 * mixed)


def main(n: int = 5) -> None:
    a, b = jax.random.normal(jax.random.key(0), (2, n, n))
    unit, direction = jnp.eye(n), a + a.T

    def along(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.jvp(f, (x,), (direction,))[1]

    # sqrt(1 + t d) = 1 + t d / 2 - t**2 d @ d / 8 + ...
    first, second = (jax.jit(f)(unit) for f in (along(SquareRoot.apply), along(along(SquareRoot.apply))))
    reverse = jax.jit(jax.grad(lambda x: jnp.vdot(b, SquareRoot.apply(x))))(unit)
    plain = along(plain_square_root)(unit)
    # For equal covariances the distance is 0, its minimum.
    covariance = a @ a.T + unit
    distance, grads = jax.jit(jax.value_and_grad(frechet_distance, (0, 1)))(jnp.zeros(n), covariance, covariance)
    # Between multiples of the unit matrix it is n (x**0.5 - 1)**2, with the second derivative n / 2 at 1.
    curvature = jax.jit(jax.hessian(lambda x: frechet_distance(jnp.zeros(n), x * unit, unit)))(1.0)
    print(f"first derivative off by {jnp.max(jnp.abs(first - direction / 2)):.0e}, plain JAX's is {plain[0, 1]}")
    print(f"second derivative off by {jnp.max(jnp.abs(second + direction @ direction / 4)):.0e}")
    print(f"distance of a distribution from itself {distance:.0e}; curvature {curvature:.4f}")
    assert jnp.allclose(first, direction / 2, atol=1e-5) and jnp.allclose(reverse, b / 2, atol=1e-5)
    assert jnp.allclose(second, -direction @ direction / 4, atol=1e-4)
    assert not jnp.isfinite(plain).all()
    assert abs(distance) < 1e-4 and all(jnp.max(jnp.abs(grad)) < 1e-4 for grad in grads)
    assert jnp.allclose(curvature, n / 2, atol=1e-4)


if __name__ == "__main__":
    main()
