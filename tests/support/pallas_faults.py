"""Faults planted in the kernels of `examples/kernels`, and which check of kernelcheck finds each.

A fault is one piece of text replaced in one function or class of a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn
from tests.support.kernel_examples import ATTENTION, CAUSAL, CROSS_ENTROPY, FOLDER, LAYER_NORM, Change, Kernel, small
from tests.support.kernel_faults import all_but


@dataclass(frozen=True)
class Fault:
    """One piece of text replaced.

    Attributes:
      kernel: the one that it shows in.
      file: where it is.
      definition: a function or class of that file, which contains the text once.
      name: what is wrong.
      old: the text.
      new: what stands there instead.
      check: the check that is due to find it; by default outputs and gradients in float32 are enough.
    """

    kernel: Kernel
    file: str
    definition: str
    name: str
    old: str
    new: str
    check: str = ""

    def __str__(self) -> str:
        return f"{self.kernel}: {self.definition}: {self.name}"

    def change(self) -> Change:
        source = (FOLDER / f"{self.file}.py").read_text()
        pattern = rf"^(def|class) {self.definition}\b.*?(?=^(def|class|if) |\Z)"
        found = re.search(pattern, source, re.DOTALL | re.MULTILINE)
        assert found, f"there is no {self.definition} in {self.file}.py"
        text = found[0]
        assert text.count(self.old) == 1, f"{self}: {self.old!r} is there {text.count(self.old)} times"
        return self.file, text, text.replace(self.old, self.new)

    def module(self) -> ModuleType:
        return small(self.kernel.module, self.change())


def inputs(kernel: Kernel) -> tuple[Any, ...]:
    """Such that there are three blocks of everything, the last of them partly filled."""
    if kernel is LAYER_NORM:
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(37, 19), (19,), (19,)])
    if kernel is CROSS_ENTROPY:
        labels = np.random.default_rng(0).integers(0, 37, 35, dtype=np.int32)
        labels[[0, 1, 2, 6, 20]] = 36, 0, 16, -100, -100
        return *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(35, 5), (37, 5)]), labels
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(2, 35, 5), (2, 37, 5), (2, 37, 7)])


def found_by(fault: Fault) -> list[str]:
    """The checks that find it, of those of outputs and gradients and the one that is due to."""
    plain = fault.kernel.plain(small(fault.kernel.module))
    function = fault.kernel.of(fault.module())
    skip = all_but(fault.check)
    dtypes = ["float32", "bfloat16"] if fault.check else ["float32"]
    report = jaxfn.kernelcheck(function, plain, inputs(fault.kernel), dtypes=dtypes, skip=skip, raise_exception=False)
    return list(dict.fromkeys(f"{row.check} ({row.dtype})" for row in report.failures))


FAULTS: list[Fault] = []


def planted(kernel: Kernel, definition: str, *faults: tuple[str, ...], file: str | None = None) -> None:
    FAULTS.extend(Fault(kernel, file or kernel.module, definition, *fault) for fault in faults)


planted(
    LAYER_NORM,
    "_forward_kernel",
    ("no mask", "jnp.where(within(x.shape, num_left, width), x - mean, 0)", "x - mean"),
    ("mask one column short", "within(x.shape, num_left, width)", "within(x.shape, num_left, width - 1)"),
    ("eps dropped", "variance + eps", "variance"),
    ("variance of a sample", "keepdims=True) / width\n    rstd", "keepdims=True) / (width - 1)\n    rstd"),
    ("variance with cancellation", "jnp.sum(centered * centered, axis=1, keepdims=True) / width",
     "jnp.sum(x * x, axis=1, keepdims=True) / width - mean * mean", "constants"),
    ("weight and bias swapped", "centered * rstd * weight + bias", "centered * rstd * bias + weight"),
    ("mean not subtracted", "x - mean", "x"),
    ("input rounded", "load(x_ref, num_left, width)", "load(x_ref, num_left, width).astype(jnp.bfloat16)"),
    ("off by one block", "pl.program_id(1) * x_ref.shape[0]", "(pl.program_id(1) + 1) * x_ref.shape[0]"),
    ("one column too few read", "load(x_ref, num_left, width)", "load(x_ref, num_left, width - 1)"),
    ("read out of bounds", "load(x_ref, num_left, width)", "load(x_ref, num_left, 2 * width)"),
)  # fmt: skip
planted(
    LAYER_NORM,
    "_backward_kernel",
    ("gradient through the deviation dropped", "scaled - by_mean - normalized * by_deviation", "scaled - by_mean"),
    ("scale missing", "store(grad_x_ref, rstd * (scaled", "store(grad_x_ref, (scaled"),
    ("no weight", "scaled = grad_y * load(weight_ref, 1, width)", "scaled = grad_y"),
    ("deviation without the weight", "jnp.sum(scaled * normalized, axis=1", "jnp.sum(grad_y * normalized, axis=1"),
    ("weight's gradient a mean", "jnp.sum(grad_y * normalized, axis=0", "jnp.mean(grad_y * normalized, axis=0"),
    ("reduction over rows dropped", "jnp.sum(grad_y, axis=0, keepdims=True)", "grad_y[:1]"),
    ("rows beyond the array summed", "num_rows - pl.program_id(1) * x_ref.shape[0]", "num_rows"),
    ("one row too few summed", "num_rows - pl", "num_rows - 1 - pl"),
    ("zeros for the weight", "store(grad_weight_ref, jnp", "store(grad_weight_ref, 0 * jnp"),
    ("transposed by accident", "by_mean = jnp.sum(scaled, axis=1, keepdims=True)",
     "by_mean = jnp.sum(scaled, axis=0, keepdims=True)"),
)  # fmt: skip
planted(
    LAYER_NORM,
    "LayerNorm",
    ("weight's gradient of the first block alone", "grad_weight.sum(1)", "grad_weight[:, 0]"),
    ("no gradient of the bias", "grad_bias.sum(1)", "None"),
    ("mean and deviation saved the wrong way", "mean=mean, rstd=rstd", "mean=rstd, rstd=mean"),
    ("the rows of the last block dropped", "pl.cdiv(num_rows, size)", "(num_rows // size)"),
    ("weight saved for x", "x=inputs[0]", "x=0 * inputs[0] + inputs[1]"),
    ("output rounded", "Array((batch, num_rows, width), x.dtype)", "Array((batch, num_rows, width), jnp.bfloat16)"),
)  # fmt: skip
planted(
    LAYER_NORM,
    "LayerNormGradient",
    ("the rows of the last block dropped", "steps = pl.cdiv(num_rows, size)", "steps = num_rows // size"),
    ("each step writes to the first", "lambda step: (step, 0, 0)", "lambda step: (0, 0, 0)"),
    ("x for the gradient", "rows(grad_y, size)", "rows(x, size)"),
)  # fmt: skip
planted(
    CROSS_ENTROPY,
    "_forward_kernel",
    ("words beyond the vocabulary summed", "jnp.where(word < num_words, logits, -jnp.inf)", "logits"),
    ("mask one word short", "word < num_words", "word < num_words - 1"),
    ("label within the block", "word = i * words + jax", "word = jax"),
    ("last block dropped", "pl.cdiv(num_words, words)", "num_words // words"),
    ("sum not rescaled", "total * jnp.exp(largest - new)", "total"),
    ("largest of the block alone", "jnp.maximum(largest, jnp.max(logits, axis=1, keepdims=True))",
     "jnp.max(logits, axis=1, keepdims=True)", "scales"),
    ("no logarithm", "largest + jnp.log(total)", "largest + total"),
    ("logit of the label not summed over blocks", "of_label += jnp.sum(", "of_label = jnp.sum("),
    ("sum never written", "    store(log_sum_ref, log_sum, num_left, 1)\n", ""),
    ("stale accumulator", "new, total, of_label\n\n", "new, total, so_far[2]\n\n"),
    ("one column too few", "num_words - i * words, width, at", "num_words - i * words, width - 1, at"),
    ("read out of bounds", "num_words - i * words, width, at", "num_words + words - i * words, 2 * width, at"),
)  # fmt: skip
planted(
    CROSS_ENTROPY,
    "_grad_logits",
    ("label not subtracted", " - (word == labels)", ""),
    ("label within the block", "word = first_word + jax", "word = jax"),
    ("not normalized", "jnp.exp(logits - log_sum)", "jnp.exp(logits)"),
    ("scale missing", "grad_loss * (softmax", "(softmax"),
    ("the others are ignored", "labels == ignored, 0,", "labels != ignored, 0,"),
    ("bf16 logits", "logits = dot(hidden, weight, 1, 1)", "logits = dot(hidden, weight, 1, 1).astype(jnp.bfloat16)"),
    ("a probability's derivative", "(softmax - (word == labels))", "softmax * (1 - softmax)"),
)  # fmt: skip
planted(
    CROSS_ENTROPY,
    "_hidden_kernel",
    ("last block dropped", "pl.cdiv(num_words, words)", "num_words // words"),
    ("block alone", "return grad_hidden + dot", "return dot"),
    ("gradient of logits rounded", "grad.astype(weight.dtype)", "grad.astype(jnp.bfloat16).astype(weight.dtype)"),
    ("wrong first word", "grad_loss, i * words,", "grad_loss, (i + 1) * words,"),
    ("read out of bounds", "num_words - i * words, width, at", "num_words + words - i * words, 2 * width, at"),
)  # fmt: skip
planted(
    CROSS_ENTROPY,
    "_weight_kernel",
    ("last block dropped", "pl.cdiv(num_rows, size)", "num_rows // size"),
    ("transposed", "hidden, 0, 0)", "hidden, 1, 0)"),
    ("rows beyond the array summed", "num_rows - i * size,", "num_rows,"),
    ("wrong first word", "pl.program_id(1) * weight_ref.shape[0]", "pl.program_id(1) * hidden_ref.shape[0]"),
    ("word within the block", "grad_loss, first_word,", "grad_loss, 0,"),
    ("mean over rows", "store(grad_weight_ref, jax", "store(grad_weight_ref, 1 / num_rows * jax"),
    ("one word too few written", "zeros), num_words - first_word", "zeros), num_words - 1 - first_word"),
)  # fmt: skip
planted(
    CROSS_ENTROPY,
    "CrossEntropy",
    ("no gradient of the weight", "return grad_hidden, grad_weight,", "return grad_hidden, None,"),
    ("gradients depend on each other", "if ctx.needs_input_grad.hidden else",
     "if ctx.needs_input_grad.weight else", "subsets"),
    ("the rows of the last block dropped", "pl.cdiv(num_rows, size)", "num_rows // size"),
)  # fmt: skip
planted(
    CAUSAL,
    "_Attention",
    ("scale missing", "self.scale * dot", "dot"),
    ("mask shows the next key", "column <= first_query", "column <= 1 + first_query"),
    ("mask hides the own key", "column <= first_query", "column < first_query"),
    ("mask within the block of keys", "column = first_key + jax", "column = jax"),
    ("mask within the block of queries", "column <= first_query + jax", "column <= jax"),
    ("no mask", "if self.causal:\n            is_seen", "if False:\n            is_seen"),
    ("one block of keys too few", "first_query + self.queries + self.keys - 1,", "first_query + self.queries - 1,"),
    ("last block of queries dropped", "pl.cdiv(self.num_queries, self.queries)", "self.num_queries // self.queries"),
)  # fmt: skip
planted(
    ATTENTION,
    "_Attention",
    ("keys beyond the array seen", "column < self.num_keys", "column < self.num_keys + self.keys"),
    ("one key too few seen", "column < self.num_keys", "column < self.num_keys - 1"),
    ("last block of keys dropped", "num_blocks = pl.cdiv(self.num_keys, self.keys)",
     "num_blocks = self.num_keys // self.keys"),
    ("causal where it is not asked", "if not self.causal:", "if False:"),
)  # fmt: skip
planted(
    CAUSAL,
    "_forward_kernel",
    ("sum not rescaled", "total = rescale * total +", "total = total +"),
    ("output not rescaled", "rescale * output + dot", "output + dot"),
    ("largest of the block alone", "jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))",
     "jnp.max(scores, axis=1, keepdims=True)", "scales"),
    ("not divided", "output / total", "output"),
    ("sum without the logarithm", "largest + jnp.log(total)", "largest + total"),
    ("output of the last block alone", "rescale * output + dot", "dot"),
    ("off by one block of keys", "first_key, at = i * of.keys, pl.ds(i * of.keys, of.keys)",
     "first_key, at = i * of.keys, pl.ds(jnp.maximum(i - 1, 0) * of.keys, of.keys)"),
    ("sums never written", "    store(log_sum_ref, largest + jnp.log(total), of.num_queries - first_query, 1)\n", ""),
    ("one column of the value too few read", "of.value_width, at)", "of.value_width - 1, at)"),
)  # fmt: skip
planted(
    CAUSAL,
    "_query_kernel",
    ("shift missing", "(dot(grad_output, value, 1, 1) - shift)", "dot(grad_output, value, 1, 1)"),
    ("scale missing", "of.scale * jax", "jax"),
    ("probabilities missing", "grad_scores = probabilities * (", "grad_scores = ("),
    ("probabilities not normalized", "first_key) - log_sum)", "first_key))"),
    ("sum and shift swapped", "log_sum, shift = load(log_sum_ref, num_left, 1), load(shift_ref, num_left, 1)",
     "shift, log_sum = load(log_sum_ref, num_left, 1), load(shift_ref, num_left, 1)"),
)  # fmt: skip
planted(
    CAUSAL,
    "_key_value_kernel",
    ("scale on the value too", "store(grad_value_ref, grad_value,", "store(grad_value_ref, of.scale * grad_value,"),
    ("scores for probabilities", "dot(probabilities.astype(value.dtype), grad_output, 0, 0)",
     "dot(grad_scores.astype(value.dtype), grad_output, 0, 0)"),
    ("block alone for the key", "return grad_key + dot", "return dot"),
    ("stale accumulator", "query, 0, 0), grad_value\n", "query, 0, 0), so_far[1]\n"),
    ("queries beyond the array summed", "queries_left = of.num_queries - first_query", "queries_left = of.num_queries"),
    ("mask within the block", "of.scores(query, key, first_query, first_key)", "of.scores(query, key, 0, first_key)"),
)  # fmt: skip
planted(
    CAUSAL,
    "FlashAttention",
    ("shift of the gradient alone", " * output.astype(jnp.float32), axis=2", ", axis=2"),
    ("shift in bf16", "axis=2, keepdims=True)", "axis=2, keepdims=True).astype(jnp.bfloat16).astype(jnp.float32)"),
    ("gradients depend on each other", "if ctx.needs_input_grad.query:", "if ctx.needs_input_grad.key:", "subsets"),
    ("value's gradient with the key's alone", "if ctx.needs_input_grad.key or ctx.needs_input_grad.value:",
     "if ctx.needs_input_grad.key:", "subsets"),
    ("the queries of the last block dropped", "pl.cdiv(of.num_queries, of.queries)", "of.num_queries // of.queries"),
    ("key saved for value", "value=value,", "value=jnp.broadcast_to(key[..., :1], value.shape),"),
)  # fmt: skip
planted(
    CAUSAL,
    "KeyValueGradient",
    ("the keys of the last block dropped", "pl.cdiv(of.num_keys, of.keys)", "of.num_keys // of.keys"),
    ("queries for gradients", "whole(rows(grad_output, of.queries))",
     "whole(rows(0 * grad_output + query[..., :1], of.queries))"),
)  # fmt: skip
planted(
    LAYER_NORM,
    "Block",
    ("each example is the first", "0 if is_shared else batch", "0", "vmap"),
    file="blocks",
)
planted(
    CAUSAL,
    "Block",
    ("each head is the first", "0 if is_shared else batch", "0"),
    file="blocks",
)
planted(
    CAUSAL,
    "apply_to_batch",
    ("batch and heads exchanged in the outputs", "y.reshape(info.batch_size, inner, *y.shape[1:])",
     "y.reshape(inner, info.batch_size, *y.shape[1:]).swapaxes(0, 1)", "vmap"),
    ("batch and heads exchanged in what is unbatched", "x = x[None]",
     "x = jnp.repeat(x, info.batch_size, 0).reshape(info.batch_size, inner, *x.shape[1:])", "vmap"),
    ("examples in reverse", "return x.reshape(-1, *x.shape[2:])", "return x[::-1].reshape(-1, *x.shape[2:])", "vmap"),
    file="blocks",
)  # fmt: skip
planted(
    LAYER_NORM,
    "apply_to_batch",
    ("examples in reverse", "y.reshape(info.batch_size, inner, *y.shape[1:])",
     "y.reshape(info.batch_size, inner, *y.shape[1:])[::-1]", "vmap"),
    file="blocks",
)  # fmt: skip
planted(
    LAYER_NORM,
    "store",
    ("output rounded", "value.astype(ref.dtype)", "value.astype(jnp.bfloat16).astype(ref.dtype)"),
    file="blocks",
)
planted(
    CROSS_ENTROPY,
    "load",
    ("no mask", "triton.load(view, mask=mask, other=jnp.zeros((), ref.dtype))", "view[...]"),
    ("ones for zeros", "other=jnp.zeros((), ref.dtype)", "other=jnp.ones((), ref.dtype)"),
    file="blocks",
)
planted(CROSS_ENTROPY, "within", ("one row too far", "row < num_rows", "row <= num_rows"), file="blocks")
planted(
    CROSS_ENTROPY,
    "whole",
    ("the last rows not seen", "pl.cdiv(block.array.shape[1], size) * size", "size"),
    file="blocks",
)
