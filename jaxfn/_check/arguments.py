"""The arguments of a checked function: their leaves, and the names of these in reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from jaxfn._function import show_signature
from jaxfn._tree import is_none


def function_name(func: Callable[..., Any]) -> str:
    """Returns the name of a function in reports."""
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or type(func).__name__


def as_arguments(inputs: Any) -> tuple[Any, ...]:
    """Returns the arguments that `inputs` holds: a tuple or a list of them, or the only one."""
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def named_leaves(
    func: Callable[..., Any], inputs: Any, argnums: int | Sequence[int] | None
) -> tuple[list[tuple[int, str, Any]], Any, frozenset[int]]:
    """Returns the leaves of the inputs, their treedef, and the positions of the arguments that `argnums` names.

    Each leaf comes with the position of its argument and a name for reports.
    """
    args = as_arguments(inputs)
    chosen = _chosen_arguments(argnums, len(args))
    names = _argument_names(func, args)
    paths, tree = tree_flatten_with_path(args, is_leaf=is_none)
    leaves = [(path[0].idx, names[path[0].idx] + keystr(path[1:]), leaf) for path, leaf in paths]
    return leaves, tree, chosen


def _chosen_arguments(argnums: int | Sequence[int] | None, count: int) -> frozenset[int]:
    """Returns the positions of the arguments that `argnums` names, or of all."""
    if argnums is None:
        return frozenset(range(count))
    wanted = [argnums] if isinstance(argnums, int) else list(argnums)
    for argnum in wanted:
        if not -count <= argnum < count:
            raise ValueError(f"argnums names argument {argnum}, but there are {count} inputs")
    return frozenset(argnum % count for argnum in wanted)


def _argument_names(func: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """Returns `input 0 ('x')` and so on, with the names in the function's signature if it has one."""
    show_signature(func)
    try:
        signature = inspect.signature(func)
        bound = signature.bind(*args).arguments
    except (TypeError, ValueError):
        return [f"input {i}" for i in range(len(args))]
    names: list[str] = []
    for name in bound:
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound[name]))]
        else:
            names.append(name)
    return [f"input {i} ({name!r})" for i, name in enumerate(names)]
