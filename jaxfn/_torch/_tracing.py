"""One trace of torch code: what is switched on around it, and how tensors get in and out."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    OPERATION_TYPES,
    FunctionalTensor,
    FunctionalTensorMode,
    functional,
    plain_torch,
    without_functions,
    without_modes,
)
from jaxfn._torch._current import current, replace_current
from jaxfn._torch._errors import TranslationError
from jaxfn._torch._flat import put_in, take_out
from jaxfn._torch._inside import Site
from jaxfn._torch._interception import PythonLevel
from jaxfn._torch._leftovers import note
from jaxfn._torch._patches import patched
from jaxfn._torch._recorder import WRITES_OUTSIDE, Recorder
from jaxfn._torch._selection import Selection, refuse
from jaxfn._torch._source_lines import source_line
from jaxfn._values.arrays import is_array_leaf


class Replacements(NamedTuple):
    """What JAX functions stand for.

    Attributes:
      all: everything, as the user gave it.
      operations: of torch's: overloads, packets, `torch.library` definitions, names.
      functions: of Python's.
    """

    all: Mapping[Any, Callable[..., Any]]
    operations: Mapping[Any, Callable[..., Any]]
    functions: Mapping[Any, Callable[..., Any]]

    @classmethod
    def of(cls, ops: Mapping[Any, Callable[..., Any]]) -> Replacements:
        """Sorts them."""
        operations = {op: replacement for op, replacement in ops.items() if _is_operation(op)}
        return cls(ops, operations, {op: replacement for op, replacement in ops.items() if op not in operations})


def _is_operation(op: object) -> bool:
    return isinstance(op, (str, *OPERATION_TYPES)) or hasattr(op, "_opoverload")


# What torch says where something looks into a tensor's memory.
_NEEDS_MEMORY = (
    "data pointer",
    "data_ptr",
    "doesn't have storage",
    "access storage",
    "data is not allocated yet",
    "invalid python storage",
    "__cuda_array_interface__",
)


class _Functionalization(FunctionalTensorMode):
    """torch's, with the questions it asks itself hidden from `PythonLevel`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHECKS:
            return None
        with without_functions():
            value = super().__torch_dispatch__(func, types, args, kwargs)
            return note(torch_tree.tree_map_only(torch.Tensor, self._lifted, value))

    def _lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor made outside, so that writes to it are seen; any other tensor as it is."""
        if isinstance(tensor, FunctionalTensor) or not self._recorder.is_own(tensor):
            return tensor
        return functional(tensor, self)


# Raise for some values, which are not known while tracing. JAX's linear algebra gives NaN for what has no solution.
_CHECKS = (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.msg)


def _random_states() -> tuple[object, ...]:
    generator, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), generator, np.asarray(keys).tobytes(), *rest


class Tracing:
    """One trace.

    Args:
      owner: whose code it is, for messages.
      replacements: see there.
      is_differentiated: whether what the code computes may be differentiated again, as in `backward`.
    """

    def __init__(self, owner: str, replacements: Replacements, *, is_differentiated: bool = False) -> None:
        self.owner = owner
        self.replacements = replacements
        self.is_differentiated = is_differentiated
        self.recorder = Recorder(owner, replacements.operations)
        self.reads_flags = False
        self._requires_grad: dict[int, bool] = {}
        self._inputs: list[torch.Tensor] = []

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Inside, what torch does in this thread is recorded."""
        states = _random_states()
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(self.owner, self.replacements.functions))
            stack.enter_context(without_modes())  # another trace's, where its code applies this Function
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.recorder)
            stack.enter_context(_Functionalization(self.recorder))
            stack.enter_context(PythonLevel(self))
            before = replace_current(self)
            try:
                yield
            except Exception as error:
                known = self._in_our_words(error)
                if known is None:
                    raise
                raise known from error
            finally:
                replace_current(before)
                with plain_torch():
                    self.recorder.restore_gradients()
                torch.clear_autocast_cache()  # which may hold tensors of the trace
        if _random_states() != states:
            raise TranslationError(
                f"{self.owner} draws from Python's or NumPy's random numbers, which would be drawn once, while "
                "tracing. Draw with torch, and pass a key to apply."
            )

    def _in_our_words(self, error: Exception) -> TranslationError | None:
        """What an error that torch raised while tracing means, if that is known."""
        text = str(error)
        where = source_line([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])
        if "non-functional tensor" in text:
            return TranslationError(f"{self.owner} {WRITES_OUTSIDE}{where}")
        if "token for effect" in text:
            return TranslationError(
                f"{self.owner} calls a collective operation of torch.distributed, which knows nothing of JAX's "
                "devices. Name a JAX function for it (one with jax.lax.psum, say, under jax.shard_map): "
                f"from_torch(..., ops={{torch.distributed.all_reduce: jax_function}}){where}"
            )
        if any(words in text for words in _NEEDS_MEMORY):
            return TranslationError(
                f"{self.owner} hands a tensor's memory to compiled code (a C++, CUDA or Triton kernel), which JAX "
                "cannot run. Name a JAX function to stand for the Python function around it, or for the torch "
                f"operation: from_torch(..., ops={{function: jax_function}}){where}"
            )
        return None

    def input(self, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool | None = None) -> torch.Tensor:
        """A new input of the trace; `requires_grad` is what it says when asked, if it is one of the Function's."""
        tensor = self.lift(self.recorder.input(shape, dtype))
        if requires_grad is not None:
            if dtype.is_floating_point or dtype.is_complex:
                tensor.requires_grad_()  # whatever it says, so that autograd inside works for any input
            self._requires_grad[id(tensor)] = requires_grad
        self._inputs.append(tensor)
        return tensor

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made in another trace that depended on no input."""
        self.recorder.own(tensor)
        return self.lift(tensor)

    def is_current(self) -> bool:
        """Whether it is this trace that is being made in this thread."""
        return current() is self

    def read_flags(self) -> None:
        """Notes that the code looks at which inputs need a gradient."""
        self.reads_flags = True

    def requires_grad(self, tensor: torch.Tensor) -> bool | None:
        """What an input says when asked whether it requires a gradient; `None` for what is no input."""
        self.reads_flags |= id(tensor) in self._requires_grad
        return self._requires_grad.get(id(tensor))

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor from below functionalization as the code sees it."""
        with without_functions():
            return note(FunctionalTensor.to_functional(tensor))

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present value of a tensor of the code's, as it is below functionalization."""
        if isinstance(tensor, Selection):
            refuse("keeping or returning")
        if not isinstance(tensor, FunctionalTensor):
            return tensor
        with without_functions():
            return tensor.from_functional()

    def is_traced(self, value: object) -> bool:
        """Whether a value is a tensor that depends on the inputs."""
        return isinstance(value, FunctionalTensor) and self.recorder.is_traced(self.lower(value))

    def is_same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors have the same values, as far as it can be seen from how they were computed."""
        return self.recorder.is_same(self.recorder.node(self.lower(a)), self.recorder.node(self.lower(b)))

    def call(self, target: Callable[..., Any], tensors: Sequence[torch.Tensor], value: Any) -> Any:
        """Records a call of a function of JAX arrays, which gives `value` (of `Recorder.fake` tensors)."""
        with without_functions():
            lowered = [self.lower(tensor) for tensor in tensors]
            value = self.recorder.call(target, tuple(lowered), {}, value)
            return torch_tree.tree_map_only(torch.Tensor, self.lift, value)

    def finish(self, outputs: Iterable[torch.Tensor]) -> torch.fx.GraphModule:
        """The graph of everything that these outputs need. Nothing of the code's is held any more."""
        self._inputs.clear()
        with plain_torch():
            return self.recorder.finish(outputs)

    def apply(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a Function returns that the code applies: one node, which keeps its own rule at every order."""
        from jaxfn._torch._from_torch import applied_inside

        return applied_inside(self, function, args, kwargs)

    def can_repeat(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether `apply` once more, with the same arguments, would give the same."""
        from jaxfn._torch._from_torch import can_be_repeated

        return can_be_repeated(self, function, args, kwargs)

    def call_replacement(
        self, function: Any, replacement: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a Python function returns that a JAX function stands for."""
        arguments = take_out((tuple(args), dict(kwargs)), lambda leaf: isinstance(leaf, torch.Tensor))
        template = arguments.template  # all that the graph keeps of the arguments
        lowered = put_in(template, [self.lower(tensor) for tensor in arguments.leaves])
        outputs = take_out(self.recorder.shapes_of(replacement, *lowered), lambda leaf: isinstance(leaf, torch.Tensor))

        def of_arrays(*arrays: Any) -> list[Any]:
            args, kwargs = put_in(template, arrays)
            return take_out(replacement(*args, **kwargs), is_array_leaf).leaves

        shapes = [(tuple(x.shape), x.dtype) for x in outputs.leaves]
        site = Site(self, of_arrays, function.__name__, shapes)
        return put_in(outputs.template, site(*arguments.leaves))
