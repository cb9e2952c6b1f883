"""Hooks that torch calls with the gradient of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jaxfn._primitives.follow import follow
from jaxfn._torch._compat import without_functions
from jaxfn._torch.graph.jax_call import JaxCall
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.nodes import HOOKED
from jaxfn._torch.trace.state import Tracing
from jaxfn._torch.values.errors import TranslationError

_FOLLOW = JaxCall(follow, "follow")


def following(tracing: Tracing, made: torch.Tensor, leader: torch.Tensor) -> torch.Tensor:
    """What an identity made of a tensor, below functionalization, with a derivative where that one has one."""
    fake = tracing.recorder.fake(made.shape, made.dtype)
    return tracing.recorder.call(_FOLLOW, (tracing.lower(made), tracing.lower(leader)), {}, fake)


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
    with torch.enable_grad():
        tracing.recorder.alias(tracing.lower(tensor), tracing.lower(hooked(tracing, tensor, hook)))
    if tensor.requires_grad:
        with without_functions():
            original(tensor, hook)  # for autograd inside
    return _Handle(tracing.owner)


class _Handle:
    """What `register_hook` returns."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def remove(self) -> None:
        """Refuses: the hook is a part of the trace."""
        raise TranslationError(f"{self._owner} removes a hook of a tensor, which is a part of the trace by then")
