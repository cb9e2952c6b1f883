"""Attention whose scores are computed for a few queries at a time, forward and backward, and never stored.

    python examples/cookbook/memory_efficient_attention.py

Autodiff of a loop over queries saves the scores of all steps, which are the whole T x T matrix. The rule needs one
number for each query, the logarithm of the sum of exp(scores), to recompute any part of them.
Claim: no array of T x T entries is in the program, the saved bytes grow with T and not with T * T, and outputs and
gradients are those of plain attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

import jaxfn


def scores_of(queries: jax.Array, positions: jax.Array, k: jax.Array, is_causal: bool) -> jax.Array:
    scores = queries @ k.T * queries.shape[-1] ** -0.5
    return jnp.where(jnp.arange(len(k)) <= positions[:, None], scores, -jnp.inf) if is_causal else scores


class Attention(jaxfn.Function):
    """softmax(q @ k.T / sqrt(d)) @ v for one head: q, k and v of shapes (T, d), (S, d) and (S, e).

    Use `jax.vmap` for heads and batches. `chunk` is the number of queries in one step; it divides T.
    """

    @staticmethod
    def forward(ctx, q: jax.Array, k: jax.Array, v: jax.Array, chunk: int = 64, is_causal: bool = False) -> jax.Array:
        def attend(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores = scores_of(*part, k, is_causal)
            total = logsumexp(scores, axis=1)
            return jnp.exp(scores - total[:, None]) @ v, total

        output, total = jax.lax.map(attend, chunks(chunk, q, jnp.arange(len(q))))
        output, total = output.reshape(len(q), -1), total.reshape(len(q))
        ctx.save_for_backward(q, k, v, output, total)
        ctx.chunk, ctx.is_causal = chunk, is_causal
        return output

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, output, total = ctx.saved_tensors

        def attend(grads: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]):
            queries, positions, total, grad, along = part
            weights = jnp.exp(scores_of(queries, positions, k, ctx.is_causal) - total[:, None])
            grad_scores = weights * (grad @ v.T - along[:, None]) * queries.shape[-1] ** -0.5
            return (grads[0] + grad_scores.T @ queries, grads[1] + weights.T @ grad), grad_scores @ k

        along = jnp.sum(grad_output * output, axis=1)  # the mean of each query's gradients, by its weights
        parts = chunks(ctx.chunk, q, jnp.arange(len(q)), total, grad_output, along)
        (grad_k, grad_v), grad_q = jax.lax.scan(attend, (jnp.zeros_like(k), jnp.zeros_like(v)), parts)
        return grad_q.reshape(q.shape), grad_k, grad_v, None, None


def chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.reshape(len(x) // chunk, chunk, *x.shape[1:]) for x in arrays)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, is_causal: bool = False) -> jax.Array:
    return jax.nn.softmax(scores_of(q, jnp.arange(len(q)), k, is_causal), axis=1) @ v


def main(length: int = 2048, dim: int = 32) -> None:
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, length, dim))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.vdot(weight, Attention.apply(q, k, v, is_causal=True))

    def plain_loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.vdot(weight, plain_attention(q, k, v, is_causal=True))

    steps = [jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (loss, plain_loss)]
    results = [jax.tree.leaves(step(q, k, v)) for step in steps]
    difference = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in zip(*results, strict=True))
    programs = [str(jax.make_jaxpr(step)(q, k, v)) for step in steps]
    temporary = [step.lower(q, k, v).compile().memory_analysis().temp_size_in_bytes for step in steps]
    saved = jaxfn.residuals(lambda *args: Attention.apply(*args, is_causal=True), q, k, v).total_bytes
    print(f"output and gradients off by {difference:.0e}; saved: {saved:,} bytes")
    print(f"compiled, needs {temporary[0] / 2**20:.1f} MiB; plain attention {temporary[1] / 2**20:.1f} MiB")
    assert difference < 1e-4
    assert f"[{length},{length}]" not in programs[0] and f"[{length},{length}]" in programs[1]
    assert saved == (4 * dim + 1) * length * 4  # q, k, v, the output, and a number for each query
    assert temporary[0] < length * length * 4 < temporary[1]


if __name__ == "__main__":
    main()
