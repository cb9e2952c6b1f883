"""Interception of torch's Python functions, above autograd and functionalization.

`TorchFunctionInterceptor` sees every call of a torch function and every access to a tensor's attribute, and handles
those that must behave differently in a trace. `patches` handles names that no torch mode intercepts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types as types_
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import (
    LINEAR_CROSS_ENTROPY,
    OPERATION_TYPES,
    PACK,
    PAD,
    FunctionalTensor,
    has_cuda_only_backward,
    has_registered_backward,
    is_custom,
    is_traceable,
    plain_torch,
    python_kernel,
    without_functions,
)
from jaxfn._torch.graph.numbers import TracedNumber, prepare_numbers
from jaxfn._torch.graph.source_lines import is_library_code, is_user_code, running_frames, running_line, source_line
from jaxfn._torch.trace import tensor_types, torch_functions
from jaxfn._torch.trace.autograd_nodes import unwrap_node
from jaxfn._torch.trace.detach import mark_detached, set_data
from jaxfn._torch.trace.hooks import register_hook
from jaxfn._torch.trace.indexing import get_item, set_item
from jaxfn._torch.trace.jax_function_node import call_replacement
from jaxfn._torch.trace.leaks import swap, track
from jaxfn._torch.trace.recurrent import pack, pad, recurrent
from jaxfn._torch.trace.selection import Selection
from jaxfn._torch.trace.selection_operations import call_with_selections
from jaxfn._torch.trace.state import ACTIVE, LEAF, TraceState
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.flatten import tensors_in

# Takes the trace, the torch function, and its arguments, as the handlers of `patches` do.
_Handler = Callable[..., Any]
_HANDLERS: dict[Any, _Handler] = {}


class TorchFunctionInterceptor(TorchFunctionMode):
    """Handles torch functions and attributes of tensors inside a trace."""

    def __init__(self, state: TraceState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ACTIVE.state is not self.state:  # A nested trace is active.
            return func(*args, **kwargs)
        args, kwargs = tuple(map(_on_cpu, args)), {name: _on_cpu(value) for name, value in kwargs.items()}
        if self.state.recorder.numbers:
            # torch's autograd, inside a Function, does not support all operations on symbolic numbers.
            takes_numbers = self.state.recorder.follows_grad_mode or not torch.is_grad_enabled()
            args, kwargs = prepare_numbers(func if takes_numbers else None, args, kwargs)
        if _is_device_name(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if any(isinstance(x, Selection) for x in (*args, *kwargs.values())) and func is not torch.Tensor.__setitem__:
            return call_with_selections(self.state, func, args, kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor) and not kwargs["out"].numel():
            empty = kwargs["out"]  # It gets the result's shape.
            return _replace_contents(
                empty, self.__torch_function__(func, types, args, {**kwargs, "out": None}).to(empty.dtype)
            )
        if isinstance(func, OPERATION_TYPES):
            return _call_operation(self.state, func, args, kwargs)
        if isinstance(func, types_.FunctionType) and not is_library_code(func.__code__.co_filename):
            with self:
                return tensor_types.call_overridable(func, args, kwargs)
        handler = _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(self.state, func, *args, **kwargs)


def _call_operation(state: TraceState, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operation. For a custom one, torch applies the Function that it created from the registered backward.

    Without a registered backward, or if a jaxfn Function replaces the operation, the derivative is that of its code or
    of the replacement.
    """
    overloads = operation.overloads() if hasattr(operation, "overloads") else []
    overload = getattr(operation, overloads[0]) if len(overloads) == 1 else operation
    is_traced = any(map(state.is_traced, torch_tree.tree_leaves((args, kwargs))))
    if not (is_traced and is_custom(overload)):
        return operation(*args, **kwargs)
    check_operation(state.name, overload)
    replacement = state.recorder.replacement(overload)
    if replacement is None:
        kernel = python_kernel(overload)
        if isinstance(kernel, functools.partial) and not has_registered_backward(overload):
            with contextlib.suppress(Exception):  # torch's dispatcher calls the kernel again, and raises.
                return kernel(*args, **kwargs)  # Above autograd, which differentiates the kernel, as in torch.
    if replacement is None or (has_registered_backward(overload) and not hasattr(replacement, "_jaxfn_dispatcher")):
        if is_traceable(overload):
            return operation(*args, **kwargs)
        raise TranslationError(
            f"{state.name} calls {overload}, a custom operation with its own autograd, which needs torch 2.13 or "
            f"newer. Replace it by a jaxfn Function: from_torch(..., ops={{{overload}: Function}}){source_line()}"
        )
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    args += tuple(kwargs.pop(a.name, a.default_value) for a in positional[len(args) :])
    return call_replacement(state, overload, replacement, args, kwargs)


def check_operation(name: str, operation: Any) -> None:
    """Raises for a custom operation that mutates its arguments, or whose backward would not be used."""
    if has_cuda_only_backward(operation):
        raise TranslationError(
            f"{name} calls {operation}, whose backward is registered for AutogradCUDA only. It would be ignored, since "
            f"code is traced on a CPU. Register it by torch.library.register_autograd{source_line()}"
        )
    names = [a.name for a in operation._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if names:
        raise TranslationError(
            f"{name} calls {operation}, a custom operation that mutates its argument {', '.join(names)}. JAX's arrays "
            "are immutable, and torch registers no derivative for such an operation. Write an operation that returns "
            "the new value, or name a JAX function that replaces a Python function around the call: "
            f"from_torch(..., ops={{function: jax_function}}){source_line()}"
        )


def _handles(*functions: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


# ---------------------------------------------------------------------------------------------------------- devices


def _on_cpu(value: Any) -> Any:
    """Replaces a device by the CPU, on which everything is traced; returns other values unchanged."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type != "meta" else value


def _is_device_name(value: object) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "npu")


@_handles(torch.Tensor.to)
def _to(state: TraceState, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    others = [torch.device("cpu") if _is_device_name(arg) else arg for arg in args]
    if others and type(others[0]) is int:  # The index of a GPU.
        others[0] = torch.device("cpu")
    return func(tensor, *others, **kwargs)


@_handles(torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.xpu, torch.Tensor.pin_memory)
def return_tensor(state: TraceState, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Implements moves of a tensor to another device."""
    return tensor


@_handles(torch.Tensor.type)
def _type(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1 and args[1] is FunctionalTensor:  # The code got it by `type(tensor)`.
        args = (args[0], torch.Tensor, *args[2:])
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    return func(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------- values


@_handles(torch.Tensor.item)
def _item(state: TraceState, func: Any, tensor: torch.Tensor) -> Any:
    caller = next((x.f_code for x in running_frames() if is_user_code(x.f_code.co_filename)), None)
    # `type(n)` of a traced number is another class than `float`, so code that may compare it reads the number.
    compares_types = caller is not None and "type" in caller.co_names
    is_element = state.is_traced(tensor) and tensor.numel() == 1 and not compares_types
    number = state.recorder.item(state.lower(tensor), running_line()) if is_element else None
    return func(tensor) if number is None else track(number)


@_handles(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.__format__)
def read_values(state: TraceState, func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of tensors that returns values to Python code."""
    with without_functions():
        tensor = state.recorder.read(state.lower(tensor), "array")
    with plain_torch():
        return func(tensor.detach(), *args, **kwargs)


@_handles(torch.tensor_split, torch.Tensor.tensor_split)
def _tensor_split(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads split indices in a tensor, which torch would read from memory."""
    hint = (
        "tensor_split at indices in a tensor has no translation to JAX. Pass Python numbers, or name a JAX function by "
        "ops={torch.tensor_split: jax_function}"
    )

    def to_numbers(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with without_functions():
            return state.recorder.read(state.lower(value), "array", hint).tolist()

    kwargs = {name: value if name == "input" else to_numbers(value) for name, value in kwargs.items()}
    return func(*args[:1], *map(to_numbers, args[1:]), **kwargs)


@_handles(torch.Tensor.__eq__, torch.Tensor.eq)
def _equal(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compares elements; a module's parameter, and what represents it, are one tensor, as for a dict with it as key."""
    return True if len(args) == 2 and tensor_types.is_same(*args) else func(*args, **kwargs)


def _to_tensor(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns a traced number as a tensor; another value unchanged."""
    fill: Any = value
    return torch.full((), fill, dtype=dtype) if isinstance(value, TracedNumber) else value


@_handles(torch.where, torch.Tensor.where)
def _where(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    if state.recorder.numbers and len(args) == 3:
        dtype = torch.result_type(*(x.kind(1) if isinstance(x, TracedNumber) else x for x in args[1:]))
        args = (args[0], *(_to_tensor(x, dtype) for x in args[1:]))
    return func(*args, **kwargs)


@_handles(torch.tensor, torch.as_tensor, torch.asarray)
def _tensor(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], TracedNumber):
        return _to_tensor(args[0], kwargs.get("dtype")).requires_grad_(kwargs.get("requires_grad", False))
    if not (args and isinstance(args[0], torch.Tensor)):
        return func(*args, **kwargs)
    # A copy, also of an external tensor, whose value may change.
    tensor = args[0].detach().clone() if func is torch.tensor else args[0]
    if kwargs.get("copy"):
        tensor = tensor.clone()
    dtype = kwargs.get("dtype")
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor


@_handles(torch.Tensor.new_tensor)
def _new_tensor(state: TraceState, func: Any, tensor: torch.Tensor, data: Any, **kwargs: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return func(tensor, data, **kwargs)
    with TorchFunctionInterceptor(state):
        copy = data.detach().to(kwargs.get("dtype")).clone()
        return copy.requires_grad_() if kwargs.get("requires_grad") else copy


@_handles(torch.Tensor.__reduce_ex__)
def _copy(state: TraceState, func: Any, tensor: torch.Tensor, protocol: Any) -> Any:
    """Raises for `copy.copy`, which in torch returns a leaf that shares storage."""
    if state.is_traced(tensor):
        raise TranslationError(
            f"{state.name}: copy.copy of a tensor has no translation to JAX. Use `tensor.clone()` or "
            f"`tensor.detach()`, or name a JAX function by ops={{copy.copy: jax_function}}{source_line()}"
        )
    return func(tensor, protocol)


@_handles(torch.Tensor.__deepcopy__)
def _deepcopy(state: TraceState, func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        with torch.no_grad():
            memo[id(tensor)] = tensor.clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


@_handles(torch.Tensor.to_sparse, torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr, torch.sparse_coo_tensor)
def _sparse(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise TranslationError(
        f"{state.name}: {func.__name__} returns a sparse tensor, which has no counterpart on JAX. Use dense "
        f"tensors{source_line()}"
    )


def _replace_contents(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Makes `tensor` refer to a copy of `other`: in-place operations cannot change the shape of a traced tensor."""
    swap(tensor, other.clone())
    return tensor


@_handles(torch.Tensor.resize_, torch.Tensor.resize_as_)
def _resize(state: TraceState, func: Any, tensor: torch.Tensor, *shape: Any, **kwargs: Any) -> Any:
    if isinstance(shape[0], torch.Tensor):
        shape = tuple(shape[0].shape)
    elif len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    missing = math.prod(shape) - tensor.numel()
    # torch would leave new elements uninitialized; here they are zeros.
    longer = torch.cat([tensor.reshape(-1), tensor.new_zeros(max(missing, 0))])[: math.prod(shape)]
    return tensor if shape == tensor.shape else _replace_contents(tensor, longer.view(shape))


# ---------------------------------------------------------------------------------------------------------- composed

_REPLACEMENTS = {
    torch.nn.functional.embedding_bag: torch_functions.embedding_bag,
    torch.nn.functional.ctc_loss: torch_functions.ctc_loss,
    torch.nn.functional.gaussian_nll_loss: torch_functions.gaussian_nll_loss,
    torch.nn.functional.one_hot: torch_functions.one_hot,
    torch.lstm: recurrent,
    torch.gru: recurrent,
    torch.rnn_tanh: recurrent,
    torch.rnn_relu: recurrent,
    PACK: pack,
    PAD: pad,
}


@_handles(LINEAR_CROSS_ENTROPY)
def _linear_cross_entropy(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes a matrix product and a loss, without torch's chunking, which computes gradients in forward."""
    return func(*args, **{**kwargs, "options": None})


@_handles(*_REPLACEMENTS)
def _call_replacement(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(map(state.is_traced, torch_tree.tree_leaves((args, kwargs)))):
        return func(*args, **kwargs)
    with TorchFunctionInterceptor(state):  # The functions that it calls are intercepted too.
        return _REPLACEMENTS[func](state, func, *args, **kwargs)


# ---------------------------------------------------------------------------------------------------------- autograd


@_handles(torch.Tensor.detach_, torch.detach_)
def detach_in_place(state: TraceState, original: Callable[..., torch.Tensor], input: torch.Tensor) -> torch.Tensor:
    """Implements `tensor.detach_()`; `original` is torch's."""
    if state.recorder.follows_grad_mode:
        return mark_detached(original(input))
    state.recorder.stop_gradient(state.lower(input))
    return original(input)


@_handles(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # pyright: ignore
def _require_grad(state: TraceState, func: Any, tensor: torch.Tensor, requires_grad: bool = True) -> Any:
    is_differentiated_by_jax = state.recorder.follows_grad_mode
    if is_differentiated_by_jax and not requires_grad and state.requires_grad(tensor):
        raise TranslationError(
            f"{state.name} sets `requires_grad` of a parameter to False while it runs. On JAX a parameter has "
            f"one derivative per call. Use `.detach()`, or freeze it before the call{source_line()}"
        )
    if is_differentiated_by_jax:
        if not requires_grad:  # The caller gets no gradient for the argument.
            return mark_detached(tensor)
    else:
        # The code detached it to get a leaf for autograd inside. JAX still differentiates it.
        state.recorder.undo_stop_gradient(state.lower(tensor))
    return func(tensor, requires_grad)


@_handles(torch.Tensor.grad.__get__, torch.Tensor.grad.__set__)  # pyright: ignore
def _grad_of_leaf(state: TraceState, func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    return func(vars(tensor).get(LEAF, tensor), *args)


_handles(torch.Tensor.register_hook)(register_hook)


@_handles(torch.Tensor.register_post_accumulate_grad_hook)
def _register_post_accumulate_grad_hook(state: TraceState, func: Any, tensor: torch.Tensor, hook: Any) -> Any:
    if not (state.recorder.follows_grad_mode and state.is_traced(tensor)):
        return func(tensor, hook)
    raise TranslationError(
        f"{state.name} registers a hook that torch calls after it stored `.grad`, and JAX has no `.grad`. Use "
        f"`register_hook`{source_line()}"
    )


@_handles(torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
def _grad(state: TraceState, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `torch.autograd.grad` inside traced code, also for gradients at nodes of its graph.

    Autograd may have to track arguments of the code, for which the code is traced again.
    """
    for tensor in tensors_in((args, kwargs)):
        if isinstance(tensor, FunctionalTensor) and not tensor.requires_grad:
            state.may_require_grad(tensor)

    def plain(value: Any) -> Any:
        if isinstance(value, torch.autograd.graph.GradientEdge):
            return value._replace(node=unwrap_node(value.node))
        return tuple(map(plain, value)) if type(value) in (tuple, list) else value

    return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


@_handles(torch.Tensor.data.__set__)  # pyright: ignore
def _set_data(state: TraceState, func: Any, tensor: torch.Tensor, value: torch.Tensor) -> Any:
    if isinstance(tensor, FunctionalTensor) or state.is_traced(value):
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            raise TranslationError(
                f"{state.name}: `.data` of a tensor of shape {tuple(tensor.shape)} is set to another shape or "
                f"dtype, {tuple(value.shape)}. Create a new tensor{source_line()}"
            )
        if isinstance(tensor, FunctionalTensor):
            with without_functions():
                set_data(state.recorder, tensor, value)
        else:
            tensor.detach().copy_(value)
        return None
    return func(tensor, value)


# ---------------------------------------------------------------------------------------------------------- indexing


@_handles(torch.Tensor.__getitem__)
def _getitem(state: TraceState, func: Any, tensor: torch.Tensor, index: Any) -> Any:
    return get_item(state, tensor, index)


@_handles(torch.Tensor.masked_select, torch.masked_select)
def _masked_select(state: TraceState, func: Any, input: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return get_item(state, input.expand(shape), mask.expand(shape))


@_handles(torch.Tensor.__setitem__)
def _setitem(state: TraceState, func: Any, tensor: torch.Tensor, index: Any, value: Any) -> Any:
    return set_item(state, tensor, index, _to_tensor(value, tensor.dtype))
