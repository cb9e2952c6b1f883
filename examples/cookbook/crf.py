"""A linear-chain conditional random field, whose gradient is its marginal probabilities.

    python examples/cookbook/crf.py

The log-likelihood of a sequence of tags needs a sum over all sequences. Autodiff of the recursion saves a term for each
pair of tags at each position; the derivative is known to be the probabilities of tags and of neighbouring tags, which
the second half of the forward-backward algorithm gives.
Claim: value and gradients are those of the sum written out, and one array of pairs of tags is saved, instead of one for
each position.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

import jaxfn


def sums_up_to(emissions: jax.Array, transitions: jax.Array) -> jax.Array:
    """Returns, for each position and tag, log(sum(exp(score))) over all sequences that end with that tag there."""

    def step(alpha: jax.Array, emission: jax.Array) -> tuple[jax.Array, jax.Array]:
        alpha = logsumexp(alpha[:, None] + transitions, axis=0) + emission
        return alpha, alpha

    return jnp.concatenate([emissions[:1], jax.lax.scan(step, emissions[0], emissions[1:])[1]])


def by_autodiff(emissions: jax.Array, transitions: jax.Array) -> jax.Array:
    """Returns the logarithm of the sum over all sequences, in plain JAX, for comparison."""
    return logsumexp(sums_up_to(emissions, transitions)[-1])


@jaxfn.function
def log_partition(ctx, emissions: jax.Array, transitions: jax.Array) -> jax.Array:
    """Returns the logarithm of the sum over all sequences; `transitions` has scores by tag and next tag."""
    alphas = sums_up_to(emissions, transitions)
    total = logsumexp(alphas[-1])
    ctx.save_for_backward(emissions, transitions, alphas, total)
    return total


@log_partition.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, jax.Array]:
    emissions, transitions, alphas, total = ctx.saved_tensors

    def step(state: tuple[jax.Array, jax.Array], position: tuple[jax.Array, jax.Array]):
        beta, pairs = state  # the sum over what follows, and how often one tag follows another up to here
        emission, alpha = position
        following = transitions + emission + beta
        pairs = pairs + jnp.exp(alpha[:, None] + following - total)
        beta = logsumexp(following, axis=1)
        return (beta, pairs), jnp.exp(alpha + beta - total)

    start = jnp.zeros_like(emissions[0]), jnp.zeros_like(transitions)
    (_, pairs), marginals = jax.lax.scan(step, start, (emissions[1:], alphas[:-1]), reverse=True)
    marginals = jnp.concatenate([marginals, jnp.exp(alphas[-1:] - total)])
    return grad_output * marginals, grad_output * pairs


def score(emissions: jax.Array, transitions: jax.Array, tags: jax.Array) -> jax.Array:
    return jnp.take_along_axis(emissions, tags[:, None], axis=1).sum() + transitions[tags[:-1], tags[1:]].sum()


def log_likelihood(emissions: jax.Array, transitions: jax.Array, tags: jax.Array) -> jax.Array:
    return score(emissions, transitions, tags) - log_partition(emissions, transitions)


def written_out(emissions: jax.Array, transitions: jax.Array, tags: jax.Array) -> jax.Array:
    """Returns the log-likelihood by the sum over a list of all sequences, for comparison."""
    length, num_tags = emissions.shape
    sequences = jnp.array(list(itertools.product(range(num_tags), repeat=length)))
    scores = jax.vmap(lambda tags: score(emissions, transitions, tags))(sequences)
    return score(emissions, transitions, tags) - logsumexp(scores)


def main(length: int = 6, num_tags: int = 4) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    scores = jax.random.normal(keys[0], (length, num_tags)), jax.random.normal(keys[1], (num_tags, num_tags))
    tags = jax.random.randint(keys[2], (length,), 0, num_tags)
    steps = [jax.jit(jax.value_and_grad(f, (0, 1))) for f in (log_likelihood, written_out)]
    ours, expected = (jax.tree.leaves(step(*scores, tags)) for step in steps)
    difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(ours, expected, strict=True))
    marginals = jax.grad(log_partition)(*scores)
    print(f"log-likelihood {ours[0]:.4f}; value and gradients off by {difference:.0e} from all sequences one by one")
    assert difference < 1e-5
    assert jnp.allclose(marginals.sum(1), 1, atol=1e-5)  # they are probabilities

    long = jax.ShapeDtypeStruct((1000, 30), jnp.float32), jax.ShapeDtypeStruct((30, 30), jnp.float32)
    saved, saved_by_autodiff = (jaxfn.residuals(f, *long).total_bytes for f in (log_partition, by_autodiff))
    print(f"saved for 1000 positions and 30 tags: {saved:,} bytes; by autodiff {saved_by_autodiff:,}")
    assert saved == (2 * 1000 * 30 + 30 * 30 + 1) * 4 < saved_by_autodiff / 10


if __name__ == "__main__":
    main()
