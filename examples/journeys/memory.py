"""Save memory: list what an MLP saves for its backward pass, and save less with a Function or a checkpoint policy.

You get the bytes by Function side by side, without running anything: `residuals` traces the loss only.

    python examples/journeys/memory.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn

BATCH, WIDTH, LAYERS = 1024, 512, 4


@jaxfn.function
def gelu(ctx, x: jax.Array) -> jax.Array:
    """GELU that saves its input in 8 bits: backward needs the slope, which varies slowly."""
    scale = jnp.abs(x).max() / 127
    ctx.save_for_backward(quantized=jnp.round(x / scale).astype(jnp.int8), scale=scale)
    return jax.nn.gelu(x)


@gelu.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    saved = ctx.saved_variables
    x = saved.quantized.astype(grad_output.dtype) * saved.scale
    return jax.vjp(jax.nn.gelu, x)[1](grad_output)[0]


def loss(activation: Callable[[jax.Array], jax.Array], weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = activation(x @ weight)
    return jnp.mean(x**2)


def compare() -> jaxfn.reports.ResidualComparison:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    # The alternatives to a Function: a checkpoint, which recomputes everything, or all but the products.
    policies = {"checkpoint": None, "dots_saveable": jax.checkpoint_policies.dots_saveable}
    plain = jaxfn.residuals(partial(loss, jax.nn.gelu), weights, x, argnums=0, policies=policies)
    tables = {"jax.nn.gelu": plain["no checkpoint"]} | {name: plain[name] for name in policies}
    return jaxfn.reports.ResidualComparison(
        tables | {"8-bit gelu": jaxfn.residuals(partial(loss, gelu), weights, x, argnums=0)}
    )


def main() -> jaxfn.reports.ResidualComparison:
    comparison = compare()
    print(comparison)
    return comparison


def picture() -> Any:
    """Returns a bar chart of the bytes by Function, for each way to save memory."""
    from matplotlib.figure import Figure

    results = compare()
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    panel: Any = figure.subplots()
    names = sorted({name for table in results.values() for name in table.bytes_by_function})
    left = [0.0] * len(results)
    for name in names:
        sizes = [table.bytes_by_function.get(name, 0) / 2**20 for table in results.values()]
        panel.barh(list(results), sizes, left=left, label=f"saved by {name}")
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    panel.set(xlabel="MiB saved for the backward pass")
    panel.invert_yaxis()
    panel.legend()
    return figure


if __name__ == "__main__":
    main()
