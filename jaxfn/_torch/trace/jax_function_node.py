"""Calls of JAX functions in torch code: each is one node of the graph, which torch's autograd can differentiate.

Such nodes implement nested torch Functions, with their own rules at every order, and Python functions that JAX
functions replace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxfn._torch._compat import original_apply
from jaxfn._torch.graph.targets import JaxCall
from jaxfn._torch.trace.state import TraceState, outside_trace
from jaxfn._torch.values.arrays import is_differentiable, jax_dtype
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.flatten import flatten_tensors, unflatten_tensors
from jaxfn._torch.values.scopes import setting
from jaxfn._torch.values.trace_cache import torch_settings
from jaxfn._tree import is_array_leaf

_JaxFunction = Callable[..., Sequence[Any]]


class JaxFunctionNode:
    """A JAX function that traced torch code calls. It takes arrays and returns a sequence of arrays.

    Args:
      state: The trace.
      function: The function.
      name: The node's name in the graph.
      outputs: The shape and dtype of each output.
      non_differentiable: The indices of the outputs that have no derivative, whatever their dtype.
      derivative_state: Returns a key of the Python state that the derivative reads; `None` if there is none.
    """

    def __init__(
        self,
        state: TraceState,
        function: _JaxFunction,
        name: str,
        outputs: Sequence[tuple[Sequence[int], torch.dtype]],
        non_differentiable: Sequence[int] = (),
        derivative_state: Callable[[], Hashable | None] = tuple,
    ) -> None:
        self.state = state
        self.function = function
        self.name = name
        self.outputs = outputs
        self.non_differentiable = non_differentiable
        self.derivative_state = derivative_state

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Records the call."""
        return original_apply(NodeAutograd)(self, torch.is_grad_enabled(), *tensors)

    def record(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Records the node, without autograd."""
        fakes = tuple(self.state.recorder.make_fake(shape, dtype) for shape, dtype in self.outputs)
        return self.state.record_call(JaxCall(self.function, self.name), tensors, fakes)

    def backward(self, tensors: Sequence[torch.Tensor], outputs: Sequence[int]) -> JaxFunctionNode:
        """Returns the derivative: a function of these tensors and of the gradients of these outputs."""
        self.state.differentiates_functions = True
        inputs = [i for i, x in enumerate(tensors) if is_differentiable(x.dtype)]
        # The graph references these only, and not `self`.
        num_tensors, function, name, derivative_state = len(tensors), self.function, self.name, self.derivative_state
        settings, call = torch_settings(), InnerBackward(name, derivative_state)

        def gradients(*operands: Any) -> Sequence[Any]:
            arrays, cotangents = operands[:num_tensors], operands[num_tensors:]

            def apply_to_inputs(*values: Any) -> list[Any]:
                filled = list(arrays)
                for index, value in zip(inputs, values, strict=True):
                    filled[index] = value
                results = function(*filled)
                return [results[i] for i in outputs]

            _, pullback = jax.vjp(apply_to_inputs, *(arrays[i] for i in inputs))
            with settings.restored(), setting(ACTIVE_BACKWARD, call=call):
                # torch's gradients of complex numbers are the conjugates of JAX's.
                return [jnp.conj(g) for g in pullback([jnp.conj(ct) for ct in cotangents])]

        operands = [(x.shape, x.dtype) for x in tensors] + [self.outputs[i] for i in outputs]
        call.trace(gradients, [jax.ShapeDtypeStruct(tuple(shape), jax_dtype(dtype)) for shape, dtype in operands])
        self.state.recorder.reads_external_values |= any(x.reads_external_values for x in call.rules.values())
        shapes = [(tuple(tensors[i].shape), tensors[i].dtype) for i in inputs]
        return JaxFunctionNode(self.state, gradients, f"{name}_backward", shapes, (), derivative_state)


class InnerBackward:
    """A call of a Function's `backward` by autograd inside the code. It is traced there, as torch runs it there.

    Args:
      name: The Function's name.
      state: Returns a key of the Python state that `backward` reads; `None` if there is none.

    Attributes:
      rules: The traces from there, by their arguments.
      is_there: Whether the code has not gone on.
    """

    def __init__(self, name: str, state: Callable[[], Hashable | None]) -> None:
        self.rules: dict[Hashable, Any] = {}
        self._name = name
        self._state = state
        self._state_there = state()
        self.is_there = True

    def trace(self, gradients: _JaxFunction, operands: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Traces `backward`, unless it needs values."""
        with outside_trace(), contextlib.suppress(Exception):  # An evaluation of the graph raises it too.
            jax.eval_shape(gradients, *operands)
        self.is_there = False

    def check_state(self) -> None:
        """Raises if `backward` would be traced now, and reads another state than at the call."""
        if not self.is_there and (self._state_there is None or self._state() != self._state_there):
            raise TranslationError(
                f"autograd inside the code calls {self._name}.backward, which needs values, so that it is traced after "
                "the code has ended. It reads Python state (a global, a closure, an object on ctx) that has changed "
                "since, or that is not compared by value. Pass the value as an argument of apply"
            )


class _ActiveBackward(threading.local):
    """The call of `backward` by autograd inside the code that a thread evaluates; `None` where JAX calls it."""

    call: InnerBackward | None = None


ACTIVE_BACKWARD = _ActiveBackward()


class NodeAutograd(torch.autograd.Function):
    """A `JaxFunctionNode` as torch's autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any, node: JaxFunctionNode, has_gradients: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.node = node
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # The node's `backward` distinguishes outputs without a gradient.
        with torch.set_grad_enabled(has_gradients):  # The mode of the caller; inside `forward` gradients are off.
            outputs = node.record(tensors)
        marked = node.non_differentiable
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(outputs) if i in marked or not is_differentiable(x.dtype))
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        cotangents = {i: g for i, g in enumerate(grad_outputs) if g is not None}
        gradients = iter(ctx.node.backward(tensors, [*cotangents])(*tensors, *cotangents.values()))
        return None, None, *(next(gradients) if is_differentiable(x.dtype) else None for x in tensors)


def draw_key(state: TraceState) -> torch.Tensor:
    """Records a node that draws a separate random key, which a call and its derivative share."""
    call = JaxCall(functools.partial(jax.random.bits, shape=(2,), dtype=np.uint32), "random_key", draws=True)
    return state.record_call(call, (), state.recorder.make_fake((2,), torch.uint32))


def wrap_key(data: Any) -> Any:
    """Returns the JAX key that a tensor of `draw_key` contains."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def call_replacement(
    state: TraceState, function: Any, replacement: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the JAX function that replaces a Python function."""
    arguments = flatten_tensors((tuple(args), dict(kwargs)))
    template = arguments.template  # The graph references the template only, and not the arguments.
    lowered = unflatten_tensors(template, [state.lower(tensor) for tensor in arguments.leaves])
    outputs = flatten_tensors(state.recorder.infer_jax_outputs(replacement, *lowered))

    def apply_to_arrays(*arrays: Any) -> list[Any]:
        args, kwargs = unflatten_tensors(template, arrays)
        return flatten_tensors(replacement(*args, **kwargs), is_array_leaf).leaves

    shapes = [(tuple(x.shape), x.dtype) for x in outputs.leaves]
    node = JaxFunctionNode(state, apply_to_arrays, function.__name__, shapes)
    return unflatten_tensors(outputs.template, node(*arguments.leaves))
