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
PROJECTIONS = 2  # random vectors of each leaf, in fast mode


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
    chosen: tuple[int, ...]  # the indices of the leaves that have vectors here

    def count(self, leaf: int) -> int:
        """Returns the number of vectors of a leaf: one per real component."""
        return self.leaves[leaf].num_components

    @cached_property
    def size(self) -> int:
        """The number of vectors."""
        return sum(map(self.count, self.chosen))

    @cached_property
    def offsets(self) -> dict[int, int]:
        """The offset of the first vector of each chosen leaf."""
        return dict(zip(self.chosen, accumulate(map(self.count, self.chosen), initial=0), strict=False))

    def directions(self, leaf: int) -> Any:
        """Returns the vectors of a leaf, without the zeros of the others."""
        count, of_leaf = self.count(leaf), self.leaves[leaf]
        return _as_entries(np.eye(count), of_leaf).reshape(count, *of_leaf.shape)

    def arrays(self) -> Arrays:
        """Returns all vectors: for each leaf an array with a leading axis."""
        arrays: Arrays = [np.zeros((self.size, *leaf.shape), leaf.dtype) for leaf in self.leaves]
        for i in self.chosen:
            arrays[i][self.part(i)] = self.directions(i)
        return arrays

    def vectors(self, which: Sequence[int] | None = None) -> Vectors:
        """Returns all vectors, or those with indices `which`."""
        every = np.arange(self.size) if which is None else np.asarray(which, int)

        def make(numbers: Any) -> Arrays:
            return [every[numbers] - self.offsets[i] for i in self.chosen]

        def expand(components: Sequence[Any]) -> Arrays:
            return [_unit(self.leaves[i], c) for i, c in zip(self.chosen, components, strict=True)]

        return Vectors(self.leaves, self.chosen, len(every), make, expand)

    def products(self, arrays: Arrays, *, of_errors: bool = False) -> Any:
        """Returns real inner products with all vectors, of shape (n, vectors), or bounds of their errors.

        Args:
          arrays: for each leaf, an array of shape (n, size), or bounds of its errors.
          of_errors: whether they are bounds; those of a complex number are one for each part.
        """
        return np.concatenate([_real_components(arrays[i]) for i in self.chosen], axis=1)

    def entries(self, leaf: int, products: Any) -> Any:
        """Returns the entries of a leaf that `products` show."""
        return _as_entries(products[:, self.part(leaf)], self.leaves[leaf])

    def part(self, leaf: int) -> slice:
        """Returns the indices of a leaf's vectors."""
        return slice(self.offsets[leaf], self.offsets[leaf] + self.count(leaf))


class RandomBasis(Basis):
    """A few random vectors of length one for each leaf, in place of the unit vectors."""

    def count(self, leaf: int) -> int:
        return PROJECTIONS

    def directions(self, leaf: int) -> Any:
        of_leaf = self.leaves[leaf]
        vectors = np.stack([draw(f"projection of {of_leaf.name}", k, of_leaf) for k in range(PROJECTIONS)])
        norms = np.linalg.norm(vectors.reshape(PROJECTIONS, -1), axis=1)
        return vectors / _along_first_axis(np.maximum(norms, np.finfo(float).tiny), vectors.ndim)

    def vectors(self, which: Sequence[int] | None = None) -> Vectors:
        every = np.arange(self.size) if which is None else np.asarray(which, int)
        directions = list(map(self.directions, self.chosen))

        def make(numbers: Any) -> Arrays:
            leaf, projection = np.divmod(every[numbers], PROJECTIONS)
            return [v[projection] * _along_first_axis(leaf == i, v.ndim) for i, v in enumerate(directions)]

        return Vectors(self.leaves, self.chosen, len(every), make)

    def products(self, arrays: Arrays, *, of_errors: bool = False) -> Any:
        products: Arrays = []
        for array, directions in zip(arrays, map(self.directions, self.chosen), strict=True):
            vectors = directions.reshape(PROJECTIONS, -1).T
            products.append(abs(array) @ abs(vectors) if of_errors else (array.conj() @ vectors).real)
        return np.concatenate(products, axis=1)

    def entries(self, leaf: int, products: Any) -> Any:
        return products[:, self.part(leaf)]


def random_bases(leaves: tuple[Leaf, ...]) -> list[Basis]:
    """Returns a few random vectors of each leaf."""
    return [RandomBasis(leaves, tuple(range(len(leaves))))] if leaves else []


def unit_bases(leaves: tuple[Leaf, ...]) -> list[Basis]:
    """Returns the unit vectors of all leaves, in one basis or in one for each leaf."""
    filled = tuple(i for i, leaf in enumerate(leaves) if leaf.size)
    if sum(leaf.num_components for leaf in leaves) <= _TOGETHER:
        return [Basis(leaves, tuple(range(len(leaves))))] if filled else []
    return [Basis(leaves, (i,)) for i in filled]


def _along_first_axis(array: Any, ndim: int) -> Any:
    return array.reshape(-1, *[1] * (ndim - 1))


def _as_entries(components: Any, leaf: Leaf) -> Any:
    """Combines the real components of a leaf, along the last axis, to its entries."""
    return components[:, : leaf.size] + 1j * components[:, leaf.size :] if leaf.is_complex else components


def _real_components(columns: Any) -> Any:
    """Returns complex columns as real ones: all real parts, then all imaginary parts."""
    return np.concatenate([columns.real, columns.imag], axis=1) if np.iscomplexobj(columns) else columns


def _unit(leaf: Leaf, component: Any) -> Any:
    """Returns the unit vector of a component of a leaf; zero for a component that the leaf does not have."""
    elements = jnp.arange(leaf.size)
    vector = elements == component
    if leaf.is_complex:
        vector = vector + 1j * (elements + leaf.size == component)
    return vector.astype(leaf.dtype).reshape(leaf.shape)
