"""A flax.nnx layer with ternary weights, by a Function with a custom gradient.

    python examples/nnx_layer.py

The Function takes the layer's `nnx.Param`s unchanged, in a dict. It is trained under `nnx.jit` and
`nnx.value_and_grad`, and run as an ensemble under `nnx.vmap`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxfn


@jaxfn.function
def ternary_matmul(ctx, x: jax.Array, parameters: dict[str, Any]) -> jax.Array:
    """Computes x @ w, where w has the values -scale, 0 and scale."""
    weight, scale = parameters["weight"][...], parameters["scale"][...]
    signs = jnp.clip(jnp.round(weight / scale), -1, 1)
    ctx.save_for_backward(x, signs, scale)
    return x @ (signs * scale)


@ternary_matmul.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    x, signs, scale = ctx.saved_tensors
    of_weight = x.T @ grad_output
    # Straight through for the weights. The scale is a factor of all of them.
    return grad_output @ (signs * scale).T, {"weight": of_weight, "scale": jnp.sum(of_weight * signs)}


class TernaryLinear(nnx.Module):
    """A linear layer with ternary weights."""

    def __init__(self, num_in: int, num_out: int, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(0.3 * jax.random.normal(rngs.params(), (num_in, num_out)))
        self.scale = nnx.Param(jnp.asarray(0.3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return ternary_matmul(x, {"weight": self.weight, "scale": self.scale})


class Results(NamedTuple):
    """The results of the example."""

    first_loss: float
    last_loss: float
    num_levels: int
    ensemble_shape: tuple[int, ...]


def loss(layer: TernaryLinear, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean squared error."""
    return jnp.mean((layer(x) - y) ** 2)


@nnx.jit
def step(layer: TernaryLinear, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """Takes one step of training."""
    value, gradients = nnx.value_and_grad(loss)(layer, x, y)
    optimizer.update(layer, gradients)
    return value


def main() -> Results:
    """Trains a layer on the outputs of a ternary one."""
    x = jax.random.normal(jax.random.key(0), (256, 12))
    y = x @ (0.7 * jax.random.randint(jax.random.key(1), (12, 5), -1, 2))
    layer = TernaryLinear(12, 5, rngs=nnx.Rngs(2))
    optimizer = nnx.Optimizer(layer, optax.adam(0.02), wrt=nnx.Param)
    losses = [float(step(layer, optimizer, x, y)) for _ in range(300)]

    make = nnx.vmap(lambda key: TernaryLinear(12, 5, rngs=nnx.Rngs(key)))
    ensemble = make(jax.random.split(jax.random.key(3), 4))
    outputs = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(ensemble, x)

    levels = jnp.unique(jnp.clip(jnp.round(layer.weight[...] / layer.scale[...]), -1, 1))
    results = Results(losses[0], losses[-1], len(levels), outputs.shape)
    print(f"loss {results.first_loss:.3f} before, {results.last_loss:.2e} after, with {results.num_levels} levels")
    print(f"an ensemble's outputs: {results.ensemble_shape}")
    assert results.last_loss < 1e-3 * results.first_loss and results.num_levels == 3
    return results


if __name__ == "__main__":
    main()
