"""`from_torch`: a torch Function as a jaxfn Function."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as torch_tree

from jaxfn._context import FunctionCtx, ctx_state
from jaxfn._function import Function
from jaxfn._methods import UserMethods
from jaxfn._once_differentiable import once_differentiable
from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.convert.explain import Explanation, Part
from jaxfn._torch.convert.traced_code import TensorSpec, TracedForward, TracedVmap, get_or_trace, tensor_spec
from jaxfn._torch.graph.recorder import NO_EXTERNALS
from jaxfn._torch.trace.state import TraceConfig
from jaxfn._torch.values.arrays import torch_dtype
from jaxfn._torch.values.errors import EscapedTensorError, TranslationError
from jaxfn._torch.values.flatten import FlatTensors, Slot, flatten_tensors, slots, unflatten_tensors
from jaxfn._torch.values.trace_cache import LRUCache
from jaxfn._tree import as_array, is_array_leaf, is_none

# Per Function: how many traces of `forward`, and of `vmap`, are kept.
_MAX_TRACES = 256


class ConvertedFunction(Function):
    """A Function whose methods are those of a torch Function.

    Attributes:
      torch_function: that.
    """

    torch_function: ClassVar[Any]
    adapter: ClassVar[FunctionAdapter]
    _jaxfn_takes_torch_tensors = True  # as constants

    @classmethod
    def explain(cls, *args: Any, **kwargs: Any) -> Explanation:
        """Explains what becomes of the torch code when `apply` is called with these arguments and differentiated.

        Args:
          *args: as for `apply`; of arrays, shapes and dtypes matter.
          **kwargs: likewise.

        Returns:
          An object that prints the graphs that torch traced, their operations, which of those have no translation, and
          the JAX code of the translation.

        Examples:
          >>> import torch, jax.numpy as jnp, jaxfn
          >>> class Square(torch.autograd.Function):
          ...     @staticmethod
          ...     def forward(ctx, x):
          ...         ctx.save_for_backward(x)
          ...         return x * x
          ...     @staticmethod
          ...     def backward(ctx, grad_output):
          ...         return 2 * ctx.saved_tensors[0] * grad_output
          >>> explanation = jaxfn.from_torch(Square).explain(jnp.ones(3))
          >>> explanation.is_supported
          True
          >>> print(explanation.parts[1].operations)
          ['aten.mul.Tensor']

        Torch counterpart: none.
        """
        form, values = UserMethods(cls).signature.bind(args, kwargs)
        return form.call(lambda *args, **kwargs: cls.adapter.explain(args, kwargs), (), values)


class _TracedCall(NamedTuple):
    """The trace for a call, with its arrays and key."""

    traced: TracedForward
    arrays: list[Any]
    key: Any


class FunctionAdapter:
    """A torch Function's methods as jaxfn calls them.

    Args:
      definition: the torch Function.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._traced_forwards = LRUCache[TracedForward](_MAX_TRACES)
        self._traced_vmaps = LRUCache[TracedVmap](_MAX_TRACES)
        # Why `backward` is not traced, of calls whose traces may not be kept, by the objects among their arguments.
        self._backward_errors: dict[tuple[int, ...], TranslationError] = {}
        self._warned: set[str] = set()

    def forward(self, ctx: FunctionCtx, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward` and, where there is one, `setup_context`, as a jaxfn Function in combined style has it."""
        call = self._find_trace(args, kwargs, ctx_state(ctx))
        self._warn_about_trace(call.traced)
        values = call.traced.run(call.arrays, call.key)
        self._fill_ctx(ctx, call, values)
        return unflatten_tensors(call.traced.output, values)

    def forward_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward`, as a jaxfn Function with a `setup_context` has it."""
        call = self._find_trace(args, kwargs, None)
        self._warn_about_trace(call.traced)
        return unflatten_tensors(call.traced.output, call.traced.run(call.arrays, call.key))

    def setup_context(self, ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        """`setup_context`, as a jaxfn Function has it."""
        state = ctx_state(ctx)
        args, kwargs = state.names.call(lambda *args, **kwargs: (args, kwargs), (), inputs)
        call = self._find_trace(args, kwargs, state)
        values = call.traced.values_of_inputs_and_outputs(call.arrays, flatten_tensors(output, is_array_leaf).leaves)
        if not all(slot in values for saved in call.traced.saved_slots.values() for slot in saved):
            values = call.traced.run(call.arrays, call.key) | values
        self._fill_ctx(ctx, call, values)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """`vmap`, as a jaxfn Function has it."""
        name = self.definition.name
        if self.definition.takes_any_keyword:
            raise TranslationError(f"{name} has a vmap, and its forward takes **kwargs, which torch's vmap does not")
        (*values, key), (*dims, key_dim) = inputs, in_dims
        arguments = flatten_tensors(tuple(values), is_array_leaf)
        specs = [self._spec(array) for array in arguments.leaves]
        batched = get_or_trace(
            f"{name}.vmap",
            self._traced_vmaps,
            (arguments.template, dims, info.batch_size),
            specs,
            lambda specs: TracedVmap(self.definition, arguments.template, specs, info, tuple(dims)),
        )
        if batched.draws and key_dim is not None:
            raise TranslationError(
                f"{name}.vmap draws random numbers for the whole batch, by one key; it got a batch of keys. Pass a "
                "single key"
            )
        return batched.run(arguments.leaves, key)

    def _find_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any) -> _TracedCall:
        """Returns a call's trace and arrays; without the state of a ctx, every input counts as needing a gradient."""
        key = kwargs.pop(self.definition.key_name)
        arguments = flatten_tensors((args, kwargs), is_array_leaf)
        specs = [self._spec(array) for array in arguments.leaves]
        flags = (True,) * (len(args) + len(kwargs))
        if state is not None:
            flags = self._flags(state.names.names, state.needs_input_grad)
        return _TracedCall(self.trace_forward(arguments.template, specs, flags), arguments.leaves, key)

    def _fill_ctx(self, ctx: FunctionCtx, call: _TracedCall, values: Mapping[int, Any]) -> None:
        """Gives a ctx what it keeps, of the values of the program's slots."""
        traced = call.traced
        if traced.reads_needs_input_grad:
            ctx.needs_input_grad  # noqa: B018 - jaxfn runs forward again where more inputs need a gradient
        vars(ctx).update(traced=traced, key=call.key)
        non_differentiable = [values[slot] for slot in slots(traced.output) if slot in traced.non_differentiable]
        # Inside other code, what was written is there afterwards, and nobody is to be warned; see `nested`.
        dirty = [] if self.definition.config.is_nested else [call.arrays[i] for i in traced.dirty]
        ctx.save_for_backward(*traced.arrays_to_save("backward", call.arrays, values))
        if self.definition.has_jvp:
            ctx.save_for_forward(*traced.arrays_to_save("jvp", call.arrays, values))
        ctx.set_materialize_grads(traced.materialize_grads)
        ctx.mark_non_differentiable(*non_differentiable)
        ctx.mark_dirty(*dirty)

    def backward(self, ctx: Any, grad_outputs: Sequence[Any]) -> tuple[Any, ...]:
        """`backward`, as a jaxfn Function has it."""
        traced: TracedForward = ctx.traced
        names = ctx_state(ctx).names.names
        outputs = traced.output if isinstance(traced.output, tuple) else (traced.output,)
        template, arrays, specs = _match_template(outputs, _sum_per_tensor(traced, outputs, grad_outputs), traced.specs)
        rule = traced.trace_rule("backward", template, specs, self._flags(names, tuple(ctx.needs_input_grad)))
        if rule.differentiates_externals:
            self._warn_once(
                f"{self.definition.name}.backward gives gradients to tensors made outside of it (the parameters of a "
                "module, say), which are constants on JAX and get none. Pass what is to be trained as arguments."
            )
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, _BACKWARD_KEY_DATA)
        gradients = list(rule.run(ctx.saved_tensors, arrays, key))
        return tuple(self._gradients_of_inputs(gradients, traced, names))

    def jvp(self, ctx: Any, tangents: Sequence[Any]) -> Any:
        """`jvp`, as a jaxfn Function has it."""
        traced: TracedForward = ctx.traced
        names = ctx_state(ctx).names.names
        args, kwargs = traced.arguments
        index = names.index(self.definition.key_name)
        given = [*tangents[:index], *tangents[index + 1 :]]
        template, arrays, specs = _match_template((*args, *kwargs.values()), given, traced.input_specs)
        rule = traced.trace_rule("jvp", template, specs, self._flags(names, tuple(ctx.needs_input_grad)))
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, _BACKWARD_KEY_DATA)
        return rule.run(ctx.saved_tensors, arrays, key)

    def trace_forward(self, arguments: Any, specs: Sequence[TensorSpec], flags: tuple[bool, ...]) -> TracedForward:
        """`forward` traced for these arguments."""
        traced = get_or_trace(
            f"{self.definition.name}.forward",
            self._traced_forwards,
            arguments,
            specs,
            lambda specs: TracedForward(self.definition, arguments, specs, flags),
            flags,
        )
        traced.backward_error = traced.backward_error or self._backward_errors.get(_static_identities(arguments))
        return traced

    def preview(self, arguments: FlatTensors) -> tuple[TracedForward, bool]:
        """`forward` traced for torch tensors, and whether it or its backward draws random numbers."""
        args, kwargs = arguments.template
        specs = [tensor_spec(x, self.definition.config.externals.memory_format_source) for x in arguments.leaves]
        traced = self.trace_forward(arguments.template, specs, (True,) * (len(args) + len(kwargs)))
        return traced, traced.draws or self._draws_in_backward(traced)

    def _draws_in_backward(self, traced: TracedForward) -> bool:
        """Whether backward draws random numbers, as far as it can be traced; what cannot be may never be called."""
        if traced.is_in_own_backward:
            return False
        try:
            backward = traced.full_backward()
        except EscapedTensorError as error:  # later the code would find something else in that place
            self.set_backward_error(traced, error)
            return False
        except Exception:
            return False
        return backward is not None and backward.draws

    def set_backward_error(self, traced: TracedForward, error: TranslationError) -> None:
        """Has what was traced raise this error where it is differentiated."""
        traced.backward_error = type(error)(str(error))  # not the one that holds the frames
        if self.definition.config.externals is not NO_EXTERNALS:  # this is for one trace alone
            self._backward_errors[_static_identities(traced.arguments)] = traced.backward_error

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """Explains what becomes of a call with these arguments when everything in it is differentiated."""
        kwargs = {name: value for name, value in kwargs.items() if name != self.definition.key_name}
        arguments = flatten_tensors((args, kwargs), is_array_leaf)
        specs = [self._spec(as_array(leaf)) for leaf in arguments.leaves]
        try:
            traced = self.trace_forward(arguments.template, specs, (True,) * (len(args) + len(kwargs)))
        except TranslationError as error:
            return Explanation(self.definition.name, [Part("forward", None, error)])
        parts = [Part("forward", traced)]
        try:
            backward = traced.full_backward()
        except TranslationError as error:
            parts.append(Part("backward", None, error))
        else:
            parts += [] if backward is None else [Part("backward", backward)]
        return Explanation(self.definition.name, parts)

    def _flags(self, names: Sequence[str], flags: Sequence[bool]) -> tuple[bool, ...]:
        """The flags of all inputs but the key."""
        return tuple(flag for name, flag in zip(names, flags, strict=True) if name != self.definition.key_name)

    def _gradients_of_inputs(self, gradients: list[Any], traced: TracedForward, names: Sequence[str]) -> list[Any]:
        """Returns the gradients of backward with an entry for the key, and `None` for tensors that are constants."""
        args, kwargs = traced.arguments
        for i, value in enumerate((*args, *kwargs.values())):
            if isinstance(value, torch.Tensor) and i < len(gradients):
                gradients[i] = None
        index = names.index(self.definition.key_name)
        return [*gradients[:index], None, *gradients[index:]] if len(gradients) >= index else gradients

    def _spec(self, array: Any) -> TensorSpec:
        if not all(isinstance(length, int) for length in array.shape):
            raise TranslationError(
                f"{self.definition.name}: an argument has the shape {array.shape}, and torch code is traced for one "
                "shape at a time. Export with fixed shapes"
            )
        return TensorSpec(
            tuple(array.shape), torch_dtype(array.dtype), self.definition.config.externals.memory_format_source
        )

    def _warn_about_trace(self, traced: TracedForward) -> None:
        name = self.definition.name
        if not set(traced.mutated) <= {*traced.dirty, *traced.implicit_outputs}:
            self._warn_once(
                f"{name} writes to one of its inputs. JAX arrays are immutable: the caller's array keeps its value, "
                "and only what forward returns is new."
            )
        is_narrow = jax.dtypes.canonicalize_dtype(np.float64) == np.float32
        if is_narrow and traced.uses_double:
            self._warn_once(
                f"{name} computes in float64, which JAX has only with jax.config.update('jax_enable_x64', True). It "
                "runs in float32."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


def _static_identities(template: Any) -> tuple[int, ...]:
    """The values in arguments that are no arrays, by identity."""
    return tuple(id(leaf) for leaf in torch_tree.tree_leaves(template) if not isinstance(leaf, Slot))


def _sum_per_tensor(traced: TracedForward, outputs: Sequence[Any], grad_outputs: Sequence[Any]) -> list[Any]:
    """Gradients of outputs, of which torch knows a tensor that is returned twice by its last place alone."""
    gradients, last = [*grad_outputs], {index: i for i, index in enumerate(outputs) if isinstance(index, Slot)}
    for i, index in enumerate(outputs):
        if isinstance(index, Slot) and last[index] != i and gradients[i] is not None:
            others = gradients[last[index]]
            gradients[last[index]] = gradients[i] if others is None else gradients[i] + others
            gradients[i] = jnp.zeros_like(gradients[i]) if traced.materialize_grads else None
    return gradients


def _match_template(
    places: Sequence[Any], given: Sequence[Any], specs: Sequence[TensorSpec]
) -> tuple[Any, list[Any], list[TensorSpec]]:
    """Gradients or tangents, of which some are `None`: their template, the arrays in it, and the specs of those.

    Args:
      places: a template for each, of the output or input that it belongs to.
      given: the gradients or tangents.
      specs: of the tensors in the templates' slots.
    """
    arrays: list[Any] = []
    found: list[TensorSpec] = []

    def slot(index: Any, value: Any) -> Slot | None:
        if value is None or not isinstance(index, Slot):
            return None
        arrays.append(value)
        found.append(specs[index.index])
        return Slot(len(arrays) - 1)

    template = tuple(
        None if value is None else jax.tree_util.tree_map(slot, index, value, is_leaf=is_none)
        for index, value in zip(places, given, strict=True)
    )
    return template, arrays, found


# What random numbers in backward and jvp are drawn by: the call's key with this folded in.
_BACKWARD_KEY_DATA = 0x6261636B


def convert_function_class(function: Any, module: str, config: TraceConfig) -> type[ConvertedFunction]:
    """The jaxfn Function of a torch one; the same one again for the same class and replacements.

    Args:
      function: the class.
      module: the `__module__` of the new class.
      config: how it is traced.
    """
    ops = config.replacements.all
    replaced = frozenset((id(op), id(replacement)) for op, replacement in ops.items())
    key = id(function), id(config.externals), config.is_nested, replaced
    found = _CLASSES.get(key)
    if found is None:
        found = _CLASSES[key] = _make_class(function, module, config)
    return found


# A class holds the torch one, and its replacements, so that an identity is not used twice while it is here.
_CLASSES: weakref.WeakValueDictionary[Any, type[ConvertedFunction]] = weakref.WeakValueDictionary()


def _make_class(function: Any, module: str, config: TraceConfig) -> type[ConvertedFunction]:
    definition = Definition(function, config)
    adapter = FunctionAdapter(definition)

    def forward(ctx: FunctionCtx, *args: Any, **kwargs: Any) -> Any:
        return adapter.forward(ctx, args, kwargs)

    def backward(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        return adapter.backward(ctx, grad_outputs)

    def jvp(ctx: FunctionCtx, *tangents: Any) -> Any:
        return adapter.jvp(ctx, tangents)

    def forward_alone(*args: Any, **kwargs: Any) -> Any:
        return adapter.forward_alone(args, kwargs)

    method = forward_alone if definition.keeps_setup_context else forward
    method.__signature__ = definition.signature  # pyright: ignore[reportFunctionMemberAccess]
    body: dict[str, Any] = {
        "__module__": module,
        "__qualname__": function.__name__,
        "__doc__": function.__doc__,
        "torch_function": function,
        "adapter": adapter,
        "forward": staticmethod(method),
        "generate_vmap_rule": function.generate_vmap_rule,
    }
    if definition.keeps_setup_context:
        body["setup_context"] = staticmethod(adapter.setup_context)
    if definition.has_vmap:
        body["vmap"] = staticmethod(adapter.vmap)
    if definition.backward is not None:
        backward.__qualname__ = f"{function.__qualname__}.backward"
        body["backward"] = staticmethod(once_differentiable(backward) if definition.once_differentiable else backward)
    if definition.has_jvp:
        body["jvp"] = staticmethod(jvp)
    return type(function.__name__, (ConvertedFunction,), body)
