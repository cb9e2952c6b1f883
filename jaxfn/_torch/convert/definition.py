"""Inspection of a torch Function class: which methods it defines, and in which style."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from jaxfn._torch.convert.lifting import ORIGINAL
from jaxfn._torch.trace.state import TraceConfig
from jaxfn._torch.values.trace_cache import capture_key, reads_data

_BASE: Any = torch.autograd.Function


class TorchCode:
    """torch code, with the options that it is traced with.

    Attributes:
      name: The code's name in messages.
      key_name: The name of the parameter that takes the random key.
      call: How the user calls the code, for messages.
    """

    def __init__(self, name: str, config: TraceConfig, parameters: Any, call: str) -> None:
        self.name = name
        self.config = config
        self.key_name = "key" if "key" not in parameters else "jax_key"
        self.call = call


class Definition(TorchCode):
    """A torch Function class.

    Args:
      function: The class.
      config: The options that it is traced with.
      uses_vmap: Whether its `vmap` is converted too.

    Attributes:
      original: The class that the user wrote, if `function` was lifted.
      has_setup_context: Whether the torch class has a `setup_context`, and its `forward` takes no ctx.
      defines_setup_context: Whether the jaxfn Function has one too.
      signature: The signature of the jaxfn Function's `forward`: torch's, with the key and perhaps a ctx.
      backward: Its `backward` or `vjp`; `None` if it has neither.
      once_differentiable: Whether torch's `once_differentiable` decorates `backward`.
    """

    def __init__(self, function: Any, config: TraceConfig, uses_vmap: bool = True) -> None:
        parameters = inspect.signature(function.forward).parameters
        super().__init__(function.__name__, config, parameters, f"{function.__name__}.apply")
        self.function = function
        self.original = getattr(function, ORIGINAL, function)
        self.has_setup_context = function.setup_context is not _BASE.setup_context
        self.backward = self._backward()
        self.has_jvp: bool = function.jvp is not _BASE.jvp
        self.has_vmap: bool = uses_vmap and function.vmap is not _BASE.vmap
        self.once_differentiable = _is_once_differentiable(self.backward)
        self.takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # torch requires a `setup_context` if there is a `vmap`, so that `forward` can be batched without the ctx.
        self.defines_setup_context = self.has_vmap and self.has_setup_context
        new = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)]
        taken = [*(new if self.has_setup_context and not self.defines_setup_context else []), *parameters.values()]
        self.signature = inspect.Signature(list(with_key(taken, self.key_name)))

    def input_name(self, index: int) -> str:
        """Returns an input of `forward` as messages name it."""
        names = [*inspect.signature(self.function.forward).parameters]
        names = names if self.has_setup_context else names[1:]
        return f"input {index}" + (f" ({names[index]!r})" if index < len(names) else "")

    def python_state(self, method: str) -> Hashable | None:
        """Returns a key of the Python state that a method reads; `None` if there is none.

        torch calls `backward` later, and all other methods at the call of `apply`: those have one key.
        """
        names = ("backward", "vjp") if method == "backward" else ("forward", "setup_context", "jvp", "vmap")
        return capture_key(*(getattr(self.original, name) for name in names))

    @functools.cached_property
    def rules_read_data(self) -> bool:
        """Whether `backward`, `jvp` or `vmap` may read tensors or Python values that are not arguments."""
        return reads_data(*(getattr(self.original, name) for name in ("backward", "vjp", "jvp", "vmap")))

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
    """Yields the parameters of a function, with one for the random key."""
    key = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            yield key
            yield parameter
            return
        yield parameter
    yield key


def _is_once_differentiable(function: Any) -> bool:
    """Whether torch's `once_differentiable` decorates a function, or a function that it wraps."""
    while function is not None and getattr(function, "__code__", None) is not _ONCE_DIFFERENTIABLE:
        function = getattr(function, "__wrapped__", None)
    return function is not None


_ONCE_DIFFERENTIABLE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__
