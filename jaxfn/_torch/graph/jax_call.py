"""A call of JAX code: the target of a node in a graph of torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
