"""Write a kernel: a Pallas softmax with a backward kernel, checked against plain JAX in float32 and bfloat16.

You get a kernel with its derivative, and a check that finds what breaks kernels without a tolerance to choose.

    pip install -e ".[plot]"
    python examples/journeys/kernel.py --picture kernel.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import jaxfn

INTERPRET = jax.default_backend() == "cpu"


def softmax_kernel(x_ref: Any, y_ref: Any) -> None:
    x = x_ref[...].astype(jnp.float32)
    exponentials = jnp.exp(x - x.max(-1, keepdims=True))
    y_ref[...] = (exponentials / exponentials.sum(-1, keepdims=True)).astype(y_ref.dtype)


def gradient_kernel(y_ref: Any, g_ref: Any, dx_ref: Any) -> None:
    y, g = y_ref[...].astype(jnp.float32), g_ref[...].astype(jnp.float32)
    dx_ref[...] = (y * (g - (y * g).sum(-1, keepdims=True))).astype(dx_ref.dtype)


@jaxfn.function
def softmax(ctx, x: jax.Array) -> jax.Array:
    """Softmax over the last axis."""
    y = pl.pallas_call(softmax_kernel, out_shape=jax.typeof(x), interpret=INTERPRET)(x)
    ctx.save_for_backward(y)  # the output, not the input: backward needs nothing else
    return y


@softmax.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    (y,) = ctx.saved_tensors
    return pl.pallas_call(gradient_kernel, out_shape=jax.typeof(y), interpret=INTERPRET)(y, grad_output)


def careless(x: jax.Array) -> jax.Array:
    """Softmax that overflows, for comparison."""
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


def reference(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


class Results(NamedTuple):
    kernel: jaxfn.reports.KernelcheckReport
    careless: jaxfn.reports.KernelcheckReport


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description="Check a Pallas kernel.")
    parser.add_argument("--picture", help="the file to save a chart of the errors in, such as kernel.svg")
    options = parser.parse_args(arguments)

    shape = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    good = jaxfn.kernelcheck(softmax, reference, shape)
    bad = jaxfn.kernelcheck(careless, reference, shape, raise_exception=False)
    print(good)
    print("\nThe careless version fails", ", ".join(bad.failed_checks))
    results = Results(good, bad)
    if options.picture:
        picture(results).savefig(options.picture)
    return results


def picture(results: Results) -> Any:
    """Returns a figure of the errors and the allowed errors of outputs and gradients."""
    from matplotlib.figure import Figure

    rows = [row for row in results.kernel.rows if row.check in ("outputs", "gradients")]
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    panel: Any = figure.subplots()
    positions = range(len(rows))
    panel.barh(
        [p + 0.2 for p in positions], [row.allowed_norm for row in rows], 0.4, label="allowed", color="lightgray"
    )
    panel.barh([p - 0.2 for p in positions], [row.norm for row in rows], 0.4, label="kernel")
    panel.set(xscale="log", xlabel="root mean square of the errors", yticks=list(positions))
    panel.set_yticklabels([f"{row.what.split(' (')[0]}, {row.dtype}" for row in rows])
    panel.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    main()
