"""Leaked tensors: those that user code still references after a trace, in a global, a cache, or an attribute.

While torch traces, all tensors are `FunctionalTensor`s, which plain torch cannot use afterwards. A leaked tensor that
depends on no input becomes the tensor that it wraps. One that depends on the inputs has no value, so whatever uses it
later would compute wrong values: the trace raises, and the tensor becomes a meta tensor, so plain torch raises too.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import FakeTensor, FunctionalTensor, storage_id, without_functions, without_modes
from jaxfn._torch.graph.numbers import TracedNumber
from jaxfn._torch.values.errors import EscapedNumberError, TranslationError
from jaxfn._torch.values.scopes import setting


class _Thread(threading.local):
    """The tensors of the innermost trace of a thread; `None` outside traces."""

    tracked: list[weakref.ref[Any]] | None = None


_THREAD = _Thread()
_COLLECTING = threading.RLock()


def track(value: Any) -> Any:
    """Registers new tensors of a trace, and returns them."""
    tracked = _THREAD.tracked
    if tracked is not None:
        if isinstance(value, (FunctionalTensor, TracedNumber)):
            tracked.append(weakref.ref(value))
        elif isinstance(value, (tuple, list)):
            tracked += [weakref.ref(x) for x in torch_tree.tree_leaves(value) if isinstance(x, FunctionalTensor)]
    return value


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swaps two tensors of a trace. (`torch.utils.swap_tensors` rejects tensors with weak references.)"""
    tracked = _THREAD.tracked or []
    tracked[:] = [reference for reference in tracked if reference() is not a and reference() is not b]
    torch.utils.swap_tensors(a, b)
    track([a, b])


def live_tensors() -> list[FunctionalTensor]:
    """Returns the tensors of the trace that are still referenced."""
    return _live(_THREAD.tracked or [])


def tensors_with_storage(elem: torch.Tensor) -> list[FunctionalTensor]:
    """Returns the tensors of the trace that share the storage of `elem`, the inner tensor of one of them."""
    location = storage_id(elem)
    return [x for x in live_tensors() if storage_id(x.elem) == location]


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a mutation of one tensor may change another: they share storage, and their ranges overlap."""
    if not isinstance(a, FunctionalTensor) or not isinstance(b, FunctionalTensor):
        return a is b
    with without_functions():
        ranges = [(x.storage_offset(), x.storage_offset() + storage_extent(x)) for x in (a, b)]
        return storage_id(a.elem) == storage_id(b.elem) and max(ranges)[0] < min(end for _, end in ranges)


def storage_extent(tensor: torch.Tensor) -> int:
    """Returns the number of storage elements that a tensor spans."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0


@contextlib.contextmanager
def checking_leaks(name: str) -> Generator[None]:
    """Converts the tensors that are still referenced after traces inside. At exit, jaxfn itself must not reference any.

    Raises:
      TranslationError: User code references a tensor that depends on the inputs.
    """
    tracked: list[weakref.ref[Any]] = []
    try:
        with setting(_THREAD, tracked=tracked):
            yield
    except BaseException:
        _release(tracked, is_checked=False)
        raise
    if _has_numbers(tracked):
        gc.collect()
        if _has_numbers(tracked):
            raise EscapedNumberError(
                f"{name} stores a number, the `.item()` of a tensor that depends on its inputs. While JAX traces it "
                "has no value. Pass it on as an attribute ctx.name = number"
            )
    stored = _release(tracked, is_checked=True)
    if stored:
        raise TranslationError(
            f"{name} stores a tensor that depends on its inputs ({stored}), in a global, a cache or an attribute. "
            "While JAX traces it has no value, so later uses would not see the value of this call. Pass it on by "
            "ctx.save_for_backward(tensor) or as an attribute ctx.name = tensor, or return it as an output. (For "
            "gradients, in backward and in hooks: have jax.grad return them)"
        )


def _release(tracked: list[weakref.ref[Any]], *, is_checked: bool) -> str:
    """Turns referenced tensors into plain ones; returns the type of one that depends on the inputs, "" if none does.

    Tensors that garbage references are only known to be garbage if `is_checked`, as that takes time.
    """
    tensors = _live(tracked)
    # Reference cycles of autograd and of exception frames reference tensors for a while.
    for _ in range(5 if is_checked else 0):
        if not any(map(_is_traced, tensors)):
            break
        del tensors
        with _COLLECTING:
            gc.collect()
        tensors = _live(tracked)
        if threading.active_count() == 1:
            break
        time.sleep(0.02)  # While another thread collects garbage, `gc.collect` does nothing.
    tracked.clear()  # Tensors with weak references cannot be swapped.
    traced = next(filter(_is_traced, tensors), None)
    stored = "" if traced is None else f"{traced.dtype}{list(traced.shape)}"
    referenced_by_torch: list[FunctionalTensor] = []
    del traced
    while tensors:
        tensor = tensors.pop()
        if not _make_plain(tensor):
            referenced_by_torch.append(tensor)
    if referenced_by_torch and not is_checked:  # Perhaps by a reference cycle.
        gc.collect()
        for tensor in referenced_by_torch:
            if type(tensor) is FunctionalTensor:  # torch 2.8 may change the class before it raises.
                _make_plain(tensor)
    return stored


def _has_numbers(tracked: list[weakref.ref[Any]]) -> bool:
    return any(isinstance(reference(), TracedNumber) for reference in tracked)


def _live(tracked: list[weakref.ref[Any]]) -> list[FunctionalTensor]:
    """Returns the tensors that are still referenced, without duplicates."""
    tensors = (reference() for reference in tracked)
    return list({id(tensor): tensor for tensor in tensors if type(tensor) is FunctionalTensor}.values())


def _below(tensor: Any) -> torch.Tensor:
    with without_modes(), without_functions():
        return tensor.from_functional()


def _is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(_below(tensor), FakeTensor)


def _make_plain(tensor: torch.Tensor) -> bool:
    """Turns a traced tensor into a plain one; the object does not change. Returns False if torch itself references it.

    User code cannot find such tensors, which are in a cache or in autograd's graph.
    """
    value = _below(tensor)
    with without_modes(), without_functions(), torch.no_grad():
        requires_grad = tensor.requires_grad
        if isinstance(value, FakeTensor):
            plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        else:
            plain = value.detach().clone()
        plain.requires_grad_(requires_grad)
        try:
            torch.utils.swap_tensors(tensor, plain)
        except RuntimeError:
            return False
        return True
