"""The suite: the measured Functions, the measurements, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks import calls, networks, steps
from benchmarks.functions import FORWARD_ALONE, HAND_WRITTEN, TORCH
from benchmarks.measure import interleaved
from benchmarks.results import Row

Forms = Mapping[str, Callable[..., Any]]

_ROWS, _COLUMNS = 32, 32


@dataclass(frozen=True)
class Effort:
    """The numbers of samples."""

    calls: int
    builds: int
    compiles: int
    steps: int


@dataclass(frozen=True)
class Workload:
    """A Function and the networks that it is measured in.

    Attributes:
      name: its name in the modules of `functions`.
      shapes: of the arguments of a single call.
      networks: by name, functions that build the network and its arguments.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    networks: dict[str, tuple[Callable[..., networks.Forward], Callable[[], tuple[Any, Any]]]]

    def args(self) -> list[calls.Array]:
        """Returns random arguments of a single call."""
        generator = np.random.default_rng(0)
        return [generator.standard_normal(shape).astype(np.float32) for shape in self.shapes]


_ELEMENTWISE = {
    f"{networks.CALLS} calls": (networks.chain, networks.chain_args),
    f"{networks.CALLS}-layer MLP": (networks.activation_mlp, networks.mlp_args),
}
_LINEAR = {f"{networks.CALLS}-layer MLP": (networks.linear_mlp, networks.mlp_args)}

WORKLOADS = (
    Workload("relu", ((_ROWS, _COLUMNS),), _ELEMENTWISE),
    Workload("swish", ((_ROWS, _COLUMNS),), _ELEMENTWISE),
    Workload("straight_through", ((_ROWS, _COLUMNS),), _ELEMENTWISE),
    Workload("linear", ((_ROWS, _COLUMNS), (_COLUMNS, _COLUMNS), (_COLUMNS,)), _LINEAR),
)


def run(modules: Mapping[str, ModuleType], effort: Effort) -> Iterator[Row]:
    """Yields each row as it is measured."""
    for workload in WORKLOADS:
        forms = {form: getattr(module, workload.name) for form, module in modules.items()}
        yield from _single_call(workload, forms, effort)
        for name in workload.networks:
            yield from _network(workload, name, _in_jax(forms), effort)
    yield _hessian({form: m.twice_swish for form, m in modules.items() if hasattr(m, "twice_swish")}, effort)


def traces(modules: Mapping[str, ModuleType], effort: Effort) -> Iterator[Row]:
    """Measures the building of a step, in the forms on JAX, on any backend."""
    for workload in WORKLOADS:
        forms = _in_jax({form: getattr(module, workload.name) for form, module in modules.items()})
        for name in workload.networks:
            stages, _ = _built(workload, name, forms, effort)
            for stage, samples in stages.items():
                yield Row(workload.name, name, stage, samples)


def _single_call(workload: Workload, forms: Forms, effort: Effort) -> Iterator[Row]:
    args = workload.args()
    eager = {form: (calls.torch_call if form == TORCH else calls.call)(f, args) for form, f in forms.items()}
    check_same(eager)
    yield Row(workload.name, "call", "eager call", interleaved(eager, effort.calls))
    forms = {form: f for form, f in forms.items() if form != FORWARD_ALONE}
    both = {
        form: (calls.torch_value_and_grad if form == TORCH else calls.value_and_grad)(f, args)
        for form, f in forms.items()
    }
    check_same(both)
    yield Row(workload.name, "call", "eager value-and-grad", interleaved(both, effort.calls))
    saved = {
        form: [(calls.torch_saved_bytes if form == TORCH else calls.saved_bytes)(f, args)] for form, f in forms.items()
    }
    yield Row(workload.name, "call", "saved bytes", saved)


def _in_jax(forms: Forms) -> Forms:
    return {form: f for form, f in forms.items() if form not in (FORWARD_ALONE, TORCH)}


def _built(
    workload: Workload, name: str, forms: Forms, effort: Effort
) -> tuple[dict[str, steps.Samples], steps.Executables]:
    network, make_args = workload.networks[name]
    new_steps = {form: lambda f=f: networks.train_step(network(f)) for form, f in forms.items()}
    return steps.build_all(new_steps, make_args(), effort.builds, effort.compiles)


def _network(workload: Workload, name: str, forms: Forms, effort: Effort) -> Iterator[Row]:
    args = workload.networks[name][1]()
    stages, executables = _built(workload, name, forms, effort)
    for stage, samples in stages.items():
        yield Row(workload.name, name, stage, samples)
    yield Row(workload.name, name, "compiled step", steps.run_all(executables, args, effort.steps))
    memory = {form: steps.peak_memory(compiled[0]) for form, compiled in executables.items()}
    yield Row(workload.name, name, "peak memory", {form: [] if m is None else [m] for form, m in memory.items()})


def _hessian(forms: Forms, effort: Effort) -> Row:
    """Measures second derivatives of a Function with `generate_jvp_rule`, and of plain JAX."""
    args = networks.one_layer_args()
    new_hessians = {form: lambda f=f: networks.hessian(networks.one_layer(f)) for form, f in forms.items()}
    check_same({form: lambda new=new: new()(*args) for form, new in new_hessians.items()})
    _, executables = steps.build_all(new_hessians, args, effort.compiles, effort.compiles)
    return Row("twice_swish", "one layer", "hessian", steps.run_all(executables, args, effort.steps))


def check_same(computations: Mapping[str, Callable[[], Any]]) -> None:
    """Fails if a form's results differ from the hand-written one's: then a comparison of times would be meaningless.

    The tolerance is loose, since matrix products on an accelerator may have low precision, and a wrong rule differs
    more.
    """
    expected = _leaves(computations[HAND_WRITTEN]())
    for form, compute in computations.items():
        for a, b in zip(_leaves(compute()), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02, err_msg=form)


def _leaves(value: Any) -> list[calls.Array]:
    """Returns the arrays in nested tuples and lists, including torch's tensors."""
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [np.asarray(value)]
