"""Hooks that torch calls with the gradient of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def hooked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    """A tensor with the same values, whose gradient passes a hook: a Function that torch code applies."""

    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        replaced = hook(gradient)
        return gradient if replaced is None else replaced

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    name = f"hook {getattr(hook, '__qualname__', type(hook).__name__)}"
    function: Any = type(name, (torch.autograd.Function,), body)
    return function.apply(tensor)
