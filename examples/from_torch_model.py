"""A whole torch model in a sharded JAX training loop: snnTorch's spiking network on handwritten digits.

    pip install "jaxfn[examples,torch]" snntorch
    python examples/from_torch_model.py [--steps N]

The network is the convolutional one of snnTorch's tutorials, sized for these images. A spike is a step function, and
each neuron's gradient comes from the backward of a `torch.autograd.Function` in that package; `jaxfn.from_torch` takes
the module unchanged, and the package's loss too. It is trained twice, by torch and by JAX, from equal weights on equal
batches; JAX splits both batches and parameters over eight devices, which are virtual ones of the CPU. The parameters
that JAX has trained are then loaded into the torch module, and torch measures its accuracy.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import snntorch
import snntorch.functional
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits
from snntorch import surrogate
from torch import nn

import jaxfn

DEVICES = 8
BATCH = 64
RATE = 5e-3
TIME_STEPS = 5
TRAINED_ON = 1437  # of the 1,797 images

Params = dict[str, Any]
Batch = tuple[np.ndarray, np.ndarray]


class SpikingNet(nn.Module):
    """Two convolutions and a linear layer, with a layer of leaky integrate-and-fire neurons after each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.lif1 = nn.Conv2d(1, 16, 3, padding=1), neurons()
        self.conv2, self.lif2 = nn.Conv2d(16, 32, 3, padding=1), neurons()
        self.linear, self.lif3 = nn.Linear(32 * 2 * 2, 10), neurons()
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the membrane potentials of the ten classes at each time step: (time, batch, class)."""
        membrane1, membrane2, membrane3 = (lif.init_leaky() for lif in (self.lif1, self.lif2, self.lif3))
        potentials: list[torch.Tensor] = []
        for _ in range(TIME_STEPS):
            x, membrane1 = self.lif1(self.pool(self.conv1(images)), membrane1)
            x, membrane2 = self.lif2(self.pool(self.conv2(x.to(images))), membrane2)
            _, membrane3 = self.lif3(self.linear(x.to(images).flatten(1)), membrane3)
            potentials.append(membrane3)
        return torch.stack(potentials)


def neurons() -> nn.Module:
    """Returns a layer of neurons that spike where their potential exceeds a threshold, with a surrogate derivative."""
    return snntorch.Leaky(beta=0.5, learn_beta=True, spike_grad=surrogate.fast_sigmoid(slope=5))


def rate_loss(potentials: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes snnTorch's loss: cross entropy at each time step."""
    return snntorch.functional.ce_rate_loss()(potentials, labels).sum()


@dataclass
class Results:
    """The results of both training loops.

    Attributes:
      torch_losses, jax_losses: one per step.
      torch_accuracy: of the module that torch trained, on test digits.
      jax_accuracy: of the parameters that JAX trained, evaluated by JAX.
      loaded_accuracy: of the parameters that JAX trained, evaluated by torch after `net.load`.
      torch_seconds, jax_seconds: the median step.
      first_seconds: tracing by torch, translation and compilation, once.
      compilations: the number for the JAX step.
      parts: the number of shards of each parameter, by name.
    """

    torch_losses: np.ndarray
    jax_losses: np.ndarray
    torch_accuracy: float
    jax_accuracy: float
    loaded_accuracy: float
    torch_seconds: float
    jax_seconds: float
    first_seconds: float
    compilations: int
    parts: dict[str, int]

    @property
    def largest_difference(self) -> float:
        """The largest relative difference between the two loss curves."""
        return float(np.max(np.abs(self.jax_losses / self.torch_losses - 1)))


def make_batches(images: np.ndarray, labels: np.ndarray, steps: int) -> list[Batch]:
    """Returns random minibatches, for both libraries."""
    generator = np.random.default_rng(1)
    chosen = [generator.choice(len(images), BATCH, replace=False) for _ in range(steps)]
    return [(images[i], labels[i]) for i in chosen]


def train_torch(module: nn.Module, batches: Sequence[Batch]) -> tuple[list[float], list[float]]:
    """Trains the module in place, and returns the loss and the seconds of each step."""
    optimizer = torch.optim.Adam(module.parameters(), RATE)
    losses: list[float] = []
    seconds: list[float] = []
    for images, labels in batches:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = rate_loss(module(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def split(x: Any, mesh: Mesh) -> jax.Array:
    """Shards an array over the devices by its first axis that they divide, or replicates it if there is none."""
    axis = next((i for i, size in enumerate(x.shape) if size % DEVICES == 0), None)
    parts = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "devices")
    return jax.device_put(x, NamedSharding(mesh, parts))


def train_jax(net: Any, batches: Sequence[Batch]) -> tuple[list[float], list[float], Params, int]:
    """Trains with JAX, and returns losses and seconds, the parameters, and the number of compilations."""
    mesh = Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("devices",))
    optimizer = optax.adam(RATE)
    loss_of = jaxfn.from_torch(rate_loss)
    compilations = 0

    def loss(parameters: Params, buffers: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        potentials, _ = net.apply(parameters, buffers, images)  # the buffers are potentials, which each call resets
        return loss_of(potentials, labels)

    @jax.jit
    def step(parameters: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Params, Any]:
        nonlocal compilations
        compilations += 1  # a Python side effect: it happens when JAX traces the step, and not when it runs
        value, gradients = jax.value_and_grad(loss)(parameters, buffers, images, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return value, optax.apply_updates(parameters, updates), state

    parameters, state = jax.tree.map(lambda x: split(x, mesh), (net.parameters, optimizer.init(net.parameters)))
    buffers = net.buffers
    losses: list[float] = []
    seconds: list[float] = []
    for batch in batches:
        begin = time.perf_counter()
        images, labels = (split(x, mesh) for x in batch)
        value, parameters, state = step(parameters, state, images, labels)
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
    return losses, seconds, parameters, compilations


def accuracy(potentials: Any, labels: np.ndarray) -> float:
    """Returns how often the class with the highest summed potential is correct."""
    return float(np.mean(np.asarray(potentials).sum(0).argmax(-1) == labels))


def train_both(steps: int) -> Results:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8)
    batches = make_batches(images[:TRAINED_ON], labels[:TRAINED_ON], steps)
    test_images, test_labels = images[TRAINED_ON:], labels[TRAINED_ON:]

    torch.manual_seed(0)
    module = SpikingNet().double()
    net = jaxfn.from_torch(copy.deepcopy(module))
    torch_losses, torch_seconds = train_torch(module, batches)
    jax_losses, jax_seconds, parameters, compilations = train_jax(net, batches)

    potentials, _ = jax.jit(net.apply)(parameters, net.buffers, test_images)
    net.load(parameters)
    with torch.no_grad():
        by_torch, loaded = (m(torch.from_numpy(test_images)) for m in (module, net.torch_module))
    return Results(
        torch_losses=np.array(torch_losses),
        jax_losses=np.array(jax_losses),
        torch_accuracy=accuracy(by_torch, test_labels),
        jax_accuracy=accuracy(potentials, test_labels),
        loaded_accuracy=accuracy(loaded, test_labels),
        torch_seconds=statistics.median(torch_seconds[1:]),
        jax_seconds=statistics.median(jax_seconds[1:]),
        first_seconds=jax_seconds[0],
        compilations=compilations,
        parts={name: x.size // x.addressable_shards[0].data.size for name, x in parameters.items()},
    )


def main(argv: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(argv).steps
    # In single precision, rounding sometimes decides whether a neuron spikes, and the two loss curves diverge.
    with jax.enable_x64(True):
        results = train_both(steps)
    for i in range(0, steps, max(1, steps // 10)):
        print(f"step {i:4}: loss {results.torch_losses[i]:.6f} by torch, {results.jax_losses[i]:.6f} by JAX")
    print(f"largest difference of the two curves: {results.largest_difference:.1e} of the loss")
    assert results.largest_difference < 1e-4
    print(f"accuracy on other digits: {results.torch_accuracy:.3f} by torch, {results.jax_accuracy:.3f} by JAX")
    print(f"accuracy of the trained parameters, loaded into torch: {results.loaded_accuracy:.3f}")
    print(f"parts of each parameter, on {DEVICES} devices: {results.parts}")
    print(f"median step: {results.torch_seconds * 1e3:.1f} ms by torch, {results.jax_seconds * 1e3:.1f} ms by JAX")
    print(f"first step (torch traces, jaxfn translates, XLA compiles, once): {results.first_seconds:.1f} s")
    print(f"compilations: {results.compilations}")
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
