"""Hooks of tensors, which torch calls with the tensor's gradient, and backward hooks of modules, which raise."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch

from jaxfn._torch._compat import OPERATION_TYPES, module_backward_hooks, plain_torch, saved_values, without_functions
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.autograd_nodes import HOOKED
from jaxfn._torch.trace.state import TraceState
from jaxfn._torch.values.arrays import is_differentiable
from jaxfn._torch.values.errors import TranslationError


def apply_hook(
    state: TraceState, tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
) -> torch.Tensor:
    """Returns a copy of a tensor whose gradient passes through a hook, by a Function that torch code applies."""

    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        replaced = hook(gradient)
        return gradient if replaced is None else replaced

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    name = f"hook {getattr(hook, '__qualname__', type(hook).__name__)}"
    function: Any = type(name, (torch.autograd.Function,), body)
    return function.apply(tensor)


def register_hook(state: TraceState, original: Any, tensor: torch.Tensor, hook: Any) -> Any:
    """Implements `tensor.register_hook(hook)`; `original` is torch's."""
    if not (state.recorder.follows_grad_mode and state.is_traced(tensor)):
        return original(tensor, hook)
    if state.recorder.is_used(state.lower(tensor)):
        raise TranslationError(
            f"{state.name} registers a hook on a tensor that was used before, and jaxfn calls hooks with the gradient "
            f"of later uses only. Register it where the tensor is created{source_line()}"
        )
    if HOOKED in vars(tensor):
        raise TranslationError(
            f"{state.name} registers a second hook on a tensor. Register one hook that does what both do{source_line()}"
        )
    vars(tensor)[HOOKED] = True
    if _derivative_may_use_output(state.recorder.node(state.lower(tensor))):
        state.hook_on_used_output = source_line()
    with torch.enable_grad():
        state.recorder.set_node(state.lower(tensor), state.lower(apply_hook(state, tensor, hook)))
    if tensor.requires_grad:
        with without_functions():
            original(tensor, hook)  # For autograd inside traced code.
    return _Handle(state.name)


def _derivative_may_use_output(node: torch.fx.Node) -> bool:
    """Whether the derivative of the operation that returned a tensor may use that tensor.

    For `y = tanh(x)` it is `g * (1 - y * y)`. In torch a second derivative passes through that `y`, and so through its
    hook; in JAX it passes through the `y` before the hook.
    """
    output: int | None = None
    if node.target is operator.getitem:
        node, output = cast(tuple[torch.fx.Node, int], node.args)
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.relu.default:  # Its derivative is piecewise constant.
        return False
    target: Any = node.target
    if not isinstance(target, OPERATION_TYPES):
        return True
    with plain_torch(), torch.enable_grad():
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _make_meta_tensor)
        try:
            tensor = target(*args, **kwargs)
        except Exception:  # It has no meta kernel for these arguments.
            return True
    tensor = tensor if output is None else tensor[output]
    return any(
        saved.grad_fn is tensor.grad_fn for saved in saved_values(tensor.grad_fn) if isinstance(saved, torch.Tensor)
    )


def _make_meta_tensor(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=is_differentiable(value.dtype))


class _Handle:
    """The handle that `register_hook` returns."""

    def __init__(self, name: str) -> None:
        self._name = name

    def remove(self) -> None:
        """Raises, since the hook is part of the trace."""
        raise TranslationError(f"{self._name} removes a hook of a tensor, and the hook is already part of the trace")


def check_no_backward_hooks(state: TraceState, original: Callable[[Any], Any], module: torch.nn.Module) -> Any:
    """Raises if a module has backward hooks, its own or global ones, and torch would call them.

    Patches `Module._get_backward_hooks` and `Module._get_backward_pre_hooks`, which torch calls only if there are
    hooks.
    """
    if not torch.is_grad_enabled():
        return original(module)
    method, hook = module_backward_hooks(module)[0]
    raise TranslationError(
        f"{state.name}: {state.describe_module(module)} has a backward hook, {_describe_hook(hook)}, registered by "
        f"{method}. torch's autograd calls it, and JAX does not. Remove the hook, and wrap the layer's output in a "
        "torch.autograd.Function whose backward does what the hook does; a hook of a tensor, "
        f"output.register_hook(hook), works too{source_line()}"
    )


def _describe_hook(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name.rpartition("<locals>.")[2]
