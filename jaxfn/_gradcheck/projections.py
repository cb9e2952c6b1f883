"""Fast mode: a few random projections of the Jacobian in place of all of its entries."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxfn._gradcheck.compare import Comparison, Pair
from jaxfn._gradcheck.numbers.vectors import Arrays, Vectors, random_vectors
from jaxfn._gradcheck.problem.derivatives import Derivative, Direction, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import SAFETY, excess, largest

PROJECTIONS = 2  # for each output and each input


class Projections:
    """Random projections of every output and every input, by every means at hand."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        d = comparison.derivatives
        self._of_outputs = [_unit_vectors(leaf, 10 + i) for i, leaf in enumerate(d.outputs)]
        self._of_inputs = [_unit_vectors(leaf, 1000 + j) for j, leaf in enumerate(d.inputs)]

    @cached_property
    def _differences(self) -> tuple[Arrays, Arrays]:
        """Finite differences along the inputs' vectors, and what their errors are."""
        c = self._comparison
        every = _each(c.derivatives.inputs, self._of_inputs)
        return c.sweep.differences(c.derivatives.measured, every, c.step)

    def with_autodiff(self, direction: Direction) -> list[Pair]:
        """`v^T J`, or `J u`, by the rule and by autodiff, entry by entry."""
        rule, reference = self._values(direction, available(direction.rule), available(direction.reference))
        pairs: list[Pair] = []
        for returned, arrays in enumerate(zip(rule, reference, strict=True)):
            for varied, (given, meant) in enumerate(zip(*map(_blocks, arrays), strict=True)):
                bound = self._comparison.tolerance.precise(meant, largest(meant))
                pairs += _pair(direction, varied, returned, excess(given, meant, bound))
        return pairs

    def with_differences(self, direction: Direction, derivative: Derivative, *, coarsely: bool = False) -> list[Pair]:
        """`J u`, entry by entry, or `v^T J u`, by some derivative and by finite differences."""
        (values,) = self._values(direction, derivative)
        if not direction.is_forward:
            return self._scalars(direction, values)
        pairs: list[Pair] = []
        for i, arrays in enumerate(zip(values, *self._differences, strict=True)):
            for j, (given, numeric, error) in enumerate(zip(*map(_blocks, arrays), strict=True)):
                bound = self._comparison.bound(numeric, SAFETY * abs(error) + self._rounding(i), coarsely)
                pairs += _pair(direction, j, i, excess(given, numeric, bound))
        return pairs

    def _scalars(self, direction: Direction, values: list[Any]) -> list[Pair]:
        pairs: list[Pair] = []
        tolerance = self._comparison.tolerance
        for j, (all_given, u) in enumerate(zip(values, map(_flat, self._of_inputs), strict=True)):
            for i, (given, v) in enumerate(zip(_blocks(all_given), map(_flat, self._of_outputs), strict=True)):
                analytic = (given.conj() @ u.T).real
                numbers, errors = (_blocks(columns[i])[j] for columns in self._differences)
                numeric = (v.conj() @ numbers.T).real
                error = abs(v) @ (SAFETY * abs(errors) + self._rounding(i)).T
                sums = np.outer(abs(v).sum(axis=1), abs(u).sum(axis=1))
                bound = replace(tolerance, atol=tolerance.atol * sums).estimated(numeric, largest(numeric), error)
                pairs += _pair(direction, i, j, excess(analytic, numeric, bound))
        return pairs

    def _values(self, direction: Direction, *derivatives: Derivative) -> list[list[Any]]:
        of = self._of_inputs if direction.is_forward else self._of_outputs
        return self._comparison.sweep.along(derivatives, _each(direction.varied, of))

    def _rounding(self, output: int) -> Any:
        return self._comparison.rounding()[output]


def _each(leaves: tuple[Leaf, ...], of: list[Any]) -> Vectors:
    """Returns each leaf's vectors in turn, with zeros for all other leaves."""

    def make(numbers: Any) -> list[Any]:
        owner, which = np.divmod(numbers, PROJECTIONS)
        return [_where(owner == i, vectors[which]) for i, vectors in enumerate(of)]

    return Vectors(leaves, tuple(range(len(leaves))), PROJECTIONS * len(leaves), make)


def _where(chosen: Any, vectors: Any) -> Any:
    return vectors * chosen.reshape(-1, *[1] * (vectors.ndim - 1))


def _blocks(array: Any) -> list[Any]:
    """The results for `_each`, leaf by leaf."""
    return [array[i : i + PROJECTIONS] for i in range(0, len(array), PROJECTIONS)]


def _flat(vectors: Any) -> Any:
    return vectors.reshape(PROJECTIONS, -1)


def _pair(direction: Direction, varied: int, returned: int, excesses: Any) -> list[Pair]:
    count = int((excesses > 1).sum())
    return [Pair(*direction.leaves(varied, returned), count)] if count else []


def _unit_vectors(leaf: Leaf, seed: int) -> Any:
    """Random directions of length one."""
    vectors = np.stack([random_vectors([leaf], seed + 5000 * k)[0] for k in range(PROJECTIONS)])
    norms = np.sqrt((abs(_flat(vectors)) ** 2).sum(axis=1))
    return vectors / np.maximum(norms, np.finfo(float).tiny).reshape(PROJECTIONS, *[1] * len(leaf.shape))
