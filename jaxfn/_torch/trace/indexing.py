"""Indexing with traced tensors where torch would ask for their values.

`x[i]`, with `i` a tensor of one integer, is a gather, and `x[i] = y` a scatter. `x[mask]` is a `Selection`. Every other
index is left to torch.
"""

from __future__ import annotations

from typing import Any

import torch

from jaxfn._torch.trace.selecting import assign, select
from jaxfn._torch.trace.selection import Selection, refuse
from jaxfn._torch.trace.state import Tracing

aten = torch.ops.aten


def read(tracing: Tracing, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`."""
    index = _known(tracing, index)
    parts = _parts(tensor, index)
    if _is_unknown_mask(tracing, parts):
        return select(tensor, parts[0])
    if not any(_is_unknown_integer(tracing, part) for part in parts):
        return torch.Tensor.__getitem__(tensor, index)
    gathered, remaining = _gather(tracing, tensor, parts)
    return gathered[remaining]


def write(tracing: Tracing, tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value`."""
    index = _known(tracing, index)
    parts = _parts(tensor, index)
    if isinstance(value, Selection):
        if not _is_unknown_mask(tracing, parts):
            refuse("an assignment to an index that is no mask")
        assign(tracing, tensor, parts[0], value)
        return
    if not any(_is_unknown_integer(tracing, part) for part in parts):
        torch.Tensor.__setitem__(tensor, index, value)
        return
    gathered, remaining = _gather(tracing, tensor, parts)
    gathered[remaining] = value
    torch.ops.aten.index_put_(tensor, _places(tracing, parts), gathered)


def _known(tracing: Tracing, index: Any) -> Any:
    """The index with the places where masks are true instead of the masks, of those that depend on no input."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) and part.dim() > 0
        parts += part.nonzero(as_tuple=True) if is_mask and not tracing.is_traced(part) else (part,)
    return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]


def _parts(tensor: torch.Tensor, index: Any) -> list[Any]:
    """An index as one part for each dimension that it speaks of, without an ellipsis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dimensions(part) for part in parts)
    for place, part in enumerate(parts):
        if part is Ellipsis:
            parts[place : place + 1] = [slice(None)] * (tensor.dim() - taken)
            break
    return parts


def _dimensions(part: Any) -> int:
    """Counts the dimensions of the tensor that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def _is_unknown_mask(tracing: Tracing, parts: list[Any]) -> bool:
    """Whether the index is a traced mask and nothing else that matters."""
    if not parts or not isinstance(parts[0], torch.Tensor) or parts[0].dtype not in (torch.bool, torch.uint8):
        return False
    is_all = all(isinstance(part, slice) and part == slice(None) for part in parts[1:])
    return parts[0].dim() > 0 and is_all and tracing.is_traced(parts[0])


def _is_unknown_integer(tracing: Tracing, part: Any) -> bool:
    is_integer = isinstance(part, torch.Tensor) and part.dim() == 0 and _dimensions(part) == 1
    return is_integer and not part.dtype.is_floating_point and tracing.is_traced(part)


def _places(tracing: Tracing, parts: list[Any]) -> list[torch.Tensor | None]:
    """The unknown integers as `aten.index` takes them: by dimension of the tensor."""
    places: list[torch.Tensor | None] = []
    for part in parts:
        places += [part if _is_unknown_integer(tracing, part) else None] * _dimensions(part)
    return places


def _gather(tracing: Tracing, tensor: torch.Tensor, parts: list[Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The tensor at the unknown integers, and what of the index remains to be done on that."""
    remaining = tuple(part for part in parts if not _is_unknown_integer(tracing, part))
    return aten.index(tensor, _places(tracing, parts)), remaining
