"""A Function with checks. It is not in a test module, whose `assert` statements pytest rewrites."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def is_bad(x: Any) -> Any:
    return not torch.isfinite(x).all()


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if is_bad(x):
            message = "not finite"
            raise ValueError(message)
        assert (x < 100).all() and not (x < -100).any(), "too large"
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        if g.isnan().any():
            warnings.warn("NaN in the gradient", stacklevel=2)
        return 2 * x * g
