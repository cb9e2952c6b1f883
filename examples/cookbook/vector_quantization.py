"""A vector-quantized autoencoder, with gradients that are rotated from the code to the features that it replaces.

    python examples/cookbook/vector_quantization.py

Each vector of features becomes the nearest one of a codebook. Straight-through passes the gradient at the code on
unchanged; the rotation trick (Fifty et al., 2024) rotates and scales it by the transpose of the map from the features
to the code.
Why a Function: the rotation occurs in backward only, as two dot products for each vector. No matrix is built, and only
the features and the code are saved.
Claim: the gradient has the length and the angle that the rotation prescribes. Both autoencoders learn; of these linear
ones straight-through's is better, and is within 25% of the error of k-means on the images themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

import jaxfn


class StraightThrough(jaxfn.Function):
    """The code, whose gradient is passed to the features unchanged."""

    @staticmethod
    def forward(ctx, features: jax.Array, code: jax.Array) -> jax.Array:
        return code

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
        return grad_output, None


class Rotation(jaxfn.Function):
    """The code, whose gradient is multiplied by the transpose of the matrix that maps the features to the code."""

    @staticmethod
    def forward(ctx, features: jax.Array, code: jax.Array) -> jax.Array:
        ctx.save_for_backward(features=features, code=code)
        return code

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
        (start, length), (end, code_length) = map(_direction, ctx.saved_tensors)
        middle, _ = _direction(start + end)
        turned = grad_output - 2 * middle * _dot(middle, grad_output) + 2 * start * _dot(end, grad_output)
        return turned * code_length / length, None


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(x * y, axis=-1, keepdims=True)


def _direction(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    length = jnp.maximum(jnp.sqrt(_dot(x, x)), 1e-6)
    return x / length, length


Weights = dict[str, jax.Array]
Pass = Callable[[jax.Array, jax.Array], jax.Array]


def nearest(features: jax.Array, codebook: jax.Array) -> jax.Array:
    return codebook[jnp.argmin(jnp.sum((features[:, None] - codebook) ** 2, -1), 1)]


def loss(weights: Weights, x: jax.Array, pass_through: Pass) -> tuple[jax.Array, jax.Array]:
    """Returns the loss, with terms that draw codes and features together, and the error of the images alone."""
    features = x @ weights["encoder"]
    code = nearest(features, weights["codebook"])
    restored = pass_through(features, code) @ weights["decoder"]
    error = jnp.mean(jnp.sum((restored - x) ** 2, -1))
    stop = jax.lax.stop_gradient
    to_features, to_code = (jnp.mean(jnp.sum(d**2, -1)) for d in (code - stop(features), features - stop(code)))
    return error + to_features + to_code, error


@partial(jax.jit, static_argnums=2)
def train(start: Weights, x: jax.Array, pass_through: Pass) -> jax.Array:
    """Trains, and returns the error at each step."""
    optimizer = optax.adam(3e-3)

    def step(state: tuple[Weights, optax.OptState], _: None):
        weights, memory = state
        gradients, error = jax.grad(loss, has_aux=True)(weights, x, pass_through)
        updates, memory = optimizer.update(gradients, memory)
        return (optax.apply_updates(weights, updates), memory), error

    return jax.lax.scan(step, (start, optimizer.init(start)), length=100)[1]


def main(codes: int = 64, width: int = 16) -> None:
    x = jnp.asarray(load_digits().data / 16, jnp.float32)
    x = x - x.mean(0)
    keys = jax.random.split(jax.random.key(0))
    encoder = jnp.linalg.svd(x, full_matrices=False)[2][:width].T
    start = {"encoder": encoder, "decoder": encoder.T}
    start["codebook"] = jax.random.choice(keys[0], x, (codes,), replace=False) @ encoder

    features, code, gradient = jax.random.normal(keys[1], (3, 100, width))
    turned, _ = jax.vjp(Rotation.apply, features, code)[1](gradient)
    angles = (_dot(_direction(x)[0], _direction(y)[0]) for x, y in [(features, turned), (code, gradient)])
    lengths = (_direction(y)[1] / _direction(x)[1] for x, y in [(gradient, turned), (features, code)])
    assert jnp.allclose(*angles, atol=1e-5) and jnp.allclose(*lengths, rtol=1e-5)
    assert jaxfn.residuals(Rotation.apply, features, code).total_bytes == features.nbytes + code.nbytes

    straight, rotated = (train(start, x, function.apply) for function in (StraightThrough, Rotation))
    error_of_kmeans = KMeans(codes, n_init=1, random_state=0).fit(x).inertia_ / len(x)
    print(f"error {straight[0]:.2f} -> {straight[-1]:.2f} by straight-through, {rotated[-1]:.2f} by the rotation trick")
    print(f"k-means on the images: {error_of_kmeans:.2f}")
    assert max(straight[-1], rotated[-1]) < 0.9 * straight[0]
    assert straight[-1] < 1.25 * error_of_kmeans


if __name__ == "__main__":
    main()
