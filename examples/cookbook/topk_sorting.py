"""Soft top-k, sorting and ranking, by one Function: isotonic regression (Blondel et al., 2020).

    python examples/cookbook/topk_sorting.py

All three are projections onto a polytope of permutations, and those are sorting and a fit by a nonincreasing sequence.
The fit merges neighbours that are in the wrong order into blocks of their mean, for as long as there are any.
Why a Function: that is a `while` loop, which JAX cannot differentiate in reverse. Its derivative takes means over those
blocks, so only their numbers are saved.
Claim: at a small strength the soft results equal the hard ones, and at a larger one they have gradients; a scorer that
is trained by soft ranks sorts items correctly; four bytes are saved for each item.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


class Isotonic(jaxfn.Function):
    """The nonincreasing sequence nearest to y, which has one axis."""

    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, y: jax.Array) -> jax.Array:
        block = _blocks(y)
        ctx.save_for_backward(block=block)
        return _means(y, block)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        return _means(grad_output, ctx.saved_variables.block)


Stack = tuple[jax.Array, jax.Array, jax.Array]  # the number of the last block; sums and counts of all


def _blocks(y: jax.Array) -> jax.Array:
    """Returns the number of each entry's block."""

    def out_of_order(state: Stack) -> jax.Array:
        top, sums, counts = state
        return (top > 0) & (sums[top] * counts[top - 1] > sums[top - 1] * counts[top])

    def merge(state: Stack) -> Stack:
        top, sums, counts = state
        sums, counts = (x.at[top - 1].add(x[top]).at[top].set(0) for x in (sums, counts))
        return top - 1, sums, counts

    def push(state: Stack, entry: jax.Array) -> tuple[Stack, None]:
        top, sums, counts = state
        state = top + 1, sums.at[top + 1].set(entry), counts.at[top + 1].set(1)
        return jax.lax.while_loop(out_of_order, merge, state), None

    (_, _, counts), _ = jax.lax.scan(push, (jnp.array(-1), jnp.zeros_like(y), jnp.zeros_like(y)), y)
    return jnp.repeat(jnp.arange(y.size), counts.astype(int), total_repeat_length=y.size)


def _means(x: jax.Array, block: jax.Array) -> jax.Array:
    sums, counts = (jax.ops.segment_sum(value, block, x.size) for value in (x, jnp.ones_like(x)))
    return (sums / jnp.maximum(counts, 1))[block]


def project(z: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the point nearest to z among all weighted means of the permutations of w, which is nonincreasing."""
    order = jnp.argsort(-z)
    return z - Isotonic.apply(z[order] - w)[jnp.argsort(order)]


def soft_sort(x: jax.Array, strength: float = 1.0) -> jax.Array:
    """Sorts x from the largest to the smallest; the larger the strength, the closer the entries are to their mean."""
    return project(jnp.arange(x.size, 0, -1, x.dtype) / strength, -jnp.sort(-x))


def soft_rank(x: jax.Array, strength: float = 1.0) -> jax.Array:
    """Returns the ranks: 1 for the largest entry, and so on."""
    return project(-x / strength, jnp.arange(x.size, 0, -1, x.dtype))


def soft_top_k(x: jax.Array, k: int, strength: float = 1.0) -> jax.Array:
    """Returns a mask of sum k: near 1 for the k largest entries, and near 0 for others."""
    return project(x / strength, (jnp.arange(x.size) < k).astype(x.dtype))


def main(items: int = 50) -> None:
    x = jax.random.permutation(jax.random.key(0), items) * 0.5 - 3
    order, ranks = -jnp.sort(-x), jnp.argsort(jnp.argsort(-x)) + 1
    assert jnp.allclose(soft_sort(x, 0.1), order, atol=1e-4) and jnp.allclose(soft_rank(x, 0.1), ranks, atol=1e-4)
    assert jnp.allclose(soft_top_k(x, 5, 0.1), ranks <= 5, atol=1e-4)
    slopes = jax.jacobian(lambda x: jnp.stack([soft_sort(x, 2.0), soft_rank(x, 2.0), soft_top_k(x, 5, 2.0)]))(x)
    assert jnp.all(jnp.abs(slopes).sum((1, 2)) > 0.1)
    assert jaxfn.residuals(Isotonic.apply, x).total_bytes == 4 * items

    features = jax.random.normal(jax.random.key(1), (items, 8))
    wanted = jnp.argsort(jnp.argsort(-features @ jnp.linspace(-1, 1, 8))) + 1.0

    def error(weight: jax.Array) -> jax.Array:
        return jnp.mean((soft_rank(features @ weight, 0.1) - wanted) ** 2)

    def step(i: int, weight: jax.Array) -> jax.Array:
        return weight - 0.003 * 0.99**i * jax.grad(error)(weight)

    start = jax.random.normal(jax.random.key(2), (8,))
    trained = jax.lax.fori_loop(0, 300, step, start)
    before, after = (jnp.sum(jnp.argsort(jnp.argsort(-features @ w)) + 1 != wanted) for w in (start, trained))
    print(f"items at a wrong rank: {before} of {items} before, {after} after training")
    assert after < before / 5


if __name__ == "__main__":
    main()
