"""Sums over the batch of a gradient for what is not mapped, in which every cotangent is counted once.

# Note: one cotangent for a whole batch

For `y, z = sin(u), x + u` over three rows of `x` and one `u`, `y` has one cotangent, and `z` has three:

    of u    g * cos(u) + h1 + h2 + h3

A rule computes `g * cos(u) + h`, which is three rows because `h` is, and JAX sums the rows: `g` counts three times (JAX
0.10.0 and a custom_vjp by hand; 0.12.0 raises). So the rule is asked for what comes from `y` and from `z` one by one,
and `sum_over_batches` adds each over the batches that it is for.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._compat import Batch, Primitive, ad, batching, mlir

NOT_MAPPED = (
    "{name} was mapped by jax.vmap and has an output that does not depend on the mapped inputs, although its rule for "
    "that output gives them a derivative, or uses them: it would be given the sum over the batch. Make the output "
    "depend on those inputs, such as by adding 0 * input."
)

sum_p = Primitive("sum_over_batches")


def sum_over_batches(
    terms: Sequence[jax.Array], absent: Sequence[frozenset[Batch]], sought: frozenset[Batch]
) -> jax.Array:
    """The sum of the terms, and of their rows.

    Args:
      terms: arrays of one type, batched or not.
      absent: for each, the batches that what it comes from does not depend on; its rows there are all the same.
      sought: the batches to be summed over. What depends on others depends on them still.
    """
    return sum_p.bind(*terms, absent=tuple(absent), sought=sought)


def _sum_impl(*terms: Any, absent: tuple[frozenset[Batch], ...], sought: frozenset[Batch]) -> Any:
    return functools.reduce(operator.add, terms)


def _sum_abstract(*terms: Any, absent: tuple[frozenset[Batch], ...], sought: frozenset[Batch]) -> Any:
    return terms[0]


def _sum_batch(
    axis: Any,
    terms: Sequence[Any],
    dims: Sequence[Any],
    *,
    absent: tuple[frozenset[Batch], ...],
    sought: frozenset[Batch],
) -> Any:
    batch = Batch(axis)
    if all(d is None for d in dims):  # JAX asks even so
        return sum_over_batches(terms, absent, sought), None
    if batch not in sought:
        moved = [batching.bdim_at_front(x, d, axis.size) for x, d in zip(terms, dims, strict=True)]
        return sum_over_batches(moved, absent, sought), 0
    summed = [
        x if d is None else example_of(x, d) if batch in without else jnp.sum(x, d)
        for x, d, without in zip(terms, dims, absent, strict=True)
    ]
    return sum_over_batches(summed, absent, sought), None


def example_of(array: Any, axis: int | None) -> Any:
    """One example of a batch, where it does not matter which; what has no batch is one."""
    if axis is None:
        return array
    if array.shape[axis] == 0:
        return jnp.zeros(array.shape[:axis] + array.shape[axis + 1 :], array.dtype)
    return jax.lax.index_in_dim(array, 0, axis, keepdims=False)


def _sum_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    moving = [(t, without) for t, without in zip(tangents, params["absent"], strict=True) if not isinstance(t, ad.Zero)]
    total = sum_p.bind(*primals, **params)
    if not moving:
        return total, ad.Zero(jax.typeof(total).to_tangent_aval())
    return total, sum_over_batches([t for t, _ in moving], [w for _, w in moving], params["sought"])


def _sum_transpose(cotangent: Any, *terms: Any, **params: Any) -> Any:
    return [cotangent if ad.is_undefined_primal(x) else None for x in terms]


sum_p.def_impl(_sum_impl)
sum_p.def_abstract_eval(_sum_abstract)
mlir.register_lowering(sum_p, mlir.lower_fun(_sum_impl, multiple_results=False), cacheable=False)
ad.primitive_jvps[sum_p] = _sum_jvp
ad.primitive_transposes[sum_p] = _sum_transpose
batching.fancy_primitive_batchers[sum_p] = _sum_batch
