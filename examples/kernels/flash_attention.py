"""Flash attention: softmax(scale * query @ key.T) @ value without the matrix of scores.

    python examples/kernels/flash_attention.py

Why a Function: autodiff saves the probabilities, an array of (queries, keys) for each head. Here a kernel loops over
blocks of keys, and rescales its sums at each larger score. Saved for backward are the inputs, the output and one number
for each query, the logarithm of its sum of exp(scores), with which backward recomputes each block of probabilities. The
gradients are two Functions, as one loops over the keys of each query and the other over the queries of each key; an
unused one does not run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import blocks
import comparison
import jax
import jax.numpy as jnp
from blocks import Array, dot, load, numbers, rows, store, whole
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import jaxfn

BLOCK = 64  # queries or keys at most


def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False, scale: float | None = None
) -> jax.Array:
    """Computes softmax(scale * query @ key.T) @ value.

    Args:
      query: (..., queries, width), such as (batch, heads, queries, width).
      key: (..., keys, width).
      value: (..., keys, width of a value).
      causal: whether the query at position i attends to no keys after position i.
      scale: 1 / sqrt(width) by default.
    """
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(f"query {query.shape}, key {key.shape} and value {value.shape} do not go together")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    output, _ = FlashAttention.apply(*heads, causal, scale)
    return output.reshape(*query.shape[:-1], value.shape[-1])


def plain(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False, scale: float | None = None
) -> jax.Array:
    """Computes the attention in plain JAX, for comparison."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (query @ jnp.swapaxes(key, -1, -2))
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return jax.nn.softmax(scores) @ value


class FlashAttention(jaxfn.Function):
    """The attention of query, key and value (batch, rows, width); a batch of 1 is shared.

    Returns the output, and the logarithms of the sums, (batch, queries, 1), for `backward`.
    """

    @staticmethod
    def forward(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, scale: float):
        batch, of = blocks.batch_of(query, key, value), _Attention.of(query, key, value, causal, scale)
        return blocks.call(
            partial(_forward_kernel, of=of),
            steps=pl.cdiv(of.num_queries, of.queries),
            inputs=[rows(query, of.queries), whole(rows(key, of.keys)), whole(rows(value, of.keys))],
            outputs=[
                rows(Array((batch, of.num_queries, of.value_width), query.dtype), of.queries),
                numbers(Array((batch, of.num_queries, 1), jnp.float32), of.queries),
            ],
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        query, key, value, ctx.causal, ctx.scale = inputs
        output, log_sum = output
        ctx.mark_non_differentiable(log_sum)
        ctx.save_for_backward(query=query, key=key, value=value, output=output, log_sum=log_sum)

    @staticmethod
    @jaxfn.once_differentiable
    def backward(ctx, grad_output: jax.Array, _log_sum: jax.Array):
        query, key, value, output, log_sum = ctx.saved_tensors
        # What softmax subtracts from the gradient of all its inputs.
        shift = jnp.sum(grad_output.astype(jnp.float32) * output.astype(jnp.float32), axis=2, keepdims=True)
        args = query, key, value, log_sum, shift, grad_output, ctx.causal, ctx.scale
        grad_query = grad_key = grad_value = None
        if ctx.needs_input_grad.query:
            grad_query = QueryGradient.apply(*args)
        if ctx.needs_input_grad.key or ctx.needs_input_grad.value:
            grad_key, grad_value = KeyValueGradient.apply(*args)
        return grad_query, grad_key, grad_value, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(FlashAttention.apply, info, in_dims, args)


class QueryGradient(jaxfn.Function):
    """The gradient of query. It is a Function for its batching rule, and has no derivative."""

    @staticmethod
    def forward(query, key, value, log_sum, shift, grad_output, causal: bool, scale: float) -> jax.Array:
        of = _Attention.of(query, key, value, causal, scale)
        batch = blocks.batch_of(query, key, value, log_sum, shift, grad_output)
        (grad_query,) = blocks.call(
            partial(_query_kernel, of=of),
            steps=pl.cdiv(of.num_queries, of.queries),
            inputs=[
                rows(query, of.queries),
                whole(rows(key, of.keys)),
                whole(rows(value, of.keys)),
                numbers(log_sum, of.queries),
                numbers(shift, of.queries),
                rows(grad_output, of.queries),
            ],
            outputs=[rows(Array((batch, *query.shape[1:]), query.dtype), of.queries)],
        )
        return grad_query

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(QueryGradient.apply, info, in_dims, args)


class KeyValueGradient(jaxfn.Function):
    """The gradients of key and value: each step of the grid takes some keys, and loops over their queries."""

    @staticmethod
    def forward(query, key, value, log_sum, shift, grad_output, causal: bool, scale: float):
        of = _Attention.of(query, key, value, causal, scale)
        batch = blocks.batch_of(query, key, value, log_sum, shift, grad_output)
        return blocks.call(
            partial(_key_value_kernel, of=of),
            steps=pl.cdiv(of.num_keys, of.keys),
            inputs=[
                whole(rows(query, of.queries)),
                rows(key, of.keys),
                rows(value, of.keys),
                whole(numbers(log_sum, of.queries)),
                whole(numbers(shift, of.queries)),
                whole(rows(grad_output, of.queries)),
            ],
            outputs=[rows(Array((batch, *x.shape[1:]), x.dtype), of.keys) for x in (key, value)],
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(KeyValueGradient.apply, info, in_dims, args)


class _Attention(NamedTuple):
    """The options of the kernels; `queries` and `keys` are their numbers in a block."""

    num_queries: int
    num_keys: int
    width: int
    value_width: int
    queries: int
    keys: int
    causal: bool
    scale: float

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, scale: float) -> _Attention:
        (_, num_queries, width), (_, num_keys, value_width) = query.shape, value.shape
        sizes = blocks.padded(num_queries, BLOCK), blocks.padded(num_keys, BLOCK)
        return cls(num_queries, num_keys, width, value_width, *sizes, causal, scale)

    def scores(self, query: jax.Array, key: jax.Array, first_query: Any, first_key: Any) -> jax.Array:
        """Returns a block of scores, -inf where a query does not attend to a key."""
        scores = self.scale * dot(query, key, 1, 1)
        column = first_key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        is_seen = column < self.num_keys
        if self.causal:
            is_seen &= column <= first_query + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        return jnp.where(is_seen, scores, -jnp.inf)

    def key_blocks(self, first_query: Any) -> Any:
        """Returns the number of blocks of keys that a block of queries attends to."""
        num_blocks = pl.cdiv(self.num_keys, self.keys)
        if not self.causal:
            return num_blocks
        return jnp.minimum(num_blocks, jax.lax.div(first_query + self.queries + self.keys - 1, self.keys))

    def query_blocks(self, first_key: Any) -> tuple[Any, int]:
        """Returns the first block of queries that attends to a block of keys, and the end."""
        return jax.lax.div(first_key, self.queries) if self.causal else 0, pl.cdiv(self.num_queries, self.queries)


def _forward_kernel(query_ref, key_ref, value_ref, output_ref, log_sum_ref, *, of: _Attention) -> None:
    first_query = pl.program_id(1) * of.queries
    query = load(query_ref, of.num_queries - first_query, of.width)

    def add(i: Any, so_far: Any) -> Any:
        largest, total, output = so_far
        first_key, at = i * of.keys, pl.ds(i * of.keys, of.keys)
        key = load(key_ref, of.num_keys - first_key, of.width, at)
        value = load(value_ref, of.num_keys - first_key, of.value_width, at)
        scores = of.scores(query, key, first_query, first_key)
        # The sums are relative to the largest score so far.
        new = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
        weights, rescale = jnp.exp(scores - new), jnp.exp(largest - new)
        total = rescale * total + jnp.sum(weights, axis=1, keepdims=True)
        return new, total, rescale * output + dot(weights.astype(value.dtype), value, 1, 0)

    zeros = jnp.zeros((of.queries, 1), jnp.float32)
    so_far = zeros - jnp.inf, zeros, jnp.zeros(output_ref.shape, jnp.float32)
    largest, total, output = jax.lax.fori_loop(0, of.key_blocks(first_query), add, so_far)
    store(output_ref, output / total, of.num_queries - first_query, of.value_width)
    store(log_sum_ref, largest + jnp.log(total), of.num_queries - first_query, 1)


def _query_kernel(
    query_ref, key_ref, value_ref, log_sum_ref, shift_ref, grad_output_ref, grad_query_ref, *, of: _Attention
) -> None:
    first_query = pl.program_id(1) * of.queries
    num_left = of.num_queries - first_query
    query, grad_output = load(query_ref, num_left, of.width), load(grad_output_ref, num_left, of.value_width)
    log_sum, shift = load(log_sum_ref, num_left, 1), load(shift_ref, num_left, 1)

    def add(i: Any, grad_query: jax.Array) -> jax.Array:
        first_key, at = i * of.keys, pl.ds(i * of.keys, of.keys)
        key = load(key_ref, of.num_keys - first_key, of.width, at)
        value = load(value_ref, of.num_keys - first_key, of.value_width, at)
        probabilities = jnp.exp(of.scores(query, key, first_query, first_key) - log_sum)
        grad_scores = probabilities * (dot(grad_output, value, 1, 1) - shift)
        return grad_query + dot(grad_scores.astype(key.dtype), key, 1, 0)

    zeros = jnp.zeros(query.shape, jnp.float32)
    grad_query = of.scale * jax.lax.fori_loop(0, of.key_blocks(first_query), add, zeros)
    store(grad_query_ref, grad_query, num_left, of.width)


def _key_value_kernel(
    query_ref, key_ref, value_ref, log_sum_ref, shift_ref, grad_output_ref, grad_key_ref, grad_value_ref,
    *, of: _Attention,
) -> None:  # fmt: skip
    first_key = pl.program_id(1) * of.keys
    num_left = of.num_keys - first_key
    key, value = load(key_ref, num_left, of.width), load(value_ref, num_left, of.value_width)

    def add(i: Any, so_far: Any) -> Any:
        grad_key, grad_value = so_far
        first_query, at = i * of.queries, pl.ds(i * of.queries, of.queries)
        queries_left = of.num_queries - first_query
        query, grad_output = (
            load(query_ref, queries_left, of.width, at),
            load(grad_output_ref, queries_left, of.value_width, at),
        )
        log_sum, shift = load(log_sum_ref, queries_left, 1, at), load(shift_ref, queries_left, 1, at)
        probabilities = jnp.exp(of.scores(query, key, first_query, first_key) - log_sum)
        grad_scores = probabilities * (dot(grad_output, value, 1, 1) - shift)
        grad_value += dot(probabilities.astype(value.dtype), grad_output, 0, 0)
        return grad_key + dot(grad_scores.astype(query.dtype), query, 0, 0), grad_value

    zeros = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    grad_key, grad_value = jax.lax.fori_loop(*of.query_blocks(first_key), add, zeros)
    store(grad_key_ref, of.scale * grad_key, num_left, of.width)
    store(grad_value_ref, grad_value, num_left, of.value_width)


class Results(NamedTuple):
    differences: dict[str, float]  # from plain JAX, with a mask and without
    causal_differences: dict[str, float]
    saved: int  # bytes
    saved_by_plain: int
    largest: int  # entries of the largest array in the program
    scores: int  # entries that they would have, of all heads


def main(heads: int = 8, length: int = 300, width: int = 24) -> Results:
    query, key, value = args = jax.random.normal(jax.random.key(0), (3, heads, length, width))
    by_heads = PartitionSpec("devices")
    short = query[:, :100], key[:, :75], value[:, :75]
    differences, causal_differences = (
        comparison.differences(
            partial(flash_attention, causal=c), partial(plain, causal=c), short, (0, None, 2), (by_heads,) * 3, by_heads
        )
        for c in (False, True)
    )
    results = Results(
        differences,
        causal_differences,
        *(comparison.residual_bytes(f, args) for f in (flash_attention, plain)),
        largest=comparison.largest_array(flash_attention, args),
        scores=heads * length**2,
    )
    assert max(*differences.values(), *causal_differences.values()) < 1e-4
    assert results.saved == 4 * query.nbytes + 4 * heads * length
    assert results.saved_by_plain > 4 * results.scores
    assert results.largest < results.scores / 4

    print(f"attention of {heads} heads over {length} positions, by a kernel on {blocks.platform()}")
    comparison.show(differences)
    print(f"  saved for backward: {results.saved:,} bytes; by plain JAX: {results.saved_by_plain:,}")
    print(f"  entries of the largest array: {results.largest:,}; of the scores: {results.scores:,}")
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
