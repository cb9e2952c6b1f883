"""One trace of torch code: what it records, how tensors get in and out, and which trace a thread is making."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    OPERATION_TYPES,
    FunctionalTensor,
    is_composite,
    plain_torch,
    without_functions,
)
from jaxfn._torch.graph.recorder import NO_EXTERNALS, ExternalTensors, Recorder
from jaxfn._torch.graph.targets import key_by_name, operation_name
from jaxfn._torch.trace.detach import DETACHED, stop_detached
from jaxfn._torch.trace.leaks import track
from jaxfn._torch.trace.selection import Selection, raise_unsupported

LEAF = "jaxfn_leaf"  # the attribute of an argument with the leaf of autograd's that it is a copy of


class Replacements(NamedTuple):
    """The operations and functions that JAX functions replace.

    Attributes:
      all: everything, as the user gave it.
      operations: of torch's, given as overloads, packets, `torch.library` definitions or names, by name.
      functions: of Python's.
    """

    all: Mapping[Any, Callable[..., Any]]
    operations: Mapping[str, Callable[..., Any]]
    functions: Mapping[Any, Callable[..., Any]]

    @classmethod
    def of(cls, ops: Mapping[Any, Callable[..., Any]]) -> Replacements:
        """Sorts them; refuses operations that no trace ever sees."""
        for op in filter(is_composite, ops):
            name = operation_name(op)
            raise ValueError(
                f"ops={{{name}: ...}}: torch makes {name} of other operations before jaxfn sees it, so the replacement "
                "would never be called. Name the Python function that the code calls (as torch.matmul, or "
                "torch.nn.functional.linear), or the operations that explain() shows."
            )
        callables = {op: getattr(f, "apply", f) if isinstance(f, type) else f for op, f in ops.items()}
        operations = {op: replacement for op, replacement in callables.items() if _is_operation(op)}
        functions = {op: replacement for op, replacement in callables.items() if op not in operations}
        return cls(ops, key_by_name(operations), functions)


def _is_operation(op: object) -> bool:
    return isinstance(op, (str, *OPERATION_TYPES)) or hasattr(op, "_opoverload")


class NestedApply(NamedTuple):
    """The handlers of a Function that the code applies; they take the trace, the Function, and `apply`'s arguments.

    Attributes:
      apply: records it as one node, which keeps its own rule at every order, and returns what it returns.
      can_be_repeated: whether the same call once more gives the same again.
    """

    apply: Callable[[TraceState, Any, Sequence[Any], Mapping[str, Any]], Any]
    can_repeat: Callable[[TraceState, Any, Sequence[Any], Mapping[str, Any]], bool]


class TraceConfig(NamedTuple):
    """How torch code is traced.

    Attributes:
      replacements: The operations and functions that JAX functions replace.
      nested: The handlers of Functions that the code applies.
      externals: The graph inputs for tensors from outside the code.
      is_nested: Whether the code is a Function that other torch code applies.
    """

    replacements: Replacements
    nested: NestedApply
    externals: ExternalTensors = NO_EXTERNALS
    is_nested: bool = False


# A context in which a module holds other tensors, by the names of its parameters and buffers.
TensorSwap = Callable[[Mapping[str, torch.Tensor]], AbstractContextManager[None]]


class ModuleTensors(NamedTuple):
    """The tensors that a module holds while it is traced.

    Attributes:
      tensors: parameters and buffers, by name.
      holding: has it hold other ones.
    """

    tensors: Mapping[str, torch.Tensor]
    swap: TensorSwap


class TraceState:
    """One trace.

    Args:
      owner: whose code it is, for messages.
      config: how it is traced.
      is_differentiated: whether what the code computes may be differentiated again, as in `backward`.
      says_compiling: what the code hears when it asks whether it is being compiled.

    Attributes:
      asks_compiling: whether it has asked.
      asks_requires_grad: whether it has asked that of a tensor whose derivative autograd does not know of.
      first_gradient: which of its inputs is the first gradient; of those before, in `backward`, some require none.
      arguments_require_grad: whether arguments of a module or function require a gradient, for autograd to say.
      held: what a module holds, where one is traced.
      written: the parameters among that which have other values when it returns.
      read_in_backward: what a `backward` reads of what it holds: the `backward`, the name, and the value then.
      kept: what Functions keep that they were applied to: the tensor, its value then, and what to call where that is
        another one in the end.
      part_names: the names of its parts, by identity.
      first_access: whether code first "read" or "set" an attribute, by the module's identity and name.
      hooked_where_used: the line, if any, that registers a hook on a tensor that its own derivative may use.
      functions: the Functions that it applied, one after the other, each with what is known of the call.
    """

    def __init__(
        self,
        name: str,
        config: TraceConfig,
        *,
        is_differentiated: bool = False,
        is_compiling: bool = True,
    ) -> None:
        self.name = name
        self.config = config
        self.is_differentiated = is_differentiated
        self.recorder = Recorder(name, config.replacements.operations, config.externals)
        self.reads_needs_input_grad = False
        self.reads_is_compiling = False
        self.reads_requires_grad = False
        self.arguments_require_grad = False
        self.first_gradient_input = 0
        self._is_compiling = is_compiling
        self.module_tensors: ModuleTensors | None = None
        self.mutated_parameters: Sequence[str] = ()
        self.backward_reads: list[tuple[str, str, torch.fx.Node]] = []
        self.saved_arguments: list[tuple[torch.Tensor, torch.fx.Node, Callable[[], None]]] = []
        self.module_names: Mapping[int, str] = {}
        self.first_access: dict[tuple[int, str], str] = {}
        self.hook_on_used_output: str | None = None
        self.functions: list[Any] = []
        self._requires_grad: dict[int, bool] = {}
        self._inputs: list[torch.Tensor] = []

    def add_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        memory_format_source: str | None = None,
        requires_grad: bool | None = None,
    ) -> torch.Tensor:
        """A new input of the trace.

        Args:
          shape: its shape.
          dtype: its type.
          permuted: what it has the order of its elements in memory from, where that may be another than its axes say.
          requires_grad: what it says when asked, if it is one of the Function's.
        """
        with without_functions():
            tensor = self.lift(self.recorder.add_input(shape, dtype, memory_format_source))
            if requires_grad is not None:
                if dtype.is_floating_point or dtype.is_complex:
                    tensor.requires_grad_()  # whatever it says, so that autograd inside works for any input
                self._requires_grad[id(tensor)] = requires_grad
        self._inputs.append(tensor)
        return tensor

    def mutated_inputs(self) -> set[int]:
        """The inputs that have another value than in the beginning."""
        return {i for i, x in enumerate(self._inputs) if self.recorder.input_index(self.lower(x)) != i}

    def check_saved_arguments(self) -> None:
        """Has Functions refuse to be differentiated that keep what was written to after them."""
        for tensor, node, refuse_derivative in self.saved_arguments:
            if not self.recorder.has_same_values(self.recorder.node(self.lower(tensor)), node):
                refuse_derivative()
        self.saved_arguments.clear()

    def add_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made in another trace that depended on no input."""
        self.recorder.add_local_constant(tensor)
        return self.lift(tensor)

    def note_flags_read(self) -> None:
        """Notes that the code looks at which inputs need a gradient."""
        self.reads_needs_input_grad = True

    def is_compiling(self) -> bool:
        """Answers the code's question whether it is being compiled."""
        self.reads_is_compiling = True
        return self._is_compiling

    def requires_grad(self, tensor: torch.Tensor) -> bool | None:
        """Returns whether an input requires a gradient; `None` for a tensor that is no input."""
        self.reads_needs_input_grad |= id(tensor) in self._requires_grad
        return self._requires_grad.get(id(tensor))

    def may_require_grad(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a derivative that autograd does not know of, as gradients are off in `backward`.

        Elsewhere arguments of a module or function have such ones, of which `make_argument` lets autograd know.
        """
        is_unknown = self.is_differentiated or (self.recorder.follows_grad_mode and not self.arguments_require_grad)
        if DETACHED in vars(tensor) or not is_unknown:
            return False
        value = self.lower(tensor)
        reached = self.recorder.differentiable_inputs(value) if self.recorder.is_differentiable(value) else ()
        may_be = any(i >= self.first_gradient_input or self._requires_grad.get(id(self._inputs[i])) for i in reached)
        self.reads_requires_grad |= may_be
        return may_be

    def make_argument(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input that requires a gradient, and is no leaf, so that code may write to it."""
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return tensor
        with without_functions(), torch.enable_grad():
            argument = tensor.requires_grad_().clone()
        vars(argument)[LEAF] = tensor
        return argument

    def describe_module(self, module: torch.nn.Module) -> str:
        """Returns a module's name in messages."""
        return f"{self.module_names.get(id(module)) or 'the module'} ({type(module).__name__})"

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor from below functionalization as the code sees it."""
        with without_functions():
            return track(FunctionalTensor.to_functional(tensor))

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present value of a tensor of the code's, as it is below functionalization."""
        if isinstance(tensor, Selection):
            raise_unsupported("keeping or returning")
        if not isinstance(tensor, FunctionalTensor):
            return tensor
        with without_functions():
            if DETACHED in vars(tensor):
                stop_detached(self.recorder, tensor)
            return tensor.from_functional()

    def is_traced(self, value: object) -> bool:
        """Whether a value is a tensor that depends on the inputs."""
        return isinstance(value, FunctionalTensor) and self.recorder.is_traced(self.lower(value))

    def is_same_computation(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors have the same values, as far as it can be seen from how they were computed."""
        return self.recorder.is_same_computation(self.recorder.node(self.lower(a)), self.recorder.node(self.lower(b)))

    def record_call(self, target: Callable[..., Any], tensors: Sequence[torch.Tensor], value: Any) -> Any:
        """Records a call of a function of JAX arrays, which gives `value` (of `Recorder.fake` tensors)."""
        with without_functions():
            lowered = [self.lower(tensor) for tensor in tensors]
            value = self.recorder.record_call(target, tuple(lowered), {}, value)
            return torch_tree.tree_map_only(torch.Tensor, self.lift, value)

    def finish(self, outputs: Iterable[torch.Tensor]) -> torch.fx.GraphModule:
        """The graph of everything that these outputs need. Nothing of the code's is held any more."""
        self._inputs.clear()
        self.module_tensors = None
        with plain_torch():
            return self.recorder.finish(outputs)


class _ActiveTrace(threading.local):
    """The tracing state of a thread.

    Attributes:
      tracing: the innermost trace that it is making.
      in_whole_backward: the torch Functions whose whole `backward` it is tracing, in advance.
    """

    state: TraceState | None = None
    traced_backwards: tuple[Any, ...] = ()


ACTIVE = _ActiveTrace()


def active_trace() -> TraceState:
    """The innermost trace that this thread is making, for code that runs in traces alone."""
    assert ACTIVE.state is not None
    return ACTIVE.state
