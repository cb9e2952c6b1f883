"""The cache of traces, and its keys: everything except shapes and dtypes that a trace depends on."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import logging
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import nn

from jaxfn._torch._compat import OPERATION_TYPES, global_hooks
from jaxfn._torch.values.flatten import MUTABLE, Slot
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
)
_DEVICES = ("cpu", "cuda")


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))


def _of_device(read: Callable[..., Any], write: Callable[..., Any], device: str) -> _Setting:
    return _Setting(functools.partial(read, device), functools.partial(write, device))


_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    *(_of_device(torch.is_autocast_enabled, torch.set_autocast_enabled, x) for x in _DEVICES),
    *(_of_device(torch.get_autocast_dtype, torch.set_autocast_dtype, x) for x in _DEVICES),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
)


class TorchSettings(NamedTuple):
    """The settings of torch that code depends on, which surround a call. Hooks are those of all modules."""

    values: tuple[Any, ...]
    hooks: tuple[IdentityKey, ...]

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Inside, torch has these settings (except for the hooks)."""
        before = torch_settings()
        try:
            self._set()
            yield
        finally:
            before._set()

    def _set(self) -> None:
        for setting, value in zip(_SETTINGS, self.values, strict=True):
            if setting.read() != value:  # torch's test utilities forbid to assign some of them.
                setting.write(value)


def torch_settings() -> TorchSettings:
    """Returns torch's settings here, which traces depend on."""
    return TorchSettings(tuple(setting.read() for setting in _SETTINGS), tuple(map(IdentityKey, global_hooks())))


def static_key(value: Any) -> Hashable:
    """Returns a hashable value that is equal for values which a trace cannot distinguish.

    Raises:
      TypeError: There is none: a mutable object (a module, a tensor) may have changed at the next call.
    """
    return _StateKey([value]).parts


def capture_key(*functions: Any) -> Hashable | None:
    """Returns a key of everything except their arguments that functions and classes read; `None` if there is none.

    They, and those that they capture or name, read their closures, defaults, attributes, globals and modules.
    """
    try:
        return _StateKey(functions, has_tensors=True).parts
    except TypeError:
        return None


def reads_data(*functions: Any) -> bool:
    """Whether functions and classes may read tensors, or Python values that are neither code nor arguments."""
    try:
        key = _StateKey(functions, has_tensors=True)
    except TypeError:
        return True
    return key.has_data or key.found_tensors


class _StateKey:
    """The key of values, and of everything that functions among them read.

    Of a module, only what the functions name counts; of a class or a plain object, all attributes.

    Args:
      values: The values.
      has_tensors: Whether they may be tensors, whose values do not count.

    Attributes:
      parts: The key, in the order in which it is found.
      has_data: Whether there are values which are neither code nor default arguments.
      found_tensors: Whether there are tensors.
    """

    def __init__(self, values: Iterable[Any], has_tensors: bool = False) -> None:
        self.has_data = False
        self.found_tensors = False
        self._has_tensors = has_tensors
        self._indices: dict[int, tuple[int, object]] = {}  # By identity; the object is referenced, so it is unique.
        self._functions: list[types.FunctionType] = []
        self._modules: list[types.ModuleType] = []
        try:
            self.parts = self._find_parts(values)
        except (RecursionError, ValueError) as error:  # A recursive list, or a variable without a value yet.
            raise TypeError("a value that is not compared") from error

    def _find_parts(self, values: Iterable[Any]) -> Hashable:
        names, seen, num_read = set[str](), set[tuple[int, str]](), 0
        parts: list[Hashable] = [self._key(value) for value in values]
        while num_read < len(self._functions):  # The list grows, and so does that of modules.
            for function in self._functions[num_read:]:
                num_read += 1
                names.update(_names_in(function.__code__).all)
                self._has_tensors = True
                parts.append(self._read_by(function))
            for module in self._modules:
                for name in sorted(vars(module).keys() & (vars(module).keys() if names & _COMPUTE_NAMES else names)):
                    if (id(module), name) not in seen:
                        seen.add((id(module), name))
                        parts.append((id(module), name, self._key(vars(module)[name])))
        return tuple(parts)

    def _read_by(self, function: types.FunctionType) -> Hashable:
        (_, names, imports), scope = _names_in(function.__code__), function.__globals__
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        values = {name: scope[name] for name in names if name in scope}
        for name in imports:
            for imported in (name, f"{scope.get('__package__')}.{name}"):
                if isinstance(sys.modules.get(imported), types.ModuleType):
                    values.setdefault(imported, sys.modules[imported])
        has_data = self.has_data
        bound = self._key((function.__defaults__, function.__kwdefaults__, vars(function)))
        self.has_data = has_data
        environment = dict(os.environ) if "environ" in names or "getenv" in names else None
        return IdentityKey(function.__code__), id(scope), bound, *map(self._key, (cells, values, environment))

    def _key(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, torch.Tensor) and self._has_tensors:
            self.found_tensors = True
            return _tensor_key(value), self._key(vars(value)) if vars(value) else None
        if _is_constant(value) or isinstance(value, _CONSTANT_TYPES):
            return IdentityKey(value)
        if isinstance(value, _BY_VALUE):
            return kind, value
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            function: Any = value
            return kind, self._key(function.__func__), self._key(getattr(value, "__self__", None))
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType):
            return kind, value.__name__, self._key(value.__self__)
        if isinstance(value, functools.partial):
            return kind, self._key((value.func, value.args, value.keywords))
        if isinstance(value, property):
            return kind, self._key((value.fget, value.fset))
        if id(value) in self._indices:
            return kind, self._indices[id(value)][0]
        is_code = not isinstance(value, (tuple, frozenset, *MUTABLE)) and _is_code(value)
        if is_code or isinstance(value, MUTABLE):
            self._indices[id(value)] = len(self._indices), value
        if isinstance(value, (tuple, list, set, frozenset, deque)):
            items = cast(Iterable[Any], value)
            content = (
                frozenset(map(self._key, items)) if isinstance(value, (set, frozenset)) else (*map(self._key, items),)
            )
        elif isinstance(value, dict):
            content = (*((self._key(name), self._key(x)) for name, x in cast(dict[Any, Any], value).items()),)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.has_data = True
            content = value.dtype.str, value.shape, value.tobytes()
        elif is_code:
            return self._key_of_code(value)
        else:
            content = leaf_key(value)
            if content == (kind,) and value is not None:
                raise TypeError(f"{kind.__name__} is not compared by value")
            self.has_data |= value is not None
        return kind, content, self._key(vars(value)) if hasattr(value, "__dict__") else None

    def _key_of_code(self, value: Any) -> Hashable:
        """Returns the key of a function, a module, a class or a plain object."""
        if isinstance(value, types.FunctionType):
            self._functions.append(value)
            return types.FunctionType
        if isinstance(value, types.ModuleType):
            self._modules.append(value)
            return IdentityKey(value)
        if not isinstance(value, type):
            self.has_data |= isinstance(value, enum.Enum)
            return IdentityKey(value), self._key(type(value)), self._key(plain_attributes(value))
        classes = [x for x in value.__mro__ if not _is_constant(x)]
        items = [(name, x) for part in classes for name, x in vars(part).items()]
        parts = [(name, self._key(x)) for name, x in items if name not in _IGNORED]
        return IdentityKey(value), self._key(type(value)), *parts


_CONSTANT_TYPES = (
    torch.jit.ScriptFunction,
    logging.Logger,
    *OPERATION_TYPES,
    types.MethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
)
# Attributes of classes that do not change what code computes.
_IGNORED = frozenset(vars(type("", (), {"__slots__": ("__dict__", "__weakref__"), "__annotations__": {}}))) | {
    *("__abstractmethods__", "__orig_bases__", "__parameters__", "__qualname__", "_abc_impl", "_backward_cls"),
    *("__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__"),
}


def _is_code(value: object) -> bool:
    """Whether a value is a function, module, class or plain object, whose key is that of what it contains."""
    is_code = isinstance(value, (types.FunctionType, types.ModuleType, type))
    return is_code or (_slots_of_plain_class(type(value)) is not None and not isinstance(value, nn.Module))


def plain_attributes(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object that has nothing else, such as a configuration; `None` for other objects."""
    slots = _slots_of_plain_class(type(value))
    if slots is None:
        return None
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


@functools.lru_cache(maxsize=1024)
def _slots_of_plain_class(kind: type) -> tuple[str, ...] | None:
    """Returns the names in `__slots__` of a class whose objects have attributes only; `None` for other classes."""
    names = [x for part in kind.__mro__ for x, y in vars(part).items() if isinstance(y, types.MemberDescriptorType)]
    special = [
        name for name, offset in (("__dict__", kind.__dictoffset__), ("__weakref__", kind.__weakrefoffset__)) if offset
    ]
    twin = type("", (), {"__slots__": (*special, *(f"slot{i}" for i in range(len(names))))})
    is_of_python = bool(special) or any("__slots__" in vars(part) for part in kind.__mro__)  # `complex` is not.
    return tuple(names) if is_of_python and twin.__basicsize__ == kind.__basicsize__ else None


_COMPUTE_NAMES = {"getattr", "hasattr", "vars", "__dict__", "__getattribute__", "attrgetter", "getmembers"}


class _Names(NamedTuple):
    """The names and strings in code, and what it imports. `code` is referenced, so that its id is unique."""

    code: types.CodeType
    all: tuple[str, ...]
    imported: tuple[str, ...]


_NAMES: dict[int, _Names] = {}  # By the identity of the code, whose hash is slow.


def _names_in(code: types.CodeType) -> _Names:
    found = _NAMES.get(id(code))
    if found is None:
        found = _NAMES[id(code)] = _find_names(code)
    return found


def _find_names(code: types.CodeType) -> _Names:
    names, imported, pending = set[str](), set[str](), [code]
    while pending:
        part = pending.pop()
        names.update(part.co_names, (x for x in part.co_consts if isinstance(x, str)))
        imported.update(x.argval for x in dis.get_instructions(part) if x.opname in ("IMPORT_NAME", "IMPORT_FROM"))
        pending += [x for x in part.co_consts if isinstance(x, types.CodeType)]
    if names & {"eval", "exec", "globals", "import_module"}:
        raise TypeError(f"{code.co_name} looks names up that it computes")
    return _Names(code, tuple(sorted(names)), tuple(sorted(imported)))


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    """Returns a key of a captured tensor except for its values, which are read at each call."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.grad_fn is not None:
        raise TypeError("only plain tensors are compared")
    return IdentityKey(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_constant(value: Any) -> bool:
    """Whether a value is a module, function or class of a package that does not change."""
    if isinstance(value, types.FunctionType) and value.__closure__ is not None:
        return False
    if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(module).partition(".")[0] in _CONSTANT_PACKAGES


_OTHER_PACKAGES = frozenset({"torch", "numpy", "jax", "jaxfn", "einops", "typing_extensions", "_pytest"})
_CONSTANT_PACKAGES = (sys.stdlib_module_names | _OTHER_PACKAGES) - {"__main__"}


class LRUCache(Generic[_T]):
    """A thread-safe cache of the values of the most recently used keys, several of each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, list[_T]] = OrderedDict()
        self._lock = threading.Lock()

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
