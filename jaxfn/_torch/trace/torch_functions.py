"""torch functions that are replaced as a whole, since operations inside have no translation or no static sizes.

The functions' own results have known sizes. Each is replaced by one JAX function, which autograd inside traced code can
differentiate, or by other torch functions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.operations.indexing import read
from jaxfn._torch.operations.promotion import compute_dtype
from jaxfn._torch.trace.jax_function_node import JaxFunctionNode
from jaxfn._torch.trace.state import TraceState
from jaxfn._torch.values.errors import TranslationError


def _bind_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns the arguments of a Python function by name, with defaults."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _raise(state: TraceState, what: str) -> None:
    raise TranslationError(f"{state.name}: {what}{source_line()}")


# ---------------------------------------------------------------------------------------------------------- embeddings


def embedding_bag(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `torch.nn.functional.embedding_bag`."""
    arguments = _bind_arguments(func, args, kwargs)
    indices, weight, offsets, weights = (arguments[n] for n in ("input", "weight", "offsets", "per_sample_weights"))
    if arguments["max_norm"] is not None:
        with torch.no_grad():
            limits = arguments["max_norm"], arguments["norm_type"]
            torch.embedding_renorm_(weight.detach(), indices.contiguous(), *limits)
    if arguments["scale_grad_by_freq"]:
        _raise(
            state, "embedding_bag with `scale_grad_by_freq` is not supported: torch divides by the count of another row"
        )
    if indices.dim() == 2:
        offsets = torch.arange(indices.shape[0]) * indices.shape[1]
        weights = None if weights is None else weights.reshape(-1)
    bags = offsets.shape[0] - bool(arguments["include_last_offset"])
    padding = arguments["padding_idx"]
    padding = None if padding is None else padding % weight.shape[0]
    reduce = _BAGS[arguments["mode"]]

    def function(rows: Array, indices: Array, offsets: Array, *weights: Array) -> list[Array]:
        selected = rows.astype(compute_dtype(rows.dtype))
        selected = selected * weights[0][:, None] if weights else selected
        bag_indices = jnp.searchsorted(offsets[:bags], jnp.arange(indices.shape[0]), side="right") - 1
        if padding is not None:
            bag_indices = jnp.where(indices == padding, bags, bag_indices)  # Out of range: in no bag
        return [reduce(selected, bag_indices, bags).astype(rows.dtype)]

    indices = indices.reshape(-1)
    operands = [torch.embedding(weight, indices), indices, offsets, *([] if weights is None else [weights])]
    return JaxFunctionNode(state, function, "embedding_bag", [((bags, weight.shape[1]), weight.dtype)])(*operands)[0]


def _bag_sum(rows: Array, bag_indices: Array, bags: int) -> Array:
    return jnp.zeros((bags, rows.shape[1]), rows.dtype).at[bag_indices].add(rows, mode="drop")


def _bag_mean(rows: Array, bag_indices: Array, bags: int) -> Array:
    counts = jnp.zeros(bags, rows.dtype).at[bag_indices].add(1, mode="drop")
    return _bag_sum(rows, bag_indices, bags) / jnp.maximum(counts, 1)[:, None]


def _bag_max(rows: Array, bag_indices: Array, bags: int) -> Array:
    """Returns the largest row of each bag, whose derivative goes to the first of equal ones; 0 for an empty bag."""
    fixed, shape = lax.stop_gradient(rows), (bags, rows.shape[1])
    best = jnp.full(shape, -jnp.inf, rows.dtype).at[bag_indices].max(fixed, mode="drop")
    is_best = (fixed == best[jnp.minimum(bag_indices, bags - 1)]) | jnp.isnan(fixed)
    order = jnp.where(is_best, jnp.arange(rows.shape[0])[:, None], rows.shape[0])
    first = jnp.full(shape, rows.shape[0]).at[bag_indices].min(order, mode="drop")
    values = jnp.take_along_axis(rows, jnp.minimum(first, rows.shape[0] - 1), 0)
    return jnp.where(first < rows.shape[0], values, 0)


_BAGS: dict[str, Callable[[Array, Array, int], Array]] = {"sum": _bag_sum, "mean": _bag_mean, "max": _bag_max}

# ---------------------------------------------------------------------------------------------------------- losses


def ctc_loss(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `torch.nn.functional.ctc_loss`."""
    arguments = _bind_arguments(func, args, kwargs)
    scores, targets = arguments["log_probs"], arguments["targets"]
    lengths = [torch.as_tensor(arguments[name]).reshape(-1) for name in ("input_lengths", "target_lengths")]
    is_single = scores.dim() == 2
    scores = scores[:, None] if is_single else scores
    targets = targets[None] if is_single and targets.dim() == 1 else targets
    blank = arguments["blank"]

    def function(scores: Array, targets: Array, steps: Array, sizes: Array) -> list[Array]:
        if targets.ndim == 1:
            targets = _split_targets(targets, sizes)
        each: Any = jax.vmap(functools.partial(_ctc, blank=blank), (1, 0, 0, 0))
        return [each(scores, targets, steps, sizes)]

    node = JaxFunctionNode(state, function, "ctc_loss", [((scores.shape[1],), scores.dtype)])
    (losses,) = node(scores, targets, *lengths)
    if arguments["zero_infinity"]:
        losses = torch.where(losses == torch.inf, 0, losses)
    if arguments["reduction"] == "mean":
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if arguments["reduction"] == "sum" else losses[0] if is_single else losses


def one_hot(state: TraceState, func: Any, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """Implements `torch.nn.functional.one_hot`; for traced tensors by comparison with each class, also out of range."""
    classes = torch.arange(num_classes if num_classes >= 0 else int(tensor.max()) + 1)
    found = torch.embedding(classes[:, None], tensor)  # Negative where an index is out of range
    return torch.where(found < 0, found, found == classes)


def _split_targets(targets: Array, sizes: Array) -> Array:
    """Returns concatenated targets as one row each, padded with the following elements."""
    starts = jnp.cumsum(sizes) - sizes
    return targets[jnp.minimum(starts[:, None] + np.arange(targets.shape[0]), targets.shape[0] - 1)]


# The logarithm of probability 0. It is finite, since the derivative of the difference of two infinities is NaN.
_LOG_ZERO = -1e30


def _ctc(scores: Array, target: Array, steps: Array, size: Array, *, blank: int) -> Array:
    """Returns minus the log-probability of one target, with torch's derivative.

    torch assumes that the scores are logarithms of probabilities which sum to 1, so its derivative also contains the
    probabilities.
    """
    labels = jnp.full(2 * target.shape[0] + 1, blank).at[1::2].set(target)
    labels = jnp.where(np.arange(len(labels)) < 2 * size, labels, blank)  # The rest is padding.
    may_skip = jnp.concatenate([jnp.zeros(2, bool), (labels[2:] != blank) & (labels[2:] != labels[:-2])])[: len(labels)]
    bag_indices = np.arange(len(labels))

    def shift(x: Array, by: int) -> Array:
        return jnp.where(bag_indices < by, _LOG_ZERO, jnp.roll(x, by))

    def step(paths: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        time, row = at
        ways = jnp.logaddexp(paths, shift(paths, 1))
        ways = jnp.where(may_skip, jnp.logaddexp(ways, shift(paths, 2)), ways)
        return jnp.where(time < steps, jnp.maximum(ways + read(row, labels), _LOG_ZERO), paths), None

    first = jnp.where(bag_indices < 2, read(scores[0], labels), _LOG_ZERO)
    paths, _ = lax.scan(step, first, (jnp.arange(1, scores.shape[0]), scores[1:]))
    ends = jnp.where((bag_indices == 2 * size) | (bag_indices == 2 * size - 1), paths, _LOG_ZERO)
    total = jax.nn.logsumexp(ends)
    loss = jnp.where(total < _LOG_ZERO / 2, jnp.inf, -total)
    shares = jnp.where(np.arange(scores.shape[0]) < steps, jnp.exp(scores).sum(1), 0).sum()
    return loss + (shares - lax.stop_gradient(shares))


# ------------------------------------------------------------------------------------------------------ Python's values


def gaussian_nll_loss(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `torch.nn.functional.gaussian_nll_loss`, without its check of negative variances."""
    arguments = _bind_arguments(func, args, kwargs)
    x, variance = arguments["input"], arguments["var"]
    if not isinstance(variance, torch.Tensor):
        variance = torch.full_like(x, variance)
    if variance.shape == x.shape[:-1]:
        variance = variance[..., None]
    fits = variance.ndim == x.ndim and sum(n for n, m in zip(variance.shape, x.shape, strict=True) if n != m) <= 1
    if not fits:
        raise ValueError(f"gaussian_nll_loss: a variance of shape {tuple(variance.shape)} for {tuple(x.shape)}")
    variance = variance.clone()
    with torch.no_grad():
        variance.clamp_(min=arguments["eps"])
    loss = 0.5 * (variance.log() + (x - arguments["target"]) ** 2 / variance)
    loss = loss + 0.5 * math.log(2 * math.pi) if arguments["full"] else loss
    reduce = {"none": lambda: loss, "mean": loss.mean, "sum": loss.sum}
    if arguments["reduction"] not in reduce:
        raise ValueError(f"gaussian_nll_loss: reduction is {arguments['reduction']!r}, expected one of {[*reduce]}")
    return reduce[arguments["reduction"]]()
