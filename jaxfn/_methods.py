"""The methods that a Function class defines, looked up and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from jaxfn._arguments import Form, Parameters
from jaxfn._context import FunctionCtx, state_of
from jaxfn._marks import warn_of_dirty
from jaxfn._outputs import Returned, take_apart

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "_jaxfn_undefined"


def undefined(method: _F) -> _F:
    """Marks a base-class method as one that a subclass may define."""
    setattr(method, _MARK, True)
    return method


def _is_defined(method: Any) -> bool:
    return not getattr(method, _MARK, False)


class Methods:
    """One Function class's methods, as the rest of jaxfn calls them.

    Args:
      function: the class.

    Attributes:
      name: the class's name.
      parameters: what `forward` takes besides the ctx.
      saves_intermediates: whether a run of `forward` has saved an array that is neither input nor output, and may be
        differentiated; see `_reverse`.
    """

    def __init__(self, function: Any) -> None:
        self.name: str = function.__name__
        self.saves_intermediates = False
        self._function = function
        self._forward = function.forward
        self._setup_context = function.setup_context
        self._is_separate = _is_defined(self._setup_context)
        self._warned_of_dirty = False
        if not _is_defined(self._forward):
            raise NotImplementedError(f"{self.name} defines no forward. Write it as a static method.")
        self.parameters = Parameters(self._forward, not self._is_separate, self.name)

    def is_current(self) -> bool:
        """Whether the class still has the `forward` and `setup_context` that this looked up."""
        return self._function.forward == self._forward and self._function.setup_context == self._setup_context

    def forward(self, ctx: FunctionCtx, form: Form, inputs: tuple[Any, ...]) -> Returned:
        """Calls `forward`, and `setup_context` where there is one."""
        if not self._is_separate:
            returned = take_apart(form.call(self._forward, (ctx,), inputs))
            state_of(ctx).num_outputs = len(returned.layouts)
            return returned
        returned = take_apart(form.call(self._forward, (), inputs))
        state_of(ctx).num_outputs = len(returned.layouts)
        self._setup_context(ctx, inputs, returned.value)
        return returned

    def backward(self, ctx: FunctionCtx, grad_outputs: list[Any]) -> Any:
        """Calls `backward`, or `vjp`, its other name."""
        has_backward, has_vjp = _is_defined(self._function.backward), _is_defined(self._function.vjp)
        if has_backward and has_vjp:
            raise RuntimeError(
                f"{self.name}: implementing both 'backward' and 'vjp' for a custom Function is not allowed. You should "
                "only implement one of them."
            )
        if not has_backward and not has_vjp:
            raise NotImplementedError(
                f"{self.name} cannot be differentiated: it defines neither backward (or vjp) nor jvp. Write "
                "backward(ctx, *grad_outputs) as a static method."
            )
        backward = self._function.vjp if has_vjp else self._function.backward
        return backward(ctx, grad_outputs) if self._function.boxed_grads_call else backward(ctx, *grad_outputs)

    def warn_of_dirty(self) -> None:
        """Warns, the first time, that `mark_dirty` leaves the caller's array alone."""
        if not self._warned_of_dirty:
            self._warned_of_dirty = True
            warn_of_dirty(self.name)
