"""The ctx that user code sees in `forward`, `setup_context`, `backward` and `jvp`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import jax

from jaxfn._observe import log, record_perturbation_read
from jaxfn._signature import InputNames
from jaxfn._tree import is_array_leaf

_T = TypeVar("_T")


class _Named:
    """A base class with named values as attributes, which shadow methods such as `index`, `count` and `values`."""

    _jaxfn_named: dict[str, Any]

    def __getattribute__(self, name: str) -> Any:
        named = super().__getattribute__("__dict__").get("_jaxfn_named", {})
        return named[name] if name in named else super().__getattribute__(name)


class NeedsInputGrad(_Named, tuple[bool, ...]):
    """A flag for each input, whether it is being differentiated: by position, `["weight"]` or `.weight`.

    The name of a `*args` parameter gives the tuple of its items' flags.
    """

    def __new__(cls, flags: tuple[bool, ...], names: InputNames) -> NeedsInputGrad:
        self = super().__new__(cls, flags)
        self._jaxfn_named = dict(zip(names.names, flags, strict=True))
        if names.variadic is not None:
            self._jaxfn_named[names.variadic] = tuple(self._jaxfn_named[name] for name in names.variadic_items)
        return self

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            try:
                return super().__getitem__(key)
            except IndexError:
                names = ", ".join(self._jaxfn_named)
                text = f"ctx.needs_input_grad[{key}] is out of range for {len(self)} inputs ({names})"
                raise IndexError(text) from None
        if key not in self._jaxfn_named:
            raise KeyError(self._no_parameter(key))
        return self._jaxfn_named[key]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ctx.needs_input_grad.{name}: {self._no_parameter(name)}", name=name, obj=self)

    def _no_parameter(self, name: str) -> str:
        return f"{name!r} is not among the parameters: {', '.join(self._jaxfn_named)}"


class SavedVariables(_Named, tuple[Any, ...]):
    """The saved values: by position, as of torch's old `saved_variables`, `["weight"]` or `.weight`.

    `keys`, `values` and `items` are those of a dict of the values that were saved by name.
    """

    def __new__(cls, tensors: tuple[Any, ...], named: Mapping[str, Any]) -> SavedVariables:
        self = super().__new__(cls, (*tensors, *named.values()))
        self._jaxfn_named = dict(named)
        return self

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self._jaxfn_named:
            raise KeyError(self._not_saved(key))
        return self._jaxfn_named[key]

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values", "items"):  # here, so that they do not hide a value of that name from checkers
            return getattr(self._jaxfn_named, name)
        raise AttributeError(self._not_saved(name), name=name, obj=self)

    def __contains__(self, key: object) -> bool:
        return key in self._jaxfn_named

    def _not_saved(self, name: str) -> str:
        by_position = len(self) - len(self._jaxfn_named)
        text = f", and by position {by_position}: ctx.saved_tensors" if by_position else ""
        return f"nothing was saved as {name!r}; saved: {', '.join(self._jaxfn_named) or 'nothing'}{text}"


class ContextState:
    """The part of a `FunctionCtx` that jaxfn reads, apart from the user's own attributes."""

    # Class attributes are the defaults, so that creating an instance for every call is cheap.
    read_needs_input_grad: bool = False
    num_outputs: int | None = None
    tensors: tuple[Any, ...] = ()
    named: Mapping[str, Any] = MappingProxyType({})
    for_forward: tuple[Any, ...] | None = None  # None: save_for_forward was not called
    non_differentiable: tuple[Any, ...] = ()
    dirty: tuple[Any, ...] = ()
    materialize_grads: bool = True
    axes: Mapping[str, tuple[str, ...]] | None = None  # with a sharding rule, those over which factors are split
    factors: Sequence[str | None] = ()  # with a sharding rule, those of what was saved for backward
    python_numbers: Sequence[Any] = ()  # inputs that would be arrays if they were differentiated or traced
    can_save_numbers: bool = False

    def __init__(self, names: InputNames, needs_input_grad: tuple[bool, ...]) -> None:
        self.names = names
        self.needs_input_grad = needs_input_grad


class _Overridable(Generic[_T]):
    """A property that user code may replace by assignment, like any other name on ctx."""

    def __init__(self, compute: Callable[[FunctionCtx], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, ctx: FunctionCtx | None, owner: type) -> _T:
        return cast(Any, self) if ctx is None else self._compute(ctx)


class FunctionCtx:
    """The object by which `forward` passes values to `backward` and `jvp`: torch's ctx.

    Assign any attribute (`ctx.scale = scale`): arrays inside become residuals, the rest is passed on unchanged. Saved
    values come back with the shape and dtype that they had, and reading what was not saved raises `AttributeError`.
    Each call of a Function has its own ctx. Create one to test a method alone, and assign what only a call knows
    (`ctx.needs_input_grad = (True, False)`).

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> class Scale(jaxfn.Function):
      ...     @staticmethod
      ...     def forward(ctx, x, factor):
      ...         ctx.factor = factor
      ...         return x * factor
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         return grad_output * ctx.factor, None
      >>> print(jax.grad(Scale.apply)(1.0, 3.0))
      3.0
      >>> ctx = jaxfn.FunctionCtx()
      >>> ctx.factor = 2.0
      >>> Scale.backward(ctx, 5.0)
      (10.0, None)

    Torch counterpart: `torch.autograd.function.FunctionCtx`.
    """

    # One slot of jaxfn's own, so that vars(ctx) is exactly what the user assigned.
    __slots__ = ("__dict__", "__weakref__", "_jaxfn")

    def __init__(self, _state: ContextState | None = None, /) -> None:
        self._jaxfn = _state or ContextState.__new__(ContextState)  # without what only a call knows

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in ("num_inputs", "num_outputs", "needs_input_grad"):
            when = "once forward has returned" if name == "num_outputs" else "in a call"
            raise AttributeError(f"ctx.{name} is known {when}; assign it to a FunctionCtx that you have created")
        names = ", ".join(vars(self)) or "none"
        text = f"ctx has no attribute {name!r}: it was not set here or in forward (set: {names})"
        raise AttributeError(text, name=name, obj=self)

    def save_for_backward(self, *tensors: Any, **named: Any) -> None:
        """Saves arrays for `backward`; a second call replaces those of the first.

        Args:
          *tensors: arrays (inputs, outputs or intermediates) or `None`, read back as `ctx.saved_tensors`.
          **named: arrays or any other values by name, read back as `ctx.saved_variables.name`. In a Function with a
            sharding rule, `factors=("batch", None)` has the factors of each saved array that is neither an input nor
            an output, `_` for a dimension of none; `None` finds them by the sizes.

        Raises:
          TypeError: a positional argument is neither an array nor `None`.

        Examples:
          >>> import jax, jaxfn
          >>> def forward(ctx, x):
          ...     ctx.save_for_backward(x)
          ...     return x * x
          >>> square = jaxfn.function(forward, lambda ctx, grad_output: 2 * ctx.saved_tensors[0] * grad_output)
          >>> print(jax.grad(square)(3.0))
          6.0

        Torch counterpart: `ctx.save_for_backward`; the named form is R torch's.
        """
        _check_saved("save_for_backward", tensors, self._jaxfn)
        if self._jaxfn.axes is not None:
            self._jaxfn.factors = named.pop("factors", ())
        self._jaxfn.tensors = tensors
        self._jaxfn.named = named

    def save_for_forward(self, *tensors: Any) -> None:
        """Saves arrays for `jvp`, which reads them as `ctx.saved_tensors`; a second call replaces those of the first.

        If it is not called, `jvp` reads the arrays of `save_for_backward`.

        Args:
          *tensors: arrays (inputs, outputs or intermediates) or `None`.

        Raises:
          TypeError: an argument is neither an array nor `None`.

        Examples:
          >>> import jax, jaxfn
          >>> def forward(ctx, x):
          ...     ctx.save_for_forward(x)
          ...     return x * x
          >>> square = jaxfn.function(forward, jvp=lambda ctx, tangent: 2 * ctx.saved_tensors[0] * tangent)
          >>> print(jax.jvp(square, (3.0,), (1.0,))[1])
          6.0

        Torch counterpart: `ctx.save_for_forward`.
        """
        _check_saved("save_for_forward", tensors, self._jaxfn)
        self._jaxfn.for_forward = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The values that `save_for_backward` saved: positional ones, then the named ones that are arrays or `None`."""
        named = self._jaxfn.named.values()
        return self._jaxfn.tensors + tuple(value for value in named if value is None or is_array_leaf(value))

    @property
    def saved_variables(self) -> SavedVariables:
        """The values that `save_for_backward` saved, by name (R torch's form) and by position (old torch's)."""
        return SavedVariables(self._jaxfn.tensors, self._jaxfn.named)

    @_Overridable
    def needs_input_grad(self) -> NeedsInputGrad:
        """Whether each input is being differentiated, by position and by parameter name."""
        self._jaxfn.read_needs_input_grad = True
        record_perturbation_read()
        return NeedsInputGrad(self._jaxfn.needs_input_grad, self._jaxfn.names)

    @_Overridable
    def num_inputs(self) -> int:
        """The number of inputs of `forward`, those left to their defaults included."""
        return len(self._jaxfn.names.names)

    @_Overridable
    def num_outputs(self) -> int:
        """The number of outputs that `forward` returned."""
        if self._jaxfn.num_outputs is None:
            raise AttributeError  # __getattr__ raises the message
        return self._jaxfn.num_outputs

    def mesh_axes(self, factor: str) -> tuple[str, ...]:
        """Returns the mesh axes over which a factor of the sharding rule is split here; `()` where it is whole.

        For a Function with `manual_factors`: `jax.lax.psum(x, ctx.mesh_axes("vocab"))`, which is `x` on one device.

        Raises:
          ValueError: the Function's sharding rule has no such factor.

        Torch counterpart: none.
        """
        axes = self._jaxfn.axes or {}
        if factor not in axes:
            raise ValueError(
                f"ctx.mesh_axes({factor!r}): the sharding rule has no such factor. It has: {', '.join(axes)}"
            )
        return axes[factor]

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Declares that these outputs have no derivative: they pass through `jax.lax.stop_gradient`.

        `backward` still gets an argument for each: zeros, or `None` when not materializing. A second call replaces the
        first.

        Args:
          *outputs: arrays that `forward` returns; another array has no effect, and warns.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxfn
          >>> def forward(ctx, x):
          ...     largest = jnp.max(x)
          ...     ctx.mark_non_differentiable(largest)
          ...     return x / 2, largest
          >>> halve = jaxfn.function(forward, lambda ctx, grad_half, grad_largest: grad_half / 2)
          >>> print(jax.grad(lambda x: sum(halve(x)))(3.0))
          0.5

        Torch counterpart: `ctx.mark_non_differentiable`.
        """
        self._jaxfn.non_differentiable = outputs

    def mark_dirty(self, *inputs: Any) -> None:
        """Declares that `forward` updates these inputs and returns their new values.

        JAX arrays are immutable: the caller's array is unchanged, and the returned one has the new value. A `jax.Ref`
        argument is updated in place and need not be returned. A second call replaces the first.

        Args:
          *inputs: arrays that were passed to `forward`; it must return one of the shape and dtype of each.

        Raises:
          ValueError: an argument is not an array input, or no output has its shape and dtype; raised after `forward`.

        Examples:
          >>> import jax, jaxfn
          >>> def forward(ctx, total, x):
          ...     total[...] += x
          ...     ctx.mark_dirty(total)
          ...     return x * total[...]
          >>> total = jax.new_ref(1.0)
          >>> print(jaxfn.function(forward)(total, 2.0), total[...])
          6.0 3.0

        Torch counterpart: `ctx.mark_dirty`.
        """
        self._jaxfn.dirty = inputs

    def log(self, **values: Any) -> None:
        """Logs values for `jaxfn.logged()`, each time that they are computed.

        Works in `forward`, `setup_context`, `backward` and `jvp`. Outside `jaxfn.logged()` it does nothing and adds
        nothing to compiled programs. Logged values are not differentiated.

        Args:
          **values: arrays or Python numbers, by name.

        Raises:
          TypeError: a value is neither.

        Examples:
          >>> import jax, jax.numpy as jnp, jaxfn
          >>> @jaxfn.function
          ... def clipped(ctx, x):
          ...     ctx.log(largest=jnp.max(x))
          ...     return x
          >>> @clipped.backward
          ... def _(ctx, grad_output):
          ...     ctx.log(norm=jnp.linalg.norm(grad_output))
          ...     return jnp.clip(grad_output, -1, 1)
          >>> with jaxfn.logged() as logs:
          ...     gradient = jax.grad(lambda x: (3 * clipped(x)).sum())(jnp.ones(4))
          >>> print(logs["largest"], logs["norm"])
          [Array(1., dtype=float32)] [Array(6., dtype=float32)]

        Torch counterpart: none.
        """
        for name, value in values.items():
            is_array = is_array_leaf(value) and not isinstance(value, jax.Ref)
            if not is_array and not isinstance(value, (bool, int, float, complex)):
                raise TypeError(
                    f"ctx.log(...): {name!r} is of type {type(value).__name__}; expected an array or a Python number."
                )
            log(name, value)

    def set_materialize_grads(self, value: bool) -> None:
        """Sets whether `backward` and `jvp` receive zeros or `None` for what is not differentiated.

        Args:
          value: if false, `backward` gets `None` for an output whose gradient is symbolically zero, and `jvp` for an
            input without a tangent. By default they get zeros of its shape and dtype.

        Examples:
          >>> import jax, jaxfn
          >>> def forward(ctx, x):
          ...     ctx.set_materialize_grads(False)
          ...     return 2 * x, 3 * x
          >>> def backward(ctx, grad_double, grad_triple):
          ...     return None if grad_double is None else 2 * grad_double
          >>> multiples = jaxfn.function(forward, backward)
          >>> print(jax.grad(lambda x: multiples(x)[1])(1.0))
          0.0

        Torch counterpart: `ctx.set_materialize_grads`.
        """
        self._jaxfn.materialize_grads = value
        if not value:
            record_perturbation_read()


def _check_saved(method: str, tensors: tuple[Any, ...], state: ContextState) -> None:
    for position, tensor in enumerate(tensors):
        if tensor is None or is_array_leaf(tensor):
            continue
        is_input = any(tensor is number for number in state.python_numbers)
        if is_input and state.can_save_numbers:
            continue
        what, fix = f"of type {type(tensor).__name__}", "Set"
        if is_input:
            what = f"the Python number {tensor!r}, an input that is static here and an array under jax.jit"
            fix = f"Pass jnp.{jax.dtypes.canonicalize_dtype(type(tensor))}({tensor!r}), or set"
        by_name = " or save it by name (ctx.save_for_backward(name=value))" if method == "save_for_backward" else ""
        raise TypeError(
            f"{method} can only save arrays or None, but argument {position} is {what}. {fix} it as an attribute "
            f"(ctx.name = value){by_name}."
        )


class SavedNames(NamedTuple):
    """The names of the values on a ctx, in this order."""

    num_tensors: int
    named: tuple[str, ...]
    num_for_forward: int | None
    attributes: tuple[str, ...]
    factors: tuple[str | None, ...] = ()  # of the first values, as `save_for_backward` received them

    @property
    def num_for_backward(self) -> int:
        """The number of values that were passed to `save_for_backward`; they come first."""
        return self.num_tensors + len(self.named)


def ctx_state(ctx: FunctionCtx) -> ContextState:
    """Returns the part of a ctx that jaxfn reads."""
    return ctx._jaxfn  # pyright: ignore[reportPrivateUsage]


def collect_saved(ctx: FunctionCtx) -> tuple[SavedNames, list[Any]]:
    """Returns the names and the values of everything on a ctx for `backward` and `jvp`."""
    state, attributes = ctx_state(ctx), vars(ctx)
    for_forward = state.for_forward
    num_for_forward = None if for_forward is None else len(for_forward)
    names = SavedNames(len(state.tensors), tuple(state.named), num_for_forward, tuple(attributes), tuple(state.factors))
    return names, [*state.tensors, *state.named.values(), *(for_forward or ()), *attributes.values()]


def restore_ctx(state: ContextState, names: SavedNames, values: Iterable[Any]) -> FunctionCtx:
    """Returns a ctx with the names and values that `collect_saved` returned."""
    values = iter(values)
    ctx = FunctionCtx(state)
    state.tensors = tuple(islice(values, names.num_tensors))
    if names.named:
        state.named = dict(zip(names.named, islice(values, len(names.named)), strict=True))
    if names.num_for_forward is not None:
        state.for_forward = tuple(islice(values, names.num_for_forward))
    if names.attributes:
        vars(ctx).update(zip(names.attributes, values, strict=True))
    return ctx


def use_saved_for_forward(state: ContextState) -> None:
    """Sets `saved_tensors` to the values that `jvp` should read."""
    if state.for_forward is not None:
        state.tensors, state.named = state.for_forward, {}
