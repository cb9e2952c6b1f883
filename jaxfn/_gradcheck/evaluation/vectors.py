"""Vectors along which derivatives are taken: random vectors, and the unit vectors of some leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._check.draws import draw
from jaxfn._gradcheck.problem.problem import Leaf

Arrays = list[Any]
# Up to this many components all leaves share one basis, which compiles less. With more, each leaf has one, so that a
# batch has no others.
_TOGETHER = 1024


def random_vectors(leaves: Sequence[Leaf], seed: int) -> Arrays:
    """Returns standard normal numbers for each leaf, determined by the seed alone."""
    return [draw(f"vector {seed}", i, leaf) for i, leaf in enumerate(leaves)]


@dataclass(frozen=True)
class Vectors:
    """Many vectors in a compact form, expanded inside compiled functions."""

    leaves: Sequence[Leaf]  # the leaves to which the vectors belong
    chosen: tuple[int, ...]  # the indices of the leaves in which vectors may be nonzero
    count: int  # the number of vectors
    # maps indices of vectors to their compact form: for each chosen leaf an array with a leading axis
    make: Callable[[Any], Arrays]
    # maps the compact form of one vector to the vector, an array for each chosen leaf
    expand: Callable[[Sequence[Any]], Sequence[Any]] = tuple


@dataclass(frozen=True)
class Basis:
    """The unit vectors of some of the leaves."""

    leaves: tuple[Leaf, ...]  # all leaves
    chosen: tuple[int, ...]  # the indices of the leaves that have unit vectors here

    @cached_property
    def size(self) -> int:
        """The number of unit vectors: one per real component."""
        return sum(self.leaves[i].num_components for i in self.chosen)

    @cached_property
    def offsets(self) -> dict[int, int]:
        """The offset of the first component of each chosen leaf."""
        sizes = [self.leaves[i].num_components for i in self.chosen]
        return dict(zip(self.chosen, accumulate(sizes, initial=0), strict=False))

    def arrays(self) -> Arrays:
        """Returns all unit vectors: for each leaf an array with a leading axis."""
        components = np.eye(self.size)
        arrays: Arrays = [np.zeros((self.size, *leaf.shape), leaf.dtype) for leaf in self.leaves]
        for i in self.chosen:
            leaf, start = self.leaves[i], self.offsets[i]
            part = components[:, start : start + leaf.num_components]
            arrays[i] = complex_entries(part, leaf).astype(leaf.dtype).reshape(self.size, *leaf.shape)
        return arrays

    def vectors(self, which: Sequence[int] | None = None) -> Vectors:
        """Returns all unit vectors, or those with indices `which`."""
        every = np.arange(self.size) if which is None else np.asarray(which, int)

        def make(numbers: Any) -> Arrays:
            return [every[numbers] - self.offsets[i] for i in self.chosen]

        def expand(components: Sequence[Any]) -> Arrays:
            return [_unit(self.leaves[i], c) for i, c in zip(self.chosen, components, strict=True)]

        return Vectors(self.leaves, self.chosen, len(every), make, expand)


def bases(leaves: tuple[Leaf, ...]) -> list[Basis]:
    """Returns the unit vectors of all leaves, in one basis or in one for each leaf."""
    filled = tuple(i for i, leaf in enumerate(leaves) if leaf.size)
    if sum(leaf.num_components for leaf in leaves) <= _TOGETHER:
        return [Basis(leaves, tuple(range(len(leaves))))] if filled else []
    return [Basis(leaves, (i,)) for i in filled]


def complex_entries(array: Any, leaf: Leaf) -> Any:
    """Combines the real components of a leaf, along the last axis, to its entries."""
    return array[:, : leaf.size] + 1j * array[:, leaf.size :] if leaf.is_complex else array


def _unit(leaf: Leaf, component: Any) -> Any:
    """Returns the unit vector of a component of a leaf; zero for a component that the leaf does not have."""
    elements = jnp.arange(leaf.size)
    vector = elements == component
    if leaf.is_complex:
        vector = vector + 1j * (elements + leaf.size == component)
    return vector.astype(leaf.dtype).reshape(leaf.shape)
