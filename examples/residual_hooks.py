"""Less memory for what is kept between forward and backward: bfloat16, int8 with a scale, host memory.

    python examples/residual_hooks.py

The same Functions, unchanged, are differentiated under different saved-tensor hooks. Printed is what the linearized
network holds on to, by kind of memory, and how far the gradients are from those without hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxfn

LAYERS, BATCH, WIDTH = 8, 512, 128


class Gelu(jaxfn.Function):
    """The activation x * sigmoid(1.702 x); saves its input."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        ctx.save_for_backward(x)
        return x * jax.nn.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        (x,) = ctx.saved_tensors
        s = jax.nn.sigmoid(1.702 * x)
        return grad_output * (s + 1.702 * x * s * (1 - s))


class Linear(jaxfn.Function):
    """input @ weight; saves the input for the weight's gradient. The weight is there anyway, so it is an attribute."""

    @staticmethod
    def forward(ctx, input: jax.Array, weight: jax.Array) -> jax.Array:
        ctx.save_for_backward(input)
        ctx.weight = weight  # attributes do not pass the hooks
        return input @ weight

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, jax.Array]:
        (input,) = ctx.saved_tensors
        return grad_output @ ctx.weight.T, input.T @ grad_output


def to_bfloat16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def from_bfloat16(packed: jax.Array) -> jax.Array:
    return packed.astype(jnp.float32)


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """255 levels for each row, with the row's own scale: large rows do not cost small ones their digits."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127 + 1e-12
    return jnp.round(x / scale).astype(jnp.int8), scale


def from_int8(packed: tuple[jax.Array, jax.Array]) -> jax.Array:
    codes, scale = packed
    return codes.astype(jnp.float32) * scale


# How each block is opened. The hooks are functions of the module, so that entering a block again traces nothing anew.
BLOCKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no hooks": nullcontext,
    "bfloat16": lambda: jaxfn.saved_tensors_hooks(to_bfloat16, from_bfloat16),
    "int8": lambda: jaxfn.saved_tensors_hooks(to_int8, from_int8),
    "host memory": jaxfn.save_on_host,
}


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = Gelu.apply(Linear.apply(x, weight))
    return jnp.mean(x**2)


class Kept(NamedTuple):
    device: int  # bytes besides the weights
    host: int
    gradient_error: float  # relative, over all weights


def measure(block: Callable[[], AbstractContextManager[None]], weights: list[jax.Array], x: jax.Array) -> Kept:
    """What is kept for the backward pass inside this block, and what the gradients are worth."""
    exact = jax.grad(loss)(weights, x)
    with block():
        _, pullback = jax.vjp(loss, weights, x)
    kept = [
        leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array) and leaf.shape != weights[0].shape
    ]
    on_host = sum(leaf.nbytes for leaf in kept if leaf.sharding.memory_kind == "pinned_host")
    on_device = sum(leaf.nbytes for leaf in kept) - on_host
    ours, _ = pullback(jnp.float32(1))
    squares = sum(jnp.sum((a - b) ** 2) for a, b in zip(ours, exact, strict=True))
    return Kept(on_device, on_host, float(jnp.sqrt(squares / sum(jnp.sum(b**2) for b in exact))))


def main() -> dict[str, Kept]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5 for key in keys[1:]]
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    results = {name: measure(block, weights, x) for name, block in BLOCKS.items()}
    print(f"kept for backward by {LAYERS} layers of {WIDTH} units, for {BATCH} examples")
    for name, kept in results.items():
        sizes = f"{kept.device / 1024:8,.0f} KiB on the device  {kept.host / 1024:8,.0f} KiB on the host"
        print(f"  {name:12}  {sizes}  gradients off by {kept.gradient_error:.1e}")
    return results


if __name__ == "__main__":
    main()
