"""Parts of Jacobians: rows by reverse mode, columns by forward mode or finite differences.

A row is what one component of one output depends on; a column is what one component of one input has influence on. The
gradients in a row are in torch's convention: for a complex input, the derivative with respect to the real part plus
`1j` times the one with respect to the imaginary part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxfn._gradcheck.derivatives import Pullback, Pushforward
from jaxfn._gradcheck.problem import Leaf, OfLeaves
from jaxfn._gradcheck.programs import Engine

# Below this many components all leaves are handled together, which compiles less; above it one after the other, which
# leaves those that do not vary out of the batch.
_TOGETHER = 1024


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
        """How many vectors there are: one per real component."""
        return sum(self.leaves[i].num_components for i in self.chosen)

    @cached_property
    def offsets(self) -> dict[int, int]:
        """Where the components of each chosen leaf begin."""
        sizes = [self.leaves[i].num_components for i in self.chosen]
        return dict(zip(self.chosen, accumulate(sizes, initial=0), strict=False))

    def vectors(self, numbers: Any) -> list[Any]:
        """Unit vectors by number: for each chosen leaf an array with one more axis in front."""
        return [self._vectors(self.leaves[i], numbers - self.offsets[i]) for i in self.chosen]

    def _vectors(self, leaf: Leaf, numbers: Any) -> Any:
        elements = jnp.arange(leaf.size)
        ones = elements == numbers[:, None]
        if leaf.is_complex:
            ones = ones + 1j * (elements + leaf.size == numbers[:, None])
        return ones.astype(leaf.dtype).reshape(len(numbers), *leaf.shape)

    def completed(self, vectors: Sequence[Any]) -> list[Any]:
        """One vector for every leaf: zero for those that do not vary."""
        given = dict(zip(self.chosen, vectors, strict=True))
        return [given[i] if i in given else jnp.zeros(leaf.shape, leaf.dtype) for i, leaf in enumerate(self.leaves)]

    def owner(self, number: int) -> tuple[int, int]:
        """The leaf that a vector belongs to, and which of its components it is."""
        leaf = max(i for i in self.chosen if self.offsets[i] <= number and self.leaves[i].size)
        return leaf, number - self.offsets[leaf]


def bases(leaves: tuple[Leaf, ...]) -> list[Basis]:
    """All leaves' unit vectors, in as many bases as is quickest."""
    filled = tuple(i for i, leaf in enumerate(leaves) if leaf.size)
    if sum(leaf.num_components for leaf in leaves) <= _TOGETHER:
        return [Basis(leaves, filled)] if filled else []
    return [Basis(leaves, (i,)) for i in filled]


def rows(engine: Engine, pullback: Pullback, xs: Sequence[Any], basis: Basis, vectors: Sequence[Any]) -> list[Any]:
    """Gradients for a batch of output directions: for each input an array of (directions, size)."""

    def row(*cotangents: Any) -> Sequence[Any]:
        # JAX's cotangent of the functional "imaginary part" is -1j.
        return pullback(xs, basis.completed([jnp.conj(ct) for ct in cotangents]))[1]

    gradients = engine.map(row, *vectors)
    return [jnp.conj(g).reshape(len(g), -1) for g in gradients]


def columns(engine: Engine, pushforward: Pushforward, xs: Sequence[Any], basis: Basis, vectors: Sequence[Any]) -> Any:
    """Output tangents for a batch of input directions: for each output an array of (directions, size)."""
    tangents = engine.map(lambda *ts: pushforward(xs, basis.completed(ts)), *vectors)
    return [t.reshape(len(t), -1) for t in tangents]


class Differences(NamedTuple):
    """Finite differences along a batch of input directions, for each output an array of (directions, size).

    Attributes:
      values: the derivatives.
      errors: estimates of their errors.
    """

    values: list[Any]
    errors: list[Any]


def central_differences(
    engine: Engine, forward: OfLeaves, xs: Sequence[Any], basis: Basis, vectors: Sequence[Any], step: float
) -> list[Any]:
    """Columns by two evaluations each."""
    above, below = _outputs_at(engine, forward, xs, basis, vectors, (step, -step))
    return [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]


def richardson_differences(
    engine: Engine, forward: OfLeaves, xs: Sequence[Any], basis: Basis, vectors: Sequence[Any], step: float
) -> Differences:
    """Columns by four evaluations each: exact to the fourth order of the step, with an estimate of the error."""
    outputs = _outputs_at(engine, forward, xs, basis, vectors, (step, -step, 2 * step, -2 * step))
    near, far = (
        [(a - b) / (2 * h) for a, b in zip(*pair, strict=True)]
        for h, pair in ((step, outputs[:2]), (2 * step, outputs[2:]))
    )
    values = [(4 * n - f) / 3 for n, f in zip(near, far, strict=True)]
    return Differences(values, [n - f for n, f in zip(near, far, strict=True)])


def _outputs_at(
    engine: Engine, forward: OfLeaves, xs: Sequence[Any], basis: Basis, vectors: Sequence[Any], steps: Sequence[float]
) -> list[list[Any]]:
    """For each step the outputs that many times the vectors away, as (directions, size); all in one batch."""

    def moved(*moves: Any) -> list[Any]:
        given = dict(zip(basis.chosen, moves, strict=True))
        return list(forward(*(x + given[i] if i in given else x for i, x in enumerate(xs))))

    batch = [jnp.concatenate([step * v for step in steps]) for v in vectors]
    outputs = [y.reshape(len(steps), len(y) // len(steps), -1) for y in engine.map(moved, *batch)]
    return [[y[k] for y in outputs] for k in range(len(steps))]
