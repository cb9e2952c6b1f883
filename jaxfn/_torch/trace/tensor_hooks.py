"""Hooks that torch calls with the gradient of a tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch

from jaxfn._primitives import drop_tangent_unless
from jaxfn._torch._compat import OPERATION_TYPES, plain_torch, saved_by, without_functions
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.graph.targets import JaxCall
from jaxfn._torch.trace.nodes import HOOKED
from jaxfn._torch.trace.state import Tracing
from jaxfn._torch.values.errors import TranslationError

_DROP_TANGENT_UNLESS = JaxCall(drop_tangent_unless, "drop_tangent_unless")


def following(tracing: Tracing, made: torch.Tensor, leader: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its derivative dropped unless `leader` has one, below functionalization."""
    fake = tracing.recorder.fake(made.shape, made.dtype)
    return tracing.recorder.call(_DROP_TANGENT_UNLESS, (tracing.lower(made), tracing.lower(leader)), {}, fake)


def hooked(tracing: Tracing, tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    """A tensor with the same values, whose gradient passes a hook: a Function that torch code applies."""

    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        replaced = hook(gradient)
        return gradient if replaced is None else replaced

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    name = f"hook {getattr(hook, '__qualname__', type(hook).__name__)}"
    function: Any = type(name, (torch.autograd.Function,), body)
    made = function.apply(tensor)
    tracing.recorder.alias(tracing.lower(made), following(tracing, made, tensor))
    return made


def register_hook(tracing: Tracing, original: Any, tensor: torch.Tensor, hook: Any) -> Any:
    """`tensor.register_hook(hook)`, which torch does by `original`."""
    if not (tracing.recorder.follows_grad_mode and tracing.is_traced(tensor)):
        return original(tensor, hook)
    if tracing.recorder.is_used(tracing.lower(tensor)):
        raise TranslationError(
            f"{tracing.owner} registers a hook on a tensor that was used before, and jaxfn calls hooks with the "
            f"gradient of later uses only. Register it where the tensor is made{source_line()}"
        )
    if HOOKED in vars(tensor):
        raise TranslationError(
            f"{tracing.owner} registers another hook on a tensor that has one. Register one that does what both "
            f"do{source_line()}"
        )
    vars(tensor)[HOOKED] = True
    if _may_use_itself(tracing.recorder.node(tracing.lower(tensor))):
        tracing.hooked_where_used = source_line()
    with torch.enable_grad():
        tracing.recorder.alias(tracing.lower(tensor), tracing.lower(hooked(tracing, tensor, hook)))
    if tensor.requires_grad:
        with without_functions():
            original(tensor, hook)  # for autograd inside
    return _Handle(tracing.owner)


def _may_use_itself(node: torch.fx.Node) -> bool:
    """Whether the derivative of the operation that made a tensor may use that tensor.

    For `y = tanh(x)` it is `g * (1 - y * y)`. In torch a second derivative goes through that `y`, and so through its
    hook; in JAX it goes through the `y` that has no hook yet.
    """
    output: int | None = None
    if node.target is operator.getitem:
        node, output = cast(tuple[torch.fx.Node, int], node.args)
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.relu.default:  # by whose output its derivative has none
        return False
    target: Any = node.target
    if not isinstance(target, OPERATION_TYPES):
        return True
    with plain_torch(), torch.enable_grad():
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _without_values)
        try:
            made = target(*args, **kwargs)
        except Exception:  # an operation that has no meta function, or not as it is called here
            return True
    tensor = made if output is None else made[output]
    return any(saved.grad_fn is tensor.grad_fn for saved in saved_by(tensor.grad_fn) if isinstance(saved, torch.Tensor))


def _without_values(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    is_differentiable = value.dtype.is_floating_point or value.dtype.is_complex
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=is_differentiable)


class _Handle:
    """The handle that `register_hook` returns."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def remove(self) -> None:
        """Refuses: the hook is a part of the trace."""
        raise TranslationError(f"{self._owner} removes a hook of a tensor, which is a part of the trace by then")
