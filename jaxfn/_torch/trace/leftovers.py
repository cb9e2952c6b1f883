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

from jaxfn._torch._compat import FakeTensor, FunctionalTensor, memory, without_functions, without_modes
from jaxfn._torch.values.errors import TranslationError

_THREAD = threading.local()


def note(value: Any) -> Any:
    """Notes tensors that a trace made; returns them."""
    noted: list[weakref.ref[Any]] | None = getattr(_THREAD, "noted", None)
    if noted is not None:
        if isinstance(value, FunctionalTensor):
            noted.append(weakref.ref(value))
        elif isinstance(value, (tuple, list)):
            noted += [weakref.ref(x) for x in torch_tree.tree_leaves(value) if isinstance(x, FunctionalTensor)]
    return value


def exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Makes each of two tensors of a trace the other one. (`torch.utils.swap_tensors` wants no weak references.)"""
    noted: list[weakref.ref[Any]] = getattr(_THREAD, "noted", None) or []
    noted[:] = [reference for reference in noted if reference() is not a and reference() is not b]
    torch.utils.swap_tensors(a, b)
    note([a, b])


def made_here() -> list[FunctionalTensor]:
    """The tensors of the trace that are still there, each once."""
    return _alive(getattr(_THREAD, "noted", None) or [])


def sharing_memory(elem: torch.Tensor) -> list[FunctionalTensor]:
    """The tensors of the trace that lie in the same memory as what is inside of one of them."""
    place = memory(elem)
    return [x for x in made_here() if memory(x.elem) == place]


def may_share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether what is written to one tensor may be seen in another: in the same memory, their ranges meet."""
    if not isinstance(a, FunctionalTensor) or not isinstance(b, FunctionalTensor):
        return a is b
    with without_functions():
        ranges = [(x.storage_offset(), x.storage_offset() + extent(x)) for x in (a, b)]
        return memory(a.elem) == memory(b.elem) and max(ranges)[0] < min(end for _, end in ranges)


def extent(tensor: torch.Tensor) -> int:
    """Returns the number of elements of memory that a tensor spans."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0


@contextlib.contextmanager
def cleaned_up(owner: str) -> Generator[None]:
    """Looks after the tensors of the traces made inside, of which nothing in jaxfn may be held any more at the end.

    Raises:
      TranslationError: user code keeps one that depends on the inputs.
    """
    before = getattr(_THREAD, "noted", None)
    noted: list[weakref.ref[Any]] = []
    _THREAD.noted = noted
    try:
        yield
    except BaseException:
        _THREAD.noted = before
        _release(noted, is_named=False)
        raise
    _THREAD.noted = before
    place = _release(noted, is_named=True)
    if place is not None:
        raise TranslationError(
            f"{owner} keeps a tensor that depends on its inputs{place}, and while JAX traces it has no value: what "
            "uses it later would not get that of this call. Pass it on by ctx.save_for_backward(tensor) or as an "
            "attribute ctx.name = tensor, or return it as an output. (Of gradients, in backward and in hooks: have "
            "jax.grad return them)"
        )


def _release(noted: list[weakref.ref[Any]], *, is_named: bool) -> str | None:
    """Makes plain tensors of those that are still there; returns where one is kept that has no values.

    To find where takes time, by the number of objects that Python has: `is_named` says whether it is wanted.
    """
    tensors = _alive(noted)
    if is_named and any(map(_is_traced, tensors)):
        del tensors
        gc.collect()  # cycles of autograd's, and of frames of exceptions, keep tensors for a while
        tensors = _alive(noted)
    noted.clear()  # tensors with weak references are not exchanged
    place: str | None = None
    held_by_torch: list[FunctionalTensor] = []
    while tensors:
        tensor = tensors.pop()
        if is_named and place is None and _is_traced(tensor):
            place = _place(tensor, tensors)
        if not _exchange(tensor):
            held_by_torch.append(tensor)
    if held_by_torch and not is_named:  # by autograd's graph, perhaps, in such a cycle
        gc.collect()
        for tensor in held_by_torch:
            if type(tensor) is FunctionalTensor:  # torch 2.8 may change the class before it refuses
                _exchange(tensor)
    return place


def _alive(noted: list[weakref.ref[Any]]) -> list[FunctionalTensor]:
    """The tensors that are still there, each once."""
    tensors = (reference() for reference in noted)
    return list({id(tensor): tensor for tensor in tensors if type(tensor) is FunctionalTensor}.values())


def _below(tensor: Any) -> torch.Tensor:
    with without_modes(), without_functions():
        return tensor.from_functional()


def _is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(_below(tensor), FakeTensor)


def _exchange(tensor: torch.Tensor) -> bool:
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


def _place(tensor: torch.Tensor, ours: list[FunctionalTensor]) -> str:
    """Describes where a tensor is kept, as part of a message."""
    for holder in gc.get_referrers(tensor):
        if holder is ours or isinstance(holder, types.FrameType):
            continue
        name = _name_in(holder, tensor)
        if name:
            return f" in {name}"
    return ""


def _name_in(holder: Any, value: object) -> str:
    if isinstance(holder, dict):
        keys = [key for key, kept in holder.items() if kept is value]
        owner = _owner(holder)
        return f"{owner}.{keys[0]}" if keys and owner else f"a dict, by {keys[0]!r}" if keys else ""
    if isinstance(holder, (list, tuple, set)):
        for owner in gc.get_referrers(holder):
            if isinstance(owner, dict) and _owner(owner):
                return _name_in(owner, holder)
        return f"a {type(holder).__name__}"
    if isinstance(holder, types.CellType):
        functions = [
            f for c in gc.get_referrers(holder) for f in gc.get_referrers(c) if isinstance(f, types.FunctionType)
        ]
        return f"the closure of {functions[0].__qualname__}" if functions else "a closure"
    keys = [key for key, kept in getattr(holder, "__dict__", {}).items() if kept is value]
    return f"{_described(holder)}.{keys[0]}" if keys else f"a {type(holder).__name__}"


def _owner(namespace: dict[Any, Any]) -> str:
    """Whose attributes a dict holds."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return str(namespace["__name__"])
    for holder in gc.get_referrers(namespace):
        if getattr(holder, "__dict__", None) is namespace or (isinstance(holder, type) and _holds(holder, namespace)):
            return _described(holder)
    return ""


def _holds(kind: type, namespace: dict[Any, Any]) -> bool:
    return any(vars(kind).get(name) is value for name, value in namespace.items())


def _described(holder: object) -> str:
    return holder.__name__ if isinstance(holder, type) else f"a {type(holder).__name__}"
