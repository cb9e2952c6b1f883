"""Bounds of a kernel's error.

# Note: how the bound is computed

The expected values are those of the reference in float64, for inputs rounded to the kernel's dtype. The error of a good
implementation depends on how much the function magnifies rounding errors, so it is measured on the reference itself,
run in that dtype, for each group of entries of about one magnitude (see `_check/closeness.py`). A kernel passes if its
largest error and the root mean square of its errors are at most `factor` times those of the reference in every group.
One measurement alone may be small by luck:

    x = [1.25, 0.5, 3.0], bfloat16     the sum is 4.75
    reference (adds from the left)     4.75, with an error of 0, so that no kernel could have any error
    kernel (an online mean, times 3)   4.78, off by one unit in the last place, which is a good result

So six terms make the measurement robust:

- Several samples. Inputs are changed by a few units in the last place, with new cotangents for each sample, and the
  errors of all samples are taken together.
- Rounding of the inputs. The change of the float64 result is measured when each input is changed by less than half a
  unit in the last place, and is allowed in addition. It is large where a function is ill-conditioned (a gradient that
  cancels, a difference of large numbers, a kink).
- Few entries. The root mean squares of the errors of two good implementations, from `n` entries, differ by a factor of
  up to `1 + (14 / n) ** 2`, except once in a million times, and their largest errors are up to `sqrt(2 log(n / 1e-6))`
  times the root mean square. If a few entries dominate, `n` is their effective number. A largest error that is much
  larger than the others counts twice, as another implementation has its own in other entries.
- The last digit. Two units in the last place of an entry are always allowed, and half a unit in the norm.
- Scaled inputs. Small inputs are nearly equal, for which the errors of a reference may all be small. So numbers of
  about one magnitude are allowed the largest error that they have for the inputs themselves.
- Exact zeros. A gradient that is exactly zero in the reference for all samples (of attention to one key, say) does not
  show the size of rounding errors. A few units in the last place of cotangents times outputs times inputs are allowed.

An entry that is not finite in the reference in that dtype is not compared, unless float64 gives the same infinity. A
kernel that overflows or returns NaN where the reference is finite is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._check.closeness import Array, ErrorStats, by_magnitude, magnitude_groups, rms
from jaxfn._kernelcheck.report import KernelcheckEntry, KernelcheckRow

_ENTRY_ULPS = 2.0
_NORM_ULPS = 0.5
_EXACT_ZERO_ULPS = 8.0
_WORST_SHOWN = 5


@dataclass(frozen=True)
class ExpectedArray:
    """The expected values of one output or gradient, for several samples."""

    exact: Array  # the values in float64, of shape (draws, *shape)
    is_comparable: Array  # which entries can be compared
    groups: Array  # the group of magnitudes of each entry, of this shape without `draws`
    error: ErrorStats  # the errors of the reference in the dtype, of each entry
    input_rounding: ErrorStats  # the change of `exact` by rounding of the inputs, of each entry
    precision: float  # the relative spacing of the dtype
    tiny: float  # the smallest normal number of the dtype

    def at(self, draws: Sequence[int]) -> ExpectedArray:
        """Selects some samples; the errors stay those of all samples."""
        return replace(self, exact=self.exact[list(draws)], is_comparable=self.is_comparable[list(draws)])

    @property
    def is_exact_zero(self) -> bool:
        """Whether all values are zero without any error, which does not show the size of errors."""
        return not (self.exact.any() or np.any(self.error.largest) or np.any(self.input_rounding.largest))

    def with_cancellation(self, size: float) -> ExpectedArray:
        """Allows rounding errors of terms of this size that cancel."""
        error = _EXACT_ZERO_ULPS * self.precision * size
        return replace(self, error=self.error.maximum(ErrorStats(error, error)))

    def with_equal_inputs(self, other: ExpectedArray) -> ExpectedArray:
        """Allows for equal inputs, whose errors may all be as large as the largest for unequal inputs."""
        error, input_rounding = (ErrorStats(s.largest, s.largest) for s in (other.error, other.input_rounding))
        return replace(
            self, error=self.error.maximum(error), input_rounding=self.input_rounding.maximum(input_rounding)
        )

    def with_errors_of(self, other: ExpectedArray) -> ExpectedArray:
        """Allows the largest error that numbers of about the same magnitude, or smaller ones, have in other results."""
        largest = np.zeros(self.groups.shape)
        for group in np.unique(self.groups):
            is_smaller = other.groups <= group
            largest[self.groups == group] = np.where(is_smaller, other.error.largest, 0.0).max(initial=0.0)
        return replace(self, error=self.error.maximum(ErrorStats(largest, 0.0)))

    def summed(self) -> ExpectedArray:
        """Returns the expected sum over all samples, as a single sample."""
        exact = np.where(self.is_comparable, self.exact, 0.0)
        rounding = self.precision * abs(exact).sum(0)
        more = ErrorStats(rounding, rounding)
        root = math.sqrt(len(exact))
        return replace(
            self,
            exact=exact.sum(0, keepdims=True),
            is_comparable=self.is_comparable.all(0, keepdims=True),
            error=self.error.scaled(root).maximum(more),
            input_rounding=self.input_rounding.scaled(root),
        )

    def overflow(self, values: Array) -> KernelcheckRow:
        """Checks only that a kernel's values are finite where those of the reference are."""
        values = np.asarray(values, np.float64)
        is_wrong = self.is_comparable & np.isfinite(self.exact) & ~np.isfinite(values)
        return self.compare(np.where(is_wrong, values, self.exact), 1.0)

    def compare(self, values: Array, factor: float) -> KernelcheckRow:
        """Compares a kernel's values with the expected values."""
        exact, comparable = self.exact, self.is_comparable
        values = np.asarray(values, np.float64)
        with np.errstate(all="ignore"):
            errors = np.where((values == exact) | ~comparable, 0.0, abs(values - exact))
            errors[np.isnan(errors)] = np.inf
            rounding = np.where(np.isfinite(exact), self.precision * abs(exact), 0.0) + self.tiny
            allowed = factor * self.error.largest + self.input_rounding.largest + _ENTRY_ULPS * rounding
            excess = errors / allowed
        count = int((excess > 1).sum())
        norm, allowed_norm = self._norms(errors, rounding, factor)
        worst: list[KernelcheckEntry] = []
        of_all_samples = excess.max(0, initial=0.0)
        for flat_index in np.argsort(-of_all_samples, axis=None, kind="stable")[:_WORST_SHOWN]:
            entry = tuple(map(int, np.unravel_index(flat_index, of_all_samples.shape)))
            if worst and of_all_samples[entry] <= 1:
                break
            index = int(excess[:, *entry].argmax()), *entry
            ulps = self._ulps(float(errors[index]), float(exact[index]))
            worst.append(
                KernelcheckEntry(entry, *map(float, (values[index], exact[index], errors[index], allowed[index], ulps)))
            )
        message = ""
        if count:
            message = f"{count:,} of {exact.size:,} entries have an error larger than allowed"
        elif norm > allowed_norm:
            message = f"the root mean square of the errors is {norm:.2g}, allowed is {allowed_norm:.2g}"
        return KernelcheckRow(
            passed=not message,
            message=message,
            entries=worst,
            count=count,
            total=exact.size,
            norm=norm,
            allowed_norm=allowed_norm,
        )

    def _norms(self, errors: Array, rounding: Array, factor: float) -> tuple[float, float]:
        """Returns the root mean square of the errors and the largest allowed, in the group where it is worst."""
        norms = [(0.0, 0.0)]
        for group in np.unique(self.groups):
            is_inside = self.groups == group
            comparable = self.is_comparable[:, is_inside]
            expected = factor * self.error.rms + self.input_rounding.rms
            allowed = np.broadcast_to(expected, self.groups.shape)[is_inside].max() + _NORM_ULPS * rms(
                rounding[:, is_inside][comparable]
            )
            norms.append((rms(errors[:, is_inside][comparable]), float(allowed)))
        return max(norms, key=lambda norm: norm[0] / max(norm[1], self.tiny))

    def with_exact(self, exact: Array) -> ExpectedArray:
        """Returns these expectations with other values, all of which are compared, unless they are not finite."""
        exact = np.asarray(exact, np.float64)
        return replace(self, exact=exact, is_comparable=np.isfinite(exact))

    def _ulps(self, error: float, exact: float) -> float:
        """Returns an error in units in the last place of the expected value."""
        if not math.isfinite(error + exact):
            return math.inf if error else 0.0
        return error / (self.precision * 2.0 ** math.floor(math.log2(max(abs(exact), self.tiny))))


@dataclass(frozen=True)
class ExpectedIntegers:
    """The expected values of one integer or boolean output, for several samples."""

    exact: Array  # the values of the reference in float64, of shape (draws, *shape)
    reference: Array  # the values of the reference in the dtype, which are right too

    def at(self, draws: Sequence[int]) -> ExpectedIntegers:
        """Selects some samples."""
        return ExpectedIntegers(self.exact[list(draws)], self.reference[list(draws)])

    def with_exact(self, exact: Array) -> ExpectedIntegers:
        """Returns these expectations with other values."""
        return ExpectedIntegers(exact, exact)

    def overflow(self, values: Array) -> KernelcheckRow:
        """Compares a kernel's values: integers do not overflow to infinity."""
        return self.compare(values)

    def compare(self, values: Array, factor: float = 1.0) -> KernelcheckRow:
        """Compares a kernel's values with the expected values, which they equal or not, whatever the factor."""
        wrong = (values != self.exact) & (values != self.reference)
        count = int(wrong.sum())
        message = f"{count:,} of {wrong.size:,} entries differ from the reference" if count else ""
        return KernelcheckRow(passed=not count, message=message, count=count, total=wrong.size)


def expect(exact: Any, reference: Any, nearby: Any, dtype: Any) -> ExpectedArray:
    """Returns the expected values of an array, with the sizes of their errors.

    Args:
      exact: the results of the reference in float64.
      reference: the results of the reference in the dtype.
      nearby: the results of the reference in float64 for inputs with rounding noise.
      dtype: the dtype of the kernel's inputs.
    """
    exact, reference, nearby = (np.asarray(a, np.float64) for a in (exact, reference, nearby))
    info = jnp.finfo(dtype)
    is_infinite = np.isinf(exact) & (reference == exact)
    with np.errstate(all="ignore"):
        deviation, input_rounding = abs(reference - exact), abs(nearby - exact)
    is_finite = np.isfinite(deviation) & np.isfinite(input_rounding)
    magnitudes = np.where(is_finite, abs(exact), 0.0).max(0, initial=0.0)
    groups = magnitude_groups(magnitudes, floor=deviation[is_finite].max(initial=0.0))
    error, rounding = (
        by_magnitude(np.where(is_finite, e, np.nan), magnitudes, groups) for e in (deviation, input_rounding)
    )
    precision, tiny = float(info.eps), float(info.smallest_normal)
    return ExpectedArray(exact, is_finite | is_infinite, groups, error, rounding, precision, tiny)
