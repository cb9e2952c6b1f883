"""Whole torch models: the compiled training step of the converted module, and of an equal network in flax NNX.

Also torch's own step, eagerly and by `torch.compile`. Compilation is measured separately from the stages before it:
tracing by torch, which includes the translation, and tracing and lowering by JAX. Operations and bytes are XLA's
estimates, which count the body of a loop once: for the LSTM they say little, as torch multiplies all inputs by their
weights before the loop, and flax inside it. So the operations of matrix products and convolutions are counted too, in a
loop as often as it runs.

A peak includes copies of kernels if XLA requires another order of axes than the network's: on a CPU it requires flax's.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn
from benchmarks.measure import Samples, interleaved, seconds
from benchmarks.products import flops_of_products
from benchmarks.steps import peak_memory

ADOPTED, NATIVE, TORCH, COMPILED = FORMS = ("from_torch", "flax", "torch", "torch.compile")
TARGET = 1.05
_RATE = 0.01
_CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A network, and a batch.

    Attributes:
      name: the name of its class in both modules of `models`.
      sizes: the sizes of the network.
      inputs: the shape of a batch.
      tokens: the number of distinct tokens, if the batch consists of tokens.
    """

    name: str
    sizes: tuple[int, ...]
    inputs: tuple[int, ...]
    tokens: int | None = None

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs, as in torch, and labels."""
        generator = np.random.default_rng(0)
        if self.tokens is None:
            images = generator.standard_normal(self.inputs).astype(np.float32)
            return images, generator.integers(0, _CLASSES, self.inputs[0]).astype(np.int32)
        inputs, labels = generator.integers(0, self.tokens, (2, *self.inputs)).astype(np.int32)
        return inputs, labels


MODELS = (
    Model("ResNet18", (_CLASSES,), (8, 3, 64, 64)),
    Model("ViT", (64, 8, 192, 3, 4, _CLASSES), (8, 3, 64, 64)),
    Model("GPT", (1000, 128, 192, 3, 4), (4, 128), tokens=1000),
    Model("LSTM", (1000, 192, 2), (8, 64), tokens=1000),
)


@dataclass(frozen=True)
class Result:
    """A measurement of a model in every form; `None` where a form has none."""

    model: str
    measurement: str
    values: Mapping[str, float | None]

    @property
    def ratio(self) -> float | None:
        """The converted module's number divided by the native network's."""
        ours, native = self.values[ADOPTED], self.values.get(NATIVE)
        return ours / native if ours is not None and native else None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; `None` if there is nothing to compare with."""
        if self.measurement in _STAGES or self.ratio is None:
            return None
        return self.ratio <= TARGET

    def line(self) -> str:
        """Formats the result as a line of text."""
        cells = "".join(self._shown(self.values.get(form)).rjust(14) for form in FORMS)
        ratio = "" if self.ratio is None else f"{self.ratio:6.2f}x"
        return f"  {self.model:<10}{self.measurement:<18}{cells}{ratio:>9}".rstrip()

    def _shown(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value / 1e6:,.1f} M" if self.measurement in _COUNTED else f"{value * 1e3:,.1f} ms"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are saved."""
        return {
            "model": self.model,
            "measurement": self.measurement,
            "unit": _COUNTED.get(self.measurement, "seconds"),
            "values": dict(self.values),
            "ratio": self.ratio,
            "target_met": self.is_met,
        }


_COUNTED = {"flops": "operations", "flops of products": "operations", "bytes accessed": "bytes", "peak memory": "bytes"}
_STAGES = ("before compiling", "traced by torch", "traced by JAX", "compiling")


def header() -> str:
    """Returns the header of the results."""
    return f"{'training steps of whole models':<30}" + "".join(form.rjust(14) for form in FORMS)


def run(rounds: int) -> Iterator[Result]:
    """Yields each result as it is measured, and prints what is skipped."""
    in_torch, in_flax = _module("in_torch", "torch"), _module("in_flax", "flax")
    if in_torch is None:
        return
    jaxfn.from_torch(_torch_model(MODELS[-1], in_torch))(
        MODELS[-1].batch()[0]
    )  # torch imports many modules at its first trace
    for model in MODELS:
        yield from _measure(model, in_torch, in_flax, rounds)


def _module(name: str, library: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"benchmarks.models.{name}")
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        print(f"whole models: {library} is not installed, and skipped")
        return None


def _measure(model: Model, in_torch: ModuleType, in_flax: ModuleType | None, rounds: int) -> Iterator[Result]:
    module = _torch_model(model, in_torch)
    net = jaxfn.from_torch(module)
    steps: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {ADOPTED: _adopted(model, net)}
    if in_flax is not None:
        steps[NATIVE] = _native(model, in_flax, module)
    before: dict[str, float] = {}
    compiling: dict[str, float | None] = {}
    compiled: dict[str, Any] = {}
    for form, (step, args) in steps.items():
        lowered: list[Any] = []
        before[form] = seconds(lambda step=step, args=args, to=lowered: to.append(jax.jit(step).lower(*args)))
        compiling[form] = seconds(lambda form=form, of=lowered: compiled.update({form: of[0].compile()}))
    calls: dict[str, Callable[[], Any]] = {
        form: partial(_finished, compiled[form], args) for form, (_, args) in steps.items()
    }
    losses = {form: float(call()[0]) for form, call in calls.items()}
    if jax.default_backend() == "cpu":
        calls[TORCH] = _in_torch(model, module, module)
        losses[TORCH] = calls[TORCH]()
        if (call := _compiled(model, module)) is not None:
            calls[COMPILED], losses[COMPILED] = call, call()
    for form, loss in losses.items():
        np.testing.assert_allclose(loss, losses[ADOPTED], rtol=1e-3, err_msg=f"{model.name} in {form}")
    samples: Samples = interleaved(calls, rounds)
    yield Result(model.name, "step", {form: statistics.median(values) for form, values in samples.items()})
    for name in ("flops", "bytes accessed"):
        yield Result(model.name, name, {form: f.cost_analysis()[name] for form, f in compiled.items()})
    products = {form: float(flops_of_products(step, *args)) for form, (step, args) in steps.items()}
    yield Result(model.name, "flops of products", products)
    yield Result(model.name, "peak memory", {form: peak_memory(f) for form, f in compiled.items()})
    yield from _before_compiling(model.name, before, seconds(partial(jaxfn.explain, net, model.batch()[0])))
    yield Result(model.name, "compiling", compiling)


def _before_compiling(model: str, before: Mapping[str, float], by_torch: float) -> Iterator[Result]:
    """Yields the time before compiling, and its two parts: the trace by torch, and what JAX does with its result."""
    yield Result(model, "before compiling", before)
    yield Result(model, "traced by torch", {ADOPTED: by_torch})
    yield Result(model, "traced by JAX", {**before, ADOPTED: before[ADOPTED] - by_torch})


def _finished(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls a step, and waits for its results."""
    return jax.block_until_ready(step(*args))


def _torch_model(model: Model, in_torch: ModuleType) -> Any:
    import torch

    torch.manual_seed(0)
    return getattr(in_torch, model.name)(*model.sizes)


def _loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1)
    return -chosen.mean()


def _updated(parameters: Any, gradients: Any) -> Any:
    def updated(parameter: Any, gradient: Any) -> Any:
        return parameter - _RATE * gradient

    return jax.tree.map(updated, parameters, gradients)


def _adopted(model: Model, net: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(parameters: Any, buffers: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, ...]:
        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            scores, moved = net.apply(parameters, buffers, inputs)
            return _loss(scores, labels), moved

        (value, moved), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return value, _updated(parameters, gradients), moved

    return step, (net.parameters, net.buffers, *map(jnp.asarray, model.batch()))


def _native(model: Model, in_flax: ModuleType, module: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from flax import nnx

    network = getattr(in_flax, model.name)(*model.sizes)
    in_flax.load(network, {name: x.numpy() for name, x in module.state_dict().items()})
    definition, parameters, buffers = nnx.split(network, nnx.Param, ...)

    def step(parameters: Any, buffers: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, ...]:
        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            network = nnx.merge(definition, parameters, buffers, copy=True)
            value = _loss(network(inputs), labels)
            return value, nnx.split(network, nnx.Param, ...)[2]

        (value, moved), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return value, _updated(parameters, gradients), moved

    inputs, labels = model.batch()
    inputs = inputs if model.tokens else inputs.transpose(0, 2, 3, 1)
    return step, (parameters, buffers, jnp.asarray(inputs), jnp.asarray(labels))


def _in_torch(model: Model, module: Any, called: Any) -> Callable[[], float]:
    """Returns torch's step, which does not update the parameters, so that all calls are equal.

    Args:
      called: the module, or the result of `torch.compile`.
    """
    import torch

    inputs, labels = (torch.from_numpy(x) for x in model.batch())
    labels = labels.long()

    def step() -> float:
        scores = called(inputs)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                _ = parameter - _RATE * gradient
        return loss.item()

    return step


def _compiled(model: Model, module: Any) -> Callable[[], float] | None:
    """Returns torch's step compiled by a first call; or `None` and the reason if that fails."""
    import torch

    step = _in_torch(model, module, torch.compile(module))
    try:
        step()
    except Exception as error:  # raised by torch, its compiler, or the C++ compiler
        print(f"{model.name}: torch.compile does not work here: {str(error).strip().splitlines()[0]}")
        return None
    return step
