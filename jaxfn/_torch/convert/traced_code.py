"""The methods of a torch Function, traced for given shapes, and run on JAX arrays."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as torch_tree

from jaxfn._compat import staging_traces, under_tracers
from jaxfn._jaxpr import ArrayIdentity
from jaxfn._torch._compat import takes_boxed_gradients, without_functions
from jaxfn._torch.convert.definition import Definition, TorchCode
from jaxfn._torch.graph.interpreter import TranslatedGraph, Unsupported, unsupported_message
from jaxfn._torch.graph.targets import draws_random_numbers
from jaxfn._torch.trace.leaks import checking_leaks, may_overlap
from jaxfn._torch.trace.scope import trace_scope
from jaxfn._torch.trace.state import ACTIVE, TraceState
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.flatten import Slot, flatten_tensors, slots, unflatten_tensors
from jaxfn._torch.values.trace_cache import LRUCache, static_key, torch_settings_key
from jaxfn._tree import Opaque

# How many traces of `backward` and `jvp` a trace of `forward` keeps: patterns of gradients that are None, and of flags.
_MAX_RULES = 32


class TensorSpec(NamedTuple):
    """The type of a tensor while tracing.

    Attributes:
      shape: its shape.
      dtype: its type.
      permuted: what it has the order of its elements in memory from, where that may be another than its axes say.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_format_source: str | None = None


def tensor_spec(tensor: torch.Tensor, memory_format_source: str | None = None) -> TensorSpec:
    """The `TensorSpec` of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype, memory_format_source)


class TracedCode(Opaque):
    """Code that was traced for some arguments: the graph of its operations, and how JAX runs that.

    Args:
      code: The code.
      method: "forward", "backward", "jvp" or "vmap".
      tracing: The finished trace.
      results: The tensors that the graph returns.

    Attributes:
      graph_module: The graph.
      draws: Whether it draws random numbers.
      uses_double: Whether it computes in float64 or complex128.
      reads_outside: Whether the code read values of tensors from outside, which may change.
      loses_gradients: Whether the code differentiated by tensors from outside.
      functions: The Functions that the code applies, each as it was traced there.
      needs_input_grad: One flag for each input of `forward`, of a Function.
      reads_flags: Whether the code read which inputs need a gradient.
    """

    needs_input_grad: tuple[bool, ...] = ()
    reads_needs_input_grad = False

    def __init__(self, code: TorchCode, method: str, state: TraceState, results: Sequence[torch.Tensor]) -> None:
        self.code = code
        self.method = method
        self.graph_module = state.finish(results)
        nodes = [node for node in self.graph_module.graph.nodes if node.op == "call_function"]
        self.draws = any(draws_random_numbers(node.target) for node in nodes)
        self.uses_double = any(_is_double(node.meta.get("val")) for node in nodes)
        self.reads_external_values = state.recorder.reads_external_values
        self.differentiates_externals = state.recorder.differentiates_externals
        self.functions: list[TracedForward] = list(state.functions)
        translation = TranslatedGraph(self.graph_module, code.config.replacements.operations)
        self._unsupported = translation.unsupported
        self._constants = translation.constants
        # Outside of `jax.jit` the graph is one compiled program; inside, its operations join the program of the caller.
        self._run = jax.jit(translation.run, inline=True)
        self._indices = translation.indices
        self._run_with_extremes = jax.jit(functools.partial(translation.run, returns_extremes=True))

    @property
    def is_translated(self) -> bool:
        """Whether JAX can run the code and the Functions that it applies."""
        return not self.unsupported

    @property
    def unsupported(self) -> list[Unsupported]:
        """The operations that have no translation, also those in the Functions that the code applies."""
        inside = [entry for function in self.functions for entry in function.unsupported]
        return list(dict.fromkeys([*self._unsupported, *inside]))

    def fits(self, needs_input_grad: tuple[bool, ...]) -> bool:
        """Whether the trace is valid for these flags."""
        return not self.reads_needs_input_grad or self.needs_input_grad == needs_input_grad

    def run_graph(self, arrays: Sequence[Any], key: Any) -> Sequence[Any]:
        """Computes the graph's results for JAX arrays.

        Raises:
          TranslationError: An operation has no translation; or the graph draws random numbers, and `key` is `None`.
          IndexError: A concrete index is out of range, outside of `jax.jit`.
        """
        where = f"{self.code.name}.{self.method}"
        if self._unsupported:
            raise TranslationError(f"{where}: {unsupported_message(self.unsupported)}")
        if self.draws and key is None:
            raise TranslationError(
                f"{where} draws random numbers, and on JAX those come from an explicit key: "
                f"{self.code.call}(..., {self.code.key_name}=jax.random.key(0)), another key for each call"
            )
        try:
            if not self._indices or staging_traces():
                return self._run(arrays, key, self._constants())
            results, extremes = self._run_with_extremes(arrays, key, self._constants())
            for i, (smallest, largest) in extremes.items():
                indices = self._indices[i]
                for index in (under_tracers(smallest).min(), under_tracers(largest).max()):
                    if not indices.low <= index < indices.size:
                        raise IndexError(
                            f"{where}: index {index} is out of range for a dimension of size {indices.size}, at "
                            f"{indices.line}"
                        )
            return results
        except TranslationError as error:
            raise error if self.code.name in str(error) else TranslationError(f"{where}: {error}") from error


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128)


class TorchContext(torch.autograd.function.FunctionCtx):
    """The ctx that torch code sees while it is being traced: torch's, for one trace of `forward`, `backward` or `jvp`.

    What the methods of the base class were given (`to_save`, `saved_for_forward`, `non_differentiable`,
    `dirty_tensors`, `materialize_grads`) they set as attributes of those names, as they do in torch.

    Args:
      needs_input_grad: whether each input is being differentiated.
      saved: what `saved_tensors` gives.
    """

    def __init__(
        self,
        needs_input_grad: Sequence[bool],
        saved: Sequence[torch.Tensor | None] = (),
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.jaxfn = _CtxState(tuple(needs_input_grad), tuple(saved), on_read)
        self.to_save: tuple[torch.Tensor | None, ...] = ()
        self.saved_for_forward: tuple[torch.Tensor | None, ...] | None = None
        self.dirty_tensors: tuple[torch.Tensor, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        self.jaxfn.on_read()
        return self.jaxfn.needs_input_grad

    @needs_input_grad.setter
    def needs_input_grad(self, flags: tuple[bool, ...]) -> None:
        """The Function that torch makes of a custom operation hides an argument of its own meanwhile."""
        self.jaxfn.needs_input_grad = flags

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.jaxfn.saved

    @property
    def saved_variables(self) -> tuple[torch.Tensor | None, ...]:
        """The old name of `saved_tensors`."""
        return self.jaxfn.saved

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the code itself assigned."""
        return {name: value for name, value in vars(self).items() if name not in _CTX_ATTRIBUTES}

    def after_forward(self, method: str) -> TorchContext:
        """The ctx as `backward` or `jvp` sees it, with all that `forward` left on it."""
        self.jaxfn.saved = self.to_save
        if method == "jvp" and self.saved_for_forward is not None:
            self.jaxfn.saved = self.saved_for_forward
        return self

    def mark_shared_storage(self, *pairs: Any) -> None:
        """Old code calls it; it has had no effect in torch for years."""


@dataclasses.dataclass
class _CtxState:
    """The part of a ctx that jaxfn uses, apart from what the code assigns to it."""

    needs_input_grad: tuple[bool, ...]
    saved: tuple[torch.Tensor | None, ...]
    on_read: Callable[[], None]


_CTX_ATTRIBUTES = ("jaxfn", "to_save", "saved_for_forward", "dirty_tensors", "non_differentiable", "materialize_grads")


class SlotSource(NamedTuple):
    """The source of a slot's value after `forward` ran.

    Attributes:
      kind: "input", "result" (of the graph), or "constant" (a tensor that depends on no input).
      place: which input or result.
    """

    kind: str
    position: int


class StorageAlias(NamedTuple):
    """A slot that lies in the memory of an input or output.

    Attributes:
      slot: the slot.
      kind: "input" or "output".
      place: which input, or the slot of the output.
    """

    slot: int
    kind: str
    position: int


class TracedForward(TracedCode):
    """`forward`, traced.

    Args:
      definition: the Function.
      arguments: the template of `(args, kwargs)`.
      specs: of the tensors in its slots.
      needs_input_grad: one for each input of `forward`.

    Attributes:
      output: the template of what `forward` returned.
      kept: the slots of what it kept for "backward" and for "jvp", in the order in which those get their values.
      non_differentiable: the slots marked so.
      dirty: the inputs marked so, and the slot of each that was returned.
      written: the inputs that it wrote to.
      handed_on: those of them that it did not mark, where the code that applies it is to have what was written: the
        last outputs, which the user's code knows nothing of.
      sharing: which slots lie in the memory of inputs and outputs, where other code applies it.
      returns_one: whether the user's code returned an output by itself, and not in a tuple.
      materialize_grads: as it set it.
      runs_again: whether `backward` and `jvp` run it again, on its inputs: it kept tensors with autograd's graph of how
        they were computed, for autograd to go back through.
    """

    def __init__(
        self,
        definition: Definition,
        arguments: Any,
        specs: Sequence[TensorSpec],
        needs_input_grad: tuple[bool, ...],
    ) -> None:
        self.definition = definition
        self.needs_input_grad = needs_input_grad
        self.arguments = arguments
        # For each tensor, which input of forward it belongs to.
        args, kwargs = arguments
        self._input_indices = [i for i, value in enumerate((*args, *kwargs.values())) for _ in slots(value)]
        self.input_specs = specs
        self._rules = LRUCache["TracedRule"](_MAX_RULES)
        state = TraceState(definition.name, definition.config)
        ctx = TorchContext(needs_input_grad, on_read=state.note_flags_read)
        with trace_scope(state):
            inputs = self._new_inputs(state, needs_input_grad)
            output = self._run_code(ctx, inputs)
            self.mutated = sorted(state.mutated_inputs())
            dirty = [i for i, x in enumerate(inputs) if _is_among(x, ctx.dirty_tensors)]
            self.implicit_outputs = [i for i in self.mutated if definition.config.is_nested and i not in dirty]
            self.has_single_output = not isinstance(output, tuple)
            new_values = [inputs[i].clone() for i in self.implicit_outputs]
            ctx.non_differentiable = (*ctx.non_differentiable, *new_values)
            unmarked = [x for i, x in enumerate(inputs) if i not in dirty]
            if not self.has_single_output and any(
                _is_among(x, output[:i]) for i, x in enumerate(output) if _is_among(x, unmarked)
            ):
                # torch returns a view of it for each place.
                output = tuple(x.view_as(x) if _is_among(x, unmarked) else x for x in output)
            if new_values:
                output = (*((output,) if self.has_single_output else output), *new_values)
            for_forward = ctx.to_save if ctx.saved_for_forward is None else ctx.saved_for_forward
            returned_flat = flatten_tensors((output, ctx.to_save, for_forward, ctx.attributes), deduplicate=True)
            with without_functions():
                self.reruns_forward = not all(
                    returned_flat.leaves[slot].is_leaf for slot in slots(returned_flat.template[1:])
                )
            # Also after it was written to, an input is that input.
            places = {id(x): i for i, x in enumerate(inputs)}
            self._input_of = {slot: places[id(x)] for slot, x in enumerate(returned_flat.leaves) if id(x) in places}
            values = [state.lower(tensor) for tensor in returned_flat.leaves]
            state.check_saved_arguments()
            places = sorted(set(slots(returned_flat.template[0])))
            tensors = [("input", i, x) for i, x in enumerate(inputs)] + [
                ("output", i, returned_flat.leaves[i]) for i in places
            ]
            self.aliases = [
                StorageAlias(slot, kind, i)
                for slot, x in enumerate(returned_flat.leaves)
                for kind, i, other in tensors
                if definition.config.is_nested and may_overlap(x, other)
            ]
        self.backward_error: TranslationError | None = None  # why backward is not traced
        self.output, to_save, for_forward, self._attributes = returned_flat.template
        self._saved = {"backward": to_save, "jvp": for_forward}
        saved = f"a tensor that {definition.name}.forward keeps or returns"
        self.specs = [tensor_spec(value, state.recorder.memory_format_of(value, saved)) for value in values]
        self.reads_needs_input_grad = state.reads_needs_input_grad
        self.materialize_grads = ctx.materialize_grads
        self.non_differentiable = [
            i for i, x in enumerate(returned_flat.leaves) if _is_among(x, ctx.non_differentiable)
        ]
        returned = {id(x): i for i, x in enumerate(returned_flat.leaves)}
        self.dirty = {i: returned.get(id(inputs[i])) for i in dirty}

        in_output = set(slots(self.output))
        self._constant_slots: dict[int, torch.Tensor] = {}
        self.sources: list[SlotSource] = []
        results: list[torch.Tensor] = []
        for slot, value in enumerate(values):
            index = state.recorder.input_index(value)
            if index is not None:
                self.sources.append(SlotSource("input", index))
                self._input_of[slot] = index
            elif slot not in in_output and state.recorder.is_constant(value):
                self.sources.append(SlotSource("constant", slot))
                self._constant_slots[slot] = value
            else:
                self.sources.append(SlotSource("result", len(results)))
                results.append(value)
        self.saved_slots = {
            method: [slot for slot in sorted(set(slots((saved, self._attributes)))) if slot not in self._constant_slots]
            for method, saved in self._saved.items()
        }
        self._outputs = in_output
        super().__init__(definition, "forward", state, results)
        if self.reruns_forward and self.draws:
            raise TranslationError(
                f"{definition.name}.forward draws random numbers and keeps tensors with autograd's graph on ctx, for "
                "which it would have to run again in backward. Draw outside, and pass the numbers as an argument"
            )

    def _new_inputs(self, state: TraceState, needs_input_grad: Sequence[bool]) -> list[torch.Tensor]:
        return [
            state.add_input(*spec, requires_grad=needs_input_grad[owner])
            for spec, owner in zip(self.input_specs, self._input_indices, strict=True)
        ]

    def _run_code(self, ctx: TorchContext, inputs: Sequence[torch.Tensor]) -> Any:
        """Runs the user's code on tensors; returns its output."""
        function = self.definition.function
        args, kwargs = unflatten_tensors(self.arguments, inputs)
        if not self.definition.has_setup_context:
            return function.forward(ctx, *args, **kwargs)
        output = function.forward(*args, **kwargs)
        function.setup_context(ctx, (*args, *kwargs.values()), output)
        return output

    def run(self, inputs: Sequence[Any], key: Any) -> dict[int, Any]:
        """The value of each slot that has one on JAX."""
        # What JAX gives for a clone is the array itself. A result that is an input would count as that input where it
        # is saved, and one that is an output would be marked, or differentiated twice, where that one is.
        results = self.run_graph(inputs, key)
        identity = ArrayIdentity(inputs)
        others = set(map(identity.key, inputs))
        values: dict[int, Any] = {}
        for slot, source in enumerate(self.sources):  # those of the outputs come first
            if source.kind == "input":
                values[slot] = inputs[source.position]
            elif source.kind == "result":
                value = results[source.position]
                values[slot] = jnp.array(value, copy=True) if identity.key(value) in others else value
                others |= {identity.key(values[slot])} if slot in self._outputs else set()
        return values

    def arrays_to_save(self, method: str, inputs: Sequence[Any], values: Mapping[int, Any]) -> list[Any]:
        """The arrays that "backward" or "jvp" needs, of the inputs and the slots' values."""
        return list(inputs) if self.reruns_forward else [values[slot] for slot in self.saved_slots[method]]

    def values_of_inputs_and_outputs(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[int, Any]:
        """The value of each slot that is an input or one of the outputs, which are given."""
        of_inputs = {i: inputs[source.position] for i, source in enumerate(self.sources) if source.kind == "input"}
        return of_inputs | dict(zip(slots(self.output), outputs, strict=True))

    def trace_rule(
        self, method: str, given: Any, specs: Sequence[TensorSpec], needs_input_grad: tuple[bool, ...]
    ) -> TracedRule:
        """`backward` or `jvp`, traced for a template of gradients or tangents."""
        if self.backward_error is not None and method == "backward":
            raise self.backward_error
        return get_or_trace(
            f"{self.definition.name}.{method}",
            self._rules,
            (method, given),
            specs,
            lambda specs: TracedRule(self, method, given, specs, needs_input_grad),
            needs_input_grad,
        )

    @property
    def is_in_own_backward(self) -> bool:
        """Whether `whole_backward` is tracing the `backward` of the same Function, which applies the Function again.

        The `backward` of this call is not traced in advance then: it contains another such call, and so on without end.
        """
        return self.definition.original in ACTIVE.traced_backwards

    def full_backward(self) -> TracedRule | None:
        """`backward` traced for all gradients, where there is one."""
        if self.definition.backward is None:
            return None
        outputs = self.output if isinstance(self.output, tuple) else (self.output,)
        given = flatten_tensors(torch_tree.tree_map(_slot_or_none, outputs), lambda leaf: isinstance(leaf, Slot))
        specs = [self.specs[slot.index] for slot in given.leaves]
        before = ACTIVE.traced_backwards
        ACTIVE.traced_backwards = (*before, self.definition.original)
        try:
            return self.trace_rule("backward", given.template, specs, (True,) * len(self.needs_input_grad))
        finally:
            ACTIVE.traced_backwards = before

    def used_inputs(self) -> set[int]:
        """Returns the inputs that `forward` or `backward` computes with, writes to, or gives a gradient.

        All of them, if `is_inside_own_backward`.
        """
        if self.is_in_own_backward:
            return set(range(len(self.input_specs)))
        placeholders = [node for node in self.graph_module.graph.nodes if node.op == "placeholder"]
        used = (
            {i for i, node in enumerate(placeholders) if node.users}
            | set(self.mutated)
            | self.inputs_read_by_backward()
        )
        backward = self.full_backward()
        if backward is not None:
            with_gradient = {i for i, gradient in enumerate(backward.returned) if slots(gradient)}
            used |= {i for i, owner in enumerate(self._input_indices) if owner in with_gradient}
        return used

    def inputs_read_by_backward(self) -> set[int]:
        """Returns the inputs, as they were when `forward` was called, that `backward` computes with."""
        read = self._slots_read_by_backward()
        return read if self.reruns_forward else {self._input_of[slot] for slot in read if slot in self._input_of}

    def aliases_read_by_backward(self) -> list[StorageAlias]:
        """Returns the part of `sharing` that `backward` computes with."""
        read = self._slots_read_by_backward()
        return [x for x in self.aliases if (x.slot in read if not self.reruns_forward else x.kind == "input")]

    def _slots_read_by_backward(self) -> set[int]:
        """The slots that `backward` computes with; the inputs, where it runs `forward` again.

        All that `forward` keeps, if `is_inside_own_backward`.
        """
        saved = range(len(self.input_specs)) if self.reruns_forward else self.saved_slots["backward"]
        if self.is_in_own_backward:
            return set(saved)
        backward = self.full_backward()
        if backward is None:
            return set()
        of_backward = [node for node in backward.graph_module.graph.nodes if node.op == "placeholder"]
        return {i for i, node in zip(saved, of_backward, strict=False) if node.users}

    def mutated_inputs_of(self, method: str, state: TraceState) -> set[int]:
        """Returns the inputs that `ctx` gave to `backward` or `jvp` in this trace, and that were written to there."""
        mutated = state.mutated_inputs()
        saved = (
            range(len(self.input_specs))
            if self.reruns_forward
            else [self._input_of.get(i) for i in self.saved_slots[method]]
        )
        return {position for i, position in enumerate(saved) if position is not None and i in mutated}

    def make_ctx(self, method: str, state: TraceState, needs_input_grad: tuple[bool, ...]) -> TorchContext:
        """The ctx that `backward` or `jvp` gets in a new trace, whose first inputs are those of `to_keep`."""
        if self.reruns_forward:
            ctx = TorchContext(needs_input_grad, on_read=state.note_flags_read)
            self._run_code(ctx, self._new_inputs(state, needs_input_grad))
            return ctx.after_forward(method)
        tensors = {slot: state.add_constant(value) for slot, value in self._constant_slots.items()}
        for slot in self.saved_slots[method]:
            # What was computed without autograd, or detached, requires no gradient.
            requires_grad = any(needs_input_grad) if slot in self._outputs else None
            if slot in self._input_of:
                requires_grad = needs_input_grad[self._input_indices[self._input_of[slot]]]
            tensors[slot] = state.add_input(*self.specs[slot], requires_grad=requires_grad)
        ctx = TorchContext(
            needs_input_grad, unflatten_tensors(self._saved[method], tensors), on_read=state.note_flags_read
        )
        vars(ctx).update(unflatten_tensors(self._attributes, tensors))
        return ctx


class TracedRule(TracedCode):
    """`backward` or `jvp`, traced.

    Args:
      forward: the trace whose derivative it is.
      method: "backward" or "jvp".
      given: the template of its arguments.
      specs: of the tensors in its slots.
      needs_input_grad: one for each input of `forward`.

    Attributes:
      returned: the template of what it returned: gradients, one for each input and perhaps more, or tangents.
      written: the inputs of `forward` that it wrote to, of those that were kept.
    """

    def __init__(
        self,
        forward: TracedForward,
        method: str,
        given: Any,
        specs: Sequence[TensorSpec],
        needs_input_grad: tuple[bool, ...],
    ) -> None:
        definition = forward.definition
        function = definition.function.jvp if method == "jvp" else definition.backward
        assert function is not None
        self.needs_input_grad = needs_input_grad
        state = TraceState(definition.name, definition.config, is_differentiated=True)
        with trace_scope(state):
            ctx = forward.make_ctx(method, state, needs_input_grad)
            state.first_gradient_input = len(
                forward.input_specs if forward.reruns_forward else forward.saved_slots[method]
            )
            order = definition.config.externals.gradient_memory_format_source
            arguments = unflatten_tensors(
                given, [state.add_input(x.shape, x.dtype, x.memory_format_source or order) for x in specs]
            )
            num_added = len(forward.implicit_outputs)
            if method == "backward":
                arguments = arguments[: len(arguments) - num_added]
            with definition.config.externals.backward_guard(f"{definition.name}.{method}"):
                if method == "backward" and takes_boxed_gradients(definition.function):
                    returned = function(ctx, list(arguments))
                else:
                    returned = function(ctx, *arguments)
            returned = returned if isinstance(returned, tuple) else (returned,)
            returned_flat = flatten_tensors((*returned, *[None] * num_added) if method == "jvp" else returned)
            values = [state.lower(tensor) for tensor in returned_flat.leaves]
            self.mutated = forward.mutated_inputs_of(method, state)
            state.check_saved_arguments()
        self.returned: Any = returned_flat.template
        self.reads_needs_input_grad = state.reads_needs_input_grad
        super().__init__(definition, method, state, values)

    def run(self, saved: Sequence[Any], given: Sequence[Any], key: Any) -> tuple[Any, ...]:
        """Runs the rule on JAX arrays."""
        return unflatten_tensors(self.returned, self.run_graph([*saved, *given], key))


class TracedVmap(TracedCode):
    """`vmap`, traced.

    Args:
      definition: the Function.
      arguments: the template of its inputs.
      specs: of the tensors in its slots, their batch included.
      info: what `vmap` is told of the batch.
      in_dims: which axis of each input is the batch.
    """

    def __init__(
        self, definition: Definition, arguments: Any, specs: Sequence[TensorSpec], info: Any, in_dims: tuple[Any, ...]
    ) -> None:
        state = TraceState(definition.name, definition.config)
        with trace_scope(state):
            inputs = unflatten_tensors(arguments, [state.add_input(*spec, requires_grad=True) for spec in specs])
            returned_flat = flatten_tensors(definition.function.vmap(info, in_dims, *inputs))
            values = [state.lower(tensor) for tensor in returned_flat.leaves]
            state.check_saved_arguments()
        self._returned: Any = returned_flat.template
        super().__init__(definition, "vmap", state, values)

    def run(self, inputs: Sequence[Any], key: Any) -> Any:
        """Runs the batching rule on JAX arrays; returns outputs and out_dims."""
        return unflatten_tensors(self._returned, self.run_graph(inputs, key))


_T = TypeVar("_T", bound=TracedCode)


def get_or_trace(
    owner: str,
    cache: LRUCache[_T],
    template: Any,
    specs: Sequence[TensorSpec],
    trace: Callable[[Sequence[TensorSpec]], _T],
    needs_input_grad: tuple[bool, ...] = (),
) -> _T:
    """A trace for these arguments, an earlier one where there is one; kept, where that is safe.

    JAX's integers have 32 bits by default. Where torch or the code wants 64, they are traced as if they had.
    """
    try:
        key = static_key(template), tuple(specs), torch_settings_key()
    except TypeError:
        key = None
    found = None if key is None else cache.get(key, lambda trace: trace.fits(needs_input_grad))
    if found is None:
        try:
            with checking_leaks(owner):
                found = trace(specs)
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError) as error:
            int64_specs = [x._replace(dtype=torch.int64) if x.dtype == torch.int32 else x for x in specs]
            if (
                isinstance(error, TranslationError)
                or int64_specs == specs
                or not re.search("(?i)int64|long", str(error))
            ):
                raise
            with checking_leaks(owner):
                found = trace(int64_specs)
        if key is not None and not found.reads_external_values:
            cache.put(key, found)
    return found


def _slot_or_none(leaf: Any) -> Slot | None:
    return leaf if isinstance(leaf, Slot) else None


def _is_among(value: object, values: Sequence[object]) -> bool:
    return any(value is other for other in values)
