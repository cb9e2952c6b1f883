"""The methods that a Function class defines, looked up and called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxfn._protocol.context import FunctionCtx, state_of
from jaxfn._protocol.marks import warn_of_dirty
from jaxfn._protocol.outputs import Returned, take_apart
from jaxfn._run.mistakes import add_to_message, explain, is_refused_call, wrong_signature
from jaxfn._run.source import place_of, place_without_return
from jaxfn._values.arguments import Form, Parameters
from jaxfn._values.hidden import is_plain_function

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "_jaxfn_undefined"


def undefined(method: _F) -> _F:
    """Marks a base-class method as one that a subclass may define."""
    setattr(method, _MARK, True)
    return method


def _is_defined(method: Any) -> bool:
    return not getattr(method, _MARK, False)


def _looked_up(function: Any) -> tuple[Any, ...]:
    """What decides how a call is made, and what messages call it."""
    f = function
    return f.__name__, f.forward, f.setup_context, f.backward, f.vjp, f.jvp, f.vmap, f.generate_jvp_rule


class Methods:
    """One Function class's methods, as the rest of jaxfn calls them.

    Args:
      function: the class.

    Attributes:
      name: the class's name.
      place: where `forward` was written, " at file:line", as far as it is known.
      parameters: what `forward` takes besides the ctx.
      has_backward, has_jvp: whether it defines `backward` (or `vjp`), and `jvp`.
      has_forward_mode: whether forward mode is to work, by `jvp` or by `generate_jvp_rule`.
      may_close_over: whether `forward` or `setup_context` holds anything in a closure or in defaults.
      takes_torch_tensors: whether torch's tensors are constants to it, and no mistake.
    """

    def __init__(self, function: Any) -> None:
        self.name: str = function.__name__
        self.takes_torch_tensors: bool = function._jaxfn_takes_torch_tensors
        self._function = function
        self._looked_up = _looked_up(function)
        self._forward = function.forward
        self._setup_context = function.setup_context
        self._is_separate = _is_defined(self._setup_context)
        methods = (self._forward, self._setup_context) if self._is_separate else (self._forward,)
        self.may_close_over = not all(map(is_plain_function, methods))
        self._warned_of_dirty = False
        self._warned_of_no_return = False
        if not _is_defined(self._forward):
            raise NotImplementedError(f"{self.name} defines no forward. Write it as a static method.")
        place = place_of(self._forward)
        self.place = "" if place is None else f" at {place}"
        self.parameters = Parameters(self._forward, not self._is_separate, self.name)
        self.has_backward = _is_defined(function.backward) or _is_defined(function.vjp)
        self.has_jvp = _is_defined(function.jvp)
        self.has_forward_mode = self.has_jvp or (self.has_backward and function.generate_jvp_rule)
        self.vmap: Callable[..., Any] | None = function.vmap if _is_defined(function.vmap) else None
        if self.has_jvp and function.generate_jvp_rule:
            raise RuntimeError(
                f"{self.name} has both generate_jvp_rule=True and a jvp of its own. Delete one of them, to say which "
                "rule forward mode is to use."
            )

    def is_current(self) -> bool:
        """Whether the class still has what this looked up."""
        return _looked_up(self._function) == self._looked_up

    def why_vmap_is_refused(self) -> str | None:
        """What is wrong with the class's `vmap`, if anything; said where a call is batched."""
        if self.vmap is None:
            return None
        if self._function.generate_vmap_rule:
            return (
                f"You tried to vmap over {self.name}, but it has both generate_vmap_rule=True and a vmap static method "
                "of its own. Set generate_vmap_rule=False or delete the vmap static method."
            )
        if not self._is_separate:
            return (
                f"You tried to vmap over {self.name}, which has a vmap static method, so it must also have the "
                "setup_context static method: write forward(...) without ctx, and setup_context(ctx, inputs, output)."
            )
        return None

    def forward(self, ctx: FunctionCtx, form: Form, inputs: tuple[Any, ...]) -> Returned:
        """Calls `forward`, and `setup_context` where there is one."""
        if self._is_separate:
            return self.set_up(ctx, inputs, self.forward_alone(form, inputs))
        try:
            return take_apart(form.call(self._forward, (ctx,), inputs))
        except Exception as error:
            explain(error, self.name, "forward", ctx)
            raise

    def forward_alone(self, form: Form, inputs: Sequence[Any]) -> Returned:
        """Calls a `forward` that takes no ctx."""
        try:
            return take_apart(form.call(self._forward, (), inputs))
        except Exception as error:
            explain(error, self.name, "forward")
            raise

    def set_up(self, ctx: FunctionCtx, inputs: tuple[Any, ...], returned: Returned) -> Returned:
        """Calls `setup_context`; returns the outputs that it was given."""
        state_of(ctx).num_outputs = len(returned.layouts)
        self._run_rule("setup_context", self._setup_context, ctx, (inputs, returned.value))
        return returned

    def backward(self, ctx: FunctionCtx, grad_outputs: list[Any]) -> Any:
        """Calls `backward`, or `vjp`, its other name.

        Args:
          ctx: the ctx as `forward` left it.
          grad_outputs: one for each output.
        """
        if not self.has_backward:
            raise NotImplementedError(
                f"{self.name} cannot be differentiated: it defines neither backward (or vjp) nor jvp. Write "
                "backward(ctx, *grad_outputs) as a static method."
            )
        if _is_defined(self._function.vjp) and _is_defined(self._function.backward):
            raise RuntimeError(
                f"{self.name}: implementing both 'backward' and 'vjp' for a custom Function is not allowed. You should "
                "only implement one of them."
            )
        backward = self._backward()
        arguments = (list(grad_outputs),) if self._function.boxed_grads_call else grad_outputs
        returned = self._within_reach("backward", backward, ctx, arguments)
        if returned is None and not self._warned_of_no_return:
            self._warn_of_no_return(backward)
        return returned

    def _backward(self) -> Callable[..., Any]:
        """`backward`, under whichever of its two names it was defined."""
        return self._function.vjp if _is_defined(self._function.vjp) else self._function.backward

    def jvp(self, ctx: FunctionCtx, tangents: Sequence[Any]) -> Any:
        """Calls `jvp`; see `backward`."""
        return self._within_reach("jvp", self._function.jvp, ctx, tangents)

    def out_of_reach(self, method: str) -> Exception:
        """What is raised where a method uses a traced value that does not belong to the program at hand."""
        return NotImplementedError(
            f"{self.name}.{method} closes over a value that is being differentiated, or that JAX traces in another "
            f"program than the one that {method} is called in, as it is in jit, vmap, scan and checkpoint. Pass that "
            f"value to {self.name} as an argument, and save it on ctx where backward needs it."
        )

    def _warn_of_no_return(self, backward: Callable[..., Any]) -> None:
        """Warns, the first time, where `backward` has no return statement at all."""
        self._warned_of_no_return = True
        place = place_without_return(backward)
        if place is not None:
            warnings.warn(
                f"{self.name}.backward returned nothing, so its gradients are zero: there is no return statement in it "
                f"({place}). Return the gradients, or write return None where there are none.",
                stacklevel=2,
            )

    def _within_reach(self, method: str, rule: Callable[..., Any], ctx: FunctionCtx, arguments: Sequence[Any]) -> Any:
        try:
            return self._run_rule(method, rule, ctx, arguments)
        except jax.errors.UnexpectedTracerError as error:
            raise self.out_of_reach(method) from error

    def _run_rule(self, method: str, rule: Callable[..., Any], ctx: FunctionCtx, arguments: Sequence[Any]) -> Any:
        """Calls a method that takes the ctx; says what is probably wrong where that raises."""
        try:
            return rule(ctx, *arguments)
        except Exception as error:
            if isinstance(error, TypeError) and is_refused_call(error, rule, (ctx, *arguments)):
                raise wrong_signature(self.name, method, rule, ctx, len(arguments)) from None
            explain(error, self.name, method, ctx)
            raise

    def add_place(self, method: str, error: Exception) -> None:
        """Adds to the message of an error about what a method returned where that method was written."""
        function = self._backward() if method == "backward" else getattr(self._function, method)
        place = place_of(function)
        if place is not None:
            add_to_message(error, f"{self.name}.{method} is at {place}.")

    def warn_of_dirty(self) -> None:
        """Warns, the first time, that `mark_dirty` leaves the caller's array alone."""
        if not self._warned_of_dirty:
            self._warned_of_dirty = True
            warn_of_dirty(self.name)
