"""Optimal transport by Sinkhorn's iteration, differentiated at its solution and not through its steps.

    python examples/cookbook/sinkhorn.py

JAX cannot differentiate a `while` loop in reverse, and autodiff of a loop of fixed length saves an array for each step.
The plan is determined by its marginals, so by the implicit function theorem one linear system determines its
derivative.
Claim: the gradients are those through 500 steps, with a hundredth of the residuals, and second derivatives are right.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

import jaxfn


class Transport(jaxfn.Function):
    """The plan with row sums a and column sums b that minimizes <plan, cost> - epsilon * entropy(plan)."""

    @staticmethod
    def forward(ctx, cost: jax.Array, a: jax.Array, b: jax.Array, epsilon: float) -> jax.Array:
        def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            f, g, steps = state
            excess = jnp.abs(jnp.exp((f[:, None] + g - cost) / epsilon).sum(1) - a).sum()
            return (excess > 20 * jnp.finfo(cost.dtype).eps) & (steps < 10_000)

        def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            return *sinkhorn_step(cost, a, b, epsilon, state[1]), state[2] + 1

        f, g, _ = jax.lax.while_loop(unfinished, step, (jnp.zeros_like(a), jnp.zeros_like(b), 0))
        plan = jnp.exp((f[:, None] + g - cost) / epsilon)
        ctx.save_for_backward(plan)
        ctx.epsilon = epsilon
        return plan

    @staticmethod
    def backward(ctx, grad_plan: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        # plan = exp((f + g - cost) / epsilon), where f and g follow from the sums, by a system with the matrix
        # [diag a, plan; plan.T, diag b]. Shifting a constant from g to f changes nothing, so the sum of grad_b is 0.
        (plan,) = ctx.saved_tensors
        a, b = plan.sum(1), plan.sum(0)
        weighted = grad_plan * plan
        schur = jnp.diag(b) - plan.T @ (plan / a[:, None]) + 1 / b.size
        grad_b = jnp.linalg.solve(schur, weighted.sum(0) - plan.T @ (weighted.sum(1) / a))
        grad_a = (weighted.sum(1) - plan @ grad_b) / a
        grad_cost = plan * (grad_a[:, None] + grad_b - grad_plan) / ctx.epsilon
        return grad_cost, grad_a, grad_b, None


def sinkhorn_step(cost: jax.Array, a: jax.Array, b: jax.Array, epsilon: float, g: jax.Array):
    f = epsilon * (jnp.log(a) - logsumexp((g - cost) / epsilon, axis=1))
    return f, epsilon * (jnp.log(b) - logsumexp((f[:, None] - cost) / epsilon, axis=0))


def unrolled(cost: jax.Array, a: jax.Array, b: jax.Array, epsilon: float, steps: int) -> jax.Array:
    """Returns the plan by a loop of fixed length, for comparison."""
    state = jnp.zeros_like(a), jnp.zeros_like(b)
    f, g = jax.lax.scan(lambda s, _: (sinkhorn_step(cost, a, b, epsilon, s[1]), None), state, length=steps)[0]
    return jnp.exp((f[:, None] + g - cost) / epsilon)


def main(n: int = 30, m: int = 20, epsilon: float = 0.1, steps: int = 500) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    cost = jnp.abs(jax.random.uniform(keys[0], (n, 1)) - jax.random.uniform(keys[1], (m,)))
    a, b = jax.nn.softmax(jax.random.normal(keys[2], (n,))), jnp.full(m, 1 / m)
    weight = jax.random.normal(keys[3], (n, m))

    def implicit(cost: jax.Array) -> jax.Array:
        return jnp.sum(weight * Transport.apply(cost, a, b, epsilon))

    def plain(cost: jax.Array) -> jax.Array:
        return jnp.sum(weight * unrolled(cost, a, b, epsilon, steps))

    grad, expected = jax.jit(jax.grad(implicit))(cost), jax.jit(jax.grad(plain))(cost)
    difference = jnp.max(jnp.abs(grad - expected)) / jnp.max(jnp.abs(expected))
    # Second derivatives follow too: backward uses the plan, whose derivative is this rule again.
    curvature = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(implicit)(x), weight)))(cost)
    expected = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(plain)(x), weight)))(cost)
    second = jnp.max(jnp.abs(curvature - expected)) / jnp.max(jnp.abs(expected))
    saved, saved_by_plain = (jaxfn.residuals(f, cost).total_bytes for f in (implicit, plain))
    print(f"gradient off by {difference:.0e}, second derivative by {second:.0e}")
    print(f"saved for backward: {saved:,} bytes; by {steps} steps of plain JAX: {saved_by_plain:,}")
    assert difference < 1e-4 and second < 1e-3
    assert 100 * saved < saved_by_plain


if __name__ == "__main__":
    main()
