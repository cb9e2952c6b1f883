"""`Function`, the base class: torch's protocol, and the dispatch of a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Never, overload

from jaxfn._apply_types import HasForward, P, R_co, TakesAnything, TakesCtx, TakesFunctionCtx
from jaxfn._diagnostics import add_numpy_hint, hide_own_frames
from jaxfn._forward_pass import CallSpec
from jaxfn._hooks import HOOKS
from jaxfn._methods import UserMethods, undefined
from jaxfn._observe import CALL_MONITOR, active_monitor
from jaxfn._rule import call_untraced, call_with_rule, call_without_rule
from jaxfn._sharding_rule import ShardingRule
from jaxfn._signature import InputNames, InputSpec
from jaxfn._tree import ARRAY_SPEC, TreeSpec, as_array, flatten_input, is_traced

# The maximum number of `CallSpec`s, one per argument structure and static values, that each Function caches.
_MAX_CACHED_CALLS = 256


class ApplyDescriptor:
    """Returns the `apply` of the class on which it is looked up, through `super()` too.

    To type checkers it takes what `forward` takes after the ctx; see `jaxfn._apply_types`.
    """

    @overload
    def __get__(self, instance: object, owner: type[HasForward[TakesCtx[P, R_co]]]) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type[HasForward[TakesAnything[R_co]]]) -> Callable[..., R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type[HasForward[TakesFunctionCtx[P, R_co]]]) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type[HasForward[Callable[P, R_co]]]) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: Any) -> Callable[..., Any]:
        return owner._jaxfn_apply


class Function:
    """A function with a custom derivative, by torch's protocol.

    Subclass it, write `forward` and `backward` as static methods, and call `apply`. `forward` returns any pytree; a
    tuple is several outputs. `backward` takes a gradient for each output, of its shape and dtype, and returns one for
    each input, `None` for none: of the input's shape (what was broadcast is summed), and cast to the input's dtype. Any
    other shape or structure raises an error that names the input.

    `forward` runs once per call, eagerly or while JAX traces; `backward` runs when JAX differentiates in reverse, and
    what it does can be differentiated again. Instead of `forward(ctx, ...)` a Function may define `forward(...)` and
    `setup_context(ctx, inputs, output)`.

    Forward mode works where `jvp(ctx, *tangents)` is defined too, or `generate_jvp_rule = True`; a Function with `jvp`
    and no `backward` is differentiated in reverse by transposing `jvp`. `vmap(info, in_dims, *args)` returns outputs
    and their batch axes, and is used by `jax.vmap` in place of automatic batching; it needs the separate style.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> class RoundedSquare(jaxfn.Function):
      ...     @staticmethod
      ...     def forward(ctx, x):
      ...         ctx.save_for_backward(x)
      ...         return jnp.round(x * x)
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         (x,) = ctx.saved_tensors
      ...         return 2 * x * grad_output
      >>> print(jax.grad(RoundedSquare.apply)(1.25))
      2.5

    Differences from torch: arrays inside lists, dicts and other pytrees are differentiated too; Python numbers are
    static unless JAX traces them; a saved intermediate differentiates through the code that computed it; arrays
    are immutable (see `FunctionCtx.mark_dirty`).

    Torch counterpart: `torch.autograd.Function`.
    """

    apply: ClassVar[ApplyDescriptor] = ApplyDescriptor()
    """Calls the Function; one object on every access, so that `jax.jit(F.apply)` compiles once."""

    _jaxfn_apply: ClassVar[Callable[..., Any]]

    _jaxfn_dispatcher: ClassVar[_Dispatcher]

    _jaxfn_takes_torch_tensors: ClassVar[bool] = False

    generate_vmap_rule: ClassVar[bool] = False
    """Ignored, accepted for torch's protocol: JAX batches every Function without a `vmap` automatically."""

    generate_jvp_rule: ClassVar[bool] = False
    """Whether forward mode is derived by transposing `backward`, which must then be linear in its gradients."""

    boxed_grads_call: ClassVar[bool] = False
    """Whether `backward` gets its gradients as one list instead of one by one."""

    clear_saved_tensors_on_access: ClassVar[bool] = False
    """Ignored, accepted for torch's protocol: JAX frees residuals automatically."""

    sharding_rule: ClassVar[str | ShardingRule | None] = None
    """How the Function is partitioned over devices: a `ShardingRule`, or its text where that says all."""

    if not TYPE_CHECKING:  # to a checker, what returns Never ends the program, and has no `apply`

        def __new__(cls, *args: Any, **kwargs: Any) -> Never:
            name = cls.__name__
            raise TypeError(
                f"{name} cannot be instantiated (torch's legacy, non-static Functions are not supported). Call "
                f"{name}.apply(...), and pass what __init__ stored as arguments of forward with gradient None."
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.sharding_rule is not None:
            cls.sharding_rule = ShardingRule.of(cls.__name__, cls.sharding_rule)
        cls._jaxfn_dispatcher = _Dispatcher(cls)
        cls._jaxfn_apply = staticmethod(_make_apply(cls, cls._jaxfn_dispatcher))
        show_signature(cls._jaxfn_apply)

    @staticmethod
    @undefined
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Computes the outputs: `forward(ctx, *args)`, or `forward(*args)` where `setup_context` is defined."""
        raise NotImplementedError("a Function defines forward")

    @staticmethod
    @undefined
    def setup_context(*args: Any, **kwargs: Any) -> Any:
        """`setup_context(ctx, inputs, output)`: saves what `backward` needs, from all inputs and outputs."""
        raise NotImplementedError("a Function in separate style defines setup_context")

    @staticmethod
    @undefined
    def backward(*args: Any, **kwargs: Any) -> Any:
        """`backward(ctx, *grad_outputs)`: the gradient of each input, from the gradient of each output."""
        raise NotImplementedError("a differentiable Function defines backward")

    @staticmethod
    @undefined
    def vjp(*args: Any, **kwargs: Any) -> Any:
        """Another name of `backward`."""
        raise NotImplementedError("a differentiable Function defines backward")

    @staticmethod
    @undefined
    def jvp(*args: Any, **kwargs: Any) -> Any:
        """`jvp(ctx, *tangents)`: the tangent of each output, from the tangent of each input; for forward mode."""
        raise NotImplementedError("a Function with its own forward mode defines jvp")

    @staticmethod
    @undefined
    def vmap(*args: Any, **kwargs: Any) -> Any:
        """`vmap(info, in_dims, *args)`: outputs and their batch axes; used by `jax.vmap` instead of batching."""
        raise NotImplementedError("a Function with its own batching rule defines vmap")


def _make_apply(function: type[Function], dispatcher: _Dispatcher) -> Callable[..., Any]:
    """Makes the `apply` of one Function class: a plain function, so JAX caches by it and pickle finds it by name."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        try:
            return dispatcher.call(args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    apply.__module__ = function.__module__
    apply.__name__ = function.__name__
    apply.__qualname__ = f"{function.__qualname__}.apply"
    apply.__doc__ = function.__doc__
    vars(apply)["_jaxfn_dispatcher"] = dispatcher
    return apply


def describe_rules(function: Any) -> str:
    """Lists the derivative and batching rules that a Function class defines, for its `repr`."""
    rules = ("backward", "vjp", "jvp", "vmap")
    defined = [name for name in rules if not getattr(getattr(function, name), "_jaxfn_undefined", False)]
    return ", ".join(defined) or "no derivative"


def show_signature(apply: Callable[..., Any]) -> None:
    """Lets `inspect.signature` show what a Function's `apply` takes, and JAX's messages say where `forward` is."""
    dispatcher: _Dispatcher | None = getattr(apply, "_jaxfn_dispatcher", None)
    if dispatcher is not None:  # None for an `apply` that the user wrote
        with suppress(RuntimeError, TypeError, ValueError):  # no forward yet, or one that a call will reject
            methods, _ = dispatcher.methods_and_cache()
            vars(apply)["__signature__"] = methods.signature.signature
            methods.show_source(apply)


class _Dispatcher:
    """Implements `apply` for one Function class, and caches the static parts of its calls."""

    def __init__(self, function: type[Function]) -> None:
        self._function = function
        self._cached: tuple[UserMethods, Callable[..., CallSpec]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the class alone, which cloudpickle may store by value; caches are rebuilt."""
        return _Dispatcher, (self._function,)

    def methods_and_cache(self) -> tuple[UserMethods, Callable[..., CallSpec]]:
        """Returns the class's methods, looked up again if one was replaced, and the cached specs of their calls."""
        cached = self._cached
        if cached is None or not cached[0].is_current():
            methods = UserMethods(self._function)

            @lru_cache(_MAX_CACHED_CALLS)
            def spec_for(names: InputNames, trees: tuple[TreeSpec, ...]) -> CallSpec:
                return CallSpec(methods, InputSpec(names, trees))

            cached = self._cached = methods, spec_for
        return cached

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Binds and flattens the arguments, and runs `forward` with the rule that the call needs."""
        methods, spec_for = self.methods_and_cache()
        monitor = active_monitor()
        if monitor is not None:
            monitor.functions[self._function] = None
        names, values = methods.signature.bind(args, kwargs)
        arrays: list[Any] = []
        trees: list[TreeSpec] = []
        for index, value in enumerate(values):
            leaves, tree = flatten_input(value)
            if tree is not ARRAY_SPEC and not methods.takes_torch_tensors:
                tree.check_no_torch_tensors(lambda: f"{methods.name}: {names.describe(index)}")
            arrays += map(as_array, leaves)
            trees.append(tree)
        is_cacheable = all(tree.is_hashable for tree in trees)
        spec = spec_for(names, tuple(trees)) if is_cacheable else CallSpec(methods, InputSpec(names, tuple(trees)))
        if monitor is not None and monitor.bypass_rules:
            with CALL_MONITOR(None):  # Functions inside forward use their rules
                return call_without_rule(spec, arrays)
        try:
            return (
                call_with_rule(spec, arrays, HOOKS.value)
                if any(map(is_traced, arrays))
                else call_untraced(spec, arrays)
            )
        except TypeError as error:
            add_numpy_hint(error, methods.name, names, values)
            raise


Function.__init_subclass__()  # with an `apply` that says what a subclass must define
