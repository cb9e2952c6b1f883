"""The scope of a trace: the recorder, the modes above it, and the patches.

# Note: the layers that a line of torch code passes

    y = x.clone(); y[0] = 7; z = torch.relu(y) * Inner.apply(y)

    stand-ins           names that no mode of torch's sees: `Inner.apply` comes to `applications`, `Tensor.cuda`, ...
    PythonLevel         functions, by name: `y[0] = 7` is an assignment here, and `relu` is one function
    autograd            torch's own, so that `torch.autograd.grad` works inside of forward and backward
    functionalization   torch's own: an operation in place becomes a new value, and views of the old one follow it
    Recorder            operations on tensors that have a shape and no values: each becomes a node of the graph

A tensor of the code's is a `FunctionalTensor` around one of the recorder's. `Tracing.lower` goes from the one to the
other, `Tracing.lift` back. What depends on no input has values all the way down, and is really computed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import traceback
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    FAKE_TENSOR_LOG,
    FunctionalTensor,
    FunctionalTensorMode,
    functional,
    is_custom,
    python_kernel,
    without_functions,
    without_modes,
)
from jaxfn._torch.graph.recorder import WRITES_OUTSIDE, Recorder
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace import silent
from jaxfn._torch.trace.interception import PythonLevel, refuse_operation
from jaxfn._torch.trace.leftovers import note
from jaxfn._torch.trace.patches import patched
from jaxfn._torch.trace.state import THREAD, Tracing, current
from jaxfn._torch.values.errors import OtherTraceError, TranslationError


@contextlib.contextmanager
def running(tracing: Tracing) -> Generator[None]:
    """Inside, what torch does in this thread is recorded."""
    states = _random_states()
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_modes())  # another trace's, where its code applies this Function
        stack.enter_context(torch.no_grad())
        stack.enter_context(patched(tracing.owner, tracing.config.replacements.functions))
        stack.enter_context(tracing.recorder)
        stack.enter_context(_Functionalization(tracing.recorder))
        stack.enter_context(PythonLevel(tracing))
        before, THREAD.tracing = THREAD.tracing, tracing
        if before is not None:  # a Function inside, which may look at the module's attributes too
            tracing.first_access = before.first_access
        try:
            yield
        except Exception as error:
            misfit = _misfit(tracing, error)
            known = misfit or _explained(tracing.owner, error)
            if known is None:
                raise
            raise known from (None if misfit else error)
        finally:
            THREAD.tracing = before
            tracing.recorder.restore_gradients()
            torch.clear_autocast_cache()  # which may hold tensors of the trace
    if _random_states() != states:
        raise TranslationError(
            f"{tracing.owner} draws from Python's or NumPy's random numbers, which would be drawn once, while "
            "tracing. Draw with torch, and pass a key to apply."
        )


# The error says it all.
FAKE_TENSOR_LOG.addFilter(lambda record: THREAD.tracing is None)


def _misfit(tracing: Tracing, error: Exception) -> TranslationError | None:
    """Returns the error for a wrong shape or dtype that torch noticed, with the part of the module and its inputs."""
    is_for_known_or_made = re.search("(?i)int64|long", str(error))
    if tracing.recorder.misfit[0] is not error or is_for_known_or_made:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    parts = [frame for frame in frames if id(frame.f_locals.get("self")) in tracing.part_names]
    where = ""
    for frame in parts[:1]:
        inputs = {name: frame.f_locals.get(name) for name in frame.f_code.co_varnames[1 : frame.f_code.co_argcount]}
        shapes = [f"{name} of shape {tuple(x.shape)}" for name, x in inputs.items() if isinstance(x, torch.Tensor)]
        where = f" in {tracing.part_name(frame.f_locals['self'])}, with {', '.join(shapes)}"
    return TranslationError(
        f"{tracing.owner}: an operation does not fit its operands{where}.\n{tracing.recorder.misfit[1]}: {error}"
        f"{source_line(frames)}\nPass inputs of the shapes and dtypes that the torch code takes"
    )


def _explained(owner: str, error: Exception) -> TranslationError | None:
    """Returns the explanation of an error that torch raised while tracing, if it is known."""
    text = str(error)
    where = source_line([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])
    if "non-functional tensor" in text:
        return TranslationError(f"{owner} {WRITES_OUTSIDE}{where}")
    if "token for effect" in text:
        return TranslationError(
            f"{owner} calls a collective operation of torch.distributed, which knows nothing of JAX's "
            "devices. Name a JAX function for it (one with jax.lax.psum, say, under jax.shard_map): "
            f"from_torch(..., ops={{torch.distributed.all_reduce: jax_function}}){where}"
        )
    if "HigherOrderOperator" in text or "registered for HOP" in text:  # the latter on torch 2.8
        return TranslationError(
            f"{owner} hands torch a part of its program (torch.cond, a while_loop, flex_attention), which jaxfn does "
            "not look into. Use torch.where, or name a JAX function to stand for the Python function around it: "
            f"from_torch(..., ops={{function: jax_function}}){where}"
        )
    if any(words in text for words in _NEEDS_MEMORY):
        return TranslationError(
            f"{owner} hands a tensor's memory to compiled code (a C++, CUDA or Triton kernel), which JAX "
            "cannot run. Name a JAX function to stand for the Python function around it, or for the torch "
            f"operation: from_torch(..., ops={{function: jax_function}}){where}"
        )
    return None


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
        kernel = self._kernel(func, args, kwargs)
        if kernel is not None:
            try:
                with self, without_functions() if isinstance(kernel, functools.partial) else PythonLevel(current()):
                    return kernel(*args, **(kwargs or {}))
            except OtherTraceError:
                raise
            except Exception as error:  # of any kind: it may be code for NumPy, or for a GPU
                reason = f"whose code cannot be traced ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
                self._recorder.not_torch_code[func] = reason
        with without_functions():
            call = functools.partial(super().__torch_dispatch__, func, types, args, kwargs or {})
            value = silent.run(self._recorder, self, func, args, kwargs or {}, call)
            return note(torch_tree.tree_map_only(torch.Tensor, self._lifted, value))

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """The Python code of a custom operation on traced tensors, where that is to be traced."""
        if not is_custom(func) or not any(map(current().is_traced, torch_tree.tree_leaves((args, kwargs)))):
            return None
        refuse_operation(self._recorder.owner, func)
        is_opaque = self._recorder.replacement(func) is not None or func in self._recorder.not_torch_code
        return None if is_opaque else python_kernel(func)

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
