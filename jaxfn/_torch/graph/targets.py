"""Targets of graph nodes: torch operations and their names, and calls of JAX functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operation_name(target: Any) -> str:
    """Returns a torch operation's name as torch prints it, such as `aten.add.Tensor`."""
    definition = getattr(target, "_opoverload", target)
    if isinstance(definition, str):
        return definition.replace("::", ".")
    if hasattr(definition, "_schema") or hasattr(definition, "overloads"):
        return str(definition)
    return getattr(definition, "__name__", None) or str(definition)


class JaxCall:
    """A node's target that calls a function of JAX arrays, which takes a random key first if it draws."""

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
    """Whether a node's target draws random numbers."""
    if isinstance(target, JaxCall):
        return target.draws
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
