"""Types of `apply` for checkers and editors: it takes what `forward` takes after the ctx.

The first parameter of `forward` decides, by the first line that applies:

    forward(ctx, x: Array)                 called ctx                        apply(x: Array)
    forward(x), forward(c: Any, x: Array)  might be anything: not annotated  apply(...)
    forward(c: FunctionCtx, x: Array)      annotated as a ctx                apply(x: Array)
    forward(x: Array)                      anything else: separate style     apply(x: Array)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar

from jaxfn._context import FunctionCtx
from jaxfn._sharding_rule import ShardingRule

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Rule = Callable[..., Any] | None
_F_co = TypeVar("_F_co", bound=Callable[..., Any], covariant=True)


class TakesCtx(Protocol[P, R_co]):
    """A function whose first parameter is called ctx."""

    def __call__(self, ctx: FunctionCtx, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _Nothing:
    """A type that no annotation but `Any` and `object` accepts."""


class TakesAnything(Protocol[R_co]):
    """A function whose first parameter might be anything."""

    def __call__(self, first: _Nothing, /, *args: Any, **kwargs: Any) -> R_co: ...


class TakesFunctionCtx(Protocol[P, R_co]):
    """A function whose first parameter is annotated as a ctx."""

    def __call__(self, first: FunctionCtx, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class HasForward(Protocol[_F_co]):
    """A class with a `forward`."""

    @property
    def forward(self) -> _F_co: ...


class Rules(TypedDict, total=False):
    """The keywords of `jaxfn.function`: rules and options."""

    setup_context: Rule
    jvp: Rule
    vmap: Rule
    name: str | None
    generate_jvp_rule: bool
    boxed_grads_call: bool
    generate_vmap_rule: bool
    clear_saved_tensors_on_access: bool
    sharding_rule: str | ShardingRule | None
