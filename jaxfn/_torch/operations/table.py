"""The table of ATen operations and the JAX functions that implement them.

Operations are named as torch prints them, `aten.add.Tensor`. An entry without overload, `aten.add`, serves all
overloads without their own entry. The copying form of a view (`aten.view_copy`) uses the entry of the view; in-place
forms (`aten.add_`) do not occur in graphs. Operations that autograd and the dispatcher always decompose (`aten.matmul`)
need no entry.

A function takes all positional arguments of the operation's schema, with defaults, and the keyword-only ones that the
call named, except those without a meaning on JAX (device, layout, memory format). The dtype of its result does not
matter, since the interpreter casts to the dtype that torch recorded. Half-precision operands are cast to single
precision, in which torch computes too, unless the entry accepts half precision: it moves elements, multiplies matrices,
where the cast would be costly, or depends on the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

_F = TypeVar("_F", bound=Callable[..., Any])


class Operation(NamedTuple):
    """An entry of the table.

    Attributes:
      function: The JAX function.
      draws: Whether it draws random numbers. Its first argument is a key then.
      reads_storage: Whether torch's last three arguments are sizes, strides and offset of a view of the first
        argument's storage. The function takes the indices of the view's elements instead, counted in the order of the
        first argument.
      for_noncontiguous: The function for noncontiguous first arguments, if that makes a difference.
      accepts_half: Whether it takes half-precision operands without a cast. True if it draws.
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
    is_composite: bool = False,
) -> Callable[[_F], _F]:
    """Registers the decorated function for the operations `names`.

    The options are the fields of `Operation`, and `is_composite`: whether the function consists of many primitives, so
    that it is worth while to trace it once for all calls that are equal except for their arrays' values.
    """

    def register(function: _F) -> _F:
        for name in names:
            registered = trace_once(name, function) if is_composite else function
            _register(name, Operation(registered, draws, reads_storage, for_noncontiguous, accepts_half or draws))
        return function

    return register


data_movement = functools.partial(operation, accepts_half=True)  # for operations that only move elements
composite = functools.partial(operation, is_composite=True)


def register_all(functions: Mapping[str, Callable[..., Any]], **options: Any) -> None:
    """Registers one function for each operation; the options are those of `operation`."""
    for name, function in functions.items():
        operation(name, **options)(function)


# The number of `jit`s of one operation, which differ in its Python arguments.
_MAX_JITS = 256


def trace_once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` as a `jit` with all Python values among its arguments as static ones.

    JAX then traces, linearizes, transposes and lowers it once for all equal layers of a model.
    """

    @functools.lru_cache(_MAX_JITS)
    def make_jit(treedef: Any, statics: tuple[Any, ...]) -> Callable[..., Any]:
        def apply_to_arrays(*arrays: Any) -> Any:
            remaining = iter(arrays)
            leaves = [next(remaining) if static is None else static[-1] for static in statics]
            args, options = jax.tree_util.tree_unflatten(treedef, leaves)
            return function(*args, **options)

        apply_to_arrays.__name__ = name.removeprefix("aten.").replace(".", "_")
        return jax.jit(apply_to_arrays)

    def apply(*args: Any, **options: Any) -> Any:
        leaves, treedef = jax.tree_util.tree_flatten((args, options))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        statics = tuple(None if isinstance(x, jax.Array) else (type(x), str(x), x) for x in leaves)
        return make_jit(treedef, statics)(*arrays)

    return apply


def mark_unsupported(reason: str, *names: str) -> None:
    """Records why some operations are not in the table, and that torch must not decompose them."""
    for name in names:
        UNSUPPORTED[name] = reason


def _register(name: str, entry: Operation) -> None:
    if name in TABLE:
        raise ValueError(f"{name} is already in the table")
    TABLE[name] = entry


@functools.cache
def entry_name(name: str) -> str | None:
    """Returns the name of the entry that serves the operation `name`, or `None`."""
    return next((candidate for candidate in _candidate_names(name) if candidate in TABLE), None)


def unsupported_reason(name: str) -> str | None:
    """Returns why the operation `name` has no translation, if the reason was recorded."""
    return next((UNSUPPORTED[candidate] for candidate in _candidate_names(name) if candidate in UNSUPPORTED), None)


def _candidate_names(name: str) -> list[str]:
    """Returns the names that an entry for `name` may have, the closest first."""
    namespace, packet, *overload = name.split(".")
    packets = [packet, packet.removesuffix("_copy")]
    return [".".join((namespace, p, *o)) for p in dict.fromkeys(packets) for o in (overload, ())]
