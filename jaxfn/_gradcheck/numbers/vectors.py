"""The vectors that derivatives are taken along: random ones, and the unit vectors of some leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.problem.problem import Leaf

Arrays = list[Any]
# Below this many components all leaves are handled together, which compiles less; above it one after the other, which
# leaves those that do not vary out of the batch.
_TOGETHER = 1024


def random_vectors(leaves: Sequence[Leaf], seed: int) -> Arrays:
    """Normal numbers of each leaf's type, the same for the same seed; no global generator is touched."""
    generator = np.random.default_rng(seed)
    vectors: Arrays = []
    for leaf in leaves:
        values = generator.standard_normal(leaf.shape)
        if leaf.is_complex:
            values = values + 1j * generator.standard_normal(leaf.shape)
        vectors.append(np.asarray(values, leaf.dtype))
    return vectors


@dataclass(frozen=True)
class Vectors:
    """Many vectors, made a few at a time.

    Attributes:
      leaves: what they are for.
      chosen: the positions of the leaves for which they are not zero.
      count: how many there are.
      make: what stands for some of them, by their numbers: for each chosen leaf an array with one more axis in front.
      expand: one vector, for each chosen leaf an array, from what stands for it.
    """

    leaves: Sequence[Leaf]
    chosen: tuple[int, ...]
    count: int
    make: Callable[[Any], Arrays]
    expand: Callable[[Sequence[Any]], Sequence[Any]] = tuple


@dataclass(frozen=True)
class Basis:
    """The unit vectors of some of the leaves.

    Attributes:
      leaves: all leaves.
      chosen: which of them vary.
    """

    leaves: tuple[Leaf, ...]
    chosen: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """The number of vectors: one per real component."""
        return sum(self.leaves[i].num_components for i in self.chosen)

    @cached_property
    def offsets(self) -> dict[int, int]:
        """The offset of the first component of each chosen leaf."""
        sizes = [self.leaves[i].num_components for i in self.chosen]
        return dict(zip(self.chosen, accumulate(sizes, initial=0), strict=False))

    def vectors(self, which: Sequence[int] | None = None) -> Vectors:
        """All of them, or some by number."""
        every = np.arange(self.size) if which is None else np.asarray(which, int)

        def make(numbers: Any) -> Arrays:
            return [every[numbers] - self.offsets[i] for i in self.chosen]

        def expand(components: Sequence[Any]) -> Arrays:
            return [_unit(self.leaves[i], c) for i, c in zip(self.chosen, components, strict=True)]

        return Vectors(self.leaves, self.chosen, len(every), make, expand)


def bases(leaves: tuple[Leaf, ...]) -> list[Basis]:
    """All leaves' unit vectors, in as many bases as is quickest."""
    filled = tuple(i for i, leaf in enumerate(leaves) if leaf.size)
    if sum(leaf.num_components for leaf in leaves) <= _TOGETHER:
        return [Basis(leaves, tuple(range(len(leaves))))] if filled else []
    return [Basis(leaves, (i,)) for i in filled]


def _unit(leaf: Leaf, component: Any) -> Any:
    """The unit vector for a component of a leaf; zero for one that it does not have."""
    elements = jnp.arange(leaf.size)
    vector = elements == component
    if leaf.is_complex:
        vector = vector + 1j * (elements + leaf.size == component)
    return vector.astype(leaf.dtype).reshape(leaf.shape)
