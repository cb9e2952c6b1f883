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
from jaxfn._torch.trace.state import HeldTensors, Holding, current
from jaxfn._torch.values.errors import TranslationError

_KEPT = "_jaxfn_held"
ORIGINAL = "_jaxfn_original"  # of such a Function, the given one


class TakingTensors:
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
        held: HeldTensors,
        names: Sequence[str],
        moved: Sequence[str] | None = None,
    ) -> None:
        given = {id(x): i for i, x in reversed([*enumerate(args)])}
        added = [name for name in names if id(held.tensors[name]) not in given]
        given |= {id(held.tensors[name]): len(args) + i for i, name in enumerate(added)}
        self.places = {name: given[id(held.tensors[name])] for name in names}
        self.args = [*args, *(held.tensors[name] for name in added)]
        trained = {name for name in names if held.tensors[name].requires_grad}
        self.written: set[str] | None = set() if moved is None else None
        self.function = _taking_tensors(
            function, len(args), held.holding, self.places, trained, moved or (), self.written
        )


def _taking_tensors(
    function: Any,
    num_args: int,
    holding: Holding,
    places: Mapping[str, int],
    trained: set[str],
    moved: Sequence[str],
    found: set[str] | None,
) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        tensors = {name: args[place] for name, place in places.items()}
        setattr(ctx, _KEPT, tensors)
        own = args[:num_args]
        with _held(holding, _used(tensors)):
            if function.setup_context is torch.autograd.Function.setup_context:
                return function.forward(ctx, *own)
            output = function.forward(*own)
            function.setup_context(ctx, own, output)
            return output

    def _used(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as the module has them: buffers need no gradient."""
        return {name: x if name in trained else x.detach() for name, x in tensors.items()}

    given = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        tensors: dict[str, torch.Tensor] = getattr(ctx, _KEPT)
        used = _used(tensors)
        before = {name: _node(x) for name, x in used.items()}
        name = function.__name__
        with _held(holding, used), current().recorder.stood_in.guarding(f"{name}.backward"):
            returned = given(ctx, list(grad_outputs)) if takes_boxed_gradients(function) else given(ctx, *grad_outputs)
        written = [name for name, x in used.items() if _node(x) is not before[name]]
        if found is not None:
            found.update(written)
            written.clear()
        _refuse_lost(name, [x for x in written if x not in moved])
        _warn_of_repeated(name, [x for x in written if x in moved])
        gradients = [*returned] if isinstance(returned, tuple) else [returned]
        gradients += [None] * (max(places.values(), default=-1) + 1 - len(gradients))
        for name in trained:
            place = places[name]
            gradients[place] = _sum(gradients[place], tensors[name].grad)
        return tuple(gradients)

    functools.update_wrapper(backward, given)
    body: dict[str, Any] = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "__module__": function.__module__,
    }
    body[ORIGINAL] = function
    return type(function.__name__, (torch.autograd.Function,), body)


def _held(holding: Holding, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
    """Has the module hold these tensors, and lets Functions that are applied inside know."""
    current().held = HeldTensors(tensors, holding)
    return holding(tensors)


def _node(tensor: torch.Tensor) -> torch.fx.Node:
    """Returns the graph node of a tensor's present value."""
    tracing = current()
    return tracing.recorder.node(tracing.lower(tensor))


def _refuse_lost(name: str, written: Sequence[str]) -> None:
    if written:
        raise TranslationError(
            f"{name}.backward writes to {', '.join(written)}. On JAX that is lost: net.apply has returned the buffers "
            "by then. Write to it in forward, or compute it from gradients that jax.grad returns"
        )


def _warn_of_repeated(name: str, written: Sequence[str]) -> None:
    if written:
        warnings.warn(
            f"{name} writes to {', '.join(written)} in forward and, computing the same again, in backward. The buffers "
            "that net.apply returns have what forward wrote; torch's are written to a second time in backward.",
            stacklevel=2,
        )


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
