"""Gradient reversal (Ganin et al., 2016): features that predict the label, and not the domain of the example.

    python examples/cookbook/gradient_reversal.py

Why a Function: it is the identity forward and times -strength backward, which is no function's derivative. With it two
opponents are trained by one backward pass: the domain's classifier to distinguish domains, the features to prevent it.
Claim: the gradient of the features is that of the label's loss minus `strength` times that of the domain's. Trained
with it, features predict the label but not the domain; without it they nearly always predict the domain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.linear_model import LogisticRegression

import jaxfn


@jaxfn.function
def reverse_gradient(ctx, x: jax.Array, strength: float | jax.Array) -> jax.Array:
    """Returns x; its gradient is multiplied by -strength."""
    ctx.strength = strength
    return x


@reverse_gradient.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
    return -ctx.strength * grad_output, None


Weights = dict[str, jax.Array]


def losses(weights: Weights, x: jax.Array, label: jax.Array, domain: jax.Array, strength: float | None) -> jax.Array:
    """Returns the losses of label and domain, which share their features; without a strength, nothing is reversed."""
    features = x @ weights["features"]
    for_domain = features if strength is None else reverse_gradient(features, strength)
    logits = jnp.stack([features @ weights["label"], for_domain @ weights["domain"]])
    return optax.sigmoid_binary_cross_entropy(logits, jnp.stack([label, domain])).mean(1)


def train(start: Weights, data: tuple[jax.Array, ...], strength: float) -> Weights:
    optimizer = optax.adam(1e-2)

    def step(state, _):
        weights, memory = state
        gradients = jax.grad(lambda w: losses(w, *data, strength).sum())(weights)
        updates, memory = optimizer.update(gradients, memory)
        return (optax.apply_updates(weights, updates), memory), None

    return jax.jit(lambda state: jax.lax.scan(step, state, length=1000)[0][0])((start, optimizer.init(start)))


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    label, domain = jax.random.bernoulli(keys[0], shape=(2, 2000)).astype(jnp.float32)
    signs = 2 * jnp.stack([label, domain, label], 1) - 1
    noise = jax.random.normal(keys[1], (2000, 5)) * jnp.array([0.7, 0.3, 0.7, 1, 1])
    x = noise.at[:, :3].add(signs).at[:, 2].add(signs[:, 1])  # the third column depends on both
    data = x, label, domain
    shapes = {"features": (5, 2), "label": (2,), "domain": (2,)}
    start = {name: 0.3 * jax.random.normal(keys[2], shape) for name, shape in shapes.items()}

    ours = jax.grad(lambda w: losses(w, *data, 0.7).sum())(start)
    of_label, of_domain = (jax.grad(lambda w, i=i: losses(w, *data, None)[i])(start) for i in range(2))
    by_hand = {"features": of_label["features"] - 0.7 * of_domain["features"]}
    by_hand |= {"label": of_label["label"], "domain": of_domain["domain"]}
    assert all(jnp.allclose(ours[name], by_hand[name], atol=1e-7) for name in ours)

    accuracies = {}
    for strength in (-1.0, 1.0):  # -1 helps the domain's classifier
        features = np.asarray(x @ train(start, data, strength)["features"])
        features = features / features.std(0)
        accuracies[strength] = [LogisticRegression().fit(features, y).score(features, y) for y in (label, domain)]
        print("strength {:4}: label {:.1%}, domain {:.1%}".format(strength, *accuracies[strength]))
    assert accuracies[-1][0] > 0.9 and accuracies[-1][1] > 0.95
    assert accuracies[1][0] > 0.9 and accuracies[1][1] < 0.6


if __name__ == "__main__":
    main()
