"""Functions that use a module's parameters, and give them gradients, without taking them as inputs.

# Note: a reversible block

    forward(ctx, x, f)    computes with f, a module      backward    calls autograd on f(x), which leaves gradients
                                                                     in `.grad` of f's parameters

JAX has no place to leave a gradient, and to the Function the parameters would be constants. In an adopted module they
are known by name, so that the Function becomes one that takes them too:

    forward(ctx, x, f, *parameters)    has the module hold these while the Function's own forward runs
    backward                           has it hold them again, and returns what lies in their `.grad` afterwards

Buffers that forward writes to (batch statistics) are inputs that it writes to. What backward writes to them, and to
attributes of the module, would be lost. It is refused, but for what forward writes too, as where backward computes it
again.
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

_TENSORS = "_jaxfn_held"
ORIGINAL = "_jaxfn_original"  # of such a Function, the given one


class LiftedCall:
    """The call of a Function that takes a module's tensors as arguments, where the original one captures them.

    Args:
      function: the torch Function.
      args: what it is applied to.
      held: what the module holds, in whose place it is to hold what this one is given.
      names: the tensors that it takes.
      moved: those of them that forward writes to, and backward may; `None` where that is to be found out.

    Attributes:
      written: where it is to be found out, those that backward has written to.
      function: the Function.
      args: what it is applied to.
    """

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        module_tensors: ModuleTensors,
        names: Sequence[str],
        mutable: Sequence[str] | None = None,
    ) -> None:
        backward_method = {id(x): i for i, x in reversed([*enumerate(args)])}
        added = [name for name in names if id(module_tensors.tensors[name]) not in backward_method]
        backward_method |= {id(module_tensors.tensors[name]): len(args) + i for i, name in enumerate(added)}
        self.indices = {name: backward_method[id(module_tensors.tensors[name])] for name in names}
        self.args = [*args, *(module_tensors.tensors[name] for name in added)]
        trained = {name for name in names if module_tensors.tensors[name].requires_grad}
        self.mutated: set[str] | None = set() if mutable is None else None
        self.function = _lift_function(
            function, len(args), module_tensors.swap, self.indices, trained, mutable or (), self.mutated
        )


def _lift_function(
    function: Any,
    num_args: int,
    swap: TensorSwap,
    indices: Mapping[str, int],
    trained: set[str],
    mutable: Sequence[str],
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
        """The tensors as the module has them: buffers need no gradient."""
        return {name: x if name in trained else x.detach() for name, x in tensors.items()}

    backward_method = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        tensors: dict[str, torch.Tensor] = getattr(ctx, _TENSORS)
        used = _as_module_tensors(tensors)
        before = {name: _current_node(x) for name, x in used.items()}
        name = function.__name__
        with _swap_in(swap, used), active_trace().recorder.externals.backward_guard(f"{name}.backward"):
            returned = (
                backward_method(ctx, list(grad_outputs))
                if takes_boxed_gradients(function)
                else backward_method(ctx, *grad_outputs)
            )
        mutated = [name for name, x in used.items() if _current_node(x) is not before[name]]
        if found_mutated is not None:
            found_mutated.update(mutated)
            mutated.clear()
        _check_mutations(name, [x for x in mutated if x not in mutable])
        _warn_of_recomputed_mutations(name, [x for x in mutated if x in mutable])
        gradients = [*returned] if isinstance(returned, tuple) else [returned]
        gradients += [None] * (max(indices.values(), default=-1) + 1 - len(gradients))
        for name in trained:
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
    """Has the module hold these tensors, and lets Functions that are applied inside know."""
    active_trace().module_tensors = ModuleTensors(tensors, swap)
    return swap(tensors)


def _current_node(tensor: torch.Tensor) -> torch.fx.Node:
    """Returns the graph node of a tensor's present value."""
    state = active_trace()
    return state.recorder.node(state.lower(tensor))


def _check_mutations(name: str, mutated: Sequence[str]) -> None:
    if mutated:
        raise TranslationError(
            f"{name}.backward writes to {', '.join(mutated)}. On JAX that is lost: net.apply has returned the buffers "
            "by then. Write to it in forward, or compute it from gradients that jax.grad returns"
        )


def _warn_of_recomputed_mutations(name: str, mutated: Sequence[str]) -> None:
    if mutated:
        warnings.warn(
            f"{name} writes to {', '.join(mutated)} in forward and, computing the same again, in backward. The buffers "
            "that net.apply returns have what forward wrote; torch's are written to a second time in backward.",
            stacklevel=2,
        )


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
