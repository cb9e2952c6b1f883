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
JOURNEYS = ("train", "port", "kernel", "wrong_gradient", "memory", "training_job")


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


def split_kernel() -> Any:
    """Returns a figure of the parts of x, w, x @ w and the gradient of w, with the devices on which each is."""
    from matplotlib.figure import Figure

    mesh = jax.make_mesh((4, 2), ("rows", "columns"), devices=jax.devices()[:8])
    specs = {
        "x (batch d)": ((16, 8), ("rows", "columns")),
        "w (d hidden)": ((8, 4), ("columns", None)),
        "x @ w (batch hidden)\nadded up over columns": ((16, 4), ("rows", None)),
        "gradient of w (d hidden)\nadded up over rows": ((8, 4), ("columns", None)),
    }
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    for panel, (title, (shape, spec)) in zip(figure.subplots(1, 4), specs.items(), strict=True):
        parts: dict[tuple[int, int], list[int]] = {}
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        for device, (rows, columns) in sharding.devices_indices_map(shape).items():
            parts.setdefault((rows.start or 0, columns.start or 0), []).append(device.id)
        height, width = sharding.shard_shape(shape)
        for (row, column), devices in parts.items():
            color = f"C{list(parts).index((row, column))}"
            panel.fill_between([column, column + width], row, row + height, color=color, alpha=0.25, edgecolor="black")
            panel.text(column + width / 2, row + height / 2, ", ".join(map(str, devices)), ha="center", va="center")
        panel.set(xlim=(0, 8), ylim=(16, 0), xticks=[], yticks=[], aspect="equal")
        panel.set_title(title, fontsize=8)
        panel.axis("off")
    return figure


OWN = {"surrogate": surrogate, "split_kernel": split_kernel}


def main(names: list[str] | None = None) -> list[Path]:
    """Draws pictures, by default all, and returns their paths."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "jaxfn"  # equal pictures are equal files
    FOLDER.mkdir(exist_ok=True)
    paths: list[Path] = []
    for name in names or [*OWN, *JOURNEYS]:
        if name in OWN:
            figure = OWN[name]()
        else:
            journey = importlib.import_module(f"examples.journeys.{name}")
            figure = journey.picture(journey.main([]))
        paths.append(FOLDER / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        print(paths[-1])
    return paths


if __name__ == "__main__":
    main(sys.argv[1:])
