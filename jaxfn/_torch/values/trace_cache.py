"""The cache of traces, and its keys: everything except shapes and dtypes that a trace depends on."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import nn

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


class TorchSettings(NamedTuple):
    """What surrounds a call in torch: the settings that code depends on and that a `with` block may change.

    Attributes:
      values: The value of each of `_SETTINGS`.
      hooks: The global hooks of modules, which are not restored.
    """

    values: tuple[Any, ...]
    hooks: tuple[IdentityKey, ...]

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Inside, torch has these settings."""
        changed = [(x, mine, now) for x, mine in zip(_SETTINGS, self.values, strict=True) if (now := x.get()) != mine]
        try:
            for setting, mine, _ in changed:
                setting.set(mine)
            yield
        finally:
            for setting, _, before in changed:
                setting.set(before)


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _autocast(device: str) -> _Setting:
    def get_autocast() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def set_autocast(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return _Setting(get_autocast, set_autocast)


def _get_determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _cudnn(name: str) -> _Setting:
    flags = torch.backends.cudnn
    return _Setting(functools.partial(getattr, flags, name), functools.partial(setattr, flags, name))


_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _autocast("cpu"),
    _autocast("cuda"),
    _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    _Setting(_get_determinism, _set_determinism),
    *map(_cudnn, ("enabled", "benchmark", "deterministic")),
)


def torch_settings() -> TorchSettings:
    """Returns torch's settings here, which traces depend on."""
    hooks = tuple(map(IdentityKey, [*global_forward_hooks(), *global_backward_hooks()]))
    return TorchSettings(tuple(setting.get() for setting in _SETTINGS), hooks)


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


def reads_data(*functions: Any) -> bool:
    """Whether functions and classes may read Python values (and not only code) besides their arguments."""
    try:
        return _CaptureKey(functions).has_data
    except (TypeError, ValueError, RecursionError):
        return True


def capture_key(*functions: Any) -> Hashable | None:
    """Returns a key of everything except their arguments that functions and classes read; `None` if there is none.

    They, and those that they capture or name, read their closures, defaults, attributes, globals and modules.
    """
    try:
        return _CaptureKey(functions).parts
    except (TypeError, ValueError, RecursionError):  # A variable without a value yet, a list that contains itself.
        return None


class _CaptureKey:
    """The key of what functions read.

    Attributes:
      parts: The key: what is read, in the order in which it is found.
      has_data: Whether that includes values which are neither code nor default arguments.

    Of a module, only what the functions name counts; of a class or a plain object, all attributes.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.has_data = False
        self._indices: dict[int, int] = {}
        self._functions: list[types.FunctionType] = []
        self._modules: list[types.ModuleType] = []
        self._seen = set[tuple[int, str]]()
        names: dict[str, None] = {}
        parts: list[Hashable] = [self._key(value) for value in values]
        num_read = 0
        while num_read < len(self._functions):
            for function in self._functions[num_read:]:
                num_read += 1
                names |= dict.fromkeys(_names_in(function.__code__))
                parts.append(self._read_by(function))
            for module in self._modules:  # Both lists grow.
                for name in names:
                    if name in vars(module) and (id(module), name) not in self._seen:
                        self._seen.add((id(module), name))
                        parts.append((id(module), name, self._key(vars(module)[name])))
        self.parts = tuple(parts)

    def _read_by(self, function: types.FunctionType) -> Hashable:
        names, package = _names_in(function.__code__), function.__globals__.get("__package__")
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        values = {name: function.__globals__[name] for name in names if name in function.__globals__}
        for name in names:  # `import name` inside the function
            for imported in (name, f"{package}.{name}"):
                if isinstance(sys.modules.get(imported), types.ModuleType):
                    values.setdefault(imported, sys.modules[imported])
        has_data = self.has_data
        bound = self._key((function.__defaults__, function.__kwdefaults__, vars(function)))
        self.has_data = has_data
        environment = dict(os.environ) if {"environ", "getenv"} & {*names} else None
        return function.__code__, id(function.__globals__), bound, *map(self._key, (cells, values, environment))

    def _key(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in (tuple, list):
            return kind, *map(self._key, value)
        if kind is dict:
            return dict, *((_key(name), self._key(item)) for name, item in value.items())
        if isinstance(value, torch.Tensor):
            return _tensor_key(value)
        if _is_constant(value) or isinstance(value, (torch.jit.ScriptFunction, logging.Logger, *_DESCRIPTORS)):
            return IdentityKey(value)
        if isinstance(value, functools.partial):
            return functools.partial, self._key((value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return types.MethodType, self._key((value.__func__, value.__self__))
        if isinstance(value, (staticmethod, classmethod, property)):
            is_property = isinstance(value, property)
            return kind, self._key((value.fget, value.fset) if is_property else cast(Any, value).__func__)
        is_plain = isinstance(value, (types.FunctionType, types.ModuleType, type)) or _is_plain_object(value)
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (types.ModuleType, type)):
            return kind, value.__name__, self._key(value.__self__)
        if isinstance(value, (*_BY_VALUE, enum.Enum)) or not is_plain:
            self.has_data |= value is not None
            return _key(value)
        if id(value) in self._indices:
            return kind, self._indices[id(value)]
        self._indices[id(value)] = len(self._indices)
        if isinstance(value, types.FunctionType):
            self._functions.append(value)
            return kind
        if isinstance(value, types.ModuleType):
            self._modules.append(value)
            return IdentityKey(value)
        if isinstance(value, type):
            classes = [x for x in value.__mro__ if not _is_constant(x)]
            items = [(name, x) for part in classes for name, x in vars(part).items()]
            return IdentityKey(value), *((name, self._key(x)) for name, x in items if name not in _IGNORED)
        return IdentityKey(value), self._key(kind), self._key(vars(value))


_CLASS_ATTRIBUTES = """
    __abstractmethods__ __annotations__ __dict__ __doc__ __firstlineno__ __module__ __orig_bases__ __parameters__
    __qualname__ __slots__ __static_attributes__ __weakref__ _abc_impl _backward_cls
"""
_IGNORED = frozenset(_CLASS_ATTRIBUTES.split())
_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names and strings in code."""
    names, pending = set[str](), [code]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        names.update(x for x in code.co_consts if isinstance(x, str))
        pending += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    if names & {"eval", "exec", "globals", "__dict__", "import_module"}:
        raise TypeError(f"{code.co_name} looks names up that it computes")
    return tuple(sorted(names))


def _is_plain_object(value: object) -> bool:
    """Whether a value is an object with attributes, such as a configuration."""
    kind = type(value)
    return kind.__module__ != "builtins" and hasattr(value, "__dict__") and not isinstance(value, nn.Module)


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    """Returns a key of a captured tensor except for its values, which are read at each call."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.grad_fn is not None:
        raise TypeError("only plain tensors are compared")
    return IdentityKey(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_constant(value: Any) -> bool:
    """Whether a value is a module, function or class of a package that does not change."""
    if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(module).partition(".")[0] in _CONSTANT_PACKAGES


_CONSTANT_PACKAGES = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "jax", "jaxfn", "einops", "typing_extensions"} - {"__main__"}
)


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
