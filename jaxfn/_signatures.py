"""For type checkers and editors: what `apply` takes, from what `forward` takes.

What comes after the ctx, if there is one. The first parameter tells, by the first of these rows that fits:

    forward(ctx, x: Array)                 called ctx                        apply(x: Array)
    forward(x), forward(c: Any, x: Array)  might be anything: not annotated  apply(...)
    forward(c: FunctionCtx, x: Array)      annotated as a ctx                apply(x: Array)
    forward(x: Array)                      something else: separate style    apply(x: Array)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from jaxfn._protocol.context import FunctionCtx

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
_F_co = TypeVar("_F_co", bound=Callable[..., Any], covariant=True)


class TakesCtx(Protocol[P, R_co]):
    """A function whose first parameter is called ctx."""

    def __call__(self, ctx: FunctionCtx, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _Nothing:
    """What no annotation but `Any` and `object` lets through."""


class TakesAnything(Protocol[R_co]):
    """A function whose first parameter might be anything."""

    def __call__(self, first: _Nothing, /, *args: Any, **kwargs: Any) -> R_co: ...


class TakesFunctionCtx(Protocol[P, R_co]):
    """A function whose first parameter is a ctx by its annotation."""

    def __call__(self, first: FunctionCtx, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class HasForward(Protocol[_F_co]):
    """A class with a `forward`."""

    @property
    def forward(self) -> _F_co: ...
