"""Types of values, known before anything runs: shape, dtype and the batches that a value depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

FLOATS = ("float32", "bfloat16")
LARGEST = 400  # elements of one value
Shape = tuple[int, ...]


class IllTypedError(Exception):
    """A program that means nothing, such as the sum of two shapes that do not fit."""


@dataclass(frozen=True)
class Type:
    """The type of a value.

    Attributes:
      shape: without the batch axes of the transformations around it.
      dtype: its name.
      batches: the mapped transformations whose examples may have different values here.
    """

    shape: Shape
    dtype: str = "float32"
    batches: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def shaped(self, shape: Shape) -> Type:
        """This type with another shape."""
        return replace(self, shape=shape)

    def without_axis(self, axis: int) -> Type:
        """The type of one slice along an axis."""
        demand(-self.rank <= axis < self.rank)
        axis %= self.rank
        return self.shaped(self.shape[:axis] + self.shape[axis + 1 :])

    def with_axis(self, axis: int, size: int) -> Type:
        """The type of `size` of these stacked along an axis of the result."""
        demand(-self.rank - 1 <= axis <= self.rank)
        axis %= self.rank + 1
        return self.shaped((*self.shape[:axis], size, *self.shape[axis:]))

    def on(self, *batches: str) -> Type:
        """This type, depending on these batches too."""
        return replace(self, batches=self.batches.union(batches))

    def off(self, batch: str) -> Type:
        """This type outside that batch's transformation."""
        return replace(self, batches=self.batches - {batch})


def demand(condition: bool) -> None:
    """Raises `IllTypedError` where the condition does not hold."""
    if not condition:
        raise IllTypedError


def all_batches(*types: Type) -> frozenset[str]:
    """The batches that a value computed from these depends on."""
    return frozenset().union(*(t.batches for t in types))


def promoted(*types: Type) -> str:
    """The dtype of the sum of floating-point values; `IllTypedError` where one is not."""
    demand(all(t.is_float for t in types))
    return "float32" if any(t.dtype == "float32" for t in types) else "bfloat16"


def broadcast(*types: Type) -> Type:
    """The type of an elementwise function of floating-point values."""
    try:
        shape = np.broadcast_shapes(*(t.shape for t in types))
    except ValueError:
        raise IllTypedError from None
    return Type(shape, promoted(*types), all_batches(*types))
