"""Runs a graph that `Recorder` made on JAX arrays, with the table of operations.

Imports torch: it is itself imported only where there is a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from itertools import groupby
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import GraphModule, Node

from jaxfn._observe import OBSERVATION, Observation, line_name
from jaxfn._torch._compat import plain_torch
from jaxfn._torch.graph.int64 import (
    CONSERVATIVE,
    LARGEST,
    TYPICAL,
    has_int64,
    is_large,
    magnitude_bounds,
    may_grow,
    saturate_to_int32,
    short_name,
    to_int64,
)
from jaxfn._torch.graph.source_lines import Line
from jaxfn._torch.graph.targets import JaxCall, OperationMap, key_by_name, operation_name
from jaxfn._torch.operations import TABLE, Operation, entry_name, half_to_single, unsupported_reason
from jaxfn._torch.values.arrays import jax_dtype, to_jax
from jaxfn._torch.values.errors import TranslationError

# What these say of a tensor (where it is, how it lies in memory) JAX decides itself.
_IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad", "generator"})


class Unsupported(NamedTuple):
    """An operation that cannot be translated.

    Attributes:
      operation: its name, as torch prints it.
      line: the line of the torch code that called it, or None if torch did not record it.
      reason: why, where more is known than that it is not in the table.
      callable: the innermost function around that line which `ops=` may name, as Python has it.
    """

    operation: str
    line: str | None
    reason: str | None = None
    callable: str | None = None


class TranslatedGraph:
    """A graph, and what stands for each of its operations.

    Args:
      graph_module: the graph, as `Recorder.finish` gives it: of functional ATen operations, all of which its output
        needs, with results and source lines in the nodes' meta.
      ops: JAX functions to use for some torch operations, in place of the table's or where it has none.

    Attributes:
      unsupported: all operations that cannot be translated, in the graph's order, each with the line that called it.
      indices: what indexes a tensor.
    """

    def __init__(self, graph_module: GraphModule, ops: OperationMap | None = None) -> None:
        replacements = key_by_name(ops)
        self._graph_module = graph_module
        calls: list[_ImplementedStep] = []
        num_drawn = 0
        for step in steps(graph_module):
            operation = find_implementation(step.node, replacements) if step.node.op == "call_function" else None
            calls.append(_ImplementedStep(step, operation, num_drawn))
            num_drawn += isinstance(operation, Operation) and operation.draws
        self._make_segments = _make_segments(calls)
        self.indices = [indices for call in calls for indices in _indices_of(call)]
        self._constants = [call.step.node for call in calls if call.step.node.op == "get_attr"]
        limits = {node: _magnitude(graph_module, node) for node in self._constants}
        known = {node: limit for node, limit in limits.items() if limit is not None}
        sequence = [call.step for call in calls]
        self._conservative_bounds = magnitude_bounds(sequence, known, CONSERVATIVE)
        self._typical_bounds = magnitude_bounds(sequence, known, TYPICAL)
        missing = (call.operation for call in calls if isinstance(call.operation, Unsupported))
        self.unsupported: list[Unsupported] = list(dict.fromkeys(missing))

    def constants(self) -> list[Any]:
        """The present values of the tensors that are no inputs; those made outside of the Function may change."""
        return [_constant(self._graph_module, node) for node in self._constants]

    def run(
        self,
        inputs: Sequence[Any],
        key: Any = None,
        constants: Sequence[Any] | None = None,
        *,
        returns_extremes: bool = False,
    ) -> Any:
        """The outputs of the graph for JAX arrays.

        Args:
          inputs: one JAX array for each placeholder, in order.
          key: a JAX random key, for graphs that draw random numbers.
          constants: what `constants()` returned; by default what it returns now.
          returns_extremes: whether to return the smallest and the largest of each of `indices`, too, by its number.

        Returns:
          What the graph returns, with the same structure; arrays have the dtypes that torch recorded, as x64 allows.

        Raises:
          TranslationError: an operation has no translation, or random numbers are drawn without a key.
        """
        if self.unsupported:
            raise TranslationError(unsupported_message(self.unsupported))
        constants = self.constants() if constants is None else constants
        values: dict[Node, Any] = dict(zip(self._constants, constants, strict=True))
        remaining = iter(inputs)
        for segment in self._make_segments:
            if segment.is_recomputed:
                recomputed = jax.checkpoint(partial(self._evaluate_segment, segment, values, key))
                values |= zip(segment.results, recomputed(), strict=True)
                continue
            for call in segment.calls:
                node = call.step.node
                if node.op == "placeholder":
                    values[node] = _cast_as_recorded(next(remaining), node)
                elif node.op == "output":
                    outputs = self._saturate(call.step, _substitute(call.step.arguments, values))[0]
                    found = enumerate(saturate_to_int32(values.get(indices.node)) for indices in self.indices)
                    known = {i: x for i, x in found if isinstance(x, jax.Array) and x.size}
                    extremes = {i: (x.min(), x.max()) for i, x in known.items() if returns_extremes}
                    return (outputs, extremes) if returns_extremes else outputs
                elif node.op != "get_attr":
                    values[node] = self._evaluate(call, values, key)
        raise TranslationError("the graph has no output")

    def _evaluate_segment(self, segment: _Segment, known: Mapping[Node, Any], key: Any) -> list[Any]:
        values = dict(known)
        for call in segment.calls:
            if call.step.node.op == "call_function":
                values[call.step.node] = self._evaluate(call, values, key)
        return [values[node] for node in segment.results]

    def _evaluate(self, call: _ImplementedStep, values: Mapping[Node, Any], key: Any) -> Any:
        """Evaluates an operation."""
        step, operation = call.step, cast(Operation, call.operation)
        node = step.node
        arguments, options = _substitute((step.arguments, step.options), values)
        if not operation.accepts_half:
            arguments, options = half_to_single((arguments, options))
        if operation.draws:
            if key is None:
                raise TranslationError(f"{operation_name(node.target)}{_line(node)} draws random numbers: pass `key=`")
            arguments = (jax.random.fold_in(key, call.num_drawn), *arguments)
        if _is_x64_off() and self._needs_int64(step, arguments, options):
            return self._run_with_int64(call, arguments, options)
        with _line_scope(node):
            return _cast_as_recorded(operation.function(*arguments, **options), node)

    def _needs_int64(self, step: Step, arguments: Any, options: Any) -> bool:
        """Whether an operation has an operand, or may have a result, that does not fit in 32 bits."""
        grows = self._conservative_bounds.get(step.node, 0) > LARGEST and may_grow(
            short_name(operation_name(step.node.target))
        )
        return grows or step.has_large_integers or has_int64((arguments, options))

    def _run_with_int64(self, call: _ImplementedStep, arguments: Any, options: Any) -> Any:
        """Evaluates an operation on 64-bit integers. JAX functions, which run again elsewhere, get 32 bits."""
        step, operation = call.step, cast(Operation, call.operation)
        if step.node.target is operator.getitem:
            return operation.function(*arguments)
        if operation not in TABLE.values():
            arguments, options = self._saturate(step, (arguments, options))
            return _cast_as_recorded(operation.function(*arguments, **options), step.node)
        with jax.enable_x64(True):
            return _cast_as_recorded(operation.function(*to_int64(arguments), **to_int64(options)), step.node)

    def _saturate(self, step: Step, arguments: Any) -> Any:
        """The arguments of a step that takes 32 bits, or a message if it is plain that they do not fit."""
        if not has_int64(arguments):
            return arguments
        operands: list[Any] = jax.tree_util.tree_leaves((step.arguments, step.options))
        for operand in operands:
            if isinstance(operand, Node) and self._typical_bounds.get(operand, 0) > LARGEST:
                source = cast(Node, operand.args[0]) if operand.target is operator.getitem else operand
                raise TranslationError(
                    f"{operation_name(source.target)}{_line(source)} computes a number that needs 64 bits, and without "
                    "jax.config.update('jax_enable_x64', True) JAX's integers have 32"
                )
        return saturate_to_int32(arguments)


# Which argument of an operation indexes a tensor's elements.
_INDEX_ARGUMENT = {
    **dict.fromkeys(["index", "index_put", "take", "embedding", "put"], 1),
    **dict.fromkeys(["gather", "index_select", "scatter", "scatter_add", "scatter_reduce"], 2),
    **dict.fromkeys(["index_add", "index_copy", "index_fill", "index_reduce"], 2),
}


class Indices(NamedTuple):
    """A tensor of indices into another tensor.

    Attributes:
      node: its node.
      low: the smallest index that there is.
      size: how many there are from 0.
      line: the line of torch code that indexes, or where none is known the operation.
    """

    node: Node
    low: int
    size: int
    line: str


def _indices_of(call: _ImplementedStep) -> Iterator[Indices]:
    """The indices among the arguments of a call, where torch checks their range and the table's entry is used."""
    step, name = call.step, operation_name(call.step.node.target)
    short, line = short_name(name), node_source_line(step.node) or name
    position = None if "_unsafe" in name or "_backward" in name else _INDEX_ARGUMENT.get(short)
    if position is None or call.operation is not TABLE.get(entry_name(name) or ""):
        return
    at, shape = step.arguments[position], _results(step.arguments[0])[0].shape
    if short in ("index", "index_put"):  # a mask is alone, or refused
        parts = [(x, size) for x, size in zip(at, shape, strict=False) if x is not None]
        yield from (Indices(x, -size, size, line) for x, size in parts if _results(x)[0].dtype in _INTEGERS)
    elif short in ("take", "put"):
        yield Indices(at, -shape.numel(), shape.numel(), line)
    else:
        size = shape[0 if short == "embedding" else step.arguments[1]] if shape else 1
        yield Indices(at, -size if short == "index_fill" else 0, size, line)


class _ImplementedStep(NamedTuple):
    """A step, and what carries it out.

    Attributes:
      operation: `None` for what is no operation.
      num_drawn: how many operations draw random numbers before it.
    """

    step: Step
    operation: Operation | Unsupported | None
    num_drawn: int


class _Segment(NamedTuple):
    """Calls one after the other.

    Attributes:
      is_recomputed: whether they are carried out again where they are differentiated; see `Recorder.recomputing`.
      results: what later calls use of them.
    """

    is_recomputed: bool
    calls: list[_ImplementedStep]
    results: list[Node]


def _make_segments(calls: Sequence[_ImplementedStep]) -> list[_Segment]:
    groups = [(key, list(group)) for key, group in groupby(calls, lambda call: call.step.node.meta.get("recomputed"))]
    segments: list[_Segment] = []
    for key, group in groups:
        segment_nodes = {call.step.node for call in group}
        results = [x.step.node for x in group if key is not None and not segment_nodes.issuperset(x.step.node.users)]
        segments.append(_Segment(key is not None, group, results))
    return segments


def unsupported_message(entries: Sequence[Unsupported]) -> str:
    """One message for several unsupported operations."""
    lines: list[str] = []
    for entry in entries:
        position = f", called at {entry.line}" if entry.line else ""
        around = f", in {entry.callable}" if entry.callable else ""
        lines.append(f"  {entry.operation}{position}{around}{f': {entry.reason}' if entry.reason else ''}")
    return (
        "no translation to JAX for\n"
        + "\n".join(lines)
        + "\nName a JAX function for each with `ops={torch_op: jax_function}`, or for a Python function around it, or "
        "write that part of the Function in other operations."
    )


class Step(NamedTuple):
    """A node and its arguments, with those in their place that are positional in the operation's schema."""

    node: Node
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def has_large_integers(self) -> bool:
        """Whether a whole number among the arguments of an operation on whole numbers needs 64 bits."""
        if not _large_integers((self.arguments, self.options)):
            return False
        if operation_name(self.node.target).startswith(("aten.slice", "aten.narrow")):
            return False
        results = {tensor.dtype for tensor in _results(self.node)}
        operands = {x.dtype for node in self.arguments if isinstance(node, Node) for x in _results(node)}
        if torch.bool in results:  # a comparison, for which torch has a number in the tensor's bits
            return torch.int64 in operands
        is_ratio = any(dtype.is_floating_point for dtype in results) and not operands.isdisjoint(_INTEGERS)
        return torch.int64 in results or is_ratio


_INTEGERS = frozenset({torch.int64, torch.int32})


def _is_x64_off() -> bool:
    """Whether JAX's whole numbers have 32 bits, as x64 is off."""
    return jax.dtypes.canonicalize_dtype(np.int64) != np.int64


def _large_integers(value: Any) -> list[int]:
    """The whole numbers in arguments that need 64 bits."""
    return list(filter(is_large, jax.tree_util.tree_leaves(value)))


def steps(graph_module: GraphModule) -> Iterator[Step]:
    """The nodes with their arguments, in order."""
    return (Step(node, *_schema_arguments(node)) for node in graph_module.graph.nodes)


def _schema_arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, with all positional ones of the operation's schema in their place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args, dict(node.kwargs)
    positional = [a for a in schema.arguments if not a.kwarg_only]
    arguments = list(node.args)
    for argument in positional[len(arguments) :]:
        arguments.append(node.kwargs.get(argument.name, argument.default_value))
    names = {a.name for a in positional} | _IGNORED
    return tuple(arguments), {k: v for k, v in node.kwargs.items() if k not in names}


def _substitute(value: Any, values: Mapping[Node, Any]) -> Any:
    """`value` with arrays for nodes and JAX dtypes for torch's."""
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, torch.dtype):
        return jax_dtype(value)
    if isinstance(value, tuple):
        return tuple(_substitute(item, values) for item in value)
    if isinstance(value, list):  # a list of torch.fx's own type, in a graph
        return [_substitute(item, values) for item in value]
    if isinstance(value, dict):
        return {name: _substitute(item, values) for name, item in value.items()}
    return value


def find_implementation(node: Node, replacements: Mapping[str, Callable[..., Any]]) -> Operation | Unsupported:
    """Returns the implementation of a node's operation: the replacement, or the table's entry."""
    if isinstance(node.target, JaxCall):
        return Operation(node.target, node.target.draws, accepts_half=True)
    if node.target is operator.getitem:  # one of several results
        return Operation(operator.getitem, accepts_half=True)
    name = operation_name(node.target)
    for candidate in (name, name.rpartition(".")[0]):
        if candidate in replacements:
            return Operation(replacements[candidate], accepts_half=True)
    entry = entry_name(name)
    if entry is None:
        return _unsupported(node, node.meta.get("reason") or unsupported_reason(name))
    unknown_dtype = _dtype_problem(node)
    if unknown_dtype is not None:
        return _unsupported(node, unknown_dtype)
    operation = TABLE[entry]
    storage_id = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    if storage_id is None or not (operation.reads_storage or operation.for_noncontiguous):
        return operation
    if operation.for_noncontiguous is not None and not storage_id.is_contiguous():
        return Operation(operation.for_noncontiguous)
    if operation.reads_storage:
        *_, size, stride, offset = _schema_arguments(node)[0]
        elements = _view_elements(storage_id, size, stride, offset)
        if elements is None:
            return _unsupported(node, _READS_AROUND)
        return operation._replace(function=_bind_elements(operation.function, elements))
    return operation


def _unsupported(node: Node, reason: str | None) -> Unsupported:
    line: Line | None = node.meta.get("line")
    return Unsupported(operation_name(node.target), node_source_line(node), reason, line and line.callable)


_READS_AROUND = (
    "it reads memory around the elements of its argument, which is a part of another tensor: take the view of that one"
)


def _bind_elements(function: Callable[..., Any], elements: np.ndarray[Any, Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments[:-3], elements)


def _view_elements(
    storage_id: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> np.ndarray[Any, Any] | None:
    """The numbers of those elements of a tensor that a view of its memory has; `None` if there are others in it."""
    if not math.prod(size):
        return np.zeros(tuple(size), int)
    begin = int(storage_id.storage_offset())
    segment_nodes = _storage_offsets(storage_id.shape, storage_id.stride(), begin).reshape(-1)
    wanted = _storage_offsets(size, stride, begin if offset is None else offset)
    order = np.argsort(segment_nodes, kind="stable")
    found = np.minimum(np.searchsorted(segment_nodes[order], wanted), len(segment_nodes) - 1)
    return order[found] if len(segment_nodes) and (segment_nodes[order][found] == wanted).all() else None


def _storage_offsets(size: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray[Any, Any]:
    """Returns the offsets in memory of a strided tensor's elements."""
    axes = (np.arange(length) * step for length, step in zip(size, stride, strict=True))
    return offset + reduce(np.add.outer, axes, np.zeros((), int))


def _dtype_problem(node: Node) -> str | None:
    """Why JAX cannot have a result's dtype."""
    try:
        for result in _results(node):
            jax_dtype(result.dtype)
    except TranslationError as error:
        return str(error)
    return None


def _results(node: Node) -> list[torch.Tensor]:
    """The tensors that torch recorded as a node's results."""
    recorded = node.meta.get("val")
    results = recorded if isinstance(recorded, (tuple, list)) else [recorded]
    return [result for result in results if isinstance(result, torch.Tensor)]


def _line_scope(node: Node) -> AbstractContextManager[object]:
    """Tells the line of a node to `find_nan`, if that looks, as a part of operations' names."""
    is_wanted = OBSERVATION.value is Observation.VALUES
    return jax.named_scope(line_name(node_source_line(node) or "")) if is_wanted else nullcontext()


def node_source_line(node: Node) -> str | None:
    """The line of the user's code that called a node's operation, as `file:line: code`."""
    line: Line | None = node.meta.get("line")
    return f"{line.file}:{line.number}: {line.text}".rstrip(": ") if line else None


def _line(node: Node) -> str:
    line = node_source_line(node)
    return f", called at {line}," if line else ""


def _constant(graph_module: GraphModule, node: Node) -> Any:
    value: torch.Tensor = getattr(graph_module, str(node.target))
    limit = _magnitude(graph_module, node)
    if limit is not None and limit > LARGEST and _is_x64_off():
        with jax.enable_x64(True):
            return to_jax(value)
    return to_jax(value)


def _magnitude(graph_module: GraphModule, node: Node) -> int | None:
    """Returns the largest magnitude in an integer constant; `None` for one of another kind."""
    value: torch.Tensor = getattr(graph_module, str(node.target))
    if value.dtype != torch.int64 or not value.numel():
        return None
    with plain_torch():
        return max(-int(value.amin()), int(value.amax()), 0)


def _cast_as_recorded(result: Any, node: Node) -> Any:
    """A result with the dtype, and checked against the shape, that torch recorded for the node."""
    return _cast_like(result, node.meta.get("val"), node)


def _cast_like(result: Any, recorded: Any, node: Node) -> Any:
    if isinstance(recorded, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(recorded):
            raise TranslationError(
                f"{operation_name(node.target)}{_line(node)} has {len(recorded)} results; its translation gave "
                f"{result!r}"
            )
        return type(recorded)(_cast_like(part, expected, node) for part, expected in zip(result, recorded, strict=True))
    if not isinstance(recorded, torch.Tensor):
        return result
    if result is None:  # a result that was not asked for
        return None
    array = jnp.asarray(result)
    if tuple(array.shape) != tuple(recorded.shape):
        raise TranslationError(
            f"{operation_name(node.target)}{_line(node)} has a result of shape {tuple(recorded.shape)}; "
            f"its translation gave {tuple(array.shape)}"
        )
    return lax.convert_element_type(array, jax_dtype(recorded.dtype))
