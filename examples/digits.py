"""Handwritten digits with 4-bit weights: a quantization-aware classifier of jaxfn Functions.

    pip install -e ".[examples]"
    python examples/digits.py [--epochs N] [--seed S]

Each operation of the network is a Function with a custom backward. The training loop is ordinary JAX: `jax.grad`,
`lax.scan` over the minibatches, `jax.jit` with donated buffers, and optax.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxfn

HIDDEN = 128
BATCH = 64


class Linear(jaxfn.Function):
    """`input @ weight.T + bias`: PyTorch's example of a Function."""

    @staticmethod
    def forward(ctx, input: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        ctx.save_for_backward(input, weight, bias)
        output = input @ weight.T
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array | None, ...]:
        input, weight, bias = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        # The images are not differentiated, so this product is not traced for the first layer.
        if ctx.needs_input_grad[0]:
            grad_input = grad_output @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = grad_output.T @ input
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


def rounded(weight: jax.Array) -> jax.Array:
    """Rounds a weight to 4 bits: integers from -8 to 7, times a scale."""
    # The largest weight becomes 7 or -7, so no weight is clipped and each passes its gradient on.
    scale = jnp.max(jnp.abs(weight)) / 7
    return jnp.round(weight / scale).astype(jnp.int4).astype(weight.dtype) * scale


class Quantize(jaxfn.Function):
    """Rounds a weight to 4 bits; the gradient goes straight through, as if nothing had been rounded."""

    @staticmethod
    def forward(ctx, weight: jax.Array) -> jax.Array:
        return rounded(weight)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        return grad_output


class ReLU(jaxfn.Function):
    """ReLU that saves one boolean per element, where autodiff of `jnp.maximum` saves floats."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        mask = x > 0
        ctx.save_for_backward(mask)
        return jnp.where(mask, x, 0)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        (mask,) = ctx.saved_tensors
        return jnp.where(mask, grad_output, 0)


class CrossEntropy(jaxfn.Function):
    """The mean cross-entropy of softmax(logits) with integer labels."""

    @staticmethod
    def forward(ctx, logits: jax.Array, labels: jax.Array) -> jax.Array:
        ctx.save_for_backward(logits, labels)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
        logits, labels = ctx.saved_tensors
        error = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
        return grad_output * error / len(labels), None  # labels have no gradient


class Operations(NamedTuple):
    """The operations of the model. Replace one to try a variant: `FUNCTIONS._replace(linear=MyLinear.apply)`."""

    linear: Callable[..., jax.Array]
    quantize: Callable[[jax.Array], jax.Array]
    relu: Callable[[jax.Array], jax.Array]
    cross_entropy: Callable[[jax.Array, jax.Array], jax.Array]


FUNCTIONS = Operations(Linear.apply, Quantize.apply, ReLU.apply, CrossEntropy.apply)


def plain_linear(input: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    output = input @ weight.T
    return output if bias is None else output + bias


def plain_quantize(weight: jax.Array) -> jax.Array:
    return weight + jax.lax.stop_gradient(rounded(weight) - weight)


def plain_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# The operations in plain JAX, for comparing gradients with autodiff.
PLAIN = Operations(plain_linear, plain_quantize, jax.nn.relu, plain_cross_entropy)


class Params(NamedTuple):
    """The weights in full precision, which training changes and the model rounds; the output layer has no bias."""

    hidden_weight: jax.Array
    hidden_bias: jax.Array
    output_weight: jax.Array


class Data(NamedTuple):
    train_images: jax.Array
    train_labels: jax.Array
    test_images: jax.Array
    test_labels: jax.Array


def load_data(seed: int) -> Data:
    """Loads the 1,797 images of 8 x 8 pixels of scikit-learn, a fifth of them for testing."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, random_state=seed, stratify=labels)
    train_images, test_images = (jnp.asarray(x, jnp.float32) for x in split[:2])
    train_labels, test_labels = (jnp.asarray(x, jnp.int32) for x in split[2:])
    return Data(train_images, train_labels, test_images, test_labels)


def init_params(seed: int) -> Params:
    hidden_key, output_key = jax.random.split(jax.random.key(seed))
    he_normal = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)
    return Params(he_normal(hidden_key, (HIDDEN, 64)), jnp.zeros(HIDDEN), he_normal(output_key, (10, HIDDEN)))


def logits_of(ops: Operations, params: Params, images: jax.Array) -> jax.Array:
    hidden = ops.relu(ops.linear(images, ops.quantize(params.hidden_weight), params.hidden_bias))
    return ops.linear(hidden, ops.quantize(params.output_weight))


def loss_of(ops: Operations, params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return ops.cross_entropy(logits_of(ops, params, images), labels)


class Trainer:
    """A training loop that runs each epoch by a single call of one compiled function."""

    def __init__(self, ops: Operations, optimizer: optax.GradientTransformation) -> None:
        self.ops = ops
        self.optimizer = optimizer
        self.compilations = 0
        # Donated: the new params and optimizer state reuse the memory of the old ones.
        self.epoch = jax.jit(self._epoch, donate_argnums=(0, 1))

    def _epoch(
        self, params: Params, state: optax.OptState, images: jax.Array, labels: jax.Array, batches: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        self.compilations += 1  # a Python side effect: it happens when JAX traces this function, and not when it runs

        def step(carry: tuple[Params, optax.OptState], batch: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            loss, grads = jax.value_and_grad(partial(loss_of, self.ops))(params, images[batch], labels[batch])
            updates, state = self.optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (params, state), losses = jax.lax.scan(step, (params, state), batches)
        return params, state, losses.mean()


def shuffled_batches(generator: np.random.Generator, num_images: int) -> np.ndarray:
    """Returns the images' indices in random order, a row for each minibatch, without an incomplete last one."""
    num_batches = num_images // BATCH
    return generator.permutation(num_images)[: num_batches * BATCH].reshape(num_batches, BATCH)


def compare_gradients(ops: Operations, params: Params, images: jax.Array, labels: jax.Array) -> tuple[float, float]:
    """Returns the largest difference from the plain model's gradients, and the largest gradient."""
    ours = jax.grad(partial(loss_of, ops))(params, images, labels)
    autodiff = jax.grad(partial(loss_of, PLAIN))(params, images, labels)
    difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(ours, autodiff, strict=True))
    return difference, max(float(jnp.max(jnp.abs(b))) for b in autodiff)


def train(ops: Operations, data: Data, options: argparse.Namespace, name: str) -> tuple[Params, float, int]:
    """Returns the trained weights, their accuracy on the test images, and how often JAX traced the epoch."""
    trainer = Trainer(ops, optax.adam(2e-3))
    params = init_params(options.seed)
    state = trainer.optimizer.init(params)
    generator = np.random.default_rng(options.seed)
    progress = tqdm(range(options.epochs), desc=name, unit="epoch")
    for _ in progress:
        batches = shuffled_batches(generator, len(data.train_images))
        params, state, loss = trainer.epoch(params, state, data.train_images, data.train_labels, batches)
        progress.set_postfix(loss=f"{loss:.4f}")
    predicted = logits_of(ops, params, data.test_images).argmax(axis=1)
    return params, float((predicted == data.test_labels).mean()), trainer.compilations


@dataclass(frozen=True)
class Results:
    accuracy: float  # on the test images
    rounding_accuracy: float  # without the custom gradient: JAX's own derivative of rounding is zero
    float32_accuracy: float  # without rounding
    compilations: int
    gradient_difference: float
    largest_gradient: float
    weight_levels: tuple[int, ...]  # the number of distinct values in each rounded weight matrix
    seconds: float  # training, compilation included


def main(argv: Sequence[str] | None = None, ops: Operations = FUNCTIONS) -> Results:
    parser = argparse.ArgumentParser(description="Train a digit classifier with 4-bit weights.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    data = load_data(options.seed)
    # Before training, while the gradients are still large.
    initial = init_params(options.seed)
    difference, largest = compare_gradients(ops, initial, data.train_images, data.train_labels)

    start = time.perf_counter()
    params, accuracy, compilations = train(ops, data, options, "Functions")
    seconds = time.perf_counter() - start
    _, rounding_accuracy, _ = train(ops._replace(quantize=rounded), data, options, "plain rounding")
    _, float32_accuracy, _ = train(ops._replace(quantize=lambda weight: weight), data, options, "float32")

    weights = (params.hidden_weight, params.output_weight)
    levels = tuple(len(np.unique(ops.quantize(weight))) for weight in weights)
    print(f"test accuracy          {accuracy:.4f} on {len(data.test_labels)} images")
    print(f"  with plain rounding  {rounding_accuracy:.4f}, as JAX's own derivative of rounding is zero")
    print(f"  in float32           {float32_accuracy:.4f}")
    print(f"weight levels          {levels} of the 16 that 4 bits have")
    print(f"compilations           {compilations} for {options.epochs} epochs (times the epoch was traced)")
    print(f"gradients vs autodiff  {difference:.1e} apart at most, over all parameters (largest: {largest:.1e})")
    print(f"training time          {seconds:.1f} s")
    return Results(accuracy, rounding_accuracy, float32_accuracy, compilations, difference, largest, levels, seconds)


if __name__ == "__main__":
    main()
