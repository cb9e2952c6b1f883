"""Evaluation of outputs, gradients and second derivatives by torch and by JAX, as NumPy arrays under equal names.

Gradients are in torch's convention for complex numbers on both sides.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves

from jaxfn._check.draws import draw
from jaxfn._jaxpr import all_eqns, open_jaxpr
from jaxfn._parity.comparison import rounding
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._reports import first_line
from jaxfn._torch.values.arrays import to_jax, to_torch
from jaxfn._tree import conjugate, is_array_leaf, is_inexact, is_none, replace_at

Measurements = dict[str, Array]
"""Arrays by name: `output 0`, `gradient of input 0 (alone)`, ..."""


class Runs(NamedTuple):
    """Results of a library for the inputs in their dtypes, in double precision, and for nearby inputs.

    Attributes:
      native, double, nudged: the results.
      no_second_order: the reason if there are no second derivatives.
      no_double: the reason if the function does not run in double precision; `double` and `nudged` are empty then.
      coarsest: the coarsest dtype of float32 and those in which it computes for double precision.
    """

    native: Measurements
    double: Measurements
    nudged: Measurements
    no_second_order: str | None
    no_double: str | None
    coarsest: np.dtype[Any] = np.dtype(np.float32)


class Backend(ABC):
    """A library that evaluates a function and its derivatives.

    Args:
      function: the function, a Function, or a module.
      differentiated: the indices of the outputs whose derivatives are computed. Default: all.

    Attributes:
      name: the name of the function, the Function, or the class of the module.
    """

    def __init__(self, function: Any, differentiated: Collection[int] | None = None) -> None:
        self.function: Callable[..., Any] = function.apply if isinstance(function, type) else function
        if not callable(self.function):
            raise TypeError(f"paritycheck compares functions, got {function!r}")
        self.name = function_name(function)
        self._differentiated_outputs = differentiated

    def is_differentiated(self, output: int) -> bool:
        """Whether derivatives of an output are computed."""
        return self._differentiated_outputs is None or output in self._differentiated_outputs

    def measure(self, inputs: Inputs, second_order: bool) -> tuple[Measurements, str | None]:
        """Returns everything that is compared, and the reason if there are no second derivatives."""
        outputs = self.outputs(inputs)
        measured: Measurements = {f"output {i}": y for i, y in outputs.items()}
        if not inputs.values or not any(map(self.is_differentiated, outputs)):
            return measured, None
        everything = range(len(inputs.values))
        differentiated = [i for i, y in outputs.items() if is_inexact(y.dtype) and self.is_differentiated(i)]
        chosen: list[tuple[str, Sequence[int], int | None]] = [("", everything, None)]
        if len(everything) > 1:
            chosen += [(" (alone)", [i], None) for i in everything]
        if len(differentiated) > 1:  # the gradients of the other outputs are undefined
            chosen += [(f" (output {output} alone)", everything, output) for output in differentiated]
        for suffix, pattern, output in chosen:
            for i, gradient in zip(pattern, self.gradients(inputs, pattern, output), strict=True):
                measured[f"gradient of {inputs.names[i]}{suffix}"] = gradient
        no_second_order = None
        if second_order:
            try:
                seconds = self.second_derivatives(inputs)
                measured |= {f"second derivative, {name}": x for name, x in seconds.items()}
            except (RuntimeError, NotImplementedError, TypeError) as error:
                no_second_order = first_line(error)
        return measured, no_second_order

    def runs(self, inputs: Inputs, second_order: bool) -> Runs:
        """Returns everything that is compared, for the inputs, in double precision, and for nearby inputs."""
        native, no_second_order = self.measure(inputs, second_order)
        try:
            with self.in_double() as backend:
                double, _ = backend.measure(inputs.in_double(), second_order)
                nudged, _ = backend.measure(inputs.nudged(), second_order)
                coarsest = backend.coarsest_dtype(inputs.in_double())
        except Exception as error:  # it ran in the dtypes of the inputs: it has arrays of these, or checks dtypes
            return Runs(native, {}, {}, no_second_order, first_line(error))
        return Runs(native, double, nudged, no_second_order, None, coarsest)

    def coarsest_dtype(self, inputs: Inputs) -> np.dtype[Any]:
        """Returns the coarsest dtype of float32 and those in which the function computes, as far as they are known."""
        return np.dtype(np.float32)

    @abstractmethod
    def in_double(self) -> AbstractContextManager[Backend]:
        """Returns a context with the function in double precision."""

    @abstractmethod
    def outputs(self, inputs: Inputs) -> dict[int, Array]:
        """Returns the arrays and numbers in the function's result, by their index among its leaves."""

    @abstractmethod
    def gradients(self, inputs: Inputs, pattern: Sequence[int], output: int | None = None) -> list[Array]:
        """Returns the gradients of these inputs, differentiated without the others, for random grad_outputs.

        With `output`, only that output is used.
        """

    @abstractmethod
    def second_derivatives(self, inputs: Inputs) -> Measurements:
        """Returns the gradients of all gradients, for random cotangents, by input and by `grad_output 0`, ..."""


def output_leaves(returned: Any, name: str, is_array: Callable[[Any], bool]) -> dict[int, Any]:
    """Returns the leaves of a function's result that are arrays or numbers, by index; `None` counts as a leaf."""
    leaves = dict(enumerate(tree_leaves(returned, is_leaf=is_none)))
    for i, leaf in leaves.items():
        if not (leaf is None or is_array(leaf) or isinstance(leaf, (bool, int, float, complex))):
            raise TypeError(
                f"paritycheck: {name} returned a {type(leaf).__name__} as output {i}, which cannot be compared. Return "
                "arrays, numbers and None, in tuples, lists and dicts."
            )
    return {i: leaf for i, leaf in leaves.items() if leaf is not None}


def function_name(function: Any) -> str:
    """Returns the name of a function or a Function, or the class of a module."""
    if isinstance(function, partial):
        return function_name(function.func)
    name, owner = getattr(function, "__name__", None), getattr(function, "__self__", function)
    if name is not None and (name not in ("apply", "forward", "__call__") or owner is function):
        return name
    return owner.__name__ if isinstance(owner, type) else type(getattr(owner, "torch_module", owner)).__name__


class TorchBackend(Backend):
    """Evaluation by torch, on the CPU. A module is copied, so that its buffers do not change."""

    def __init__(self, function: Any, differentiated: Collection[int] | None = None, *, dtype: Any = None) -> None:
        super().__init__(function, differentiated)
        self.function = _copied(self.function, dtype)
        self._original = function

    def in_double(self) -> AbstractContextManager[Backend]:
        return nullcontext(self.with_dtype("float64"))

    def with_dtype(self, name: str | None) -> TorchBackend:
        """Returns a backend for a copy of a module in a dtype; other functions follow that of their arguments."""
        import torch

        dtype = None if name is None else getattr(torch, name)
        return TorchBackend(self._original, self._differentiated_outputs, dtype=dtype)

    def _call(self, inputs: Inputs, leaves: Sequence[Any]) -> dict[int, Any]:
        import torch

        # Copies, since a Function may mutate its inputs, which autograd forbids for leaves.
        returned = inputs.call(self.function, to_torch, [leaf.clone() for leaf in leaves])
        outputs = output_leaves(returned, self.name, lambda leaf: isinstance(leaf, torch.Tensor))
        return {i: y if isinstance(y, torch.Tensor) else to_torch(np.asarray(y)) for i, y in outputs.items()}

    def _differentiated(self, inputs: Inputs, pattern: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Returns the inputs as leaves of torch's graph, and the outputs that require gradients."""
        leaves = [to_torch(x).requires_grad_(i in pattern) for i, x in enumerate(inputs.values)]
        outputs = self._call(inputs, leaves)
        differentiated = [(i, y) for i, y in outputs.items() if y.requires_grad and self.is_differentiated(i)]
        return [leaves[i] for i in pattern], differentiated

    def outputs(self, inputs: Inputs) -> dict[int, Array]:
        return {i: to_numpy(y) for i, y in self._call(inputs, [to_torch(x) for x in inputs.values]).items()}

    def gradients(self, inputs: Inputs, pattern: Sequence[int], output: int | None = None) -> list[Array]:
        leaves, outputs = self._differentiated(inputs, pattern)
        outputs = [(i, y) for i, y in outputs if output in (None, i)]
        grad_outputs = [draw_tensor("grad_output", i, y) for i, y in outputs]
        return [to_numpy(x) for x in torch_grad([y for _, y in outputs], leaves, grad_outputs)]

    def second_derivatives(self, inputs: Inputs) -> Measurements:
        leaves, outputs = self._differentiated(inputs, range(len(inputs.values)))
        grad_outputs = [draw_tensor("grad_output", i, y).requires_grad_() for i, y in outputs]
        gradients = torch_grad([y for _, y in outputs], leaves, grad_outputs, create_graph=True)
        if any(map(_leads_to_error_node, gradients)):
            raise RuntimeError("backward was marked with @once_differentiable")
        differentiable = [(i, g) for i, g in enumerate(gradients) if g.requires_grad]
        directions = [draw_tensor("direction", i, g) for i, g in differentiable]
        seconds = torch_grad([g for _, g in differentiable], [*leaves, *grad_outputs], directions)
        names = [*inputs.names, *(f"grad_output {i}" for i, _ in outputs)]
        return {name: to_numpy(x) for name, x in zip(names, seconds, strict=True)}


def _copied(function: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Returns a function that is a module, or a method of one, for a copy of the module, cast to a dtype."""
    import torch

    owner = getattr(function, "__self__", function)
    if not isinstance(owner, torch.nn.Module):
        return function
    module = copy.deepcopy(owner)
    module = module if dtype is None else module.to(dtype)
    return module if owner is function else getattr(module, function.__name__)


def torch_grad(outputs: list[Any], leaves: list[Any], grad_outputs: list[Any], create_graph: bool = False) -> list[Any]:
    """Returns the gradients of tensors, zeros where torch has none."""
    import torch

    if not outputs or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    gradients: Any = torch.autograd.grad(outputs, leaves, grad_outputs, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]


def _leads_to_error_node(tensor: Any) -> bool:
    """Whether the graph of a tensor has a node that only raises; `torch.autograd.grad` may not visit it."""
    pending: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "Error":
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False


def to_numpy(tensor: Any) -> Array:
    """Returns a copy of a tensor as a NumPy array."""
    with jax.enable_x64(True):
        return np.asarray(to_jax(tensor.detach()))


def draw_tensor(purpose: str, index: int, like: Any) -> Any:
    """Returns what `draw` does for an array like a tensor, as a tensor."""
    return to_torch(draw(purpose, index, to_numpy(like)))


class JaxBackend(Backend):
    """Evaluation by JAX, under the active x64 setting."""

    @contextmanager
    def in_double(self) -> Generator[Backend]:
        with jax.enable_x64(True):
            yield self

    def _call(self, inputs: Inputs, values: Sequence[Any]) -> dict[int, jax.Array]:
        returned = inputs.call(self.function, jnp.asarray, values)
        return {i: jnp.asarray(y) for i, y in output_leaves(returned, self.name, is_array_leaf).items()}

    def outputs(self, inputs: Inputs) -> dict[int, Array]:
        return {i: np.asarray(y) for i, y in self._call(inputs, [jnp.asarray(x) for x in inputs.values]).items()}

    def coarsest_dtype(self, inputs: Inputs) -> np.dtype[Any]:
        traced = jax.make_jaxpr(partial(self._call, inputs))([jnp.asarray(x) for x in inputs.values])
        avals = [v.aval for eqn in all_eqns(open_jaxpr(traced)[0]) for v in eqn.outvars]
        dtypes = {np.dtype(x.dtype) for x in avals if is_inexact(getattr(x, "dtype", None))}
        return max({np.dtype(np.float32)} | dtypes, key=rounding)

    def _pullback(
        self, inputs: Inputs, values: Sequence[Any], pattern: Sequence[int], output: int | None = None
    ) -> tuple[dict[int, jax.Array], Any]:
        """Returns the inexact outputs by index, and the pullback in torch's convention."""

        def function_of_chosen(*chosen: Any) -> Any:
            outputs = self._call(inputs, replace_at(pattern, values, chosen))
            used = {i: y for i, y in outputs.items() if self.is_differentiated(i) and output in (None, i)}
            return {i: y for i, y in used.items() if is_inexact(y.dtype)}, ()

        outputs, pullback, _ = torch_vjp(function_of_chosen, *(values[i] for i in pattern))
        return outputs, pullback

    def gradients(self, inputs: Inputs, pattern: Sequence[int], output: int | None = None) -> list[Array]:
        outputs, pullback = self._pullback(inputs, [jnp.asarray(x) for x in inputs.values], pattern, output)
        return [np.asarray(g) for g in pullback(draw_grad_outputs(outputs))]

    def second_derivatives(self, inputs: Inputs) -> Measurements:
        values = [jnp.asarray(x) for x in inputs.values]
        everything = range(len(values))

        def gradients(values: Sequence[Any], grad_outputs: dict[int, Any]) -> Any:
            return self._pullback(inputs, values, everything)[1](grad_outputs), ()

        grad_outputs = draw_grad_outputs(self._pullback(inputs, values, everything)[0])
        firsts, pullback, _ = torch_vjp(gradients, values, grad_outputs)
        of_inputs, of_grad_outputs = pullback(tuple(jnp.asarray(draw("direction", i, x)) for i, x in enumerate(firsts)))
        seconds = dict(zip(inputs.names, of_inputs, strict=True))
        seconds |= {f"grad_output {i}": x for i, x in of_grad_outputs.items()}
        return {name: np.asarray(x) for name, x in seconds.items()}


def torch_vjp(function: Callable[..., Any], *args: Any) -> tuple[Any, Any, Any]:
    """Returns the first result of a function, its pullback in torch's convention, and the second result."""
    outputs, vjp, others = jax.vjp(function, *args, has_aux=True)

    def pullback(grad_outputs: Any) -> Any:
        return jax.tree.map(conjugate, vjp(jax.tree.map(conjugate, grad_outputs)))

    return outputs, pullback, others


def draw_grad_outputs(outputs: Mapping[int, Any]) -> dict[int, Any]:
    """Returns random cotangents of outputs."""
    return {i: jnp.asarray(draw("grad_output", i, y)) for i, y in outputs.items()}
