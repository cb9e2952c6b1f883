"""The scope of a trace: the recorder, the modes above it, and the patches.

# Note: the layers that a line of torch code passes through

    y = x.clone(); y[0] = 7; z = torch.relu(y) * Inner.apply(y)

    patches             names that no torch mode sees: `Inner.apply` (see `function_apply`), `Tensor.cuda`, ...
    interceptor         functions, by name: `y[0] = 7` is an assignment here, and `relu` is one function
    autograd            torch's, so that `torch.autograd.grad` works inside forward and backward
    functionalization   torch's: an in-place operation becomes a new value, and views of the old one are updated
    Recorder            operations on fake tensors, which have a shape and no values: each becomes a graph node

A tensor of the user's code is a `FunctionalTensor` around a tensor of the recorder. `TraceState.lower` unwraps it, and
`TraceState.lift` wraps. Tensors that depend on no input have values at every layer, and are computed immediately.
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
    is_custom,
    python_kernel,
    to_functional,
    without_functions,
    without_modes,
)
from jaxfn._torch.graph.recorder import MUTATES_EXTERNAL, Recorder
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace import detach
from jaxfn._torch.trace.interception import TorchFunctionInterceptor, check_operation
from jaxfn._torch.trace.leaks import track
from jaxfn._torch.trace.patches import patching
from jaxfn._torch.trace.state import ACTIVE, TraceState, active_trace
from jaxfn._torch.values.errors import EscapedTensorError, TranslationError
from jaxfn._torch.values.flatten import map_tensors


@contextlib.contextmanager
def trace_scope(state: TraceState) -> Generator[None]:
    """Inside, torch operations of this thread are recorded."""
    states = _random_states()
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_modes())  # Those of an enclosing trace that applies this Function.
        stack.enter_context(torch.no_grad())
        stack.enter_context(patching(state.name, state.config.replacements.functions))
        stack.enter_context(state.recorder)
        stack.enter_context(_Functionalization(state.recorder))
        stack.enter_context(TorchFunctionInterceptor(state))
        before, ACTIVE.state = ACTIVE.state, state
        if before is not None:  # A nested Function may read the module's attributes too.
            state.first_access = before.first_access
        try:
            yield
            state.check_saved_arguments()
        except Exception as error:
            if state.recorder.unanswered is not None:
                raise state.recorder.unanswered from None  # The code may have caught it, and raised this one.
            operand_error = _operand_error(state, error)
            explained = operand_error or _explain_torch_error(state.name, error)
            if explained is None:
                raise
            raise explained from (None if operand_error else error)
        finally:
            ACTIVE.state = before
            state.recorder.is_finished = True
            state.recorder.restore_gradients()
            torch.clear_autocast_cache()  # It may contain tensors of the trace.
    if state.recorder.unanswered is not None:  # The code caught it.
        raise state.recorder.unanswered
    if _random_states() != states:
        raise TranslationError(
            f"{state.name} draws random numbers from Python or NumPy. They would be drawn only once, during tracing. "
            "Draw with torch, and pass a key to apply."
        )


# The error that is raised contains this text.
FAKE_TENSOR_LOG.addFilter(lambda record: ACTIVE.state is None)


def _operand_error(state: TraceState, error: Exception) -> TranslationError | None:
    """Returns the error for a wrong shape or dtype that torch detected, with the submodule and its inputs."""
    is_for_get_or_trace = re.search("(?i)int64|long", str(error))
    if state.recorder.operand_error[0] is not error or is_for_get_or_trace:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    parts = [frame for frame in frames if id(frame.f_locals.get("self")) in state.module_names]
    where = ""
    for frame in parts[:1]:
        inputs = {name: frame.f_locals.get(name) for name in frame.f_code.co_varnames[1 : frame.f_code.co_argcount]}
        shapes = [f"{name} of shape {tuple(x.shape)}" for name, x in inputs.items() if isinstance(x, torch.Tensor)]
        where = f" in {state.describe_module(frame.f_locals['self'])}, with {', '.join(shapes)}"
    return TranslationError(
        f"{state.name}: an operation does not support its operands{where}.\n{state.recorder.operand_error[1]}: {error}"
        f"{source_line(frames)}\nPass inputs of the shapes and dtypes that the torch code takes"
    )


def _explain_torch_error(name: str, error: Exception) -> TranslationError | None:
    """Returns an explanation of an error that torch raised while tracing, if it is known."""
    for parts, explanation in _EXPLANATIONS.items():
        if any(part in str(error) for part in parts):
            where = source_line([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])
            return TranslationError(f"{name} {explanation}{where}")
    return None


# What errors of torch are due to, by parts of their messages.
_EXPLANATIONS = {
    ("non-functional tensor",): MUTATES_EXTERNAL,
    ("token for effect",): (
        "calls a collective operation of torch.distributed, which has no access to JAX's devices. Name a JAX function "
        "for it (one with jax.lax.psum under jax.shard_map, for example): from_torch(..., "
        "ops={torch.distributed.all_reduce: jax_function})"
    ),
    ("HigherOrderOperator", "registered for HOP"): (  # the latter on torch 2.8
        "passes a function to a higher-order operation (torch.cond, while_loop, flex_attention), which jaxfn does not "
        "trace. Use torch.where, or name a JAX function that replaces the function around it: from_torch(..., "
        "ops={function: jax_function})"
    ),
    (
        "data pointer",
        "data_ptr",
        "doesn't have storage",
        "access storage",
        "data is not allocated yet",
        "invalid python storage",
        "__cuda_array_interface__",
    ): (
        "passes a tensor's memory to compiled code (a C++, CUDA or Triton kernel), which JAX cannot run. Name a JAX "
        "function that replaces the Python function around it, or the torch operation: from_torch(..., "
        "ops={function: jax_function})"
    ),
}


class _Functionalization(FunctionalTensorMode):
    """torch's functionalization, with its own checks hidden from `TorchFunctionInterceptor`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VALUE_CHECKS:
            return None
        kernel = self._python_kernel(func, args, kwargs)
        if kernel is not None:
            try:
                with (
                    self,
                    without_functions()
                    if isinstance(kernel, functools.partial)
                    else TorchFunctionInterceptor(active_trace()),
                ):
                    return kernel(*args, **(kwargs or {}))
            except EscapedTensorError:
                raise
            except Exception as error:  # Any exception: it may be code for NumPy, or for a GPU.
                reason = f"whose code cannot be traced ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
                self._recorder.untraceable_kernels[func] = reason
                self._recorder.unanswered = None
        with without_functions():
            call = functools.partial(super().__torch_dispatch__, func, types, args, kwargs or {})
            value = detach.run_operation(self._recorder, self, func, args, kwargs or {}, call)
            return track(map_tensors(self._make_functional, value))

    def _python_kernel(self, func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """Returns the Python code of a custom operation on traced tensors, if that is to be traced."""
        if not is_custom(func) or not any(map(active_trace().is_traced, torch_tree.tree_leaves((args, kwargs)))):
            return None
        check_operation(self._recorder.name, func)
        is_opaque = self._recorder.replacement(func) is not None or func in self._recorder.untraceable_kernels
        return None if is_opaque else python_kernel(func)

    def _make_functional(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a constant of this trace functional, so that its mutations are seen; leaves other tensors unchanged."""
        if isinstance(tensor, FunctionalTensor) or not self._recorder.is_local(tensor):
            return tensor
        return to_functional(tensor, self)


# Checks of values, which tracing does not have. JAX's linear algebra returns NaN where there is no solution.
_VALUE_CHECKS = (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.msg)


def _random_states() -> tuple[object, ...]:
    generator, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), generator, np.asarray(keys).tobytes(), *rest
