"""Gradients where torch's autograd does not see what the code does: `detach`, `.data`, and `torch.no_grad()`.

# Note: memory and gradients

To torch the gradient belongs to a tensor, and the values to its memory, which several tensors may share:

    d = y.detach()              d has y's memory, and no gradient
    with torch.no_grad():
        v = y[0]                likewise
        v.mul_(2)               y has other values, and its old gradient

A graph has values only, and JAX differentiates those. So a tensor that autograd sees no way back from, in memory that
has a gradient, is marked *detached*, and its derivative is stopped wherever it is used. What is written without a
gradient gets the derivative that the memory had before, by a node `carried(new, old)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import FunctionalTensor, is_below_autograd
from jaxfn._torch.graph.recorder import Recorder, written_by
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.leftovers import sharing_memory
from jaxfn._torch.values.errors import TranslationError

_MARK = "jaxfn_is_detached"
_UNREADABLE = object()
_SHARED = "jaxfn_shares_memory"


def detach(tensor: Any) -> Any:
    """Marks a tensor of the code's as detached; returns it."""
    if isinstance(tensor, FunctionalTensor):
        vars(tensor)[_MARK] = True
    return tensor


def is_detached(tensor: object) -> bool:
    """Whether a tensor is marked."""
    return isinstance(tensor, FunctionalTensor) and _MARK in vars(tensor)


def refuse_writes(recorder: Recorder, tensor: torch.Tensor, reason: str) -> None:
    """Notes that others, which would not see it, are in a tensor's memory."""
    recorder.has_shared_inputs = True
    vars(tensor)[_SHARED] = reason


def _check_shared(recorder: Recorder, tensor: FunctionalTensor) -> None:
    for x in sharing_memory(tensor) if recorder.has_shared_inputs else []:
        if _SHARED in vars(x):
            raise TranslationError(
                f"{recorder.owner} writes to a tensor that shares its memory: {vars(x)[_SHARED]}, and JAX's arrays "
                f"share none. Write to a copy{source_line()}"
            )


def stop_if_detached(recorder: Recorder, tensor: object) -> None:
    """Takes the derivative off the present value of a tensor, if it is marked."""
    if isinstance(tensor, FunctionalTensor) and is_detached(tensor):
        if vars(tensor)[_MARK] is _UNREADABLE:
            raise TranslationError(
                f"{recorder.owner} reads a detached tensor, to which it wrote a value with a gradient, in the memory "
                f"of another tensor that has a gradient of its own. Write to a copy: `.detach().clone()`{source_line()}"
            )
        _stop(recorder, tensor)


def run(recorder: Recorder, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
    """What `call()` gives, which is an operation on tensors of the code's, with the gradients that torch gives it."""
    is_detach = func is torch.ops.aten.detach.default and is_below_autograd() and not recorder.runs_script
    if not recorder.follows_grad_mode:
        with recorder.stopping_gradients() if is_detach else contextlib.nullcontext():
            return call()
    operands = _tensors((args, kwargs))
    is_silent = not torch.is_grad_enabled()
    if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
        for x in operands:
            stop_if_detached(recorder, x)
        value = call()
        if is_detach or is_silent or any(map(is_detached, operands)):
            torch_tree.tree_map_only(torch.Tensor, detach, value)
        return value
    written = [x for x in written_by(func, args, kwargs) if isinstance(x, FunctionalTensor) and _is_inexact(x)]
    for x in written_by(func, args, kwargs):
        if isinstance(x, FunctionalTensor):
            _check_shared(recorder, x)
    others = [x for x in operands if not any(x is y for y in written)]
    gets_gradient = not is_silent and any(not is_detached(x) and _varies(recorder, x) for x in others)
    lost = [x for x in written if gets_gradient and is_detached(x) and not _attach(recorder, x)]
    kept = [
        (tensor, tensor.from_functional())
        for x in written
        if is_silent or is_detached(x)
        for tensor in (_with_gradient(x) if is_detached(x) else [x])
    ]
    for x in operands:
        stop_if_detached(recorder, x)
    value = call()
    for tensor, before in kept:
        _write(tensor, recorder.carried(tensor.from_functional(), before))
    for tensor in lost:
        for x in filter(is_detached, sharing_memory(tensor)):
            vars(x)[_MARK] = _UNREADABLE
    if is_silent and not written:
        for x in _tensors(value):
            _stop(recorder, x)
    return value


def _attach(recorder: Recorder, tensor: FunctionalTensor) -> bool:
    """Makes a detached tensor one that has a gradient, as torch does where something with a gradient is written to it.

    Not where something else lies in that memory and has a gradient of its own: a graph cannot show both, and the
    tensor must not be read any more.

    Returns:
      Whether it could be done.
    """
    sharing = sharing_memory(tensor)
    is_alone = not any(_varies(recorder, x) for x in sharing if not is_detached(x))
    for x in sharing:
        value = x.from_functional()
        if is_alone and recorder.varies(value):
            _write(x, recorder.without_gradient(value))
        if is_alone:
            vars(x).pop(_MARK, None)
    return is_alone


def _with_gradient(tensor: FunctionalTensor) -> list[FunctionalTensor]:
    """The tensors in the memory of a detached one that are not detached."""
    return [x for x in sharing_memory(tensor) if not is_detached(x)]


def _write(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Gives a tensor, and what shares its memory, another value from below functionalization."""
    tensor.replace_(value)
    tensor.commit_update()
    tensor.sync()


def _stop(recorder: Recorder, tensor: FunctionalTensor) -> None:
    value = tensor.from_functional()
    if recorder.varies(value):
        recorder.stop_gradient(value)


def _varies(recorder: Recorder, tensor: FunctionalTensor) -> bool:
    return recorder.varies(tensor.from_functional())


def _tensors(value: Any) -> list[FunctionalTensor]:
    return [x for x in torch_tree.tree_leaves(value) if isinstance(x, FunctionalTensor)]


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
