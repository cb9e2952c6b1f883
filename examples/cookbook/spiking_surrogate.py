"""A network of spiking neurons in a `scan`, trained through its spikes by a surrogate derivative.

    python examples/cookbook/spiking_surrogate.py

A neuron's potential leaks, adds up its input, and is set back by each spike. A spike is a step function, whose
derivative is zero or infinite.
Why a Function: forward returns exact zeros and ones, and backward uses the slope of a fast sigmoid (Zenke and Ganguli,
2018).
Claim: handwritten digits are classified by counts of spikes, more than 90% of them right; autodiff of the step leaves
the weights of the hidden neurons without any gradient; the spikes save one number for each neuron and step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxfn


class Spike(jaxfn.Function):
    """1 where the potential is above 0, and 0 elsewhere."""

    @staticmethod
    def forward(ctx, potential: jax.Array, slope: float) -> jax.Array:
        ctx.save_for_backward(potential=potential)
        ctx.slope = slope
        return (potential > 0).astype(potential.dtype)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
        return grad_output / (1 + ctx.slope * jnp.abs(ctx.saved_variables.potential)) ** 2, None


def step_function(potential: jax.Array, slope: float) -> jax.Array:
    """Returns spikes in plain JAX, for comparison."""
    return (potential > 0).astype(potential.dtype)


def neurons(potential: jax.Array, current: jax.Array, leak=0.9, slope=5.0, spike=Spike.apply) -> tuple[jax.Array, ...]:
    """Computes one step of leaky neurons with threshold 1: their new potentials and their spikes."""
    set_back = jax.lax.stop_gradient(potential > 1)
    potential = leak * potential + current - set_back
    return potential, spike(potential - 1, slope)


Weights = list[jax.Array]


def counts(weights: Weights, x: jax.Array, steps: int = 20, spike=Spike.apply) -> jax.Array:
    """Counts the spikes of each output neuron while each image is shown for some steps."""

    def step(potentials: list[jax.Array], _: None) -> tuple[list[jax.Array], jax.Array]:
        spikes, after = x, []
        for weight, potential in zip(weights, potentials, strict=True):
            potential, spikes = neurons(potential, spikes @ weight, spike=spike)
            after.append(potential)
        return after, spikes

    start = [jnp.zeros((x.shape[0], weight.shape[1])) for weight in weights]
    return jax.lax.scan(step, start, length=steps)[1].sum(0)


def loss(weights: Weights, x: jax.Array, labels: jax.Array, spike=Spike.apply) -> jax.Array:
    logits = counts(weights, x, spike=spike)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(width: int = 64, steps: int = 20) -> None:
    data = load_digits()
    x, labels = jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [0.1 * jax.random.normal(key, shape) for key, shape in zip(keys, [(64, width), (width, 10)], strict=True)]
    plain = jax.grad(loss)(weights, x[:100], labels[:100], step_function)[0]
    saved = jaxfn.residuals(loss, weights, x[:1], labels[:1], argnums=0).bytes_by_function["Spike"]

    optimizer = optax.adam(1e-2)

    def train(state: tuple[Weights, optax.OptState], _: None) -> tuple[tuple[Weights, optax.OptState], None]:
        weights, memory = state
        updates, memory = optimizer.update(jax.grad(loss)(weights, x[:1200], labels[:1200]), memory)
        return (optax.apply_updates(weights, updates), memory), None

    start = weights, optimizer.init(weights)
    weights, _ = jax.jit(lambda state: jax.lax.scan(train, state, length=60)[0])(start)
    predicted = counts(weights, x[1200:]).argmax(1)
    accuracy = jnp.mean(predicted == labels[1200:])
    print(f"accuracy by counts of spikes: {accuracy:.1%}; saved for one image: {saved:,} bytes")
    assert accuracy > 0.9
    assert jnp.all(plain == 0)
    assert saved == 4 * steps * (width + 10)


if __name__ == "__main__":
    main()
