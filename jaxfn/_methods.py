"""The methods of a Function class, as the rest of jaxfn calls them."""

from __future__ import annotations

import copy
import difflib
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, TypeVar

from jaxfn._boundary import ForwardOutputs, flatten_outputs
from jaxfn._captures import captured_tracers, captures_any, with_captured
from jaxfn._context import FunctionCtx, ctx_state
from jaxfn._diagnostics import add_hint, add_to_message, location_without_return, signature_error, source_location
from jaxfn._sharding_rule import ShardingRule
from jaxfn._signature import ForwardSignature, InputSpec
from jaxfn._traces import is_in_scope

_F = TypeVar("_F", bound=Callable[..., Any])
_UNDEFINED = "_jaxfn_undefined"
_METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


def undefined(method: _F) -> _F:
    """Marks a base-class method as one that a subclass may define."""
    setattr(method, _UNDEFINED, True)
    return method


def _is_defined(method: Any) -> bool:
    return not getattr(method, _UNDEFINED, False)


def _method_key(f: Any) -> tuple[Any, ...]:
    """Returns the attributes of a Function class by which calls and messages are determined."""
    methods = f.forward, f.setup_context, f.backward, f.vjp, f.jvp, f.vmap
    return *methods, f.__name__, f.generate_jvp_rule, f.sharding_rule


def _is_same(a: Any, b: Any) -> bool:
    """Whether two entries are one object, or equal bound methods, which are created at each access."""
    return a is b or (isinstance(a, (types.MethodType, str, bool)) and a == b)


_STATIC_BACKWARD = "backward(ctx, *grad_outputs) as a static method"


def _similar_attribute(function: Any, method: str) -> str:
    """Returns a hint if a Function class without a method has an attribute of nearly that name."""
    names = {name for kind in function.__mro__ for name in vars(kind) if not name.startswith("_")}
    cutoff = 0.8 if len(method) > 3 else 0.65  # "jpv" for "jvp"
    close = difflib.get_close_matches(method, names.difference(_METHODS), 1, cutoff)
    return f" It has {close[0]!r}: did you mean {method}?" if close else ""


class UserMethods:
    """The methods of one Function class."""

    def __init__(self, function: Any) -> None:
        self.name: str = function.__name__
        self.takes_torch_tensors: bool = function._jaxfn_takes_torch_tensors  # as constants
        self._function = function
        self._method_key = _method_key(function)
        self._forward = function.forward
        self._setup_context = function.setup_context
        self._backward = function.vjp if _is_defined(function.vjp) else function.backward
        self._jvp = function.jvp
        self._forward_closures = list(filter(captures_any, (self._forward, self._setup_context)))
        self._rule_closures = list(filter(captures_any, (self._backward, self._jvp)))
        self._is_separate = _is_defined(self._setup_context)
        self._warned: set[str] = set()
        self._custom_derivatives: dict[bool, Any] = {}
        if not _is_defined(self._forward):
            hint = _similar_attribute(function, "forward")
            raise NotImplementedError(
                f"{self.name} defines no forward. Write it as a static method of a subclass of Function.{hint}"
            )
        hint = partial(_similar_attribute, function, "setup_context")
        self.signature = ForwardSignature(self._forward, not self._is_separate, self.name, hint)
        self.has_backward = _is_defined(function.backward) or _is_defined(function.vjp)
        self.has_jvp = _is_defined(function.jvp)
        self.has_forward_mode = self.has_jvp or (self.has_backward and function.generate_jvp_rule)
        self.sharding_rule = ShardingRule.of(self.name, function.sharding_rule)
        self.vmap: Callable[..., Any] | None = function.vmap if _is_defined(function.vmap) else None
        if self.has_jvp and function.generate_jvp_rule:
            raise RuntimeError(
                f"{self.name} has both generate_jvp_rule=True and its own jvp. Delete the one that forward mode "
                "should not use."
            )

    def is_current(self) -> bool:
        """Whether the class still has the methods that were looked up."""
        key = _method_key(self._function)
        return all(map(is_, key, self._method_key)) or all(map(_is_same, key, self._method_key))

    def forward_captures(self) -> list[Any]:
        """Returns the tracers in the closure and the defaults of `forward`, in Python's containers too."""
        return captured_tracers(self._forward_closures) if self._forward_closures else []

    def rule_captures(self) -> list[Any]:
        """Returns the tracers in the closures and the defaults of `backward` and `jvp`, in tuples too.

        A list or a dict may be a log, with tracers of programs that have ended. A value of a derivative that JAX has
        left cannot be used here.
        """
        return list(filter(is_in_scope, captured_tracers(self._rule_closures, (tuple,)))) if self._rule_closures else []

    def with_captured(self, captured: Mapping[int, Any]) -> UserMethods:
        """Returns the methods with new values for the tracers that they capture, by their `id`s."""
        if not captured:
            return self
        methods = copy.copy(self)
        for name in ("_forward", "_setup_context", "_backward", "_jvp"):
            setattr(methods, name, with_captured(getattr(self, name), captured))
        return methods

    @property
    def no_forward_mode(self) -> str:
        """The message for forward mode of a Function that has none."""
        return (
            "can't apply forward-mode autodiff (jvp) to a custom_vjp function.\n"
            f"{self.name} has backward alone, and so no forward mode. Define jvp(ctx, *tangents) too, or set "
            f"generate_jvp_rule = True, which derives it from backward.{_similar_attribute(self._function, 'jvp')}"
        )

    def vmap_problem(self) -> str | None:
        """Returns what is wrong with the class's `vmap`, if anything; raised where a call is batched."""
        if self.vmap is None:
            return None
        if self._function.generate_vmap_rule:
            return (
                f"You tried to vmap over {self.name}, but it has both generate_vmap_rule=True and a vmap static "
                "method. Set generate_vmap_rule=False or delete the vmap static method."
            )
        if not self._is_separate:
            return (
                f"You tried to vmap over {self.name}, which has a vmap static method, so it must also have the "
                "setup_context static method: write forward(...) without ctx, and setup_context(ctx, inputs, output)."
            )
        return None

    def custom_derivative(self, make: Callable[..., Any], is_transposed: bool) -> Any:
        """Returns JAX's custom derivative for calls of the Function, made once for each way in which JAX uses it."""
        if is_transposed not in self._custom_derivatives:
            self._custom_derivatives[is_transposed] = make(self, is_transposed)
        return self._custom_derivatives[is_transposed]

    def show_source(self, function: Any) -> None:
        """Lets JAX's messages about a function say where `forward` is."""
        forward = self._forward
        if isinstance(forward, types.FunctionType):
            code, scope, closure = forward.__code__, forward.__globals__, forward.__closure__
            function.__wrapped__ = types.FunctionType(code, scope, function.__name__, None, closure)

    def forward(self, ctx: FunctionCtx, spec: InputSpec, inputs: Sequence[Any]) -> ForwardOutputs:
        """Calls `forward`, and `setup_context` if there is one."""
        if self._is_separate:
            return self.set_up(ctx, inputs, self.forward_alone(spec, inputs))
        return self.forward_alone(spec, inputs, (ctx,))

    def add_forward_hint(self, error: Exception, *ctx: FunctionCtx) -> None:
        """Adds a hint to an error of `forward`."""
        add_hint(error, self.name, "forward", self._forward, *ctx)

    def forward_alone(self, spec: InputSpec, inputs: Sequence[Any], ctx: tuple[Any, ...] = ()) -> ForwardOutputs:
        """Calls `forward`, with the ctx if it takes one."""
        try:
            outputs = flatten_outputs(spec.names.call(self._forward, ctx, inputs))
        except Exception as error:
            self.add_forward_hint(error, *ctx)
            raise
        if outputs.value is None and not spec.has_refs:
            self._warn_of_no_return("forward", self._forward)
        return outputs

    def set_up(self, ctx: FunctionCtx, inputs: Sequence[Any], outputs: ForwardOutputs) -> ForwardOutputs:
        """Calls `setup_context`; returns the outputs that it received."""
        ctx_state(ctx).num_outputs = len(outputs.spec.trees)
        self._call_method("setup_context", self._setup_context, ctx, (tuple(inputs), outputs.value))
        return outputs

    def backward(self, ctx: FunctionCtx, grad_outputs: list[Any]) -> Any:
        """Calls `backward`, or `vjp`, its other name."""
        if not self.has_backward:
            is_decorated = getattr(self._function, "_jaxfn_is_decorated", False)
            what = f"def _(ctx, *grad_outputs) below @{self.name}.backward" if is_decorated else _STATIC_BACKWARD
            raise NotImplementedError(
                f"{self.name} cannot be differentiated: it defines neither backward (or vjp) nor jvp. Write {what}."
                f"{_similar_attribute(self._function, 'backward')}"
            )
        if _is_defined(self._function.vjp) and _is_defined(self._function.backward):
            raise RuntimeError(
                f"{self.name}: implementing both 'backward' and 'vjp' for a custom Function is not allowed. You should "
                "only implement one of them."
            )
        arguments = (list(grad_outputs),) if self._function.boxed_grads_call else grad_outputs
        returned = self._call_method("backward", self._backward, ctx, arguments)
        if returned is None:
            self._warn_of_no_return("backward", self._backward)
        return returned

    def jvp(self, ctx: FunctionCtx, tangents: Sequence[Any]) -> Any:
        """Calls `jvp`."""
        return self._call_method("jvp", self._jvp, ctx, tangents)

    def _call_method(self, name: str, method: Callable[..., Any], ctx: FunctionCtx, arguments: Sequence[Any]) -> Any:
        """Calls a method that takes the ctx, and adds a hint to its errors."""
        try:
            return method(ctx, *arguments)
        except Exception as error:
            if isinstance(error, TypeError):
                better = signature_error(error, self.name, name, method, (ctx, *arguments))
                if better is not None:
                    raise better from None
            add_hint(error, self.name, name, method, ctx)
            raise

    def escaped_tracer_error(self, method: str) -> Exception:
        """Returns the error for a method that uses a tracer of another program."""
        stored = "" if method == "forward" else _STORED
        return NotImplementedError(
            f"{self.name}.{method} closes over a value that JAX traces in another program than the one that {method} "
            f"is called in, as it is in jit, vmap, scan, checkpoint and second derivatives{stored}. Pass that value to "
            f"{self.name} as an argument, and save it on ctx where backward needs it."
        )

    def add_location(self, method: str, error: Exception) -> None:
        """Adds the location of a method to an error about what it returned."""
        location = source_location(self._backward if method == "backward" else self._jvp)
        if location is not None:
            add_to_message(error, f"{self.name}.{method} is at {location}.")

    def _warn_of_no_return(self, method: str, function: Callable[..., Any]) -> None:
        """Warns, once, if a method that returned `None` has no return statement."""
        location = None if method in self._warned else location_without_return(function)
        self._warned.add(method)
        if location is not None:
            consequence, fix = _NO_RETURN[method]
            warnings.warn(
                f"{self.name}.{method} returned None, so {consequence}: it has no return statement ({location}). {fix}",
                stacklevel=2,
            )

    def warn_once(self, topic: str, message: str) -> None:
        """Warns if there was no warning of this topic for the Function before."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=3)


_STORED = (
    "; or forward stored it outside ctx, or inside a closure or an object on ctx. Save the array itself: "
    "ctx.save_for_backward(array), or ctx.name = array"
)
_NO_RETURN = {
    "forward": ("its only output is None", "Return the output, or write return None where there is none."),
    "backward": ("its gradients are zero", "Return the gradients, or write return None where there are none."),
}
