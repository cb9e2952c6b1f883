"""The targets of nodes: torch's operations and what they are called, and calls of JAX code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# A torch operation (its overload, its packet, its `torch.library` definition or its name) to a JAX function.
OperationMap = Mapping[Any, Callable[..., Any]]


def operation_name(target: Any) -> str:
    """A torch operation's name as torch prints it, such as `aten.add.Tensor`."""
    definition = getattr(target, "_opoverload", target)
    if isinstance(definition, str):
        return definition.replace("::", ".")
    if hasattr(definition, "_schema") or hasattr(definition, "overloads"):
        return str(definition)
    return getattr(definition, "__name__", None) or str(definition)


def key_by_name(ops: OperationMap | None) -> dict[str, Callable[..., Any]]:
    """The replacements by the names of the operations."""
    return {operation_name(target): function for target, function in (ops or {}).items()}


class JaxCall:
    """The target of a node that calls a function of JAX arrays.

    Attributes:
      function: it; its first argument is a key if it draws.
      draws: whether it draws random numbers.
    """

    def __init__(self, function: Callable[..., Any], name: str, draws: bool = False) -> None:
        self.function = function
        self.draws = draws
        self.__name__ = self.__qualname__ = name
        self.__module__ = "jaxfn"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__


def draws_random_numbers(target: Any) -> bool:
    """Whether the target of a node does."""
    if isinstance(target, JaxCall):
        return target.draws
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
