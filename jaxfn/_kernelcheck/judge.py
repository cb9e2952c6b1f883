"""How large a kernel's error may be.

# Note: the rule

What is right is what the reference gives in float64, for inputs that were rounded to the kernel's dtype. How far off a
good implementation may be is not known beforehand: it depends on how the function magnifies rounding errors, so it is
measured on the reference itself, run in that dtype. A kernel passes if its largest error and the root mean square of
its errors are both at most `factor` times the reference's. That would be all, were it not for luck:

    x = [1.25, 0.5, 3.0], bfloat16     the sum is 4.75
    reference (adds from the left)     4.75, its error is 0, and no kernel would be allowed any
    kernel (an online mean, times 3)   4.78, one unit in the last place too much, and as good as anybody would want

So one number does not tell how large errors are, and four things are done about it:

- Several draws. Inputs are moved by a few units in their last place, with cotangents that are new each time, and errors
  are those of all draws together.
- Rounding of the inputs. Where an input is off by half a unit in the last place, the value in float64 is off by
  something too, and no implementation is blamed for that much. So the error that is expected of an entry is
  `sqrt(reference's error ** 2 + this difference ** 2)`. It is large just where a function is ill-conditioned (a
  gradient that cancels, a difference of large numbers, a kink).
- Few numbers. Where errors of `n` entries tell about their size, two good implementations have root mean squares that
  differ by a factor of up to `1 + (14 / n) ** 2`, but for once in a million times, and their largest error is up to
  `sqrt(2 log(n / 1e-6))` times the root mean square. Where a few entries dominate, `n` is as good as so few. A largest
  error that stands out from the others is taken twice: another implementation has its own elsewhere.
- The last digit. Two units in the last place of an entry are always allowed, and half a unit in norm.

An entry that is not finite in the reference, in that dtype, is not judged, but where float64 says the same infinity. A
kernel that overflows or makes a NaN where the reference does not is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._kernelcheck.report import Entry

_ENTRY_ULPS = 2.0
_NORM_ULPS = 0.5
_FALSE_ALARMS = 1e-6
_FEW = 14
_GAUSSIAN = 3  # n entries with a normal error are as good as n / 3 by their fourth moments
_STANDS_OUT = 2
_WORST_KEPT = 5


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one array, see `Row`."""

    passed: bool
    message: str
    norm: float
    allowed_norm: float
    worst: list[Entry]
    count: int
    total: int


@dataclass(frozen=True)
class Expected:
    """What one output or gradient should be, for several draws.

    Attributes:
      exact: in float64, (draws, *shape).
      deviation: how far off a good implementation is expected to be; infinite where nothing can be said.
      precision: the relative spacing of the dtype.
      tiny: the smallest number that the dtype has all digits of.
      ordinary: what `spread` is at the least, as it is for other inputs.
    """

    exact: np.ndarray[Any, Any]
    deviation: np.ndarray[Any, Any]
    precision: float
    tiny: float
    ordinary: tuple[float, float] = (0.0, 0.0)

    def at(self, draws: Sequence[int]) -> Expected:
        """The same for some of the draws, with what is known of errors from all of them."""
        return replace(
            self, exact=self.exact[list(draws)], deviation=self.deviation[list(draws)], ordinary=self.spread()
        )

    def no_sharper_than(self, other: Expected) -> Expected:
        """The same, where errors may be as large as of another array."""
        return replace(self, ordinary=other.spread())

    def summed(self) -> Expected:
        """The sum over all draws, as a single one."""
        with np.errstate(all="ignore"):
            rounding = self.precision * abs(self.exact).sum(0, keepdims=True)
            deviation = np.hypot(np.sqrt((self.deviation**2).sum(0, keepdims=True)), rounding)
        return replace(self, exact=self.exact.sum(0, keepdims=True), deviation=deviation)

    def spread(self) -> tuple[float, float]:
        """The largest error and the root mean square that are expected, with what few entries cannot tell."""
        errors = self.deviation[np.isfinite(self.deviation)]
        size = float(errors.max(initial=0.0))
        if size == 0.0:
            return self.ordinary
        squares = (errors / size) ** 2
        n = min(errors.size, _GAUSSIAN * squares.sum() ** 2 / (squares**2).sum())
        rms = size * math.sqrt(squares.mean()) * (1 + (_FEW / n) ** 2)
        largest = max(_STANDS_OUT * size, rms * math.sqrt(2 * math.log(errors.size / _FALSE_ALARMS)))
        return max(largest, self.ordinary[0]), max(rms, self.ordinary[1])

    def overflow(self, values: np.ndarray[Any, Any]) -> Verdict:
        """Whether a kernel's values are finite where those of the reference are; all else is right."""
        values = np.asarray(values, np.float64)
        is_wrong = np.isfinite(self.deviation) & np.isfinite(self.exact) & ~np.isfinite(values)
        return self.judge(np.where(is_wrong, values, self.exact), 0.0)

    def judge(self, values: np.ndarray[Any, Any], factor: float) -> Verdict:
        """Whether a kernel's values are as good as they should be."""
        exact = self.exact
        values = np.asarray(values, np.float64)
        is_judged = np.isfinite(self.deviation)
        largest, rms = self.spread()
        with np.errstate(all="ignore"):
            errors = np.where(values == exact, 0.0, np.where(is_judged, abs(values - exact), 0.0))
            errors[np.isnan(errors)] = np.inf
            rounding = np.where(np.isfinite(exact), self.precision * abs(exact), 0.0) + self.tiny
            allowed = factor * largest + _ENTRY_ULPS * rounding
            excess = errors / allowed
        count = int((excess > 1).sum())
        norm = float(np.sqrt(np.mean(errors[is_judged] ** 2))) if is_judged.any() else 0.0
        allowed_norm = factor * rms
        if is_judged.any():
            allowed_norm += _NORM_ULPS * float(np.sqrt(np.mean(rounding[is_judged] ** 2)))
        worst: list[Entry] = []
        of_all_draws = excess.max(0, initial=0.0)
        for position in np.argsort(-of_all_draws, axis=None, kind="stable")[:_WORST_KEPT]:
            place = tuple(map(int, np.unravel_index(position, of_all_draws.shape)))
            if worst and of_all_draws[place] <= 1:
                break
            index = int(excess[:, *place].argmax()), *place
            ulps = errors[index] / _ulp(exact[index], self.precision, self.tiny)
            worst.append(Entry(place, *map(float, (values[index], exact[index], errors[index], allowed[index], ulps))))
        message = ""
        if count:
            message = f"{count:,} of {exact.size:,} entries are further off than is allowed"
        elif norm > allowed_norm:
            message = f"the errors' root mean square is {norm:.2g}, of {allowed_norm:.2g} that are allowed"
        return Verdict(not message, message, norm, allowed_norm, worst, count, exact.size)


def expect(exact: Any, reference: Any, nearby: Any, dtype: Any) -> Expected:
    """What is expected of an array.

    Args:
      exact: what the reference gives in float64.
      reference: what it gives in the dtype.
      nearby: what it gives in float64 where its inputs are half a unit in the last place off.
      dtype: of the kernel's inputs.
    """
    exact, reference, nearby = (np.asarray(a, np.float64) for a in (exact, reference, nearby))
    info = jnp.finfo(dtype)
    with np.errstate(all="ignore"):
        deviation = np.hypot(reference - exact, nearby - exact)
    deviation[np.isnan(deviation)] = np.inf
    deviation[np.isinf(exact) & (reference == exact)] = 0.0
    return Expected(exact, deviation, float(info.eps), float(info.smallest_normal))


def _ulp(value: Any, precision: float, tiny: float) -> float:
    """The spacing of numbers of a value's size."""
    size = max(abs(float(value)), tiny)
    return precision * 2.0 ** math.floor(math.log2(size)) if math.isfinite(size) else math.inf
