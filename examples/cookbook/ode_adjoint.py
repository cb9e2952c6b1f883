"""The solution of an ordinary differential equation, whose gradient is integrated backwards in time.

    python examples/cookbook/ode_adjoint.py

Autodiff of a solver saves the states of all its steps. The adjoint method saves the last one: state and gradient follow
a differential equation themselves, from the end to the start. That is one custom rule for the whole solver.
Claim: the saved bytes do not depend on the number of steps, and the gradients by state, weights and times approach the
exact ones by the solver's own fourth order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn

Field = Callable[[jax.Array, Any, Any], Any]  # dy/dt, of the time, the state and the weights, any pytrees


def runge_kutta(field: Field, state: Any, weights: Any, start: jax.Array, end: jax.Array, steps: int) -> Any:
    h = (end - start) / steps

    def shifted(y: Any, by: jax.Array, slope: Any) -> Any:
        return jax.tree.map(lambda y, k: y + by * k, y, slope)

    def step(y: Any, i: jax.Array) -> tuple[Any, None]:
        t = start + i * h
        k1 = field(t, y, weights)
        k2 = field(t + h / 2, shifted(y, h / 2, k1), weights)
        k3 = field(t + h / 2, shifted(y, h / 2, k2), weights)
        k4 = field(t + h, shifted(y, h, k3), weights)
        slope = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, k1, k2, k3, k4)
        return shifted(y, h, slope), None

    return jax.lax.scan(step, state, jnp.arange(steps))[0]


class Solve(jaxfn.Function):
    """The state at time `end`, from the state at time `start`."""

    @staticmethod
    def forward(ctx, field: Field, state: Any, weights: Any, start: jax.Array, end: jax.Array, steps: int) -> Any:
        last = runge_kutta(field, state, weights, start, end, steps)
        ctx.field, ctx.steps = field, steps
        ctx.last, ctx.weights, ctx.start, ctx.end = last, weights, start, end
        return last

    @staticmethod
    def backward(ctx, grad_last: Any) -> tuple[None, Any, Any, jax.Array, jax.Array, None]:
        def slope_of_all(t: jax.Array, all: tuple[Any, Any, Any], weights: Any) -> tuple[Any, Any, Any]:
            state, grad_state, _ = all
            slope, pullback = jax.vjp(lambda y, w: ctx.field(t, y, w), state, weights)
            return slope, *jax.tree.map(jnp.negative, pullback(grad_state))

        def along(t: jax.Array, state: Any, grad_state: Any) -> jax.Array:
            """Returns the derivative of the loss along the solution, from the gradient of the state."""
            slopes = ctx.field(t, state, ctx.weights)
            return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, grad_state, slopes))

        last = ctx.last, grad_last, jax.tree.map(jnp.zeros_like, ctx.weights)
        first, grad_state, grad_weights = runge_kutta(slope_of_all, last, ctx.weights, ctx.end, ctx.start, ctx.steps)
        grad_start, grad_end = -along(ctx.start, first, grad_state), along(ctx.end, ctx.last, grad_last)
        return None, grad_state, grad_weights, grad_start, grad_end, None


def pendulum(t: jax.Array, state: dict[str, jax.Array], weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns dy/dt of a damped pendulum under a growing force."""
    push = -weights["stiffness"] * jnp.sin(state["angle"]) - weights["damping"] * state["speed"] + 0.1 * t
    return {"angle": state["speed"], "speed": push}


def main() -> None:
    with jax.enable_x64(True):
        state = {"angle": jnp.array(1.0), "speed": jnp.array(0.0)}
        args = state, {"stiffness": jnp.array(2.0), "damping": jnp.array(0.1)}, jnp.array(0.5), jnp.array(3.0)

        def error(steps: int) -> float:
            """Returns the largest error of the gradients, compared with autodiff through many steps."""
            grads = jax.jit(jax.grad(lambda args: Solve.apply(pendulum, *args, steps)["angle"]))(args)
            exact = jax.jit(jax.grad(lambda args: runge_kutta(pendulum, *args, 2000)["angle"]))(args)
            return max(float(jnp.abs(a - b)) for a, b in zip(*map(jax.tree.leaves, (grads, exact)), strict=True))

        errors = [error(steps) for steps in (20, 40)]
        saved = [jaxfn.residuals(lambda *a: Solve.apply(pendulum, *a, n), *args).total_bytes for n in (20, 2000)]
        saved_by_autodiff = jaxfn.residuals(lambda *a: runge_kutta(pendulum, *a, 2000), *args).total_bytes
        print(f"gradients off by {errors[0]:.1e} with 20 steps, by {errors[1]:.1e} with 40")
        print(f"saved with 20 and with 2000 steps: {saved} bytes; by autodiff through 2000: {saved_by_autodiff:,}")
        assert errors[0] < 1e-3 and 12 < errors[0] / errors[1] < 20  # 2**4 is the fourth order
        assert saved[0] == saved[1] < saved_by_autodiff / 1000


if __name__ == "__main__":
    main()
