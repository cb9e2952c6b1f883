"""Classification of the mistake in a wrong Jacobian."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

import numpy as np

from jaxfn._gradcheck.report.report import Mismatch

Matrix = np.ndarray[Any, Any]
KINK = "a kink of the function"
_CLOSE = 1e-4  # relative to the largest entry, so that finite differences are precise enough
_MAX_PERMUTED = 4  # axes, of which all permutations are tried
_MAX_LISTED = 2  # explanations that hold alike; more explain nothing


def mismatch_kind(
    analytic: Matrix,
    reference: Matrix,
    output_shape: tuple[int, ...],
    input_shape: tuple[int, ...],
    mesh_axes: Mapping[str, int],
    *,
    is_forward: bool,
) -> str | None:
    """Returns the kind of mistake, or `None` if the Jacobian does not show it clearly.

    Args:
      analytic: the Jacobian by the rule, of shape (output components, input size).
      reference: the right Jacobian.
      output_shape, input_shape: the shapes of the output and the input.
      mesh_axes: the sizes of the mesh axes of `shard_map`, by name.
      is_forward: whether the columns are tangents of the output, rather than the rows gradients of the input.
    """
    if analytic.size < 1 or not (np.isfinite(analytic).all() and np.isfinite(reference).all()):
        return "not a number" if analytic.size and not np.isfinite(analytic).all() else None
    if _is_close(reference, 0 * reference):
        return "a gradient where there is none"
    if not analytic.any():
        return "zero everywhere"
    if _is_close(analytic, -reference):
        return "wrong sign"
    results = analytic, reference, input_shape, "gradient"
    if is_forward:
        results = analytic.T, reference.T, output_shape, "tangent"
    return (
        _conjugate(analytic, reference, output_shape)
        or _factor(analytic, reference, mesh_axes)
        or _transposed(*results)
        or _broadcast(analytic, reference)
        or _off_diagonal(analytic, reference)
    )


def name_swapped(mismatches: Sequence[Mismatch]) -> None:
    """Names mismatches of one output whose gradients are those of each other's inputs."""
    for a, b in combinations(mismatches, 2):
        if a.output == b.output and a.input_shape == b.input_shape and a.input != b.input:
            first, second, of_a, of_b = (*(m.matrices.get("analytic") for m in (a, b)), *map(_reference, (a, b)))
            if first is None or second is None or of_a is None or of_b is None or of_a.shape != of_b.shape:
                continue
            if of_a.any() and of_b.any() and _is_rather(first, of_b, of_a) and _is_rather(second, of_a, of_b):
                a.mistake = f"swapped with the gradient of {b.input}"
                b.mistake = f"swapped with the gradient of {a.input}"


def _reference(mismatch: Mismatch) -> Matrix | None:
    return mismatch.matrices.get("autodiff", mismatch.matrices.get("numeric"))


def _conjugate(a: Matrix, n: Matrix, output: tuple[int, ...]) -> str | None:
    if not np.iscomplexobj(n):
        return None
    expected = n.conj()
    size = int(np.prod(output, dtype=int))
    expected[size:] *= -1  # the rows of a complex output's imaginary parts
    return "missing conjugate" if _is_rather(a, expected, n) else None


def _factor(a: Matrix, n: Matrix, mesh_axes: Mapping[str, int]) -> str | None:
    factor = np.vdot(n, a) / np.vdot(n, n)
    if abs(factor) < _CLOSE or not _is_close(a, factor * n, _CLOSE * min(1.0, abs(factor - 1)) * 10):
        return None
    shown = factor.real if abs(factor.imag) < _CLOSE * abs(factor) else factor
    if abs(shown) > 1.5 and _is_whole(shown):
        shown = np.round(shown)
    text = f"a constant factor: {shown:.6g} times what it should be"
    times, reduced = max(abs(shown), 1 / abs(shown)), n.shape[1] / len(n)
    if reduced > 1 and abs(times - reduced) < _CLOSE * reduced and shown.real > 0:
        taken, forward = ("sum", "mean") if shown.real > 1 else ("mean", "sum")
        text += f", perhaps that of a {taken} of {reduced:g} elements, where forward takes their {forward}"
    # A gradient that is summed over the devices twice, or not at all, is off by the size of a mesh axis.
    axes = [(name, size) for name, size in mesh_axes.items() if size > 1 and _is_whole(times / size)]
    return f"{text} ({' and '.join(f'mesh axis {name!r} has {size} devices' for name, size in axes)})" if axes else text


def _is_whole(number: float) -> bool:
    return abs(number - np.round(number)) < _CLOSE * abs(number)


def _transposed(a: Matrix, n: Matrix, shape: tuple[int, ...], result_name: str) -> str | None:
    """Detects transposed results, of the transposed shape or reshaped to the right one."""
    found: list[str] = []
    if n.shape[0] == n.shape[1] > 1 and _is_rather(a, n.T, n):
        found.append("transposed: the Jacobian is multiplied from the wrong side")
    sizes = tuple(size for size in shape if size > 1)
    for axes in permutations(range(len(sizes))) if len(sizes) <= _MAX_PERMUTED else ():
        transposed = n.reshape(-1, *sizes).transpose(0, *(1 + axis for axis in axes)).reshape(n.shape)
        if _is_rather(a, transposed, n):
            order = f": its axes are in order {axes}" if len(sizes) == len(shape) > 2 else ""
            found.append(f"the {result_name} is transposed{order}")
    return " or ".join(found) if len(found) <= _MAX_LISTED else None


def _broadcast(a: Matrix, n: Matrix) -> str | None:
    """Detects a rule that does not sum the cotangent of a broadcast input: all but one contribution is missing."""
    num_rows = len(a)
    wrong = ~_are_close(a, n).all(axis=1)
    zero_rows = ~a.any(axis=1)
    if num_rows > 1 and n.shape[1] < num_rows and (wrong == zero_rows).all() and 0 < wrong.sum() < num_rows:
        return "a missing sum over a broadcast axis: some elements of the output contribute nothing"
    return None


def _off_diagonal(a: Matrix, n: Matrix) -> str | None:
    if n.shape[0] != n.shape[1] or n.shape[0] < 2 or _is_close(a, n):
        return None
    diagonal = np.eye(len(n), dtype=bool)
    if not _are_close(a, n)[diagonal].all():
        return None
    if not a[~diagonal].any():
        return "off-diagonal entries are missing: the rule treats the function as elementwise"
    return "off-diagonal entries are wrong; the diagonal is right"


def _are_close(a: Matrix, b: Matrix, close: float = _CLOSE) -> Matrix:
    return abs(a - b) <= close * abs(b).max()


def _is_close(a: Matrix, b: Matrix, close: float = _CLOSE) -> bool:
    return bool(_are_close(a, b, close).all())


def _is_rather(a: Matrix, wrong: Matrix, right: Matrix) -> bool:
    """Whether `a` is `wrong`, and that differs from `right`."""
    return _is_close(a, wrong) and not _is_close(wrong, right)
