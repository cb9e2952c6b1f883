"""A loss whose second derivative is the Gauss-Newton matrix, for every user of a Hessian.

    python examples/cookbook/gauss_newton_loss.py

The Hessian of a loss of a model is J.T @ H @ J and a term with the model's own curvature, by which a Newton step may
lead uphill. Here the model's rule treats its Jacobian as a constant, which omits that term. It holds at every order, so
`jax.hessian`, and products with it in any mode, are J.T @ H @ J, and optimizers need no other code.
Claim: they are the dense product, positive semidefinite where the Hessian is not; Newton's method converges in 20 steps
from three starts, from each of which the Hessian leads it astray.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn

Model = Callable[[Any, jax.Array], jax.Array]  # of weights, any pytree, and inputs


class Linearized(jaxfn.Function):
    """Computes model(weights, x). Its first derivative by the weights is the model's; its second one is zero."""

    @staticmethod
    def forward(ctx, model: Model, weights: Any, x: jax.Array) -> jax.Array:
        ctx.model, ctx.weights, ctx.x = model, weights, x
        return model(weights, x)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[None, Any, None]:
        weights = jax.lax.stop_gradient(ctx.weights)
        return None, jax.vjp(lambda weights: ctx.model(weights, ctx.x), weights)[1](grad_output)[0], None

    @staticmethod
    def jvp(ctx, _model: None, tangents: Any, _x: jax.Array) -> jax.Array:
        weights = jax.lax.stop_gradient(ctx.weights)
        return jax.jvp(lambda weights: ctx.model(weights, ctx.x), (weights,), (tangents,))[1]


def line(weights: jax.Array, t: jax.Array) -> jax.Array:
    """Returns a line in a spectrum from its height, position and width."""
    height, position, width = weights
    return height * jnp.exp(-(((t - position) / width) ** 2))


def poisson(output: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the negative log-likelihood of counts with means exp(output), which is convex in the output."""
    return jnp.sum(jnp.exp(output) - counts * output)


def newton(loss: Callable[[jax.Array], jax.Array], weights: jax.Array, steps: int) -> jax.Array:
    """Minimizes a function by Newton's method with some damping."""

    def step(weights: jax.Array, _: None) -> tuple[jax.Array, None]:
        hessian = jax.hessian(loss)(weights)
        damped = hessian + jnp.eye(len(weights))
        return weights - jnp.linalg.solve(damped, jax.grad(loss)(weights)), None

    return jax.lax.scan(step, weights, length=steps)[0]


def main() -> None:
    t = jnp.linspace(0, 4, 40)
    counts = jnp.round(jnp.exp(line(jnp.array([2.0, 1.5, 0.7]), t)))

    def loss(weights: jax.Array) -> jax.Array:
        return poisson(Linearized.apply(line, weights, t), counts)

    def plain_loss(weights: jax.Array) -> jax.Array:
        return poisson(line(weights, t), counts)

    @jax.jit
    def products(start: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Returns J.T @ H @ J @ v, and `loss`'s Hessian times v in three ways."""
        J, H = jax.jacrev(line)(start, t), jax.hessian(poisson)(line(start, t), counts)
        reverse = jax.grad(lambda w: jnp.vdot(jax.grad(loss)(w), v))(start)
        return J.T @ H @ J @ v, jax.jvp(jax.grad(loss), (start,), (v,))[1], reverse, jax.hessian(loss)(start) @ v

    minimize, minimize_plain = (jax.jit(partial(newton, f, steps=20)) for f in (loss, plain_loss))
    for start in jnp.array([[1, 2, 1], [1, 2.2, 0.5], [1, 1, 1.5]]):
        dense, *others = products(start, jnp.array([1.0, -2.0, 0.5]))
        assert all(jnp.allclose(product, dense, rtol=1e-4) for product in others)
        assert jnp.allclose(jax.grad(loss)(start), jax.grad(plain_loss)(start), rtol=1e-4)

        lowest, lowest_of_hessian = (jnp.linalg.eigvalsh(jax.hessian(f)(start))[0] for f in (loss, plain_loss))
        found, astray = minimize(start), minimize_plain(start)
        print(f"from {start}: lowest eigenvalue {lowest:.2f}, of the Hessian {lowest_of_hessian:.2f}")
        print(f"  after 20 steps a loss of {plain_loss(found):.3f}, by the Hessian {plain_loss(astray):.3f}")
        assert lowest > 0 > lowest_of_hessian
        assert jnp.linalg.norm(jax.grad(plain_loss)(found)) < 1e-3
        assert not plain_loss(astray) < plain_loss(found) + 10


if __name__ == "__main__":
    main()
