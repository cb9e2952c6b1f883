"""torch Functions and modules around plain functions, for tests of what is done inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import torch

import jaxfn
from tests.support.libraries import make_function, torch_library
from tests.support.runs import noting_runs

# A torch Function, built from two functions of tensors.
rule = partial(make_function, torch_library())


def function_of(code: Callable[..., Any], slope: Callable[..., Any] | None = None, name: str = "Runs") -> Any:
    """Returns a torch Function of one tensor.

    Args:
      code: what `forward` does.
      slope: a function of the saved input, by which `backward` multiplies the gradient. Default: it passes it on.
      name: of the class.
    """

    def forward(ctx: Any, x: Any) -> Any:
        if slope is not None:
            ctx.save_for_backward(x)
        return code(x)

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] if slope is None else grad_outputs[0] * slope(*ctx.saved_tensors)

    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


def counting(function: Any) -> tuple[Any, list[str]]:
    """Returns the Function with methods that note each run."""
    note, runs = noting_runs()

    class Counts(function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            note("forward")
            return function.forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            note("backward")
            return function.backward(ctx, *gradients)

    return jaxfn.from_torch(Counts), runs


def explained_under_jit(function: Any, x: Any) -> Any:
    """Returns the explanation that a call with a traced argument has."""
    found: list[Any] = []
    jax.eval_shape(lambda x: found.append(jaxfn.explain(function, x)), x)
    return found[0]


class Net(torch.nn.Module):
    """A module with these attributes (parameters and modules among them), whose `forward` is a function of it."""

    def __init__(self, run: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def as_functions(module: Any, ops: Any = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a module as a function of its input and its parameters: converted, and in torch."""
    net = jaxfn.from_torch(module, ops=ops)

    def named(parameters: Any) -> dict[str, Any]:
        return dict(zip(net.parameters, parameters, strict=True))

    return (
        lambda x, *parameters: net.apply(named(parameters), net.buffers, x)[0],
        lambda x, *parameters: torch.func.functional_call(module, named(parameters), (x,)),
    )
