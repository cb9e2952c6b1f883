"""A fused layer norm: one kernel forward, one backward, and each reads a row once.

    python examples/kernels/layer_norm.py

Why a Function: JAX cannot differentiate a Pallas kernel, and the derivative is worth a separate kernel, which computes
the gradients of a row, the weight and the bias from a single read of the row. Saved for backward are `x`, the weight,
and two numbers for each row: its mean, and one over its standard deviation.

The gradients of weight and bias are sums over rows. Steps of the grid run concurrently on a GPU and cannot add to one
array, so each writes the sum over its own rows, and JAX adds these up.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import blocks
import comparison
import jax
import jax.numpy as jnp
from blocks import Array, Block, load, numbers, rows, store, whole, within
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import jaxfn

ENTRIES = 8192  # of a block, unless 16 rows have more


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over the last axis.

    Args:
      x: of any shape, its rows short enough for a block of them.
      weight: of the size of the last axis.
      bias: of the size of the last axis.
      eps: is added to the variance.
    """
    if not weight.shape == bias.shape == x.shape[-1:]:
        raise ValueError(f"expected a weight and a bias of {x.shape[-1:]}, got {weight.shape} and {bias.shape}")
    y, _, _ = LayerNorm.apply(x.reshape(1, -1, x.shape[-1]), weight[None, None], bias[None, None], eps)
    return y.reshape(x.shape)


def plain(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Computes the layer norm in plain JAX, for comparison."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps) * weight + bias


class LayerNorm(jaxfn.Function):
    """The layer norm of x (batch, rows, width), weight and bias (batch, 1, width); a batch of 1 is shared.

    Returns y, and each row's mean and 1 / standard deviation, (batch, rows, 1), for `backward`.
    """

    @staticmethod
    def forward(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float):
        batch, (num_rows, width) = blocks.batch_of(x, weight, bias), x.shape[1:]
        size = _rows_in_block(num_rows, width)
        return blocks.call(
            partial(_forward_kernel, num_rows=num_rows, width=width, eps=eps),
            steps=pl.cdiv(num_rows, size),
            inputs=[rows(x, size), whole(rows(weight, 1)), whole(rows(bias, 1))],
            outputs=[
                rows(Array((batch, num_rows, width), x.dtype), size),
                numbers(Array((batch, num_rows, 1), jnp.float32), size),
                numbers(Array((batch, num_rows, 1), jnp.float32), size),
            ],
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x=inputs[0], weight=inputs[1], mean=mean, rstd=rstd)

    @staticmethod
    @jaxfn.once_differentiable
    def backward(ctx, grad_y: jax.Array, _mean: jax.Array, _rstd: jax.Array):
        saved = ctx.saved_variables
        grad_x, grad_weight, grad_bias = LayerNormGradient.apply(saved.x, saved.weight, saved.mean, saved.rstd, grad_y)
        # One for each element and block of rows; jaxfn sums over the elements that share a weight.
        return grad_x, grad_weight.sum(1), grad_bias.sum(1), None

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(LayerNorm.apply, info, in_dims, args)


class LayerNormGradient(jaxfn.Function):
    """The gradients. It is a Function for its batching rule, and has no derivative."""

    @staticmethod
    def forward(x: jax.Array, weight: jax.Array, mean: jax.Array, rstd: jax.Array, grad_y: jax.Array):
        batch, (num_rows, width) = blocks.batch_of(x, weight, mean, rstd, grad_y), x.shape[1:]
        size = _rows_in_block(num_rows, width)
        steps = pl.cdiv(num_rows, size)
        sums = Array((batch, steps, 1, width), jnp.float32)
        of_step = Block(sums, (None, 1, blocks.padded(width)), lambda step: (step, 0, 0))
        return blocks.call(
            partial(_backward_kernel, num_rows=num_rows, width=width),
            steps=steps,
            inputs=[
                rows(x, size),
                whole(rows(weight, 1)),
                numbers(mean, size),
                numbers(rstd, size),
                rows(grad_y, size),
            ],
            outputs=[rows(Array((batch, num_rows, width), x.dtype), size), of_step, of_step],
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(LayerNormGradient.apply, info, in_dims, args)


def _rows_in_block(num_rows: int, width: int) -> int:
    return blocks.padded(num_rows, max(16, ENTRIES // blocks.padded(width)))


def _forward_kernel(
    x_ref, weight_ref, bias_ref, y_ref, mean_ref, rstd_ref, *, num_rows: int, width: int, eps: float
) -> None:
    num_left = num_rows - pl.program_id(1) * x_ref.shape[0]
    x = load(x_ref, num_left, width).astype(jnp.float32)
    weight, bias = load(weight_ref, 1, width), load(bias_ref, 1, width)
    mean = jnp.sum(x, axis=1, keepdims=True) / width
    centered = jnp.where(within(x.shape, num_left, width), x - mean, 0)
    variance = jnp.sum(centered * centered, axis=1, keepdims=True) / width
    rstd = jax.lax.rsqrt(variance + eps)
    store(y_ref, centered * rstd * weight + bias, num_left, width)
    store(mean_ref, mean, num_left, 1)
    store(rstd_ref, rstd, num_left, 1)


def _backward_kernel(
    x_ref, weight_ref, mean_ref, rstd_ref, grad_y_ref, grad_x_ref, grad_weight_ref, grad_bias_ref,
    *, num_rows: int, width: int,
) -> None:  # fmt: skip
    num_left = num_rows - pl.program_id(1) * x_ref.shape[0]
    x = load(x_ref, num_left, width).astype(jnp.float32)
    grad_y = load(grad_y_ref, num_left, width).astype(jnp.float32)
    mean, rstd = load(mean_ref, num_left, 1), load(rstd_ref, num_left, 1)
    normalized = jnp.where(within(x.shape, num_left, width), (x - mean) * rstd, 0)
    store(grad_weight_ref, jnp.sum(grad_y * normalized, axis=0, keepdims=True), 1, width)
    store(grad_bias_ref, jnp.sum(grad_y, axis=0, keepdims=True), 1, width)
    scaled = grad_y * load(weight_ref, 1, width)
    # A row's mean and deviation depend on every entry of it.
    by_mean = jnp.sum(scaled, axis=1, keepdims=True) / width
    by_deviation = jnp.sum(scaled * normalized, axis=1, keepdims=True) / width
    store(grad_x_ref, rstd * (scaled - by_mean - normalized * by_deviation), num_left, width)


class Results(NamedTuple):
    differences: dict[str, float]  # from plain JAX
    saved: int  # bytes
    saved_by_plain: int


def main(num_rows: int = 600, width: int = 200) -> Results:
    x, (weight, bias) = (
        jax.random.normal(jax.random.key(0), (num_rows, width)),
        jax.random.normal(jax.random.key(1), (2, width)),
    )
    args = x, weight, bias
    by_rows, shared = PartitionSpec("devices"), PartitionSpec()
    differences = comparison.differences(layer_norm, plain, args, (1, None, 0), (by_rows, shared, shared), by_rows)
    saved, saved_by_plain = (comparison.residual_bytes(f, args) for f in (layer_norm, plain))
    assert max(differences.values()) < 1e-4
    assert saved == x.nbytes + weight.nbytes + 2 * 4 * num_rows

    print(f"layer norm of {num_rows} rows of {width}, by a kernel on {blocks.platform()}")
    comparison.show(differences)
    print(f"  saved for backward: {saved:,} bytes; by plain JAX: {saved_by_plain:,}")
    return Results(differences, saved, saved_by_plain)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
