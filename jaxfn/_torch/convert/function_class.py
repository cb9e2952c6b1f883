"""Conversion of a torch Function class to a jaxfn Function."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxfn._context import FunctionCtx, ctx_state
from jaxfn._function import Function, describe_rules
from jaxfn._methods import UserMethods
from jaxfn._once_differentiable import once_differentiable
from jaxfn._primitives import guard
from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.convert.explain import Conversion, ExplainedMethod, Explanation
from jaxfn._torch.convert.traced_code import TensorSpec, TracedForward, TracedRule, TracedVmap, TraceLookup, tensor_spec
from jaxfn._torch.graph.reads import are_concrete
from jaxfn._torch.trace.jax_function_node import ACTIVE_BACKWARD
from jaxfn._torch.trace.state import TraceConfig
from jaxfn._torch.values.arrays import jax_dtype, torch_dtype
from jaxfn._torch.values.errors import DataDependentError, EscapedTensorError, TranslationError
from jaxfn._torch.values.flatten import (
    FlatTensors,
    Slot,
    flatten_tensors,
    shared_containers,
    slots,
    unflatten_tensors,
)
from jaxfn._torch.values.scopes import setting
from jaxfn._torch.values.trace_cache import LRUCache, static_key
from jaxfn._traces import is_ref
from jaxfn._tree import as_array, is_array_leaf, is_none

# The number of traces of `forward`, and of `vmap`, that are cached for each Function.
_MAX_TRACES = 256


class _ConvertedFunctionType(type):
    """The type of converted Functions, for their `repr`."""

    def __repr__(cls) -> str:
        return f"<jaxfn Function {cls.__qualname__}, converted from torch: {describe_rules(cls)}>"


class _ConvertedFunction(Function, metaclass=_ConvertedFunctionType):
    """A Function whose methods are those of a torch Function."""

    _jaxfn_takes_torch_tensors = True  # They are constants.
    _jaxfn_conversion: ClassVar[Conversion]


def adapter_of(converted: type[Function]) -> FunctionAdapter:
    """Returns the adapter of a converted Function."""
    return vars(converted)["_jaxfn_adapter"]


class _Containers:
    """The lists and dicts among the arguments of a call, which its `backward` may change."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class _ForwardCall(NamedTuple):
    """A call's trace, arguments, arrays and random key, and the results of the trace's graph if it has been run."""

    traced: TracedForward
    arguments: Any
    arrays: list[Any]
    key: Any
    results: Any

    def slot_values(self) -> dict[int, Any]:
        """Returns the value of each slot that is not a constant."""
        results = self.traced.run_graph(self.arrays, self.key) if self.results is None else self.results
        return self.traced.slot_values(self.arrays, results)


class FunctionAdapter:
    """The methods of a torch Function, with the signatures of a jaxfn Function.

    Args:
      definition: The torch Function.
      call: The trace of a call in torch code, which surrounds all calls of the jaxfn Function; `None` elsewhere.

    Attributes:
      uses_vmap: Whether `jax.vmap` calls the `vmap` of the torch Function.
    """

    uses_vmap = True

    def __init__(self, definition: Definition, call: TracedForward | None = None) -> None:
        self.definition = definition
        self._call = call
        self._traced_forwards = LRUCache[TracedForward](_MAX_TRACES)
        self._traced_vmaps = LRUCache[TracedVmap](_MAX_TRACES)
        self._warned: set[str] = set()

    def forward(self, ctx: FunctionCtx | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `forward` and, if there is a ctx, fills that, by `setup_context` if the torch class has one."""
        call = self._find_trace(args, kwargs, ctx and ctx_state(ctx))
        self._warn_about_trace(call.traced)
        values = call.slot_values()
        if ctx is not None:
            self._fill_ctx(ctx, call, values)
        return unflatten_tensors(call.traced.output, values)

    def setup_context(self, ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        """Runs `setup_context`."""
        state = ctx_state(ctx)
        args, kwargs = state.names.call(lambda *args, **kwargs: (args, kwargs), (), inputs)
        call = self._find_trace(args, kwargs, state)
        values = call.traced.values_of_inputs_and_outputs(call.arrays, flatten_tensors(output, is_array_leaf).leaves)
        if not all(slot in values for saved in call.traced.saved_slots.values() for slot in saved):
            values = call.slot_values() | values
        self._fill_ctx(ctx, call, values)

    def vmap(self, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Runs `vmap`."""
        name = self.definition.name
        if self.definition.takes_any_keyword:
            raise TranslationError(f"{name} has a vmap, and its forward takes **kwargs, which torch's vmap does not")
        (*values, key), (*dims, key_dim) = inputs, in_dims
        arguments = flatten_tensors(tuple(values), is_array_leaf)
        specs = [self._spec(array) for array in arguments.leaves]
        trace = functools.partial(TracedVmap, self.definition, arguments.template, info, tuple(dims))
        template = arguments.template, dims, info.batch_size
        state = functools.partial(self.definition.python_state, "vmap")
        lookup = TraceLookup(f"{name}.vmap", self._traced_vmaps, template, specs, trace, (), self._warn_once, state)
        with self._at_call("vmap"):
            batched, results = lookup.find(arguments.leaves, key)
        if batched.draws and key_dim is not None:
            raise TranslationError(
                f"{name}.vmap draws random numbers for the whole batch, by one key; it got a batch of keys. Pass a "
                "single key"
            )
        results = batched.run_graph(arguments.leaves, key) if results is None else results
        return unflatten_tensors(batched.returned, results)

    def _find_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any) -> _ForwardCall:
        """Returns a call's trace and arrays; without a ctx state, every input counts as needing a gradient."""
        key = kwargs.pop(self.definition.key_name)
        arguments = flatten_tensors((args, kwargs), is_array_leaf, shares_containers=True)
        specs = [self._spec(array) for array in arguments.leaves]
        flags = (True,) * (len(args) + len(kwargs))
        if state is not None:
            flags = self._flags(state.names.names, state.needs_input_grad)
        traced, results = self._call, None
        template = arguments.template if traced is None else traced.arguments
        if traced is None or not (traced.fits(flags) or (traced.reads and not are_concrete([*arguments.leaves, key]))):
            with self._at_call("forward"):
                traced, results = self._forward_lookup(template, specs, flags).find(arguments.leaves, key)
            traced.backward_error = traced.backward_error or (self._call and self._call.backward_error)
        return _ForwardCall(traced, template, arguments.leaves, key, results)

    @contextlib.contextmanager
    def _at_call(self, method: str) -> Generator[None]:
        """Restores the torch settings around the call. Raises if the Python state that the Function reads differs."""
        if self._call is None:
            yield
            return
        if self.definition.python_state(method) != self._call.python_state:
            raise TranslationError(
                f"{self.definition.name}.{method} has to be traced after the code around the call has ended, and reads "
                "Python state (a global, an attribute, a closure) that has changed since the call. Pass the value as "
                "an argument of apply"
            )
        with self._call.settings.restored():
            yield

    def pinned_to(self, traced: TracedForward) -> type[Function]:
        """Returns the jaxfn Function for a call in torch code that has this trace."""
        if traced.pinned is None:
            traced.pinned = _make_class(type(self)(self.definition, traced), __name__)
        return traced.pinned

    def _fill_ctx(self, ctx: FunctionCtx, call: _ForwardCall, values: Mapping[int, Any]) -> None:
        """Fills jaxfn's ctx with what the torch code set on its own ctx; `values` holds the values of the slots."""
        traced = call.traced
        if traced.reads_needs_input_grad:
            ctx.needs_input_grad  # noqa: B018 - jaxfn runs forward again where more inputs need a gradient
        vars(ctx).update(traced=traced, key=call.key, containers=_Containers(shared_containers(call.arguments)))
        non_differentiable = [values[slot] for slot in slots(traced.output) if slot in traced.non_differentiable]
        # In a nested Function `nested.py` copies the new values into the caller's tensors, so there is nothing to mark.
        dirty = [] if self.definition.config.is_nested else [call.arrays[i] for i in traced.dirty]
        ctx.save_for_backward(*traced.arrays_to_save("backward", call.arrays, values))
        if self.definition.has_jvp:
            ctx.save_for_forward(*traced.arrays_to_save("jvp", call.arrays, values))
        ctx.set_materialize_grads(traced.materialize_grads)
        ctx.mark_non_differentiable(*non_differentiable)
        ctx.mark_dirty(*dirty)

    def backward(self, ctx: Any, grad_outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Runs `backward`."""
        traced: TracedForward = ctx.traced
        names = ctx_state(ctx).names.names
        outputs = traced.output if isinstance(traced.output, tuple) else (traced.output,)
        template, arrays, specs = _match_template(outputs, _sum_per_tensor(traced, outputs, grad_outputs), traced.specs)
        flags = self._flags(names, tuple(ctx.needs_input_grad))
        lookup = traced.rule_lookup("backward", template, specs, flags, ctx.containers.items)
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, _BACKWARD_KEY_DATA)
        arrays = [*ctx.saved_tensors, *arrays]
        rule, results = _run_backward(lookup._replace(warn=self._warn_once), arrays, key)
        error = rule.second_derivative_error
        if error is not None:
            results = guard(list(results), arrays, error)
        if rule.differentiates_externals:
            self._warn_once(
                f"{self.definition.name}.backward gives gradients to tensors that are not inputs (the parameters of a "
                "module, for example). They are constants on JAX and get none. Pass what you train as arguments."
            )
        gradients = list(unflatten_tensors(rule.returned, results))
        return tuple(self._gradients_of_inputs(gradients, traced.arguments, names))

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        """Runs `jvp`."""
        traced: TracedForward = ctx.traced
        names = ctx_state(ctx).names.names
        args, kwargs = traced.arguments
        index = names.index(self.definition.key_name)
        values = [*tangents[:index], *tangents[index + 1 :]]
        template, arrays, specs = _match_template((*args, *kwargs.values()), values, traced.input_specs)
        flags = self._flags(names, tuple(ctx.needs_input_grad))
        lookup = traced.rule_lookup("jvp", template, specs, flags, ctx.containers.items)
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, _BACKWARD_KEY_DATA)
        with self._at_call("jvp"):
            rule, results = lookup._replace(warn=self._warn_once).run([*ctx.saved_tensors, *arrays], key)
        return unflatten_tensors(rule.returned, results)

    def trace_forward(self, arguments: Any, specs: Sequence[TensorSpec], flags: tuple[bool, ...]) -> TracedForward:
        """Returns the trace of `forward` for these arguments. Raises if it reads values."""
        return self._forward_lookup(arguments, specs, flags).get()

    def _forward_lookup(
        self, arguments: Any, specs: Sequence[TensorSpec], flags: tuple[bool, ...]
    ) -> TraceLookup[TracedForward]:
        trace = functools.partial(TracedForward, self.definition, arguments, flags)
        name = f"{self.definition.name}.forward"
        state = functools.partial(self.definition.python_state, "forward")
        return TraceLookup(name, self._traced_forwards, arguments, specs, trace, flags, self._warn_once, state)

    def preview(
        self, arguments: FlatTensors, values: tuple[Sequence[Any], Any] | None = None
    ) -> tuple[TracedForward, bool]:
        """Traces `forward` for torch tensors; also returns whether it or its backward draws random numbers.

        If `forward` reads values, `values` are the arrays of the tensors, and the random key.
        """
        args, kwargs = arguments.template
        specs = [tensor_spec(x, self.definition.config.externals.strides_source) for x in arguments.leaves]
        lookup = self._forward_lookup(arguments.template, specs, (True,) * (len(args) + len(kwargs)))
        traced = lookup.get() if values is None else lookup.find(*values)[0]
        return traced, traced.draws or self._draws_in_backward(traced)

    def _draws_in_backward(self, traced: TracedForward) -> bool:
        """Whether backward draws random numbers; False if it cannot be traced, since it may never be called."""
        if traced.is_in_own_backward:
            return False
        try:
            backward = traced.full_backward()
        except EscapedTensorError as error:  # At a later trace, other tensors would be in scope.
            traced.set_backward_error(error)
            return False
        except Exception:
            return False
        return backward is not None and backward.draws

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        """Explains how a call with these arguments is translated if everything in it is differentiated."""
        key = kwargs.pop(self.definition.key_name, None)
        key = jax.random.key(0) if key is None else key
        arguments = flatten_tensors((args, kwargs), is_array_leaf)
        arrays = [as_array(leaf) for leaf in arguments.leaves]
        lookup = self._forward_lookup(
            arguments.template, [self._spec(x) for x in arrays], (True,) * (len(args) + len(kwargs))
        )
        try:
            traced, results = lookup._replace(warn=_do_not_warn).find(arrays, key)
        except TranslationError as error:
            return Explanation(self.definition.name, [ExplainedMethod("forward", None, error)])
        parts = [ExplainedMethod("forward", traced)]
        try:
            backward = self._explained_backward(_ForwardCall(traced, arguments.template, arrays, key, results))
        except TranslationError as error:
            parts.append(ExplainedMethod("backward", None, error))
        else:
            parts += [] if backward is None else [ExplainedMethod("backward", backward)]
        return Explanation(self.definition.name, parts)

    def _explained_backward(self, call: _ForwardCall) -> TracedRule | None:
        """Returns the trace of `backward`, for gradients of ones if it reads values and the arguments have them."""
        try:
            return call.traced.full_backward()
        except DataDependentError:
            lookup = call.traced.full_backward_lookup()
            assert lookup is not None
            arrays: list[Any] = [jax.ShapeDtypeStruct(x.shape, jax_dtype(x.dtype)) for x in lookup.specs]
            if are_concrete(call.arrays):
                saved = call.traced.arrays_to_save("backward", call.arrays, call.slot_values())
                arrays = [*saved, *(jnp.ones(x.shape, x.dtype) for x in arrays)]
            return lookup._replace(warn=_do_not_warn).find(arrays, call.key)[0]

    def _flags(self, names: Sequence[str], flags: Sequence[bool]) -> tuple[bool, ...]:
        """Returns the flags of all inputs except the random key."""
        return tuple(flag for name, flag in zip(names, flags, strict=True) if name != self.definition.key_name)

    def _gradients_of_inputs(self, gradients: list[Any], arguments: Any, names: Sequence[str]) -> list[Any]:
        """Returns the gradients of backward with an entry for the key, and `None` for tensors that are constants."""
        args, kwargs = arguments
        for i, value in enumerate((*args, *kwargs.values())):
            if isinstance(value, torch.Tensor) and i < len(gradients):
                gradients[i] = None
        index = names.index(self.definition.key_name)
        return [*gradients[:index], None, *gradients[index:]] if len(gradients) >= index else gradients

    def _spec(self, array: Any) -> TensorSpec:
        if is_ref(array):
            raise TypeError(
                f"{self.definition.name}: torch code takes arrays and got a jax.Ref. Pass its value, ref[...]"
            )
        if not all(isinstance(length, int) for length in array.shape):
            raise TranslationError(
                f"{self.definition.name}: an argument has the shape {array.shape}, and torch code is traced for one "
                "shape at a time. Export with fixed shapes"
            )
        return TensorSpec(tuple(array.shape), torch_dtype(array.dtype), self.definition.config.externals.strides_source)

    def _warn_about_trace(self, traced: TracedForward) -> None:
        name = self.definition.name
        if not set(traced.mutated) <= {*traced.dirty, *traced.implicit_outputs}:
            self._warn_once(mutation_message(name))
        if traced.uses_double and jax.dtypes.canonicalize_dtype(np.float64) == np.float32:
            self._warn_once(
                f"{name} computes in float64, which JAX supports only with jax.config.update('jax_enable_x64', True). "
                "It runs in float32."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


def _run_backward(lookup: TraceLookup[TracedRule], arrays: Sequence[Any], key: Any) -> tuple[TracedRule, Any]:
    """Returns the trace of `backward` and its results; the trace of the call, if autograd inside the code calls it."""
    call = ACTIVE_BACKWARD.call
    if call is None:
        return lookup.run(arrays, key)
    _, gradients, _ = lookup.template
    arguments = lookup.cache, static_key(gradients), tuple(lookup.specs), lookup.needs_input_grad
    with setting(ACTIVE_BACKWARD, call=None):
        rule = call.rules.get(arguments)
        if rule is not None:
            return rule, rule.run_graph(arrays, key)
        call.check_state()
        rule, results = (lookup._replace(warn=_do_not_warn) if call.is_there else lookup).run(arrays, key)
    if call.is_there and rule.serves_all:
        call.rules[arguments] = rule
    return rule, results


def mutation_message(name: str) -> str:
    """Returns the warning for a Function that mutates its inputs."""
    return (
        f"{name} mutates one of its inputs. JAX arrays are immutable: the caller's array does not change, and only "
        "what forward returns is new."
    )


def _do_not_warn(message: str) -> None:
    pass


def _sum_per_tensor(traced: TracedForward, outputs: Sequence[Any], grad_outputs: Sequence[Any]) -> list[Any]:
    """Sums the gradients of a tensor that is returned more than once into its last position, as torch does."""
    gradients, last = [*grad_outputs], {slot: i for i, slot in enumerate(outputs) if isinstance(slot, Slot)}
    for i, slot in enumerate(outputs):
        if isinstance(slot, Slot) and last[slot] != i and gradients[i] is not None:
            others = gradients[last[slot]]
            gradients[last[slot]] = gradients[i] if others is None else gradients[i] + others
            gradients[i] = jnp.zeros_like(gradients[i]) if traced.materialize_grads else None
    return gradients


def _match_template(
    templates: Sequence[Any], values: Sequence[Any], specs: Sequence[TensorSpec]
) -> tuple[Any, list[Any], list[TensorSpec]]:
    """Flattens gradients or tangents, some of which are `None`, to a template, the arrays in it, and their specs.

    `templates` has the template of each output or input, and `specs` the specs of the tensors in their slots.
    """
    arrays: list[Any] = []
    found: list[TensorSpec] = []

    def new_slot(old: Any, value: Any) -> Slot | None:
        if value is None or not isinstance(old, Slot):
            return None
        arrays.append(value)
        found.append(specs[old.index])
        return Slot(len(arrays) - 1)

    template = tuple(
        None if value is None else jax.tree_util.tree_map(new_slot, template, value, is_leaf=is_none)
        for template, value in zip(templates, values, strict=True)
    )
    return template, arrays, found


# Folded into the key of a call to derive the key of its backward and jvp.
_BACKWARD_KEY_DATA = 0x6261636B


def convert_function_class(
    function: Any, module: str, config: TraceConfig, adapter_type: type[FunctionAdapter] = FunctionAdapter
) -> type[Function]:
    """Returns the jaxfn Function of a torch Function class, with `__module__` set; cached by class and options."""
    ops = config.replacements.all
    replaced = frozenset((id(op), id(replacement)) for op, replacement in ops.items())
    key = id(function), id(config.externals), config.is_nested, replaced, adapter_type
    found = _CLASSES.get(key)
    if found is None:
        definition = Definition(function, config, adapter_type.uses_vmap)
        found = _CLASSES[key] = _make_class(adapter_type(definition), module)
    return found


# A converted class references the torch class and the replacements, so that their identities stay unique.
_CLASSES: weakref.WeakValueDictionary[Any, type[Function]] = weakref.WeakValueDictionary()


def _make_class(adapter: FunctionAdapter, module: str) -> type[Function]:
    definition, function = adapter.definition, adapter.definition.function

    def forward(ctx: FunctionCtx, *args: Any, **kwargs: Any) -> Any:
        return adapter.forward(ctx, args, kwargs)

    def backward(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        return adapter.backward(ctx, grad_outputs)

    def forward_alone(*args: Any, **kwargs: Any) -> Any:
        return adapter.forward(None, args, kwargs)

    method = forward_alone if definition.defines_setup_context else forward
    method.__signature__ = definition.signature  # pyright: ignore[reportFunctionMemberAccess]
    body: dict[str, Any] = {
        "__module__": module,
        "__qualname__": function.__name__,
        "__doc__": function.__doc__,
        "_jaxfn_adapter": adapter,
        "forward": staticmethod(method),
        "generate_vmap_rule": function.generate_vmap_rule,
    }
    if definition.defines_setup_context:
        body["setup_context"] = staticmethod(adapter.setup_context)
    if definition.has_vmap:
        body["vmap"] = staticmethod(adapter.vmap)
    if definition.backward is not None:
        backward.__qualname__ = f"{function.__qualname__}.backward"
        # For its location in reports.
        vars(backward)["__wrapped__"] = definition.backward
        body["backward"] = staticmethod(once_differentiable(backward) if definition.once_differentiable else backward)
    if definition.has_jvp:
        body["jvp"] = staticmethod(adapter.jvp)
    converted = type(function.__name__, (_ConvertedFunction,), body)

    def explain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        form, values = UserMethods(converted).signature.bind(args, kwargs)
        return form.call(lambda *args, **kwargs: adapter.explain(args, kwargs), (), values)

    conversion = Conversion(function, converted.apply, definition.key_name, explain)
    converted._jaxfn_conversion = vars(converted.apply)["_jaxfn_conversion"] = conversion
    return converted
