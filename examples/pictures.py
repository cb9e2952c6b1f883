"""Draws the pictures of README.md and the site: `python -m examples.pictures [NAME...]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
JOURNEYS = ("train", "kernel", "wrong_gradient", "memory", "training_job")


def surrogate() -> Any:
    """Returns a figure of a spike, its derivative by JAX, and the Function's own rule."""
    from matplotlib.figure import Figure

    @jaxfn.function
    def spike(ctx: Any, x: jax.Array) -> jax.Array:
        ctx.save_for_backward(x)
        return jnp.where(x > 0, 1.0, 0.0)

    @spike.backward
    def _(ctx: Any, grad_output: jax.Array) -> jax.Array:
        (x,) = ctx.saved_tensors
        return grad_output / (1 + 4 * jnp.abs(x)) ** 2

    x = np.linspace(-2, 2, 401)
    by_jax = jax.vmap(jax.grad(lambda x: jnp.where(x > 0, 1.0, 0.0)))(x)
    by_rule = jax.vmap(jax.grad(spike))(x)
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    panel: Any = figure.subplots()
    panel.plot(x, spike(x), color="gray", label="spike(x)")
    panel.plot(x, by_jax, "--", label="jax.grad of its operations")
    panel.plot(x, by_rule, label="jax.grad of the Function")
    panel.set(xlabel="x")
    panel.legend()
    return figure


def main(names: list[str] | None = None) -> list[Path]:
    """Draws pictures, by default all, and returns their paths."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "jaxfn"  # equal pictures are equal files
    FOLDER.mkdir(exist_ok=True)
    paths: list[Path] = []
    for name in names or ["surrogate", *JOURNEYS]:
        module = "examples.pictures" if name == "surrogate" else f"examples.journeys.{name}"
        draw = surrogate if name == "surrogate" else importlib.import_module(module).picture
        paths.append(FOLDER / f"{name}.svg")
        draw().savefig(paths[-1], metadata={"Date": None})
        print(paths[-1])
    return paths


if __name__ == "__main__":
    main(sys.argv[1:])
