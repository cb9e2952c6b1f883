"""Functions without a class: `@jaxfn.function`, under `jax.grad`, `jax.vmap` and `jax.jit`.

    python examples/decorator.py

A logistic regression uses two functions with a custom backward. The loss is written for one example; JAX differentiates
it, maps it over the examples and compiles the result.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxfn


@jaxfn.function
def clip_gradient(ctx, x: jax.Array, limit: float) -> jax.Array:
    """Returns x unchanged; its gradient is clipped to the length `limit`."""
    ctx.limit = limit
    return x


@clip_gradient.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
    norm = jnp.linalg.norm(grad_output)
    return grad_output * jnp.minimum(1, ctx.limit / norm), None  # None: a Python number has no gradient


@jaxfn.function
def softplus(x: jax.Array) -> jax.Array:
    """Computes log(1 + exp(x)) as torch does."""
    return jnp.where(x > 20, x, jnp.log1p(jnp.exp(x)))


# With setup_context, forward is a plain function without a ctx.
@softplus.setup_context
def _(ctx, inputs: tuple[jax.Array], output: jax.Array) -> None:
    (x,) = inputs
    ctx.save_for_backward(x)


@softplus.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    (x,) = ctx.saved_tensors
    return grad_output * jax.nn.sigmoid(x)


def plain_softplus(x: jax.Array) -> jax.Array:
    """Computes `softplus` in plain JAX, whose derivative is nan where exp(x) overflows."""
    return jnp.where(x > 20, x, jnp.log1p(jnp.exp(x)))


def loss(weight: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
    """Returns the logistic loss of one example, whose label is 1 or -1."""
    return softplus(-label * (clip_gradient(weight, 1.0) @ x))


# One gradient for each example, each clipped separately, as differentially private training needs them.
per_example_gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))


class Results(NamedTuple):
    weight: jax.Array
    x: jax.Array
    labels: jax.Array
    gradients: jax.Array  # one row for each example
    slope: float  # of softplus at 100
    plain_slope: float


def main() -> Results:
    keys = jax.random.split(jax.random.key(0), 3)
    weight = jax.random.normal(keys[0], (3,))
    x = jax.random.normal(keys[1], (5, 3))
    labels = jax.random.rademacher(keys[2], (5,), jnp.float32)
    gradients = per_example_gradients(weight, x, labels)
    slope = float(jax.grad(softplus)(100.0))
    plain_slope = float(jax.grad(plain_softplus)(100.0))
    print(f"lengths of the per-example gradients  {jnp.linalg.norm(gradients, axis=1)}")
    print(f"slope of softplus at 100              {slope} (JAX's autodiff: {plain_slope})")
    return Results(weight, x, labels, gradients, slope, plain_slope)


if __name__ == "__main__":
    main()
