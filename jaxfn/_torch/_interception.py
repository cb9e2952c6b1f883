"""What torch code asks for before autograd and functionalization make operations of it.

`PythonLevel` sees every call of torch's functions and every attribute of a tensor, and answers those that need another
answer while tracing. `_patches` is for what no mode sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from jaxfn._torch._errors import TranslationError
from jaxfn._torch._indexing import read, write
from jaxfn._torch._recorder import source_line
from jaxfn._torch._selection import Selection, call

if TYPE_CHECKING:
    from jaxfn._torch._tracing import Tracing

_Handler = Callable[["PythonLevel", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_HANDLERS: dict[Any, _Handler] = {}


class PythonLevel(TorchFunctionMode):
    """Answers what torch code asks of its tensors."""

    def __init__(self, tracing: Tracing) -> None:
        super().__init__()
        self.tracing = tracing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.tracing.is_current():
            return func(*args, **kwargs)
        args, kwargs = tuple(map(_on_cpu, args)), {name: _on_cpu(value) for name, value in kwargs.items()}
        if _is_device_name(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if any(isinstance(x, Selection) for x in (*args, *kwargs.values())) and func is not torch.Tensor.__setitem__:
            return call(self.tracing, func, args, kwargs)
        handler = _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)


def _answers(*functions: Any) -> Callable[[_Handler], _Handler]:
    def enter(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return enter


# ---------------------------------------------------------------------------------------------------------- devices


def _on_cpu(value: Any) -> Any:
    """A device as the one on which everything is while tracing; anything else as it is."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type != "meta" else value


def _is_device_name(value: object) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "npu")


@_answers(torch.Tensor.to)
def _to(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    args = [args[0], *(torch.device("cpu") if _is_device_name(arg) else arg for arg in args[1:])]
    if len(args) > 1 and type(args[1]) is int:  # the number of a GPU
        args[1] = torch.device("cpu")
    return func(*args, **kwargs)


@_answers(torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.xpu, torch.Tensor.pin_memory)
def _cuda(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


@_answers(torch.Tensor.type)
def _type(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    return func(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------- values


@_answers(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist)
def _values(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = mode.tracing.lower(args[0])
    if mode.tracing.recorder.is_traced(tensor):
        raise TranslationError(
            f"{mode.tracing.owner}: `.{func.__name__}()` asks for the values of a tensor, and while JAX traces there "
            f"are none. Write that part in torch operations{source_line()}"
        )
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # pyright: ignore[reportPrivateUsage]
        return func(tensor.detach(), *args[1:], **kwargs)


@_answers(torch.tensor, torch.as_tensor, torch.asarray)
def _tensor(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    if not (args and isinstance(args[0], torch.Tensor)):
        return func(*args, **kwargs)
    # Also one made outside, whose value may change.
    tensor = args[0].detach().clone() if func is torch.tensor else args[0]
    if kwargs.get("copy"):
        tensor = tensor.clone()
    dtype = kwargs.get("dtype")
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor


@_answers(torch.Tensor.to_sparse, torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr, torch.sparse_coo_tensor)
def _sparse(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    raise TranslationError(
        f"{mode.tracing.owner}: {func.__name__} makes a sparse tensor, which has no counterpart on JAX. Use dense "
        f"tensors{source_line()}"
    )


@_answers(torch.Tensor.resize_, torch.Tensor.resize_as_)
def _resize(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, shape = args[0], args[1:]
    if isinstance(shape[0], torch.Tensor):
        shape = tuple(shape[0].shape)
    elif len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    missing = math.prod(shape) - tensor.numel()
    # Memory that torch would leave as it is, zeros here.
    longer = torch.cat([tensor.reshape(-1), tensor.new_zeros(max(missing, 0))])[: math.prod(shape)]
    return tensor if shape == tensor.shape else tensor.set_(longer.view(shape))


# ---------------------------------------------------------------------------------------------------------- autograd


@_answers(torch.Tensor.requires_grad.__get__)  # pyright: ignore
def _requires_grad(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    of_input = mode.tracing.requires_grad(args[0])
    return func(*args, **kwargs) if of_input is None else of_input


@_answers(torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # pyright: ignore
def _detach(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    with mode.tracing.recorder.stopping_gradients():
        return func(*args, **kwargs)


@_answers(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # pyright: ignore
def _require_grad(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    # Detached to be a leaf of autograd inside, not to have no derivative in the whole.
    mode.tracing.recorder.continue_gradient(mode.tracing.lower(args[0]))
    return func(*args, **kwargs)


@_answers(torch.Tensor.data.__set__)  # pyright: ignore
def _set_data(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, value = args
    if mode.tracing.is_traced(tensor) or mode.tracing.is_traced(value):
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            raise TranslationError(
                f"{mode.tracing.owner}: `.data` of a tensor of shape {tuple(tensor.shape)} is set to another shape or "
                f"dtype, {tuple(value.shape)}. Make a new tensor{source_line()}"
            )
        with torch.no_grad():
            tensor.copy_(value)
        return None
    return func(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------- indexing


@_answers(torch.Tensor.__getitem__)
def _getitem(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    return read(mode.tracing, *args)


@_answers(torch.Tensor.masked_select, torch.masked_select)
def _masked_select(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = (*args, *kwargs.values())
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    return read(mode.tracing, tensor.expand(shape), mask.expand(shape))


@_answers(torch.Tensor.__setitem__)
def _setitem(mode: PythonLevel, func: Any, args: Any, kwargs: Any) -> Any:
    return write(mode.tracing, *args)
