"""Comparison of whole Jacobians with references, in parts: only a small Jacobian is stored as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxfn._gradcheck.evaluation.batches import BatchedEvaluator
from jaxfn._gradcheck.evaluation.vectors import Arrays, Basis, bases, complex_entries
from jaxfn._gradcheck.problem.derivatives import ADMode, Derivative, Derivatives
from jaxfn._gradcheck.tolerance import SAFETY, Tolerance, largest, rounding_of_differences

_MAX_WORST = 8
_DOUBLE_BYTES = 8
STEADY = 4  # a real mistake changes by less than this fraction of itself
_NUDGES = 3
_NUDGE = 1e-8  # by which fraction inputs are moved to see the effect of rounding, also after 8 lost digits
_ARRAYS_PER_PART = 6  # arrays of the size of a part: analytic, numeric, errors, and temporaries of their comparison


@dataclass
class JacobianBlock:
    """The derivative of one output with respect to one input, with wrong entries.

    Attributes:
      output, input: the indices of both.
      count: the number of wrong entries.
      worst: the components of the output (in reverse mode) or input (in forward mode) with the most wrong entries.
    """

    output: int
    input: int
    count: int = 0
    worst: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Comparison:
    """A comparison of derivatives at one point.

    Attributes:
      derivatives: the function and its derivatives.
      tolerance: the tolerance of the comparison.
      step: the step of finite differences.
      evaluator: evaluates derivatives and differences.
      outputs: the outputs of the function.
    """

    derivatives: Derivatives
    tolerance: Tolerance
    step: float
    evaluator: BatchedEvaluator
    outputs: Sequence[Any]

    def with_autodiff(self, mode: ADMode) -> list[JacobianBlock]:
        """Compares the function's rule with autodiff of the function without it.

        The device returns the difference of each two entries, minus what their size allows. Only vectors with a larger
        result than the least tolerance are evaluated again and compared exactly.
        """
        slope, least = self.tolerance.slope, self.tolerance.precise(0.0, 0.0)

        def beyond(analytic: Arrays, reference: Arrays) -> list[Arrays]:
            return [[abs(a - r) - slope * abs(r) for a, r in zip(analytic, reference, strict=True)]]

        blocks: list[JacobianBlock] = []
        for basis in bases(mode.seed_leaves):
            suspects: list[int] = []
            done = 0
            for (arrays,) in self.evaluator.batches(mode.rule_and_reference, basis.vectors(), beyond):
                batch = range(done, done := done + len(arrays[0]))
                if not all(a.max(initial=0.0) <= least for a in arrays):  # false for NaN, too
                    suspects += batch
                    if not batch.start:  # probably all vectors are
                        suspects = list(range(basis.size))
                        break
            if suspects:
                blocks += self._wrong(mode, basis, suspects, partial(self.entries, mode))
        return blocks

    def entries(self, mode: ADMode, basis: Basis, which: Sequence[int]) -> Sequence[tuple[Any, Any, Any]]:
        """Returns rows or columns of the Jacobian: for each result leaf by the rule, by autodiff, and their tolerance.

        Differences that are rounding are within the tolerance: they change when inputs change in their last digits.
        """

        def at(evaluator: BatchedEvaluator) -> list[tuple[Any, Any]]:
            return list(zip(*evaluator.along(mode.rule_and_reference, basis.vectors(which)), strict=True))

        pairs = at(self.evaluator)
        tolerances = [self.tolerance.of_entries(r) for _, r in pairs]
        limits = [self.tolerance.of_rounding(r) for _, r in pairs]
        differences = [abs(a - r) for a, r in pairs]
        if any(((d > t) & (d <= m)).any() for d, t, m in zip(differences, tolerances, limits, strict=True)):
            nudged = [at(self.evaluator.at(xs)) for xs in nudges(self.evaluator.xs)]
            for i, (a, r) in enumerate(pairs):
                change = np.max([abs(x[i][0] - x[i][1] - (a - r)) for x in nudged], axis=0)
                tolerances[i] = np.where(STEADY * change >= differences[i], limits[i], tolerances[i])
        return [(*pair, t) for pair, t in zip(pairs, tolerances, strict=True)]

    def with_differences(self, mode: ADMode, derivative: Derivative, *, coarsely: bool = False) -> list[JacobianBlock]:
        """Compares a derivative with finite differences.

        With `coarsely` the tolerance is that of a coarse reference, whatever the estimated errors of the differences.
        """

        def estimated(basis: Basis, part: Sequence[int]) -> Iterator[tuple[Any, Any, Any]]:
            numeric = self.differences(mode, basis, part)
            for a, n, error in zip(self.values(derivative, basis, part), *numeric, strict=True):
                yield a, n, self.bound(n, error, coarsely)

        return [
            block
            for basis in bases(mode.seed_leaves)
            for block in self._wrong(mode, basis, range(basis.size), estimated)
        ]

    def _wrong(
        self,
        mode: ADMode,
        basis: Basis,
        which: Sequence[int],
        compute: Callable[[Basis, Sequence[int]], Iterable[tuple[Any, Any, Any]]],
    ) -> list[JacobianBlock]:
        """Returns the blocks of the Jacobian with wrong entries along some of the unit vectors in a basis.

        For a part of these vectors `compute` yields, for each result leaf, values, references and tolerances.
        """
        counts = [np.zeros(basis.size, int) for _ in mode.result_leaves]
        width = sum(leaf.num_components for leaf in mode.result_leaves)
        num_vectors = max(1, self.evaluator.max_memory // (_ARRAYS_PER_PART * _DOUBLE_BYTES * max(width, 1)))
        for start in range(0, len(which), num_vectors):
            part = which[start : start + num_vectors]
            for count, (value, reference, bound) in zip(counts, compute(basis, part), strict=True):
                is_right = (abs(value - reference) <= bound) | (value == reference)  # false for NaN
                count[part] = (~is_right).sum(axis=1)
        blocks: list[JacobianBlock] = []
        for result, count in enumerate(counts):
            for seed in basis.chosen:
                offset = basis.offsets[seed]
                own = count[offset : offset + basis.leaves[seed].num_components]
                if own.any():
                    order = np.argsort(-own, kind="stable")[:_MAX_WORST]
                    worst = [int(i) for i in order if own[i]]
                    blocks.append(JacobianBlock(*mode.output_and_input(seed, result), int(own.sum()), worst))
        return blocks

    def bound(self, numeric: Any, error: Any, coarsely: bool) -> Any:
        """Returns the allowed distance from finite differences that have an estimated error."""
        if coarsely:
            return self.tolerance.coarse(numeric, error)
        return self.tolerance.estimated(numeric, largest(numeric), error)

    def values(self, derivative: Derivative, basis: Basis, which: Sequence[int]) -> Arrays:
        """Returns rows or columns of the Jacobian: an array of shape (vectors, size) for each result leaf."""
        return self.evaluator.along([derivative], basis.vectors(which))[0]

    def differences(self, mode: ADMode, basis: Basis, which: Sequence[int]) -> tuple[Arrays, Arrays]:
        """Returns finite differences, in the form of `values`, and bounds of their errors."""
        if mode.is_forward:
            values, errors = self._columns(basis, which)
            return values, [abs(error) for error in errors]
        values = [np.zeros((len(which), 0)) for _ in self.derivatives.inputs]
        errors = list(values)
        for columns in bases(self.derivatives.inputs):
            computed = [rows_of_columns(arrays, columns, basis, which) for arrays in self._columns(columns)]
            for i in columns.chosen:
                values[i], errors[i] = (rows[i] for rows in computed)
        return values, [abs(error) for error in errors]

    def _columns(self, basis: Basis, which: Sequence[int] | None = None) -> tuple[Arrays, Arrays]:
        """Returns finite differences along unit vectors of inputs, and bounds of their errors."""
        values, errors = self.evaluator.differences(self.derivatives.target, basis.vectors(which), self.step)
        return values, [_bounded_error(error, floor) for error, floor in zip(errors, self.rounding(), strict=True)]

    def rounding(self) -> Arrays:
        """The effect of rounding of the outputs on finite differences, an array for each output."""
        return rounding_of_differences(self.outputs, self.tolerance.precision, self.step)


def nudges(xs: Sequence[Any]) -> Iterator[Arrays]:
    """Yields inputs so near that derivatives are almost equal and roundings are not."""
    for seed in range(_NUDGES):
        generator = np.random.default_rng(seed)
        yield [np.asarray(x) * (1 + _NUDGE * generator.uniform(-1, 1, x.shape)) for x in xs]


def _bounded_error(error: Any, floor: Any) -> Any:
    bound = SAFETY * abs(error.real) + floor
    return bound + 1j * (SAFETY * abs(error.imag) + floor) if np.iscomplexobj(error) else bound


def rows_of_columns(arrays: Arrays, columns: Basis, rows: Basis, which: Sequence[int]) -> dict[int, Any]:
    """Transposes columns of a Jacobian to some of its rows.

    Args:
      arrays: for each output, its entries in the columns, of shape (columns, size).
      columns: the unit vectors of the columns.
      rows: the unit vectors of the rows.
      which: the indices of the rows.

    Returns:
      For each chosen input, its entries in the rows, of shape (rows, size).
    """
    every = np.concatenate([_real_components(arrays[i]) for i in rows.chosen], axis=1)[:, which].T
    blocks: dict[int, Any] = {}
    for i in columns.chosen:
        leaf, offset = columns.leaves[i], columns.offsets[i]
        blocks[i] = complex_entries(every[:, offset : offset + leaf.num_components], leaf)
    return blocks


def _real_components(columns: Any) -> Any:
    """Returns complex columns as real ones: all real parts, then all imaginary parts."""
    return np.concatenate([columns.real, columns.imag], axis=1) if np.iscomplexobj(columns) else columns
