"""Fast mode: a few random projections of the Jacobian instead of all of its entries."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxfn._gradcheck.compare import Comparison, JacobianBlock
from jaxfn._gradcheck.evaluation.vectors import Arrays, Vectors, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, Derivative, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import SAFETY, excess, largest

PROJECTIONS = 2  # per output and per input


class Projections:
    """Random projections of the Jacobian, by the rule, by autodiff, and by finite differences."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        d = comparison.derivatives
        self._of_outputs = [_unit_vectors(leaf, 10 + i) for i, leaf in enumerate(d.outputs)]
        self._of_inputs = [_unit_vectors(leaf, 1000 + j) for j, leaf in enumerate(d.inputs)]

    @cached_property
    def _differences(self) -> tuple[Arrays, Arrays]:
        """Finite differences along the vectors of the inputs, and estimates of their errors."""
        c = self._comparison
        every = _each(c.derivatives.inputs, self._of_inputs)
        return c.evaluator.differences(c.derivatives.target, every, c.step)

    def with_autodiff(self, mode: ADMode) -> list[JacobianBlock]:
        """Compares `v^T J`, or `J u`, by the rule and by autodiff, entry by entry."""
        rule, reference = self._values(mode, available(mode.rule), available(mode.reference))
        blocks: list[JacobianBlock] = []
        for result, arrays in enumerate(zip(rule, reference, strict=True)):
            for seed, (analytic, expected) in enumerate(zip(*map(_split, arrays), strict=True)):
                bound = self._comparison.tolerance.precise(expected, largest(expected))
                blocks += _block(mode, seed, result, excess(analytic, expected, bound))
        return blocks

    def with_differences(self, mode: ADMode, derivative: Derivative, *, coarsely: bool = False) -> list[JacobianBlock]:
        """Compares `J u`, entry by entry, or `v^T J u`, by a derivative and by finite differences."""
        (values,) = self._values(mode, derivative)
        if not mode.is_forward:
            return self._scalars(mode, values)
        blocks: list[JacobianBlock] = []
        for i, arrays in enumerate(zip(values, *self._differences, strict=True)):
            for j, (analytic, numeric, error) in enumerate(zip(*map(_split, arrays), strict=True)):
                bound = self._comparison.bound(numeric, SAFETY * abs(error) + self._rounding(i), coarsely)
                blocks += _block(mode, j, i, excess(analytic, numeric, bound))
        return blocks

    def _scalars(self, mode: ADMode, values: list[Any]) -> list[JacobianBlock]:
        blocks: list[JacobianBlock] = []
        tolerance = self._comparison.tolerance
        for j, (of_all_outputs, u) in enumerate(zip(values, map(_flat, self._of_inputs), strict=True)):
            for i, (projected, v) in enumerate(zip(_split(of_all_outputs), map(_flat, self._of_outputs), strict=True)):
                analytic = (projected.conj() @ u.T).real
                numbers, errors = (_split(columns[i])[j] for columns in self._differences)
                numeric = (v.conj() @ numbers.T).real
                error = abs(v) @ (SAFETY * abs(errors) + self._rounding(i)).T
                sums = np.outer(abs(v).sum(axis=1), abs(u).sum(axis=1))
                bound = replace(tolerance, atol=tolerance.atol * sums).estimated(numeric, largest(numeric), error)
                blocks += _block(mode, i, j, excess(analytic, numeric, bound))
        return blocks

    def _values(self, mode: ADMode, *derivatives: Derivative) -> list[list[Any]]:
        vectors = self._of_inputs if mode.is_forward else self._of_outputs
        return self._comparison.evaluator.along(derivatives, _each(mode.seed_leaves, vectors))

    def _rounding(self, output: int) -> Any:
        return self._comparison.rounding()[output]


def _each(leaves: tuple[Leaf, ...], vectors: list[Any]) -> Vectors:
    """Returns the vectors of one leaf after the other, with zeros for all other leaves."""

    def make(numbers: Any) -> list[Any]:
        leaf, which = np.divmod(numbers, PROJECTIONS)
        return [_where(leaf == i, of_leaf[which]) for i, of_leaf in enumerate(vectors)]

    return Vectors(leaves, tuple(range(len(leaves))), PROJECTIONS * len(leaves), make)


def _where(chosen: Any, vectors: Any) -> Any:
    return vectors * chosen.reshape(-1, *[1] * (vectors.ndim - 1))


def _split(array: Any) -> list[Any]:
    """Splits the results for `_each` by leaf."""
    return [array[i : i + PROJECTIONS] for i in range(0, len(array), PROJECTIONS)]


def _flat(vectors: Any) -> Any:
    return vectors.reshape(PROJECTIONS, -1)


def _block(mode: ADMode, seed: int, result: int, excesses: Any) -> list[JacobianBlock]:
    count = int((excesses > 1).sum())
    return [JacobianBlock(*mode.output_and_input(seed, result), count)] if count else []


def _unit_vectors(leaf: Leaf, seed: int) -> Any:
    """Returns random directions of length one."""
    vectors = np.stack([random_vectors([leaf], seed + 5000 * k)[0] for k in range(PROJECTIONS)])
    norms = np.sqrt((abs(_flat(vectors)) ** 2).sum(axis=1))
    return vectors / np.maximum(norms, np.finfo(float).tiny).reshape(PROJECTIONS, *[1] * len(leaf.shape))
