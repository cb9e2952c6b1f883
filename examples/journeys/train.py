"""Train with a Function: a classifier with ternary weights, from data to a saved model, with its learning curves.

You get a whole training loop to copy: minibatches, optax, evaluation, a progress bar and a checkpoint file, around one
custom gradient.

    python examples/journeys/train.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxfn

HIDDEN, BATCH, EPOCHS = 128, 64, 30
Params = dict[str, jax.Array]


@jaxfn.function
def ternary(ctx, weight: jax.Array) -> jax.Array:
    """Rounds a weight to -s, 0 or s, where s is its mean magnitude."""
    scale = jnp.abs(weight).mean()
    return scale * jnp.clip(jnp.round(weight / scale), -1, 1)


@ternary.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    return grad_output  # straight through: JAX's own derivative of rounding is zero


def predict(params: Params, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ ternary(params["w1"]) + params["b1"])
    return hidden @ ternary(params["w2"]) + params["b2"]


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


@jax.jit
def accuracy(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return (predict(params, images).argmax(-1) == labels).mean()


class Results(NamedTuple):
    losses: list[float]
    accuracies: list[float]
    restored_accuracy: float


def save(path: Path, params: Params) -> None:
    np.savez(path, **{name: np.asarray(value) for name, value in params.items()})


def restore(path: Path) -> Params:
    with np.load(path) as file:
        return {name: jnp.asarray(file[name]) for name in file}


def main(epochs: int = EPOCHS) -> Results:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(np.float32(images / 16), np.int32(labels), test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)

    keys = jax.random.split(jax.random.key(0))
    he_normal = jax.nn.initializers.he_normal()
    params = {"w1": he_normal(keys[0], (64, HIDDEN)), "b1": jnp.zeros(HIDDEN)}
    params |= {"w2": he_normal(keys[1], (HIDDEN, 10)), "b2": jnp.zeros(10)}
    optimizer = optax.adam(2e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    losses: list[float] = []
    accuracies: list[float] = []
    generator = np.random.default_rng(0)
    progress = tqdm(range(epochs), desc="training", unit="epoch")
    for _ in progress:
        batches = generator.permutation(len(train_images))[: len(train_images) // BATCH * BATCH].reshape(-1, BATCH)
        values = []
        for batch in batches:
            params, state, value = step(params, state, train_images[batch], train_labels[batch])
            values.append(value)
        losses.append(float(jnp.mean(jnp.stack(values))))
        accuracies.append(float(accuracy(params, test_images, test_labels)))
        progress.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "ternary.npz", params)
        restored = restore(Path(folder) / "ternary.npz")
    results = Results(losses, accuracies, float(accuracy(restored, test_images, test_labels)))
    print(f"test accuracy {results.accuracies[-1]:.3f}, restored from the file {results.restored_accuracy:.3f}")
    return results


def picture() -> Any:
    """Returns a figure of loss and accuracy over the epochs."""
    from matplotlib.figure import Figure

    results = main()
    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(results.losses)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.plot(results.accuracies)
    right.set(xlabel="epoch", ylabel="test accuracy")
    return figure


if __name__ == "__main__":
    main()
