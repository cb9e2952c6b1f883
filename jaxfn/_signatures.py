"""A signature that JAX, which binds arguments to the functions of a rule several times a call, can use quickly."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class _Bound(inspect.BoundArguments):
    """Positional arguments, bound to `*args`."""

    def __init__(self, signature: inspect.Signature, args: tuple[Any, ...]) -> None:
        super().__init__(signature, OrderedDict(args=args))

    def apply_defaults(self) -> None:
        pass


class _Positional(inspect.Signature):
    """The signature `(*args)`."""

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return _Bound(self, args)


_POSITIONAL = _Positional([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


def take_anything(*functions: Callable[..., Any]) -> None:
    """States beforehand that these functions take `*args`, which `inspect` need not find out at every call."""
    for function in functions:
        vars(function)["__signature__"] = _POSITIONAL
