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

What autograd has saved for backward is memory too: written to by `.data`, which autograd does not see, torch's gradient
takes the new values. Those are not known where JAX's derivative is taken, so that is refused. While tracing autograd
saves for parameters only. Where there is such a write, code is traced again as if all inputs were parameters: if that
is refused, so are gradients by the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import FunctionalTensor, is_accumulating, is_below_autograd, memory, saved_by
from jaxfn._torch.graph.recorder import Recorder, written_by
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.leftovers import made_here, sharing_memory
from jaxfn._torch.trace.nodes import node_of
from jaxfn._torch.values.errors import TranslationError

DETACHED = "jaxfn_is_detached"  # the attribute of a tensor that says so, and how
_BY_CALL, _BY_DATA, _UNREADABLE = "by a call", "by .data", "unreadable"
_SHARED = "jaxfn_shares_memory"


def detach(tensor: Any, *, by_data: bool = False) -> Any:
    """Marks a tensor of the code's as detached, if need be so that autograd does not see writes; returns it."""
    if isinstance(tensor, FunctionalTensor):
        vars(tensor)[DETACHED] = _BY_DATA if by_data else _BY_CALL
    return tensor


def is_detached(tensor: object) -> bool:
    """Whether a tensor is marked."""
    return isinstance(tensor, FunctionalTensor) and DETACHED in vars(tensor)


def _is_by_data(tensor: FunctionalTensor) -> bool:
    return vars(tensor).get(DETACHED) is _BY_DATA


def refuse_writes(recorder: Recorder, tensor: torch.Tensor, reason: str) -> None:
    """Notes that others, which would not see it, are in a tensor's memory."""
    recorder.has_shared_inputs = True
    vars(tensor)[_SHARED] = reason


def exchange_memory(recorder: Recorder, tensor: Any, value: torch.Tensor) -> None:
    """Puts a tensor with its gradient into memory of its own, with other values: `tensor.data = value`.

    To torch it is the memory of `value`, which makes no difference as long as nothing is written to it.
    """
    if recorder.follows_grad_mode and tensor.is_leaf:  # of others, autograd saved the memory and not the tensor
        _refuse_if_saved(recorder, tensor)
    lowered = value
    if isinstance(value, FunctionalTensor):
        stop_detached(recorder, value)
        lowered = value.from_functional()
    stop_detached(recorder, tensor)
    tensor.elem = FunctionalTensor.to_functional(recorder.carried(lowered, tensor.from_functional())).elem
    if isinstance(value, FunctionalTensor):
        reason = "one of which was made the `.data` of the other"
        share_memory(recorder, tensor, value, reason, "Assign a copy: `tensor.data = other.clone()`")
    else:
        refuse_writes(recorder, tensor, "its `.data` is a tensor that was made outside")


def share_memory(recorder: Recorder, a: torch.Tensor, b: torch.Tensor, reason: str, cure: str) -> None:
    """Notes that torch has one memory for two tensors, neither of which may be written to while there are both."""
    if isinstance(a, FunctionalTensor) and isinstance(b, FunctionalTensor):
        recorder.shared += [(a.elem, b.elem, reason, cure), (b.elem, a.elem, reason, cure)]


def _check_shared(recorder: Recorder, tensor: FunctionalTensor) -> None:
    for x in sharing_memory(tensor.elem):
        if _SHARED in vars(x):
            raise TranslationError(
                f"{recorder.owner} writes to a tensor that shares its memory: {vars(x)[_SHARED]}, and JAX's arrays "
                f"share none. Write to a copy{source_line()}"
            )
    for written, other, reason, cure in recorder.shared:
        if memory(written) == memory(tensor.elem) and sharing_memory(other):
            raise TranslationError(
                f"{recorder.owner} writes to the memory of two tensors, {reason}, and JAX's arrays share none. "
                f"{cure}{source_line()}"
            )


def _refuse_if_saved(recorder: Recorder, tensor: FunctionalTensor) -> None:
    """Raises where autograd has saved memory for backward that is written to without its knowledge."""
    waiting = [x.grad_fn for x in made_here()]
    while waiting:
        node = node_of(waiting.pop())
        if node is None or node in recorder.seen_nodes:
            continue
        recorder.seen_nodes.add(node)  # which keeps what it saved, so that memory is not used twice
        waiting += [following for following, _ in node.next_functions]
        recorder.saved_memory |= {memory(x.elem) for x in saved_by(node) if isinstance(x, FunctionalTensor)}
    recorder.writes_data = source_line()
    if memory(tensor.elem) in recorder.saved_memory:
        raise TranslationError(
            f"{recorder.owner} writes by `.data` to a tensor that autograd has saved for backward. torch's gradients "
            "take the new values there, without saying so, and JAX's the old ones. Write before the tensor is used, "
            f"or to a copy, `tensor.clone()`{source_line()}"
        )


def stop_detached(recorder: Recorder, *tensors: FunctionalTensor) -> None:
    """Takes the derivative off the present values of those tensors that are marked."""
    for tensor in filter(is_detached, tensors):
        if vars(tensor)[DETACHED] is _UNREADABLE:
            raise TranslationError(
                f"{recorder.owner} reads a detached tensor, to which it wrote a value with a gradient, in the memory "
                f"of another tensor that has a gradient of its own. Write to a copy: `.detach().clone()`{source_line()}"
            )
        _stop(recorder, tensor)


def _is_the_users() -> bool:
    """Whether it is the code that detaches, and not autograd for its own purposes."""
    return is_below_autograd() and not is_accumulating()


def run(recorder: Recorder, mode: Any, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
    """Runs `call()`, an operation on tensors of the user's code, with the gradients that torch gives it."""
    for x in written_by(func, args, kwargs) if recorder.shared or recorder.has_shared_inputs else []:
        if isinstance(x, FunctionalTensor):
            _check_shared(recorder, x)
    is_detach = func is torch.ops.aten.detach.default and _is_the_users()
    if not recorder.follows_grad_mode:
        with recorder.stopping_gradients() if is_detach else contextlib.nullcontext():
            return call()
    operands = _tensors((args, kwargs))
    is_silent = not torch.is_grad_enabled()
    if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
        stop_detached(recorder, *operands)
        value = call()
        if is_detach or is_silent or any(map(is_detached, operands)):
            marking = functools.partial(detach, by_data=any(map(_is_by_data, operands)))
            torch_tree.tree_map_only(torch.Tensor, marking, value)
        return value
    written = [x for x in written_by(func, args, kwargs) if isinstance(x, FunctionalTensor) and _is_inexact(x)]
    if any(map(_is_by_data, written)):
        with mode:  # in which autograd hands out what it saved
            for x in filter(_is_by_data, written):
                _refuse_if_saved(recorder, x)
    others = [x for x in operands if not any(x is y for y in written)]
    gets_gradient = not is_silent and any(not is_detached(x) and _varies(recorder, x) for x in others)
    lost = [x for x in written if gets_gradient and is_detached(x) and not _attach(recorder, x)]
    kept = [
        (tensor, tensor.from_functional())
        for x in written
        if is_silent or is_detached(x)
        for tensor in (_with_gradient(x) if is_detached(x) else [x])
    ]
    stop_detached(recorder, *operands)
    value = call()
    for tensor, before in kept:
        _write(tensor, recorder.carried(tensor.from_functional(), before))
    for tensor in lost:
        for x in filter(is_detached, sharing_memory(tensor.elem)):
            vars(x)[DETACHED] = _UNREADABLE
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
    sharing = sharing_memory(tensor.elem)
    is_alone = not any(_varies(recorder, x) for x in sharing if not is_detached(x))
    for x in sharing:
        value = x.from_functional()
        if is_alone and recorder.varies(value):
            _write(x, recorder.without_gradient(value))
        if is_alone:
            vars(x).pop(DETACHED, None)
    return is_alone


def _with_gradient(tensor: FunctionalTensor) -> list[FunctionalTensor]:
    """The tensors in the memory of a detached one that are not detached."""
    return [x for x in sharing_memory(tensor.elem) if not is_detached(x)]


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
