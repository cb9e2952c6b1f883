"""Interpreter of the graphs that `Recorder` builds: runs them on JAX arrays, by the table of operations."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial, reduce
from itertools import groupby
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import Graph, Node

from jaxfn._observe import OBSERVATION, Observation, line_name
from jaxfn._torch._compat import plain_torch
from jaxfn._torch.graph.int64 import (
    CONSERVATIVE,
    LARGEST,
    TYPICAL,
    has_int64,
    is_int64,
    is_large,
    magnitude_bounds,
    may_grow,
    saturate_to_int32,
    short_name,
    to_int64,
)
from jaxfn._torch.graph.numbers import to_operand
from jaxfn._torch.graph.source_lines import Line
from jaxfn._torch.graph.targets import JaxCall, operation_name
from jaxfn._torch.operations import TABLE, Operation, entry_name, half_to_single, is_half, unsupported_reason
from jaxfn._torch.values.arrays import jax_dtype, to_numpy
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.scopes import setting

# Keyword arguments that only concern a tensor's device, storage and autograd.
_IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad", "generator"})


class Unsupported(NamedTuple):
    """An operation that has no translation.

    Attributes:
      operation: Its name, as torch prints it.
      line: The line of the torch code that called it, or `None` if torch did not record it.
      reason: The reason, if more is known than that it is not in the table.
      callable: The innermost function around that line which `ops=` can name, as written in Python.
    """

    operation: str
    line: str | None
    reason: str | None = None
    callable: str | None = None

    def __str__(self) -> str:
        line = f", called at {self.line}" if self.line else ""
        function = f", in {self.callable}" if self.callable else ""
        return f"{self.operation}{line}{function}{f': {self.reason}' if self.reason else ''}"


class RecordedGraph(NamedTuple):
    """The graph of a `Recorder`, perhaps while it is recorded.

    Attributes:
      graph: Functional ATen operations, with results and source lines in the nodes' meta.
      constants: The tensors that are not inputs, by the targets of their nodes.
      replacements: The JAX functions that replace operations, by the operations' names.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    replacements: Mapping[str, Callable[..., Any]]

    @property
    def inputs(self) -> list[Node]:
        """The nodes of the inputs, in order."""
        return list(self.graph.find_nodes(op="placeholder"))


class TranslatedGraph:
    """A graph, with the implementation of each of its operations.

    Args:
      recorded: The graph.
      externals_inside: The external tensors that Functions inside read.
      nodes: The nodes to evaluate. Default: all, from `Recorder.finish`, whose output needs them.

    Attributes:
      unsupported: The operations that have no translation, in order, each with the line that called it.
      indices: The tensors that index another tensor, with their ranges.
      externals: The external tensors that the graph, or a Function inside, reads. They may get new values.
    """

    def __init__(
        self,
        recorded: RecordedGraph,
        externals_inside: Sequence[torch.Tensor] = (),
        nodes: Sequence[Node] | None = None,
    ) -> None:
        steps = [_make_step(node, recorded.replacements) for node in (recorded.graph.nodes if nodes is None else nodes)]
        self._segments = _make_segments(steps)
        self._output = steps[-1]
        self.indices = [indices for step in steps for indices in _indices_of(step)]
        constants = [step.node for step in steps if step.node.op == "get_attr"]
        tensors = {node: recorded.constants[str(node.target)] for node in constants}
        self._constants = sorted(constants, key=lambda node: node.meta["is_external"])  # Local ones come first.
        self._local_tensors = [tensors[x] for x in self._constants if not x.meta["is_external"]]
        external_tensors = [tensors[x] for x in self._constants if x.meta["is_external"]]
        self.externals = [*{id(x): x for x in (*external_tensors, *externals_inside)}.values()]
        limits = {node: _magnitude(tensor) for node, tensor in tensors.items()}
        magnitudes = {node: limit for node, limit in limits.items() if limit is not None}
        self._with_large_integers = {step.node for step in steps if step.has_large_integers}
        self._conservative_bounds = magnitude_bounds(steps, magnitudes, CONSERVATIVE)
        self._typical_bounds = magnitude_bounds(steps, magnitudes, TYPICAL)
        missing = (step.operation for step in steps if isinstance(step.operation, Unsupported))
        self.unsupported: list[Unsupported] = list(dict.fromkeys(missing))

    @cached_property
    def _local_constants(self) -> list[Any]:
        """The values of the tensors that the code created itself, which no later call changes."""
        # Outside traces and meshes: `jnp.asarray` would commit them to the mesh that is set here (JAX 0.12).
        with jax.ensure_compile_time_eval():
            return [_constant(tensor, jax.device_put) for tensor in self._local_tensors]

    def constants(self) -> list[Any]:
        """Returns the values of the tensors that are not inputs: local ones, then the current ones of `externals`.

        In a Function that another graph applies, these are the ones that the other graph got.
        """
        passed = _PASSED.values
        externals = [passed[id(x)] if id(x) in passed else _constant(x) for x in self.externals]
        return [*self._local_constants, *externals]

    def run(self, inputs: Sequence[Any], key: Any = None, constants: Sequence[Any] | None = None) -> Any:
        """Computes the outputs of the graph for JAX arrays.

        Args:
          inputs: One JAX array for each placeholder, in order.
          key: A JAX random key, for graphs that draw random numbers.
          constants: The result of `constants()`. Default: its current result.

        Returns:
          The graph's result, with the structure and dtypes that torch recorded (dtypes under the x64 setting).

        Raises:
          TranslationError: An operation has no translation, or random numbers are drawn without a key.
        """
        return self.outputs(self.evaluate({}, inputs, key, constants))

    def outputs(self, values: Mapping[Node, Any]) -> Any:
        """Returns the graph's result from the values of all nodes."""
        return self._to_int32(self._output, _substitute(self._output.arguments, values))[0]

    def extremes(self, values: Mapping[Node, Any]) -> dict[int, tuple[jax.Array, jax.Array]]:
        """Returns the smallest and the largest of each of `indices`, by its position."""
        found = enumerate(saturate_to_int32(values.get(indices.node)) for indices in self.indices)
        return {i: (x.min(), x.max()) for i, x in found if isinstance(x, jax.Array) and x.size}

    def evaluate(
        self, known: Mapping[Node, Any], inputs: Sequence[Any], key: Any, constants: Sequence[Any] | None = None
    ) -> dict[Node, Any]:
        """Returns the values of all nodes, from those that are known; see `run`."""
        if self.unsupported:
            raise TranslationError(unsupported_message(self.unsupported))
        constants = self.constants() if constants is None else constants
        # Behind the constants of this graph are those of the Functions inside.
        values: dict[Node, Any] = {**known, **dict(zip(self._constants, constants, strict=False))}
        remaining = iter(inputs)
        passed = zip(map(id, self.externals), constants[len(self._local_constants) :], strict=True)
        with setting(_PASSED, values=dict(passed)):
            for segment in self._segments:
                if segment.is_recomputed:
                    recomputed = jax.checkpoint(partial(self._evaluate_segment, segment, values, key))
                    values |= zip(segment.results, recomputed(), strict=True)
                    continue
                for step in segment.steps:
                    node = step.node
                    if node.op == "placeholder":
                        values[node] = _cast_as_recorded(next(remaining), node)
                    elif node.op == "call_function" and node not in values:
                        values[node] = self._evaluate(step, values, key)
        return values

    def _evaluate_segment(self, segment: _Segment, values_before: Mapping[Node, Any], key: Any) -> list[Any]:
        values = dict(values_before)
        for step in segment.steps:
            if step.node.op == "call_function":
                values[step.node] = self._evaluate(step, values, key)
        return [values[node] for node in segment.results]

    def _evaluate(self, step: Step, values: Mapping[Node, Any], key: Any) -> Any:
        """Evaluates an operation."""
        node, operation = step.node, cast(Operation, step.operation)
        if "largest_number" in node.meta:  # Numbers are computed in 64 bits, as by Python.
            with jax.enable_x64(True):
                return operation.function(*_substitute(step.arguments, values))
        numbers = {x: to_operand(values[x], x) for x in node.all_input_nodes if "largest_number" in x.meta}
        values = {**values, **numbers} if numbers else values
        arguments, options = _substitute((step.arguments, step.options), values)
        leaves = jax.tree_util.tree_leaves((arguments, options))
        if not operation.accepts_half and any(map(is_half, leaves)):
            arguments, options = half_to_single((arguments, options))
        if operation.draws:
            if key is None:
                raise TranslationError(f"{operation_name(node.target)}{_line(node)} draws random numbers: pass `key=`")
            arguments = (jax.random.fold_in(key, node.meta["num_drawn"]), *arguments)
        if _is_x64_off() and self._needs_int64(step, leaves):
            return self._run_with_int64(step, arguments, options)
        with _line_scope(node):
            return _cast_as_recorded(operation.function(*arguments, **options), node)

    def _needs_int64(self, step: Step, operands: Sequence[Any]) -> bool:
        """Whether an operation has an operand, or may have a result, that does not fit in 32 bits."""
        is_large = self._conservative_bounds.get(step.node, 0) > LARGEST
        grows = is_large and may_grow(short_name(operation_name(step.node.target)))
        return grows or step.node in self._with_large_integers or any(map(is_int64, operands))

    def _run_with_int64(self, step: Step, arguments: Any, options: Any) -> Any:
        """Evaluates an operation on int64 arrays. A replacement gets int32, since it also runs elsewhere."""
        operation = cast(Operation, step.operation)
        if step.node.target is operator.getitem:
            return operation.function(*arguments)
        if operation not in TABLE.values():
            arguments, options = self._to_int32(step, (arguments, options))
            return _cast_as_recorded(operation.function(*arguments, **options), step.node)
        with jax.enable_x64(True):
            return _cast_as_recorded(operation.function(*to_int64(arguments), **to_int64(options)), step.node)

    def _to_int32(self, step: Step, arguments: Any) -> Any:
        """Casts a step's int64 arguments to int32. Raises if the code shows that they do not fit."""
        if not has_int64(arguments):
            return arguments
        operands: list[Any] = jax.tree_util.tree_leaves((step.arguments, step.options))
        for operand in operands:
            if isinstance(operand, Node) and self._typical_bounds.get(operand, 0) > LARGEST:
                source = cast(Node, operand.args[0]) if operand.target is operator.getitem else operand
                raise TranslationError(
                    f"{operation_name(source.target)}{_line(source)} computes an integer that needs 64 bits. Without "
                    "jax.config.update('jax_enable_x64', True) JAX's integers have 32"
                )
        return saturate_to_int32(arguments)


class _PassedExternals(threading.local):
    """The values of external tensors, by identity, in the graph that a thread evaluates, for Functions inside."""

    values: Mapping[int, Any] = {}


_PASSED = _PassedExternals()


# The position of the argument that contains indices.
_INDEX_ARGUMENT = {
    **dict.fromkeys(["index", "index_put", "take", "embedding", "put"], 1),
    **dict.fromkeys(["gather", "index_select", "scatter", "scatter_add", "scatter_reduce"], 2),
    **dict.fromkeys(["index_add", "index_copy", "index_fill", "index_reduce"], 2),
}


class Indices(NamedTuple):
    """A tensor of indices into a dimension of another tensor.

    Attributes:
      low: The smallest valid index.
      size: The size of the dimension.
      line: The line of torch code that indexes, or the operation if the line is unknown.
    """

    node: Node
    low: int
    size: int
    line: str


def _indices_of(step: Step) -> Iterator[Indices]:
    """Yields the index tensors of a step, if torch checks their range and the table's implementation is used."""
    name = operation_name(step.node.target)
    short, line = short_name(name), node_source_line(step.node) or name
    position = None if "_unsafe" in name or "_backward" in name else _INDEX_ARGUMENT.get(short)
    if position is None or step.operation is not TABLE.get(entry_name(name) or ""):
        return
    at, shape = step.arguments[position], _results(step.arguments[0])[0].shape
    if short in ("index", "index_put"):  # With a mask among them the operation raises.
        parts = [(x, size) for x, size in zip(at, shape, strict=False) if x is not None]
        yield from (Indices(x, -size, size, line) for x, size in parts if _results(x)[0].dtype in _INTEGERS)
    elif short in ("take", "put"):
        yield Indices(at, -shape.numel(), shape.numel(), line)
    else:
        size = shape[0 if short == "embedding" else step.arguments[1]] if shape else 1
        yield Indices(at, -size if short == "index_fill" else 0, size, line)


class _Segment(NamedTuple):
    """Consecutive steps, which differentiation may recompute, with the nodes that later steps use."""

    is_recomputed: bool
    steps: list[Step]
    results: list[Node]


def _make_segments(steps: Sequence[Step]) -> list[_Segment]:
    groups = [(key, list(group)) for key, group in groupby(steps, lambda step: step.node.meta.get("recomputed"))]
    segments: list[_Segment] = []
    for key, group in groups:
        segment_nodes = {step.node for step in group}
        results = [x.node for x in group if key is not None and not segment_nodes.issuperset(x.node.users)]
        segments.append(_Segment(key is not None, group, results))
    return segments


def unsupported_message(entries: Sequence[Unsupported]) -> str:
    """Returns the message for unsupported operations."""
    return (
        "no translation to JAX for\n"
        + "\n".join(f"  {entry}" for entry in entries)
        + "\nName a JAX function for each by `ops={torch_op: jax_function}`, or for a Python function around it, or "
        "use other operations."
    )


class Step(NamedTuple):
    """A node, its arguments, with the schema's positional ones filled in, and its implementation, if it has one."""

    node: Node
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    operation: Operation | Unsupported | None

    @property
    def has_large_integers(self) -> bool:
        """Whether a Python integer among the arguments of an integer operation needs 64 bits."""
        if not any(map(is_large, jax.tree_util.tree_leaves((self.arguments, self.options)))):
            return False
        if operation_name(self.node.target).startswith(("aten.slice", "aten.narrow")):
            return False
        results = {tensor.dtype for tensor in _results(self.node)}
        operands = {x.dtype for node in self.arguments if isinstance(node, Node) for x in _results(node)}
        if torch.bool in results:  # A comparison. torch casts the number to the tensor's dtype.
            return torch.int64 in operands
        is_ratio = any(dtype.is_floating_point for dtype in results) and not operands.isdisjoint(_INTEGERS)
        return torch.int64 in results or is_ratio


_INTEGERS = frozenset({torch.int64, torch.int32})


def _is_x64_off() -> bool:
    """Whether JAX's integers have 32 bits."""
    return jax.dtypes.canonicalize_dtype(np.int64) != np.int64


def _make_step(node: Node, replacements: Mapping[str, Callable[..., Any]]) -> Step:
    operation = find_implementation(node, replacements) if node.op == "call_function" else None
    return Step(node, *_schema_arguments(node), operation)


def _schema_arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a node's arguments, with the positional ones of the operation's schema filled in."""
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
    """Replaces nodes by their values, and torch dtypes by JAX dtypes."""
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, torch.dtype):
        return jax_dtype(value)
    if isinstance(value, tuple):
        return tuple(_substitute(item, values) for item in value)
    if isinstance(value, list):  # torch.fx has its own list type.
        return [_substitute(item, values) for item in value]
    if isinstance(value, dict):
        return {name: _substitute(item, values) for name, item in value.items()}
    return value


def find_implementation(node: Node, replacements: Mapping[str, Callable[..., Any]]) -> Operation | Unsupported:
    """Returns the implementation of a node's operation: the replacement, or the table's entry."""
    if isinstance(node.target, JaxCall):
        return Operation(node.target, node.target.draws, accepts_half=True)
    if node.target is operator.getitem:  # One of several results
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
    tensor = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    if tensor is None or not (operation.reads_storage or operation.for_noncontiguous):
        return operation
    if operation.for_noncontiguous is not None and not tensor.is_contiguous():
        return Operation(operation.for_noncontiguous)
    if operation.reads_storage:
        *_, size, stride, offset = _schema_arguments(node)[0]
        elements = _view_elements(tensor, size, stride, offset)
        if elements is None:
            return _unsupported(node, _READS_AROUND)
        return operation._replace(function=_bind_elements(operation.function, elements))
    return operation


def _unsupported(node: Node, reason: str | None) -> Unsupported:
    line: Line | None = node.meta.get("line")
    return Unsupported(operation_name(node.target), node_source_line(node), reason, line and line.callable)


_READS_AROUND = (
    "it reads storage outside its argument, which is a slice of another tensor: take the view of that tensor"
)


def _bind_elements(function: Callable[..., Any], elements: np.ndarray[Any, Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments[:-3], elements)


def _view_elements(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> np.ndarray[Any, Any] | None:
    """Returns the element numbers of a view of a tensor's storage; `None` if the view has other elements."""
    if not math.prod(size):
        return np.zeros(tuple(size), int)
    begin = int(tensor.storage_offset())
    offsets = _storage_offsets(tensor.shape, tensor.stride(), begin).reshape(-1)
    view_offsets = _storage_offsets(size, stride, begin if offset is None else offset)
    order = np.argsort(offsets, kind="stable")
    found = np.minimum(np.searchsorted(offsets[order], view_offsets), len(offsets) - 1)
    return order[found] if len(offsets) and (offsets[order][found] == view_offsets).all() else None


def _storage_offsets(size: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray[Any, Any]:
    """Returns the storage offsets of a strided tensor's elements."""
    axes = (np.arange(length) * step for length, step in zip(size, stride, strict=True))
    return offset + reduce(np.add.outer, axes, np.zeros((), int))


def _dtype_problem(node: Node) -> str | None:
    """Returns why JAX does not support the dtype of a result; `None` if it does."""
    try:
        for result in _results(node):
            jax_dtype(result.dtype)
    except TranslationError as error:
        return str(error)
    return None


def _results(node: Node) -> list[torch.Tensor]:
    """Returns the tensors that torch recorded as a node's results."""
    recorded = node.meta.get("val")
    results = recorded if isinstance(recorded, (tuple, list)) else [recorded]
    return [result for result in results if isinstance(result, torch.Tensor)]


def _line_scope(node: Node) -> AbstractContextManager[object]:
    """Returns a scope that adds the node's source line to the names of its operations, if `find_nan` observes them."""
    is_observed = OBSERVATION.value is Observation.VALUES
    return jax.named_scope(line_name(node_source_line(node) or "")) if is_observed else nullcontext()


def node_source_line(node: Node) -> str | None:
    """Returns the line of the user's code that called a node's operation, as `file:line: code`."""
    line: Line | None = node.meta.get("line")
    return f"{line.file}:{line.number}: {line.text}".rstrip(": ") if line else None


def _line(node: Node) -> str:
    line = node_source_line(node)
    return f", called at {line}," if line else ""


def _constant(value: torch.Tensor, convert: Callable[[Any], jax.Array] = jnp.asarray) -> jax.Array:
    limit = _magnitude(value)
    with jax.enable_x64(True) if limit is not None and limit > LARGEST and _is_x64_off() else nullcontext():
        return convert(to_numpy(value).astype(jax_dtype(value.dtype), copy=False))


def _magnitude(value: torch.Tensor) -> int | None:
    """Returns the largest magnitude in an int64 constant; `None` for other constants."""
    if value.dtype != torch.int64 or not value.numel():
        return None
    with plain_torch():
        return max(-int(value.amin()), int(value.amax()), 0)


def _cast_as_recorded(result: Any, node: Node) -> Any:
    """Casts a result to the dtype that torch recorded for the node. Raises if the shape differs."""
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
    if result is None:  # A result that the output mask excludes.
        return None
    array = result if isinstance(result, jax.Array) else jnp.asarray(result)
    if tuple(array.shape) != tuple(recorded.shape):
        raise TranslationError(
            f"{operation_name(node.target)}{_line(node)} has a result of shape {tuple(recorded.shape)}; "
            f"its translation gave {tuple(array.shape)}"
        )
    dtype = jax_dtype(recorded.dtype)
    return array if array.dtype == dtype and not array.weak_type else lax.convert_element_type(array, dtype)
