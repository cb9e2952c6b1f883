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

from jaxfn._torch._compat import FunctionalTensor, is_accumulating, is_below_autograd, saved_values, storage_id
from jaxfn._torch.graph.recorder import Recorder, mutated_arguments
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.autograd_nodes import unwrap_node
from jaxfn._torch.trace.leaks import live_tensors, tensors_with_storage
from jaxfn._torch.values.errors import TranslationError

DETACHED = "jaxfn_is_detached"  # the attribute of a tensor that says so, and how
_BY_CALL, _BY_DATA, _UNREADABLE = "by a call", "by .data", "unreadable"
_ALIASED = "jaxfn_shares_memory"


def mark_detached(tensor: Any, *, by_data: bool = False) -> Any:
    """Marks a tensor of the code's as detached, if need be so that autograd does not see writes; returns it."""
    if isinstance(tensor, FunctionalTensor):
        vars(tensor)[DETACHED] = _BY_DATA if by_data else _BY_CALL
    return tensor


def is_detached(tensor: object) -> bool:
    """Whether a tensor is marked."""
    return isinstance(tensor, FunctionalTensor) and DETACHED in vars(tensor)


def _is_by_data(tensor: FunctionalTensor) -> bool:
    return vars(tensor).get(DETACHED) is _BY_DATA


def forbid_mutation(recorder: Recorder, tensor: torch.Tensor, reason: str) -> None:
    """Notes that others, which would not see it, are in a tensor's memory."""
    recorder.has_aliased_inputs = True
    vars(tensor)[_ALIASED] = reason


def set_data(recorder: Recorder, tensor: Any, value: torch.Tensor) -> None:
    """Puts a tensor with its gradient into memory of its own, with other values: `tensor.data = value`.

    To torch it is the memory of `value`, which makes no difference as long as nothing is written to it.
    """
    if recorder.follows_grad_mode and tensor.is_leaf:  # of others, autograd saved the memory and not the tensor
        _check_not_saved(recorder, tensor)
    lowered = value
    if isinstance(value, FunctionalTensor):
        stop_detached(recorder, value)
        lowered = value.from_functional()
    stop_detached(recorder, tensor)
    tensor.elem = FunctionalTensor.to_functional(recorder.with_gradient_of(lowered, tensor.from_functional())).elem
    if isinstance(value, FunctionalTensor):
        reason = "one of which was made the `.data` of the other"
        link_storage(recorder, tensor, value, reason, "Assign a copy: `tensor.data = other.clone()`")
    else:
        forbid_mutation(recorder, tensor, "its `.data` is a tensor that was made outside")


def link_storage(recorder: Recorder, a: torch.Tensor, b: torch.Tensor, reason: str, hint: str) -> None:
    """Notes that torch has one memory for two tensors, neither of which may be written to while there are both."""
    if isinstance(a, FunctionalTensor) and isinstance(b, FunctionalTensor):
        recorder.linked_storages += [(a.elem, b.elem, reason, hint), (b.elem, a.elem, reason, hint)]


def _check_aliases(recorder: Recorder, tensor: FunctionalTensor) -> None:
    for x in tensors_with_storage(tensor.elem):
        if _ALIASED in vars(x):
            raise TranslationError(
                f"{recorder.name} writes to a tensor that shares its memory: {vars(x)[_ALIASED]}, and JAX's arrays "
                f"share none. Write to a copy{source_line()}"
            )
    for mutated, other, reason, hint in recorder.linked_storages:
        if storage_id(mutated) == storage_id(tensor.elem) and tensors_with_storage(other):
            raise TranslationError(
                f"{recorder.name} writes to the memory of two tensors, {reason}, and JAX's arrays share none. "
                f"{hint}{source_line()}"
            )


def _check_not_saved(recorder: Recorder, tensor: FunctionalTensor) -> None:
    """Raises where autograd has saved memory for backward that is written to without its knowledge."""
    pending = [x.grad_fn for x in live_tensors()]
    while pending:
        node = unwrap_node(pending.pop())
        if node is None or node in recorder.visited_nodes:
            continue
        recorder.visited_nodes.add(node)  # which keeps what it saved, so that memory is not used twice
        pending += [following for following, _ in node.next_functions]
        recorder.saved_storages |= {storage_id(x.elem) for x in saved_values(node) if isinstance(x, FunctionalTensor)}
    recorder.data_mutation = source_line()
    if storage_id(tensor.elem) in recorder.saved_storages:
        raise TranslationError(
            f"{recorder.name} writes by `.data` to a tensor that autograd has saved for backward. torch's gradients "
            "take the new values there, without saying so, and JAX's the old ones. Write before the tensor is used, "
            f"or to a copy, `tensor.clone()`{source_line()}"
        )


def stop_detached(recorder: Recorder, *tensors: FunctionalTensor) -> None:
    """Takes the derivative off the present values of those tensors that are marked."""
    for tensor in filter(is_detached, tensors):
        if vars(tensor)[DETACHED] is _UNREADABLE:
            raise TranslationError(
                f"{recorder.name} reads a detached tensor, to which it wrote a value with a gradient, in the memory "
                f"of another tensor that has a gradient of its own. Write to a copy: `.detach().clone()`{source_line()}"
            )
        _stop_gradient(recorder, tensor)


def _is_called_by_user() -> bool:
    """Whether it is the code that detaches, and not autograd for its own purposes."""
    return is_below_autograd() and not is_accumulating()


def run_operation(recorder: Recorder, mode: Any, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
    """Runs `call()`, an operation on tensors of the user's code, with the gradients that torch gives it."""
    for x in mutated_arguments(func, args, kwargs) if recorder.linked_storages or recorder.has_aliased_inputs else []:
        if isinstance(x, FunctionalTensor):
            _check_aliases(recorder, x)
    is_detach = func is torch.ops.aten.detach.default and _is_called_by_user()
    if not recorder.follows_grad_mode:
        with recorder.stopping_gradients() if is_detach else contextlib.nullcontext():
            return call()
    operands = _tensors((args, kwargs))
    is_grad_off = not torch.is_grad_enabled()
    if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
        stop_detached(recorder, *operands)
        value = call()
        if is_detach or is_grad_off or any(map(is_detached, operands)):
            marking = functools.partial(mark_detached, by_data=any(map(_is_by_data, operands)))
            torch_tree.tree_map_only(torch.Tensor, marking, value)
        return value
    mutated = [x for x in mutated_arguments(func, args, kwargs) if isinstance(x, FunctionalTensor) and _is_inexact(x)]
    if any(map(_is_by_data, mutated)):
        with mode:  # in which autograd hands out what it saved
            for x in filter(_is_by_data, mutated):
                _check_not_saved(recorder, x)
    others = [x for x in operands if not any(x is y for y in mutated)]
    gets_gradient = not is_grad_off and any(not is_detached(x) and _is_differentiable(recorder, x) for x in others)
    unreadable = [x for x in mutated if gets_gradient and is_detached(x) and not _unmark_detached(recorder, x)]
    keeping_gradient = [
        (tensor, tensor.from_functional())
        for x in mutated
        if is_grad_off or is_detached(x)
        for tensor in (_attached_aliases(x) if is_detached(x) else [x])
    ]
    stop_detached(recorder, *operands)
    value = call()
    for tensor, before in keeping_gradient:
        _set_value(tensor, recorder.with_gradient_of(tensor.from_functional(), before))
    for tensor in unreadable:
        for x in filter(is_detached, tensors_with_storage(tensor.elem)):
            vars(x)[DETACHED] = _UNREADABLE
    if is_grad_off and not mutated:
        for x in _tensors(value):
            _stop_gradient(recorder, x)
    return value


def _unmark_detached(recorder: Recorder, tensor: FunctionalTensor) -> bool:
    """Makes a detached tensor one that has a gradient, as torch does where something with a gradient is written to it.

    Not where something else lies in that memory and has a gradient of its own: a graph cannot show both, and the
    tensor must not be read any more.

    Returns:
      Whether it could be done.
    """
    aliases = tensors_with_storage(tensor.elem)
    is_alone = not any(_is_differentiable(recorder, x) for x in aliases if not is_detached(x))
    for x in aliases:
        value = x.from_functional()
        if is_alone and recorder.is_differentiable(value):
            _set_value(x, recorder.detach_value(value))
        if is_alone:
            vars(x).pop(DETACHED, None)
    return is_alone


def _attached_aliases(tensor: FunctionalTensor) -> list[FunctionalTensor]:
    """The tensors in the memory of a detached one that are not detached."""
    return [x for x in tensors_with_storage(tensor.elem) if not is_detached(x)]


def _set_value(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Gives a tensor, and what shares its memory, another value from below functionalization."""
    tensor.replace_(value)
    tensor.commit_update()
    tensor.sync()


def _stop_gradient(recorder: Recorder, tensor: FunctionalTensor) -> None:
    value = tensor.from_functional()
    if recorder.is_differentiable(value):
        recorder.stop_gradient(value)


def _is_differentiable(recorder: Recorder, tensor: FunctionalTensor) -> bool:
    return recorder.is_differentiable(tensor.from_functional())


def _tensors(value: Any) -> list[FunctionalTensor]:
    return [x for x in torch_tree.tree_leaves(value) if isinstance(x, FunctionalTensor)]


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
