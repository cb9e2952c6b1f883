"""Less memory for residuals, by saved-tensor hooks: bfloat16, int8 with a scale, host memory.

    python examples/residual_hooks.py

The Functions are differentiated under several saved-tensor hooks. The output lists the bytes of residuals, by kind of
memory, and the difference of the gradients from those without hooks.
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
    """Computes input @ weight; saves the input. The weight is in memory already, so it is an attribute."""

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
    """Quantizes to 255 levels, with a scale for each row, so that small rows are as precise as large ones."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127 + 1e-12
    return jnp.round(x / scale).astype(jnp.int8), scale


def from_int8(packed: tuple[jax.Array, jax.Array]) -> jax.Array:
    codes, scale = packed
    return codes.astype(jnp.float32) * scale


# The contexts. The hooks are functions of the module, so that entering a context again does not trace again.
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


class Measurement(NamedTuple):
    device: int  # bytes of residuals except weights
    host: int
    gradient_error: float  # relative, over all weights


def measure(block: Callable[[], AbstractContextManager[None]], weights: list[jax.Array], x: jax.Array) -> Measurement:
    """Measures the bytes of residuals under a context, and the error of the gradients."""
    exact = jax.grad(loss)(weights, x)
    with block():
        _, pullback = jax.vjp(loss, weights, x)
    residuals = [
        leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array) and leaf.shape != weights[0].shape
    ]
    on_host = sum(leaf.nbytes for leaf in residuals if leaf.sharding.memory_kind == "pinned_host")
    on_device = sum(leaf.nbytes for leaf in residuals) - on_host
    ours, _ = pullback(jnp.float32(1))
    squares = sum(jnp.sum((a - b) ** 2) for a, b in zip(ours, exact, strict=True))
    return Measurement(on_device, on_host, float(jnp.sqrt(squares / sum(jnp.sum(b**2) for b in exact))))


def main() -> dict[str, Measurement]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5 for key in keys[1:]]
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    results = {name: measure(block, weights, x) for name, block in BLOCKS.items()}
    print(f"saved for backward by {LAYERS} layers of {WIDTH} units, for {BATCH} examples")
    for name, result in results.items():
        sizes = f"{result.device / 1024:8,.0f} KiB on the device  {result.host / 1024:8,.0f} KiB on the host"
        print(f"  {name:12}  {sizes}  gradients off by {result.gradient_error:.1e}")
    return results


if __name__ == "__main__":
    main()
