"""Traces of the methods of a torch Function for argument shapes, and their execution on JAX arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
import warnings
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from torch.utils import _pytree as torch_tree

from jaxfn._jaxpr import ArrayIdentity
from jaxfn._primitives import DeferredError
from jaxfn._torch._compat import takes_boxed_gradients, without_functions
from jaxfn._torch.convert.definition import Definition, TorchCode
from jaxfn._torch.graph.interpreter import TranslatedGraph, Unsupported, unsupported_message
from jaxfn._torch.graph.numbers import TracedNumber
from jaxfn._torch.graph.reads import (
    NO_VALUES,
    Answerer,
    CallValues,
    are_concrete,
    first_answers,
    same_bits,
    to_bytes,
)
from jaxfn._torch.graph.source_lines import format_line
from jaxfn._torch.graph.targets import draws_random_numbers
from jaxfn._torch.trace.leaks import checking_leaks, may_overlap
from jaxfn._torch.trace.scope import trace_scope
from jaxfn._torch.trace.state import ACTIVE, OwnTensor, TraceState, outside_trace, own_tensor
from jaxfn._torch.values.arrays import jax_dtype, torch_dtype
from jaxfn._torch.values.errors import DataDependentError, EscapedNumberError, SelectionError, TranslationError
from jaxfn._torch.values.flatten import (
    Slot,
    flatten_tensors,
    replace_containers,
    shared_containers,
    slots,
    unflatten_tensors,
)
from jaxfn._torch.values.scopes import setting
from jaxfn._torch.values.trace_cache import LRUCache, static_key, torch_settings
from jaxfn._traces import innermost, staging_trace

_UNDER_JIT = Answerer(
    "Call it outside jax.jit, where it has values; let torch run it, by from_torch(..., fallback='callback'); or write "
    "this part as a JAX function, with jax.lax.cond, while_loop or jax.numpy.where, that ops= names",
    skips_checks=True,
)
# The number of traces for equal arguments that differ in what the code read of the values of tensors.
_MAX_COURSES = 32
# The number of traces of `backward` and `jvp` that are cached for each trace of `forward`: one for each pattern of
# gradients that are None, and of flags.
_MAX_RULES = 32


class TensorSpec(NamedTuple):
    """The type of a traced tensor.

    Attributes:
      strides_source: Where its strides may come from, if they may not be contiguous.
      own: The parameter or buffer of a module that it represents, if any.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides_source: str | None = None
    own: OwnTensor | None = None


def tensor_spec(tensor: torch.Tensor, strides_source: str | None = None) -> TensorSpec:
    """Returns the spec of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype, strides_source, own_tensor(tensor))


class TracedCode:
    """Code that was traced for some arguments: the graph of its operations, and how JAX runs that.

    Args:
      code: The code.
      method: "forward", "backward", "jvp" or "vmap".
      state: The finished trace.
      results: The tensors that the graph returns.

    Attributes:
      recorded: The graph.
      uses_double: Whether it computes in float64 or complex128.
      reads_external_values: Whether the code read values of external tensors, which may change.
      reads_identity: Whether the code, of a nested Function, read the `id` or the hash of a module's tensor.
      differentiates_externals: Whether the code computed gradients of external tensors.
      differentiates_functions: Whether autograd inside the code differentiated a Function.
      externals: The external tensors that the code, or a Function inside, reads.
      functions: The Functions that the code applies, each as it was traced there.
      reads: What the code read of the values of traced tensors. The trace is valid for arrays that give equal values.
      skipped: The checks of values that the trace does not make.
      knows_sizes: Whether `x[mask]` is a tensor, and not a `Selection`.
      reads_numbers: Whether `item()` reads a value, and does not return a traced number.
      numbers: The entries for `explain` of the numbers that the code computes with and does not read.
      needs_input_grad: One flag for each input of `forward`, of a Function.
      reads_needs_input_grad: Whether the code read those flags.
    """

    needs_input_grad: tuple[bool, ...] = ()
    reads_needs_input_grad = False

    def __init__(self, code: TorchCode, method: str, state: TraceState, results: Sequence[torch.Tensor]) -> None:
        self.code = code
        self.method = method
        self._num_results = len(results)
        self.recorded = state.finish(results)
        nodes = [node for node in self.recorded.graph.nodes if node.op == "call_function"]
        self.draws = any(draws_random_numbers(node.target) for node in nodes)
        self.uses_double = any(_is_double(node.meta.get("val")) for node in nodes)
        self.reads_external_values = state.recorder.reads_external_values
        self.reads_identity = state.reads_identity and code.config.is_nested
        self.differentiates_externals = state.recorder.differentiates_externals
        self.functions: list[TracedForward] = list(state.functions)
        self.reads = state.recorder.reads
        self.skipped = state.recorder.skipped
        self.knows_sizes = state.recorder.answerer.knows_sizes
        self.differentiates_functions = state.differentiates_functions or any(
            x.differentiates_functions for x in self.functions
        )
        self._was_valid = False
        self.reads_numbers = state.recorder.answerer.reads_numbers
        self.numbers = [entry for number, entry in state.recorder.numbers if entry.line and not number.is_read]
        state.recorder.numbers.clear()
        externals_inside = [tensor for function in self.functions for tensor in function.externals]
        translation = TranslatedGraph(self.recorded, externals_inside)
        self.externals = translation.externals
        self._unsupported = translation.unsupported
        self._constants = translation.constants
        # Outside `jax.jit` the graph is one compiled executable. Inside, its operations are inlined into the caller.
        self._run = jax.jit(translation.run, inline=True)
        self._run_by_operations = translation.run
        self._indices = translation.indices
        self._run_with_checks = functools.partial(_run_with_checks, translation, len(results))
        self._run_compiled_with_checks = jax.jit(self._run_with_checks)

    @property
    def unsupported(self) -> list[Unsupported]:
        """The operations that have no translation, also those in the Functions that the code applies."""
        inside = [entry for function in self.functions for entry in function.unsupported]
        return list(dict.fromkeys([*self._unsupported, *inside]))

    @functools.cached_property
    def _reads_when_differentiated(self) -> bool:
        """Whether the derivative of a Function inside may read values, which a compiled graph would freeze."""
        return any(
            bool(x.reads or x.externals) or x.definition.rules_read_data or x._reads_when_differentiated
            for x in self.functions
        )

    def _can_compile(self, arrays: Sequence[Any]) -> bool:
        """Whether a compiled graph would give the right results for these arrays, also in later calls."""
        is_differentiated = self.differentiates_functions or any(isinstance(x, Tracer) for x in arrays)
        return not (is_differentiated and self._reads_when_differentiated)

    @property
    def serves_all(self) -> bool:
        """Whether the trace is valid for all values of the arrays."""
        return not (self.reads or self.skipped)

    def fits(self, needs_input_grad: tuple[bool, ...]) -> bool:
        """Whether the trace is valid for these flags."""
        return not self.reads_needs_input_grad or self.needs_input_grad == needs_input_grad

    def is_current(self) -> bool:
        """Whether the Functions that the code applies would read the Python state that they read in this trace."""
        states: dict[Definition, tuple[Hashable, Hashable]] = {}
        return all(x.is_valid_in(states) for x in self.functions)

    def run_graph(self, arrays: Sequence[Any], key: Any, known: Mapping[torch.fx.Node, Any] | None = None) -> Any:
        """Computes the graph's results for JAX arrays; op by op, if values of nodes are `known`.

        Raises:
          TranslationError: An operation has no translation; or the graph draws random numbers, and `key` is `None`.
          IndexError: A concrete index is out of range, outside `jax.jit`.
        """
        self._check_runnable(key)
        with self._naming_errors():
            can_compile = known is None and self._can_compile(arrays)
            if known is None and (not self._indices or staging_trace() is not None):
                run = self._run if can_compile else self._run_by_operations
                return run(arrays, key, self._constants())[: self._num_results]
            run = self._run_compiled_with_checks if can_compile else self._run_with_checks
            results, _, extremes = run(arrays, key, self._constants(), known)
            self._check_indices(extremes)
            return results

    def compute_reads(self, arrays: Sequence[Any], key: Any) -> list[Any]:
        """Returns what the reads give for these arrays."""
        inputs = arrays[: len(self.recorded.inputs)]
        run = self._run if self._can_compile(inputs) else self._run_by_operations
        return run(inputs, key, self._constants())[self._num_results :]

    def run_if_valid(
        self, arrays: Sequence[Any], key: Any, known: Sequence[np.ndarray[Any, Any]]
    ) -> tuple[Any, list[np.ndarray[Any, Any]]]:
        """Returns the graph's results, `None` if a read differs from the trace's answer, and what the reads gave.

        The graph is compiled if it has been valid before: many courses are taken once. `known` is what the first reads
        gave in another trace.
        """
        self._check_runnable(key)
        with self._naming_errors():
            if self._was_valid and self._can_compile(arrays):
                results, read, extremes = self._run_compiled_with_checks(arrays, key, self._constants())
                answers = first_answers(read, self.reads)
                if not self.begins_with(answers):
                    return None, answers
                self._check_indices(extremes)
                return results, answers
        values = CallValues(arrays, key, known, outside_trace, self.knows_sizes, self.reads_numbers)
        answers = values.first_answers(self.recorded, self.reads)
        if not self.begins_with(answers):
            return None, answers
        self._was_valid = True
        return self.run_graph(arrays, key, values.values), answers

    def begins_with(self, answers: Sequence[np.ndarray[Any, Any]]) -> bool:
        """Whether these are the answers to the first reads."""
        pairs = zip(self.reads, answers, strict=False)
        return len(answers) <= len(self.reads) and all(same_bits(read.answer, answer) for read, answer in pairs)

    def _check_runnable(self, key: Any) -> None:
        if self._unsupported:
            raise TranslationError(f"{self._where}: {unsupported_message(self.unsupported)}")
        if self.draws and key is None:
            raise TranslationError(missing_key_message(self._where, self.code))

    def _check_indices(self, extremes: Mapping[int, Any]) -> None:
        for i, (smallest, largest) in extremes.items():
            indices = self._indices[i]
            for index in (innermost(smallest).min(), innermost(largest).max()):
                if not indices.low <= index < indices.size:
                    raise IndexError(
                        f"{self._where}: index {index} is out of range for a dimension of size {indices.size}, at "
                        f"{indices.line}"
                    )

    @contextlib.contextmanager
    def _naming_errors(self) -> Generator[None]:
        try:
            yield
        except TranslationError as error:
            named = type(error)(f"{self._where}: {error}")
            raise error if self.code.name in str(error) else named from error

    @property
    def _where(self) -> str:
        return f"{self.code.name}.{self.method}"


def _run_with_checks(
    translation: TranslatedGraph,
    num_results: int,
    arrays: Sequence[Any],
    key: Any,
    constants: Sequence[Any],
    known: Mapping[torch.fx.Node, Any] | None = None,
) -> tuple[Sequence[Any], jax.Array, Mapping[int, Any]]:
    """Returns the graph's results, the bytes of what was read, and the extremes of indices."""
    values = translation.evaluate(known or {}, arrays, key, constants)
    outputs = translation.outputs(values)
    return outputs[:num_results], to_bytes(outputs[num_results:]), translation.extremes(values)


def missing_key_message(where: str, code: TorchCode) -> str:
    """Returns the message for code that draws random numbers and got no key."""
    return (
        f"{where} draws random numbers, and on JAX those come from an explicit key: "
        f"{code.call}(..., {code.key_name}=jax.random.key(0)), another key for each call"
    )


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128)


class TorchContext(torch.autograd.function.FunctionCtx):
    """The ctx that torch code sees while one method is traced.

    The base class stores what its methods receive in attributes, as in torch: `to_save`, `saved_for_forward`,
    `non_differentiable`, `dirty_tensors` and `materialize_grads`.
    """

    def __init__(
        self,
        state: TraceState,
        needs_input_grad: tuple[bool, ...],
        saved: tuple[torch.Tensor | None, ...] = (),
    ) -> None:
        self.jaxfn = _CtxState(state, needs_input_grad, saved)
        self.to_save: tuple[torch.Tensor | None, ...] = ()
        self.saved_for_forward = saved or None  # which `jvp` may read by this name
        self.dirty_tensors: tuple[torch.Tensor, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        self.jaxfn.trace.reads_needs_input_grad = True
        return self.jaxfn.needs_input_grad

    @needs_input_grad.setter
    def needs_input_grad(self, flags: tuple[bool, ...]) -> None:
        """Replaces the flags, as the Function that torch makes of a custom operation does."""
        self.jaxfn.needs_input_grad = flags

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.jaxfn.saved

    @property
    def saved_variables(self) -> tuple[torch.Tensor | None, ...]:
        """The saved tensors, by a deprecated name."""
        return self.jaxfn.saved

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the user's code assigned."""
        return {name: value for name, value in vars(self).items() if name not in _CTX_ATTRIBUTES}

    def after_forward(self, method: str) -> TorchContext:
        """Returns the ctx as `backward` or `jvp` sees it, with everything that `forward` stored."""
        self.jaxfn.saved = self.to_save
        if method == "jvp" and self.saved_for_forward is not None:
            self.jaxfn.saved = self.saved_for_forward
        return self

    def mark_shared_storage(self, *pairs: Any) -> None:
        """Does nothing, as in torch, which deprecated it."""


@dataclasses.dataclass
class _CtxState:
    """jaxfn's part of a ctx, apart from the attributes that the user's code assigns."""

    trace: TraceState
    needs_input_grad: tuple[bool, ...]
    saved: tuple[torch.Tensor | None, ...]


_CTX_ATTRIBUTES = ("jaxfn", "to_save", "saved_for_forward", "dirty_tensors", "non_differentiable", "materialize_grads")


class StorageAlias(NamedTuple):
    """A slot whose tensor may share storage with an "input", by index, or with an "output", by slot."""

    slot: int
    kind: str
    position: int


class TracedForward(TracedCode):
    """`forward`, traced.

    Attributes:
      output: The template of the output of `forward`.
      saved_slots: The slots that `forward` saved for "backward" and for "jvp", in the order of those methods' inputs.
      non_differentiable: The output slots that were marked non-differentiable.
      dirty: The inputs that were marked dirty, and the slot of each one that was returned.
      mutated: The inputs that `forward` mutated.
      implicit_outputs: Mutated inputs that were not marked dirty, in nested Functions. Their new values are appended to
        the outputs; the user's code does not see them.
      aliases: Which slots share storage with inputs and outputs, in nested Functions.
      has_single_output: Whether the user's code returned a single output, and not a tuple.
      reruns_forward: Whether `backward` and `jvp` run `forward` again, on its inputs, because it stored tensors with
        autograd's graph on ctx, which `backward` may differentiate.
      backward_error: The error that differentiation raises, if any.
      python_state: A key of the Python state that `forward` read; `None` if there is none.
      settings: torch's settings around the call.
      pinned: The converted Function whose calls have this trace, in nested Functions.
    """

    pinned: Any = None
    _full_backward: TracedRule | None = None

    def __init__(
        self,
        definition: Definition,
        arguments: Any,
        needs_input_grad: tuple[bool, ...],
        specs: Sequence[TensorSpec],
        answerer: Answerer,
    ) -> None:
        self.definition = definition
        self.needs_input_grad = needs_input_grad
        self.arguments = arguments
        self.python_state = definition.python_state("forward")
        self._backward_state = definition.python_state("backward")
        self.settings = torch_settings()
        # For each tensor, the index of the input of `forward` that contains it.
        args, kwargs = arguments
        self._input_indices = [i for i, value in enumerate((*args, *kwargs.values())) for _ in slots(value)]
        self.input_specs = specs
        self._rules = LRUCache["TracedRule"](_MAX_RULES)
        state = TraceState(definition.name, definition.config, answerer=answerer)
        ctx = TorchContext(state, needs_input_grad)
        with trace_scope(state):
            inputs = self._new_inputs(state, needs_input_grad)
            output = self._run_code(ctx, inputs)
            state.check_attributes()
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
                # torch returns a separate view for each occurrence.
                output = tuple(x.view_as(x) if _is_among(x, unmarked) else x for x in output)
            if new_values:
                output = (*((output,) if self.has_single_output else output), *new_values)
            for_forward = ctx.to_save if ctx.saved_for_forward is None else ctx.saved_for_forward
            attributes = tuple(_map_leaves(_save_number, x) for x in ctx.attributes.values())
            values_of_ctx = output, ctx.to_save, for_forward, attributes
            flat = flatten_tensors(values_of_ctx, deduplicate=True, shares_containers=True)
            with without_functions():
                self.reruns_forward = not all(flat.leaves[slot].is_leaf for slot in slots(flat.template[1:]))
            # An input is identified by its tensor object, which mutation does not replace.
            indices = {id(x): i for i, x in enumerate(inputs)}
            self._input_of = {slot: indices[id(x)] for slot, x in enumerate(flat.leaves) if id(x) in indices}
            values = [state.lower(tensor) for tensor in flat.leaves]
            output_slots = sorted(set(slots(flat.template[0])))
            tensors = [("input", i, x) for i, x in enumerate(inputs)]
            tensors += [("output", i, flat.leaves[i]) for i in output_slots]
            self.aliases = [
                StorageAlias(slot, kind, i)
                for slot, x in enumerate(flat.leaves)
                for kind, i, other in tensors
                if definition.config.is_nested and may_overlap(x, other)
            ]
        self.backward_error: TranslationError | None = None
        self.output, to_save, for_forward, self._attributes = flat.template
        self._attribute_names = tuple(ctx.attributes)
        self._saved = {"backward": to_save, "jvp": for_forward}
        source = f"a tensor that {definition.name}.forward saves or returns"
        self.specs = [tensor_spec(value, state.recorder.strides_source_of(value, source)) for value in values]
        self.reads_needs_input_grad = state.reads_needs_input_grad
        self.materialize_grads = ctx.materialize_grads
        self.non_differentiable = [i for i, x in enumerate(flat.leaves) if _is_among(x, ctx.non_differentiable)]
        returned = {id(x): i for i, x in enumerate(flat.leaves)}
        self.dirty = {i: returned.get(id(inputs[i])) for i in dirty}

        self._outputs = set(slots(self.output))
        self._input_slots: dict[int, int] = {}  # Those whose value is that of an input, with its index.
        self._constant_slots: dict[int, torch.Tensor] = {}
        self._result_slots: list[int] = []
        for slot, value in enumerate(values):
            index = state.recorder.input_index(value)
            if index is not None:
                self._input_slots[slot] = self._input_of[slot] = index
            elif slot not in self._outputs and state.recorder.is_constant(value):
                self._constant_slots[slot] = value
            else:
                self._result_slots.append(slot)
        self.saved_slots = {
            method: [slot for slot in sorted(set(slots((saved, self._attributes)))) if slot not in self._constant_slots]
            for method, saved in self._saved.items()
        }
        super().__init__(definition, "forward", state, [values[slot] for slot in self._result_slots])
        if self.reruns_forward and self.draws:
            raise TranslationError(
                f"{definition.name}.forward draws random numbers and stores tensors with autograd's graph on ctx, so "
                "it would have to run again in backward. Draw the numbers outside, and pass them as an argument"
            )

    def is_valid_in(self, states: dict[Definition, tuple[Hashable, Hashable]]) -> bool:
        """Whether the Function, and those inside, would read the state that they read; `states` has what was found."""
        if self.definition not in states:
            state = self.definition.python_state
            states[self.definition] = state("forward"), state("backward")
        own = self.python_state, self._backward_state
        return None not in own and states[self.definition] == own and all(x.is_valid_in(states) for x in self.functions)

    def _new_inputs(self, state: TraceState, needs_input_grad: Sequence[bool]) -> list[torch.Tensor]:
        return [
            state.add_input(*spec, requires_grad=needs_input_grad[i])
            for spec, i in zip(self.input_specs, self._input_indices, strict=True)
        ]

    def _run_code(self, ctx: TorchContext, inputs: Sequence[torch.Tensor]) -> Any:
        """Runs the user's code on traced tensors, and returns its output."""
        function = self.definition.function
        args, kwargs = unflatten_tensors(self.arguments, inputs, shares_containers=True)
        values = (*args, *kwargs.values())
        with requiring_no_change(f"{self.definition.name}.forward", self.definition.input_name, values):
            if not self.definition.has_setup_context:
                return function.forward(ctx, *args, **kwargs)
            output = function.forward(*args, **kwargs)
            function.setup_context(ctx, values, output)
            return output

    def slot_values(self, inputs: Sequence[Any], results: Sequence[Any]) -> dict[int, Any]:
        """Returns the value of each slot that is not a constant, from the graph's results."""
        # A translated `clone` returns the array itself. A result is copied if it is an input array, since
        # saving it would save the input, or as an output, since marking or differentiating it would affect that one.
        identity = ArrayIdentity(inputs)
        others = set(map(identity.key, inputs))
        values = {slot: inputs[i] for slot, i in self._input_slots.items()}
        for slot, value in zip(self._result_slots, results, strict=True):  # The slots of outputs come first.
            values[slot] = jnp.array(value, copy=True) if identity.key(value) in others else value
            others |= {identity.key(values[slot])} if slot in self._outputs else set()
        return values

    def arrays_to_save(self, method: str, inputs: Sequence[Any], values: Mapping[int, Any]) -> list[Any]:
        """Returns the arrays that "backward" or "jvp" needs, from the inputs and the slots' values."""
        return list(inputs) if self.reruns_forward else [values[slot] for slot in self.saved_slots[method]]

    def values_of_inputs_and_outputs(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[int, Any]:
        """Returns the value of each slot that is an input or an output."""
        of_inputs = {slot: inputs[i] for slot, i in self._input_slots.items()}
        return of_inputs | dict(zip(slots(self.output), outputs, strict=True))

    def rule_lookup(
        self,
        method: str,
        arguments: Any,
        specs: Sequence[TensorSpec],
        needs_input_grad: tuple[bool, ...],
        containers: Sequence[Any] | None = None,
    ) -> TraceLookup[TracedRule]:
        """Returns the lookup of a trace of `backward` or `jvp` for a template of gradients or tangents.

        `containers` are the lists and dicts among the call's arguments; default: those of the call that was traced.
        """
        if self.backward_error is not None and method == "backward":
            raise self.backward_error

        attributes = self._attributes
        if containers is not None:
            own = map(id, shared_containers(self.arguments))
            attributes = replace_containers(attributes, dict(zip(own, containers, strict=True)))

        trace = functools.partial(TracedRule, self, method, arguments, attributes, needs_input_grad)
        name = f"{self.definition.name}.{method}"
        state = functools.partial(self.definition.python_state, method)
        template = method, arguments, attributes  # Those may be objects that have changed since the call.
        return TraceLookup(name, self._rules, template, specs, trace, needs_input_grad, state=state)

    def backward_state(self) -> Hashable | None:
        """Returns a key of the Python state and the objects on ctx that `backward` reads; `None` if there is none."""
        try:
            attributes = static_key(self._attributes)
        except TypeError:
            return None
        state = self.definition.python_state("backward")
        return None if state is None else (state, attributes)

    @property
    def is_in_own_backward(self) -> bool:
        """Whether `full_backward` is tracing the `backward` of this Function, which applies the Function again.

        The `backward` of this call is not traced in advance then, since that would recurse without end.
        """
        return self.definition.original in ACTIVE.traced_backwards

    def full_backward(self) -> TracedRule | None:
        """Traces `backward` for gradients of all outputs; returns `None` if there is no `backward`."""
        if self._full_backward is not None:
            return self._full_backward
        lookup = self.full_backward_lookup()
        with setting(ACTIVE, traced_backwards=(*ACTIVE.traced_backwards, self.definition.original)):
            self._full_backward = lookup and lookup.get()
        return self._full_backward

    def full_backward_lookup(self) -> TraceLookup[TracedRule] | None:
        """Returns the lookup of a trace of `backward` for gradients of all outputs, if there is a `backward`."""
        if self.definition.backward is None:
            return None
        outputs = self.output if isinstance(self.output, tuple) else (self.output,)
        arguments = flatten_tensors(torch_tree.tree_map(_slot_or_none, outputs), lambda leaf: isinstance(leaf, Slot))
        specs = [self.specs[slot.index] for slot in arguments.leaves]
        flags = (True,) * len(self.needs_input_grad)
        return self.rule_lookup("backward", arguments.template, specs, flags)

    def used_inputs(self) -> set[int]:
        """Returns the inputs that `forward` or `backward` uses, mutates, or returns a gradient for.

        Returns all of them if `is_in_own_backward`.
        """
        if self.is_in_own_backward:
            return set(range(len(self.input_specs)))
        of_forward = {i for i, node in enumerate(self.recorded.inputs) if node.users}
        used = of_forward | set(self.mutated) | self.inputs_read_by_backward()
        backward = self.full_backward()
        if backward is not None:
            with_gradient = {i for i, gradient in enumerate(backward.returned) if slots(gradient)}
            used |= {tensor for tensor, i in enumerate(self._input_indices) if i in with_gradient}
        return used

    def inputs_read_by_backward(self) -> set[int]:
        """Returns the inputs whose value at the time of the call `backward` uses."""
        read = self._slots_read_by_backward()
        return read if self.reruns_forward else {self._input_of[slot] for slot in read if slot in self._input_of}

    def aliases_read_by_backward(self) -> list[StorageAlias]:
        """Returns the entries of `aliases` whose tensor `backward` uses."""
        read = self._slots_read_by_backward()
        return [x for x in self.aliases if (x.slot in read if not self.reruns_forward else x.kind == "input")]

    def _slots_read_by_backward(self) -> set[int]:
        """Returns the slots that `backward` uses; the inputs, if `reruns_forward`.

        Returns all that `forward` saved if `is_in_own_backward`.
        """
        saved = range(len(self.input_specs)) if self.reruns_forward else self.saved_slots["backward"]
        if self.is_in_own_backward:
            return set(saved)
        backward = self.full_backward()
        if backward is None:
            return set()
        return {i for i, node in zip(saved, backward.recorded.inputs, strict=False) if node.users}

    def set_backward_error(self, error: TranslationError) -> None:
        """Makes differentiation of the call raise this error."""
        self.backward_error = type(error)(str(error))  # Without the frames of the trace.

    def mutated_inputs_of(self, method: str, state: TraceState) -> set[int]:
        """Returns the inputs of `forward` that `backward` or `jvp` got from `ctx` and mutated in this trace."""
        mutated = state.mutated_inputs()
        saved = (
            range(len(self.input_specs))
            if self.reruns_forward
            else [self._input_of.get(i) for i in self.saved_slots[method]]
        )
        return {position for i, position in enumerate(saved) if position is not None and i in mutated}

    def make_ctx(
        self, method: str, attributes: Any, state: TraceState, needs_input_grad: tuple[bool, ...]
    ) -> TorchContext:
        """Creates the ctx of `backward` or `jvp` in a new trace, whose first inputs are the saved arrays."""
        if self.reruns_forward:
            ctx = TorchContext(state, needs_input_grad)
            self._run_code(ctx, self._new_inputs(state, needs_input_grad))
            return ctx.after_forward(method)
        tensors = {slot: state.add_constant(value) for slot, value in self._constant_slots.items()}
        for slot in self.saved_slots[method]:
            # Detached intermediates, and those computed without autograd, require no gradient.
            requires_grad = any(needs_input_grad) if slot in self._outputs else None
            if slot in self._input_of:
                requires_grad = needs_input_grad[self._input_indices[self._input_of[slot]]]
            own = self.input_specs[self._input_of[slot]].own if slot in self._input_of else None
            tensors[slot] = state.add_input(*self.specs[slot]._replace(own=own), requires_grad=requires_grad)
        saved = unflatten_tensors(self._saved[method], tensors)
        ctx = TorchContext(state, needs_input_grad, saved)
        attributes = unflatten_tensors(attributes, tensors, shares_containers=True)

        def restore(value: Any) -> Any:
            return state.recorder.item(state.lower(value.tensor), None) if isinstance(value, _SavedNumber) else value

        values = [_map_leaves(restore, x) for x in attributes]
        vars(ctx).update(zip(self._attribute_names, values, strict=True))
        return ctx


@contextlib.contextmanager
def requiring_no_change(code: str, name: Callable[[int], str], values: Sequence[Any]) -> Generator[None]:
    """Raises if the code changes a list or dict with tensors among its arguments; `name` names an argument."""
    before = [torch_tree.tree_flatten(value) for value in values]
    yield
    for i, (value, (leaves, spec)) in enumerate(zip(values, before, strict=True)):
        new, new_spec = torch_tree.tree_flatten(value)
        is_same = new_spec == spec and all(map(operator.is_, new, leaves))
        if not is_same and any(isinstance(x, torch.Tensor) for x in leaves):
            raise TranslationError(
                f"{code} changes {name(i)}, a list or dict that contains arrays. It receives a copy on JAX, so its "
                "caller would never see the change. Return the new values, and store them after the call"
            )


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the leaves in a value; returns the value itself if none of them changes."""
    leaves, spec = torch_tree.tree_flatten(value, is_leaf=lambda x: isinstance(x, (_SavedNumber, torch.Size)))
    new = list(map(function, leaves))
    return value if all(map(operator.is_, leaves, new)) else torch_tree.tree_unflatten(new, spec)


class _SavedNumber(NamedTuple):
    """A traced number among the attributes of ctx, as a tensor."""

    tensor: torch.Tensor


def _save_number(value: Any) -> Any:
    if not isinstance(value, TracedNumber):
        return value
    number: Any = value
    dtype = torch.float64 if value.kind is float else torch.int64
    if jax_dtype(dtype) == np.int32 and value.largest >= 2**31:
        return value.read()
    return _SavedNumber(torch.full((), number, dtype=torch_dtype(jax_dtype(dtype))))


class TracedRule(TracedCode):
    """`backward` or `jvp`, traced for a template of gradients or tangents.

    Attributes:
      returned: The template of the result: tangents, or gradients, one for each input and perhaps more.
      mutated: The saved inputs of `forward` that it mutated.
      second_derivative_error: The error that differentiation of the results raises, if any.
    """

    def __init__(
        self,
        forward: TracedForward,
        method: str,
        template: Any,
        attributes: Any,
        needs_input_grad: tuple[bool, ...],
        specs: Sequence[TensorSpec],
        answerer: Answerer,
    ) -> None:
        self.needs_input_grad = needs_input_grad
        self.second_derivative_error: DeferredError | None = None
        definition = forward.definition
        state = TraceState(definition.name, definition.config, is_differentiated=True, answerer=answerer)
        try:
            with trace_scope(state):
                values = self._run_code(forward, method, state, template, attributes, specs)
        except Exception as error:
            if isinstance(error, DataDependentError) or not state.reads_grad_mode:
                raise
            self.second_derivative_error = DeferredError(
                RuntimeError,
                f"{definition.name}.{method} raises an error where torch.is_grad_enabled() is True, so it has no "
                f"second derivative: {type(error).__name__}: {error}",
            )
            state = TraceState(definition.name, definition.config, answerer=answerer)
            with trace_scope(state):
                values = self._run_code(forward, method, state, template, attributes, specs)
        self.reads_needs_input_grad = state.reads_needs_input_grad
        super().__init__(definition, method, state, values)

    def _run_code(
        self,
        forward: TracedForward,
        method: str,
        state: TraceState,
        template: Any,
        attributes: Any,
        specs: Sequence[TensorSpec],
    ) -> list[torch.Tensor]:
        """Runs the user's code on traced tensors, and returns the tensors among its results."""
        definition = forward.definition
        function = definition.function.jvp if method == "jvp" else definition.backward
        assert function is not None
        ctx = forward.make_ctx(method, attributes, state, self.needs_input_grad)
        saved = forward.input_specs if forward.reruns_forward else forward.saved_slots[method]
        state.first_gradient_input = len(saved)
        source = definition.config.externals.gradient_strides_source
        inputs = [state.add_input(x.shape, x.dtype, x.strides_source or source) for x in specs]
        arguments = unflatten_tensors(template, inputs)
        num_added = len(forward.implicit_outputs)
        if method == "backward":
            arguments = arguments[: len(arguments) - num_added]
        with definition.config.externals.backward_guard(f"{definition.name}.{method}"):
            if method == "backward" and takes_boxed_gradients(definition.function):
                returned = function(ctx, list(arguments))
            else:
                returned = function(ctx, *arguments)
        state.check_attributes()
        returned = returned if isinstance(returned, tuple) else (returned,)
        flat = flatten_tensors((*returned, *[None] * num_added) if method == "jvp" else returned)
        self.returned: Any = flat.template
        values = [state.lower(tensor) for tensor in flat.leaves]
        self.mutated = forward.mutated_inputs_of(method, state)
        return values


class TracedVmap(TracedCode):
    """`vmap`, traced for inputs with their batch axes. `returned` is the template of outputs and out_dims."""

    def __init__(
        self,
        definition: Definition,
        arguments: Any,
        info: Any,
        in_dims: tuple[Any, ...],
        specs: Sequence[TensorSpec],
        answerer: Answerer,
    ) -> None:
        state = TraceState(definition.name, definition.config, answerer=answerer)
        with trace_scope(state):
            inputs = unflatten_tensors(arguments, [state.add_input(*spec, requires_grad=True) for spec in specs])
            flat = flatten_tensors(definition.function.vmap(info, in_dims, *inputs))
            values = [state.lower(tensor) for tensor in flat.leaves]
        self.returned: Any = flat.template
        super().__init__(definition, "vmap", state, values)


_T = TypeVar("_T", bound=TracedCode)


class TraceLookup(NamedTuple, Generic[_T]):
    """The lookup of a trace for certain arguments; the code is traced if there is none.

    Attributes:
      name: The name of the code in messages.
      cache: The traces of the code.
      template: The arguments, except for their arrays.
      specs: The types of their arrays.
      trace: Traces the code for such arrays.
      needs_input_grad: One flag for each input of `forward`, of a Function.
      warn: Warns once.
      state: Returns a key of everything else that the trace depends on; `None` if there is none.
    """

    name: str
    cache: LRUCache[_T]
    template: Any
    specs: Sequence[TensorSpec]
    trace: Callable[[Sequence[TensorSpec], Answerer], _T]
    needs_input_grad: tuple[bool, ...] = ()
    warn: Callable[[str], None] = warnings.warn
    state: Callable[[], Hashable | None] = tuple

    def get(self) -> _T:
        """Returns a trace of code that reads no values of traced tensors. Raises if the code does."""
        key = self._key()
        return next((x for x in self._cached(key) if x.serves_all), None) or self._trace(key, NO_VALUES)

    def run(self, arrays: Sequence[Any], key: Any) -> tuple[_T, Any]:
        """Returns the trace for these arrays, and the graph's results."""
        traced, results = self.find(arrays, key)
        return traced, traced.run_graph(arrays, key) if results is None else results

    def find(self, arrays: Sequence[Any], key: Any) -> tuple[_T, Any]:
        """Returns the trace for these arrays, and the graph's results if it had to be run to find the trace.

        Outside `jax.jit`, code may read the values of traced tensors. A trace is used again where these are equal.
        """
        cache_key = self._key()
        cached = self._cached(cache_key)
        traced = next((x for x in cached if x.serves_all), None)
        if traced is not None:
            return traced, None
        if not are_concrete([*arrays, key]):
            traced = next((x for x in cached if x.skipped), None) or self._trace(cache_key, _UNDER_JIT)
            for read in traced.skipped:
                self.warn(f"{self.name}: a check of values is skipped under jax.jit{format_line(read.line)}")
            return traced, None
        cached = [x for x in cached if x.reads]
        answers: list[np.ndarray[Any, Any]] = []
        for traced in cached:
            if traced.begins_with(answers):
                results, answers = traced.run_if_valid(arrays, key, answers)
                if results is not None:
                    self.cache.move_to_front(cache_key, traced)
                    return traced, results
        if len(cached) >= _MAX_COURSES:
            cache_key = None
            self.warn(
                f"{self.name} reads values of its tensors, with more than {_MAX_COURSES} different results. Calls with "
                "new ones are right and slow: the code is traced each time"
            )
        knows_sizes, reads_numbers = any(x.knows_sizes for x in cached), any(x.reads_numbers for x in cached)
        answerer = CallValues(arrays, key, answers, outside_trace, knows_sizes, reads_numbers)
        try:
            traced = self._trace(cache_key, answerer)
        except Exception as error:
            # A number that stays traced is not a float: compiled code may not take it, and it cannot be stored.
            is_about_numbers = isinstance(error, EscapedNumberError) or not isinstance(error, TranslationError)
            knows_sizes |= isinstance(error, SelectionError)
            reads_numbers |= answerer.gave_numbers and is_about_numbers
            if (knows_sizes, reads_numbers) == (answerer.knows_sizes, answerer.reads_numbers):
                raise
            answerer = CallValues(arrays, key, answers, outside_trace, knows_sizes, reads_numbers)
            traced = self._trace(cache_key, answerer)
        return traced, traced.run_graph(arrays, key, answerer.values) if traced.reads else None

    def _cached(self, key: Any) -> list[_T]:
        cached = [] if key is None else self.cache.values(key)
        return [x for x in cached if x.fits(self.needs_input_grad) and x.is_current()]

    def _key(self) -> Any:
        """Returns the key in the cache; `None` if the arguments have none."""
        try:
            arguments = static_key(self.template)
        except TypeError:
            return None
        state = self.state()
        if state is None:
            return None
        integers = jax_dtype(torch.int64)  # The dtypes of what was read depend on x64.
        return arguments, state, tuple(self.specs), torch_settings(), integers

    def _trace(self, key: Any, answerer: Answerer) -> _T:
        """Traces the code, and caches the trace if there is a key.

        JAX's integers have 32 bits by default. If torch requires int64, int32 inputs are traced as int64.
        """
        try:
            with checking_leaks(self.name):
                traced = self.trace(self.specs, answerer)
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError) as error:
            specs = [x._replace(dtype=torch.int64) if x.dtype == torch.int32 else x for x in self.specs]
            if isinstance(error, TranslationError) or specs == self.specs or not names_int64(error):
                raise
            with checking_leaks(self.name):
                traced = self.trace(specs, answerer)
        # Code that has changed Python state (a list among its arguments, a counter) runs again in each call.
        is_repeatable = not (traced.reads_external_values or traced.reads_identity) and self._key() == key
        if key is not None and is_repeatable:
            self.cache.put(key, traced)
        return traced


def names_int64(error: Exception) -> bool:
    """Whether an error of torch may be due to integers that are not int64."""
    return re.search("(?i)int64|long", str(error)) is not None


def _slot_or_none(leaf: Any) -> Slot | None:
    return leaf if isinstance(leaf, Slot) else None


def _is_among(value: object, values: Sequence[object]) -> bool:
    return any(value is other for other in values)
