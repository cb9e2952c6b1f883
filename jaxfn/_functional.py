"""Functions without a class: `function`, a decorator and a call, which R torch names `autograd_function`."""

from __future__ import annotations

import inspect
import reprlib
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast, overload

import jax
import jax.numpy as jnp

from jaxfn._apply_types import P, R_co, Rule, Rules, TakesAnything, TakesCtx, TakesFunctionCtx
from jaxfn._function import Function, describe_rules, show_signature
from jaxfn._sharding_rule import ShardingRule

_F = TypeVar("_F", bound=Callable[..., Any])
_METHODS = ("forward", "backward", "setup_context", "jvp", "vmap")
_FLAGS = ("generate_jvp_rule", "boxed_grads_call", "generate_vmap_rule", "clear_saved_tensors_on_access")
_OPTIONS = (*_FLAGS, "sharding_rule")


class function(Generic[P, R_co]):
    """A function with a custom derivative, defined without a class: a decorator, or a call.

    It has the name, the docstring and the signature of `forward`, without the ctx. Rules, options and errors are those
    of `Function`. Rules may also be registered by the decorators `f.backward`, `f.setup_context`, `f.jvp` and `f.vmap`,
    and options assigned (`f.generate_jvp_rule = True`).

    Args:
      forward: `forward(ctx, *args)`, or `forward(*args)` with a `setup_context`. If it is omitted, a decorator with the
        other arguments is returned: `@jaxfn.function(generate_jvp_rule=True)`.
      backward: `backward(ctx, *grad_outputs)`.
      setup_context: `setup_context(ctx, inputs, output)`, with which `forward` takes no ctx.
      jvp: `jvp(ctx, *tangents)`, for forward mode.
      vmap: `vmap(info, in_dims, *args)`, used in place of automatic batching.
      name: The name in errors, tables and profiles. Default: the name of `forward`.
      generate_jvp_rule: As in `Function`, like the options after it.

    Attributes:
      Function: the class that does the work.

    Raises:
      TypeError: `forward` is a class or a Function already, or `forward` or a rule is not a function.

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
      >>> def backward(ctx, grad_output):  # R torch's form: gradients by name
      ...     return {"tensor": grad_output * ctx.constant}
      >>> print(jax.grad(jaxfn.autograd_function(mul_constant.forward, backward))(1.0, 3.0))
      3.0

    Torch counterpart: a `torch.autograd.Function` subclass and its `apply`; in R torch, `autograd_function`.
    JAX counterpart: `jax.custom_vjp`, `jax.custom_jvp`.
    """

    __name__: str
    __qualname__: str
    Function: Any
    forward: Callable[..., Any]
    generate_jvp_rule: bool
    boxed_grads_call: bool
    generate_vmap_rule: bool
    clear_saved_tensors_on_access: bool
    sharding_rule: str | ShardingRule | None

    @overload
    def __new__(cls, forward: TakesCtx[P, R_co], backward: Rule = None, **kw: Unpack[Rules]) -> function[P, R_co]: ...
    @overload
    def __new__(
        cls, forward: TakesAnything[R_co], backward: Rule = None, **kw: Unpack[Rules]
    ) -> function[..., R_co]: ...
    @overload
    def __new__(
        cls, forward: TakesFunctionCtx[P, R_co], backward: Rule = None, **kw: Unpack[Rules]
    ) -> function[P, R_co]: ...
    @overload
    def __new__(cls, forward: Callable[P, R_co], backward: Rule = None, **kw: Unpack[Rules]) -> function[P, R_co]: ...
    @overload
    def __new__(
        cls, forward: None = None, backward: Rule = None, **kw: Unpack[Rules]
    ) -> function[[Callable[..., Any]], function[..., Any]]: ...
    def __new__(
        cls,
        forward: Rule = None,
        backward: Rule = None,
        *,
        setup_context: Rule = None,
        jvp: Rule = None,
        vmap: Rule = None,
        name: str | None = None,
        generate_jvp_rule: bool = False,
        boxed_grads_call: bool = False,
        generate_vmap_rule: bool = False,
        clear_saved_tensors_on_access: bool = False,
        sharding_rule: str | ShardingRule | None = None,
    ) -> Any:
        flags = generate_jvp_rule, boxed_grads_call, generate_vmap_rule, clear_saved_tensors_on_access
        members: dict[str, Any] = dict(zip(_OPTIONS, (*flags, sharding_rule), strict=True))
        members |= {"backward": backward, "setup_context": setup_context, "jvp": jvp, "vmap": vmap}
        if forward is None:
            return partial(cls, name=name, **members)
        is_function = hasattr(getattr(forward, "apply", forward), "_jaxfn_dispatcher")
        if is_function or isinstance(forward, type) or not callable(forward):
            got = getattr(forward, "__qualname__", None) or reprlib.repr(forward)
            raise TypeError(
                f"jaxfn.function expects a function forward(ctx, *args), got {got}. A Function is called as it is: "
                "F.apply(x), f(x). jaxfn.from_torch converts one of torch."
            )
        function_name: str = name or getattr(forward, "__name__", type(forward).__name__)
        qualname: str = name or getattr(forward, "__qualname__", function_name)
        body = {
            "__module__": getattr(forward, "__module__", __name__),
            "__qualname__": f"{qualname}.Function",  # where pickle finds it
            "__doc__": forward.__doc__,
            "_jaxfn_is_decorated": True,
            "forward": staticmethod(forward),
        }
        made = _callable_of(type(function_name, (Function,), body))
        for key, value in members.items():
            if value is not None:
                setattr(made, key, value)
        return made

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.Function.apply(*args, **kwargs)

    @property
    def apply(self) -> Callable[P, R_co]:
        """The `apply` of the class underneath."""
        return self.Function.apply

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jaxfn function {self.__qualname__}: {describe_rules(self.Function)}>"

    if not TYPE_CHECKING:  # to which only the declared attributes exist

        def __getattr__(self, name: str) -> Any:
            if name == "__signature__":  # here and not on the class, which has its own
                show_signature(self.apply)
                return inspect.signature(self.apply)
            if name in ("forward", "__wrapped__"):
                return self.Function.forward
            if name in _OPTIONS:
                return getattr(self.Function, name)
            own = vars(self).get("__name__", "f")  # without one while it is unpickled
            text = (
                f"{own} has no rule or option {name!r}. @{own}.backward, .setup_context, .jvp and .vmap register rules;"
            )
            raise AttributeError(f"{text} the options are {', '.join(_OPTIONS)}.", name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("__"):  # as on functions
                super().__setattr__(name, value)
            elif name == "sharding_rule":
                self.Function.sharding_rule = ShardingRule.of(self.__name__, value)
            elif name in _OPTIONS:
                setattr(self.Function, name, value)
            elif name not in _METHODS:
                self.__getattr__(name)  # raises
            elif not callable(value):
                raise TypeError(f"{self.__name__}.{name} is of type {type(value).__name__}; expected a function.")
            else:
                setattr(self.Function, name, staticmethod(value))
                if name in ("forward", "setup_context"):
                    show_signature(self.apply)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the class underneath: pickle by name, and cloudpickle by definition where no name will be found."""
        names = [name for name, value in [*vars(sys.modules.get(self.__module__, types)).items()] if value is self]
        if names and self.__qualname__ not in names:  # the name of `forward`
            self.Function.__qualname__ = f"{names[0]}.Function"
        return _callable_of, (self.Function,)

    def __deepcopy__(self, memo: object = None) -> function[P, R_co]:
        return self  # as functions are

    __copy__ = __deepcopy__

    def backward(self, rule: _F) -> _F:
        """Registers `backward(ctx, *grad_outputs)`; returns it unchanged."""
        return self._register("backward", rule)

    def setup_context(self, rule: _F) -> _F:
        """Registers `setup_context(ctx, inputs, output)`, after which the function takes no ctx; returns it."""
        return self._register("setup_context", rule)

    def jvp(self, rule: _F) -> _F:
        """Registers `jvp(ctx, *tangents)`, for forward mode; returns it unchanged."""
        return self._register("jvp", rule)

    def vmap(self, rule: _F) -> _F:
        """Registers `vmap(info, in_dims, *args)`, used in place of automatic batching; returns it unchanged."""
        return self._register("vmap", rule)

    def _register(self, method: str, rule: _F) -> _F:
        names = [(getattr(f, "__module__", ""), getattr(f, "__qualname__", "")) for f in (rule, self.forward)]
        if names[0] == names[1] and not names[0][1].endswith("<lambda>"):
            name, first = self.__name__, "info" if method == "vmap" else "ctx"
            raise TypeError(
                f"{name}: the rule that @{name}.{method} decorates is called {name} too, and would replace the "
                f"function. Give it another name: def _({first}, ...)."
            )
        setattr(self, method, rule)
        return rule


autograd_function = function
"""R torch's name of `function`."""


def from_custom_vjp(
    f: Callable[..., Any], fwd: Callable[..., Any] | None = None, bwd: Callable[..., Any] | None = None
) -> function[..., Any]:
    """Returns a Function with the rule of a `jax.custom_vjp`: one that can be checked, and is the rule at every order.

    Args:
      f: A function, or a `jax.custom_vjp`, which has its own `fwd` and `bwd`. It runs where nothing is differentiated.
      fwd: As for `f.defvjp(fwd, bwd)`: `fwd(*args)` returns the output and the residuals.
      bwd: `bwd(residuals, cotangent)` returns a tuple with the cotangent of each argument.

    Raises:
      TypeError: `fwd` or `bwd` is missing.
      NotImplementedError: The rule takes symbolic zeros.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> rounded = jax.custom_vjp(lambda x: jnp.round(x))
      >>> rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
      >>> second = lambda f: jax.grad(jax.grad(lambda x: (f(x) - 1) ** 2))(2.3)
      >>> print(second(rounded), second(jaxfn.from_custom_vjp(rounded)))
      0.0 2.0

    Torch counterpart: none.
    """
    static: Sequence[int] = ()
    if isinstance(f, jax.custom_vjp) and fwd is bwd is None:
        rule: Any = f
        f, fwd, bwd, static = rule.__wrapped__, rule.fwd, rule.bwd, rule.nondiff_argnums
        if rule.symbolic_zeros:
            raise NotImplementedError(
                "from_custom_vjp: the rule takes symbolic zeros. Write it as a backward, with ctx.needs_input_grad and "
                "ctx.set_materialize_grads(False)"
            )
    if fwd is None or bwd is None:
        raise TypeError("from_custom_vjp takes f, fwd and bwd, or a jax.custom_vjp with both (f.defvjp(fwd, bwd))")

    def forward(ctx: Any, *args: Any) -> Any:
        if not any(ctx.needs_input_grad):
            return f(*args)
        output, ctx.residuals = fwd(*args)
        ctx.static, ctx.is_tuple = [args[i] for i in static], isinstance(output, tuple)
        ctx.make_outputs = getattr(output, "_make", tuple)
        return output

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        cotangents = jax.tree.map(_conjugate, grad_outputs)
        cotangent = ctx.make_outputs(cotangents) if ctx.is_tuple else cotangents[0]
        returned = bwd(*ctx.static, ctx.residuals, cotangent)
        gradients: list[Any] = [*returned] if isinstance(returned, (tuple, list)) else [returned]
        for i in sorted(static):
            gradients.insert(i, None)
        is_needed = (*ctx.needs_input_grad, *[True] * len(gradients))  # the caller raises if there are too many
        pairs = zip(gradients, is_needed, strict=False)
        return tuple(jax.tree.map(_conjugate, gradient) if needed else None for gradient, needed in pairs)

    wraps(f)(forward)
    wraps(bwd)(backward)  # so that errors name its line
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD  # which fwd does not take
    positional = [p for p in inspect.signature(f).parameters.values() if p.kind not in kinds]
    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)
    vars(forward)["__signature__"] = inspect.Signature([ctx, *positional])
    return function(forward, backward)


def _conjugate(gradient: Any) -> Any:
    """Converts between torch's gradients and JAX's cotangents, each the conjugate of the other and maybe a number."""
    if isinstance(gradient, (float, complex)):
        gradient = jnp.asarray(gradient)
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


def _callable_of(function_class: Any) -> function[..., Any]:
    """Returns the callable that has a class underneath: the one of that name, or else a new one."""
    found: Any = sys.modules.get(function_class.__module__)
    for name in function_class.__qualname__.split(".")[:-1]:
        found = getattr(found, name, None)
    if isinstance(found, function) and found.Function is function_class:
        return cast(Any, found)
    made: function[..., Any] = object.__new__(function)
    vars(made).update(
        __name__=function_class.__name__,
        __qualname__=function_class.__qualname__.removesuffix(".Function"),
        __module__=function_class.__module__,
        __doc__=function_class.__doc__,
        Function=function_class,
    )
    return made
