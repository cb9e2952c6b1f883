"""A JAX function called from inside torch code: one node of the graph, which torch's autograd can differentiate.

That is what becomes of a torch Function that another one applies (it keeps its own rule at every order), and of a
Python function that a JAX function stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxfn._torch._compat import apply_below
from jaxfn._torch.graph.targets import JaxCall
from jaxfn._torch.trace.state import Tracing
from jaxfn._torch.values.flat import put_in, take_out
from jaxfn._tree import is_array_leaf

_JaxFunction = Callable[..., Sequence[Any]]


class CalledFunction:
    """A JAX function, and what is known of it where torch code calls it.

    Args:
      tracing: the trace.
      function: takes arrays and returns a sequence of arrays.
      name: for the graph.
      outputs: shape and dtype of each output.
      non_differentiable: the places of those that have no derivative, of whatever dtype.
    """

    def __init__(
        self,
        tracing: Tracing,
        function: _JaxFunction,
        name: str,
        outputs: Sequence[tuple[Sequence[int], torch.dtype]],
        non_differentiable: Sequence[int] = (),
    ) -> None:
        self.tracing = tracing
        self.function = function
        self.name = name
        self.outputs = outputs
        self.non_differentiable = non_differentiable

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Records the call."""
        return apply_below(Differentiable)(self, torch.is_grad_enabled(), *tensors)

    def record(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The node, which knows nothing of autograd."""
        fakes = tuple(self.tracing.recorder.fake(shape, dtype) for shape, dtype in self.outputs)
        return self.tracing.call(JaxCall(self.function, self.name), tensors, fakes)

    def backward(self, tensors: Sequence[torch.Tensor], outputs: Sequence[int]) -> CalledFunction:
        """The derivative, a function of these tensors and the gradients of these outputs; the others have none."""
        inputs = [i for i, x in enumerate(tensors) if _is_differentiable(x.dtype)]
        num_tensors, function = len(tensors), self.function  # all that the graph keeps of this

        def gradients(*operands: Any) -> Sequence[Any]:
            arrays, cotangents = operands[:num_tensors], operands[num_tensors:]

            def apply_to_inputs(*values: Any) -> list[Any]:
                filled = list(arrays)
                for place, value in zip(inputs, values, strict=True):
                    filled[place] = value
                results = function(*filled)
                return [results[i] for i in outputs]

            _, pullback = jax.vjp(apply_to_inputs, *(arrays[i] for i in inputs))
            # torch's gradients of complex numbers are the conjugates of JAX's.
            return [jnp.conj(g) for g in pullback([jnp.conj(ct) for ct in cotangents])]

        shapes = [(tuple(tensors[i].shape), tensors[i].dtype) for i in inputs]
        return CalledFunction(self.tracing, gradients, f"{self.name}_backward", shapes)


class Differentiable(torch.autograd.Function):
    """A `CalledFunction` as autograd inside a Function sees it."""

    @staticmethod
    def forward(
        ctx: Any, called: CalledFunction, has_gradients: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.called = called
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # a Function may see which of its outputs have no gradient
        with torch.set_grad_enabled(has_gradients):  # as at the call: in here they are always off
            outputs = called.record(tensors)
        marked = called.non_differentiable
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(outputs) if i in marked or not _is_differentiable(x.dtype))
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        given = {i: g for i, g in enumerate(grad_outputs) if g is not None}
        gradients = iter(ctx.called.backward(tensors, [*given])(*tensors, *given.values()))
        return None, None, *(next(gradients) if _is_differentiable(x.dtype) else None for x in tensors)


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def new_key(tracing: Tracing) -> torch.Tensor:
    """A traced tensor that holds a random key of its own, for a call and its derivative alike."""
    return tracing.call(JaxCall(_draw_key, "random_key", draws=True), (), tracing.recorder.fake((2,), torch.uint32))


def _draw_key(key: Any) -> jax.Array:
    return jax.random.bits(key, (2,), np.uint32)


def as_key(data: Any) -> Any:
    """The JAX key that a tensor of `new_key` holds."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def call_replacement(
    tracing: Tracing, function: Any, replacement: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the JAX function that replaces a Python function."""
    arguments = take_out((tuple(args), dict(kwargs)))
    template = arguments.template  # all that the graph keeps of the arguments
    lowered = put_in(template, [tracing.lower(tensor) for tensor in arguments.leaves])
    outputs = take_out(tracing.recorder.shapes_of(replacement, *lowered))

    def apply_to_arrays(*arrays: Any) -> list[Any]:
        args, kwargs = put_in(template, arrays)
        return take_out(replacement(*args, **kwargs), is_array_leaf).leaves

    shapes = [(tuple(x.shape), x.dtype) for x in outputs.leaves]
    called = CalledFunction(tracing, apply_to_arrays, function.__name__, shapes)
    return put_in(outputs.template, called(*arguments.leaves))
