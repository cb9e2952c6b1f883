"""Attention, which torch traces as one operation.

Note: it is not translated to `jax.nn.dot_product_attention`, and neither is torch's decomposition of
`scaled_dot_product_attention` (products, and a safe softmax). Up to JAX 0.12 that function does not select a fused
kernel automatically, so nothing would be gained. It computes the softmax in single precision for float64 too, rounds
the weights of half-precision arguments, returns the mean of all values for a row without keys (torch returns 0), and
takes more time and memory on a CPU. cuDNN's kernel, on request, has no forward mode and no second derivative. To use a
kernel, name it: `from_torch(f, ops={scaled_dot_product_attention: kernel})`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfn._torch.operations.table import composite
from jaxfn._torch.values.errors import TranslationError


def attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> Array:
    """Computes the attention of each query."""
    if dropout_p:
        raise TranslationError(
            "scaled_dot_product_attention with dropout is not supported, since it needs torch's random mask"
        )
    scores = _scores(query, key, is_causal, attn_mask, scale)
    sums = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(sums), sums, 0)[..., None])
    return jnp.einsum("...qk,...kd->...qd", weights, _per_head(value, query))


def _scores(query: Array, key: Array, is_causal: bool, mask: Array | None, scale: float | None) -> Array:
    key = _per_head(key, query)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key) * jnp.asarray(scale, query.dtype)
    if is_causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == np.bool_ else scores + mask


def _per_head(x: Array, query: Array) -> Array:
    """Repeats keys or values, if several heads of the query share one."""
    return x if x.shape[-3] == query.shape[-3] else jnp.repeat(x, query.shape[-3] // x.shape[-3], -3)


@composite("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    gradient: Array,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    sums: Array,
    *positional: Any,
    **options: Any,
) -> tuple[Array, ...]:
    """Returns the gradients of query, key and value; the options are those of `attention`."""

    def forward(query: Array, key: Array, value: Array) -> Array:
        return attention(query, key, value, *positional, **options).astype(gradient.dtype)

    pull: Callable[[Array], Any] = jax.vjp(forward, query, key, value)[1]
    return tuple(pull(gradient))
