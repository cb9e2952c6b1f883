"""Comparison of two arrays, by the rounding errors of their dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxfn._parity.inputs import Array
from jaxfn._parity.report import Row
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
) -> Row:
    """Returns the row of an array of a function: ours, that of torch, and the tolerances."""
    row = Row(function, what, expected.shape, str(expected.dtype), double_error=double_error)
    if ours is None:
        return replace(row, verdict="missing")
    if ours.shape != expected.shape:
        return replace(row, verdict=f"shape {ours.shape}")
    dtype = jax.dtypes.canonicalize_dtype(expected.dtype)
    error, relative, excess, tolerance = errors(ours, expected, dtype, rtol, atol)
    verdict = f"dtype {ours.dtype}" if ours.dtype != dtype else "differs" if excess > 1 else "equal"
    return replace(row, max_error=error, relative_error=relative, tolerance=tolerance, verdict=verdict)


def errors(
    ours: Array, expected: Array, dtype: Any, rtol: float | None = None, atol: float | None = None
) -> tuple[float, float, float, float]:
    """Returns the largest absolute error, relative error, and ratio of error to tolerance, and that tolerance."""
    if not ours.size:
        return 0.0, 0.0, 0.0, 0.0
    common = double(np.complex64 if "c" in (ours.dtype.kind, expected.dtype.kind) else np.float32)
    a, b = ours.astype(common), expected.astype(common)
    with np.errstate(invalid="ignore", divide="ignore"):
        if is_inexact(ours.dtype) or is_inexact(expected.dtype):
            usual = rounding(dtype)
            error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            error = np.where(np.isnan(error), np.inf, error)
        else:  # integers are exact, also those that float64 does not have
            usual = 0.0
            error = np.abs(np.asarray(ours.astype(object) - expected.astype(object), np.float64))
        finite = np.abs(b[np.isfinite(b)])
        scale = float(finite.max()) if finite.size else 0.0
        tolerance = (usual * scale if atol is None else atol) + (usual if rtol is None else rtol) * np.abs(b)
        excess = np.where(error > 0, error / np.where(np.isfinite(tolerance), tolerance, 0.0), 0.0)
        relative = np.where(error > 0, error / np.abs(b), 0.0)
    worst = int(np.argmax(excess))
    return float(error.max()), float(relative.max()), float(excess.max()), float(np.ravel(tolerance)[worst])
