"""Functions that traced code applies. Each call becomes one node, whose rule is the Function's at every order.

# Note: `apply`, and an `apply` that was looked up before the trace

`Function.apply` is patched during a trace, which `Inner.apply(x)` and `super().apply(x)` find. Where `apply` is a
Python function (torch before 2.15), an `apply` that was looked up before, `round_ = Inner.apply`, reaches the patch
too, since torch's code looks up the next one. Since 2.15 `apply` is compiled code, and `round_` is that code itself.
But it looks up attributes of the class, which a metaclass sees:

    round_(x)    looks up Inner._backward_cls    which only this code looks up: Inner is being applied. The outputs
                                                 have a derivative if gradients are on (inside forward they are off)
                 looks up Inner.forward          gets a function that records the node
                 looks up Inner.setup_context    gets a function that fills the ctx, if Inner has a setup_context
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch import _compat
from jaxfn._torch.trace.jax_function_node import NodeAutograd
from jaxfn._torch.trace.state import ACTIVE, TraceState
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.flatten import flatten_tensors, unflatten_tensors

_APPLYING = threading.local()


def apply_in_trace(state: TraceState, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Implements `function.apply` inside a trace."""
    if function is _compat.CheckpointFunction:  # By a `checkpoint` that was looked up before.
        run, _, *inputs = args
        with state.recorder.recomputing():
            return run(*inputs)
    if _becomes_node(state, function, args, kwargs):
        return state.config.nested.apply(state, function, args, kwargs)
    return _compat.original_apply(function)(*args, **kwargs)


def _becomes_node(state: TraceState, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    is_traced = any(map(state.is_traced, torch_tree.tree_leaves((tuple(args), dict(kwargs)))))
    return is_traced and not issubclass(function, NodeAutograd)  # `NodeAutograd` is part of a node.


def look_up_attribute(function: Any, name: str) -> Any:
    """Returns an attribute of a Function class, or its replacement for compiled `apply`."""
    value = type.__getattribute__(function, name)
    if name == "_backward_cls":
        _APPLYING.applied = function if ACTIVE.state is not None else None
        _APPLYING.has_gradients = torch.is_grad_enabled()
    elif name in ("forward", "setup_context") and getattr(_APPLYING, "applied", None) is function:
        state = ACTIVE.state
        if name == "setup_context":
            _APPLYING.applied = None
            return _set_up_recorded if getattr(_APPLYING, "recorded", None) is not None else value
        setup_context = type.__getattribute__(function, "setup_context")
        _APPLYING.applied = None
        if state is not None and not issubclass(function, NodeAutograd):
            has_setup_context = setup_context is not torch.autograd.Function.setup_context
            return _make_recording_forward(state, function, value, has_setup_context)
    return value


def _set_up_recorded(ctx: Any, inputs: Any, output: Any) -> None:
    recorded, _APPLYING.recorded = _APPLYING.recorded, None
    _set_up_context(ctx, *recorded)


def _make_recording_forward(
    state: TraceState, function: Any, forward: Callable[..., Any], has_setup_context: bool
) -> Callable[..., Any]:
    """Returns the `forward` that compiled `apply` calls."""
    has_gradients = _APPLYING.has_gradients

    def record(*args: Any, **kwargs: Any) -> Any:
        ctx, *inputs = (None, *args) if has_setup_context else args
        if not _becomes_node(state, function, inputs, kwargs):
            returned, node = forward(*args, **kwargs), None
        else:
            with torch.set_grad_enabled(has_gradients):
                returned = state.config.nested.apply(state, function, inputs, kwargs)
            node = state, function, inputs, kwargs, returned
        if has_setup_context:  # For `_set_up_recorded`.
            _APPLYING.applied, _APPLYING.recorded = function, node
        elif node is not None:
            _set_up_context(ctx, *node)
        return returned

    return record


def _set_up_context(
    ctx: Any, state: TraceState, function: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], returned: Any
) -> None:
    """Fills the ctx of a recorded node, from which torch builds its outputs, and autograd differentiates the call."""
    arguments = flatten_tensors((tuple(inputs), dict(kwargs)))
    outputs = returned if isinstance(returned, tuple) else (returned,)
    # An output that is an input was mutated. If it were not marked dirty, torch would return a view of it, without a
    # derivative, since gradients are off here.
    mutated = [x for x in arguments.leaves if any(x is y for y in outputs)]
    ctx.mark_dirty(*mutated)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(y for y in outputs if isinstance(y, torch.Tensor) and not y.requires_grad))
    template = arguments.template
    can_repeat = not mutated and state.config.nested.can_repeat(state, function, inputs, kwargs)
    if can_repeat:
        ctx.save_for_backward(*arguments.leaves)

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if not can_repeat:
            raise TranslationError(
                f"{state.name} differentiates through {function.__name__}, which draws random numbers, mutates an "
                "argument or uses a module's tensors, by an `apply` that was looked up before. torch 2.15 and later "
                f"hide that call from jaxfn, and it cannot be repeated. Write {function.__name__}.apply(...) where it "
                "is called."
            )
        gradients = [*grad_outputs[0]] if isinstance(grad_outputs[0], list) else grad_outputs
        creates_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Separate views, so that autograd returns one gradient for each input.
            tensors = [x.view_as(x) for x in ctx.saved_tensors]
            args, kwargs = unflatten_tensors(template, tensors)
            returned = state.config.nested.apply(state, function, args, kwargs)
            outputs = returned if isinstance(returned, tuple) else (returned,)
            pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None and y.requires_grad]
            values = (*args, *kwargs.values())
            inputs = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
            found = torch.autograd.grad(
                [y for y, _ in pairs], inputs, [g for _, g in pairs], create_graph=creates_graph, allow_unused=True
            )
        gradient_of = {id(x): g for x, g in zip(inputs, found, strict=True)}
        return tuple(gradient_of.get(id(x)) for x in values)

    ctx._get_user_fn = lambda: backward
