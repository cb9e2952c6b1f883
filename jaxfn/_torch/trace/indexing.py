"""Indexing with traced tensors, where torch would read their values.

`x[i]`, with `i` a tensor of one integer, is a gather, and `x[i] = y` a scatter. `x[mask]` is a `Selection`, also for a
mask without dimensions. torch handles all other indices.
"""

from __future__ import annotations

from typing import Any

import torch

from jaxfn._torch.trace.selection import Selection, raise_unsupported
from jaxfn._torch.trace.selection_operations import assign, select
from jaxfn._torch.trace.state import TraceState

aten = torch.ops.aten


def get_item(state: TraceState, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Returns `tensor[index]`."""
    index = _replace_masks(state, index, and_traced=state.recorder.answerer.knows_sizes)
    parts = _expand_index(tensor, index)
    if _is_traced_flag(state, parts):
        return get_item(state, *_with_axis_for_flag(tensor, parts))
    if _is_traced_mask(state, parts):
        return select(state, tensor, parts[0])
    if not any(_is_traced_integer(state, part) for part in parts):
        return torch.Tensor.__getitem__(tensor, index)
    gathered, remaining = _gather(state, tensor, parts)
    return gathered[remaining]


def set_item(state: TraceState, tensor: torch.Tensor, index: Any, value: Any) -> None:
    """Implements `tensor[index] = value`."""
    index = _replace_masks(state, index)
    parts = _expand_index(tensor, index)
    if _is_traced_flag(state, parts):
        set_item(state, *_with_axis_for_flag(tensor, parts), value)
        return
    if isinstance(value, Selection):
        if not _is_traced_mask(state, parts):
            raise_unsupported(state.recorder, "an assignment to an index that is not a mask")
        assign(state, tensor, parts[0], value)
        return
    if not any(_is_traced_integer(state, part) for part in parts):
        torch.Tensor.__setitem__(tensor, index, value)
        return
    gathered, remaining = _gather(state, tensor, parts)
    gathered[remaining] = value
    torch.ops.aten.index_put_(tensor, _integer_indices(state, parts), gathered)


def _is_traced_flag(state: TraceState, parts: list[Any]) -> bool:
    """Whether an index begins with a traced mask without dimensions."""
    is_tensor = bool(parts) and isinstance(parts[0], torch.Tensor) and parts[0].dim() == 0
    return is_tensor and parts[0].dtype in (torch.bool, torch.uint8) and state.is_traced(parts[0])


def _with_axis_for_flag(tensor: torch.Tensor, parts: list[Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Returns a view with a new first axis and an index by which it has the elements that a mask without dimensions
    selects.
    """
    return tensor.unsqueeze(0), (parts[0].reshape(1), *parts[1:])


def _replace_masks(state: TraceState, index: Any, and_traced: bool = False) -> Any:
    """Replaces masks that depend on no input, or also others, by the indices of their true elements."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) and part.dim() > 0
        parts += part.nonzero(as_tuple=True) if is_mask and (and_traced or not state.is_traced(part)) else (part,)
    return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]


def _expand_index(tensor: torch.Tensor, index: Any) -> list[Any]:
    """Returns an index as one part for each dimension that it names, without an ellipsis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dimensions(part) for part in parts)
    for position, part in enumerate(parts):
        if part is Ellipsis:
            parts[position : position + 1] = [slice(None)] * (tensor.dim() - taken)
            break
    return parts


def _dimensions(part: Any) -> int:
    """Returns the number of the tensor's dimensions that a part of an index consumes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def _is_traced_mask(state: TraceState, parts: list[Any]) -> bool:
    """Whether the index is a traced mask, followed only by full slices."""
    if not parts or not isinstance(parts[0], torch.Tensor) or parts[0].dtype not in (torch.bool, torch.uint8):
        return False
    is_all = all(isinstance(part, slice) and part == slice(None) for part in parts[1:])
    return parts[0].dim() > 0 and is_all and state.is_traced(parts[0])


def _is_traced_integer(state: TraceState, part: Any) -> bool:
    is_integer = isinstance(part, torch.Tensor) and part.dim() == 0 and _dimensions(part) == 1
    return is_integer and not part.dtype.is_floating_point and state.is_traced(part)


def _integer_indices(state: TraceState, parts: list[Any]) -> list[torch.Tensor | None]:
    """Returns the traced integers in the form that `aten.index` takes: one entry for each dimension."""
    indices: list[torch.Tensor | None] = []
    for part in parts:
        indices += [part if _is_traced_integer(state, part) else None] * _dimensions(part)
    return indices


def _gather(state: TraceState, tensor: torch.Tensor, parts: list[Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Returns the tensor at the traced integers, and the rest of the index, to apply to the result."""
    remaining = tuple(part for part in parts if not _is_traced_integer(state, part))
    return aten.index(tensor, _integer_indices(state, parts)), remaining
