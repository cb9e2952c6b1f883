"""Calls of torch Functions inside traced code. Each is recorded as one node, which calls the converted Function."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jaxfn._function import Function
from jaxfn._primitives import DeferredError, guard
from jaxfn._torch.convert.function_class import adapter_of, convert_function_class
from jaxfn._torch.convert.lifting import ORIGINAL, LiftedCall
from jaxfn._torch.convert.traced_code import TracedForward
from jaxfn._torch.graph.reads import CallValues
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.detach import link_storage
from jaxfn._torch.trace.jax_function_node import JaxFunctionNode, draw_key, wrap_key
from jaxfn._torch.trace.leaks import may_overlap
from jaxfn._torch.trace.state import ModuleTensors, NestedApply, TraceState, outside_trace
from jaxfn._torch.values.arrays import torch_dtype
from jaxfn._torch.values.errors import DataDependentError, EscapedTensorError, TranslationError
from jaxfn._torch.values.flatten import FlatTensors, flatten_tensors, slots, unflatten_tensors
from jaxfn._tree import is_array_leaf


class _Preview(NamedTuple):
    """A nested call before it is recorded.

    Attributes:
      converted: The converted Function.
      arguments: Its arguments.
      key: The tensor of its random key, if there is one.
      traced: The trace of its `forward`.
      draws: Whether it draws random numbers.
    """

    converted: type[Function]
    arguments: FlatTensors
    key: torch.Tensor | None
    traced: TracedForward
    draws: bool


def _preview(state: TraceState, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Preview:
    arguments = flatten_tensors((tuple(args), dict(kwargs)), shares_containers=True)
    externals = state.recorder.nested_externals([*map(state.lower, arguments.leaves)], function.__name__)
    converted = convert_function_class(function, __name__, state.config._replace(externals=externals, is_nested=True))
    try:
        return _Preview(converted, arguments, None, *adapter_of(converted).preview(arguments))
    except DataDependentError as error:
        if not isinstance(state.recorder.answerer, CallValues):
            state.recorder.unanswered = error
            raise
    key = draw_key(state) if state.recorder.answerer.has_key else None
    arrays = state.recorder.values_of([state.lower(x) for x in (*arguments.leaves, *([] if key is None else [key]))])
    values = arrays[: len(arguments.leaves)], None if key is None else wrap_key(arrays[-1])
    with outside_trace():
        return _Preview(converted, arguments, key, *adapter_of(converted).preview(arguments, values))


def can_repeat(state: TraceState, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a second call would return equal values: the Function draws no random numbers and mutates no argument."""
    try:
        *_, traced, draws = _preview(state, function, args, kwargs)
    except EscapedTensorError:  # It uses tensors of a module, and may mutate them.
        return False
    return not draws and not traced.dirty and not traced.mutated


def _apply_lifted(state: TraceState, module_tensors: ModuleTensors, function: Any, args: Sequence[Any]) -> Any:
    """Applies a Function that captures a module's tensors, as one that takes them as arguments."""
    lifted_all = LiftedCall(function, args, module_tensors, [*module_tensors.tensors])
    _, arguments, _, traced, _ = _preview(state, lifted_all.function, lifted_all.args, {})
    indices = {id(x): i for i, x in enumerate(arguments.leaves)}
    used, mutated = traced.used_inputs(), set(traced.mutated)
    mutated_in_backward, tensors = lifted_all.mutated or (), module_tensors.tensors
    names = [name for name, x in tensors.items() if indices[id(x)] in used or name in mutated_in_backward]
    mutated_in_forward = [name for name in names if indices[id(tensors[name])] in mutated]
    lifted = LiftedCall(function, args, module_tensors, names, mutated_in_forward)
    returned = _record(state, _preview(state, lifted.function, lifted.args, {}))
    read = traced.inputs_read_by_backward()
    state.backward_reads += [
        (f"{function.__name__}.backward", name, state.recorder.node(state.lower(x)))
        for name, x in tensors.items()
        if indices[id(x)] in read and name not in mutated_in_backward  # Those it only reads to update them.
    ]
    return returned


def record_nested_apply(state: TraceState, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Applies a torch Function in the code being traced, as one call of its converted Function."""
    module_tensors = None if kwargs else state.module_tensors
    try:
        preview = _preview(state, function, args, kwargs)
    except EscapedTensorError:
        if module_tensors is None:
            raise
        return _apply_lifted(state, module_tensors, function, args)
    if preview.traced.backward_error is not None and module_tensors is not None:
        try:
            return _apply_lifted(state, module_tensors, function, args)
        except EscapedTensorError:  # It captures other tensors: a gradient raises.
            pass
        except TranslationError as error:
            preview.traced.set_backward_error(error)
    return _record(state, preview)


def _record(state: TraceState, preview: _Preview) -> Any:
    """Records the call, and returns the Function's outputs."""
    converted, arguments, key, traced, draws = preview
    adapter = adapter_of(converted)
    pinned = adapter.pinned_to(traced)
    state.functions.append(traced)
    state.recorder.reads_external_values |= traced.reads_external_values
    output_slots = slots(traced.output)
    template = arguments.template  # The graph references the template only, and not the arguments.
    deferred_errors: list[DeferredError] = []

    def apply_to_arrays(*arrays: Any) -> list[Any]:
        options = {adapter.definition.key_name: wrap_key(arrays[-1])} if draws else {}
        for error in deferred_errors:
            arrays = tuple(guard(arrays, (), error))
        args, kwargs = unflatten_tensors(template, arrays)
        return flatten_tensors(pinned.apply(*args, **kwargs, **options), is_array_leaf).leaves

    specs = [traced.specs[slot] for slot in output_slots]
    marked = [i for i, slot in enumerate(output_slots) if slot in traced.non_differentiable]
    shapes = [(x.shape, x.dtype) for x in specs]
    node = JaxFunctionNode(state, apply_to_arrays, adapter.definition.name, shapes, marked, traced.backward_state)
    mutated = {*traced.dirty, *traced.mutated}
    _check_aliased_arguments(state, adapter.definition.name, arguments.leaves, mutated)
    # Copies, since autograd inside the code differentiates the call at the values before the mutation.
    operands = [x.clone() if i in mutated else x for i, x in enumerate(arguments.leaves)]
    if draws:
        operands.append(draw_key(state) if key is None else key)
    results = node(*operands)
    if traced.reads:
        shapes = [(x.answer.shape, torch_dtype(x.answer.dtype)) for x in traced.reads]

        def read(*arrays: Any) -> list[Any]:
            return traced.compute_reads(arrays, wrap_key(arrays[-1]) if draws else None)

        read_tensors = JaxFunctionNode(state, read, f"{adapter.definition.name}_reads", shapes).record(operands)
        state.recorder.add_reads([*map(state.lower, read_tensors)], traced.reads)
    for tensor, spec in zip(results, specs, strict=True):
        if spec.strides_source is not None:
            state.recorder.record_strides(state.lower(tensor), spec.strides_source)
    outputs = dict(zip(output_slots, results, strict=True))
    for index, slot in traced.dirty.items():
        if slot is None:
            raise TranslationError(
                f"{adapter.definition.name}, applied inside {state.name}, marks an input dirty and does not return it"
            )
        outputs[slot] = arguments.leaves[index].copy_(outputs[slot])
        if not torch.is_grad_enabled():  # With gradients off, the mutated tensor has its old derivative.
            outputs[slot] = outputs[slot].detach()
    returned = unflatten_tensors(traced.output, outputs)
    if traced.implicit_outputs:
        returned, new_values = returned[: -len(traced.implicit_outputs)], returned[-len(traced.implicit_outputs) :]
        with torch.no_grad():  # As in `forward`, the mutated tensor has its old derivative.
            for index, value in zip(traced.implicit_outputs, new_values, strict=True):
                arguments.leaves[index].copy_(value)
        returned = returned[0] if traced.has_single_output else returned
    tensors = {("input", i): x for i, x in enumerate(arguments.leaves)}
    tensors |= {("output", slot): x for slot, x in outputs.items()}
    for slot, kind, i in traced.aliases:
        if slot in outputs and ((kind == "input" and i not in traced.dirty) or (kind == "output" and slot < i)):
            what = "an argument of it, or a part of one" if kind == "input" else "another of its outputs"
            reason = f"an output of {adapter.definition.name} and {what}"
            hint = "Copy one of them first: `tensor.clone()`"
            link_storage(state.recorder, outputs[slot], tensors[kind, i], reason, hint)
    _check_saved_tensors(state, traced, tensors, deferred_errors)
    return returned


def _check_saved_tensors(
    state: TraceState,
    traced: TracedForward,
    tensors: Mapping[tuple[str, int], torch.Tensor],
    deferred_errors: list[DeferredError],
) -> None:
    """Makes differentiation of the call raise where torch and JAX would disagree about a tensor on ctx.

    # Note: a tensor that is an attribute

        forward    ctx.state = state      In torch, `backward` reads the buffer's new value from `ctx.state`; on JAX it
                   return x * state       reads the value at the time of the call. If it mutates `ctx.state`, torch
        later      state.add_(1)          updates the buffer; on JAX the update is lost. (For tensors that were saved by
                                          `save_for_backward`, torch itself raises.)
    """
    if traced.backward_error is not None:
        return
    try:
        backward = None if traced.is_in_own_backward else traced.full_backward()
        aliases = traced.aliases_read_by_backward()
    except Exception:  # Calling `backward` raises this error too.
        return
    name, outer = traced.definition.name, state.name

    def reject(kind: str, i: int, what: str) -> None:
        message = (
            f"{name}.backward {what} {kind} {i} of the call in {outer}, which forward stored on ctx. In torch that "
            "tensor shares its storage with the caller's; JAX arrays share none. Store a copy, `tensor.clone()`"
        )
        deferred_errors.append(DeferredError(TranslationError, message))

    for _, kind, i in aliases:
        report = functools.partial(reject, kind, i, "uses the new value, after an in-place update, of")
        tensor = tensors[kind, i]
        state.saved_arguments.append((tensor, state.recorder.node(state.lower(tensor)), report))
    module_tensors = [*state.module_tensors.tensors.values()] if state.module_tensors is not None else []
    is_lifted = hasattr(traced.definition.function, ORIGINAL)  # Then `lifting.py` has checked what it mutates.
    for i in backward.mutated if backward is not None and not is_lifted else ():
        if any(may_overlap(tensors["input", i], x) for x in module_tensors):
            reject("input", i, "mutates")


def _check_aliased_arguments(
    state: TraceState, name: str, tensors: Sequence[torch.Tensor], mutated: Collection[int]
) -> None:
    """Raises if the Function mutates an argument that shares storage with another argument."""
    for i in mutated:
        for j, other in enumerate(tensors):
            if i != j and may_overlap(tensors[i], other):
                raise TranslationError(
                    f"{name}, applied inside {state.name}, mutates its tensor argument {i}, which shares its storage "
                    f"with tensor argument {j}. JAX arrays share none. Pass a copy: `.clone()`{source_line()}"
                )


NESTED_APPLY = NestedApply(record_nested_apply, can_repeat)
