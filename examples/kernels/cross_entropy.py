"""The cross entropy of softmax(hidden @ weight.T) over a large vocabulary, without the logits.

    python examples/kernels/cross_entropy.py

Why a Function: autodiff saves the logits, an array of (rows, vocabulary) that is many times larger than all else at the
end of a language model. Here no such array exists: the kernels compute one block of logits at a time. Saved for
backward are the inputs and one number for each row, the logarithm of the sum of exp(logits), with which backward
recomputes each block of probabilities.
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

ROWS, WORDS, ENTRIES = 64, 128, 16384  # of a block at most; 16 are the least
IGNORED = -100  # torch's default


def cross_entropy(hidden: jax.Array, weight: jax.Array, labels: jax.Array, ignored: int = IGNORED) -> jax.Array:
    """Computes -log(softmax(hidden @ weight.T)[label]) for each row, in float32.

    Args:
      hidden: (rows, width), the width small enough for a block.
      weight: (vocabulary, width).
      labels: (rows,), integers. One that is not in the vocabulary gives NaN.
      ignored: rows with this label have a loss of 0, and no gradient.
    """
    if hidden.shape[1:] != weight.shape[1:] or hidden.shape[:1] != labels.shape:
        raise ValueError(f"hidden {hidden.shape}, weight {weight.shape} and labels {labels.shape} do not go together")
    loss, _ = CrossEntropy.apply(hidden[None], weight[None], labels[None, :, None], ignored)
    return loss[0, :, 0]


def plain(hidden: jax.Array, weight: jax.Array, labels: jax.Array, ignored: int = IGNORED) -> jax.Array:
    """Computes the loss in plain JAX, for comparison."""
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))
    is_ignored = labels == ignored
    of_label = jnp.take_along_axis(logits, jnp.where(is_ignored, 0, labels)[:, None], axis=1)[:, 0]
    return jnp.where(is_ignored, 0, jax.nn.logsumexp(logits, axis=1) - of_label)


class CrossEntropy(jaxfn.Function):
    """The loss of hidden (batch, rows, width), weight (batch, words, width) and labels (batch, rows, 1).

    A batch of 1 is shared. Returns the losses, and the logarithms of the sums, (batch, rows, 1), for `backward`.
    """

    @staticmethod
    def forward(hidden: jax.Array, weight: jax.Array, labels: jax.Array, ignored: int):
        batch, num_rows = blocks.batch_of(hidden, weight, labels), hidden.shape[1]
        size, words = _rows_and_words(hidden, weight)
        return blocks.call(
            partial(_forward_kernel, words=words, **_known(hidden, weight, ignored)),
            steps=pl.cdiv(num_rows, size),
            inputs=[rows(hidden, size), whole(rows(weight, words)), numbers(labels, size)],
            outputs=[numbers(Array((batch, num_rows, 1), jnp.float32), size)] * 2,
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        hidden, weight, labels, ctx.ignored = inputs
        _, log_sum = output
        ctx.mark_non_differentiable(log_sum)
        ctx.save_for_backward(hidden=hidden, weight=weight, labels=labels, log_sum=log_sum)

    @staticmethod
    @jaxfn.once_differentiable
    def backward(ctx, grad_loss: jax.Array, _log_sum: jax.Array):
        args = *ctx.saved_tensors, grad_loss, ctx.ignored
        grad_hidden = HiddenGradient.apply(*args) if ctx.needs_input_grad.hidden else None
        grad_weight = WeightGradient.apply(*args) if ctx.needs_input_grad.weight else None
        return grad_hidden, grad_weight, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(CrossEntropy.apply, info, in_dims, args)


class HiddenGradient(jaxfn.Function):
    """The gradient of hidden. It is a Function for its batching rule, and has no derivative."""

    @staticmethod
    def forward(hidden, weight, labels, log_sum, grad_loss, ignored: int) -> jax.Array:
        batch = blocks.batch_of(hidden, weight, labels, log_sum, grad_loss)
        size, words = _rows_and_words(hidden, weight)
        per_row = [numbers(x, size) for x in (labels, log_sum, grad_loss)]
        (grad_hidden,) = blocks.call(
            partial(_hidden_kernel, words=words, **_known(hidden, weight, ignored)),
            steps=pl.cdiv(hidden.shape[1], size),
            inputs=[rows(hidden, size), whole(rows(weight, words)), *per_row],
            outputs=[rows(Array((batch, *hidden.shape[1:]), hidden.dtype), size)],
        )
        return grad_hidden

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(HiddenGradient.apply, info, in_dims, args)


class WeightGradient(jaxfn.Function):
    """The gradient of weight: each step of the grid takes some words of the vocabulary, and loops over all rows."""

    @staticmethod
    def forward(hidden, weight, labels, log_sum, grad_loss, ignored: int) -> jax.Array:
        batch = blocks.batch_of(hidden, weight, labels, log_sum, grad_loss)
        size, words = _rows_and_words(hidden, weight)
        per_row = [whole(numbers(x, size)) for x in (labels, log_sum, grad_loss)]
        (grad_weight,) = blocks.call(
            partial(_weight_kernel, size=size, **_known(hidden, weight, ignored)),
            steps=pl.cdiv(weight.shape[1], words),
            inputs=[whole(rows(hidden, size)), rows(weight, words), *per_row],
            outputs=[rows(Array((batch, *weight.shape[1:]), weight.dtype), words)],
        )
        return grad_weight

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims, *args):
        return blocks.apply_to_batch(WeightGradient.apply, info, in_dims, args)


def _rows_and_words(hidden: jax.Array, weight: jax.Array) -> tuple[int, int]:
    """Returns the numbers of rows and words in a block."""
    most = max(16, ENTRIES // blocks.padded(hidden.shape[2]))
    return blocks.padded(hidden.shape[1], min(ROWS, most)), blocks.padded(weight.shape[1], min(WORDS, most))


def _known(hidden: jax.Array, weight: jax.Array, ignored: int) -> dict[str, int]:
    """Returns the options of every kernel."""
    _, num_rows, width = hidden.shape
    return {"num_rows": num_rows, "num_words": weight.shape[1], "width": width, "ignored": ignored}


def _forward_kernel(
    hidden_ref, weight_ref, labels_ref, loss_ref, log_sum_ref,
    *, words: int, num_rows: int, num_words: int, width: int, ignored: int,
) -> None:  # fmt: skip
    num_left = num_rows - pl.program_id(1) * hidden_ref.shape[0]
    hidden, labels = load(hidden_ref, num_left, width), load(labels_ref, num_left, 1)

    def add(i: Any, so_far: Any) -> Any:
        largest, total, of_label = so_far
        weight = load(weight_ref, num_words - i * words, width, at=pl.ds(i * words, words))
        logits = dot(hidden, weight, 1, 1)
        word = i * words + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(word < num_words, logits, -jnp.inf)
        of_label += jnp.sum(jnp.where(word == labels, logits, 0), axis=1, keepdims=True)
        # The sum is relative to the largest logit so far, so that it cannot overflow.
        new = jnp.maximum(largest, jnp.max(logits, axis=1, keepdims=True))
        total = total * jnp.exp(largest - new) + jnp.sum(jnp.exp(logits - new), axis=1, keepdims=True)
        return new, total, of_label

    zeros = jnp.zeros(labels.shape, jnp.float32)
    largest, total, of_label = jax.lax.fori_loop(0, pl.cdiv(num_words, words), add, (zeros - jnp.inf, zeros, zeros))
    log_sum = largest + jnp.log(total)
    is_word = (labels >= 0) & (labels < num_words)
    loss = jnp.where(labels == ignored, 0, jnp.where(is_word, log_sum - of_label, jnp.nan))
    store(loss_ref, loss, num_left, 1)
    store(log_sum_ref, log_sum, num_left, 1)


def _grad_logits(
    hidden, weight, labels, log_sum, grad_loss, first_word: Any, num_words: int, ignored: int
) -> jax.Array:
    """Returns the gradient of a block of logits: softmax, minus 1 at the label."""
    logits = dot(hidden, weight, 1, 1)
    word = first_word + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_word = (labels >= 0) & (labels < num_words)
    grad_loss = jnp.where(labels == ignored, 0, jnp.where(is_word, grad_loss, jnp.nan))
    # Beyond the last word logits are 0, far above the others where those are large and negative: infinity times 0.
    softmax = jnp.where(word < num_words, jnp.exp(logits - log_sum), 0)
    return grad_loss * (softmax - (word == labels))


def _hidden_kernel(
    hidden_ref, weight_ref, labels_ref, log_sum_ref, grad_loss_ref, grad_hidden_ref,
    *, words: int, num_rows: int, num_words: int, width: int, ignored: int,
) -> None:  # fmt: skip
    num_left = num_rows - pl.program_id(1) * hidden_ref.shape[0]
    hidden = load(hidden_ref, num_left, width)
    labels, log_sum, grad_loss = (load(ref, num_left, 1) for ref in (labels_ref, log_sum_ref, grad_loss_ref))

    def add(i: Any, grad_hidden: jax.Array) -> jax.Array:
        weight = load(weight_ref, num_words - i * words, width, at=pl.ds(i * words, words))
        grad = _grad_logits(hidden, weight, labels, log_sum, grad_loss, i * words, num_words, ignored)
        return grad_hidden + dot(grad.astype(weight.dtype), weight, 1, 0)

    zeros = jnp.zeros(hidden.shape, jnp.float32)
    store(grad_hidden_ref, jax.lax.fori_loop(0, pl.cdiv(num_words, words), add, zeros), num_left, width)


def _weight_kernel(
    hidden_ref, weight_ref, labels_ref, log_sum_ref, grad_loss_ref, grad_weight_ref,
    *, size: int, num_rows: int, num_words: int, width: int, ignored: int,
) -> None:  # fmt: skip
    first_word = pl.program_id(1) * weight_ref.shape[0]
    weight = load(weight_ref, num_words - first_word, width)

    def add(i: Any, grad_weight: jax.Array) -> jax.Array:
        num_left, at = num_rows - i * size, pl.ds(i * size, size)
        hidden = load(hidden_ref, num_left, width, at)
        labels, log_sum, grad_loss = (load(ref, num_left, 1, at) for ref in (labels_ref, log_sum_ref, grad_loss_ref))
        grad = _grad_logits(hidden, weight, labels, log_sum, grad_loss, first_word, num_words, ignored)
        return grad_weight + dot(grad.astype(hidden.dtype), hidden, 0, 0)

    zeros = jnp.zeros(weight.shape, jnp.float32)
    store(grad_weight_ref, jax.lax.fori_loop(0, pl.cdiv(num_rows, size), add, zeros), num_words - first_word, width)


class Results(NamedTuple):
    differences: dict[str, float]  # from plain JAX
    saved: int  # bytes
    saved_by_plain: int
    needed: int  # bytes, by a compiled value and gradient
    needed_by_plain: int
    largest: int  # entries of the largest array in the program
    logits: int  # entries that they would have


def main(num_rows: int = 640, num_words: int = 5003, width: int = 40) -> Results:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (num_rows, width))
    weight = jax.random.normal(keys[1], (num_words, width)) / 4
    labels = jax.random.randint(keys[2], (num_rows,), 0, num_words).at[::7].set(IGNORED)
    args = hidden, weight, labels

    few = hidden[:80], weight[:301], jnp.where(labels[:80] < 0, IGNORED, labels[:80] % 301)
    by_rows = PartitionSpec("devices")
    differences = comparison.differences(
        cross_entropy, plain, few, (1, None, 0), (by_rows, PartitionSpec(), by_rows), by_rows
    )
    results = Results(
        differences,
        *(comparison.residual_bytes(f, args) for f in (cross_entropy, plain)),
        *(comparison.temporary_bytes(f, args) for f in (cross_entropy, plain)),
        largest=comparison.largest_array(cross_entropy, args),
        logits=num_rows * num_words,
    )
    assert max(differences.values()) < 1e-4
    assert results.saved == hidden.nbytes + weight.nbytes + labels.nbytes + 4 * num_rows
    assert results.largest < results.logits / 4
    assert results.needed < 4 * results.logits < results.needed_by_plain

    print(f"cross entropy of {num_rows} rows over {num_words:,} words, by a kernel on {blocks.platform()}")
    comparison.show(differences)
    print(f"  saved for backward: {results.saved:,} bytes; by plain JAX: {results.saved_by_plain:,}")
    print(f"  needed for a gradient: {results.needed:,} bytes; by plain JAX: {results.needed_by_plain:,}")
    print(f"  entries of the largest array: {results.largest:,}; of the logits: {results.logits:,}")
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
