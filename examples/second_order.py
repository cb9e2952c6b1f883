"""Second-order training with Functions: products with the Hessian and with the Gauss-Newton matrix.

    python examples/second_order.py

Both apply forward mode to a function that was differentiated in reverse, which needs both modes on one Function. The
model is a small network on handwritten digits whose activation and loss are Functions: one has a hand-written `jvp`,
the other derives it from `backward`. A few Gauss-Newton steps, solved by conjugate gradients, train it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import jaxfn

HIDDEN = 32


class Softplus(jaxfn.Function):
    """Softplus, log(1 + exp(x)), without overflow; saves its derivative, the sigmoid."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        ctx.save_for_backward(jax.nn.sigmoid(x))  # which jvp reads too
        return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        (sigmoid,) = ctx.saved_tensors
        return sigmoid * grad_output

    @staticmethod
    def jvp(ctx, tangent: jax.Array) -> jax.Array:
        (sigmoid,) = ctx.saved_tensors
        return sigmoid * tangent


class CrossEntropy(jaxfn.Function):
    """The mean cross-entropy of softmax(logits) with integer labels."""

    generate_jvp_rule = True  # backward is linear in its gradient, so forward mode is its transpose

    @staticmethod
    def forward(ctx, logits: jax.Array, labels: jax.Array) -> jax.Array:
        ctx.save_for_backward(logits, labels)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
        logits, labels = ctx.saved_tensors
        error = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
        return grad_output * error / len(labels), None


class Operations(NamedTuple):
    softplus: Callable[[jax.Array], jax.Array]
    cross_entropy: Callable[[jax.Array, jax.Array], jax.Array]


def _plain_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


FUNCTIONS = Operations(Softplus.apply, CrossEntropy.apply)
# The operations in plain JAX, for comparison.
PLAIN = Operations(jax.nn.softplus, _plain_cross_entropy)

Product = Callable[[jax.Array, jax.Array], jax.Array]  # of weights and a direction


class Problem:
    """The network's loss as a function of one vector of weights, and products with its second derivatives."""

    def __init__(self, ops: Operations, images: jax.Array, labels: jax.Array) -> None:
        self.ops = ops
        self.images = images
        self.labels = labels
        first, second = jax.random.split(jax.random.key(0))
        weights = {
            "hidden": jax.random.normal(first, (64, HIDDEN)) / 8,
            "output": jax.random.normal(second, (HIDDEN, 10)) / HIDDEN**0.5,
        }
        self.start, self._unravel = ravel_pytree(weights)

    def logits(self, weights: jax.Array) -> jax.Array:
        tree = self._unravel(weights)
        return self.ops.softplus(self.images @ tree["hidden"]) @ tree["output"]

    def loss(self, weights: jax.Array) -> jax.Array:
        return self.ops.cross_entropy(self.logits(weights), self.labels)

    def hessian_product(self, weights: jax.Array, direction: jax.Array) -> jax.Array:
        """Computes the product by forward over reverse: the gradient's derivative along the direction."""
        return jax.jvp(jax.grad(self.loss), (weights,), (direction,))[1]

    def hessian_product_in_reverse(self, weights: jax.Array, direction: jax.Array) -> jax.Array:
        """Computes the product by reverse over reverse, which does not need forward mode."""
        return jax.grad(lambda w: jnp.vdot(jax.grad(self.loss)(w), direction))(weights)

    def gauss_newton_product(self, weights: jax.Array, direction: jax.Array) -> jax.Array:
        """Computes J.T @ H @ J @ direction, for J of the logits by the weights and H of the loss by the logits."""
        logits, moved = jax.jvp(self.logits, (weights,), (direction,))
        of_logits = jax.grad(lambda y: self.ops.cross_entropy(y, self.labels))
        curved = jax.jvp(of_logits, (logits,), (moved,))[1]
        return jax.vjp(self.logits, weights)[1](curved)[0]

    def accuracy(self, weights: jax.Array) -> float:
        return float((self.logits(weights).argmax(1) == self.labels).mean())


def gauss_newton(problem: Problem, num_steps: int) -> tuple[jax.Array, list[float]]:
    """Takes Gauss-Newton steps, solved by conjugate gradients with products alone, without any matrix.

    The damping follows Levenberg and Marquardt: it decreases after a step that reduces the loss, and increases after
    any other step, which is not taken.
    """

    @jax.jit
    def proposed(weights: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
        def damped(direction: jax.Array) -> jax.Array:
            return problem.gauss_newton_product(weights, direction) + damping * direction

        step, _ = jax.scipy.sparse.linalg.cg(damped, jax.grad(problem.loss)(weights), maxiter=20)
        return weights - step, problem.loss(weights - step)

    weights, damping = problem.start, 0.1
    losses = [float(problem.loss(weights))]
    for _ in range(num_steps):
        candidate, loss = proposed(weights, damping)
        if loss < losses[-1]:
            weights, damping = candidate, damping / 3
        else:
            damping *= 4
        losses.append(min(float(loss), losses[-1]))
    return weights, losses


def milliseconds(products: dict[str, Product], weights: jax.Array, direction: jax.Array) -> dict[str, float]:
    """Returns the median time of each compiled product, with the products timed in turn."""
    compiled = {name: jax.jit(product).lower(weights, direction).compile() for name, product in products.items()}
    times: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(30):
        for name, product in compiled.items():
            begin = time.perf_counter()
            product(weights, direction).block_until_ready()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: float(np.median(values)) for name, values in times.items()}


class Results(NamedTuple):
    differences: dict[str, float]  # of each product from plain JAX, relative to the largest entry
    milliseconds: dict[str, float]
    losses: list[float]  # before each Gauss-Newton step, and after the last
    accuracy: float


def main(num_steps: int = 15) -> Results:
    images, labels = load_digits(return_X_y=True)
    data = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels, jnp.int32)
    problem, plain = Problem(FUNCTIONS, *data), Problem(PLAIN, *data)
    direction = jax.random.normal(jax.random.key(1), problem.start.shape)

    products: dict[str, Product] = {
        "hessian, forward over reverse": problem.hessian_product,
        "hessian, reverse over reverse": problem.hessian_product_in_reverse,
        "Gauss-Newton": problem.gauss_newton_product,
    }
    expected = dict.fromkeys(products, plain.hessian_product) | {"Gauss-Newton": plain.gauss_newton_product}
    compare = partial(_difference, problem.start, direction)
    differences = {name: compare(product, expected[name]) for name, product in products.items()}
    times = milliseconds(products, problem.start, direction)
    weights, losses = gauss_newton(problem, num_steps)
    results = Results(differences, times, losses, problem.accuracy(weights))

    print(f"products with the second derivatives of {problem.start.size:,} weights, over {len(images):,} images")
    for name in products:
        print(f"  {name:30}  {times[name]:6.2f} ms  {differences[name]:.0e} from JAX's own")
    print("loss, Gauss-Newton step by Gauss-Newton step")
    print("  " + "  ".join(f"{loss:.3g}" for loss in losses))
    print(f"accuracy on those images: {results.accuracy:.3f}")
    return results


def _difference(weights: jax.Array, direction: jax.Array, product: Product, expected: Product) -> float:
    ours, theirs = product(weights, direction), expected(weights, direction)
    return float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))


if __name__ == "__main__":
    main()
