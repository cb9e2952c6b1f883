"""A torch Function class, looked at once: what it defines and in which style."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jaxfn._torch.convert.lifting import ORIGINAL
from jaxfn._torch.trace.state import TraceConfig

_BASE: Any = torch.autograd.Function


class TorchCode:
    """torch code, and what it is traced with.

    Attributes:
      name: what it is called in messages.
      config: How it is traced.
      key_name: the parameter that is the random key.
      call: how it is called, as part of a message.
    """

    def __init__(self, name: str, config: TraceConfig, parameters: Any, call: str) -> None:
        self.name = name
        self.config = config
        self.key_name = "key" if "key" not in parameters else "jax_key"
        self.call = call


class Definition(TorchCode):
    """A torch Function class.

    Args:
      function: the class.
      config: How it is traced.

    Attributes:
      original: the class that the user wrote.
      is_separate: whether it has a `setup_context`, and its `forward` takes no ctx.
      stays_separate: whether the jaxfn Function has one, too.
      signature: of the jaxfn Function's `forward`: the torch one's, with the key, and with a ctx or without.
      backward: its `backward` or `vjp`, `None` if it has neither.
      has_jvp, has_vmap: whether it has a `jvp`, and a `vmap`.
      once_differentiable: whether torch's decorator is on that.
      takes_any_keyword: whether `forward` has `**kwargs`.
    """

    def __init__(self, function: Any, config: TraceConfig) -> None:
        parameters = inspect.signature(function.forward).parameters
        super().__init__(function.__name__, config, parameters, f"{function.__name__}.apply")
        self.function = function
        self.original = getattr(function, ORIGINAL, function)
        self.has_setup_context = function.setup_context is not _BASE.setup_context
        self.backward = self._backward()
        self.has_jvp: bool = function.jvp is not _BASE.jvp
        self.has_vmap: bool = function.vmap is not _BASE.vmap
        self.once_differentiable = _is_once_differentiable(self.backward)
        self.takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # With a vmap of its own it stays in separate style, as torch wants it, so that forward alone can be batched.
        self.keeps_setup_context = self.has_vmap and self.has_setup_context
        new = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)]
        taken = [*(new if self.has_setup_context and not self.keeps_setup_context else []), *parameters.values()]
        self.signature = inspect.Signature(list(with_key(taken, self.key_name)))

    def _backward(self) -> Callable[..., Any] | None:
        backward, vjp = self.function.backward, self.function.vjp
        if backward is _BASE.backward:
            return None if vjp is _BASE.vjp else vjp
        if vjp is not _BASE.vjp:
            raise RuntimeError(
                f"{self.name}: implementing both 'backward' and 'vjp' for a custom Function is not allowed. You should "
                "only implement one of them."
            )
        return backward


def with_key(parameters: Any, name: str) -> Iterator[inspect.Parameter]:
    """The parameters of a function, and the random key's."""
    key = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            yield key
            yield parameter
            return
        yield parameter
    yield key


def _is_once_differentiable(function: Any) -> bool:
    """Whether torch's decorator is on a function, or on one that it decorates."""
    while function is not None and getattr(function, "__code__", None) is not _ONCE_DIFFERENTIABLE:
        function = getattr(function, "__wrapped__", None)
    return function is not None


_ONCE_DIFFERENTIABLE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__
