"""Functions with other values in the place of arrays that they close over.

Only what is the function's own counts: variables of its closure, defaults, and tuples, functions, methods and
`functools.partial`s in there. A list, a dict or another object may be somebody else's too, who writes to it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxfn._values.arrays import is_traced
from jaxfn._values.hidden import is_filled


def closed_over_tracers(function: Callable[..., Any]) -> list[Any]:
    """The arrays that JAX traces and that `rebound` can have another value for, each once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_traced(value):
            found[id(value)] = value
        pending += _parts(value)
    return list(found.values())


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        yield from filter(is_filled, value.__closure__ or ())
        yield value.__defaults__
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, types.CellType):
        yield value.cell_contents
    elif isinstance(value, types.MethodType):
        yield value.__func__
    elif type(value) is functools.partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif type(value) is tuple:
        yield from value


def rebound(function: Callable[..., Any], values: Mapping[int, Any]) -> Callable[..., Any]:
    """The function, with other values for arrays that it closes over.

    A variable that has no such array in it is the very same one, so that `nonlocal` goes on working.

    Args:
      function: what to call.
      values: for the `id` of an array, what to have in its place.
    """
    return _Rebinding(values).applied(function) if values else function


class _Rebinding:
    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = values
        self._pending: set[int] = set()  # a function that calls itself is in its own closure

    def applied(self, value: Any) -> Any:
        """The value itself where nothing in it has another value."""
        if id(value) in self._values:
            return self._values[id(value)]
        if id(value) in self._pending:
            return value
        self._pending.add(id(value))
        try:
            return self._within(value)
        finally:
            self._pending.remove(id(value))

    def _within(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CellType) and is_filled(value):
            content = self.applied(value.cell_contents)
            return value if content is value.cell_contents else types.CellType(content)
        if isinstance(value, types.MethodType):
            bound = self.applied(value.__func__)
            return value if bound is value.__func__ else types.MethodType(bound, value.__self__)
        if type(value) is functools.partial:
            function, args = self.applied(value.func), self.applied(value.args)
            keywords = self._items(value.keywords)
            is_same = function is value.func and args is value.args and keywords is value.keywords
            return value if is_same else functools.partial(function, *args, **keywords)
        if type(value) is tuple:
            items = tuple(map(self.applied, value))
            return value if all(a is b for a, b in zip(value, items, strict=True)) else items
        return value

    def _items(self, mapping: dict[str, Any]) -> dict[str, Any]:
        items = {name: self.applied(x) for name, x in mapping.items()}
        return mapping if all(mapping[name] is x for name, x in items.items()) else items

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        closure, defaults = self.applied(function.__closure__), self.applied(function.__defaults__)
        keyword_defaults = function.__kwdefaults__ and self._items(function.__kwdefaults__)
        before = function.__closure__, function.__defaults__, function.__kwdefaults__
        if all(a is b for a, b in zip(before, (closure, defaults, keyword_defaults), strict=True)):
            return function
        copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
        copy.__kwdefaults__ = keyword_defaults
        copy.__dict__.update(function.__dict__)
        return copy
