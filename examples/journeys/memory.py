"""Save memory: list what an MLP saves for its backward pass, and save less with a Function or a checkpoint policy.

You get the bytes by Function side by side, without running anything: `residuals` traces the loss only. Then the loss
runs, and the gradients of the Functions are compared with the exact one.

GELU in 8 bits alone stores more than a checkpoint with `dots_saveable`: the next product needs GELU's output for the
gradient of its weight, so one float32 array for each layer remains. `dots_saveable` saves the products, and computes
GELU again. A Function of GELU and the product after it does both: it saves its input in 8 bits, from which it computes
GELU again.

    pip install -e ".[plot]"
    python examples/journeys/memory.py --picture memory.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfn

BATCH, WIDTH, LAYERS = 1024, 512, 4


def to_8_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = jnp.abs(x).max() / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


@jaxfn.function
def gelu(ctx, x: jax.Array) -> jax.Array:
    """GELU that saves its input in 8 bits: backward needs the slope, which varies slowly."""
    quantized, scale = to_8_bits(x)
    ctx.save_for_backward(quantized=quantized, scale=scale)
    return jax.nn.gelu(x)


@gelu.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    saved = ctx.saved_variables
    x = saved.quantized.astype(grad_output.dtype) * saved.scale
    return jax.vjp(jax.nn.gelu, x)[1](grad_output)[0]


@jaxfn.function
def gelu_product(ctx, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The product of GELU and a weight, which saves its input in 8 bits, and not GELU's output."""
    quantized, scale = to_8_bits(x)
    ctx.save_for_backward(quantized=quantized, scale=scale, weight=weight)
    return jax.nn.gelu(x) @ weight


@gelu_product.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, jax.Array]:
    saved = ctx.saved_variables
    x = saved.quantized.astype(grad_output.dtype) * saved.scale
    activation, pullback = jax.vjp(jax.nn.gelu, x)
    return pullback(grad_output @ saved.weight.T)[0], activation.T @ grad_output


def loss(activation: Callable[[jax.Array], jax.Array], weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = activation(x @ weight)
    return jnp.mean(x**2)


def loss_of_products(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    x = x @ weights[0]
    for weight in weights[1:]:
        x = gelu_product(x, weight)
    return jnp.mean(gelu(x) ** 2)


WITH_FUNCTIONS = {"8-bit gelu": partial(loss, gelu), "8-bit gelu and product": loss_of_products}


def compare() -> jaxfn.reports.ResidualComparison:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    # The alternatives to a Function: a checkpoint, which recomputes everything, or all but the products.
    policies = {"checkpoint": None, "dots_saveable": jax.checkpoint_policies.dots_saveable}
    plain = jaxfn.residuals(partial(loss, jax.nn.gelu), weights, x, argnums=0, policies=policies)
    tables = {"jax.nn.gelu": plain["no checkpoint"]} | {name: plain[name] for name in policies}
    functions = {name: jaxfn.residuals(f, weights, x, argnums=0) for name, f in WITH_FUNCTIONS.items()}
    return jaxfn.reports.ResidualComparison(tables | functions)


def gradient_errors() -> dict[str, float]:
    """Returns how far the gradients are from the exact one, in the norm over all weights."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5 for key in keys[1:]]
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    exact = jnp.stack(jax.jit(jax.grad(partial(loss, jax.nn.gelu)))(weights, x))
    gradients = {name: jnp.stack(jax.jit(jax.grad(f))(weights, x)) for name, f in WITH_FUNCTIONS.items()}
    return {name: float(jnp.linalg.norm(g - exact) / jnp.linalg.norm(exact)) for name, g in gradients.items()}


class Results(NamedTuple):
    comparison: jaxfn.reports.ResidualComparison
    gradient_errors: dict[str, float]  # relative


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description="Compare what is saved for the backward pass.")
    parser.add_argument("--picture", help="the file to save a bar chart of the bytes in, such as memory.svg")
    options = parser.parse_args(arguments)

    results = Results(compare(), gradient_errors())
    print(results.comparison)
    for name, error in results.gradient_errors.items():
        print(f"relative error of the gradient with {name}: {error:.1e}")
    if options.picture:
        picture(results).savefig(options.picture)
    return results


def picture(results: Results) -> Any:
    """Returns a bar chart of the bytes by Function, for each way to save memory."""
    from matplotlib.figure import Figure

    tables = results.comparison
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    panel: Any = figure.subplots()
    names = sorted({name for table in tables.values() for name in table.bytes_by_function})
    left = [0.0] * len(tables)
    for name in names:
        sizes = [table.bytes_by_function.get(name, 0) / 2**20 for table in tables.values()]
        panel.barh(list(tables), sizes, left=left, label=f"saved by {name}")
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    panel.set(xlabel="MiB saved for the backward pass")
    panel.invert_yaxis()
    panel.legend()
    return figure


if __name__ == "__main__":
    main()
