"""torch Functions and modules around plain functions, for tests of what is done inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def function_of(code: Callable[..., Any]) -> Any:
    """Returns a torch Function, called Runs, whose `forward` is this function; its `backward` passes gradients on."""

    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return code(x)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            return grad_outputs[0]

    return Runs


class Net(torch.nn.Module):
    """A module with these attributes (parameters and modules among them), whose `forward` is a function of it."""

    def __init__(self, run: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)
