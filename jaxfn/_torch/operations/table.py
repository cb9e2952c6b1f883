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
    reads_memory: bool = False
    otherwise: Callable[..., Any] | None = None
    takes_half: bool = False


TABLE: dict[str, Operation] = {}
REFUSED: dict[str, str] = {}


def operation(
    *names: str,
    draws: bool = False,
    reads_memory: bool = False,
    otherwise: Callable[..., Any] | None = None,
    takes_half: bool = False,
) -> Callable[[_F], _F]:
    """Enters the decorated function for the operations `names`; the options are as in `Operation`."""

    def enter(function: _F) -> _F:
        for name in names:
            _enter(name, Operation(function, draws, reads_memory, otherwise, takes_half or draws))
        return function

    return enter


# For what moves elements and computes nothing.
moving = functools.partial(operation, takes_half=True)


def enter_all(functions: Mapping[str, Callable[..., Any]], *, takes_half: bool = False) -> None:
    """Enters one function each."""
    for name, function in functions.items():
        _enter(name, Operation(function, takes_half=takes_half))


def refuse(reason: str, *names: str) -> None:
    """Says why some operations are not in the table, and are not to be decomposed by torch."""
    for name in names:
        REFUSED[name] = reason


def _enter(name: str, entry: Operation) -> None:
    if name in TABLE:
        raise ValueError(f"{name} is in the table already")
    TABLE[name] = entry


@functools.cache
def entry_name(name: str) -> str | None:
    """The name of the entry that serves the operation `name`, or None."""
    return next((form for form in _forms(name) if form in TABLE), None)


def refusal(name: str) -> str | None:
    """Why the operation `name` cannot be translated, where more is known than that it is not in the table."""
    return next((REFUSED[form] for form in _forms(name) if form in REFUSED), None)


def _forms(name: str) -> list[str]:
    """The names an entry for `name` may have, the closest first."""
    namespace, packet, *overload = name.split(".")
    packets = [packet, packet.removesuffix("_copy")]
    return [".".join((namespace, p, *o)) for p in dict.fromkeys(packets) for o in (overload, ())]
