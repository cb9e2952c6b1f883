"""Differences of jaxfn's results from those of the twins. Printed programs contain these functions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

ANOTHER_DRAW = "the gradient belongs to another draw than the output"
VALUES_DIFFER = "values differ"


def difference(got: Any, want: Any, tolerance: float) -> str:
    """Describes how two results differ, "" if they do not; values relative to the largest."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return "structures differ"
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    if any((ours.shape, ours.dtype) != (theirs.shape, theirs.dtype) for ours, theirs in pairs):
        return "shapes or dtypes differ"
    numbers = [(np.asarray(ours, np.float64), np.asarray(theirs, np.float64)) for ours, theirs in pairs]
    atol = tolerance * max([1, *(np.abs(b[np.isfinite(b)]).max(initial=0) for _, b in numbers)])
    is_same = all(np.allclose(a, b, rtol=tolerance, atol=atol, equal_nan=True) for a, b in numbers)
    return "" if is_same else "values differ"


def result_and_runs(measured: Any, arguments: tuple[Any, ...], runs: dict[str, int]) -> tuple[Any, list[int]]:
    """The result, and how often forward had run after one call and after two."""
    runs["count"], counts, result = 0, [], None
    for _ in range(2):
        result = jax.block_until_ready(measured(*arguments))
        jax.effects_barrier()
        counts.append(runs["count"])
    return result, counts


def difference_of_counts(got: Any, want: Any, argument: Any, tolerance: float) -> str:
    """Describes extra runs of forward compared with the hand-written one, or a gradient of another draw; "" if none."""
    (result, counts), (_, hand_written) = got, want
    # Not at all where the output is not used.
    if any(ours > theirs or bool(ours) is not bool(theirs) for ours, theirs in zip(counts, hand_written, strict=True)):
        return f"forward runs more often than hand-written: {counts}, not {hand_written}"
    return "" if is_of_one_draw(result, argument, tolerance) else "the gradient belongs to another draw than the output"


def is_of_one_draw(result: Any, argument: Any, tolerance: float) -> bool:
    """Whether loss = gradient . argument, which holds for one draw as stateful programs are linear."""
    if not isinstance(result, tuple):
        return True
    loss, gradient = (np.asarray(x, np.float64) for x in result)
    return np.allclose(loss, np.vdot(gradient, np.asarray(argument)), rtol=tolerance, atol=tolerance)
