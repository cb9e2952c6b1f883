"""Train with a Function: a classifier with ternary weights, from data to a saved model, with its learning curves.

You get a whole training loop to copy: minibatches, optax, evaluation, a progress bar and a checkpoint file, around one
custom gradient. At the end it is compared with the same network without that gradient, and without rounding.

    pip install -e ".[examples,plot]"
    python examples/journeys/train.py --picture train.svg
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn

try:
    import optax
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f'{error}. Install what this needs: pip install -e ".[examples]"') from None

HIDDEN, BATCH, EPOCHS = 128, 64, 30
Params = dict[str, jax.Array]


def plain_rounding(weight: jax.Array) -> jax.Array:
    """Rounds a weight to -s, 0 or s, where s is its mean magnitude."""
    scale = jnp.abs(weight).mean()
    return scale * jnp.clip(jnp.round(weight / scale), -1, 1)


@jaxfn.function
def ternary(ctx, weight: jax.Array) -> jax.Array:
    """Rounds a weight, and passes its gradient straight through: JAX's own derivative of rounding is zero."""
    return plain_rounding(weight)


@ternary.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    return grad_output


class Results(NamedTuple):
    params: Params
    losses: list[float]
    accuracies: list[float]  # on the test images, after each epoch


def save(path: Path, params: Params) -> None:
    np.savez(path, **{name: np.asarray(value) for name, value in params.items()})


def restore(path: Path) -> Params:
    with np.load(path) as file:
        return {name: jnp.asarray(file[name]) for name in file}


def load_data() -> list[jax.Array]:
    """Returns the images for training and for testing, and their labels."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(np.float32(images / 16), np.int32(labels), test_size=0.2, random_state=0, stratify=labels)
    return [jnp.asarray(array) for array in split]


def train(quantize: Callable[[jax.Array], jax.Array], epochs: int, name: str) -> Results:
    train_images, test_images, train_labels, test_labels = load_data()

    def predict(params: Params, images: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(images @ quantize(params["w1"]) + params["b1"])
        return hidden @ quantize(params["w2"]) + params["b2"]

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()

    @jax.jit
    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def accuracy(params: Params) -> jax.Array:
        return (predict(params, test_images).argmax(-1) == test_labels).mean()

    keys = jax.random.split(jax.random.key(0))
    he_normal = jax.nn.initializers.he_normal()
    params = {"w1": he_normal(keys[0], (64, HIDDEN)), "b1": jnp.zeros(HIDDEN)}
    params |= {"w2": he_normal(keys[1], (HIDDEN, 10)), "b2": jnp.zeros(10)}
    optimizer = optax.adam(2e-3)
    state = optimizer.init(params)

    losses: list[float] = []
    accuracies: list[float] = []
    generator = np.random.default_rng(0)
    progress = tqdm(range(epochs), desc=name, unit="epoch")
    for _ in progress:
        batches = generator.permutation(len(train_images))[: len(train_images) // BATCH * BATCH].reshape(-1, BATCH)
        values = []
        for batch in batches:
            params, state, value = step(params, state, train_images[batch], train_labels[batch])
            values.append(value)
        losses.append(float(jnp.mean(jnp.stack(values))))
        accuracies.append(float(accuracy(params)))
        progress.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.3f}")
    return Results(params, losses, accuracies)


def main(arguments: Sequence[str] | None = None) -> dict[str, Results]:
    parser = argparse.ArgumentParser(description="Train a classifier with ternary weights.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--picture", help="the file to save the learning curves in, such as train.svg")
    options = parser.parse_args(arguments)

    ways = {"Function": ternary, "plain rounding": plain_rounding, "float32": lambda weight: weight}
    results = {name: train(quantize, options.epochs, name) for name, quantize in ways.items()}

    # The weights, to a file and back.
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "ternary.npz", results["Function"].params)
        restored = restore(Path(folder) / "ternary.npz")
    assert all((restored[name] == value).all() for name, value in results["Function"].params.items())

    print("test accuracy")
    for name, result in results.items():
        print(f"  {name:<15} {result.accuracies[-1]:.3f}")
    if options.picture:
        picture(results).savefig(options.picture)
    return results


def picture(results: dict[str, Results]) -> Any:
    """Returns a figure of loss and accuracy over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, result in results.items():
        left.plot(result.losses, label=name)
        right.plot(result.accuracies, label=name)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy")
    right.legend()
    return figure


if __name__ == "__main__":
    main()
