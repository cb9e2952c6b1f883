"""Functions with other values in the place of arrays that they close over."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any


def rebound(function: Callable[..., Any], values: Mapping[int, Any]) -> Callable[..., Any]:
    """The function, with other values for arrays in its closure and its defaults.

    Functions, methods, `functools.partial`s, tuples, lists and dicts in there are looked through as well; other objects
    are not. A variable that has no such array in it is the very same one, so that `nonlocal` goes on working.

    Args:
      function: what to call.
      values: for the `id` of an array, what to have in its place.
    """
    return _Rebinding(values).applied(function)


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
        if isinstance(value, types.MethodType):
            bound = self.applied(value.__func__)
            return value if bound is value.__func__ else types.MethodType(bound, value.__self__)
        if type(value) is functools.partial:
            parts = [value.func, value.args, value.keywords]
            function, args, keywords = map(self.applied, parts)
            is_same = all(a is b for a, b in zip(parts, (function, args, keywords), strict=True))
            return value if is_same else functools.partial(function, *args, **keywords)
        if type(value) in (tuple, list):
            items = [self.applied(x) for x in value]
            return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
        if type(value) is dict:
            items = {key: self.applied(x) for key, x in value.items()}
            return value if all(value[key] is x for key, x in items.items()) else items
        return value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(map(self._cell, function.__closure__ or ()))
        defaults, keyword_defaults = self.applied(function.__defaults__), self.applied(function.__kwdefaults__)
        is_same = all(a is b for a, b in zip(function.__closure__ or (), cells, strict=True))
        if is_same and defaults is function.__defaults__ and keyword_defaults is function.__kwdefaults__:
            return function
        code, name = function.__code__, function.__name__
        copy = types.FunctionType(code, function.__globals__, name, defaults, cells or None)
        copy.__kwdefaults__ = keyword_defaults
        copy.__dict__.update(function.__dict__)
        return copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        value = self.applied(content)
        return cell if value is content else types.CellType(value)
