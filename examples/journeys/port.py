"""Port a torch repository: convert its model unchanged, prove the parity, train it on JAX, and load the weights back.

You get the whole way there and back: a torch module with a custom autograd Function trains under `jit`, and torch ends
up with the trained weights.

    pip install torch==2.13.0 && pip install -e ".[examples,plot]"
    python examples/journeys/port.py --picture port.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn

try:
    import optax
    import torch
except ModuleNotFoundError as error:
    needed = 'pip install torch==2.13.0 && pip install -e ".[examples]"'
    raise SystemExit(f"{error}. Install what this needs: {needed}") from None

STEPS = 150


class Spike(torch.autograd.Function):
    """A spiking activation with a surrogate gradient, as torch repositories have it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output / (1 + 4 * x.abs()) ** 2


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(2, 64)
        self.decode = torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.decode(Spike.apply(self.encode(x))).squeeze(-1)


@jaxfn.function
def spike(ctx, x: jax.Array) -> jax.Array:
    """The Function, ported to jaxfn."""
    ctx.save_for_backward(x)
    return (x > 0).astype(x.dtype)


@spike.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    (x,) = ctx.saved_tensors
    return grad_output / (1 + 4 * jnp.abs(x)) ** 2


class Results(NamedTuple):
    parity: jaxfn.reports.ParitycheckReport
    losses: list[float]
    difference: float  # between torch's outputs after loading and JAX's


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description="Port a torch repository.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--picture", help="the file to save the learning curve in, such as port.svg")
    options = parser.parse_args(arguments)

    # 1. Prove the port of the Function: outputs, gradients and second derivatives on equal numbers.
    inputs = [np.linspace(-2, 2, 10, dtype=np.float32)]
    parity = jaxfn.paritycheck(spike, Spike, inputs)

    # 2. Convert the model. Its Function is differentiated by the backward that its author wrote.
    torch.manual_seed(0)
    module = Network()
    net = jaxfn.from_torch(module)

    # 3. Train it to tell whether two numbers have equal signs.
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (512, 2)).astype(np.float32)
    y = np.float32(x[:, 0] * x[:, 1] > 0)
    optimizer = optax.adam(1e-2)

    def loss(parameters: Any) -> jax.Array:
        logits, _ = net.apply(parameters, net.buffers, x)
        return optax.sigmoid_binary_cross_entropy(logits, y).mean()

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    parameters, state = net.parameters, optimizer.init(net.parameters)
    losses: list[float] = []
    for _ in range(options.steps):
        parameters, state, value = step(parameters, state)
        losses.append(float(value))

    # 4. Load the weights back into torch.
    net.load(parameters, net.buffers)
    ours, _ = net.apply(parameters, net.buffers, x)
    theirs = module(torch.from_numpy(x)).detach().numpy()
    results = Results(parity, losses, float(np.abs(np.asarray(ours) - theirs).max()))
    print(parity)
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; torch with the loaded weights differs by {results.difference:.1e}"
    )
    if options.picture:
        picture(results).savefig(options.picture)
    return results


def picture(results: Results) -> Any:
    """Returns a figure of the loss over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    panel: Any = figure.subplots()
    panel.plot(results.losses)
    panel.set(xlabel="step on JAX", ylabel="training loss")
    return figure


if __name__ == "__main__":
    main()
