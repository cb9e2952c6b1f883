"""Arrays that closures and objects hold, where pytrees do not show them."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxfn._values.arrays import is_jax_type

# Of these there is nothing to look through.
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})


class NoArrays:
    """Base of jaxfn's own objects that hold no JAX arrays, so that nothing needs to look for one in them."""


class Opaque:
    """Base of jaxfn's own objects of which only some parts are to be looked through for arrays."""

    def visible_parts(self) -> Sequence[object]:
        """The parts that are to be looked through."""
        return ()


# How many objects to look through before taking it for granted that there is an array somewhere.
_SEARCH_LIMIT = 2000


def hides_arrays(value: Any) -> bool:
    """Whether an object leads to JAX arrays."""
    return any(True for _ in _hidden(value, is_jax_type))


def _hidden(value: Any, is_wanted: Callable[[type], bool]) -> Iterator[object]:
    """What an object leads to of a wanted type, by its attributes, items or closure.

    The object itself, where there is too much to look through.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if type(part) in _SCALARS or id(part) in seen:
            continue
        if len(seen) > _SEARCH_LIMIT:
            yield value
            return
        seen.add(id(part))
        if is_wanted(type(part)):
            yield part
        elif not isinstance(part, (type, types.ModuleType, np.ndarray, jax.Array, NoArrays)):
            pending += _parts(part)


def is_plain_function(value: object) -> bool:
    """Whether a value is a function that holds nothing: no closure and no defaults."""
    is_function = isinstance(value, types.FunctionType)
    return is_function and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)


def _parts(value: Any) -> Iterable[Any]:
    """What an object holds, as far as it can be seen without running its code."""
    if isinstance(value, Opaque):
        return value.visible_parts()
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return value
    members = [vars(kind).values() for kind in type(value).__mro__]
    slots = [m for member in members for m in member if isinstance(m, types.MemberDescriptorType)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, slot.__name__, None) for slot in slots)]


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
