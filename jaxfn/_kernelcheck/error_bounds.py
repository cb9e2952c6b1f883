"""Bounds of a kernel's error.

# Note: the rule

What is right is what the reference gives in float64, for inputs that were rounded to the kernel's dtype. How far off a
good implementation may be is not known beforehand: it depends on how the function magnifies rounding errors, so it is
measured on the reference itself, run in that dtype. A kernel passes if its largest error and the root mean square of
its errors are both at most `factor` times the reference's. That would be all, were it not for luck:

    x = [1.25, 0.5, 3.0], bfloat16     the sum is 4.75
    reference (adds from the left)     4.75, its error is 0, and no kernel would be allowed any
    kernel (an online mean, times 3)   4.78, one unit in the last place too much, and as good as anybody would want

So one number does not tell how large errors are, and five things are done about it:

- Several draws. Inputs are moved by a few units in their last place, with cotangents that are new each time, and errors
  are those of all draws together.
- Rounding of the inputs. Where each input is moved by less than half a unit in the last place, as rounding does, the
  value in float64 moves too. That much is allowed besides: it is large just where a function is ill-conditioned (a
  gradient that cancels, a difference of large numbers, a kink).
- Few numbers. Where errors of `n` entries tell about their size, two good implementations have root mean squares that
  differ by a factor of up to `1 + (14 / n) ** 2`, but for once in a million times, and their largest error is up to
  `sqrt(2 log(n / 1e-6))` times the root mean square. Where a few entries dominate, `n` is as good as so few. A largest
  error that stands out from the others is taken twice: another implementation has its own elsewhere.
- The last digit. Two units in the last place of an entry are always allowed, and half a unit in norm.
- Nothing at all. A gradient that the reference has as exactly zero, whatever the inputs' last digits (of attention to
  one key alone), tells nothing of rounding errors. There a few units of the numbers that it is made of are allowed:
  cotangents times outputs times inputs.

An entry that is not finite in the reference, in that dtype, is not judged, but where float64 says the same infinity. A
kernel that overflows or makes a NaN where the reference does not is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfn._kernelcheck.report import Entry

Array = np.ndarray[Any, Any]

_ENTRY_ULPS = 2.0
_NORM_ULPS = 0.5
_FALSE_ALARMS = 1e-6
_FEW = 14
_GAUSSIAN = 3  # n entries with a normal error are as good as n / 3 by their fourth moments
_STANDS_OUT = 2
_EXACT_ZERO_ULPS = 8.0
_WORST_KEPT = 5


@dataclass(frozen=True)
class ArrayResult:
    """The result for one array; see `Row`."""

    passed: bool
    message: str
    norm: float
    allowed_norm: float
    worst: list[Entry]
    count: int
    total: int


class ErrorStats(NamedTuple):
    """The expected size of errors: the largest of them, and their root mean square."""

    largest: float
    rms: float

    def widened_to(self, other: ErrorStats) -> ErrorStats:
        """The larger one of both."""
        return ErrorStats(max(self.largest, other.largest), max(self.rms, other.rms))

    def scaled(self, factor: float) -> ErrorStats:
        """Returns the spread of errors that are `factor` times as large."""
        return ErrorStats(factor * self.largest, factor * self.rms)


@dataclass(frozen=True)
class ExpectedArray:
    """The expected values of one output or gradient, for several draws.

    Attributes:
      exact: in float64, (draws, *shape).
      is_comparable: where anything can be said.
      error: of the reference in the dtype.
      moved: what rounding of the inputs does to `exact`.
      precision: the relative spacing of the dtype.
      tiny: the smallest number that the dtype has all digits of.
    """

    exact: Array
    is_comparable: Array
    error: ErrorStats
    moved: ErrorStats
    precision: float
    tiny: float

    def at(self, draws: Sequence[int]) -> ExpectedArray:
        """Selects some of the draws; the spread of errors stays that of all of them."""
        return replace(self, exact=self.exact[list(draws)], is_comparable=self.is_comparable[list(draws)])

    @property
    def is_exact_zero(self) -> bool:
        """Whether it is zero without any error, which tells nothing of errors."""
        return not (self.exact.any() or self.error.largest or self.moved.largest)

    def made_of(self, size: float) -> ExpectedArray:
        """Allows the rounding of numbers of this size that cancel."""
        error = _EXACT_ZERO_ULPS * self.precision * size
        return replace(self, error=self.error.widened_to(ErrorStats(error, error)))

    def with_equal_inputs(self, other: ExpectedArray) -> ExpectedArray:
        """Allows equal inputs, whose errors are equal too: all may be as large as the largest for unequal inputs."""
        error, moved = (ErrorStats(s.largest, s.largest) for s in (other.error, other.moved))
        return replace(self, error=self.error.widened_to(error), moved=self.moved.widened_to(moved))

    def summed(self) -> ExpectedArray:
        """The sum over all draws, as a single one."""
        exact = np.where(self.is_comparable, self.exact, 0.0)
        rounding = self.precision * abs(exact).sum(0)
        more = ErrorStats(float(rounding.max(initial=0.0)), _rms(rounding))
        root = math.sqrt(len(exact))
        return replace(
            self,
            exact=exact.sum(0, keepdims=True),
            is_comparable=self.is_comparable.all(0, keepdims=True),
            error=self.error.scaled(root).widened_to(more),
            moved=self.moved.scaled(root),
        )

    def overflow(self, values: Array) -> ArrayResult:
        """Whether a kernel's values are finite where those of the reference are; all else is right."""
        values = np.asarray(values, np.float64)
        is_wrong = self.is_comparable & np.isfinite(self.exact) & ~np.isfinite(values)
        return self.compare(np.where(is_wrong, values, self.exact), 1.0)

    def compare(self, values: Array, factor: float) -> ArrayResult:
        """Whether a kernel's values are as good as they should be."""
        exact, judged = self.exact, self.is_comparable
        values = np.asarray(values, np.float64)
        with np.errstate(all="ignore"):
            errors = np.where((values == exact) | ~judged, 0.0, abs(values - exact))
            errors[np.isnan(errors)] = np.inf
            rounding = np.where(np.isfinite(exact), self.precision * abs(exact), 0.0) + self.tiny
            allowed = factor * self.error.largest + self.moved.largest + _ENTRY_ULPS * rounding
            excess = errors / allowed
        count = int((excess > 1).sum())
        norm = _rms(errors[judged])
        allowed_norm = factor * self.error.rms + self.moved.rms + _NORM_ULPS * _rms(rounding[judged])
        worst: list[Entry] = []
        of_all_draws = excess.max(0, initial=0.0)
        for position in np.argsort(-of_all_draws, axis=None, kind="stable")[:_WORST_KEPT]:
            place = tuple(map(int, np.unravel_index(position, of_all_draws.shape)))
            if worst and of_all_draws[place] <= 1:
                break
            index = int(excess[:, *place].argmax()), *place
            ulps = self._ulps(float(errors[index]), float(exact[index]))
            worst.append(Entry(place, *map(float, (values[index], exact[index], errors[index], allowed[index], ulps))))
        message = ""
        if count:
            message = f"{count:,} of {exact.size:,} entries are further off than is allowed"
        elif norm > allowed_norm:
            message = f"the errors' root mean square is {norm:.2g}, of {allowed_norm:.2g} that are allowed"
        return ArrayResult(not message, message, norm, allowed_norm, worst, count, exact.size)

    def _ulps(self, error: float, exact: float) -> float:
        """An error in units of the last place of what is expected."""
        if not math.isfinite(error + exact):
            return math.inf if error else 0.0
        return error / (self.precision * 2.0 ** math.floor(math.log2(max(abs(exact), self.tiny))))


def expect(exact: Any, reference: Any, nearby: Any, dtype: Any) -> ExpectedArray:
    """Returns the expected values of an array, and the errors that are allowed.

    Args:
      exact: what the reference gives in float64.
      reference: what it gives in the dtype.
      nearby: what it gives in float64 where its inputs are off by a rounding error.
      dtype: of the kernel's inputs.
    """
    exact, reference, nearby = (np.asarray(a, np.float64) for a in (exact, reference, nearby))
    info = jnp.finfo(dtype)
    is_infinite = np.isinf(exact) & (reference == exact)
    with np.errstate(all="ignore"):
        deviation, moved = abs(reference - exact), abs(nearby - exact)
    is_finite = np.isfinite(deviation) & np.isfinite(moved)
    stats = _error_stats(deviation[is_finite]), _error_stats(moved[is_finite])
    return ExpectedArray(exact, is_finite | is_infinite, *stats, float(info.eps), float(info.smallest_normal))


def _error_stats(errors: Array) -> ErrorStats:
    """Estimates the errors to be expected elsewhere from some that were observed."""
    size = float(errors.max(initial=0.0))
    if size == 0.0:
        return ErrorStats(0.0, 0.0)
    squares = (errors / size) ** 2
    n = min(errors.size, _GAUSSIAN * squares.sum() ** 2 / (squares**2).sum())
    rms = size * math.sqrt(squares.mean()) * (1 + (_FEW / n) ** 2)
    return ErrorStats(max(_STANDS_OUT * size, rms * math.sqrt(2 * math.log(errors.size / _FALSE_ALARMS))), rms)


def _rms(errors: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0
