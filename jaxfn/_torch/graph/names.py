"""What torch's operations are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# A torch operation (its overload, its packet, its `torch.library` definition or its name) to a JAX function.
Operations = Mapping[Any, Callable[..., Any]]


def name_of(target: Any) -> str:
    """A torch operation's name as torch prints it, such as `aten.add.Tensor`."""
    definition = getattr(target, "_opoverload", target)
    if isinstance(definition, str):
        return definition.replace("::", ".")
    if hasattr(definition, "_schema") or hasattr(definition, "overloads"):
        return str(definition)
    return getattr(definition, "__name__", None) or str(definition)


def by_name(ops: Operations | None) -> dict[str, Callable[..., Any]]:
    """The replacements by the names of the operations."""
    return {name_of(target): function for target, function in (ops or {}).items()}
