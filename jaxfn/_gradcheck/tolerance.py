"""When two numbers agree.

# Note: a tolerance for each reference

torch's formula, `|a - n| <= 1e-5 + 1e-3 |n|`, allows for the error of finite differences: about 1e-10 for a central one
with a step of 1e-6 in double precision, and more where the function is curved. It lets a gradient pass that is wrong in
the fourth digit:

    backward       g * 1.0004 * cos(x)
    numeric        0.5403023 for x = 1, and 0.5405184 by backward: 2e-4 apart, of 5e-4 allowed

So the default tolerances mean that formula where the reference is coarse, as one finite difference is. A reference that
is known to be precise (autodiff of the function without its rule, or differences that agree at two steps) must be met a
thousand times closer, but never closer than the rounding of the sums that both sides compute. Tolerances that a caller
chose mean what torch's mean, whatever the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Against a precise reference the default tolerances are this much smaller.
_TIGHTER = 1e-3
# What a sum of many rounded terms may lose, in units of the largest entry's last digit.
_ROUNDING = 1e3
_COARSE_ROUNDING = 30
# How far apart two ways to compute the same thing may be, relative to the largest entry.
_SAME = 1e-8
_DOUBLE = 2.220446049250313e-16
_DIFFERENCE = 4  # what a difference of two values may be wrong by, in units of their last digits
SAFETY = 4  # how far beyond its estimate an error of finite differences may be
_TINY = float(np.finfo(np.float64).tiny)


class Default(float):
    """A number that the caller did not choose."""


ATOL = Default(1e-5)
RTOL = Default(1e-3)


@dataclass(frozen=True)
class Tolerance:
    """The allowed distance of an analytic derivative from a reference.

    Chosen tolerances mean exactly `|a - n| <= atol + rtol * |n|`. The default ones mean that of a coarse reference. A
    precise one must be met a thousand times closer, but never closer than rounding allows.

    Attributes:
      atol: absolute.
      rtol: relative to the reference.
      is_default: whether neither was chosen by the caller.
      precision: the relative spacing of the coarsest floating-point type that the function computes in.
    """

    atol: float
    rtol: float
    is_default: bool
    precision: float = _DOUBLE

    @property
    def is_double(self) -> bool:
        """Whether the function computes in double precision throughout."""
        return self.precision <= _DOUBLE

    @property
    def is_tight(self) -> bool:
        """Whether precise references are held to more than the plain formula."""
        return self.is_default and self.is_double

    def strict(self) -> Tolerance:
        """The default tolerances, whatever the caller chose."""
        return Tolerance(ATOL, RTOL, True, self.precision)

    def plain(self, reference: Any) -> Any:
        """The plain formula."""
        return self.atol + self.rtol * abs(reference)

    def coarse(self, reference: Any, error: Any) -> Any:
        """Returns the tolerance for a reference with an error of its own."""
        return self.plain(reference) + error if self.is_default else self.plain(reference)

    def precise(self, reference: Any, scale: Any) -> Any:
        """Returns the tolerance for a reference that is exact up to rounding.

        Args:
          reference: its values.
          scale: the largest of them, in a block whose entries are sums of terms of about that size.
        """
        if not self.is_default:
            return self.plain(reference)
        if self.is_tight:
            small = _TIGHTER * self.atol * np.clip(scale, _TIGHTER, 1.0) + _ROUNDING * self.precision * scale
        else:
            small = self.atol + _COARSE_ROUNDING * self.precision * scale
        return small + self.slope * abs(reference)

    @property
    def slope(self) -> float:
        """The growth of a precise reference's tolerance with the magnitude of the reference."""
        return _TIGHTER * self.rtol if self.is_tight else self.rtol

    def agrees(self, value: Any, expected: Any, scale: float | None = None) -> bool:
        """Whether two values are what two ways to compute the same thing give.

        Not the last digits matter here; small entries may be what is left of large ones.

        Args:
          value, expected: the two.
          scale: of the terms that these are sums of; by default the largest expected value.
        """
        if scale is None:
            scale = float(largest(expected))
        bound = self.precise(expected, np.float64(scale)) + _SAME * scale
        return bool((excess(value, expected, bound) <= 1).all())

    def estimated(self, reference: Any, scale: Any, error: Any) -> Any:
        """Returns the tolerance for a reference with an estimated error: as tight as that allows, at most `coarse`."""
        if not self.is_default:
            return self.plain(reference)
        return np.minimum(np.maximum(self.precise(reference, scale), error), self.coarse(reference, error))


def rounding_of_differences(outputs: Sequence[Any], precision: float, step: float) -> list[Any]:
    """Returns the effect of rounding of the outputs on finite differences, an array for each output."""
    return [_DIFFERENCE * precision / step * np.abs(y).reshape(-1) for y in outputs]


def excess(analytic: Any, reference: Any, tolerance: Any) -> Any:
    """Returns the difference over the tolerance; above 1 is a mismatch, and `nan` agrees with nothing."""
    times = abs(analytic - reference) / np.maximum(tolerance, _TINY)
    return np.where(analytic == reference, 0.0, np.where(np.isnan(times), np.inf, times))


def largest(array: Any) -> Any:
    """The largest absolute value; 0 of nothing."""
    return np.max(abs(array), initial=0.0)
