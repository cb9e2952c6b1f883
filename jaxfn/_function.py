"""`Function`, the base class: torch's protocol, and the path that one call takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, ClassVar, Never, overload

from jaxfn._derivatives.rule import closed_over, outputs_of_call
from jaxfn._frames import hide_own_frames
from jaxfn._primitives.attach import attach
from jaxfn._protocol.saved_tensor_hooks import HOOKS
from jaxfn._run.call import Call
from jaxfn._run.forward import call_forward, undecorated
from jaxfn._run.methods import Methods, undefined
from jaxfn._signatures import HasForward, P, R_co, TakesAnything, TakesCtx, TakesFunctionCtx
from jaxfn._values.arguments import Form
from jaxfn._values.arrays import as_array, is_traced
from jaxfn._values.hidden import Opaque
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout, split
from jaxfn._watch import WATCH

# Per Function: how many argument structures and static values are kept prepared at the same time.
_CALLS_KEPT = 256


class _Apply:
    """Finds the `apply` of the class that it is asked of, by way of `super()` too.

    Type checkers are told that it takes what `forward` takes, less the ctx; see `jaxfn._signatures`.
    """

    @overload
    def __get__(self, instance: object, owner: HasForward[TakesCtx[P, R_co]]) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: HasForward[TakesAnything[R_co]]) -> Callable[..., R_co]: ...
    @overload
    def __get__(self, instance: object, owner: HasForward[TakesFunctionCtx[P, R_co]]) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: HasForward[Callable[P, R_co]]) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: Any) -> Callable[..., Any]:
        return owner._jaxfn_apply


class Function:
    """A function with a derivative of its own: torch's protocol on JAX.

    Subclass it, write `forward` and `backward` as static methods, and call `apply`:

        class Square(jaxfn.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)     # what backward will want
                return x * x                 # any pytree; a tuple is several outputs

            @staticmethod
            def backward(ctx, grad_output):  # one gradient per output
                (x,) = ctx.saved_tensors
                return 2 * x * grad_output   # one gradient per input, None for none

    `forward` runs once per call, eagerly or while JAX traces; `backward` runs when JAX differentiates in reverse, and
    what it does can be differentiated again. Instead of `forward(ctx, ...)` a Function may define `forward(...)` and
    `setup_context(ctx, inputs, output)`.

    Forward mode works where `jvp(ctx, *tangents)` is defined too, or `generate_jvp_rule = True`; a Function with `jvp`
    and no `backward` is differentiated in reverse by transposing `jvp`. `vmap(info, in_dims, *args)` returns outputs
    and their batch axes, and is used by `jax.vmap` in place of automatic batching; it needs the separate style.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> class Round(jaxfn.Function):
      ...     @staticmethod
      ...     def forward(ctx, x):
      ...         return jnp.round(x)
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         return grad_output
      >>> print(jax.grad(lambda x: Round.apply(x) ** 2)(2.3))
      4.0

    Differences from torch: arrays inside lists, dicts and other pytrees are differentiated too; Python numbers are
    static unless JAX traces them; a saved intermediate differentiates through the code that made it; arrays are
    immutable (see `FunctionCtx.mark_dirty`).

    Torch counterpart: `torch.autograd.Function`.
    """

    apply: ClassVar[_Apply] = _Apply()
    """Calls the Function; the very same object on every access, so that `jax.jit(F.apply)` compiles once."""

    _jaxfn_apply: ClassVar[Callable[..., Any]]

    _jaxfn_entrance: ClassVar[_Entrance]

    _jaxfn_takes_torch_tensors: ClassVar[bool] = False

    generate_vmap_rule: ClassVar[bool] = False
    """Accepted for torch's sake; JAX batches every Function without a `vmap` by itself."""

    generate_jvp_rule: ClassVar[bool] = False
    """Whether forward mode is derived by transposing `backward`, which must then be linear in its gradients."""

    boxed_grads_call: ClassVar[bool] = False
    """Whether `backward` gets its gradients as one list instead of one by one."""

    clear_saved_tensors_on_access: ClassVar[bool] = False
    """Accepted for torch's sake; JAX frees residuals by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Never:
        name = cls.__name__
        raise TypeError(
            f"{name} is not to be instantiated, as in torch's old style: call {name}.apply(...). What {name}(...) was "
            "to keep becomes an argument of forward, whose gradient is None."
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._jaxfn_entrance = _Entrance(cls)
        cls._jaxfn_apply = staticmethod(_make_apply(cls, cls._jaxfn_entrance))
        show_signature(cls._jaxfn_apply)

    @staticmethod
    @undefined
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Computes the outputs: `forward(ctx, *args)`, or `forward(*args)` where `setup_context` is defined."""
        raise NotImplementedError("a Function defines forward")

    @staticmethod
    @undefined
    def setup_context(*args: Any, **kwargs: Any) -> Any:
        """`setup_context(ctx, inputs, output)`: saves what `backward` needs, given all inputs and outputs."""
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
        raise NotImplementedError("a Function with a forward mode of its own defines jvp")

    @staticmethod
    @undefined
    def vmap(*args: Any, **kwargs: Any) -> Any:
        """`vmap(info, in_dims, *args)`: outputs and their batch axes; used by `jax.vmap` in place of batching."""
        raise NotImplementedError("a Function with a batching rule of its own defines vmap")


def _make_apply(function: type[Function], entrance: _Entrance) -> Callable[..., Any]:
    """The `apply` of one Function class: a plain function, so JAX caches by it and pickle finds it by name."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        try:
            return entrance.call(args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    apply.__module__ = function.__module__
    apply.__name__ = function.__name__
    apply.__qualname__ = f"{function.__qualname__}.apply"
    apply.__doc__ = function.__doc__
    vars(apply)["_jaxfn_entrance"] = entrance
    return apply


def show_signature(apply: Callable[..., Any]) -> None:
    """Lets `inspect.signature` say what a Function's `apply` takes: what `forward` does now, less the ctx."""
    entrance: _Entrance | None = getattr(apply, "_jaxfn_entrance", None)
    if entrance is not None:  # None of an `apply` that the user wrote
        with suppress(RuntimeError, TypeError, ValueError):  # no forward yet, or one that a call will refuse
            methods, _ = entrance.prepared()
            vars(apply)["__signature__"] = methods.parameters.signature


class _Entrance(Opaque):
    """Where calls of one Function come in."""

    def __init__(self, function: type[Function]) -> None:
        self._function = function
        self._prepared: tuple[Methods, _Prepare] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Anew: cloudpickle comes here with a class that it stores by value, and what is prepared stays behind."""
        return _Entrance, (self._function,)

    def visible_parts(self) -> Sequence[object]:
        """What a call runs; derivatives are no part of what another Function that calls this one closes over."""
        return self._function.forward, self._function.setup_context

    def prepared(self) -> tuple[Methods, _Prepare]:
        """The class's methods, looked up again where they were replaced, and the calls prepared for them."""
        prepared = self._prepared
        if prepared is None or not prepared[0].is_current():
            methods = Methods(self._function)
            prepared = self._prepared = methods, lru_cache(_CALLS_KEPT)(partial(Call, methods))
        return prepared

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call: bind the arguments, take out the array leaves, run."""
        methods, prepare = self.prepared()
        watch = WATCH.value
        if watch is not None:
            watch.functions[self._function] = None
        form, values = methods.parameters.bind(args, kwargs)
        arrays: list[Any] = []
        layouts: list[Layout] = []
        for position, value in enumerate(values):
            leaves, layout = split(value)
            if layout is not ARRAY_LAYOUT and not methods.takes_torch_tensors:
                layout.refuse_torch(lambda: f"{methods.name}: {form.describe(position)}")
            arrays += map(as_array, leaves)
            layouts.append(layout)
        try:
            call = prepare(form, tuple(layouts))
        except TypeError:  # a static argument that is not compared by value
            call = Call(methods, form, tuple(layouts))
        if watch is not None and watch.undecorated:
            with WATCH(None):  # Functions inside forward keep their rules
                return undecorated(call, arrays)
        if any(map(is_traced, arrays)):
            outputs = outputs_of_call(call, arrays, HOOKS.value)
            return outputs.layout.merge(outputs.arrays)
        _, _, returned = call_forward(call, arrays, call.unperturbed)
        if not any(map(is_traced, returned.arrays)):
            return returned.value
        # Forward closes over what JAX traces.
        return returned.layout.merge(attach(returned.arrays, (), (), (refusal := closed_over(call)), refusal))


_Prepare = Callable[[Form, tuple[Layout, ...]], Call]
