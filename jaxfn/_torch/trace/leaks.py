"""Tensors of a trace that user code keeps: in a global, a cache, an attribute of a module or a class.

While torch traces, all tensors are `FunctionalTensor`s, which plain torch cannot use afterwards. What depends on no
input becomes the real tensor that it stands for. What depends on the inputs has no value, so that whoever uses it later
would compute with something that never was: it is refused when the trace ends, and becomes a tensor without values (on
torch's meta device), so that plain torch says so too.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import types
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import FakeTensor, FunctionalTensor, storage_id, without_functions, without_modes
from jaxfn._torch.values.errors import TranslationError

_THREAD = threading.local()


def track(value: Any) -> Any:
    """Notes tensors that a trace made; returns them."""
    tracked: list[weakref.ref[Any]] | None = getattr(_THREAD, "tracked", None)
    if tracked is not None:
        if isinstance(value, FunctionalTensor):
            tracked.append(weakref.ref(value))
        elif isinstance(value, (tuple, list)):
            tracked += [weakref.ref(x) for x in torch_tree.tree_leaves(value) if isinstance(x, FunctionalTensor)]
    return value


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Makes each of two tensors of a trace the other one. (`torch.utils.swap_tensors` wants no weak references.)"""
    tracked: list[weakref.ref[Any]] = getattr(_THREAD, "tracked", None) or []
    tracked[:] = [reference for reference in tracked if reference() is not a and reference() is not b]
    torch.utils.swap_tensors(a, b)
    track([a, b])


def live_tensors() -> list[FunctionalTensor]:
    """The tensors of the trace that are still there, each once."""
    return _live(getattr(_THREAD, "tracked", None) or [])


def tensors_with_storage(elem: torch.Tensor) -> list[FunctionalTensor]:
    """The tensors of the trace that lie in the same memory as what is inside of one of them."""
    location = storage_id(elem)
    return [x for x in live_tensors() if storage_id(x.elem) == location]


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether what is written to one tensor may be seen in another: in the same memory, their ranges meet."""
    if not isinstance(a, FunctionalTensor) or not isinstance(b, FunctionalTensor):
        return a is b
    with without_functions():
        ranges = [(x.storage_offset(), x.storage_offset() + storage_extent(x)) for x in (a, b)]
        return storage_id(a.elem) == storage_id(b.elem) and max(ranges)[0] < min(end for _, end in ranges)


def storage_extent(tensor: torch.Tensor) -> int:
    """Returns the number of elements of memory that a tensor spans."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0


@contextlib.contextmanager
def checking_leaks(owner: str) -> Generator[None]:
    """Looks after the tensors of the traces made inside, of which nothing in jaxfn may be held any more at the end.

    Raises:
      TranslationError: user code keeps one that depends on the inputs.
    """
    before = getattr(_THREAD, "tracked", None)
    tracked: list[weakref.ref[Any]] = []
    _THREAD.tracked = tracked
    try:
        yield
    except BaseException:
        _THREAD.tracked = before
        _release(tracked, is_named=False)
        raise
    _THREAD.tracked = before
    location = _release(tracked, is_named=True)
    if location is not None:
        raise TranslationError(
            f"{owner} keeps a tensor that depends on its inputs{location}, and while JAX traces it has no value: what "
            "uses it later would not get that of this call. Pass it on by ctx.save_for_backward(tensor) or as an "
            "attribute ctx.name = tensor, or return it as an output. (Of gradients, in backward and in hooks: have "
            "jax.grad return them)"
        )


def _release(tracked: list[weakref.ref[Any]], *, is_named: bool) -> str | None:
    """Makes plain tensors of those that are still there; returns where one is kept that has no values.

    To find where takes time, by the number of objects that Python has: `is_named` says whether it is wanted.
    """
    tensors = _live(tracked)
    if is_named and any(map(_is_traced, tensors)):
        del tensors
        gc.collect()  # cycles of autograd's, and of frames of exceptions, keep tensors for a while
        tensors = _live(tracked)
    tracked.clear()  # tensors with weak references are not exchanged
    location: str | None = None
    kept_by_torch: list[FunctionalTensor] = []
    while tensors:
        tensor = tensors.pop()
        if is_named and location is None and _is_traced(tensor):
            location = _describe_holder(tensor, tensors)
        if not _make_plain(tensor):
            kept_by_torch.append(tensor)
    if kept_by_torch and not is_named:  # by autograd's graph, perhaps, in such a cycle
        gc.collect()
        for tensor in kept_by_torch:
            if type(tensor) is FunctionalTensor:  # torch 2.8 may change the class before it refuses
                _make_plain(tensor)
    return location


def _live(tracked: list[weakref.ref[Any]]) -> list[FunctionalTensor]:
    """The tensors that are still there, each once."""
    tensors = (reference() for reference in tracked)
    return list({id(tensor): tensor for tensor in tensors if type(tensor) is FunctionalTensor}.values())


def _below(tensor: Any) -> torch.Tensor:
    with without_modes(), without_functions():
        return tensor.from_functional()


def _is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(_below(tensor), FakeTensor)


def _make_plain(tensor: torch.Tensor) -> bool:
    """Makes a plain tensor of one that a trace made, which is the same object; not of one that torch itself holds.

    Nobody finds those, in a cache or in autograd's graph.
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


def _describe_holder(tensor: torch.Tensor, ours: list[FunctionalTensor]) -> str:
    """Describes where a tensor is kept, as part of a message."""
    for holder in gc.get_referrers(tensor):
        if holder is ours or isinstance(holder, types.FrameType):
            continue
        name = _describe_entry(holder, tensor)
        if name:
            return f" in {name}"
    return ""


def _describe_entry(holder: Any, value: object) -> str:
    if isinstance(holder, dict):
        keys = [key for key, item in holder.items() if item is value]
        owner = _describe_namespace(holder)
        return f"{owner}.{keys[0]}" if keys and owner else f"a dict, by {keys[0]!r}" if keys else ""
    if isinstance(holder, (list, tuple, set)):
        for owner in gc.get_referrers(holder):
            if isinstance(owner, dict) and _describe_namespace(owner):
                return _describe_entry(owner, holder)
        return f"a {type(holder).__name__}"
    if isinstance(holder, types.CellType):
        functions = [
            f for c in gc.get_referrers(holder) for f in gc.get_referrers(c) if isinstance(f, types.FunctionType)
        ]
        return f"the closure of {functions[0].__qualname__}" if functions else "a closure"
    keys = [key for key, item in getattr(holder, "__dict__", {}).items() if item is value]
    return f"{_describe_object(holder)}.{keys[0]}" if keys else f"a {type(holder).__name__}"


def _describe_namespace(namespace: dict[Any, Any]) -> str:
    """Whose attributes a dict holds."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return str(namespace["__name__"])
    for holder in gc.get_referrers(namespace):
        if getattr(holder, "__dict__", None) is namespace or (
            isinstance(holder, type) and _is_namespace_of(holder, namespace)
        ):
            return _describe_object(holder)
    return ""


def _is_namespace_of(kind: type, namespace: dict[Any, Any]) -> bool:
    return any(vars(kind).get(name) is value for name, value in namespace.items())


def _describe_object(holder: object) -> str:
    return holder.__name__ if isinstance(holder, type) else f"a {type(holder).__name__}"
