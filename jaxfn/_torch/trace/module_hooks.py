"""Backward hooks of modules, which are not supported: torch's autograd calls them, and JAX does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jaxfn._torch._compat import module_backward_hooks
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.state import TraceState
from jaxfn._torch.values.errors import TranslationError


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
