"""A torch Function from a package in a jitted JAX training loop: entmax's sparsemax loss on handwritten digits.

    pip install torch entmax
    python examples/from_torch.py [--steps N]

The entmax package defines the loss as a `torch.autograd.Function`, forward and backward. `jaxfn.from_torch` takes that
class unchanged. The classifier is trained twice, by torch and by JAX, from equal parameters on equal batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from entmax.losses import SparsemaxLossFunction as TorchSparsemaxLoss
from sklearn.datasets import load_digits

import jaxfn

HIDDEN = 64
BATCH = 128
RATE = 0.5

SparsemaxLoss = jaxfn.from_torch(TorchSparsemaxLoss)

Params = dict[str, Any]
Batch = tuple[np.ndarray, np.ndarray]


@dataclass
class Results:
    """The results of both training loops.

    Attributes:
      torch_losses, jax_losses: one per step.
      torch_seconds, jax_seconds: the median step.
      first_seconds: tracing by torch, translation and compilation, once.
      accuracy: of JAX's classifier on the digits it was trained on.
      compilations: the number for the JAX step.
    """

    torch_losses: np.ndarray
    jax_losses: np.ndarray
    torch_seconds: float
    jax_seconds: float
    first_seconds: float
    accuracy: float
    compilations: int

    @property
    def largest_difference(self) -> float:
        """The largest difference between the two loss curves."""
        return float(np.max(np.abs(self.torch_losses - self.jax_losses)))


def init_params(seed: int) -> Params:
    """Returns the weights of a hidden layer and an output layer."""
    generator = np.random.default_rng(seed)
    sizes = {"hidden": (64, HIDDEN), "output": (HIDDEN, 10)}
    return {name: (generator.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for name, s in sizes.items()}


def make_batches(images: np.ndarray, labels: np.ndarray, steps: int) -> list[Batch]:
    """Returns random minibatches, for both libraries."""
    generator = np.random.default_rng(1)
    chosen = [generator.choice(len(images), BATCH, replace=False) for _ in range(steps)]
    return [(images[i], labels[i]) for i in chosen]


def train_torch(params: Params, batches: Sequence[Batch]) -> tuple[list[float], list[float]]:
    """Trains with torch, and returns the loss and the seconds of each step."""
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in params.items()}
    losses: list[float] = []
    seconds: list[float] = []
    for x, y in batches:
        begin = time.perf_counter()
        hidden = torch.tanh(torch.from_numpy(x) @ tensors["hidden"])
        loss = TorchSparsemaxLoss.apply(hidden @ tensors["output"], torch.from_numpy(y), None).mean()
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        with torch.no_grad():
            for tensor, gradient in zip(tensors.values(), gradients, strict=True):
                tensor -= RATE * gradient
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Computes the classifier's logits."""
    return jnp.tanh(x @ params["hidden"]) @ params["output"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes entmax's loss, which has entmax's own backward."""
    return SparsemaxLoss.apply(logits(params, x), y, None).mean()


def train_jax(params: Params, batches: Sequence[Batch]) -> tuple[list[float], list[float], Params, int]:
    """Trains with JAX, and returns losses and seconds, the parameters, and the number of compilations."""
    compilations = 0

    @jax.jit
    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Params]:
        nonlocal compilations
        compilations += 1  # a Python side effect: it happens when JAX traces the step, and not when it runs
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, gradients)

    losses: list[float] = []
    seconds: list[float] = []
    for x, y in batches:
        begin = time.perf_counter()
        value, params = step(params, x, y)
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
    return losses, seconds, params, compilations


def main(argv: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(argv)

    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    batches = make_batches(images, labels, args.steps)
    # Labels are 32-bit where JAX's x64 setting is off. Converted here, they need no conversion at each step.
    for_jax = [(x, y.astype(jax.dtypes.canonicalize_dtype(y.dtype))) for x, y in batches]
    torch_losses, torch_seconds = train_torch(init_params(0), batches)
    jax_losses, jax_seconds, params, compilations = train_jax(init_params(0), for_jax)
    results = Results(
        torch_losses=np.array(torch_losses),
        jax_losses=np.array(jax_losses),
        torch_seconds=statistics.median(torch_seconds[1:]),
        jax_seconds=statistics.median(jax_seconds[1:]),
        first_seconds=jax_seconds[0],
        accuracy=float(np.mean(np.argmax(logits(params, images), -1) == labels)),
        compilations=compilations,
    )
    for i in range(0, args.steps, max(1, args.steps // 6)):
        print(f"step {i:4}: loss {torch_losses[i]:.6f} by torch, {jax_losses[i]:.6f} by JAX")
    print(f"largest difference of the two curves: {results.largest_difference:.1e}")
    print(f"accuracy on these digits: {results.accuracy:.3f}")
    print(f"median step: {results.torch_seconds * 1e3:.2f} ms by torch, {results.jax_seconds * 1e3:.2f} ms by JAX")
    print(f"first step (torch traces, jaxfn translates, XLA compiles, once): {results.first_seconds:.1f} s")
    print(f"compilations: {results.compilations}")
    return results


if __name__ == "__main__":
    main()
