"""The state of one trace of torch code: what it records, how tensors enter and leave it, and which trace is active."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    PARAMETER_FLAG,
    FunctionalTensor,
    find_operation,
    is_composite,
    plain_torch,
    storage_id,
    without_functions,
    without_modes,
)
from jaxfn._torch.graph.interpreter import RecordedGraph
from jaxfn._torch.graph.reads import NO_VALUES, Answerer
from jaxfn._torch.graph.recorder import NO_EXTERNALS, ExternalTensors, Recorder
from jaxfn._torch.graph.targets import operation_name
from jaxfn._torch.trace.detach import DETACHED, stop_detached
from jaxfn._torch.trace.leaks import track
from jaxfn._torch.trace.selection import Selection, raise_unsupported
from jaxfn._torch.values.arrays import is_differentiable
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.scopes import setting
from jaxfn._torch.values.trace_cache import IdentityKey, capture_key

LEAF = "jaxfn_leaf"  # The attribute of an argument with the leaf tensor of which it is a copy.


class Replacements(NamedTuple):
    """The operations (by name) and Python functions that JAX functions replace; `all` is the user's `ops`."""

    all: Mapping[Any, Callable[..., Any]]
    operations: Mapping[str, Callable[..., Any]]
    functions: Mapping[Any, Callable[..., Any]]

    @classmethod
    def of(cls, ops: Mapping[Any, Callable[..., Any]]) -> Replacements:
        """Sorts the `ops` argument. Raises for what is not an operation or function, or never reaches a trace."""
        for op, function in ops.items():
            name, is_operation = operation_name(op), find_operation(op) is not None
            if isinstance(op, str) and not is_operation:
                raise ValueError(f"ops={{{op!r}: ...}}: torch has no operation of this name. One is 'aten.add.Tensor'")
            if not is_operation and (isinstance(op, type) or not callable(op)):
                raise TypeError(f"ops: a key is a torch operation, its name, or a Python function, got {op!r}")
            if not callable(function):
                raise TypeError(f"ops={{{name}: ...}}: expected a JAX function, got {function!r}")
            if is_composite(op):
                raise ValueError(
                    f"ops={{{name}: ...}}: torch decomposes {name} into other operations before jaxfn sees it, so the "
                    "replacement would never be called. Name the Python function that the code calls (torch.matmul, "
                    "or torch.nn.functional.linear), or the operations that jaxfn.explain shows."
                )
        callables = {op: getattr(f, "apply", f) if isinstance(f, type) else f for op, f in ops.items()}
        operations = {op: replacement for op, replacement in callables.items() if find_operation(op)}
        functions = {op: replacement for op, replacement in callables.items() if op not in operations}
        return cls(ops, {operation_name(op): replacement for op, replacement in operations.items()}, functions)


class OwnTensor:
    """A parameter or buffer of a module, which a traced tensor represents: it has its type, attributes and identity.

    Two are equal if code that does not read identities cannot distinguish them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.type: type[torch.Tensor] = type(tensor)
        self.is_parameter = isinstance(tensor, torch.nn.Parameter)
        self._attributes = dict(vars(tensor))
        attributes = (IdentityKey(tensor), capture_key(self._attributes) or object()) if self._attributes else None
        self._key = self.type, self.is_parameter, attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnTensor) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def represent_by(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a traced tensor represent this one; returns it."""
        vars(tensor).update({**self._attributes, _OWN: self})
        if self.is_parameter:
            vars(tensor)[PARAMETER_FLAG] = True
        return tensor

    def changed_attribute(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of an attribute that code has set or deleted, if any."""
        before, after = self._attributes, {**vars(self.tensor), **vars(tensor)}
        hidden = [name for name in after if name in _HIDDEN or name.startswith("jaxfn_")]
        names = [name for name in {**before, **after} if name not in hidden]
        return next((x for x in names if before.get(x, _HIDDEN) is not after.get(x, _HIDDEN)), None)


_OWN = "jaxfn_own"  # The attribute of a traced tensor with the `OwnTensor` that it represents.
_HIDDEN = (PARAMETER_FLAG, "elem", "_mode_key", "_inference_mode_base")  # Attributes of every traced tensor.


def own_tensor(tensor: object) -> OwnTensor | None:
    """Returns the module's own tensor that a traced tensor represents, if any."""
    return vars(tensor).get(_OWN) if isinstance(tensor, FunctionalTensor) else None


class NestedApply(NamedTuple):
    """The handlers of Functions that traced code applies. They take the trace, the Function, and `apply`'s arguments.

    Attributes:
      apply: Records the call as one node, whose rule is the Function's, and returns its outputs.
      can_repeat: Whether a second call would return equal values.
    """

    apply: Callable[[TraceState, Any, Sequence[Any], Mapping[str, Any]], Any]
    can_repeat: Callable[[TraceState, Any, Sequence[Any], Mapping[str, Any]], bool]


class TraceConfig(NamedTuple):
    """The options that torch code is traced with.

    Attributes:
      nested: The handlers of Functions that the code applies.
      externals: The graph inputs for external tensors.
      is_nested: Whether the code is a Function that other torch code applies.
    """

    replacements: Replacements
    nested: NestedApply
    externals: ExternalTensors = NO_EXTERNALS
    is_nested: bool = False


# A context that puts tensors, by the names of parameters and buffers, into a module.
TensorSwap = Callable[[Mapping[str, torch.Tensor]], AbstractContextManager[None]]


class ModuleTensors(NamedTuple):
    """The tensors that a module contains while it is traced, and a context that replaces them."""

    tensors: Mapping[str, torch.Tensor]
    swap: TensorSwap


class TraceState:
    """The state of one trace.

    Args:
      name: The name of the code in messages.
      config: How the code is traced.
      is_differentiated: Whether the results may be differentiated again, as those of `backward`.
      is_compiling: What `torch.compiler.is_compiling()` returns to the code.
      answerer: Answers the reads of values of traced tensors.

    Attributes:
      reads_needs_input_grad: Whether the code read which inputs need a gradient.
      reads_grad_mode: Whether the code of `backward` got True from `torch.is_grad_enabled()`.
      reads_is_compiling: Whether the code called `torch.compiler.is_compiling()`.
      reads_requires_grad: Whether the code read `requires_grad` of a tensor whose derivative autograd does not track.
      first_gradient_input: In `backward`, the index of the first input that is a gradient. Some inputs before it may
        not be differentiated.
      arguments_require_grad: Whether autograd tracks the arguments of a module or function.
      module_tensors: The tensors of the module that is traced, if any.
      mutated_parameters: The module's parameters whose value has changed at the end of the call.
      backward_reads: The reads of the module's tensors in `backward` methods: the method, the tensor's name, and its
        node at that time.
      saved_arguments: The arguments that nested Functions saved: the tensor, its node at that time, and what to call if
        the tensor is mutated later.
      module_names: The names of the module's submodules, by identity.
      first_access: Whether the code first "read" or "set" an attribute, by the module's identity and the attribute's
        name.
      hook_on_used_output: The line that registers a hook on a tensor that its own derivative may use, if any.
      functions: The traces of the Functions that the code applied, in order.
      differentiates_functions: Whether autograd inside the code differentiated one of them.
      reads_identity: Whether the code read the `id` or the hash of a tensor that represents one of a module.
    """

    def __init__(
        self,
        name: str,
        config: TraceConfig,
        *,
        is_differentiated: bool = False,
        is_compiling: bool = True,
        answerer: Answerer = NO_VALUES,
    ) -> None:
        self.name = name
        self.config = config
        self.is_differentiated = is_differentiated
        self.recorder = Recorder(name, config.replacements.operations, config.externals, answerer)
        self.reads_needs_input_grad = False
        self.reads_grad_mode = False
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
        self.differentiates_functions = False
        self.reads_identity = False
        self._requires_grad: dict[int, bool] = {}
        self._inputs: list[torch.Tensor] = []

    def add_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides_source: str | None = None,
        own: OwnTensor | None = None,
        requires_grad: bool | None = None,
    ) -> torch.Tensor:
        """Adds an input to the trace; `requires_grad` is the value that the code reads, for inputs of a Function."""
        with without_functions():
            tensor = self.lift(self.recorder.add_input(shape, dtype, strides_source))
            if requires_grad is not None:
                if is_differentiable(dtype):
                    tensor.requires_grad_()  # Whatever the code reads, so that autograd works inside.
                self._requires_grad[id(tensor)] = requires_grad
        self._inputs.append(tensor)
        return tensor if own is None else own.represent_by(tensor)

    def check_attributes(self) -> None:
        """Raises if the code has set an attribute of a tensor that represents one of a module."""
        for tensor in self._inputs:
            own = own_tensor(tensor)
            if own is not None and (changed := own.changed_attribute(tensor)):
                where = self.recorder.externals.names.get(storage_id(own.tensor), "a parameter")
                raise TranslationError(
                    f"{self.name} sets the attribute {changed!r} of {where}. On JAX the change would be lost, since "
                    "every call has other tensors. Return the value, or store it in a buffer of the module"
                )

    def mutated_inputs(self) -> set[int]:
        """Returns the inputs whose value has changed."""
        return {i for i, x in enumerate(self._inputs) if self.recorder.input_index(self.lower(x)) != i}

    def check_saved_arguments(self) -> None:
        """Makes differentiation of nested Functions raise if the code later mutated what they saved."""
        for tensor, node, reject_derivative in self.saved_arguments:
            if not self.recorder.has_same_values(self.recorder.node(self.lower(tensor)), node):
                reject_derivative()
        self.saved_arguments.clear()

    def add_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of this trace for a constant of another trace."""
        self.recorder.add_local_constant(tensor)
        return self.lift(tensor)

    def is_compiling(self) -> bool:
        """Records that the code called `torch.compiler.is_compiling()`, and returns its result."""
        self.reads_is_compiling = True
        return self._is_compiling

    def requires_grad(self, tensor: torch.Tensor) -> bool | None:
        """Returns whether an input requires a gradient; `None` for a tensor that is not an input."""
        self.reads_needs_input_grad |= id(tensor) in self._requires_grad
        return self._requires_grad.get(id(tensor))

    def may_require_grad(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a derivative that autograd does not track, since gradients are off in `backward`.

        Autograd does not track the arguments of a module or function either, before `make_argument`.
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
        """Returns a tensor that requires a gradient for an input. It is not a leaf, so the code may mutate it."""
        if not is_differentiable(tensor.dtype):
            return tensor
        with without_functions(), torch.enable_grad():
            argument = tensor.requires_grad_().clone()
        vars(argument)[LEAF] = tensor
        return argument

    def describe_module(self, module: torch.nn.Module) -> str:
        """Returns the name of a submodule for messages."""
        return f"{self.module_names.get(id(module)) or 'the module'} ({type(module).__name__})"

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wraps a tensor from below functionalization for the user's code."""
        with without_functions():
            return track(FunctionalTensor.to_functional(tensor))

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the current value, below functionalization, of a tensor of the user's code."""
        if isinstance(tensor, Selection):
            raise_unsupported(self.recorder, "storing or returning")
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
        """Whether two tensors have equal values, as far as the graph shows."""
        return self.recorder.is_same_computation(self.recorder.node(self.lower(a)), self.recorder.node(self.lower(b)))

    def record_call(self, target: Callable[..., Any], tensors: Sequence[torch.Tensor], value: Any) -> Any:
        """Records a call of a function of JAX arrays that returns `value` (tensors from `Recorder.make_fake`)."""
        with without_functions():
            lowered = [self.lower(tensor) for tensor in tensors]
            value = self.recorder.record_call(target, tuple(lowered), {}, value)
            return torch_tree.tree_map_only(torch.Tensor, self.lift, value)

    def finish(self, outputs: Iterable[torch.Tensor]) -> RecordedGraph:
        """Returns the graph that computes these outputs, and drops all references to the code's tensors."""
        self._inputs.clear()
        self.module_tensors = None
        with plain_torch():
            return self.recorder.finish(outputs)


class _ActiveTrace(threading.local):
    """The innermost active trace of a thread, and the torch Functions whose `backward` is being traced in advance."""

    state: TraceState | None = None
    traced_backwards: tuple[Any, ...] = ()


ACTIVE = _ActiveTrace()


@contextlib.contextmanager
def outside_trace() -> Generator[None]:
    """Inside, torch and jaxfn run as if this thread were not tracing; another trace may begin."""
    with setting(ACTIVE, state=None), without_modes():
        yield


def active_trace() -> TraceState:
    """Returns the innermost active trace of this thread, for code that runs only inside traces."""
    assert ACTIVE.state is not None
    return ACTIVE.state
