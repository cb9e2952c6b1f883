"""A deep residual network whose activations are recomputed from its output, and not saved.

    python examples/cookbook/reversible_blocks.py

Each block adds a function of one half of the features to the other half, so it can be inverted. A Function for the
stack of blocks saves the last activation, and its backward goes back from there.
Claim: apart from the weights, one activation is saved, for 4 blocks as for 64, and the gradients are those of plain
autodiff up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

import jaxfn

Half = jax.Array
Layer = Callable[[jax.Array, Half], Half]  # of the weights of one layer and one half of the features


def layer(weight: jax.Array, x: Half) -> Half:
    return jnp.tanh(x @ weight)


class ReversibleStack(jaxfn.Function):
    """x + layer(v, y), then y + layer(w, x), for each pair of weights along the first axes of `first` and `second`."""

    @staticmethod
    def forward(ctx, layer: Layer, first: jax.Array, second: jax.Array, x: Half, y: Half) -> tuple[Half, Half]:
        x, y = plain_stack(layer, first, second, x, y)
        ctx.layer = layer
        ctx.save_for_backward(first, second, x, y)  # inputs and outputs, nothing in between
        return x, y

    @staticmethod
    def backward(ctx, grad_x: Half, grad_y: Half) -> tuple[None, jax.Array, jax.Array, Half, Half]:
        first, second, x, y = ctx.saved_tensors

        def undo(state: tuple[Half, Half, Half, Half], weights: tuple[jax.Array, jax.Array]):
            x, y, grad_x, grad_y = state
            v, w = weights
            change, pullback = jax.vjp(ctx.layer, w, x)
            y = y - change
            grad_w, more = pullback(grad_y)
            grad_x = grad_x + more
            change, pullback = jax.vjp(ctx.layer, v, y)
            x = x - change
            grad_v, more = pullback(grad_x)
            return (x, y, grad_x, grad_y + more), (grad_v, grad_w)

        state, grads = jax.lax.scan(undo, (x, y, grad_x, grad_y), (first, second), reverse=True)
        return None, *grads, *state[2:]


def plain_stack(layer: Layer, first: jax.Array, second: jax.Array, x: Half, y: Half) -> tuple[Half, Half]:
    def block(state: tuple[Half, Half], weights: tuple[jax.Array, jax.Array]):
        x, y = state
        x = x + layer(weights[0], y)
        return (x, y + layer(weights[1], x)), None

    return jax.lax.scan(block, (x, y), (first, second))[0]


def main(batch: int = 128, width: int = 16) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.normal(keys[0], (2, batch, width))

    def loss(stack: Callable[..., tuple[Half, Half]], weights: jax.Array) -> jax.Array:
        out, other = stack(layer, *weights, x, y)
        return jnp.mean(out**2) + jnp.mean(out * other)

    saved: dict[int, list[int]] = {}
    for blocks in (4, 64):
        weights = jax.random.normal(keys[1], (2, blocks, width, width)) / width**0.5
        stacks = ReversibleStack.apply, plain_stack
        grad, expected = (jax.jit(jax.grad(partial(loss, stack)))(weights) for stack in stacks)
        difference = jnp.max(jnp.abs(grad - expected)) / jnp.max(jnp.abs(expected))
        # Both save the part of the last activations that autodiff of the loss needs.
        saved[blocks] = [
            jaxfn.residuals(lambda w: stack(layer, *w, x, y), weights).total_bytes - weights.nbytes for stack in stacks
        ]
        print(f"{blocks:2} blocks: gradients off by {difference:.0e}; saved {saved[blocks][0]:,} bytes of activations, "
              f"by plain autodiff {saved[blocks][1]:,}")  # fmt: skip
        assert difference < 1e-3
    assert saved[4][0] == saved[64][0] == x.nbytes + y.nbytes
    assert saved[64][1] > 64 * saved[64][0]


if __name__ == "__main__":
    main()
