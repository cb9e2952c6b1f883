"""Functions without a class: the `function` decorator, and R torch's `autograd_function`."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast, overload

from jaxfn._apply_types import P, R_co, TakesAnything, TakesCtx, TakesFunctionCtx
from jaxfn._function import Function, describe_rules, show_signature

_F = TypeVar("_F", bound=Callable[..., Any])


class CallableFunction(Generic[P, R_co]):
    """A callable with a `Function` underneath, which `function` and `autograd_function` return.

    Attributes:
      Function: the class that does the work.
    """

    def __init__(self, function: Any) -> None:
        self.__name__: str = function.__name__
        self.__qualname__: str = function.__qualname__.removesuffix(".Function")
        self.__module__: str = function.__module__
        self.__doc__ = function.__doc__
        self.Function: Any = function

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.Function.forward

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.Function.apply(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jaxfn function {self.__qualname__}: {describe_rules(self.Function)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the class underneath: pickle by name, and cloudpickle by definition where no name will be found."""
        return _callable_of, (self.Function,)

    def __deepcopy__(self, memo: object = None) -> CallableFunction[P, R_co]:
        return self  # as functions are

    __copy__ = __deepcopy__

    @property
    def __signature__(self) -> inspect.Signature:
        show_signature(self.apply)
        return inspect.signature(self.apply)

    @property
    def apply(self) -> Callable[P, R_co]:
        """The `apply` of the class underneath."""
        return self.Function.apply

    def backward(self, rule: _F) -> _F:
        """Registers `backward(ctx, *grad_outputs)`; returns it unchanged."""
        return self._decorate("backward", rule)

    def setup_context(self, rule: _F) -> _F:
        """Registers `setup_context(ctx, inputs, output)`, after which the function takes no ctx; returns it."""
        return self._decorate("setup_context", rule)

    def jvp(self, rule: _F) -> _F:
        """Registers `jvp(ctx, *tangents)`, for forward mode; returns it unchanged."""
        return self._decorate("jvp", rule)

    def vmap(self, rule: _F) -> _F:
        """Registers `vmap(info, in_dims, *args)`, used in place of automatic batching; returns it unchanged."""
        return self._decorate("vmap", rule)

    def _decorate(self, method: str, rule: _F) -> _F:
        names = [(getattr(f, "__module__", ""), getattr(f, "__qualname__", "")) for f in (rule, self.__wrapped__)]
        if names[0] == names[1] and not names[0][1].endswith("<lambda>"):
            name, first = self.__name__, "info" if method == "vmap" else "ctx"
            raise TypeError(
                f"{name}: the rule that @{name}.{method} decorates is called {name} too, and would replace the "
                f"function. Give it another name: def _({first}, ...)."
            )
        setattr(self.Function, method, staticmethod(rule))
        show_signature(self.apply)
        return rule


def _make(forward: Callable[..., Any], name: str | None = None, **rules: Any) -> CallableFunction[..., Any]:
    function_name: str = name or getattr(forward, "__name__", type(forward).__name__)
    qualname: str = name or getattr(forward, "__qualname__", function_name)
    body = {
        "__module__": getattr(forward, "__module__", __name__),
        "__qualname__": f"{qualname}.Function",  # where pickle finds it
        "__doc__": forward.__doc__,
        "_jaxfn_is_decorated": True,
        "forward": staticmethod(forward),
    }
    methods = {method: staticmethod(rule) for method, rule in rules.items() if rule is not None}
    return CallableFunction(type(function_name, (Function,), body | methods))


def _callable_of(function: Any) -> CallableFunction[..., Any]:
    """Returns the callable that has a class underneath: the one of that name, or else a new one."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split(".")[:-1]:
        found = getattr(found, name, None)
    if isinstance(found, CallableFunction) and found.Function is function:
        return cast(Any, found)
    return CallableFunction(function)


@overload
def function(forward: TakesCtx[P, R_co]) -> CallableFunction[P, R_co]: ...
@overload
def function(forward: TakesAnything[R_co]) -> CallableFunction[..., R_co]: ...
@overload
def function(forward: TakesFunctionCtx[P, R_co]) -> CallableFunction[P, R_co]: ...
@overload
def function(forward: Callable[P, R_co]) -> CallableFunction[P, R_co]: ...
def function(forward: Callable[..., Any]) -> CallableFunction[..., Any]:
    """Makes a function with a custom derivative out of a plain function.

    Args:
      forward: `forward(ctx, *args)`, or `forward(*args)` where `setup_context` is registered afterwards.

    Returns:
      A callable with the function's name, docstring and signature (without the ctx), and with `.backward`,
      `.setup_context`, `.jvp` and `.vmap` as registering decorators. Rules and errors are those of `Function`.

    Examples:
      >>> import jax, jaxfn
      >>> @jaxfn.function
      ... def mul_constant(ctx, tensor, constant):
      ...     ctx.constant = constant
      ...     return tensor * constant
      >>> @mul_constant.backward
      ... def _(ctx, grad_output):
      ...     return grad_output * ctx.constant, None
      >>> print(jax.jit(jax.grad(lambda x: mul_constant(x, 3.0)))(1.0))
      3.0

    Torch counterpart: a `torch.autograd.Function` subclass and its `apply`.
    """
    return _make(forward)


def autograd_function(
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    *,
    setup_context: Callable[..., Any] | None = None,
    name: str | None = None,
) -> CallableFunction[..., Any]:
    """Makes a function with a custom derivative out of two functions: R torch's form.

    Args:
      forward: `forward(ctx, *args)`; it saves by name, `ctx.save_for_backward(input=input)`.
      backward: `backward(ctx, *grad_outputs)`; it reads `ctx.saved_variables.input` and
        `ctx.needs_input_grad.input`, and returns `{"input": gradient}`. Names left out have no gradient.
      setup_context: `setup_context(ctx, inputs, output)`, with which `forward` takes no ctx.
      name: The name in errors, tables and profiles. Default: the name of `forward`.

    Returns:
      A callable like that of `function`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> def forward(ctx, i):
      ...     result = jnp.exp(i)
      ...     ctx.save_for_backward(result=result)
      ...     return result
      >>> def backward(ctx, grad_output):
      ...     return {"i": grad_output * ctx.saved_variables.result}
      >>> exp = jaxfn.autograd_function(forward=forward, backward=backward)
      >>> print(jax.grad(exp)(0.0))
      1.0

    Torch counterpart: `torch::autograd_function` of R torch.
    """
    return _make(forward, name, backward=backward, setup_context=setup_context)
