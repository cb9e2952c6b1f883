"""Lifting of Functions that use a module's parameters and give them gradients, without taking them as inputs.

# Note: a reversible block

    forward(ctx, x, f)    computes with f, a module      backward    calls autograd on f(x), which stores gradients
                                                                     in `.grad` of f's parameters

JAX has no `.grad`, and to the Function the parameters would be constants. In a converted module they are known by name,
so the Function is replaced by one that takes them as inputs:

    forward(ctx, x, f, *parameters)    puts them into the module while the Function's own forward runs
    backward                           puts them into the module again, and returns their `.grad` afterwards

Buffers that forward mutates (batch statistics) are inputs that it mutates. An update in backward, of buffers or of
attributes of the module, would be lost, so it raises. The exception are buffers that forward mutates too, for a
backward that runs the forward computation again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from jaxfn._torch._compat import takes_boxed_gradients
from jaxfn._torch.trace.state import ModuleTensors, TensorSwap, active_trace
from jaxfn._torch.values.errors import TranslationError

_TENSORS = "_jaxfn_module_tensors"  # An attribute of ctx.
ORIGINAL = "_jaxfn_original"  # An attribute of a lifted Function: the Function itself.


class LiftedCall:
    """A call of a Function that takes a module's tensors as arguments, in place of one that captures them.

    Args:
      function: The torch Function.
      args: The arguments of the call.
      module_tensors: The module's tensors.
      names: The names of the tensors that the lifted Function takes.
      mutated_in_forward: The names of those that forward mutates, and backward may mutate. `None` to find out.

    Attributes:
      function: The lifted Function, which takes `args`.
      mutated: The names of the tensors that backward has mutated; `None` unless `mutated_in_forward` is.
    """

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        module_tensors: ModuleTensors,
        names: Sequence[str],
        mutated_in_forward: Sequence[str] | None = None,
    ) -> None:
        tensors = module_tensors.tensors
        indices_by_id = {id(x): i for i, x in reversed([*enumerate(args)])}
        added = [name for name in names if id(tensors[name]) not in indices_by_id]
        indices_by_id |= {id(tensors[name]): len(args) + i for i, name in enumerate(added)}
        indices = {name: indices_by_id[id(tensors[name])] for name in names}
        self.args = [*args, *(tensors[name] for name in added)]
        parameters = {name for name in names if tensors[name].requires_grad}
        self.mutated: set[str] | None = set() if mutated_in_forward is None else None
        self.function = _lift_function(
            function, len(args), module_tensors.swap, indices, parameters, mutated_in_forward or (), self.mutated
        )


def _lift_function(
    function: Any,
    num_args: int,
    swap: TensorSwap,
    indices: Mapping[str, int],
    parameters: set[str],
    mutated_in_forward: Sequence[str],
    found_mutated: set[str] | None,
) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        tensors = {name: args[index] for name, index in indices.items()}
        setattr(ctx, _TENSORS, tensors)
        function_args = args[:num_args]
        with _swap_in(swap, _as_module_tensors(tensors)):
            if function.setup_context is torch.autograd.Function.setup_context:
                return function.forward(ctx, *function_args)
            output = function.forward(*function_args)
            function.setup_context(ctx, function_args, output)
            return output

    def _as_module_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Detaches buffers, which require no gradient in the module."""
        return {name: x if name in parameters else x.detach() for name, x in tensors.items()}

    backward_method = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        tensors: dict[str, torch.Tensor] = getattr(ctx, _TENSORS)
        used = _as_module_tensors(tensors)
        before = {name: _current_node(x) for name, x in used.items()}
        name = function.__name__
        with _swap_in(swap, used), active_trace().recorder.externals.backward_guard(f"{name}.backward"):
            gradients_taken = [list(grad_outputs)] if takes_boxed_gradients(function) else grad_outputs
            returned = backward_method(ctx, *gradients_taken)
        mutated = [name for name, x in used.items() if _current_node(x) is not before[name]]
        if found_mutated is not None:
            found_mutated.update(mutated)
            mutated.clear()
        lost = [x for x in mutated if x not in mutated_in_forward]
        if lost:
            raise TranslationError(
                f"{name}.backward mutates {', '.join(lost)}. On JAX the update would be lost, since net.apply has "
                "already returned the buffers. Mutate it in forward, or compute it from the gradients of jax.grad"
            )
        if mutated:
            warnings.warn(
                f"{name} mutates {', '.join(mutated)} in forward and, where it repeats the computation, in backward. "
                "torch updates them twice; the buffers that net.apply returns contain only the update in forward.",
                stacklevel=2,
            )
        gradients = [*returned] if isinstance(returned, tuple) else [returned]
        gradients += [None] * (max(indices.values(), default=-1) + 1 - len(gradients))
        for name in parameters:
            index = indices[name]
            gradients[index] = _sum(gradients[index], tensors[name].grad)
        return tuple(gradients)

    functools.update_wrapper(backward, backward_method)
    body: dict[str, Any] = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "__module__": function.__module__,
    }
    body[ORIGINAL] = function
    return type(function.__name__, (torch.autograd.Function,), body)


def _swap_in(swap: TensorSwap, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
    """Puts tensors into the module, and registers them with the active trace, for Functions applied inside."""
    active_trace().module_tensors = ModuleTensors(tensors, swap)
    return swap(tensors)


def _current_node(tensor: torch.Tensor) -> torch.fx.Node:
    """Returns the graph node of a tensor's current value."""
    state = active_trace()
    return state.recorder.node(state.lower(tensor))


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
