"""`paritycheck` and `record_oracle`: a port beside the torch Function that it was ported from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfn._observe import CALL_MONITOR, CallMonitor
from jaxfn._parity.backends import JaxBackend, Measurements, TorchBackend
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._parity.oracle import Oracle, load, save
from jaxfn._parity.report import ParityReport, Row
from jaxfn._tree import double

# Relative, by the coarser dtype of the two; what rounding in sums and products of usual length leaves.
_RTOL = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "complex64": 2e-5}
_RTOL_DOUBLE = 1e-9


def paritycheck(
    jax_fn: Any,
    torch_fn: Any,
    inputs: Sequence[Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    second_order: bool = True,
) -> ParityReport:
    """Compares a Function on JAX with the torch one that it was ported from, on the same numbers.

    Outputs, the gradients for every subset of differentiated inputs, and second derivatives are computed by both, once
    in the dtypes of the inputs and once in double precision. Where they differ, the second run tells rounding from a
    wrong formula; a third one, a small step aside, finds differences that exist at a kink only (torch and JAX choose
    different derivatives of `clamp`, `abs`, `maximum` and norms exactly there).

    Torch drops the derivative of an intermediate that `forward` saved, and jaxfn does not. A second derivative that
    differs by this alone does not fail the check; a note says so.

    Args:
      jax_fn: a `jaxfn.Function` or any function of JAX arrays.
      torch_fn: a `torch.autograd.Function` or any function of tensors; or the path of what `record_oracle` wrote,
        with which torch is not needed.
      inputs: the arguments, arrays (NumPy's, of any shapes) and Python values; left out with a recorded oracle.
      rtol, atol: how far apart numbers may be: `|jax - torch| <= atol + rtol * |torch|`. By default what rounding in
        the dtype at hand leaves, `atol` relative to the largest number of the array.
      second_order: whether to compare second derivatives too.

    Returns:
      A report: true where everything agrees; `print` shows it as a table, `to_json()` gives it as JSON.

    Raises:
      ImportError: torch is not installed, and `torch_fn` is not a path.
      ValueError: `torch_fn` returned no tensor.

    Examples:
      >>> import torch, jax.numpy as jnp, numpy as np, jaxfn
      >>> class TorchSquare(torch.autograd.Function):
      ...     @staticmethod
      ...     def forward(ctx, x):
      ...         ctx.save_for_backward(x)
      ...         return x * x
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         (x,) = ctx.saved_tensors
      ...         return 2 * x * grad_output
      >>> def port(x):
      ...     return x * x
      >>> report = jaxfn.paritycheck(port, TorchSquare, [np.array([1.0, 2.0], np.float32)])
      >>> bool(report), report.rows[1].what
      (True, 'gradient of input 0')

    Torch counterpart: none.
    """
    if isinstance(torch_fn, (str, os.PathLike)):
        if inputs is not None:
            raise TypeError("paritycheck: a recorded oracle has its own inputs; leave `inputs` out")
        oracle = load(os.fspath(torch_fn))
    else:
        if inputs is None:
            raise TypeError("paritycheck: say on which `inputs` to compare")
        oracle = _ask_torch(torch_fn, inputs, second_order, "paritycheck")
    return _compare(JaxBackend(jax_fn), oracle, rtol, atol, second_order)


def record_oracle(torch_fn: Any, inputs: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Writes what `paritycheck` needs of a torch Function to a file, for an environment without torch.

    Args:
      torch_fn: a `torch.autograd.Function` or any function of tensors.
      inputs: the arguments, arrays and such Python values as JSON has.
      path: the file, usually `*.npz`; it holds inputs, outputs, gradients, second derivatives and versions, and no
        pickles.

    Raises:
      ImportError: torch is not installed.
      TypeError: an argument cannot be written.
      ValueError: `torch_fn` returned no tensor.

    Examples:
      >>> import os, tempfile, jax, torch, numpy as np, jaxfn
      >>> path = os.path.join(tempfile.mkdtemp(), "relu.npz")
      >>> jaxfn.record_oracle(torch.nn.functional.relu, [np.array([-1.0, 2.0], np.float32)], path)
      >>> bool(jaxfn.paritycheck(jax.nn.relu, path))
      True

    Torch counterpart: none.
    """
    save(os.fspath(path), _ask_torch(torch_fn, inputs, True, "record_oracle"))


def _ask_torch(torch_fn: Any, args: Sequence[Any], second_order: bool, what: str) -> Oracle:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"jaxfn.{what} runs the torch Function, and PyTorch is not installed: pip install torch (the CPU build "
            "will do), or record an oracle where it is (jaxfn.record_oracle) and check against that file"
        ) from error
    if not isinstance(args, (list, tuple)):
        args = (args,)
    inputs = Inputs(args)
    side = TorchBackend(torch_fn)
    measured, refusal = side.measure(inputs, second_order)
    name = getattr(torch_fn, "__qualname__", repr(torch_fn))
    if not any(row.startswith("output") for row in measured):
        raise ValueError(f"jaxfn.{what}: {name} returned no tensor for these inputs, so there is nothing to compare")
    return Oracle(
        name=name,
        args=inputs.args,
        given=measured,
        double=side.measure(inputs.in_double(), second_order)[0],
        nudged=side.measure(inputs.nudged(), second_order)[0],
        refusal=refusal,
        versions={"torch": torch.__version__, "numpy": np.__version__},
    )


def _compare(
    side: JaxBackend, oracle: Oracle, rtol: float | None, atol: float | None, second_order: bool
) -> ParityReport:
    inputs = Inputs(oracle.args)
    second_order = second_order and oracle.refusal is None
    ours = _measure(side, inputs, second_order)
    report = ParityReport(oracle.name, {**oracle.versions, "jax": jax.__version__}, [], [])
    if oracle.refusal is not None:
        report.notes.append(f"torch gives no second derivatives: {oracle.refusal}")
    if ours.refusal is not None:
        report.notes.append(f"JAX gives no second derivatives: {ours.refusal}")
    for what, expected in oracle.given.items():
        if what.startswith("second derivative") and not second_order:
            continue
        double_error = _relative_error(ours.double.get(what), oracle.double.get(what))
        row = _row(what, ours.given.get(what), expected, rtol, atol, double_error)
        if row.verdict == "differs":
            row.verdict = _explain(what, ours, oracle)
        report.rows.append(row)
    wrong = [row for row in report.rows if row.what.startswith("second derivative") and row.verdict == "formula"]
    if wrong:
        with CALL_MONITOR(CallMonitor(bypass_rules=False, stops_intermediates=True)):
            stopped = _measure(side, inputs, second_order)
        for row in wrong:
            again = _row(row.what, stopped.given.get(row.what), oracle.given[row.what], rtol, atol, None)
            row.verdict = "intermediate" if again.verdict == "equal" else _explain(row.what, stopped, oracle)
    if any(row.verdict == "intermediate" for row in report.rows):
        report.notes.append(
            "intermediate: forward saves an array that is neither an input nor an output. torch drops its derivative "
            "from second derivatives, and jaxfn does not; without it they agree. Save inputs or outputs and compute "
            "the rest in backward, for second derivatives that are right in torch too."
        )
    extra = [what for what in ours.given if what.startswith("output") and what not in oracle.given]
    report.notes += [f"JAX returns {what}, which torch does not" for what in extra]
    report.has_extra_outputs = bool(extra)
    if any(row.verdict == "kink" for row in report.rows):
        report.notes.append(
            "kink: the derivatives agree a small step aside. torch and JAX choose different derivatives of clamp, abs, "
            "maximum, minimum and norms exactly at the kink or tie; choose inputs off it, or write the derivative out."
        )
    return report


class _Measured(NamedTuple):
    """Results of JAX for the inputs as given, in double precision, and for nearby inputs."""

    given: Measurements
    double: Measurements
    nudged: Measurements
    refusal: str | None


def _measure(side: JaxBackend, inputs: Inputs, second_order: bool) -> _Measured:
    """Computes everything that is compared, and why there are no second derivatives, if there are none."""
    given, refusal = side.measure(inputs, second_order)
    with jax.enable_x64(True):
        in_double, _ = side.measure(inputs.in_double(), second_order)
        nudged, _ = side.measure(inputs.nudged(), second_order)
    return _Measured(given, in_double, nudged, refusal)


def _row(
    what: str, ours: Array | None, expected: Array, rtol: float | None, atol: float | None, double_error: float | None
) -> Row:
    row = Row(what, expected.shape, str(expected.dtype), double_error=double_error)
    if ours is None:
        return replace(row, verdict="missing")
    if ours.shape != expected.shape:
        return replace(row, verdict=f"shape {ours.shape}")
    dtype = jax.dtypes.canonicalize_dtype(expected.dtype)
    error, relative, excess, tolerance = _errors(ours, expected, dtype, rtol, atol)
    verdict = f"dtype {ours.dtype}" if ours.dtype != dtype else "differs" if excess > 1 else "equal"
    return replace(row, max_error=error, relative_error=relative, tolerance=tolerance, verdict=verdict)


def _errors(
    ours: Array, expected: Array, dtype: Any, rtol: float | None = None, atol: float | None = None
) -> tuple[float, float, float, float]:
    """The largest absolute and relative error, the largest one in units of its tolerance, and that tolerance."""
    common = double(np.complex64 if "c" in (ours.dtype.kind, expected.dtype.kind) else np.float32)
    a, b = ours.astype(common), expected.astype(common)
    if not a.size:
        return 0.0, 0.0, 0.0, 0.0
    usual = _RTOL.get(str(dtype), _RTOL_DOUBLE)
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 0.0
    tolerance = (usual * scale if atol is None else atol) + (usual if rtol is None else rtol) * np.abs(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
        error = np.where(np.isnan(error), np.inf, error)
        excess = np.where(error > 0, error / np.where(np.isfinite(tolerance), tolerance, 0.0), 0.0)
        relative = np.where(error > 0, error / np.abs(b), 0.0)
    worst = int(np.argmax(excess))
    return float(error.max()), float(relative.max()), float(excess.max()), float(np.ravel(tolerance)[worst])


def _explain(what: str, ours: _Measured, oracle: Oracle) -> str:
    """Why a row differs: "rounding", "kink" or "formula"."""
    if _agrees(ours.double.get(what), oracle.double.get(what)):
        return "rounding"
    if not what.startswith("output") and _agrees(ours.nudged.get(what), oracle.nudged.get(what)):
        return "kink"
    return "formula"


def _agrees(ours: Array | None, expected: Array | None) -> bool:
    if ours is None or expected is None or ours.shape != expected.shape:
        return False
    # A function that computes in single precision whatever it is given agrees to that only.
    coarser = min((ours.dtype, expected.dtype), key=lambda dtype: dtype.itemsize)
    return _errors(ours, expected, coarser)[2] <= 1


def _relative_error(ours: Array | None, expected: Array | None) -> float | None:
    if ours is None or expected is None or ours.shape != expected.shape:
        return None
    return _errors(ours, expected, ours.dtype)[1]
