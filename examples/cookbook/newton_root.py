"""The root of an equation by Newton's method, differentiated by the implicit function theorem.

    python examples/cookbook/newton_root.py

The derivative of a root does not depend on how it was found: residual(x, parameters) = 0 determines it. The rule is one
linear system: forward mode solves it, and reverse mode its transpose.
Claim: Kepler's equation is solved to the last digits in five steps at most, and first and second derivatives, forward
and reverse, equal the formulas of astronomy books.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn

Residual = Callable[[jax.Array, Any], jax.Array]  # of x, shape (n,), and of parameters, any pytree: shape (n,)


def newton(residual: Residual, start: jax.Array, parameters: Any, most: int) -> tuple[jax.Array, jax.Array]:
    """Returns the root and the number of steps."""

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, change, count = state
        small = 4 * jnp.finfo(x.dtype).eps * (1 + jnp.max(jnp.abs(x)))
        return (jnp.max(jnp.abs(change)) > small) & (count < most)

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, _, count = state
        change = jnp.linalg.solve(jax.jacfwd(residual)(x, parameters), residual(x, parameters))
        return x - change, change, count + 1

    x, _, count = jax.lax.while_loop(unfinished, step, (start, jnp.full_like(start, jnp.inf), 0))
    return x, count


def root_forward(ctx, residual: Residual, start: jax.Array, parameters: Any, most: int = 50) -> jax.Array:
    x, _ = newton(residual, start, parameters, most)
    ctx.save_for_backward(x=x, parameters=parameters, residual=residual)
    return x


def root_backward(ctx, grad_x: jax.Array) -> dict[str, Any]:
    s = ctx.saved_variables
    jacobian = jax.jacfwd(s.residual)(s.x, s.parameters)
    _, pullback = jax.vjp(lambda parameters: s.residual(s.x, parameters), s.parameters)
    return {"parameters": pullback(-jnp.linalg.solve(jacobian.T, grad_x))[0]}  # where it started has no gradient


def root_jvp(ctx, _residual: None, _start: jax.Array, tangent: Any, _most: None) -> jax.Array:
    s = ctx.saved_variables
    _, moved = jax.jvp(lambda parameters: s.residual(s.x, parameters), (s.parameters,), (tangent,))
    return -jnp.linalg.solve(jax.jacfwd(s.residual)(s.x, s.parameters), moved)


root = jaxfn.autograd_function(forward=root_forward, backward=root_backward)
root.jvp(root_jvp)


def kepler(anomaly: jax.Array, orbit: dict[str, jax.Array]) -> jax.Array:
    """Returns Kepler's equation, which is zero at the eccentric anomaly of a mean anomaly."""
    return anomaly - orbit["eccentricity"] * jnp.sin(anomaly) - orbit["mean"]


def eccentric_anomaly(mean: jax.Array, eccentricity: jax.Array) -> jax.Array:
    return root(kepler, mean[None], {"mean": mean, "eccentricity": eccentricity})[0]


def main() -> None:
    with jax.enable_x64(True):
        mean, e = jnp.linspace(0.1, 3.1, 13), jnp.linspace(0.05, 0.6, 13)
        E = jax.jit(jax.vmap(eccentric_anomaly))(mean, e)
        orbits = {"mean": mean, "eccentricity": e}
        _, steps = jax.jit(jax.vmap(lambda orbit: newton(kepler, orbit["mean"][None], orbit, 50)))(orbits)
        by_mean, by_e = jax.jit(jax.vmap(jax.grad(eccentric_anomaly, (0, 1))))(mean, e)
        forward = jax.jit(jax.vmap(jax.jacfwd(eccentric_anomaly)))(mean, e)
        second, mixed = (
            jax.jit(jax.vmap(derivative(jax.grad(eccentric_anomaly))))(mean, e) for derivative in (jax.grad, jax.jacfwd)
        )
        slope = 1 / (1 - e * jnp.cos(E))
        errors = {
            "the equation": E - e * jnp.sin(E) - mean,
            "d/dM": by_mean - slope,
            "d/de": by_e - slope * jnp.sin(E),
            "d/dM, forward": forward - slope,
            "d2/dM2": second + e * jnp.sin(E) * slope**3,
            "d2/dM2, mixed": mixed + e * jnp.sin(E) * slope**3,
        }
        for name, error in errors.items():
            print(f"{name:14} off by {jnp.max(jnp.abs(error)):.0e}")
            assert jnp.max(jnp.abs(error)) < 1e-12, name
        print(f"in {int(steps.min())} to {int(steps.max())} steps")
        assert steps.max() <= 5


if __name__ == "__main__":
    main()
