"""Comparison of two arrays, by the rounding errors of their dtype and by those that torch has been measured to have.

The usual rounding is relative to numbers of about an entry's magnitude. A gradient that is zero is all rounding, in
torch too: its errors are measured there, as the differences of its results in two dtypes for samples of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfn._check.closeness import by_magnitude, estimated, magnitude_groups, observed, rounding_of_terms
from jaxfn._parity.inputs import Array
from jaxfn._parity.report import ParitycheckRow, uncompared_row
from jaxfn._reports import Entry
from jaxfn._tree import double, is_inexact

# The relative rounding error of sums and products of usual length, by the coarser dtype of the two.
_RTOL = {
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), 0.4),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), 0.2),
    "bfloat16": 2e-2,
    "float16": 2e-3,
    **dict.fromkeys(("float32", "complex64"), 2e-5),
}
_RTOL_DOUBLE = 1e-9
_NOISE = 1e-2  # of a gradient that is zero, relative to the largest, in units of the tolerance
_LARGER = 256  # the ratio of that gradient to the median of all from which on it says nothing about the others
_LARGEST_RATIO = 32  # between the largest errors of torch and those that JAX may have


def noise_of_zero(gradients: Iterable[Array], usual: float) -> float:
    """Returns the size of a gradient that is zero up to rounding (of a bias before a normalization)."""
    sizes = [float(abs(x).max(initial=0)) for x in gradients if x.any()] or [0.0]
    return _NOISE * usual * min(max(sizes), _LARGER * float(np.median(sizes)))


def rounding(dtype: Any) -> float:
    """Returns the relative tolerance of a dtype."""
    return _RTOL.get(str(dtype), _RTOL_DOUBLE)


def compare(
    function: str,
    what: str,
    ours: Array | None,
    expected: Array,
    rtol: float | None,
    atol: float | None,
    double_error: float | None,
    usual: float | None = None,
    noise: Any = 0.0,
) -> ParitycheckRow:
    """Returns the row of an array of a function: ours, that of torch, and the tolerances; see `errors`."""
    row = replace(uncompared_row(function, what, expected, "missing"), double_error=double_error)
    if ours is None:
        return row
    if ours.shape != expected.shape:
        return replace(row, verdict=f"shape {ours.shape}")
    dtype = jax.dtypes.canonicalize_dtype(expected.dtype)
    usual = rounding(dtype) if usual is None else usual
    found = errors(ours, expected, usual, rtol, atol, noise)
    return replace(
        row,
        entries=found.worst,
        count=found.num_wrong,
        total=ours.size,
        max_error=found.largest,
        relative_error=found.relative,
        verdict=f"dtype {ours.dtype}" if ours.dtype != dtype else "differs" if found.num_wrong else "equal",
    )


def expected_ulps(measured: Array | None, expected: Array | None) -> Any:
    """Returns the errors that are allowed in addition, in units of the epsilon of a dtype, for each entry.

    Args:
      measured: the errors of torch in these units, of shape (samples, *shape); `None` if they are not known.
      expected: the values in double precision.
    """
    if measured is None or expected is None or not expected.size:
        return 0.0
    magnitudes = np.where(np.isfinite(expected), abs(expected), 0.0)
    groups = magnitude_groups(magnitudes)
    likely, seen = (by_magnitude(measured, magnitudes, groups, of).largest for of in (estimated, observed))
    return np.minimum(likely, _LARGEST_RATIO * seen)


class Errors(NamedTuple):
    """The largest absolute and relative errors of an array, the number of wrong entries, and the worst one, if any."""

    largest: float
    relative: float
    num_wrong: int
    worst: Sequence[Entry]


def errors(
    ours: Array,
    expected: Array,
    usual: float,
    rtol: float | None = None,
    atol: float | None = None,
    noise: Any = 0.0,
) -> Errors:
    """Returns the errors of an array.

    Args:
      ours, expected: the arrays.
      usual: the usual relative error of inexact numbers.
      rtol, atol: the tolerances that the caller passed.
      noise: further errors to allow without `atol`, for each entry.
    """
    if not ours.size:
        return Errors(0.0, 0.0, 0, ())
    common = double(np.complex64 if "c" in (ours.dtype.kind, expected.dtype.kind) else np.float32)
    a, b = ours.astype(common), expected.astype(common)
    with np.errstate(invalid="ignore", divide="ignore"):
        if is_inexact(ours.dtype) or is_inexact(expected.dtype):
            error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            error = np.where(np.isnan(error), np.inf, error)
        else:  # integers are exact, also those that float64 does not have
            usual, noise = 0.0, 0.0
            error = np.abs(np.asarray(ours.astype(object) - expected.astype(object), np.float64))
        absolute = rounding_of_terms(b, usual, 0.0) + noise if atol is None else atol
        tolerance = absolute + (usual if rtol is None else rtol) * np.abs(b)
        excess = np.where(error > 0, error / np.where(np.isfinite(tolerance), tolerance, 0.0), 0.0)
        relative = np.where(error > 0, error / np.abs(b), 0.0)
    index = tuple(map(int, np.unravel_index(np.argmax(excess), excess.shape)))
    worst = Entry(index, a[index].item(), b[index].item(), *(float(x[index]) for x in (error, tolerance)))
    return Errors(float(error.max()), float(relative.max()), int((excess > 1).sum()), [worst])
