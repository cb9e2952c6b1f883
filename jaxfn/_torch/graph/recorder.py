"""Records what torch code does to its tensors, as a `torch.fx` graph of functional ATen operations.

Three layers turn an operation of the user's Python into a node:

    the user's code   on `FunctionalTensor`s, with autograd above them (`torch.autograd.grad` works inside)
    functionalization in-place operations and views become pure operations
    `Recorder`        each operation becomes a node

Below functionalization a tensor is either *traced*, a `FakeTensor` with a shape and no values, because it is computed
from inputs or random draws; or real: *constant*, created in this trace, or *external*, a parameter, a buffer or a
captured tensor. Operations on real tensors are executed, so Python code may read their values. They are recorded as
well if they depend on an external tensor, or create a large one.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    BELOW_FUNCTIONALIZATION,
    FAKE_IMPLEMENTATIONS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedOperatorException,
    decompose,
    decompositions,
    plain_torch,
    storage_id,
)
from jaxfn._torch.graph.interpreter import RecordedGraph
from jaxfn._torch.graph.numbers import TracedNumber, is_operand, item, map_numbers, numbers_in, read_number
from jaxfn._torch.graph.reads import NO_VALUES, STAYS, Answerer, CallValues, Read, same_bits
from jaxfn._torch.graph.shape_inference import ShapeInference
from jaxfn._torch.graph.source_lines import Line, format_line, ops_hint, running_line, source_line
from jaxfn._torch.graph.statements import running_purpose
from jaxfn._torch.graph.targets import JaxCall, draws_random_numbers
from jaxfn._torch.operations import entry_name, unsupported_reason
from jaxfn._torch.values.arrays import is_differentiable, jax_dtype, to_jax, to_torch, torch_dtype
from jaxfn._torch.values.errors import DataDependentError, EscapedTensorError, TranslationError
from jaxfn._torch.values.flatten import flatten_tensors, map_tensors, tensors_in, unflatten_tensors
from jaxfn._torch.values.scopes import setting
from jaxfn._tree import is_array_leaf

aten = torch.ops.aten

# A constant with more elements than this is created by a node of the graph, if it has no tensor operands.
_LARGE = 4096


_STOP_GRADIENT = JaxCall(jax.lax.stop_gradient, "stop_gradient")


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, differentiated: jax.Array) -> jax.Array:
    """Returns `value`, with the derivative of `differentiated`."""
    return value


@_with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _with_gradient_of(*primals), tangents[1]  # The tangent itself has derivatives of higher orders.


_WITH_GRADIENT_OF = JaxCall(_with_gradient_of, "with_gradient_of")


class ExternalTensors(NamedTuple):
    """The external tensors (parameters and buffers) that are graph inputs, for a trace and the Functions applied in it.

    Attributes:
      names: The names of parameters and buffers, by storage.
      strides_source: The tensor from which inputs may inherit non-contiguous strides; `None` if there is none.
      gradient_strides_source: The tensor from which gradients may inherit them; `None` if there is none.
      backward_guard: A context in which `backward` is traced. It takes the method's name, for messages.
    """

    names: Mapping[int | None, str] = {}
    strides_source: str | None = None
    gradient_strides_source: str | None = None
    backward_guard: Callable[[str], AbstractContextManager[None]] = lambda who: contextlib.nullcontext()


# For a trace without external tensors.
NO_EXTERNALS = ExternalTensors()


_READS = {
    "check": "in a check whose failure the code may handle, or that computes with it",
    "branch": "to choose a branch (in an `if`, or by `max()` of numbers)",
    "loop": "to end a loop (in a `while`)",
    "number": "as a number (by `int()`, `float()`, `.item()`)",
    "array": "as an array or a list (by `.numpy()`, `.tolist()`)",
    "shape": "for the shape of a result, which is static on JAX (of a mask, `nonzero`, `unique`)",
}


class Recorder(TorchDispatchMode):
    """Builds the graph of one trace. It is entered below functionalization.

    Args:
      name: The name of the code in messages.
      replacements: The JAX functions that replace operations, by the operations' names.
      externals: The graph inputs for external tensors.
      answerer: Answers the reads of values of traced tensors.

    Attributes:
      reads: The answered reads.
      skipped: The reads of checks without an answer, which are assumed to pass.
      numbers: The numbers that `item()` returned, each with an entry for `explain`.
      is_finished: Whether the trace has ended.
      unanswered: The error of a read without an answer. The code may have caught it.
      reads_external_values: Whether Python code read values of an external tensor.
      is_seeded: Whether the code set torch's random state.
      differentiates_externals: Whether autograd inside the code stored a gradient in an external tensor.
      has_aliased_inputs: Whether inputs represent tensors that share storage.
      follows_grad_mode: Whether the results of operations under `torch.no_grad()` have no derivative.
      untraceable_kernels: Why the Python code of custom operations cannot be traced.
      linked_storages: Pairs of tensors that share storage in torch but not in the graph, with the reason and a hint.
      saved_storages: The storages of tensors that autograd saved.
      visited_nodes: The nodes of autograd's graph whose saved tensors are in `saved_storages`.
      operand_error: What torch raised for the operands of an operation, and their shapes.
      data_mutation: The line that mutated a tensor by `.data`, if any.
    """

    _mode_key = BELOW_FUNCTIONALIZATION  # the slot of FakeTensorMode

    def __init__(
        self,
        name: str,
        replacements: Mapping[str, Callable[..., Any]],
        externals: ExternalTensors,
        answerer: Answerer = NO_VALUES,
    ) -> None:
        super().__init__()
        self.name = name
        self.answerer = answerer
        self.reads: list[Read] = []
        self.skipped: list[Read] = []
        self.numbers: list[tuple[TracedNumber, Read]] = []
        self.is_finished = False
        self.unanswered: DataDependentError | None = None
        self.externals = externals
        self._replacements = replacements
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.reads_external_values = False
        self.is_seeded = False
        self.differentiates_externals = False
        self.has_aliased_inputs = False
        self.follows_grad_mode = False
        self.untraceable_kernels: dict[Any, str] = {}
        self.linked_storages: list[tuple[Any, Any, str, str]] = []
        self.visited_nodes: set[Any] = set()
        self.saved_storages: set[int | None] = set()
        self.operand_error: tuple[Exception | None, str] = None, ""
        self.data_mutation: str | None = None
        self._shapes = ShapeInference()
        self._nodes: dict[int, torch.fx.Node] = {}  # by the identity of their tensors
        self._value_sources: dict[torch.fx.Node, torch.fx.Node] = {}  # nodes with equal values
        self._references: list[torch.Tensor] = []  # so that tensors are not freed, and identities stay unique
        self._local: set[int] = set()  # constants that were created in this trace
        self._depend_on_external: set[int] = set()  # constants that depend on an external tensor
        self._external_views: set[int] = set()  # constants that are views of an external tensor
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}  # `.grad` of external tensors
        self._strides_sources: dict[torch.fx.Node, str] = {}  # where nodes' strides come from
        self._nested_externals: dict[str | None, ExternalTensors] = {}
        self._inputs: list[torch.fx.Node] = []
        self._num_draws = 0
        self._read_constants: list[torch.Tensor] = []  # the answers to `reads`
        self._stops = False
        self._recomputed: int | None = None  # the active `recomputing` block, by number
        self._num_recomputed = 0

    # ------------------------------------------------------------------------------------------------ tensors and nodes

    def add_input(self, shape: Sequence[int], dtype: torch.dtype, strides_source: str | None = None) -> torch.Tensor:
        """Adds an input to the graph, and returns its traced tensor."""
        node = self.graph.placeholder(f"input_{len(self._inputs)}")
        self._inputs.append(node)
        tensor = self._bind_node(self.make_fake(shape, dtype), node)
        if strides_source is not None:
            self.record_strides(tensor, strides_source)
        return tensor

    def make_fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor without values."""
        return self._shapes.make_fake(shape, dtype)

    def _to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        return self._shapes.fake_like(tensor)

    @property
    def recorded(self) -> RecordedGraph:
        """The graph, as far as it is recorded."""
        return RecordedGraph(self.graph, self.constants, self._replacements)

    def finish(self, outputs: Iterable[torch.Tensor]) -> RecordedGraph:
        """Returns the graph with these outputs and then what was read, without unused nodes."""
        self.linked_storages.clear()
        self.visited_nodes.clear()
        self._check_reads_unchanged()
        self.graph.output((*(self.node(tensor) for tensor in outputs), *(read.node for read in self.reads)))
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)
        used = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        return self.recorded._replace(constants={name: self.constants[name] for name in used})

    def _check_reads_unchanged(self) -> None:
        """Raises if the code wrote to the NumPy array of a tensor that may be used later, as they share memory."""
        for read, constant in zip(self.reads, self._read_constants, strict=True):
            is_copy = read.node.op == "call_function" and not read.node.users and read.node.target is aten.clone.default
            if not is_copy and not same_bits(np.asarray(to_jax(constant)), read.answer):
                raise TranslationError(
                    f"{self.name} writes to the NumPy array of a tensor, which shares its memory. JAX arrays share "
                    f"none. Copy the array first, `tensor.numpy().copy()`{format_line(read.line)}"
                )

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, from below functionalization, depends on the inputs."""
        return isinstance(tensor, FakeTensor)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends neither on the inputs nor on external tensors, which may get new values."""
        return (
            not isinstance(tensor, FakeTensor)
            and id(tensor) in self._local
            and id(tensor) not in self._depend_on_external
        )

    def add_local_constant(self, constant: torch.Tensor) -> None:
        """Registers a real tensor as created in this trace."""
        self._local.add(id(constant))
        self._references.append(constant)

    def input_index(self, tensor: torch.Tensor) -> int | None:
        """Returns the index of the input that a tensor is; `None` if it is not an input."""
        node = self._nodes.get(id(tensor))
        return self._inputs.index(node) if node in self._inputs else None

    def is_same_computation(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        """Whether two nodes apply equal operations to equal operands, at every step from the inputs."""
        numbers: dict[Any, int] = {}  # One number for each distinct computation.
        numbered: dict[torch.fx.Node, int] = {}
        for node in self.graph.nodes:
            operands, _ = torch_tree.tree_flatten((node.args, dict(node.kwargs)))
            parts = [("node", numbered[x]) if isinstance(x, torch.fx.Node) else (type(x), x) for x in operands]
            is_repeatable = node.op == "call_function" and not draws_random_numbers(node.target)
            computation = (node.target, *parts) if is_repeatable else node
            numbered[node] = numbers.setdefault(computation, len(numbers))
        return numbered[a] == numbered[b]

    def has_same_values(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        """Whether two nodes have equal values, whatever their derivatives, as far as the graph shows."""
        a, b = self._value_source(a), self._value_source(b)
        return a is b or self.is_same_computation(a, b)

    def _value_source(self, node: torch.fx.Node) -> torch.fx.Node:
        """Returns the node from which another one has its values, unchanged."""
        while True:
            source = self._value_sources.get(node)
            if source is None and node.target in _VALUE_ARGUMENT:
                source = cast(torch.fx.Node, node.args[_VALUE_ARGUMENT[node.target]])
            if source is None:
                return node
            old, new = source.meta["val"], node.meta["val"]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                return node
            node = source

    def stopping_gradients(self) -> AbstractContextManager[None]:
        """Records `detach` as `stop_gradient` inside the block; outside it, `detach` comes from autograd itself."""
        return setting(self, _stops=True)

    @property
    def is_grad_disabled(self) -> bool:
        """Whether the results of operations have no derivative at present."""
        return self.follows_grad_mode and not torch.is_grad_enabled()

    def stop_gradient(self, tensor: torch.Tensor) -> None:
        """Stops the gradient of a tensor."""
        self._bind_node(tensor, self._new_node(_STOP_GRADIENT, (self.node(tensor),)))

    def is_used(self, tensor: torch.Tensor) -> bool:
        """Whether a differentiable result was computed from a tensor."""
        return any(user.meta["is_differentiable"] for user in self.node(tensor).users)

    def detach_value(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with equal values and no derivative."""
        return self._bind_node(self._shapes.fake_like(value), self._new_node(_STOP_GRADIENT, (self.node(value),)))

    def with_gradient_of(self, value: torch.Tensor, differentiated: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with the values of `value` and the derivative of `differentiated`."""
        if not self.is_differentiable(differentiated):
            return self.detach_value(value) if self.is_differentiable(value) else value
        return self._bind_node(
            self._shapes.fake_like(value),
            self._new_node(_WITH_GRADIENT_OF, (self.node(value), self.node(differentiated))),
        )

    def is_differentiable(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a derivative with respect to an input."""
        node = self._nodes.get(id(tensor))
        return node is not None and node.meta["is_differentiable"]

    def differentiable_inputs(self, tensor: torch.Tensor) -> set[int]:
        """Returns the inputs by which a tensor has a derivative, as far as the graph shows."""
        found: set[torch.fx.Node] = set()
        pending = [self.node(tensor)]
        while pending:
            node = pending.pop()
            if node in found or node.target is _STOP_GRADIENT or not _has_derivative(node.meta.get("val")):
                continue
            found.add(node)
            pending += [cast(torch.fx.Node, node.args[1])] if node.target is _WITH_GRADIENT_OF else node.all_input_nodes
        return {i for i, node in enumerate(self._inputs) if node in found}

    def undo_stop_gradient(self, tensor: torch.Tensor) -> None:
        """Undoes `stop_gradient`."""
        node = self._nodes.get(id(tensor))
        while node is not None and node.target is _STOP_GRADIENT:  # torch 2.8 detaches twice
            node = self._nodes[id(tensor)] = cast(torch.fx.Node, node.args[0])

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Returns the node that computes a tensor; adds one for a constant."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if isinstance(tensor, FakeTensor):
            raise EscapedTensorError(
                f"{self.name} uses a tensor of another call of forward, which an object or a closure references. Save "
                "it by ctx.save_for_backward(tensor), or as an attribute ctx.name = tensor."
            )
        if tensor.layout is not torch.strided:
            raise TranslationError(f"{self.name} uses a tensor of layout {tensor.layout}: {_NO_SPARSE}{source_line()}")
        self._check_not_external(tensor)
        self._stash_gradient(tensor)
        name = f"constant_{len(self.constants)}"
        with plain_torch():
            self.constants[name] = tensor.detach() if id(tensor) in self._local else tensor
        node = self.graph.get_attr(name)
        node.meta["is_external"] = not self.is_constant(tensor)
        return self.node(self._bind_node(tensor, node))

    def _check_not_external(self, tensor: torch.Tensor) -> None:
        """Raises if the code reaches a tensor that is a graph input, or a result of one, through another object."""
        if not self.externals.names or id(tensor) in self._local:
            return
        name = self.externals.names.get(storage_id(tensor))
        if name is None and (tensor.grad_fn is None or not self.follows_grad_mode):
            return
        what = f"its parameter or buffer {name!r} by another tensor than its own" if name else "a tensor with a graph"
        raise TranslationError(
            f"{self.name} uses {what}, stored in an object, a tuple, a closure or a partial: it would be a constant, "
            f"with torch's values and no gradient. Use the module's attribute{source_line()}"
        )

    def set_node(self, tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Makes the node of `of`, which has equal values, the node of `tensor`; returns `tensor`."""
        before, node = self._nodes.get(id(tensor)), self.node(of)
        if before is not None and before is not node:
            self._value_sources[node] = before
        self._nodes[id(tensor)] = node
        self._references.append(tensor)
        return tensor

    def _new_node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["recomputed"] = self._recomputed
        node.meta["num_drawn"] = self._num_draws  # Before this one, also by nodes that will turn out to be unused.
        self._num_draws += draws_random_numbers(target)
        return node

    def recomputing(self) -> AbstractContextManager[None]:
        """Rematerializes, under a derivative, what is recorded inside the block, as `jax.checkpoint` does."""
        if self._recomputed is not None or not self.follows_grad_mode:
            return contextlib.nullcontext()
        self._num_recomputed += 1
        return setting(self, _recomputed=self._num_recomputed)

    def _bind_node(self, value: Any, node: torch.fx.Node) -> Any:
        """Makes `node` the node of `value`, a tensor or a tuple or list of tensors; returns `value`."""
        node.meta["val"] = map_tensors(self._to_fake, value)
        node.meta["is_differentiable"] = _has_derivative(node.meta["val"]) and (
            node.op == "placeholder" or _is_differentiable_node(node)
        )
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._references.append(value)
        elif isinstance(value, (tuple, list)):
            for index, part in enumerate(cast(Sequence[Any], value)):
                if isinstance(part, torch.Tensor):
                    self._bind_node(part, self._new_node(operator.getitem, (node, index)))
        return value

    # ------------------------------------------------------------------------------------------------ operations

    def record_call(self, target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], value: Any) -> Any:
        """Records a call of a Python function of arrays that returns `value` (tensors from `make_fake`)."""
        self._record(target, (args, kwargs), value)
        if self.is_grad_disabled:
            for part in torch_tree.tree_leaves(value):
                if isinstance(part, torch.Tensor) and self.is_differentiable(part):
                    self.stop_gradient(part)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries, for example of the device
            return func(*args, **kwargs)
        operands = tensors_in((args, kwargs))
        if operands and all(x.device.type == "meta" for x in operands):  # torch infers a shape
            with plain_torch():
                return func(*args, **kwargs)
        if self.numbers and numbers_in((args, kwargs)):
            return self._call_with_numbers(func, args, kwargs)
        is_traced = any(isinstance(x, FakeTensor) for x in operands)
        if func in _IDENTITIES and is_traced:
            if self._stops and func is aten.detach.default:
                return self.record_call(_STOP_GRADIENT, args, {}, self._infer_outputs(func, args, kwargs))
            # Autograd itself detaches too. The derivative of such tensors is not stopped.
            return self.set_node(self._infer_outputs(func, args, kwargs), args[0])
        draws = draws_random_numbers(func)
        if draws:
            self._check_draw(func, kwargs)
        replacement = self.replacement(func)
        if replacement is not None and is_traced:
            return self.record_call(func, args, kwargs, self.infer_jax_outputs(replacement, args, kwargs))
        if not is_traced and not draws:
            return self._run_on_constants(func, args, kwargs, operands)
        if func in _FILL_VALUES:
            faked = self._infer_outputs(func, args, kwargs)
            if _has_derivative(faked):
                return self._record(func, (args, kwargs), faked)
            return self._make_filled_constant(faked, _FILL_VALUES[func](args))
        if func._schema.is_mutable:  # Functionalization removed others; this one is in a decomposition.
            raise TranslationError(
                f"{self.name}: torch implements an operation by {func}, which mutates its arguments. Name a JAX "
                f"function that replaces the operation: from_torch(..., ops={{operation: function}}){source_line()}"
            )
        if entry_name(str(func)) is None and unsupported_reason(str(func)) is None:
            results = self._decompose(func, args, kwargs)
            if results is not NotImplemented:
                return results
        if func in _STRIDED_OPERATIONS and not _reads_first_element(func, *args, **kwargs):
            self._check_strides(args[0])
        try:
            return self._record(func, (args, kwargs), self._infer_outputs(func, args, kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass
        return self._call_with_values(func, args, kwargs)

    # ------------------------------------------------------------------------------------------------ numbers

    def item(self, tensor: torch.Tensor, line: Line | None) -> TracedNumber | None:
        """Returns the only element of a traced tensor, for a line of user code; `None` if it is to be read."""

        def read() -> Any:
            self._check_active()
            with plain_torch():
                return self.read(tensor).item()

        node = self.node(tensor)
        number = None if self.answerer.reads_numbers else item(self, node, read)
        if number is not None:
            self.answerer.gave_numbers = True
            entry = Read(node, line, np.array("a traced number"), STAYS, "number")
            self.numbers.append((number, entry))
        return number

    def record_number(self, target: JaxCall, operands: Sequence[Any], largest: int) -> torch.fx.Node:
        """Records the computation of a number, or of a condition, from nodes and Python numbers."""
        self._check_active(*operands)
        node = self._new_node(target, tuple(operands))
        node.meta.update(val=None, is_differentiable=False, largest_number=largest, line=running_line())
        return node

    def read_condition(self, target: JaxCall, operands: Sequence[Any]) -> bool:
        """Computes and reads a condition on numbers."""
        condition = self._bind_node(self.make_fake((), torch.bool), self.record_number(target, operands, 0))
        with plain_torch():
            return bool(self.read(condition, "branch"))

    def _check_active(self, *operands: Any) -> None:
        """Raises if a number of another trace, or of one that has ended, is used."""
        if self.is_finished or any(isinstance(x, torch.fx.Node) and x.graph is not self.graph for x in operands):
            raise EscapedTensorError(
                f"{self.name} uses a number, the `.item()` of a tensor, of another call of forward or backward. Store "
                "it as an attribute ctx.name = number, or convert it with float()"
            )

    def _call_with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Records an operation on traced numbers. Reads them if its implementation needs their values."""
        args, kwargs = map_numbers(lambda number: number, (args, kwargs))
        if self.replacement(func) is None:
            if entry_name(str(func)) is None and unsupported_reason(str(func)) is None:
                results = self._decompose(func, args, kwargs)
                if results is not NotImplemented:
                    return results
            numbers = numbers_in((args, kwargs))
            self._check_active(*(number.result for number in numbers))
            value = self._infer_outputs(func, *map_numbers(lambda number: number.kind(1), (args, kwargs)))
            if all(is_operand(number, func, value) for number in numbers):
                return self._record(func, map_numbers(lambda number: number.result, (args, kwargs)), value)
        args, kwargs = map_numbers(read_number, (args, kwargs))
        return self.__torch_dispatch__(func, (), args, kwargs)

    # ------------------------------------------------------------------------------------------------ values

    def read(self, tensor: torch.Tensor, kind: str = "number", hint: str = "") -> torch.Tensor:
        """Returns a tensor with values, which Python code needs, for a traced one; other tensors unchanged.

        Args:
          tensor: A tensor from below functionalization.
          kind: What they are needed for, unless that is a condition; see `Read`.
          hint: What to do if the values are unknown.

        Raises:
          DataDependentError: The values are unknown.
        """
        if not self.is_traced(tensor):
            self.reads_external_values |= not self.is_constant(tensor)
            return tensor
        node, line, purpose = self.node(tensor), running_line(), running_purpose()
        kind = (kind in ("number", "branch") and purpose.kind) or kind
        reads = self.reads
        try:
            answer = self.answerer.answer(self.recorded, node, line)
            if answer is None and self.answerer.skips_checks and kind == "check" and purpose.passing is not None:
                answer = np.full(tuple(tensor.shape), purpose.passing).astype(jax_dtype(tensor.dtype))
                reads = self.skipped
            if answer is None:
                raise DataDependentError(
                    f"Python code reads the value of a tensor {_READS[kind]}, and a traced tensor has none. "
                    f"{hint or self.answerer.ways_out}{ops_hint(line)}{format_line(line)}"
                )
        except DataDependentError as error:
            self.unanswered = DataDependentError(f"{self.name}: {error}")
            raise self.unanswered from None
        with plain_torch():
            constant = to_torch(answer).to(tensor.dtype)
        reads.append(Read(node, line, answer, self.answerer.source, kind))
        if reads is self.reads:
            self._read_constants.append(constant)
        self.add_local_constant(constant)
        return constant

    def add_reads(self, tensors: Sequence[torch.Tensor], reads: Sequence[Read]) -> None:
        """Adds reads by a Function that the code applies: traced tensors, with what they gave there."""
        self.reads += [read._replace(node=self.node(x)) for x, read in zip(tensors, reads, strict=True)]
        with plain_torch():
            self._read_constants += [to_torch(read.answer) for read in reads]

    def values_of(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the arrays of tensors in the call for which the code is traced."""
        assert isinstance(self.answerer, CallValues)
        nodes = [self.node(x) for x in tensors]
        return [self.answerer.evaluate(self.recorded, node) for node in nodes]

    def _call_with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operation that returns a Python value, or whose result has a shape that depends on values."""
        kind, hint = "number", ""
        if torch.Tag.dynamic_output_shape in func.tags:
            kind = "shape"
            hint = (
                f"{func}: {unsupported_reason(str(func)) or _DYNAMIC_SHAPE}. {self.answerer.ways_out}. Or name a JAX "
                f"function, ops={{torch.ops.{func}: jax_function}}"
            )
        with self:
            if func is aten.equal.default:
                return args[0].shape == args[1].shape and bool(aten.eq.Tensor(*args).all())
            if func is aten.nonzero.default:
                size = int(self.read(aten.count_nonzero(args[0]), kind, hint))
                fake = self.make_fake((size, args[0].dim()), torch.int64)
                return self.record_call(_NONZERO, (args[0], size), {}, fake)
            if func is aten.index.Tensor:
                return aten.index(args[0], self._without_masks(args[1]))
            if func is aten.repeat_interleave.Tensor:
                return func(args[0], output_size=int(self.read(args[0].sum(), kind, hint)))
        args, kwargs = torch_tree.tree_map_only(torch.Tensor, lambda x: self.read(x, kind, hint), (args, kwargs))
        with plain_torch():
            value = func(*args, **kwargs)
        torch_tree.tree_map_only(torch.Tensor, self.add_local_constant, value)
        return value

    def _without_masks(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replaces masks among the indices of a tensor by the indices of their true elements."""
        parts: list[torch.Tensor | None] = []
        for part in indices:
            is_mask = part is not None and part.dtype in (torch.bool, torch.uint8)
            parts += aten.nonzero(part).unbind(1) if is_mask else [part]
        return parts

    def replacement(self, func: Any) -> Callable[..., Any] | None:
        """Returns the JAX function that replaces an operation, if any."""
        return self._replacements.get(str(func)) or self._replacements.get(str(func).rpartition(".")[0])

    def nested_externals(self, tensors: Sequence[torch.Tensor], function: str) -> ExternalTensors:
        """Returns the externals for a Function that is applied to these tensors."""
        source = None
        for i, tensor in enumerate(tensors):
            source = source or self.strides_source_of(tensor, f"tensor argument {i} of {function}")
        if source == self.externals.strides_source:
            return self.externals
        return self._nested_externals.setdefault(source, self.externals._replace(strides_source=source))

    def record_strides(self, tensor: torch.Tensor, source: str) -> None:
        """Records where a tensor's strides come from; see `strides_source_of`."""
        self._strides_sources[self.node(tensor)] = source

    def strides_source_of(self, tensor: torch.Tensor, name: str) -> str | None:
        """Returns where a tensor's strides come from, if they may be noncontiguous; `name` if from the tensor
        itself.
        """
        source = self._inherited_strides(tensor)
        return name if source is None and has_nonstandard_strides(tensor) else source

    def _inherited_strides(self, tensor: torch.Tensor) -> str | None:
        """Returns the recorded source of a tensor from which this one may have inherited its strides."""
        node = self._nodes.get(id(tensor))
        pending, seen = [node] if self._strides_sources and node else [], set[torch.fx.Node]()
        while pending:
            node = pending.pop()
            if source := self._strides_sources.get(node):
                return source
            pending += [other for other in node.all_input_nodes if other not in seen]
            seen.update(node.all_input_nodes)
        return None

    def _check_strides(self, tensor: torch.Tensor) -> None:
        if source := self._inherited_strides(tensor):
            raise TranslationError(
                f"{self.name} reads memory by strides (as_strided) that depend on {source}, which may be noncontiguous "
                "in torch (channels_last, transposed, or a part of another tensor); JAX arrays have no strides. Make "
                "it contiguous where it is created: by `tensor.contiguous()` before a Function takes, saves or returns "
                "it, and for a parameter by `parameter.data = "
                f"parameter.data.clone(memory_format=torch.contiguous_format)`{source_line()}"
            )

    def _record(self, target: Any, arguments: tuple[Any, Any], value: Any) -> Any:
        args, kwargs = map_tensors(self.node, arguments)
        kwargs.pop("generator", None)
        node = self._new_node(target, _to_plain_containers(args), _to_plain_containers(kwargs))
        node.meta["line"] = running_line()
        node.meta["reason"] = self.untraceable_kernels.get(target)
        return self._bind_node(value, node)

    def _infer_outputs(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the outputs of an operation on traced tensors, without values."""

        def infer() -> Any:
            fake_args, fake_kwargs = map_tensors(self._to_fake, (args, kwargs))
            with self._shapes.mode:
                return FAKE_IMPLEMENTATIONS.get(func, func)(*fake_args, **fake_kwargs)

        try:
            return self._shapes.results(func, args, kwargs, infer)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise
        except (RuntimeError, NotImplementedError) as error:
            is_compiled_only = isinstance(error, UnsupportedOperatorException) or any(
                words in str(error) for words in ("fake impl", "Could not run")
            )
            if not is_compiled_only:
                shapes = [tuple(x.shape) for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                self.operand_error = error, f"{func} got {', '.join(map(str, shapes))}"
                raise
            reason = self.untraceable_kernels.get(func, "which has only compiled code")
            raise TranslationError(
                f"{self.name} calls {func}, {reason}, and torch cannot infer what shapes it returns. Name a JAX "
                f"function that replaces it: from_torch(..., ops={{torch.ops.{func}: function}}){source_line()}"
            ) from error

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Decomposes an operation without an entry in the table; returns `NotImplemented` if torch cannot."""
        rule = decompositions().get(func)
        with self:
            if rule is not None:
                return rule(*args, **kwargs)
            return decompose(func, args, kwargs)

    def _run_on_constants(self, func: Any, args: Any, kwargs: Any, operands: Sequence[torch.Tensor]) -> Any:
        """Executes an operation on constants only."""
        if func is aten.lift_fresh.default:  # The result of `torch.tensor(numbers)`.
            for operand in operands:
                self.add_local_constant(operand)
        depends_on_external = any(id(x) in self._depend_on_external or id(x) not in self._local for x in operands)
        if func._schema.is_mutable and any(map(self._is_external, mutated_arguments(func, args, kwargs))):
            raise TranslationError(f"{self.name}: {func} {MUTATES_EXTERNAL}{source_line()}")
        for operand in operands:
            self._stash_gradient(operand)
        value = func(*args, **kwargs)
        parts = tensors_in(value)
        is_large = any(part.numel() > _LARGE for part in parts)
        can_record = entry_name(str(func)) is not None and not any(tag in func.tags for tag in _DYNAMIC_TAGS)
        external_storages = {storage_id(x) for x in operands if self._is_external(x)}
        for part in parts:
            if storage_id(part) in external_storages:
                self._external_views.add(id(part))
            self.add_local_constant(part)
            if depends_on_external:
                self._depend_on_external.add(id(part))
        # An external tensor may get new values, so what depends on it is computed in every call.
        if can_record and (depends_on_external or (is_large and not operands)):
            self._record(func, (args, kwargs), value)
        elif depends_on_external and not (parts and all(id(part) in self._external_views for part in parts)):
            self.reads_external_values = True
        return value

    def _make_filled_constant(self, like: torch.Tensor, value: Any) -> torch.Tensor:
        """Returns a constant of the shape of a traced tensor, for integers, which Python code may read."""
        with plain_torch():
            filled = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(value)
            self.add_local_constant(filled)
            if filled.numel() > _LARGE:
                self._record(aten.full.default, ((like.shape, value), {"dtype": like.dtype}), filled)
        return filled

    @property
    def shape_env(self) -> Any:
        """Raises, since torch's other ways to trace, which look up this attribute, do not work in a trace."""
        raise TranslationError(
            f"{self.name} traces code with torch (torch.func.linearize, make_fx, torch.compile), inside code that "
            f"jaxfn traces. Call it directly, or use torch.func.jvp in place of torch.func.linearize{source_line()}"
        )

    def is_local(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a constant that does not share storage with an external tensor."""
        return not isinstance(tensor, FakeTensor) and not self._is_external(tensor)

    def _is_external(self, tensor: torch.Tensor) -> bool:
        """Whether a constant is an external tensor, or a view of one."""
        return id(tensor) not in self._local or id(tensor) in self._external_views

    def _stash_gradient(self, tensor: torch.Tensor) -> None:
        """Removes the `.grad` of an external tensor until the trace ends, since autograd may add to it."""
        if tensor.is_leaf and tensor.requires_grad and tensor not in self._gradients:
            self._gradients[tensor] = tensor.grad
            tensor.grad = None

    def restore_gradients(self) -> None:
        """Restores the `.grad` of external tensors."""
        if self._gradients:
            with plain_torch():
                for tensor, gradient in self._gradients.items():
                    self.differentiates_externals |= tensor.grad is not None
                    tensor.grad = gradient

    def _check_draw(self, func: Any, kwargs: Mapping[str, Any]) -> None:
        generator = kwargs.get("generator")
        if self.is_seeded or (generator is not None and _was_just_seeded(generator)):
            raise TranslationError(
                f"{self.name}: {func} draws from a random state that the code sets itself (a generator or a seed). On "
                f"JAX all random numbers come from the key passed to apply, key=jax.random.key(...){source_line()}"
            )

    def infer_jax_outputs(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Returns the outputs of a JAX function for these tensors, without values; Python values are unchanged."""
        arguments = flatten_tensors((tuple(args), dict(kwargs)))
        templates: list[Any] = []

        def apply_to_arrays(*arrays: Any) -> list[Any]:
            args, kwargs = unflatten_tensors(arguments.template, arrays)
            returned = flatten_tensors(function(*args, **kwargs), is_array_leaf)
            templates.append(returned.template)
            return returned.leaves

        shapes = [jax.ShapeDtypeStruct(tuple(x.shape), jax_dtype(x.dtype)) for x in arguments.leaves]
        avals = jax.eval_shape(apply_to_arrays, *shapes)
        return unflatten_tensors(templates[-1], [self.make_fake(aval.shape, torch_dtype(aval.dtype)) for aval in avals])


def has_nonstandard_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is noncontiguous (as in channels_last) or has a storage offset (as a slice does)."""
    if tensor.layout is not torch.strided or torch.nn.parameter.is_lazy(tensor):
        return False
    return not (tensor.is_contiguous() and tensor.storage_offset() == 0)


MUTATES_EXTERNAL = (
    "mutates an external tensor (a buffer of a module, for example). On JAX that would "
    "happen once, during tracing, and not in every call. Return the new value instead. net.apply returns state that a "
    "module registers by `self.register_buffer(name, tensor)`"
)
_DYNAMIC_SHAPE = (
    "the shape of its result depends on the values of a tensor, and JAX's shapes are static. Use torch.where, or "
    "multiply by a mask, instead of selecting elements"
)


def _nonzero(x: jax.Array, size: int) -> jax.Array:
    return jnp.stack(jnp.nonzero(x, size=size), -1)


_NONZERO = JaxCall(_nonzero, "nonzero")
_NO_SPARSE = "sparse tensors have no counterpart on JAX; use `.to_dense()`"


def _is_differentiable_node(node: torch.fx.Node) -> bool:
    """Whether a node's result has a derivative with respect to an input."""
    operands = node.all_input_nodes
    if node.target is _WITH_GRADIENT_OF:
        operands = [cast(torch.fx.Node, node.args[1])]
    return node.target is not _STOP_GRADIENT and any(operand.meta["is_differentiable"] for operand in operands)


def _has_derivative(value: Any) -> bool:
    """Whether the dtype of a tensor in a node's result is differentiable."""
    return any(is_differentiable(x.dtype) for x in tensors_in(value))


# Operations whose result has the values of an argument, if shape and dtype match, with the argument's index.
_VALUE_ARGUMENT: Mapping[Any, int] = {
    _WITH_GRADIENT_OF: 0,
    _STOP_GRADIENT: 0,
    aten.clone.default: 0,
    aten.copy.default: 1,
    aten.expand.default: 0,
    aten.view.default: 0,
}
_STRIDED_OPERATIONS = (aten.as_strided.default, aten.as_strided_scatter.default)


def _reads_first_element(
    func: Any, tensor: Any, size: Sequence[int], stride: Any = None, storage_offset: int | None = None, *_: Any
) -> bool:
    """Whether an operation reads nothing but a tensor's first element, which does not depend on strides."""
    return func is aten.as_strided.default and math.prod(size) == 1 and storage_offset is None


_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
# Operations that fill a tensor of an argument's shape with one number, with a function that returns the number.
_FILL_VALUES: dict[Any, Callable[[Any], Any]] = {
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}
# The tags of operations whose results have shapes that depend on values.
_DYNAMIC_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _was_just_seeded(generator: torch.Generator) -> bool:
    """Whether the user seeded a generator, and nothing has been drawn from it since."""
    with plain_torch():
        fresh = torch.Generator()
        seed = generator.initial_seed()
        is_default = seed == fresh.initial_seed()
        return not is_default and torch.equal(generator.get_state(), fresh.manual_seed(seed).get_state())


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operation mutates."""
    if not func._schema.is_mutable:
        return []
    names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return [x for x in torch_tree.tree_leaves([arguments.get(name) for name in names]) if isinstance(x, torch.Tensor)]


def _to_plain_containers(arguments: Any) -> Any:
    """Returns arguments with plain lists and tuples, which a graph requires."""
    return map_aggregate(arguments, lambda argument: argument)
