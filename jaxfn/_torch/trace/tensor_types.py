"""Type, identity and attributes of traced tensors, as Python code sees them.

A traced tensor is a `FunctionalTensor`, and the parameters and buffers of a module are others than the module's own
while it is traced. To the user's code, and to Python's (`functools.singledispatch`), `type(x)` and `x.__class__` are
those of torch, and a parameter has the type, the `id`, the hash and the attributes of the module's own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jaxfn._torch._compat import FunctionalTensor
from jaxfn._torch.graph.source_lines import is_library_code
from jaxfn._torch.trace.selection import Selection
from jaxfn._torch.trace.state import ACTIVE, TraceState, own_tensor

_REAL_TYPE = type


def _is_for_user(depth: int = 2) -> bool:
    """Whether the code of a frame, that which called the caller of this function, is not torch, JAX or jaxfn."""
    return ACTIVE.state is not None and not is_library_code(sys._getframe(depth).f_code.co_filename)  # pyright: ignore


def _apparent_type(tensor: object) -> type:
    own = own_tensor(tensor)
    return torch.Tensor if own is None else own.type


def _identified(tensor: Any) -> Any:
    """Returns the tensor that has the identity of a traced tensor."""
    own, state = own_tensor(tensor), ACTIVE.state
    if own is None or state is None:
        return tensor
    state.reads_identity = True
    return own.tensor


def is_same(a: object, b: object) -> bool:
    """Whether one of two tensors represents the other one."""
    pairs = (own_tensor(a), b), (own_tensor(b), a)
    return any(own is not None and own.tensor is other for own, other in pairs)


class _Mutable(type):
    """A metaclass whose classes may be given another one."""


class Type(type, metaclass=_Mutable):
    """Is `type` to code, except that it returns the apparent type of a traced tensor. No class derives from it.

    It is a class, and its own type, as `type` is: code of other threads, Python's own too, reads its `__mro__`.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3:
            name, bases, namespace = args
            bases = tuple(_REAL_TYPE if base is Type else base for base in bases)
            return _REAL_TYPE(name, bases, namespace, **kwargs)
        found = _REAL_TYPE(*args, **kwargs)
        if found in (FunctionalTensor, Selection) and _is_for_user():
            return _apparent_type(args[0])
        return Type if found is _REAL_TYPE else found

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_TYPE)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _REAL_TYPE)

    def __getattribute__(cls, name: str) -> Any:
        return getattr(_REAL_TYPE, name)

    def __getitem__(cls, item: Any) -> types.GenericAlias:
        return types.GenericAlias(_REAL_TYPE, item)

    def __or__(cls, other: Any) -> Any:
        return _REAL_TYPE | other

    def __ror__(cls, other: Any) -> Any:
        return other | _REAL_TYPE

    def __eq__(cls, other: object) -> bool:
        return other is Type or other is _REAL_TYPE

    def __hash__(cls) -> int:
        return hash(_REAL_TYPE)

    def __repr__(cls) -> str:
        return repr(_REAL_TYPE)


Type.__class__ = Type


def patch_id(original: Callable[[object], int]) -> Any:
    """Returns the patch of `id`."""

    def patch(value: object, /) -> int:
        is_traced = _REAL_TYPE(value) is FunctionalTensor
        return original(_identified(value) if is_traced and _is_for_user() else value)

    return patch


def patch_getattribute(original: Callable[[Any, str], Any]) -> Any:
    """Returns the patch of attribute access of traced tensors, for `x.__class__` and attributes of a subclass."""

    def patch(tensor: Any, name: str) -> Any:
        if name == "__class__":
            own = own_tensor(tensor)  # Classes of parameters ask for that of a subclass.
            if _is_for_user() or (own is not None and own.type not in (torch.Tensor, torch.nn.Parameter)):
                return _apparent_type(tensor)
        try:
            return original(tensor, name)
        except AttributeError:
            own = None if name == "__dict__" else own_tensor(tensor)
            if own is None or not hasattr(own.type, name):
                raise
            attribute = next(vars(x)[name] for x in own.type.__mro__ if name in vars(x))
            return attribute.__get__(tensor, own.type) if hasattr(attribute, "__get__") else attribute

    return patch


def hash_tensor(state: TraceState, original: Callable[[Any], int], tensor: torch.Tensor) -> int:
    """Implements `hash(tensor)`."""
    own = own_tensor(tensor)
    state.reads_identity |= own is not None and _is_for_user(3)
    return original(tensor if own is None else own.tensor)


def has_torch_function(state: TraceState, original: Callable[..., bool], *args: Any) -> bool:
    """Implements `torch.overrides.has_torch_function`, for code that looks up that name in the module."""
    values = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    plain = FunctionalTensor, torch.Tensor, torch.nn.Parameter
    return any(_REAL_TYPE(x) not in plain for x in values if isinstance(x, torch.Tensor)) and original(*args)


_HAS_TORCH_FUNCTION = (
    torch.overrides.has_torch_function,
    torch.overrides.has_torch_function_unary,
    torch.overrides.has_torch_function_variadic,
)


def _overrides_nothing(*args: Any) -> bool:
    return False


def call_overridable(function: types.FunctionType, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Calls the user's function, which has called `handle_torch_function`, as one whose arguments override nothing."""
    scope = function.__globals__
    replaced = {name: value for name, value in scope.items() if any(value is x for x in _HAS_TORCH_FUNCTION)}
    try:
        scope.update(dict.fromkeys(replaced, _overrides_nothing))
        return function(*args, **kwargs)
    finally:
        scope.update(replaced)
