"""Fast mode: a few random projections of the Jacobian instead of all of its entries."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from jaxfn._check.modes import Derivative
from jaxfn._gradcheck.compare import Comparison, Evaluated, JacobianBlock
from jaxfn._gradcheck.evaluation.vectors import Vectors, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import are_resolved, excess

PROJECTIONS = 2  # per output and per input


class Projections:
    """Random projections of the Jacobian, by the rule, by autodiff, and by finite differences."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        d = comparison.derivatives
        self._of_outputs = [_unit_vectors(leaf, 10 + i) for i, leaf in enumerate(d.outputs)]
        self._of_inputs = [_unit_vectors(leaf, 1000 + j) for j, leaf in enumerate(d.inputs)]

    def with_autodiff(self, mode: ADMode) -> list[JacobianBlock]:
        """Compares `v^T J`, or `J u`, by the rule and by autodiff, entry by entry."""

        def evaluate(comparison: Comparison) -> Evaluated:
            values = Projections(comparison)._values(mode, available(mode.rule), available(mode.reference))
            return [(a, r, 0.0) for arrays in zip(*values, strict=True) for a, r in _split(*arrays)]

        return _wrong(mode, self._comparison.compare_with_autodiff(evaluate))

    def with_differences(self, mode: ADMode, derivative: Derivative, *, coarsely: bool = False) -> list[JacobianBlock]:
        """Compares `J u`, entry by entry, or `v^T J u`, by a derivative and by finite differences."""

        def evaluate(comparison: Comparison) -> Evaluated:
            return Projections(comparison)._with_differences(mode, derivative)

        return _wrong(mode, self._comparison.compare_with_differences(evaluate, coarsely=coarsely))

    def are_resolved(self, mode: ADMode) -> bool:
        """Whether finite differences agree with autodiff in the first digits, however small the derivatives are."""
        values, numbers, _ = zip(*self._with_differences(mode, available(mode.reference)), strict=True)
        return are_resolved(values, numbers)

    def _with_differences(self, mode: ADMode, derivative: Derivative) -> Evaluated:
        """Returns values by a derivative, finite differences and bounds of their errors: `J u`, or else `v^T J u`."""
        (values,) = self._values(mode, derivative)
        numbers, errors = self._comparison.columns(_each(self._comparison.derivatives.inputs, self._of_inputs))
        errors = list(map(abs, errors))
        if mode.is_forward:
            return [arrays for columns in zip(values, numbers, errors, strict=True) for arrays in _split(*columns)]
        found: Evaluated = []
        for j, (of_outputs, u) in enumerate(zip(values, map(_flat, self._of_inputs), strict=True)):
            for i, ((projected,), v) in enumerate(zip(_split(of_outputs), map(_flat, self._of_outputs), strict=True)):
                number, error = _split(numbers[i], errors[i])[j]
                # By these torch multiplies atol; they are 0 for empty arrays, and otherwise at least 1.
                sums = np.maximum(np.outer(abs(v).sum(axis=1), abs(u).sum(axis=1)), 1)
                terms = (projected.conj() @ u.T).real, (v.conj() @ number.T).real, abs(v) @ error.T
                found.append(tuple(term / sums for term in terms))
        return found

    def _values(self, mode: ADMode, *derivatives: Derivative) -> list[list[Any]]:
        vectors = self._of_inputs if mode.is_forward else self._of_outputs
        return self._comparison.evaluator.along(derivatives, _each(mode.seed_leaves, vectors))


def _each(leaves: tuple[Leaf, ...], vectors: list[Any]) -> Vectors:
    """Returns the vectors of one leaf after the other, with zeros for all other leaves."""

    def make(numbers: Any) -> list[Any]:
        leaf, which = np.divmod(numbers, PROJECTIONS)
        return [_where(leaf == i, of_leaf[which]) for i, of_leaf in enumerate(vectors)]

    return Vectors(leaves, tuple(range(len(leaves))), PROJECTIONS * len(leaves), make)


def _where(chosen: Any, vectors: Any) -> Any:
    return vectors * chosen.reshape(-1, *[1] * (vectors.ndim - 1))


def _split(*arrays: Any) -> list[tuple[Any, ...]]:
    """Splits the results for `_each` by leaf."""
    return [tuple(a[i : i + PROJECTIONS] for a in arrays) for i in range(0, len(arrays[0]), PROJECTIONS)]


def _flat(vectors: Any) -> Any:
    return vectors.reshape(PROJECTIONS, -1)


def _wrong(mode: ADMode, compared: Evaluated) -> list[JacobianBlock]:
    """Returns the wrong blocks, from values, references and tolerances for each result leaf and seed leaf."""
    counts = [int((excess(*arrays) > 1).sum()) for arrays in compared]
    indices = product(range(len(mode.result_leaves)), range(len(mode.seed_leaves)))
    return [
        JacobianBlock(*mode.output_and_input(seed, result), count)
        for (result, seed), count in zip(indices, counts, strict=True)
        if count
    ]


def _unit_vectors(leaf: Leaf, seed: int) -> Any:
    """Returns random directions of length one."""
    vectors = np.stack([random_vectors([leaf], seed + 5000 * k)[0] for k in range(PROJECTIONS)])
    norms = np.sqrt((abs(_flat(vectors)) ** 2).sum(axis=1))
    return vectors / np.maximum(norms, np.finfo(float).tiny).reshape(PROJECTIONS, *[1] * len(leaf.shape))
