"""Records what torch code does to its tensors, as a `torch.fx` graph of functional ATen operations.

Three layers of torch's own make an operation in the user's Python into a node here:

    the user's code   on `FunctionalTensor`s, with autograd above them (`torch.autograd.grad` inside works)
    functionalization in-place writes and views become pure operations
    `Recorder`        a node for each operation

Below functionalization a tensor is either *traced*, a `FakeTensor` that has a shape and no values, because it depends
on the Function's inputs; or *constant*, a real tensor that does not. Operations on constants alone really run, so that
Python code may look at their values; only operations on traced tensors, random draws, and constants that are operands
of those end up in the graph.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import jax
import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    BELOW_FUNCTIONALIZATION,
    FAKE_IMPLEMENTATIONS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    decompose,
    decompositions,
    plain_torch,
    storage_id,
)
from jaxfn._torch.graph.source_lines import Line, format_line, ops_hint, running_line, source_line
from jaxfn._torch.graph.targets import JaxCall, draws_random_numbers
from jaxfn._torch.operations import entry_name, unsupported_reason
from jaxfn._torch.values.arrays import jax_dtype, torch_dtype
from jaxfn._torch.values.errors import DataDependentError, EscapedTensorError, TranslationError
from jaxfn._torch.values.flatten import flatten_tensors, unflatten_tensors
from jaxfn._tree import is_array_leaf

aten = torch.ops.aten

# Constants of more elements than this are made in the graph where they can be.
_LARGE = 4096


_STOP_GRADIENT = JaxCall(jax.lax.stop_gradient, "stop_gradient")


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, differentiated: jax.Array) -> jax.Array:
    """`value`, with the derivative of `carrier`."""
    return value


@_with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _with_gradient_of(*primals), tangents[1]  # which carries derivatives of higher orders, too


_WITH_GRADIENT_OF = JaxCall(_with_gradient_of, "carried")


class ExternalTensors(NamedTuple):
    """The graph inputs for tensors from outside, in a trace and in those of the Functions that are applied in it.

    Attributes:
      names: of tensors that have a stand-in, parameters and buffers, by their memory.
      permuted: what an input has the order of its elements in memory from, where that may be another than its axes say.
      permuted_gradients: likewise of gradients.
      guarding: a context in which backward runs, whose name it is given, for messages.
    """

    names: Mapping[int | None, str] = {}
    memory_format_source: str | None = None
    gradient_memory_format_source: str | None = None
    backward_guard: Callable[[str], AbstractContextManager[None]] = lambda who: contextlib.nullcontext()


# Of a trace in which nothing made outside has a stand-in.
NO_EXTERNALS = ExternalTensors()


class AssumedValue(NamedTuple):
    """A place where Python code asks for a tensor's value.

    Attributes:
      line: which.
      value: what it was told, to see what it does then.
    """

    line: Line | None
    value: bool | float

    def __str__(self) -> str:
        name = self.line and self.line.callable
        around = f"; ops={{{name}: jax_function}} would stand for the function around it" if name else ""
        return f"{format_line(self.line)}\n    (taken to be {self.value}{around})"


class Recorder(TorchDispatchMode):
    """Builds the graph of one trace; entered below functionalization.

    Args:
      owner: whose code it is, for messages.
      replaced: the operations that a JAX function stands for, by name.
      stood_in: what stands for things made outside.
    """

    _mode_key = BELOW_FUNCTIONALIZATION

    def __init__(self, name: str, replacements: Mapping[str, Callable[..., Any]], externals: ExternalTensors) -> None:
        super().__init__()
        self.name = name
        self.externals = externals
        self._replacements = replacements
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.reads_external_values = False  # whether Python code looked at the values of a tensor made outside
        self.is_seeded = False  # whether the code set torch's random state
        self.differentiates_externals = False  # whether autograd inside gave a gradient to a tensor made outside
        self.has_aliased_inputs = False  # whether inputs stand for tensors that lie in each other's memory
        self.assumed: list[AssumedValue] | None = None  # what Python code was told of values that are not there
        self.follows_grad_mode = False  # whether what is computed under `torch.no_grad()` has no derivative
        self.untraceable_kernels: dict[Any, str] = {}  # why the Python code of a custom operation cannot be traced
        self.linked_storages: list[
            tuple[Any, Any, str, str]
        ] = []  # memory that torch has once for both; why, and what helps
        self.visited_nodes: set[Any] = set()  # those of autograd's graph that were looked at, and what they saved
        self.saved_storages: set[int | None] = set()
        self.operand_error: tuple[Exception | None, str] = None, ""  # what torch refused to compute, and the shapes
        self.data_mutation: str | None = None  # the line that wrote by `.data`
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._nodes: dict[int, torch.fx.Node] = {}  # of tensors, by identity
        self._value_sources: dict[torch.fx.Node, torch.fx.Node] = {}  # the nodes that others have the same values as
        self._references: list[torch.Tensor] = []  # so that no identity is used twice
        self._local: set[int] = set()  # the constants made in this trace
        self._external_dependent: set[int] = set()  # the constants that depend on a tensor made outside
        self._external_views: set[int] = set()  # the constants that lie in memory of a tensor made outside
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}  # what tensors made outside had as `.grad`
        self._memory_format_sources: dict[torch.fx.Node, str] = {}  # what a node has its order in memory from
        self._nested_externals: dict[str | None, ExternalTensors] = {}
        self._inputs: list[torch.fx.Node] = []
        self._stops = False
        self._recomputed: int | None = None  # which part is being recorded that is computed again; see `recomputing`
        self._num_recomputed = 0

    # ------------------------------------------------------------------------------------------------ tensors and nodes

    def add_input(
        self, shape: Sequence[int], dtype: torch.dtype, memory_format_source: str | None = None
    ) -> torch.Tensor:
        """A new input of the graph: a traced tensor.

        Args:
          shape: its shape.
          dtype: its type.
          permuted: what it has the order of its elements in memory from, where that may be another than its axes say.
        """
        node = self.graph.placeholder(f"input_{len(self._inputs)}")
        self._inputs.append(node)
        tensor = self._bind_node(self.make_fake(shape, dtype), node)
        if memory_format_source is not None:
            self.record_memory_format(tensor, memory_format_source)
        return tensor

    def make_fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values."""
        with plain_torch():
            return FakeTensor(self._fake, torch.empty(tuple(shape), dtype=dtype, device="meta"), torch.device("cpu"))

    def _to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        return self._fake_like(tensor)

    def _fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with plain_torch():
            length = tensor.untyped_storage().nbytes() // tensor.element_size()
            meta = torch.empty(length, dtype=tensor.dtype, device="meta")
            meta = meta.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            return FakeTensor(self._fake, meta, torch.device("cpu"))

    def finish(self, outputs: Iterable[torch.Tensor]) -> torch.fx.GraphModule:
        """The graph with these outputs, and without what they do not need."""
        self.linked_storages.clear()
        self.visited_nodes.clear()
        self.graph.output(tuple(self.node(tensor) for tensor in outputs))
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        root = torch.nn.Module()
        for name in used:
            setattr(root, name, self.constants[name])
        return torch.fx.GraphModule(root, self.graph, class_name=self.name)

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, from below functionalization, depends on the inputs."""
        return isinstance(tensor, FakeTensor)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether it depends neither on the inputs nor on tensors made outside, which may get new values."""
        return (
            not isinstance(tensor, FakeTensor)
            and id(tensor) in self._local
            and id(tensor) not in self._external_dependent
        )

    def add_local_constant(self, constant: torch.Tensor) -> None:
        """Counts a real tensor among those made in this trace."""
        self._local.add(id(constant))
        self._references.append(constant)

    def input_index(self, tensor: torch.Tensor) -> int | None:
        """Returns the index of the input that a tensor is; `None` if it is none."""
        node = self._nodes.get(id(tensor))
        return self._inputs.index(node) if node in self._inputs else None

    def is_same_computation(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        """Whether two nodes are the same computation."""
        numbers: dict[Any, int] = {}  # of computations, so that each node is looked at once
        known: dict[torch.fx.Node, int] = {}
        for node in self.graph.nodes:
            operands, _ = torch_tree.tree_flatten((node.args, dict(node.kwargs)))
            parts = [("node", known[x]) if isinstance(x, torch.fx.Node) else (type(x), x) for x in operands]
            is_repeatable = node.op == "call_function" and not draws_random_numbers(node.target)
            computation = (node.target, *parts) if is_repeatable else node
            known[node] = numbers.setdefault(computation, len(numbers))
        return known[a] == known[b]

    def has_same_values(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        """Whether two nodes have the same values, whatever their derivatives are, as far as the graph shows."""
        a, b = self._value_source(a), self._value_source(b)
        return a is b or self.is_same_computation(a, b)

    def _value_source(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node that another one has its values from, unchanged."""
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

    @contextlib.contextmanager
    def stopping_gradients(self) -> Generator[None]:
        """Inside, `detach` is what the user's code asked for."""
        self._stops, before = True, self._stops
        try:
            yield
        finally:
            self._stops = before

    @property
    def is_grad_disabled(self) -> bool:
        """Whether what is computed now has no derivative."""
        return self.follows_grad_mode and not torch.is_grad_enabled()

    def stop_gradient(self, tensor: torch.Tensor) -> None:
        """Takes the derivative off a tensor."""
        self._bind_node(tensor, self._new_node(_STOP_GRADIENT, (self.node(tensor),)))

    def is_used(self, tensor: torch.Tensor) -> bool:
        """Whether anything was computed from a tensor that has a derivative."""
        return any(user.meta["is_differentiable"] for user in self.node(tensor).users)

    def detach_value(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with the values of another one and without its derivative."""
        return self._bind_node(self._fake_like(value), self._new_node(_STOP_GRADIENT, (self.node(value),)))

    def with_gradient_of(self, value: torch.Tensor, differentiated: torch.Tensor) -> torch.Tensor:
        """A tensor with the values of one and the derivative of another."""
        if not self.is_differentiable(differentiated):
            return self.detach_value(value) if self.is_differentiable(value) else value
        return self._bind_node(
            self._fake_like(value), self._new_node(_WITH_GRADIENT_OF, (self.node(value), self.node(differentiated)))
        )

    def is_differentiable(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a derivative by an input."""
        node = self._nodes.get(id(tensor))
        return node is not None and node.meta["is_differentiable"]

    def differentiable_inputs(self, tensor: torch.Tensor) -> set[int]:
        """The inputs that a tensor has a derivative by, as far as the graph shows."""
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
        """Takes back that a tensor was detached."""
        node = self._nodes.get(id(tensor))
        while node is not None and node.target is _STOP_GRADIENT:  # torch 2.8 detaches twice
            node = self._nodes[id(tensor)] = cast(torch.fx.Node, node.args[0])

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node whose value a tensor is; a constant becomes one here."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if isinstance(tensor, FakeTensor):
            raise EscapedTensorError(
                f"{self.name} uses a tensor of another call of forward, which an object or a closure kept. Keep it by "
                "ctx.save_for_backward(tensor), or as an attribute ctx.name = tensor."
            )
        if tensor.layout is not torch.strided:
            raise TranslationError(f"{self.name} uses a tensor of layout {tensor.layout}: {_NO_SPARSE}{source_line()}")
        self._check_not_external(tensor)
        self._stash_gradient(tensor)
        name = f"constant_{len(self.constants)}"
        with plain_torch():
            self.constants[name] = tensor.detach() if id(tensor) in self._local else tensor
        return self.node(self._bind_node(tensor, self.graph.get_attr(name)))

    def _check_not_external(self, tensor: torch.Tensor) -> None:
        """Raises where code comes by another way to a tensor that has a stand-in, or to what depends on one."""
        if not self.externals.names or id(tensor) in self._local:
            return
        name = self.externals.names.get(storage_id(tensor))
        if name is None and (tensor.grad_fn is None or not self.follows_grad_mode):
            return
        what = f"its parameter or buffer {name!r} by another tensor than its own" if name else "a tensor with a graph"
        raise TranslationError(
            f"{self.name} uses {what}, kept in an object, a tuple, a closure or a partial: it would be a constant, "
            f"with the values that it has in torch and no gradient. Use the module's attribute{source_line()}"
        )

    def set_node(self, tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """`tensor`, whose node is from now on that of `of`, which has the same values."""
        before, node = self._nodes.get(id(tensor)), self.node(of)
        if before is not None and before is not node:
            self._value_sources[node] = before
        self._nodes[id(tensor)] = node
        self._references.append(tensor)
        return tensor

    def _new_node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["recomputed"] = self._recomputed
        return node

    @contextlib.contextmanager
    def recomputing(self) -> Generator[None]:
        """Inside, what is recorded is computed again where it is differentiated, in place of being kept."""
        before = self._recomputed
        if before is None and self.follows_grad_mode:
            self._num_recomputed += 1
            self._recomputed = self._num_recomputed
        try:
            yield
        finally:
            self._recomputed = before

    def _bind_node(self, value: Any, node: torch.fx.Node) -> Any:
        """`value`, a tensor or a tuple or list of them, known as `node`'s from now on."""
        node.meta["val"] = torch_tree.tree_map_only(torch.Tensor, self._to_fake, value)
        node.meta["is_differentiable"] = _has_derivative(node.meta["val"]) and (
            node.op == "placeholder" or _is_node_differentiable(node)
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
        """Records a call of a Python function of arrays, which gives `value` (tensors from `fake`)."""
        self._record(target, (args, kwargs), value)
        if self.is_grad_disabled:
            for part in torch_tree.tree_leaves(value):
                if isinstance(part, torch.Tensor) and self.is_differentiable(part):
                    self.stop_gradient(part)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions, as to the device
            return func(*args, **kwargs)
        operands = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if operands and all(x.device.type == "meta" for x in operands):  # torch asks itself for a shape
            with plain_torch():
                return func(*args, **kwargs)
        is_traced = any(isinstance(x, FakeTensor) for x in operands)
        if func in _IDENTITIES and is_traced:
            if self._stops and func is aten.detach.default:
                return self.record_call(_STOP_GRADIENT, args, {}, self._infer_outputs(func, args, kwargs))
            # Autograd is above; what it detaches for its own purposes keeps its derivative.
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
        if func._schema.is_mutable:  # below functionalization: in a decomposition of torch's own
            raise TranslationError(
                f"{self.name}: torch carries an operation out by {func}, which writes to memory, and a graph has "
                "none. Name a JAX function to stand for what is called: from_torch(..., ops={operation: function})"
                f"{source_line()}"
            )
        if entry_name(str(func)) is None and unsupported_reason(str(func)) is None:
            decompose = self._decompose(func, args, kwargs)
            if decompose is not NotImplemented:
                return decompose
        if func in _STRIDED_OPERATIONS:
            self._check_memory_format(args[0])
        return self._record(func, (args, kwargs), self._infer_outputs(func, args, kwargs))

    def replacement(self, func: Any) -> Callable[..., Any] | None:
        """The JAX function that stands for an operation."""
        return self._replacements.get(str(func)) or self._replacements.get(str(func).rpartition(".")[0])

    def nested_externals(self, tensors: Sequence[torch.Tensor], function: str) -> ExternalTensors:
        """Returns the graph inputs for tensors from outside, in a Function that is applied to these tensors."""
        memory_format_source = None
        for i, tensor in enumerate(tensors):
            memory_format_source = memory_format_source or self.memory_format_of(
                tensor, f"tensor {i} of those that {function} is applied to"
            )
        if memory_format_source == self.externals.memory_format_source:
            return self.externals
        return self._nested_externals.setdefault(
            memory_format_source, self.externals._replace(memory_format_source=memory_format_source)
        )

    def record_memory_format(self, tensor: torch.Tensor, source: str) -> None:
        """Notes what a tensor has the order of its elements in memory from; see `memory_format_of`."""
        self._memory_format_sources[self.node(tensor)] = source

    def memory_format_of(self, tensor: torch.Tensor, name: str) -> str | None:
        """Returns the source of a tensor's memory order, where that may differ from the order of its axes.

        Args:
          tensor: the tensor, from below functionalization.
          name: what it is called where it has that order by itself: a view of a part, or transposed.
        """
        source = self._inherited_memory_format(tensor)
        return name if source is None and has_nonstandard_strides(tensor) else source

    def _inherited_memory_format(self, tensor: torch.Tensor) -> str | None:
        """Returns the tensor of unknown memory order from which a tensor may have taken its own."""
        node = self._nodes.get(id(tensor))
        pending, seen = [node] if self._memory_format_sources and node else [], set[torch.fx.Node]()
        while pending:
            node = pending.pop()
            if source := self._memory_format_sources.get(node):
                return source
            pending += [other for other in node.all_input_nodes if other not in seen]
            seen.update(node.all_input_nodes)
        return None

    def _check_memory_format(self, tensor: torch.Tensor) -> None:
        if source := self._inherited_memory_format(tensor):
            raise TranslationError(
                f"{self.name} reads memory (as_strided) that depends on {source}, whose elements torch has, or may "
                "have, in another order than its axes (channels_last, transposed, or a part of another tensor); arrays "
                "of JAX have none. Make it contiguous where it comes from: by `tensor.contiguous()` before a Function "
                "gets, keeps or returns it, and for a parameter by "
                f"`parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)`{source_line()}"
            )

    def _record(self, target: Any, arguments: tuple[Any, Any], value: Any) -> Any:
        args, kwargs = torch_tree.tree_map_only(torch.Tensor, self.node, arguments)
        kwargs.pop("generator", None)
        node = self._new_node(target, _to_plain_containers(args), _to_plain_containers(kwargs))
        node.meta["line"] = running_line()
        node.meta["reason"] = self.untraceable_kernels.get(target)
        return self._bind_node(value, node)

    def _infer_outputs(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation on traced tensors: shapes and dtypes."""
        args, kwargs = torch_tree.tree_map_only(torch.Tensor, self._to_fake, (args, kwargs))
        try:
            with self._fake:
                return FAKE_IMPLEMENTATIONS.get(func, func)(*args, **kwargs)
        except DataDependentOutputException:
            return self.assume(
                f"{self.name}: {_DATA_DEPENDENT}", args[0].dtype if func in _SCALAR_READS else torch.bool
            )
        except DynamicOutputShapeException:
            reason = unsupported_reason(str(func)) or (
                "the shape of what it returns depends on the values of a tensor, and JAX's shapes are static. Use "
                "torch.where, or a mask that multiplies, instead of selecting elements"
            )
            raise TranslationError(
                f"{self.name}: {func}: {reason}. Or name a JAX function, ops={{torch.ops.{func}: jax_function}}"
                f"{source_line()}"
            ) from None
        except (RuntimeError, NotImplementedError) as error:
            is_compiled_only = isinstance(error, UnsupportedOperatorException) or any(
                words in str(error) for words in ("fake impl", "Could not run")
            )
            if not is_compiled_only:
                shapes = [tuple(x.shape) for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                self.operand_error = error, f"{func} got {', '.join(map(str, shapes))}"
                raise
            reason = self.untraceable_kernels.get(func, "of which torch knows only compiled code")
            raise TranslationError(
                f"{self.name} calls {func}, {reason}, and torch does not know what shapes it returns. Name a JAX "
                f"function to stand for it: from_torch(..., ops={{torch.ops.{func}: function}}){source_line()}"
            ) from error

    def assume(self, problem: str, dtype: torch.dtype) -> Any:
        """Returns an assumed value of a tensor, where only the rest of the code is to be seen; raises otherwise.

        Args:
          problem: what is wrong otherwise.
          dtype: the tensor's.

        Raises:
          NeededValueError: it is to be translated.
        """
        if self.assumed is None:
            raise DataDependentError(f"{problem}{ops_hint(running_line())}{source_line()}")
        line = running_line()
        is_asserted = line is not None and line.text.startswith("assert")
        value = is_asserted if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        place = AssumedValue(line, value)
        self.assumed += [] if place in self.assumed else [place]
        return value

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that the table does not have, in terms of others; `NotImplemented` if torch knows none."""
        rule = decompositions().get(func)
        with self:
            if rule is not None:
                return rule(*args, **kwargs)
            return decompose(func, args, kwargs)

    def _run_on_constants(self, func: Any, args: Any, kwargs: Any, operands: Sequence[torch.Tensor]) -> Any:
        """An operation on constants alone."""
        if func is aten.lift_fresh.default:  # what torch.tensor makes of Python numbers
            for operand in operands:
                self.add_local_constant(operand)
        is_external_dependent = any(id(x) in self._external_dependent or id(x) not in self._local for x in operands)
        if func._schema.is_mutable and any(map(self._is_external, mutated_arguments(func, args, kwargs))):
            raise TranslationError(f"{self.name}: {func} {MUTATES_EXTERNAL}{source_line()}")
        if is_external_dependent and (func is aten._local_scalar_dense.default or _has_data_dependent_shape(func)):
            self.reads_external_values = True
        for operand in operands:
            self._stash_gradient(operand)
        value = func(*args, **kwargs)
        parts = [x for x in torch_tree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        external_storages = {storage_id(x) for x in operands if self._is_external(x)}
        for part in parts:
            if storage_id(part) in external_storages:
                self._external_views.add(id(part))
            self.add_local_constant(part)
            if is_external_dependent:
                self._external_dependent.add(id(part))
        is_large = any(part.numel() > _LARGE for part in parts)
        if (
            (is_external_dependent or (is_large and not operands))
            and entry_name(str(func))
            and not _has_data_dependent_shape(func)
        ):
            # A parameter may get new values, so nothing that was computed from it is kept.
            self._record(func, (args, kwargs), value)
        return value

    def _make_filled_constant(self, like: torch.Tensor, value: Any) -> torch.Tensor:
        """A constant: whole numbers made after the shape of a traced tensor, where Python code looks at values."""
        with plain_torch():
            filled = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(value)
            self.add_local_constant(filled)
            if filled.numel() > _LARGE:
                self._record(aten.full.default, ((like.shape, value), {"dtype": like.dtype}), filled)
        return filled

    @property
    def shape_env(self) -> Any:
        """Asked for by torch's other ways to trace, which do not work inside of this one."""
        raise TranslationError(
            f"{self.name} traces code with torch (torch.func.linearize, make_fx, torch.compile), which is being "
            f"traced itself. Call the code, or torch.func.jvp in the place of torch.func.linearize{source_line()}"
        )

    def is_local(self, tensor: torch.Tensor) -> bool:
        """Whether it is a constant that lies in memory of its own, and not in that of a tensor made outside."""
        return not isinstance(tensor, FakeTensor) and not self._is_external(tensor)

    def _is_external(self, tensor: torch.Tensor) -> bool:
        """Whether a constant is a tensor made outside, or a view of one."""
        return id(tensor) not in self._local or id(tensor) in self._external_views

    def _stash_gradient(self, tensor: torch.Tensor) -> None:
        """Autograd inside may add to the `.grad` of a parameter, which is put back in the end."""
        if tensor.is_leaf and tensor.requires_grad and tensor not in self._gradients:
            self._gradients[tensor] = tensor.grad
            tensor.grad = None

    def restore_gradients(self) -> None:
        """Gives the tensors made outside their `.grad` back."""
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
                f"JAX all random numbers come from the key given to apply, key=jax.random.key(...){source_line()}"
            )

    def infer_jax_outputs(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Returns the results of a JAX function for these tensors: tensors without values, Python values unchanged."""
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
    """Whether its elements lie in memory otherwise than its axes say, as in channels_last, or in a part of another."""
    if tensor.layout is not torch.strided or torch.nn.parameter.is_lazy(tensor):
        return False
    return not (tensor.is_contiguous() and tensor.storage_offset() == 0)


MUTATES_EXTERNAL = (
    "writes to a tensor that was made outside of the Function (a buffer of a module, say). On JAX that would happen "
    "once, while tracing, and not in every call. Return the new value instead; what a module keeps between calls comes "
    "back from net.apply if it is registered by `self.register_buffer(name, tensor)`"
)
_DATA_DEPENDENT = (
    "Python code asks for the value of a tensor (in an `if`, a `while`, `int()`, `.item()`, `.tolist()`, an `assert`), "
    "and while JAX traces there is none. Use torch.where, or pass the number as a Python number"
)
_SCALAR_READS = (aten._local_scalar_dense.default, aten.item.default)
_NO_SPARSE = "sparse tensors have no counterpart on JAX; use `.to_dense()`"


def _is_node_differentiable(node: torch.fx.Node) -> bool:
    """Whether what a node computes has a derivative by an input."""
    operands = node.all_input_nodes
    if node.target is _WITH_GRADIENT_OF:
        operands = [cast(torch.fx.Node, node.args[1])]
    return node.target is not _STOP_GRADIENT and any(operand.meta["is_differentiable"] for operand in operands)


def _has_derivative(value: Any) -> bool:
    """Whether some tensor in what a node gives can have one."""
    tensors = [x for x in torch_tree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return any(x.dtype.is_floating_point or x.dtype.is_complex for x in tensors)


# Which argument has the values of what these give, if shape and dtype are the same.
_VALUE_ARGUMENT: Mapping[Any, int] = {
    _WITH_GRADIENT_OF: 0,
    _STOP_GRADIENT: 0,
    aten.clone.default: 0,
    aten.copy.default: 1,
    aten.expand.default: 0,
    aten.view.default: 0,
}
_STRIDED_OPERATIONS = (aten.as_strided.default, aten.as_strided_scatter.default)
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
# Tensors filled with one number, which depend on the shape alone of a tensor: which number, by the arguments.
_FILL_VALUES: dict[Any, Callable[[Any], Any]] = {
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}
_DYNAMIC_SHAPE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _has_data_dependent_shape(func: Any) -> bool:
    """Whether the shape of what an operation returns depends on values."""
    return any(tag in func.tags for tag in _DYNAMIC_SHAPE)


def _was_just_seeded(generator: torch.Generator) -> bool:
    """Whether a generator has a seed of the user's and nothing has been drawn from it since."""
    with plain_torch():
        fresh = torch.Generator()
        seed = generator.initial_seed()
        is_default = seed == fresh.initial_seed()
        return not is_default and torch.equal(generator.get_state(), fresh.manual_seed(seed).get_state())


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return [x for x in torch_tree.tree_leaves([given.get(name) for name in names]) if isinstance(x, torch.Tensor)]


def _to_plain_containers(arguments: Any) -> Any:
    """Arguments as a graph takes them: torch's own lists and tuples are not all plain ones."""
    return map_aggregate(arguments, lambda argument: argument)
