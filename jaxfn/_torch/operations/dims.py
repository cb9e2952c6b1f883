"""The meaning of torch's `dim` arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array


def axes(x: Array, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the axes, counted from 0, that `dim` names: all for `None` and for an empty list, none for a scalar."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if not dims or x.ndim == 0:
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in dims)


def along(x: Array, dim: int, index: Any) -> tuple[Any, ...]:
    """Returns the index of `x` that selects `index` along one axis."""
    return (slice(None),) * (dim % x.ndim) + (index,)


def vector(x: Array) -> Array:
    """Returns `x` with at least one axis, since torch allows `dim=0` for a scalar."""
    return x.reshape(1) if x.ndim == 0 else x
