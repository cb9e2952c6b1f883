"""Nested Python values, flattened to their tensors or arrays and a template."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_tree


@dataclasses.dataclass(frozen=True)
class Slot:
    """A leaf's position in a template."""

    index: int


MUTABLE = list, dict, set, collections.deque
"""Containers that code may change."""


class FlatTensors(NamedTuple):
    """A flattened value: its tensors or arrays, and a template with a `Slot` for each of them."""

    leaves: list[Any]
    template: Any


def flatten_tensors(
    value: Any,
    is_leaf: Callable[[Any], bool] = torch.is_tensor,
    *,
    deduplicate: bool = False,
    shares_containers: bool = False,
) -> FlatTensors:
    """Flattens lists, tuples and dicts, at any depth, to their tensors and a template. Traced numbers in it are read.

    Args:
      value: The value.
      is_leaf: Which values are leaves. Default: tensors. Containers must not be.
      deduplicate: Whether an object that occurs more than once gets a single slot.
      shares_containers: Whether the template refers to the lists and dicts without leaves, and does not copy them.
    """
    leaves: list[Any] = []
    slots_by_id: dict[int, Slot] = {}

    def slot(leaf: Any) -> Any:
        if not is_leaf(leaf):
            return leaf.node.read() if isinstance(leaf, (torch.SymFloat, torch.SymInt)) else leaf
        if deduplicate and id(leaf) in slots_by_id:
            return slots_by_id[id(leaf)]
        leaves.append(leaf)
        return slots_by_id.setdefault(id(leaf), Slot(len(leaves) - 1)) if deduplicate else Slot(len(leaves) - 1)

    def is_kept(value: object) -> bool:
        return is_size(value) or (
            shares_containers and isinstance(value, MUTABLE) and not any(map(has_slot, _leaves(value)))
        )

    def has_slot(leaf: object) -> bool:
        return is_leaf(leaf) or isinstance(leaf, (torch.SymFloat, torch.SymInt))

    return FlatTensors(leaves, torch_tree.tree_map(slot, value, is_leaf=is_kept))


def _leaves(value: Any) -> list[Any]:
    return torch_tree.tree_leaves(value, is_leaf=is_size)


def unflatten_tensors(
    template: Any, leaves: Sequence[Any] | Mapping[int, Any], *, shares_containers: bool = False
) -> Any:
    """Fills a template with leaves; see `flatten_tensors`."""

    def fill(leaf: Any) -> Any:
        return leaves[leaf.index] if isinstance(leaf, Slot) else leaf

    return torch_tree.tree_map(fill, template, is_leaf=_is_kept if shares_containers else is_size)


def shared_containers(template: Any) -> list[Any]:
    """Returns the containers to which a template refers; see `flatten_tensors`."""
    return [leaf for leaf in torch_tree.tree_leaves(template, is_leaf=_is_kept) if _is_shared(leaf)]


def replace_containers(template: Any, new: Mapping[int, Any]) -> Any:
    """Replaces containers to which a template refers, by identity."""

    def replaced(leaf: Any) -> Any:
        return new.get(id(leaf), leaf)

    return torch_tree.tree_map(replaced, template, is_leaf=_is_kept)


def _is_kept(value: object) -> bool:
    return is_size(value) or _is_shared(value)


def _is_shared(value: object) -> bool:
    return isinstance(value, MUTABLE) and not slots(value)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the tensors in lists, tuples and dicts, at any depth, as arguments of operations are.

    torch's pytree functions take several times as long.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, item) for item in value])
    if kind is dict:
        return {name: map_tensors(function, item) for name, item in value.items()}
    return value if kind in _ATOMS else torch_tree.tree_map_only(torch.Tensor, function, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in lists, tuples and dicts, at any depth."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})


def is_size(value: object) -> bool:
    """Whether a value is a `torch.Size`, which torch's pytree functions would convert to a tuple."""
    return isinstance(value, torch.Size)


def slots(template: Any) -> list[int]:
    """Returns the slots in a template."""
    return [leaf.index for leaf in torch_tree.tree_leaves(template) if isinstance(leaf, Slot)]
