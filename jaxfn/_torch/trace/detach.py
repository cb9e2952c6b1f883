"""Gradients where torch's autograd does not see what the code does: `detach`, `.data`, and `torch.no_grad()`.

# Note: storage and gradients

In torch a gradient belongs to a tensor, and values belong to its storage, which several tensors may share:

    d = y.detach()              d shares y's storage, and has no gradient
    with torch.no_grad():
        v = y[0]                v shares y's storage, and has no gradient
        v.mul_(2)               y has new values, and its old gradient

A graph has values only, and JAX differentiates those. So a tensor without a gradient, in storage that has one, is
marked *detached*, and its derivative is stopped wherever it is used. A value that is written without a gradient gets
the derivative that the storage had before, by a node `with_gradient_of(new, old)`.

Autograd saves storage for backward too. If the code mutates it by `.data`, which autograd does not see, torch computes
the gradient from the new values. JAX computes it from the old ones, so that raises. In a trace autograd saves tensors
for parameters only. If there is such a mutation, the code is traced again with all inputs as parameters; if that
raises, gradients by the other inputs raise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from jaxfn._torch._compat import FunctionalTensor, is_accumulating, is_below_autograd, saved_values, storage_id
from jaxfn._torch.graph.recorder import Recorder, mutated_arguments
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.autograd_nodes import unwrap_node
from jaxfn._torch.trace.leaks import live_tensors, tensors_with_storage
from jaxfn._torch.values.arrays import is_differentiable
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.flatten import map_tensors, tensors_in

DETACHED = "jaxfn_is_detached"  # The attribute that marks a detached tensor. Its value says how it was detached.
_BY_CALL, _BY_DATA, _UNREADABLE = "by a call", "by .data", "unreadable"
_ALIASED = "jaxfn_shares_memory"


def mark_detached(tensor: Any, *, by_data: bool = False) -> Any:
    """Marks a tensor as detached, perhaps by `.data`, which hides mutations from autograd; returns it."""
    if isinstance(tensor, FunctionalTensor):
        vars(tensor)[DETACHED] = _BY_DATA if by_data else _BY_CALL
    return tensor


def is_detached(tensor: object) -> bool:
    """Whether a tensor is marked as detached."""
    return isinstance(tensor, FunctionalTensor) and DETACHED in vars(tensor)


def _is_by_data(tensor: FunctionalTensor) -> bool:
    return vars(tensor).get(DETACHED) is _BY_DATA


def forbid_mutation(recorder: Recorder, tensor: torch.Tensor, reason: str) -> None:
    """Marks a tensor whose storage is shared with tensors that would not see a mutation."""
    recorder.has_aliased_inputs = True
    vars(tensor)[_ALIASED] = reason


def set_data(recorder: Recorder, tensor: Any, value: torch.Tensor) -> None:
    """Implements `tensor.data = value`: gives a tensor new values in separate storage, with its old gradient.

    In torch it shares `value`'s storage, which makes no difference unless one of them is mutated.
    """
    if recorder.follows_grad_mode and tensor.is_leaf:  # For other tensors, autograd saved the old storage.
        _check_not_saved(recorder, tensor)
    lowered = value
    if isinstance(value, FunctionalTensor):
        stop_detached(recorder, value)
        lowered = value.from_functional()
    stop_detached(recorder, tensor)
    tensor.elem = FunctionalTensor.to_functional(recorder.with_gradient_of(lowered, tensor.from_functional())).elem
    if isinstance(value, FunctionalTensor):
        reason = "one of which was assigned to the `.data` of the other"
        link_storage(recorder, tensor, value, reason, "Assign a copy: `tensor.data = other.clone()`")
    else:
        forbid_mutation(recorder, tensor, "its `.data` is an external tensor")


def link_storage(recorder: Recorder, a: torch.Tensor, b: torch.Tensor, reason: str, hint: str) -> None:
    """Records that two tensors share storage in torch, so neither may be mutated while both are referenced."""
    if isinstance(a, FunctionalTensor) and isinstance(b, FunctionalTensor):
        recorder.linked_storages += [(a.elem, b.elem, reason, hint), (b.elem, a.elem, reason, hint)]


def _check_aliases(recorder: Recorder, tensor: FunctionalTensor) -> None:
    for x in tensors_with_storage(tensor.elem):
        if _ALIASED in vars(x):
            raise TranslationError(
                f"{recorder.name} mutates a tensor that shares its storage: {vars(x)[_ALIASED]}. JAX arrays share "
                f"none. Mutate a copy{source_line()}"
            )
    for mutated, other, reason, hint in recorder.linked_storages:
        if storage_id(mutated) == storage_id(tensor.elem) and tensors_with_storage(other):
            raise TranslationError(
                f"{recorder.name} mutates the storage of two tensors, {reason}. JAX arrays share none. "
                f"{hint}{source_line()}"
            )


def _check_not_saved(recorder: Recorder, tensor: FunctionalTensor) -> None:
    """Raises if autograd has saved, for backward, the storage that is mutated by `.data`."""
    pending = [x.grad_fn for x in live_tensors()]
    while pending:
        node = unwrap_node(pending.pop())
        if node is None or node in recorder.visited_nodes:
            continue
        recorder.visited_nodes.add(node)  # A reference: freed storage could give its identity to another one.
        pending += [following for following, _ in node.next_functions]
        recorder.saved_storages |= {storage_id(x.elem) for x in saved_values(node) if isinstance(x, FunctionalTensor)}
    recorder.data_mutation = source_line()
    if storage_id(tensor.elem) in recorder.saved_storages:
        raise TranslationError(
            f"{recorder.name} mutates by `.data` a tensor that autograd has saved for backward. torch would silently "
            "compute gradients from the new values, and JAX from the old ones. Mutate the tensor before its first use, "
            f"or mutate a copy, `tensor.clone()`{source_line()}"
        )


def stop_detached(recorder: Recorder, *tensors: FunctionalTensor) -> None:
    """Stops the gradients of the tensors that are marked as detached."""
    for tensor in filter(is_detached, tensors):
        if vars(tensor)[DETACHED] is _UNREADABLE:
            raise TranslationError(
                f"{recorder.name} reads a detached tensor after it wrote a value with a gradient to it. The tensor "
                "shares storage with another tensor that has a gradient. Mutate a copy: "
                f"`.detach().clone()`{source_line()}"
            )
        _stop_gradient(recorder, tensor)


def run_operation(recorder: Recorder, mode: Any, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
    """Runs `call()`, an operation of the user's code, and gives its results the gradients that torch gives them."""
    for x in mutated_arguments(func, args, kwargs) if recorder.linked_storages or recorder.has_aliased_inputs else []:
        if isinstance(x, FunctionalTensor):
            _check_aliases(recorder, x)
    # Autograd itself detaches too.
    is_detach = func is torch.ops.aten.detach.default and is_below_autograd() and not is_accumulating()
    if not recorder.follows_grad_mode:
        with recorder.stopping_gradients() if is_detach else contextlib.nullcontext():
            return call()
    operands = _tensors((args, kwargs))
    is_grad_off = not torch.is_grad_enabled()
    if _returns_view(func):
        stop_detached(recorder, *operands)
        value = call()
        if is_detach or is_grad_off or any(map(is_detached, operands)):
            marking = functools.partial(mark_detached, by_data=any(map(_is_by_data, operands)))
            map_tensors(marking, value)
        return value
    mutated = [x for x in _tensors(mutated_arguments(func, args, kwargs)) if is_differentiable(x.dtype)]
    if any(map(_is_by_data, mutated)):
        with mode:  # Autograd returns saved tensors through the mode.
            for x in filter(_is_by_data, mutated):
                _check_not_saved(recorder, x)
    others = [x for x in operands if not any(x is y for y in mutated)]
    gets_gradient = not is_grad_off and any(not is_detached(x) and _is_differentiable(recorder, x) for x in others)
    unreadable = [x for x in mutated if gets_gradient and is_detached(x) and not _unmark_detached(recorder, x)]
    with_old_gradient = [
        (tensor, tensor.from_functional())
        for x in mutated
        if is_grad_off or is_detached(x)
        for tensor in (_attached_aliases(x) if is_detached(x) else [x])
    ]
    stop_detached(recorder, *operands)
    value = call()
    for tensor, before in with_old_gradient:
        _set_value(tensor, recorder.with_gradient_of(tensor.from_functional(), before))
    for tensor in unreadable:
        for x in filter(is_detached, tensors_with_storage(tensor.elem)):
            vars(x)[DETACHED] = _UNREADABLE
    if is_grad_off and not mutated:
        for x in _tensors(value):
            _stop_gradient(recorder, x)
    return value


@functools.cache
def _returns_view(func: Any) -> bool:
    """Whether an operation returns a view of an argument."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _unmark_detached(recorder: Recorder, tensor: FunctionalTensor) -> bool:
    """Makes a detached tensor one that has a gradient, as torch does when a value with a gradient is written to it.

    Not if another tensor in that storage has a gradient: the graph cannot represent both, so later reads of the tensor
    raise.

    Returns:
      Whether that was possible.
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
    """Returns the tensors that share a detached tensor's storage and are not detached."""
    return [x for x in tensors_with_storage(tensor.elem) if not is_detached(x)]


def _set_value(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Gives a tensor, and all tensors that share its storage, a new value from below functionalization."""
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
    return [x for x in tensors_in(value) if isinstance(x, FunctionalTensor)]
