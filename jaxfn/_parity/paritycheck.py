"""`paritycheck` and `record_oracle`: compare a port with the torch Function that it was ported from."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfn._observe import CALL_MONITOR, CallMonitor
from jaxfn._parity.backends import JaxBackend, Measurements, TorchBackend, first_line
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._parity.oracle import Oracle, load, save
from jaxfn._parity.report import ParityReport, Row
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


def paritycheck(
    func: Any,
    reference: Any,
    inputs: Sequence[Any] | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    raise_exception: bool = True,
    second_order: bool = True,
) -> ParityReport:
    """Compares a JAX function with the torch function that it was ported from, on equal numbers.

    Outputs, the gradients for every subset of differentiated inputs, and second derivatives are computed by both, in
    the dtypes of the inputs and in double precision. If they differ, the second run distinguishes rounding from a wrong
    formula; a third run, a small step away, detects differences at a kink only (torch and JAX choose different
    derivatives of `clamp`, `abs`, `maximum` and norms exactly there).

    If the outputs differ in number, shape or dtype, derivatives are those of the other outputs alone.

    torch drops the derivative of an intermediate that `forward` saved, and jaxfn does not. A second derivative that
    differs for this reason alone does not fail the check; a note says so.

    Args:
      func: The port: a `jaxfn.Function` or any function of JAX arrays.
      reference: What it is compared with: a `torch.autograd.Function`, any function of tensors, or the path of a file
        that `record_oracle` wrote, for which torch is not needed.
      inputs: The arguments, arrays (of NumPy, of any shapes) and Python values; `None` with a recorded file.
      atol: The absolute tolerance. Default: rounding in the dtype, relative to the largest number of the array.
      rtol: The relative tolerance: `|jax - torch| <= atol + rtol * |torch|`. Default: rounding in the dtype.
      raise_exception: Whether to raise on failure.
      second_order: Whether to compare second derivatives.

    Returns:
      A `ParityReport`, which is true if everything agrees. `print` shows it as a table, `to_json()` returns it as JSON.

    Raises:
      ParitycheckError: An array differs; the text names it and the function, and `error.report` has them as data.
      ImportError: torch is not installed, and `reference` is not a path.
      TypeError: `inputs` are missing, or were passed together with a recorded file.
      ValueError: The torch function returned no tensor.

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
    if isinstance(reference, (str, os.PathLike)):
        if inputs is not None:
            raise TypeError("paritycheck: a recorded file has its own inputs. Omit `inputs`.")
        oracle = load(os.fspath(reference))
    else:
        if inputs is None:
            raise TypeError("paritycheck: `inputs` are missing. Pass the arguments on which to compare.")
        oracle = _run_torch(reference, inputs, second_order, "paritycheck")
    port = JaxBackend(func)
    found = port.outputs(Inputs(oracle.args))
    expected = {int(what.removeprefix("output ")): y for what, y in oracle.without_derivatives().native.items()}
    alike = [i for i, y in expected.items() if i in found and _are_alike(found[i], y)]
    if len(alike) == len(found | expected):
        report = _compare(port, oracle, rtol, atol, second_order)
    else:
        if inputs is not None:
            oracle = _run_torch(reference, inputs, second_order, "paritycheck", alike)
        elif any(is_inexact(y.dtype) for i, y in expected.items() if i not in alike):
            alike = []  # the file has only the sums over all outputs
        oracle = oracle if alike else oracle.without_derivatives()
        report = _compare(JaxBackend(func, alike), oracle, rtol, atol, second_order)
        compared = f"those of {', '.join(f'output {i}' for i in alike)} alone" if alike else "not compared"
        report.notes.insert(
            0, f"{port.name} returns other outputs than {oracle.name} (see the rows). Derivatives are {compared}."
        )
    if raise_exception:
        report.raise_if_failed()
    return report


def record_oracle(func: Any, inputs: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Writes the results of a torch function to a file, for `paritycheck` in an environment without torch.

    Args:
      func: A `torch.autograd.Function` or any function of tensors.
      inputs: The arguments, arrays and Python values that JSON supports.
      path: The file, usually `*.npz`. It has inputs, outputs, gradients, second derivatives and versions, and no
        pickles.

    Raises:
      ImportError: torch is not installed.
      TypeError: An argument cannot be written.
      ValueError: `func` returned no tensor.

    Examples:
      >>> import os, tempfile, jax, torch, numpy as np, jaxfn
      >>> path = os.path.join(tempfile.mkdtemp(), "relu.npz")
      >>> jaxfn.record_oracle(torch.nn.functional.relu, [np.array([-1.0, 2.0], np.float32)], path)
      >>> bool(jaxfn.paritycheck(jax.nn.relu, path))
      True

    Torch counterpart: none.
    """
    save(os.fspath(path), _run_torch(func, inputs, True, "record_oracle"))


def _are_alike(ours: Array, expected: Array) -> bool:
    return ours.shape == expected.shape and ours.dtype == jax.dtypes.canonicalize_dtype(expected.dtype)


def _run_torch(
    func: Any, args: Sequence[Any], second_order: bool, what: str, differentiated: Collection[int] | None = None
) -> Oracle:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"jaxfn.{what} runs the torch function, and torch is not installed. Run `pip install torch` (the CPU "
            "build suffices), or call jaxfn.record_oracle where it is installed, and pass that file to paritycheck."
        ) from error
    if not isinstance(args, (list, tuple)):
        args = (args,)
    inputs = Inputs(args)
    backend = TorchBackend(func, differentiated)
    measured, no_second_order = backend.measure(inputs, second_order)
    if not any(row.startswith("output") for row in measured):
        raise ValueError(
            f"jaxfn.{what}: {backend.name} returned no tensor for these inputs, so there is nothing to compare"
        )
    double: Measurements = {}
    nudged: Measurements = {}
    no_double = None
    try:
        backend = TorchBackend(func, differentiated, in_double=True)
        double, _ = backend.measure(inputs.in_double(), second_order)
        nudged, _ = backend.measure(inputs.nudged(), second_order)
    except Exception as error:  # it ran in the dtypes of the inputs: it has tensors of these, or checks dtypes
        no_double = first_line(error)
    return Oracle(
        name=backend.name,
        args=inputs.args,
        native=measured,
        double=double,
        nudged=nudged,
        no_second_order=no_second_order,
        no_double=no_double,
        versions={"torch": torch.__version__, "numpy": np.__version__},
    )


def _compare(
    backend: JaxBackend, oracle: Oracle, rtol: float | None, atol: float | None, second_order: bool
) -> ParityReport:
    inputs = Inputs(oracle.args)
    second_order = second_order and oracle.no_second_order is None
    ours = _measure(backend, inputs, second_order)
    report = ParityReport(oracle.name, backend.name, {**oracle.versions, "jax": jax.__version__})
    if oracle.no_second_order is not None:
        report.notes.append(f"torch has no second derivatives: {oracle.no_second_order}")
    for library, reason in ("torch", oracle.no_double), ("JAX", ours.no_double):
        if reason is not None:
            report.notes.append(f"differences are not explained, as {library} does not run in float64: {reason}")
    if ours.no_second_order is not None:
        report.notes.append(f"JAX has no second derivatives: {ours.no_second_order}")
    for what, expected in oracle.native.items():
        if what.startswith("second derivative") and not second_order:
            continue
        in_double = ours.double.get(what), oracle.double.get(what)
        row = _row(backend.name, what, ours.native.get(what), expected, rtol, atol, _relative_error(*in_double))
        if row.verdict == "differs":
            row.verdict = _explain(what, ours, oracle)
        elif row.verdict == "equal" and atol is rtol is None and _is_hidden(*in_double, ours.coarsest):
            row.verdict = "formula"
        report.rows.append(row)
    wrong = [row for row in report.rows if row.what.startswith("second derivative") and row.verdict == "formula"]
    if wrong:
        with CALL_MONITOR(CallMonitor(bypass_rules=False, stops_intermediates=True)):
            stopped = _measure(backend, inputs, second_order)
        for row in wrong:
            array, expected = stopped.native.get(row.what), oracle.native[row.what]
            again = _row(backend.name, row.what, array, expected, rtol, atol, None)
            is_hidden = _is_hidden(stopped.double.get(row.what), oracle.double.get(row.what), stopped.coarsest)
            is_equal = again.verdict == "equal" and not is_hidden
            row.verdict = "intermediate" if is_equal else _explain(row.what, stopped, oracle)
    if any(row.verdict == "intermediate" for row in report.rows):
        report.notes.append(
            "intermediate: forward saves an array that is neither an input nor an output. torch drops its derivative "
            "from second derivatives, and jaxfn does not; without it they agree. Save inputs or outputs and compute "
            "the rest in backward, for second derivatives that are right in torch too."
        )
    for what, output in ours.native.items():
        if what.startswith("output") and what not in oracle.native:
            report.rows.append(Row(backend.name, what, output.shape, str(output.dtype), verdict="extra"))
    if any(row.verdict == "kink" for row in report.rows):
        report.notes.append(
            "kink: the derivatives agree a small step aside. torch and JAX choose different derivatives of clamp, abs, "
            "maximum, minimum and norms exactly at the kink or tie; choose inputs off it, or write the derivative out."
        )
    return report


class _Measured(NamedTuple):
    """Results of JAX for the inputs in their dtypes, in double precision, and for nearby inputs."""

    native: Measurements
    double: Measurements
    nudged: Measurements
    no_second_order: str | None
    no_double: str | None
    coarsest: np.dtype[Any]  # the coarsest dtype of float32 and those in the program for double precision


def _measure(backend: JaxBackend, inputs: Inputs, second_order: bool) -> _Measured:
    """Computes everything that is compared, and the reason if there are no second derivatives."""
    native, no_second_order = backend.measure(inputs, second_order)
    double: Measurements = {}
    nudged: Measurements = {}
    coarsest, no_double = np.dtype(np.float32), None
    try:
        with jax.enable_x64(True):
            coarsest = max(backend.dtypes(inputs.in_double()), key=lambda dtype: _RTOL.get(str(dtype), 0.0))
            double, _ = backend.measure(inputs.in_double(), second_order)
            nudged, _ = backend.measure(inputs.nudged(), second_order)
    except Exception as error:  # it ran in the dtypes of the inputs: it has arrays of these, or checks dtypes
        no_double = first_line(error)
    return _Measured(native, double, nudged, no_second_order, no_double, coarsest)


def _row(
    function: str,
    what: str,
    ours: Array | None,
    expected: Array,
    rtol: float | None,
    atol: float | None,
    double_error: float | None,
) -> Row:
    row = Row(function, what, expected.shape, str(expected.dtype), double_error=double_error)
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
    """Returns the largest absolute error, relative error, and ratio of error to tolerance, and that tolerance."""
    if not ours.size:
        return 0.0, 0.0, 0.0, 0.0
    common = double(np.complex64 if "c" in (ours.dtype.kind, expected.dtype.kind) else np.float32)
    a, b = ours.astype(common), expected.astype(common)
    with np.errstate(invalid="ignore", divide="ignore"):
        if is_inexact(ours.dtype) or is_inexact(expected.dtype):
            usual = _RTOL.get(str(dtype), _RTOL_DOUBLE)
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


def _explain(what: str, ours: _Measured, oracle: Oracle) -> str:
    """Returns why a row differs: "rounding", "kink" or "formula"; "differs" if no run in double precision tells."""
    if ours.double.get(what) is None or oracle.double.get(what) is None:
        return "differs"
    if _agrees(ours.double.get(what), oracle.double.get(what)):
        return "rounding"
    if not what.startswith("output") and _agrees(ours.nudged.get(what), oracle.nudged.get(what)):
        return "kink"
    return "formula"


def _agrees(ours: Array | None, expected: Array | None) -> bool:
    if ours is None or expected is None or ours.shape != expected.shape:
        return False
    # A function may compute in single precision whatever the dtypes of its inputs are.
    coarser = min((ours.dtype, expected.dtype), key=lambda dtype: dtype.itemsize)
    return _errors(ours, expected, coarser)[2] <= 1


def _is_hidden(ours: Array | None, expected: Array | None, coarsest: np.dtype[Any]) -> bool:
    """Whether results in double precision differ, so that equality in half precision says nothing."""
    if ours is None or expected is None or ours.shape != expected.shape or not is_inexact(ours.dtype):
        return False
    return _errors(ours, expected, coarsest)[2] > 1


def _relative_error(ours: Array | None, expected: Array | None) -> float | None:
    if ours is None or expected is None or ours.shape != expected.shape:
        return None
    return _errors(ours, expected, ours.dtype)[1]
