"""Tolerances of comparisons.

# Note: a tolerance for each reference

torch's formula, `|a - n| <= 1e-5 + 1e-3 |n|`, allows for the error of finite differences: about 1e-10 for a central
difference with a step of 1e-6 in double precision, and more for a function with a large curvature. It accepts a
gradient that is wrong in the fourth digit:

    backward       g * 1.0004 * cos(x)
    numeric        0.5403023 for x = 1, and 0.5405184 by backward: 2e-4 apart, of 5e-4 allowed

So the default tolerances, passed or not, mean that formula only for a coarse reference, such as one finite difference.
The tolerance for a precise reference (autodiff of the function without its rule, or differences that agree at two
steps) is a thousand times smaller, but never smaller than the rounding of the sums that are compared. Other tolerances
that the caller passes mean what torch's mean, for every reference.

Next to an entry of 1e10 the rounding of a long sum may be 1e-3, and so may a mistake. So where autodiff is exact, an
entry of a Jacobian is allowed only the rounding of a short sum of terms as large as the entries of its row. A larger
difference counts as rounding if it is at most that of a long sum of the largest terms, and changes when inputs change
in their last digits, as rounding does and a mistake does not.

Values that lose digits, as multiples of 1.5e-8 in `(x + 1e4)**2 - 2e4 * x - 1e8`, make finite differences mostly
rounding, and their estimated error too, which may be small by chance. So where a derivative differs, errors are also
estimated at other inputs and steps near by, and the largest counts. Autodiff has errors if it changes there and the
rule does not.

A small Jacobian may be all rounding, as `s * (1 - s)` is 0 and not 4e-18 for the sigmoid of 40, so the tolerance is at
least 1e-11. Only if finite differences agree with autodiff in the first digits of all outputs is there no such bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfn._check.closeness import agree, group_scale, largest, rounding_of_terms

# Factor of the default tolerances for a precise reference.
_TIGHTER = 1e-3
# Rounding error of a sum of many terms, in units in the last place of the largest entry.
_ROUNDING = 1e3
_SHORT_SUM_ROUNDING = 30
# Difference of two ways to compute an array, relative to the largest entry of about that magnitude.
_RECOMPUTED = 1e-8
# Difference of autodiff and finite differences that have no errors to speak of, relative to the largest entry.
_RESOLVED = 1e-4
_DOUBLE = 2.220446049250313e-16
SAFETY = 4  # factor between an estimated error of finite differences and its bound

ATOL, RTOL = 1e-5, 1e-3
EPS = 1e-6


@dataclass(frozen=True)
class Tolerance:
    """The allowed distance of an analytic derivative from a reference.

    Tolerances other than the default ones mean exactly `|a - n| <= atol + rtol * |n|`. The default ones mean that for a
    coarse reference. For a precise reference they are a thousand times smaller, but never smaller than rounding.
    """

    atol: float  # the absolute tolerance
    rtol: float  # the tolerance relative to the reference
    is_default: bool  # whether both are the default ones
    precision: float = _DOUBLE  # the relative spacing of the coarsest floating-point type that the function computes in
    # the largest entry of a Jacobian below which the absolute tolerance does not become smaller
    least_scale: float = _TIGHTER

    @property
    def is_double(self) -> bool:
        """Whether the function computes in double precision throughout."""
        return self.precision <= _DOUBLE

    @property
    def is_tight(self) -> bool:
        """Whether the tolerance of precise references is smaller than that of the plain formula."""
        return self.is_default and self.is_double

    def strict(self) -> Tolerance:
        """Returns the default tolerances, even if the caller passed others."""
        return Tolerance(ATOL, RTOL, True, self.precision)

    def plain(self, reference: Any) -> Any:
        """Returns `atol + rtol * |reference|`."""
        return self.atol + self.rtol * abs(reference)

    def coarse(self, reference: Any, error: Any) -> Any:
        """Returns the tolerance for a reference that has an error."""
        return self.plain(reference) + error if self.is_default else self.plain(reference)

    def precise(self, reference: Any, scale: Any) -> Any:
        """Returns the tolerance for a reference that is exact up to the rounding of terms as large as `scale`."""
        rounding = _ROUNDING if self.is_tight else _SHORT_SUM_ROUNDING
        return self._precise(reference, scale, rounding * self.precision * scale)

    def of_entries(self, reference: Any, error: Any = 0.0) -> Any:
        """Returns the tolerance for rows or columns of a Jacobian that are exact up to the rounding of short sums."""
        scale = largest(reference)
        terms = np.max(abs(reference), axis=1, keepdims=True, initial=0.0) if self.is_tight else scale
        return self._precise(reference, scale, _SHORT_SUM_ROUNDING * self.precision * terms)

    def of_rounding(self, reference: Any, error: Any) -> Any:
        """Returns the tolerance for those entries whose difference is known to be rounding."""
        if not self.is_tight:
            return self.of_entries(reference)
        return np.maximum(self.plain(reference), self.precise(reference, largest(reference))) + SAFETY * error

    def _precise(self, reference: Any, scale: Any, rounding: Any) -> Any:
        if not self.is_default:
            return self.plain(reference)
        least = np.where(scale > 0, self.least_scale, _TIGHTER)
        small = _TIGHTER * self.atol * np.clip(scale, least, 1.0) if self.is_tight else self.atol
        return small + rounding + self.slope * abs(reference)

    @property
    def slope(self) -> float:
        """The growth of a precise reference's tolerance with the magnitude of the reference."""
        return _TIGHTER * self.rtol if self.is_tight else self.rtol

    def agreement(self, value: Any, expected: Any, terms: Any = None) -> Any:
        """Returns for each entry whether two ways to compute it, as a sum of such terms, agree; NaN equals NaN."""
        terms = expected if terms is None else terms
        # In double precision the rounding of the largest entry does not hide a mistake in another one.
        rounding = rounding_of_terms(terms, _RECOMPUTED, _ROUNDING * _DOUBLE * self.is_double)
        return agree(value, expected, self.precise(expected, group_scale(abs(terms))) + rounding)

    def agrees(self, value: Any, expected: Any, terms: Any = None) -> bool:
        """Whether all entries agree; see `agreement`."""
        return bool(self.agreement(value, expected, terms).all())

    def estimated(self, reference: Any, error: Any) -> Any:
        """Returns the tolerance for a reference with an estimated error: as tight as that allows, at most `coarse`."""
        if not self.is_default:
            return self.plain(reference)
        return np.minimum(np.maximum(self.precise(reference, largest(reference)), error), self.coarse(reference, error))


def is_resolved(exact: Any, numeric: Any) -> bool:
    """Whether finite differences agree with autodiff in the first digits of the largest number, however small it is."""
    return bool(largest(exact - numeric) <= _RESOLVED * largest(exact))
