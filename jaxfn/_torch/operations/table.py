"""The table itself: which JAX function stands for which ATen operation.

Operations are named as torch prints them, `aten.add.Tensor`; an entry without overload, `aten.add`, serves all
overloads that have none of their own. Views' copying forms (`aten.view_copy`) use the entry of the plain one; in-place
forms (`aten.add_`) are in no graph. What autograd and the dispatcher always break up into others (`aten.matmul`) needs
no entry.

A function gets all positional arguments of the operation's schema, defaults filled in, and the keyword-only ones that
the call named, without those that mean nothing here (device, layout, memory format). It need not care for the result's
dtype: the interpreter casts to what torch recorded. Half-precision numbers come in single precision, as torch has them
inside of an operation, unless the entry says that it takes them as they are: it moves elements, multiplies matrices,
where that would cost much, or looks at the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class Operation(NamedTuple):
    """One entry.

    Attributes:
      function: the JAX function.
      draws: it draws random numbers; its first argument is a key.
      reads_memory: torch's last three arguments are sizes, strides and offset of a view of its first argument's memory.
        In their place it gets the numbers of the elements that lie there, counted in the order of that argument.
      otherwise: what stands for the operation where torch's first argument does not lie in memory in the order of its
        elements, if that makes a difference.
      takes_half: it takes half-precision numbers as they are. Others get them in single precision, in which torch
        computes what it rounds to half in the end. What draws takes them as well.
    """

    function: Callable[..., Any]
    draws: bool = False
    reads_storage: bool = False
    for_noncontiguous: Callable[..., Any] | None = None
    accepts_half: bool = False


TABLE: dict[str, Operation] = {}
UNSUPPORTED: dict[str, str] = {}


def operation(
    *names: str,
    draws: bool = False,
    reads_storage: bool = False,
    for_noncontiguous: Callable[..., Any] | None = None,
    accepts_half: bool = False,
) -> Callable[[_F], _F]:
    """Enters the decorated function for the operations `names`; the options are as in `Operation`."""

    def register(function: _F) -> _F:
        for name in names:
            _register(name, Operation(function, draws, reads_storage, for_noncontiguous, accepts_half or draws))
        return function

    return register


# For what moves elements and computes nothing.
data_movement = functools.partial(operation, accepts_half=True)


def register_all(functions: Mapping[str, Callable[..., Any]], *, accepts_half: bool = False) -> None:
    """Enters one function each."""
    for name, function in functions.items():
        _register(name, Operation(function, accepts_half=accepts_half))


def mark_unsupported(reason: str, *names: str) -> None:
    """Says why some operations are not in the table, and are not to be decomposed by torch."""
    for name in names:
        UNSUPPORTED[name] = reason


def _register(name: str, entry: Operation) -> None:
    if name in TABLE:
        raise ValueError(f"{name} is in the table already")
    TABLE[name] = entry


@functools.cache
def entry_name(name: str) -> str | None:
    """The name of the entry that serves the operation `name`, or None."""
    return next((candidate for candidate in _candidate_names(name) if candidate in TABLE), None)


def unsupported_reason(name: str) -> str | None:
    """Why the operation `name` cannot be translated, where more is known than that it is not in the table."""
    return next((UNSUPPORTED[candidate] for candidate in _candidate_names(name) if candidate in UNSUPPORTED), None)


def _candidate_names(name: str) -> list[str]:
    """The names an entry for `name` may have, the closest first."""
    namespace, packet, *overload = name.split(".")
    packets = [packet, packet.removesuffix("_copy")]
    return [".".join((namespace, p, *o)) for p in dict.fromkeys(packets) for o in (overload, ())]
