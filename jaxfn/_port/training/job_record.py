"""Results of a torch training job: losses, gradients, the optimizer's state, parameters and buffers of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.tree_util import tree_map

from jaxfn._parity.backends import Measurements, to_numpy
from jaxfn._parity.inputs import Inputs
from jaxfn._port.modules.module_record import aliases, arrays_of, record_in_double
from jaxfn._torch.values.arrays import to_torch
from jaxfn._tree import is_array_leaf

TORCH_EPSILON = 1e-6  # which torch adds to the norm that it divides by, and optax does not


@dataclass(frozen=True)
class TrainingStep:
    """One step of an optimizer.

    Attributes:
      terms: for each batch, the terms of the loss by name; of a loss that is a scalar, the term `loss`.
      gradients: the gradients of the parameters before clipping, by name; zero where torch has none.
      norm: their norm.
      clipped: whether clipping changed them.
      state: the optimizer's arrays by their key, each by the names of the parameters.
      count: the optimizer's number of steps; -1 if it has none.
      parameters, buffers: those after the step.
    """

    terms: list[dict[str, float]]
    gradients: Measurements
    norm: float
    clipped: bool
    state: dict[str, Measurements]
    count: int
    parameters: Measurements
    buffers: Measurements

    def clipping(self, max_norm: float | None) -> float:
        """Returns the factor by which torch clips the gradients."""
        return 1.0 if max_norm is None else min(1.0, max_norm / (self.norm + TORCH_EPSILON))


@dataclass(frozen=True)
class TrainingRecord:
    """The results of a torch training job.

    Attributes:
      name: the name of the class of the module.
      optimizer: the name of the class of the optimizer.
      is_double: whether it ran in double precision.
      batches: the batches, in double precision if it ran in it.
      accumulate: how many batches a step takes.
      max_norm: the norm to which gradients are clipped, if they are.
      parameters, buffers: those before the first step; frozen parameters count as buffers.
      frozen: the names of the parameters that are frozen, or that the optimizer does not have.
      aliases: further names of tied parameters and buffers, each with the name under which they are.
      steps: the steps.
      notes: why it is not in double precision, and whether it draws random numbers.
    """

    name: str
    optimizer: str
    is_double: bool
    batches: list[Any]
    accumulate: int
    max_norm: float | None
    parameters: Measurements
    buffers: Measurements
    frozen: list[str]
    aliases: dict[str, str]
    steps: list[TrainingStep]
    notes: list[str]

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of a call of the loss, apart from parameters and buffers."""
        return (self.batches[0],)


def training_record(fields: dict[str, Any]) -> TrainingRecord:
    """Returns the record with these fields, which are plain Python values."""
    steps = [TrainingStep(**step) for step in fields.pop("steps")]
    return TrainingRecord(steps=steps, **fields)


@dataclass(frozen=True)
class TorchJob:
    """A training job of torch.

    Attributes:
      loss: the loss, of the module and a batch.
      module: the module, which is copied.
      optimizer: makes an optimizer of a list of parameters.
      scheduler: makes a learning-rate scheduler of an optimizer, if there is one.
      max_norm: the norm to which gradients are clipped, if they are.
      accumulate: of how many batches a step averages the gradients.
    """

    loss: Callable[[Any, Any], Any]
    module: Any
    optimizer: Callable[[list[Any]], Any]
    scheduler: Callable[[Any], Any] | None
    max_norm: float | None
    accumulate: int

    def record(self, batches: Sequence[Any]) -> TrainingRecord:
        """Trains a copy of the module, in double precision if it runs in it."""
        return record_in_double(self.module, [Inputs((batch,)) for batch in batches], self._record)

    def _record(self, module: Any, inputs: Sequence[Inputs], is_double: bool) -> TrainingRecord:
        import torch

        batches = [batch for x in inputs for batch in x.args]
        named = dict(module.named_parameters())
        optimizer = self.optimizer([x for x in named.values() if x.requires_grad])
        trained = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if not trained <= {id(x) for x in named.values()}:
            raise ValueError(
                "torch's optimizer has other parameters than those of the list that it is passed, which are of a copy "
                "of the module. Use that list, as `lambda parameters: torch.optim.Adam(parameters)`."
            )
        parameters = {name: x for name, x in named.items() if x.requires_grad and id(x) in trained}
        frozen = {name: x for name, x in named.items() if name not in parameters}
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        before = arrays_of(parameters), arrays_of(frozen | dict(module.named_buffers()))
        steps: list[TrainingStep] = []
        for start in range(0, len(batches), self.accumulate):
            optimizer.zero_grad()
            terms = [self._backward(module, batch) for batch in batches[start : start + self.accumulate]]
            gradients = {name: _gradient(x) for name, x in parameters.items()}
            norm, clipped = float(np.sqrt(sum(np.sum(abs(g) ** 2) for g in gradients.values()))), False
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(parameters.values()), self.max_norm)
                clipped = norm > self.max_norm
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            state, count = _state(optimizer, parameters)
            buffers = arrays_of(frozen | dict(module.named_buffers()))
            steps.append(TrainingStep(terms, gradients, norm, clipped, state, count, arrays_of(parameters), buffers))
        return TrainingRecord(
            type(module).__name__,
            type(optimizer).__name__,
            is_double,
            batches,
            self.accumulate,
            self.max_norm,
            *before,
            list(frozen),
            aliases(module),
            steps,
            [],
        )

    def _backward(self, module: Any, batch: Any) -> dict[str, float]:
        """Adds the gradients for a batch to those of the parameters; returns the terms of the loss."""
        terms = terms_of(self.loss(module, tree_map(_to_torch, batch)), "torch_loss")
        total: Any = sum(terms.values())
        (total / self.accumulate).backward()
        return {name: float(term.detach()) for name, term in terms.items()}


def terms_of(loss: Any, what: str) -> dict[str, Any]:
    """Returns the terms of a loss by name."""
    terms = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
    for name, term in terms.items():
        if getattr(term, "shape", None) != ():
            found = f"an array of shape {tuple(term.shape)}" if hasattr(term, "shape") else f"{type(term).__name__}"
            raise TypeError(
                f"trainingcheck: {what} has to return a scalar or a dict of scalars; its term {name!r} is {found}"
            )
    return terms


def _to_torch(leaf: Any) -> Any:
    return to_torch(leaf) if is_array_leaf(leaf) else leaf


def _gradient(parameter: Any) -> Any:
    gradient = parameter.grad
    return np.zeros_like(to_numpy(parameter)) if gradient is None else to_numpy(gradient.to_dense())


def _state(optimizer: Any, parameters: Mapping[str, Any]) -> tuple[dict[str, Measurements], int]:
    """Returns the optimizer's arrays of the parameters' shapes, and its number of steps."""
    state: dict[str, Measurements] = {}
    count = -1
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if getattr(value, "shape", None) == parameter.shape and key != "step":
                state.setdefault(key, {})[name] = to_numpy(value)
            elif key == "step":
                count = int(value)
    return state, count
