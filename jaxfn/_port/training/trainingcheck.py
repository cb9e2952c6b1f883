"""`trainingcheck`: compares a ported training job with torch's, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import jax

from jaxfn._check.arguments import as_function, require_numbers
from jaxfn._parity.inputs import Array
from jaxfn._parity.torch_results import (
    decode_value,
    encode_value,
    import_torch,
    read_file,
    torch_versions,
    write_file,
)
from jaxfn._port.modules.ported_module import Load
from jaxfn._port.training.job_check import TrainingCheck
from jaxfn._port.training.job_record import TorchJob, TrainingRecord, training_record
from jaxfn._port.training.job_report import TrainingcheckReport


def trainingcheck(
    loss: Callable[..., Any],
    torch_loss: Callable[[Any, Any], Any] | str | os.PathLike[str],
    batches: Sequence[Any] | None = None,
    *,
    module: Any = None,
    load: Load,
    optimizer: Any,
    has_buffers: bool = False,
    scheduler: Callable[[Any], Any] | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    atol: float | None = None,
    rtol: float | None = None,
    raise_exception: bool = True,
) -> TrainingcheckReport:
    """Compares a ported training job with the one of torch, step by step, and names the first deviation.

    At every step each term of the loss, the gradient of every parameter, its clipping, the optimizer's state, the
    parameters after the step and the buffers are compared, in float64 if torch runs in it, under torch's names and in
    its layouts. Each step begins with torch's parameters, and the check stops after the first step that deviates:
    `report.step`, `report.stage` ("loss", "gradient", "clipping", "optimizer", "parameters", "buffers") and
    `report.name` say where, `report.looks_like` says what the deviation looks like, if that is known.

    An optimizer's arrays are matched by value, those that are found nowhere in the port's optimizer are a note as long
    as the parameters agree. A parameter that torch has frozen must not change.

    Args:
      loss: The port, a function of (parameters, batch) that returns a scalar or a dict of scalars, the terms, which are
        summed. With `has_buffers`, a function of (parameters, buffers, batch) that returns (loss, new buffers).
      torch_loss: The original, a function of (module, batch) that returns a scalar or such a dict; or the path of a
        file that `record_reference` wrote, for which torch is not needed.
      batches: The batches, pytrees of NumPy arrays: `accumulate` for each step. With a file, those in it.
      module: The torch module. It is copied.
      load: The function that makes the port's parameters (with `has_buffers`, parameters and buffers) of torch's arrays
        by name.
      optimizer: A pair of an optax optimizer, with clipping and schedule inside, and a function that returns torch's of
        a list of parameters; with a file, the optax optimizer alone.
      has_buffers: Whether the port has buffers.
      scheduler: A function that makes torch's learning-rate scheduler of its optimizer.
      max_norm: The norm to which torch clips the gradient of all parameters.
      accumulate: How many batches a step takes: torch and the port average their gradients.
      atol, rtol: The tolerances. Default: those of the dtype in which the port computes.
      raise_exception: Whether to raise on failure.

    Returns:
      A `jaxfn.reports.TrainingcheckReport`, which is true if every step agrees.

    Raises:
      CheckError: A step deviates.
      ImportError: torch is not installed, and `torch_loss` is not a file.
      ValueError: The file cannot be read or was changed, or the number of batches is not a multiple of `accumulate`.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, optax, torch, jaxfn
      >>> module = torch.nn.Linear(3, 1)
      >>> def torch_loss(module, batch):
      ...     return ((module(batch["x"]) - batch["y"]) ** 2).mean()
      >>> def load(arrays):
      ...     return {"w": arrays["weight"].T, "b": arrays["bias"]}
      >>> def loss(parameters, batch):  # a sum where torch has a mean
      ...     return ((batch["x"] @ parameters["w"] + parameters["b"] - batch["y"]) ** 2).sum()
      >>> generator = np.random.default_rng(0)
      >>> batches = [{"x": generator.normal(size=(4, 3)), "y": generator.normal(size=(4, 1))} for _ in range(3)]
      >>> optimizer = optax.adamw(1e-3), lambda parameters: torch.optim.AdamW(parameters, 1e-3)
      >>> report = jaxfn.trainingcheck(
      ...     loss, torch_loss, batches, module=module, load=load, optimizer=optimizer, raise_exception=False
      ... )
      >>> report.step, report.stage, report.looks_like
      (0, 'loss', "4 times torch's: a sum where torch has a mean over 4")

    Torch counterpart: none.
    """
    as_function(loss, "trainingcheck")
    require_numbers("trainingcheck", can_be_zero=True, atol=atol, rtol=rtol)
    if isinstance(torch_loss, (str, os.PathLike)):
        options = {"batches": batches, "module": module, "scheduler": scheduler, "max_norm": max_norm}
        given = [name for name, value in options.items() if value is not None] + ["accumulate"] * (accumulate != 1)
        if given:
            raise TypeError(
                f"trainingcheck: a recorded job has its own {', '.join(given)}. Pass it to record_reference."
            )
        if not hasattr(optimizer, "update"):
            raise TypeError(
                "trainingcheck: a recorded job has its own optimizer of torch, so `optimizer` is optax's alone; got "
                f"{optimizer!r}."
            )
        record, versions = read_training_record(os.fspath(torch_loss))
    else:
        if hasattr(optimizer, "update") or not (isinstance(optimizer, tuple) and len(optimizer) == 2):
            raise TypeError(f"trainingcheck: `optimizer` is a pair, of optax's and torch's, got {optimizer!r}")
        optimizer, of_torch = optimizer
        record = record_training(
            torch_loss, batches, module, of_torch, scheduler, max_norm, accumulate, "trainingcheck"
        )
        versions = torch_versions()
    with jax.enable_x64(True):
        report = TrainingCheck(loss, record, load, has_buffers, optimizer, versions, rtol, atol).run()
    if raise_exception:
        report.raise_if_failed()
    return report


def record_training(
    torch_loss: Any,
    batches: Sequence[Any] | None,
    module: Any,
    optimizer: Any,
    scheduler: Any,
    max_norm: float | None,
    accumulate: int,
    what: str,
) -> TrainingRecord:
    """Returns the results of a torch training job.

    Raises:
      ImportError: torch is not installed.
      TypeError: `module` is not a torch module, or `optimizer` not a function.
      ValueError: There are no batches, or their number is not a multiple of `accumulate`.
    """
    torch = import_torch(what)
    require_numbers(what, max_norm=max_norm, accumulate=accumulate)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{what}: `module` has to be a torch module, got {module!r}")
    if not callable(optimizer):
        raise TypeError(f"{what}: torch's optimizer has to be a function of a list of parameters, got {optimizer!r}")
    batches = None if batches is None else list(batches)
    if not batches or len(batches) % accumulate:
        raise ValueError(
            f"{what}: expected one or more steps of {accumulate} batches, got {len(batches or ())} batches"
        )
    return TorchJob(torch_loss, module, optimizer, scheduler, max_norm, accumulate).record(batches)


def write_training_record(path: str, record: TrainingRecord) -> None:
    """Writes the results of a training job to a file."""
    arrays: dict[str, Array] = {}
    training = encode_value(asdict(record), "the training job", arrays)
    write_file(path, "trainingcheck", {"training": training, "versions": torch_versions()}, arrays)


def read_training_record(path: str) -> tuple[TrainingRecord, dict[str, str]]:
    """Reads the results of a training job from a file, and the versions of torch and NumPy.

    Raises:
      OSError: The file cannot be opened.
      ValueError: It is not a file that `record_reference` wrote of a training job.
    """
    return read_file(
        path,
        "trainingcheck",
        lambda content, arrays: (training_record(decode_value(content["training"], arrays)), content["versions"]),
    )
