"""Closeness: the errors that a good implementation may have, by the magnitude of the numbers.

An entry is right if its difference is at most what is allowed for it (`excess`, `agree`). That is an error that was
measured (`by_magnitude`), or else the rounding of the entry itself (`rounding_of_terms`).

# Note: groups of magnitudes

An error is allowed if the reference has errors of that size: its errors in a dtype are measured against float64. One
number for an array would be that of its largest entries:

    scores + where(mask, 0, -1e9), float32    [2.1, -1e9, 0.4, ...], with errors of 1e-7, 30, 3e-8, ...

so that scores may be wrong by 30. Therefore entries of about one magnitude are a group, of 8 binades, with errors of
its own. Three facts join groups that are too small to be measured alone:

- Numbers smaller than the largest error of the array are noise, whose magnitude says nothing: they are one group.
- Larger numbers do not have smaller errors: a group has at least the errors of those below it.
- Nor do smaller numbers have smaller relative errors: a group has at least the relative errors of those above it.

The smallest tenth of the entries may have the errors of the entry next to them, as an implementation may compute tails
to an absolute precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_TINY = float(np.finfo(np.float64).tiny)
_BINADES = 8
_SMALLEST = 0.1  # the fraction of entries that count as tails
_FALSE_ALARM_RATE = 1e-6
_FEW_ENTRIES = 14
_KURTOSIS = 3  # of the normal distribution, for which the effective number of entries is their number
_LARGEST_FACTOR = 2


def magnitude_groups(magnitudes: Array, floor: float = 0.0) -> Array:
    """Returns the group of each entry, as a number that grows with its magnitude."""
    finite = np.where(np.isfinite(magnitudes), np.maximum(magnitudes, floor), np.finfo(np.float64).max)
    with np.errstate(divide="ignore"):
        groups = np.floor(np.log2(finite) / _BINADES)
    return np.where(np.isfinite(groups), groups, np.floor(-1100 / _BINADES)).astype(int)


def group_scale(magnitudes: Array) -> Array:
    """Returns, for each entry, the largest finite magnitude in its group."""
    finite = np.where(np.isfinite(magnitudes), magnitudes, 0.0)
    groups, scale = magnitude_groups(finite), np.zeros(finite.shape)
    for group in np.unique(groups):
        scale[groups == group] = finite[groups == group].max()
    return scale


def largest(array: Any) -> Any:
    """Returns the largest absolute value, 0 for an empty array."""
    return np.max(abs(array), initial=0.0)


def rounding_of_terms(terms: Any, relative: float, of_array: float) -> Any:
    """Returns how much two ways to compute numbers may differ, as sums of terms of these sizes.

    Args:
      terms: the terms, or the numbers themselves.
      relative: the difference relative to the largest number of about that magnitude.
      of_array: the difference relative to the largest number: where larger terms cancel.
    """
    finite = np.where(np.isfinite(terms), abs(terms), 0.0)
    return relative * group_scale(finite) + of_array * largest(finite)


def excess(value: Any, expected: Any, allowed: Any) -> Any:
    """Returns the difference over the allowed one; above 1 is a mismatch, and `nan` agrees with nothing."""
    times = abs(value - expected) / np.maximum(allowed, _TINY)
    return np.where(value == expected, 0.0, np.where(np.isnan(times), np.inf, times))


def agree(value: Any, expected: Any, allowed: Any) -> Any:
    """Returns for each entry of an array that was computed in two ways whether it agrees; NaN equals NaN."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return (excess(value, expected, allowed) <= 1) | (np.isnan(value) & np.isnan(expected))


class ErrorStats(NamedTuple):
    """The expected size of the errors of each entry: the largest error, and the root mean square."""

    largest: Any
    rms: Any

    def maximum(self, other: ErrorStats) -> ErrorStats:
        """Returns the larger of both, for each size."""
        return ErrorStats(np.maximum(self.largest, other.largest), np.maximum(self.rms, other.rms))

    def scaled(self, factor: float) -> ErrorStats:
        """Returns the spread of errors that are `factor` times as large."""
        return ErrorStats(factor * self.largest, factor * self.rms)


def estimated(errors: Array) -> ErrorStats:
    """Estimates the errors of another good implementation from observed ones."""
    size = float(errors.max(initial=0.0))
    if size == 0.0:
        return ErrorStats(0.0, 0.0)
    squares = (errors / size) ** 2
    n = min(errors.size, _KURTOSIS * squares.sum() ** 2 / (squares**2).sum())
    rms = size * math.sqrt(squares.mean()) * (1 + (_FEW_ENTRIES / n) ** 2)
    return ErrorStats(max(_LARGEST_FACTOR * size, rms * math.sqrt(2 * math.log(errors.size / _FALSE_ALARM_RATE))), rms)


def observed(errors: Array) -> ErrorStats:
    """Returns the size of the observed errors alone."""
    return ErrorStats(float(errors.max(initial=0.0)), rms(errors))


def by_magnitude(
    errors: Array, magnitudes: Array, groups: Array, estimate: Callable[[Array], ErrorStats] = estimated
) -> ErrorStats:
    """Returns the expected errors of each entry, from errors that were measured for several samples.

    Args:
      errors: the errors, of shape (samples, *shape); NaN where there is none.
      magnitudes: the magnitudes of the entries, of this shape.
      groups: their `magnitude_groups`.
      estimate: returns the expected errors from those of a group.
    """
    present = np.unique(groups)
    finite = [errors[:, groups == group] for group in present]
    stats = np.array([estimate(e[np.isfinite(e)]) for e in finite]).reshape(-1, 2)
    scales = np.array([magnitudes[groups == group].max() for group in present])
    with np.errstate(all="ignore"):
        relative = np.where(scales[:, None] > 0, stats / scales[:, None], 0.0)
    from_above = np.maximum.accumulate(relative[::-1])[::-1] * scales[:, None]
    joined = np.maximum(np.maximum.accumulate(stats), from_above)
    indices, is_nonzero = np.searchsorted(present, groups), magnitudes > 0
    if is_nonzero.any():
        tail = int(np.quantile(indices[is_nonzero], _SMALLEST, method="lower"))
        joined[:tail] = np.maximum(joined[:tail], joined[tail])
    # The errors of few entries may all be as large as the largest of many.
    few = 1 + (_FEW_ENTRIES / np.bincount(indices.ravel(), minlength=len(present))) ** 2
    joined[:, 1] = np.where(joined[:, 1] > stats[:, 1], np.minimum(few * joined[:, 1], joined[:, 0]), stats[:, 1])
    return ErrorStats(joined[indices, 0], joined[indices, 1])


def rms(errors: Array) -> float:
    """Returns the root mean square, 0 of an empty array."""
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0
