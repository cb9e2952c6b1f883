"""The cache of traces, and its keys: everything except shapes and dtypes that a trace depends on."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

import torch

from jaxfn._torch._compat import global_backward_hooks, global_forward_hooks
from jaxfn._torch.values.flatten import Slot
from jaxfn._tree import leaf_key

_T = TypeVar("_T")


class IdentityKey:
    """A key that equals only other keys of its object, which it references weakly if possible.

    In contrast to `id`, it is never equal to the key of a later object at that address.
    """

    __slots__ = ("_hash", "_object")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        try:
            self._object: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # Not every object supports weak references.
            self._object = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._object()
        return isinstance(other, IdentityKey) and mine is not None and mine is other._object()

    def __hash__(self) -> int:
        return self._hash


_BY_VALUE = (
    IdentityKey,
    Slot,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    types.BuiltinFunctionType,
)


def static_key(value: Any) -> Hashable:
    """Returns a hashable value that is equal for values which a trace cannot distinguish.

    Raises:
      TypeError: There is none: a mutable object (a module, a tensor) may have changed at the next call.
    """
    try:
        return _key(value)
    except (RecursionError, ValueError) as error:  # A recursive closure, or a variable without a value yet.
        raise TypeError(f"{type(value).__name__} is not compared by value") from error


def torch_settings_key() -> Hashable:
    """Returns the torch settings that a trace depends on."""
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    hooks = tuple(map(IdentityKey, [*global_forward_hooks(), *global_backward_hooks()]))
    return torch.get_default_dtype(), hooks, *autocast


def _key(value: Any) -> Hashable:
    if isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), *map(_key, cast(list[Any], value))
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return dict, *((_key(name), _key(item)) for name, item in items)
    if isinstance(value, functools.partial):
        return functools.partial, *map(_key, (value.func, value.args, value.keywords))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        bound = (cells, list(value.__defaults__ or ()), value.__kwdefaults__ or {})
        return value.__code__, id(value.__globals__), *map(_key, bound)
    key = leaf_key(value)
    if key == (type(value),):
        raise TypeError(f"{type(value).__name__} is not compared by value")
    return key


def capture_key(function: Callable[..., Any]) -> Hashable | None:
    """Returns a key of everything except its arguments that a Python function reads; `None` if there is none.

    The function, and those that it captures or names, read their closures, defaults, attributes and globals.
    """
    functions: list[types.FunctionType] = []

    def comparable(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value), *map(comparable, cast(list[Any], value))
        if isinstance(value, dict):
            return dict, *((name, comparable(item)) for name, item in cast(dict[Any, Any], value).items())
        if isinstance(value, functools.partial):
            return functools.partial, comparable((value.func, value.args, value.keywords))
        if isinstance(value, torch.Tensor):
            return _tensor_key(value)
        if _is_constant(value) or (isinstance(value, type) and issubclass(value, torch.autograd.Function)):
            return IdentityKey(value)
        if isinstance(value, (type, types.ModuleType)):
            raise TypeError(f"the attributes of {value.__name__} may change")
        if not isinstance(value, types.FunctionType):
            return value
        if value not in functions:
            functions.append(value)
        return types.FunctionType, functions.index(value)

    def read_by(function: types.FunctionType) -> Hashable:
        return function.__code__, static_key(comparable(_values_read_by(function)))

    try:
        own = static_key(comparable(function))
        return own, *[read_by(x) for x in functions]  # The list grows during the iteration.
    except (TypeError, ValueError, RecursionError):  # A variable without a value yet, a list that contains itself.
        return None


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    """Returns a key of a captured tensor except for its values, which are read at each call."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.grad_fn is not None:
        raise TypeError("only plain tensors are compared")
    return IdentityKey(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _values_read_by(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns what a function reads: its closure, defaults, attributes, and the globals that its code names."""
    names, pending = set[str](), [function.__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    global_values = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    defaults = function.__defaults__, function.__kwdefaults__
    return id(function.__globals__), cells, defaults, dict(vars(function)), global_values


def _is_constant(value: Any) -> bool:
    """Whether a value is a module, function or class of a package that does not change."""
    if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(module).partition(".")[0] in _CONSTANT_PACKAGES


_CONSTANT_PACKAGES = frozenset({"torch", "numpy", "builtins", "math", "operator", "functools", "itertools", "typing"})


class LRUCache(Generic[_T]):
    """A thread-safe cache of the values of the most recently used keys, several of each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, list[_T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, fits: Callable[[_T], bool]) -> _T | None:
        """Returns a cached value for a key that fits, if there is one."""
        return next(filter(fits, self.values(key)), None)

    def values(self, key: Hashable) -> list[_T]:
        """Returns the cached values for a key."""
        with self._lock:
            if key not in self._values:
                return []
            self._values.move_to_end(key)
            return [*self._values[key]]

    def put(self, key: Hashable, value: _T) -> None:
        """Adds a value, as the last for its key."""
        with self._lock:
            self._values.setdefault(key, []).append(value)
            while len(self._values) > self._size:
                self._values.popitem(last=False)

    def move_to_front(self, key: Hashable, value: _T) -> None:
        """Makes a value the first for its key."""
        with self._lock:
            self._values.get(key, []).sort(key=lambda other: other is not value)
