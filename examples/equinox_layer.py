"""An equinox layer whose output is the solution of an equation, with the gradient of that solution.

    python examples/equinox_layer.py

The output z of the layer solves z = tanh(W z + x). The Function takes the whole module, saves no iterates, and returns
a gradient for the module by the implicit function theorem, for any number of iterations.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxfn


class Cell(eqx.Module):
    """The map of which z is the fixed point."""

    weight: jax.Array

    def __call__(self, z: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.weight @ z + x)


class Solution(jaxfn.Function):
    """The solution z of z = cell(z, x)."""

    @staticmethod
    def forward(ctx, cell: Cell, x: jax.Array) -> jax.Array:
        z = jax.lax.fori_loop(0, 100, lambda _, z: cell(z, x), jnp.zeros_like(x))
        ctx.cell = cell
        ctx.save_for_backward(z, x)
        return z

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[Cell, jax.Array]:
        z, x = ctx.saved_tensors
        _, pull = jax.vjp(lambda cell, z, x: cell(z, x), ctx.cell, z, x)
        # u = grad_output + u (d cell / d z), by the iteration of forward.
        u = jax.lax.fori_loop(0, 100, lambda _, u: grad_output + pull(u)[1], grad_output)
        of_cell, _, of_x = pull(u)
        return of_cell, of_x


class Results(NamedTuple):
    """The results of the example."""

    saved_bytes: int
    difference: float
    first_loss: float
    last_loss: float


def unrolled(cell: Cell, x: jax.Array) -> jax.Array:
    """Solves by a loop, which JAX differentiates through every iteration."""
    return jax.lax.scan(lambda z, _: (cell(z, x), None), jnp.zeros_like(x), length=100)[0]


def loss(cell: Cell, x: jax.Array, y: jax.Array, solve=Solution.apply) -> jax.Array:
    """Returns the mean squared error over a batch."""
    return jnp.mean((jax.vmap(solve, in_axes=(None, 0))(cell, x) - y) ** 2)


def main() -> Results:
    """Fits a cell to the outputs of another one."""
    keys = jax.random.split(jax.random.key(0), 3)
    truth, cell = (Cell(0.3 * jax.random.normal(key, (6, 6)) / 6**0.5) for key in keys[:2])
    x = jax.random.normal(keys[2], (64, 6))
    y = jax.vmap(unrolled, in_axes=(None, 0))(truth, x)

    expected = eqx.filter_grad(loss)(cell, x, y, unrolled)
    difference = jnp.abs(eqx.filter_grad(loss)(cell, x, y).weight - expected.weight).max()
    saved_bytes = jaxfn.residuals(lambda cell: Solution.apply(cell, x[0]), cell).total_bytes

    optimizer = optax.adam(0.02)
    state = optimizer.init(cell)

    @eqx.filter_jit
    def step(cell, state):
        value, gradients = eqx.filter_value_and_grad(loss)(cell, x, y)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(cell, updates), state, value

    losses = []
    for _ in range(200):
        cell, state, value = step(cell, state)
        losses.append(float(value))
    results = Results(saved_bytes, float(difference), losses[0], losses[-1])
    print(f"saved: {results.saved_bytes} bytes; gradients differ from the unrolled ones by {results.difference:.1e}")
    print(f"loss {results.first_loss:.4f} before, {results.last_loss:.1e} after")
    assert results.saved_bytes == 4 * (6 * 6 + 6 + 6)  # the weight, z and x, for any number of iterations
    assert results.difference < 1e-6 and results.last_loss < 1e-3 * results.first_loss
    return results


if __name__ == "__main__":
    main()
