"""`paritycheck` and `record_reference`: compare a port with the torch Function that it was ported from."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.arguments import as_arguments, as_function, require_numbers
from jaxfn._gradcheck.problem.monitor import CallMonitor
from jaxfn._parity.backends import JaxBackend, Measurements, Runs, TorchBackend
from jaxfn._parity.comparison import Errors, compare, errors, rounding
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._parity.report import ParitycheckReport, ParitycheckRow, uncompared_row
from jaxfn._parity.torch_results import (
    TorchResults,
    import_torch,
    read_torch_results,
    torch_versions,
    write_torch_results,
)
from jaxfn._reports import concluded
from jaxfn._torch import runs_on_jax
from jaxfn._tree import is_inexact

if TYPE_CHECKING:
    from jaxfn._port.modules.module_record import ModuleRecord
    from jaxfn._port.modules.ported_module import Load

_SAMPLES = 4  # of the inputs, for which the errors of torch are measured


def paritycheck(
    func: Any,
    reference: Any,
    inputs: Sequence[Any] | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    raise_exception: bool = True,
    second_order: bool = True,
    load: Load | None = None,
    has_buffers: bool = False,
) -> ParitycheckReport:
    """Compares a JAX function with the torch function that it was ported from, on equal numbers.

    Outputs, the gradients of all inputs at once and of each alone, and second derivatives are computed by both, in the
    dtypes of the inputs and in double precision. If they differ, the second run distinguishes rounding from a wrong
    formula; a third run, a small step away, detects differences at a kink only (torch and JAX choose different
    derivatives of `clamp`, `abs`, `maximum` and norms exactly there).

    If the outputs differ in number, shape or dtype, derivatives are those of the other outputs alone.

    With `load`, a whole port of a `torch.nn.Module` is compared, in float64: outputs, the gradient of every parameter
    and input, and buffers. The port after `load` is differentiated with respect to torch's
    arrays, so that gradients have their names and layouts, also of fused and tied weights. If they differ,
    `report.first_deviation` names the first layer that does, in forward order for outputs and in backward order for
    gradients, with the numbers of both. The port needs no marks: the values that torch's layers return and receive are
    searched among its intermediate values, in any order of axes. A layer that cannot be found so is named by the port,
    with `jax.ad_checkpoint.checkpoint_name(y, "name of the torch layer")`.

    torch drops the derivative of an intermediate that `forward` saved, and jaxfn does not. A second derivative that
    differs for this reason alone does not fail the check; a note says so.

    Args:
      func: The port: a `jaxfn.Function` or any function of JAX arrays. With `load`, a function of parameters and
        inputs; with `has_buffers`, of parameters, buffers and inputs, that returns (outputs, new buffers).
      reference: What it is compared with: a `torch.autograd.Function`, any function of tensors, a module, or the path
        of a file that `record_reference` wrote, for which torch is not needed.
      inputs: The arguments, arrays (of NumPy, of any shapes) and Python values; `None` with a recorded file.
      atol: The absolute tolerance. Default: rounding in the dtype, relative to the largest number of about the
        magnitude of each, and a few times the error that torch has in that dtype.
      rtol: The relative tolerance: `|jax - torch| <= atol + rtol * |torch|`. Default: rounding in the dtype.
      raise_exception: Whether to raise on failure.
      second_order: Whether to compare second derivatives.
      load: Returns the parameters of the port, any pytree, from the arrays of the module: a dict of its parameters and
        buffers by their names in torch, all names of tied ones. It is differentiated, so it computes with methods of
        the arrays and `jax.numpy`.
      has_buffers: Whether `load` returns (parameters, buffers), and the port takes and returns buffers.

    Returns:
      A `ParitycheckReport`, which is true if everything agrees. `print` shows it as a table.

    Raises:
      CheckError: An array differs; the text names it and the function, and `error.report` has them as data.
      ImportError: torch is not installed, and `reference` is not a path.
      TypeError: `func` is torch code; `inputs` are missing, or were passed together with a recorded file; `load` was
        passed and the reference is not a module; `load` cannot be differentiated, or it or the port does not return a
        pair with `has_buffers`.
      ValueError: The torch function returned no tensor, or the port other buffers than `load`.

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

      A whole module, with a wrong bias:

      >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
      >>> def load(arrays):
      ...     return [(arrays[f"{i}.weight"].T, arrays[f"{i}.bias"]) for i in (0, 2)]
      >>> def network(parameters, x):
      ...     (w0, b0), (w1, b1) = parameters
      ...     return jnp.tanh(x @ w0 + b0) @ w1 - b1
      >>> x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
      >>> report = jaxfn.paritycheck(network, module, [x], load=load, raise_exception=False)
      >>> report.first_deviation.layer, report.first_deviation.what
      ('2', 'output')

    Torch counterpart: none.
    """
    function = as_function(func, "paritycheck")
    func = func if isinstance(func, type) else function  # The backend names a class.
    require_numbers("paritycheck", can_be_zero=True, atol=atol, rtol=rtol)
    is_file = isinstance(reference, (str, os.PathLike))
    if is_file and inputs is not None:
        raise TypeError("paritycheck: a recorded file has its own inputs. Omit `inputs`.")
    if not is_file and inputs is None:
        raise TypeError("paritycheck: `inputs` are missing. Pass the arguments on which to compare.")
    if load is not None:
        from jaxfn._port.modules.module_check import check_module

        record, versions = _module_record(reference, inputs)
        return concluded(check_module(func, record, load, has_buffers, versions, rtol, atol), raise_exception)
    if has_buffers:
        raise TypeError("paritycheck: `has_buffers` needs `load`, which returns the port's parameters and buffers.")
    if is_file:
        recorded = read_torch_results(os.fspath(reference))
    else:
        assert inputs is not None
        recorded = _run_torch(reference, inputs, second_order, "paritycheck")
    port = JaxBackend(func)
    found = port.outputs(Inputs(recorded.args))
    expected = {int(what.removeprefix("output ")): y for what, y in recorded.outputs().items()}
    alike = [i for i, y in expected.items() if i in found and _are_alike(found[i], y)]
    if len(alike) == len(found | expected):
        report = _compare(port, recorded, rtol, atol, second_order)
    else:
        if inputs is not None:
            recorded = _run_torch(reference, inputs, second_order, "paritycheck", alike)
        elif any(is_inexact(y.dtype) for i, y in expected.items() if i not in alike):
            alike = []  # the file has only the sums over all outputs
        recorded = recorded if alike else recorded.without_derivatives()
        report = _compare(JaxBackend(func, alike), recorded, rtol, atol, second_order)
        compared = f"those of {', '.join(f'output {i}' for i in alike)} alone" if alike else "not compared"
        report.notes.insert(
            0,
            f"{port.name} returns other outputs than {recorded.name} (see the rows). Derivatives are {compared}.",
        )
    if recorded.module is not None or hasattr(reference, "named_parameters"):
        report.notes.append("gradients of parameters are not compared: pass `load`, and a port that takes parameters")
    return concluded(report, raise_exception)


def record_reference(
    func: Any,
    inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    module: Any = None,
    optimizer: Callable[[list[Any]], Any] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
) -> None:
    """Writes the results of torch code to a file, for `paritycheck` or `trainingcheck` in an environment without torch.

    Args:
      func: A `torch.autograd.Function`, any function of tensors, or a module. With `module`, the loss of a training
        job: a function of the module and a batch.
      inputs: The arguments, arrays and Python values that JSON supports; of a training job, its batches.
      path: The file, usually `*.npz`. It has inputs, outputs, gradients, second derivatives and versions, and no
        pickles. For a module it has its parameters, buffers and the values between its layers too; for a training job,
        all that `trainingcheck` compares. It has a checksum, and a changed file raises.
      module, optimizer, scheduler, max_norm, accumulate: A training job, as in `trainingcheck`; `optimizer` is torch's.

    Raises:
      ImportError: torch is not installed.
      TypeError: `func` runs on JAX, an argument cannot be written, or options of a training job lack `module`.
      ValueError: `func` returned no tensor.

    Examples:
      >>> import os, tempfile, jax, torch, numpy as np, jaxfn
      >>> path = os.path.join(tempfile.mkdtemp(), "relu.npz")
      >>> jaxfn.record_reference(torch.nn.functional.relu, [np.array([-1.0, 2.0], np.float32)], path)
      >>> bool(jaxfn.paritycheck(jax.nn.relu, path))
      True

    Torch counterpart: none.
    """
    if module is not None:
        from jaxfn._port.training.trainingcheck import record_training, write_training_record

        what = "record_reference"
        record = record_training(func, inputs, module, optimizer, scheduler, max_norm, accumulate, what)
        return write_training_record(os.fspath(path), record)
    if not (optimizer is scheduler is max_norm is None and accumulate == 1):
        raise TypeError("record_reference: a training job has a `module`, which its optimizer trains. Pass it.")
    recorded = _run_torch(func, inputs, True, "record_reference")
    if isinstance(func, import_torch("record_reference").nn.Module):
        from jaxfn._port.modules.module_record import record_module

        recorded = replace(recorded, module=record_module(func, inputs))
    write_torch_results(os.fspath(path), recorded)


def _module_record(reference: Any, inputs: Sequence[Any] | None) -> tuple[ModuleRecord, dict[str, str]]:
    """Returns the results of a torch module, computed or recorded, and the versions."""
    if inputs is None:
        recorded = read_torch_results(os.fspath(reference))
        if recorded.module is None:
            raise TypeError(f"paritycheck: {reference} is not of a module, whose arrays `load` takes.")
        return recorded.module, recorded.versions
    torch = import_torch("paritycheck")
    if not isinstance(reference, torch.nn.Module):
        raise TypeError(f"paritycheck: with `load`, the reference has to be a torch module, got {reference!r}")
    from jaxfn._port.modules.module_record import record_module

    return record_module(reference, inputs), torch_versions()


def _are_alike(ours: Array, expected: Array) -> bool:
    return ours.shape == expected.shape and ours.dtype == jax.dtypes.canonicalize_dtype(expected.dtype)


def _run_torch(
    func: Any, args: Any, second_order: bool, what: str, differentiated: Collection[int] | None = None
) -> TorchResults:
    import_torch(what)
    if runs_on_jax(func):
        raise TypeError(
            f"{what} compares with torch code, and {func!r} runs on JAX. jaxfn.kernelcheck(func, reference, inputs) "
            "compares two functions of JAX."
        )
    inputs = Inputs(as_arguments(args))
    backend = TorchBackend(func, differentiated)
    runs = backend.runs(inputs, second_order)
    try:
        errors = {} if runs.no_double else _errors_of_torch(backend, inputs, second_order, runs.double)
    except Exception:  # it ran in double precision, and does not run in single precision
        errors = {}
    recorded = TorchResults(backend.name, inputs.args, runs, errors, torch_versions())
    if not recorded.outputs():
        raise ValueError(
            f"jaxfn.{what}: {backend.name} returned no tensor for these inputs, so there is nothing to compare"
        )
    return recorded


def _errors_of_torch(backend: TorchBackend, inputs: Inputs, second_order: bool, double: Measurements) -> Measurements:
    """Returns the errors of torch in the dtypes of the inputs, or in single precision; see `TorchResults`.

    There are none if torch draws random numbers: then two runs differ by more than errors.
    """
    with backend.in_double() as exact:
        again, _ = exact.measure(inputs.in_double(), second_order)
    if not all(np.array_equal(x, again[what], equal_nan=True) for what, x in double.items()):
        return {}
    coarse_dtype = "float32" if inputs.are_double else None
    errors: dict[str, list[Array]] = {}
    for number in range(_SAMPLES):
        sample = inputs.sample(number)
        coarse, _ = backend.with_dtype(coarse_dtype).measure(sample, second_order)
        with backend.in_double() as exact:
            precise, _ = exact.measure(sample.in_double(), second_order)
        for what, x in coarse.items():
            if is_inexact(x.dtype) and what in precise and x.shape == precise[what].shape:
                with np.errstate(invalid="ignore"):
                    error = abs(x.astype(precise[what].dtype) - precise[what])
                errors.setdefault(what, []).append(error / _eps(x.dtype))
    return {what: np.stack(found) for what, found in errors.items()}


def _compare(
    port: JaxBackend, recorded: TorchResults, rtol: float | None, atol: float | None, second_order: bool
) -> ParitycheckReport:
    inputs = Inputs(recorded.args)
    expected = recorded.runs
    second_order = second_order and expected.no_second_order is None
    ours = port.runs(inputs, second_order)
    comparison = _ParityComparison(port.name, recorded, ours, rtol, atol)
    report = ParitycheckReport(recorded.name, port.name, {**recorded.versions, "jax": jax.__version__})
    for library, runs in ("torch", expected), ("JAX", ours):
        if runs.no_second_order is not None:
            report.notes.append(f"{library} has no second derivatives: {runs.no_second_order}")
        if runs.no_double is not None:
            report.notes.append(
                f"differences are not explained, as {library} does not run in float64: {runs.no_double}"
            )
    seconds = [what for what in expected.native if what.startswith(_SECOND)]
    report.rows += [comparison.row(what) for what in expected.native if second_order or what not in seconds]
    wrong = [i for i, row in enumerate(report.rows) if row.what in seconds and row.verdict == "formula"]
    if wrong:
        with CallMonitor(bypass_rules=False, stops_intermediates=True).active():
            stopped = _ParityComparison(port.name, recorded, port.runs(inputs, second_order), rtol, atol)
        for i in wrong:
            verdict = stopped.row(report.rows[i].what).verdict
            report.rows[i] = replace(report.rows[i], verdict="intermediate" if verdict == "equal" else verdict)
    for what, output in ours.native.items():
        if what.startswith("output") and what not in expected.native:
            report.rows.append(uncompared_row(port.name, what, output, "extra"))
    verdicts = {row.verdict for row in report.rows}
    report.notes += [note for verdict, note in _NOTES.items() if verdict in verdicts]
    return report


_SECOND = "second derivative"
_NOTES = {
    "intermediate": "intermediate: forward saves an array that is neither an input nor an output. torch drops its "
    "derivative from second derivatives, and jaxfn does not; without it they agree. Save inputs or outputs and compute "
    "the rest in backward, for second derivatives that are right in torch too.",
    "kink": "kink: the derivatives agree a small step aside. torch and JAX choose different derivatives of clamp, abs, "
    "maximum, minimum and norms exactly at the kink or tie; choose inputs off it, or write the derivative out.",
}


class _ParityComparison:
    """The comparison of what both libraries compute.

    Args:
      port: the name of the port.
      recorded: the results of torch.
      ours: the results of JAX.
      rtol, atol: the tolerances that the caller passed.
    """

    def __init__(self, port: str, recorded: TorchResults, ours: Runs, rtol: float | None, atol: float | None) -> None:
        self._port = port
        self._expected = recorded
        self._ours = ours
        self._tolerances = rtol, atol

    def row(self, what: str) -> ParitycheckRow:
        """Returns the row of an array of torch."""
        expected = self._expected.runs.native[what]
        noise = self._expected.ulps(what) * _eps(expected.dtype)
        rtol, atol = self._tolerances
        in_double = self._ours.double.get(what), self._expected.runs.double.get(what)
        relative = _errors(*in_double, None, 0.0)
        row = compare(
            self._port,
            what,
            self._ours.native.get(what),
            expected,
            rtol,
            atol,
            None if relative is None else relative.relative,
            noise=noise,
        )
        if row.verdict == "differs":
            return replace(row, verdict=self._explain(what))
        if row.verdict == "equal" and atol is rtol is None and is_inexact(expected.dtype):
            hidden = _errors(*in_double, self._ours.coarsest, self._expected.ulps(what))
            if hidden is not None and hidden.num_wrong:  # so that equality in half precision says nothing
                return replace(row, verdict="formula")
        return row

    def _explain(self, what: str) -> str:
        """Returns why a row differs; "differs" if no run in double precision tells."""
        if what not in self._ours.double or what not in self._expected.runs.double:
            return "differs"
        if self._agree(what, self._ours.double, self._expected.runs.double):
            return "rounding"
        is_output = what.startswith("output")
        if not is_output and self._agree(what, self._ours.nudged, self._expected.runs.nudged):
            return "kink"
        return "formula"

    def _agree(self, what: str, ours: Measurements, expected: Measurements) -> bool:
        if what not in ours or what not in expected:
            return False
        pair = ours[what], expected[what]
        # A function may compute in single precision whatever the dtypes of its inputs are.
        coarser = min((x.dtype for x in pair), key=lambda dtype: dtype.itemsize)
        found = _errors(*pair, coarser, self._expected.ulps(what))
        return found is not None and not found.num_wrong


def _errors(ours: Array | None, expected: Array | None, dtype: Any, ulps: Any) -> Errors | None:
    """Returns the `errors` of an array for the rounding of a dtype, by default its own; `None` if there is no pair."""
    if ours is None or expected is None or ours.shape != expected.shape:
        return None
    dtype = ours.dtype if dtype is None else dtype
    return errors(ours, expected, rounding(dtype), noise=ulps * _eps(dtype))


def _eps(dtype: Any) -> float:
    """Returns the epsilon of an inexact dtype, 0 of others."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0
