"""A torch model and its port to flax, compared as a whole: the report names the first layer that deviates.

    pip install "jaxfn[torch]" flax
    python examples/port_a_model.py

The port has its channels last, and `load` returns its state from torch's arrays. `jaxfn.paritycheck` compares outputs
and the gradient of every parameter. Then the port is changed by one mistake, and the
check says in which layer it is, by its name in torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from flax import nnx

import jaxfn


class Residual(torch.nn.Module):
    """A convolution with normalization, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Original(torch.nn.Module):
    """The model of a torch repository."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, stride=2)
        self.blocks = torch.nn.Sequential(Residual(8), Residual(8))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(torch.nn.functional.gelu(self.stem(x)))
        return self.head(self.norm(x.mean((2, 3))))


class Block(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(channels, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, epsilon=1e-5, use_running_average=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(self.norm(self.conv(x)))


class Port(nnx.Module):
    """The port to flax. `epsilon` of the last normalization is 1e-6 in flax, if it is not passed."""

    def __init__(self, rngs: nnx.Rngs, epsilon: float = 1e-5, is_approximate: bool = False) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, padding="VALID", rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs), Block(8, rngs)])
        self.norm = nnx.LayerNorm(8, epsilon=epsilon, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)
        self.is_approximate = is_approximate

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.gelu(self.stem(x.transpose(0, 2, 3, 1)), approximate=self.is_approximate)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((1, 2))))


def load(port: Port, arrays: dict[str, jax.Array]) -> Port:
    """Copies the arrays of the original into flax's layouts, (in, out) and (height, width, in, out)."""
    for name, array in arrays.items():
        *path, kind = name.split(".")
        layer: Any = port
        for part in path:
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
        is_norm = hasattr(layer, "scale")
        if kind == "weight":
            axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}[array.ndim]
            (layer.scale if is_norm else layer.kernel).set_value(array.transpose(axes))
        elif kind != "num_batches_tracked":
            names = {"bias": "bias", "running_mean": "mean", "running_var": "var"}
            getattr(layer, names[kind]).set_value(array)
    return port


class Results(NamedTuple):
    right: jaxfn.reports.ParitycheckReport
    wrong_epsilon: jaxfn.reports.ParitycheckReport
    wrong_activation: jaxfn.reports.ParitycheckReport


def main() -> Results:
    torch.manual_seed(0)
    original = Original().eval()
    images = np.random.default_rng(0).standard_normal((4, 3, 9, 11)).astype(np.float32)

    def check(**mistake: Any) -> jaxfn.reports.ParitycheckReport:
        def apply(state: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state)(x)

        def load_state(arrays: dict[str, jax.Array]) -> Any:
            return nnx.state(load(Port(nnx.Rngs(0), **mistake), arrays))

        graphdef = nnx.graphdef(Port(nnx.Rngs(0), **mistake))
        return jaxfn.paritycheck(apply, original, [images], load=load_state, raise_exception=False)

    results = Results(check(), check(epsilon=1e-6), check(is_approximate=True))
    print(results.right)
    print(results.wrong_epsilon.first_deviation)
    print(results.wrong_activation.first_deviation)
    return results


if __name__ == "__main__":
    main()
