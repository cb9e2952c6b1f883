"""`mark_non_differentiable` and `mark_dirty`, checked against what `forward` took and returned."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from jaxfn._compat import is_ref
from jaxfn._protocol.context import ContextState
from jaxfn._values.arrays import is_inexact


def non_differentiable_positions(name: str, state: ContextState, outputs: Sequence[Any]) -> frozenset[int]:
    """Where the marked outputs are among the outputs' array leaves; warns of what is not an output.

    # Note: two outputs, one array

        y = jnp.sin(x)                      for a vector, `y.ravel()` is another array eagerly; under `jax.jit` it is
        z = y.ravel()                       y itself, and so it is for many functions that change nothing
        ctx.mark_non_differentiable(z)      y must not lose its derivative by that

    Raises:
      ValueError: a marked array is returned more often than it was marked.
    """
    marked = jax.tree_util.tree_leaves(state.non_differentiable)
    positions: set[int] = set()
    for mark in marked:
        places = [i for i, output in enumerate(outputs) if mark is output]
        if not places:
            warnings.warn(
                f"{name}: mark_non_differentiable was given a value that forward did not return; it has no effect. "
                "Pass the very array that is returned.",
                stacklevel=2,
            )
        elif sum(mark is other for other in marked) < len(places) and is_inexact(jax.dtypes.result_type(mark)):
            raise ValueError(
                f"{name}: mark_non_differentiable was given an array that forward returns {len(places)} times, as "
                f"outputs {', '.join(map(str, places))}, so that it cannot be told which is meant. (A function that "
                "changes nothing, as `y.ravel()` of a vector, gives the array itself.) Where there is to be no "
                "derivative return another array, `jnp.array(y, copy=True)`, and mark that; or mark it once for each."
            )
        positions.update(places)
    return frozenset(positions)


def check_dirty(name: str, state: ContextState, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Checks what was marked dirty; returns whether there is an array among it, whose caller keeps the old value.

    Raises:
      ValueError: something that is not an array input, or an input of whose shape and dtype there is no output.
    """
    found_array = False
    for position, marked in enumerate(jax.tree_util.tree_leaves(state.dirty)):
        if not any(marked is x for x in inputs):
            raise ValueError(
                f"{name}: mark_dirty was given something that is not an array input of forward (argument {position}, "
                f"a {type(marked).__name__}). Pass the input as forward received it, and return its new value."
            )
        if is_ref(marked):
            continue
        found_array = True
        if not any(x.shape == marked.shape and x.dtype == marked.dtype for x in outputs):
            raise ValueError(
                f"{name}: mark_dirty was given an input of shape {marked.shape} and dtype {marked.dtype} (argument "
                f"{position}), but no output has that shape and dtype. JAX arrays are immutable: return the new value."
            )
    return found_array


def warn_of_dirty(name: str) -> None:
    """Says, once per Function, what mark_dirty means where arrays are immutable."""
    warnings.warn(
        f"{name}: mark_dirty on a JAX array does not change the caller's array; use the returned one. To write in "
        "place, pass a jax.Ref.",
        stacklevel=2,
    )
