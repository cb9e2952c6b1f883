"""Tracers that user code captures: found in closures, defaults and Python's containers, and replaced there."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jax.core import Tracer

CONTAINERS = (tuple, list, dict)


def captures_any(function: object) -> bool:
    """Whether a function has a closure or defaults, or is another kind of callable."""
    is_plain = isinstance(function, types.FunctionType)
    return not is_plain or bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)


def captured_tracers(values: Iterable[Any], containers: Sequence[type] = CONTAINERS) -> list[Any]:
    """Returns the tracers that functions, and functions in their closures, capture; in containers too, each once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tracer):
            found[id(value)] = value
        elif isinstance(value, types.FunctionType):
            pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # no value yet
                    pending.append(cell.cell_contents)
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif type(value) in containers:
            pending += value.values() if isinstance(value, dict) else value
    return list(found.values())


def with_captured(value: Any, captured: Mapping[int, Any]) -> Any:
    """Returns a function, or another value, with the tracers that it captures replaced.

    Variables without such tracers stay shared with the original function, which may assign to them.

    Args:
      value: The value.
      captured: The new values of tracers, by their `id`.
    """
    return _replaced(value, dict(captured)) if captured else value


def _replaced(value: Any, new: dict[int, Any]) -> Any:
    """Returns a value with the parts replaced whose `id` is in `new`, to which it adds the functions that it makes."""
    if id(value) in new or not _reaches_any(value, new):
        return new.get(id(value), value)
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(x, new) for x in value)
    if isinstance(value, dict):
        return {key: _replaced(x, new) for key, x in value.items()}
    if isinstance(value, partial):
        return partial(*_replaced((value.func, *value.args), new), **_replaced(value.keywords, new))
    originals = value.__closure__ or ()
    cells = tuple(types.CellType() if _reaches_any(cell, new) else cell for cell in originals)
    function = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    new[id(value)] = function  # a function that captures itself finds itself here
    for cell, original in zip(cells, originals, strict=True):
        if cell is not original:
            cell.cell_contents = _replaced(original.cell_contents, new)
    function.__defaults__ = _replaced(value.__defaults__, new)
    function.__kwdefaults__ = _replaced(value.__kwdefaults__, new)
    vars(function).update(vars(value))
    return function


def _reaches_any(value: Any, new: Mapping[int, Any]) -> bool:
    if isinstance(value, types.CellType):
        try:
            value = value.cell_contents
        except ValueError:  # no value yet
            return False
    return any(id(x) in new for x in captured_tracers([value]))
