"""Find a wrong gradient: `gradcheck` names the mistake in a backward, and `find_nan` the line where a NaN appears.

You get two tools for a loss that does not decrease: one for wrong gradients, one for gradients that are NaN.

    pip install -e ".[plot]"
    python examples/journeys/wrong_gradient.py --picture wrong_gradient.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn


@jaxfn.function
def softmax(ctx, x: jax.Array) -> jax.Array:
    y = jax.nn.softmax(x)
    ctx.save_for_backward(y)
    return y


@softmax.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    (y,) = ctx.saved_tensors
    return grad_output * y * (1 - y)  # wrong: this is the derivative of a sigmoid


@jaxfn.function
def norm(ctx, x: jax.Array) -> jax.Array:
    y = jnp.sqrt((x * x).sum())
    ctx.save_for_backward(x, y)
    return y


@norm.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    x, y = ctx.saved_tensors
    return grad_output * x / y  # 0 / 0 for a vector of zeros


class Results(NamedTuple):
    report: jaxfn.reports.GradcheckReport
    origin: jaxfn.reports.NanOrigin | None


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description="Find a wrong gradient and a NaN.")
    parser.add_argument("--picture", help="the file to save heat maps of the Jacobians in, such as wrong_gradient.svg")
    options = parser.parse_args(arguments)

    report = jaxfn.gradcheck(softmax, np.linspace(-1, 1, 6), raise_exception=False)
    print(report)
    origin = jaxfn.find_nan(jax.grad(norm), jnp.zeros(3))
    print(f"\n{origin}")
    results = Results(report, origin)
    if options.picture:
        picture(results).savefig(options.picture)
    return results


def picture(results: Results) -> Any:
    """Returns the heat map of the wrong Jacobian, the right one, and their difference."""
    return results.report.plot()


if __name__ == "__main__":
    main()
