"""Nested Python values with the tensors, or arrays, in them taken out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_tree


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands where a leaf was taken out."""

    index: int


class FlatTensors(NamedTuple):
    """A value in two parts.

    Attributes:
      leaves: what was taken out.
      template: the value with `Slot`s in their places.
    """

    leaves: list[Any]
    template: Any


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch's."""
    return isinstance(value, torch.Tensor)


def flatten_tensors(
    value: Any, is_leaf: Callable[[Any], bool] = is_tensor, *, deduplicate: bool = False
) -> FlatTensors:
    """Takes leaves out of a value, however deep they are in lists, tuples and dicts.

    Args:
      value: the value.
      is_leaf: which leaves; none of them a container.
      each_once: whether an object that is found again gets the slot that it has.
    """
    leaves: list[Any] = []
    slots_by_id: dict[int, Slot] = {}

    def slot(leaf: Any) -> Any:
        if not is_leaf(leaf):
            return leaf
        if deduplicate and id(leaf) in slots_by_id:
            return slots_by_id[id(leaf)]
        leaves.append(leaf)
        return slots_by_id.setdefault(id(leaf), Slot(len(leaves) - 1)) if deduplicate else Slot(len(leaves) - 1)

    return FlatTensors(leaves, torch_tree.tree_map(slot, value, is_leaf=_is_size))


def unflatten_tensors(template: Any, leaves: Sequence[Any] | Mapping[int, Any]) -> Any:
    """The value again, with other leaves."""

    def fill(leaf: Any) -> Any:
        return leaves[leaf.index] if isinstance(leaf, Slot) else leaf

    return torch_tree.tree_map(fill, template, is_leaf=_is_size)


def _is_size(value: object) -> bool:
    """Whether it is a `torch.Size`, which torch's own functions would make a tuple of."""
    return isinstance(value, torch.Size)


def slots(template: Any) -> list[int]:
    """The slots in a template."""
    return [leaf.index for leaf in torch_tree.tree_leaves(template) if isinstance(leaf, Slot)]
