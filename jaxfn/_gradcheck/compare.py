"""Comparison of whole Jacobians with references, in parts: only a small Jacobian is stored as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jaxfn._check.modes import Derivative
from jaxfn._gradcheck.evaluation.batches import BatchedEvaluator
from jaxfn._gradcheck.evaluation.vectors import Arrays, Basis, Vectors, bases, complex_entries, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, Derivatives
from jaxfn._gradcheck.tolerance import Tolerance, excess, largest

_MAX_WORST = 8
_DOUBLE_BYTES = 8
_STEADY = 4  # a real mistake changes by less than this fraction of itself
_NUDGES = 12
_NEARER = 1e-6  # factor of nudges, if others change the derivative or leave the function's domain
_FAR = 0.1  # a larger relative change of both derivatives is not rounding
_TINY = float(np.finfo(float).tiny)
_ARRAYS_PER_PART = 10  # arrays of the size of a part: analytic, numeric, errors, and temporaries of their comparison

_LARGE_ERRORS = (
    "finite differences have larger errors than atol + rtol * |reference|, as they have if values lose digits; "
    "differences within these errors were allowed"
)

_NO_DIFFERENCES = "some entries have no finite differences, as no value near by is finite: autodiff decided there"

# For each result leaf analytic values, references, and errors or tolerances of these.
Evaluated = Sequence[tuple[Any, Any, Any]]


@dataclass
class JacobianBlock:
    """The derivative of one output with respect to one input, with wrong entries."""

    output: int  # output, input: the indices of both
    input: int
    count: int = 0  # the number of wrong entries
    # the components of the output (in reverse mode) or input (in forward mode) with the most wrong entries
    worst: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Comparison:
    """A comparison of derivatives at one point."""

    derivatives: Derivatives  # the function and its derivatives
    tolerance: Tolerance  # the tolerance of the comparison
    step: float  # the step of finite differences
    evaluator: BatchedEvaluator  # evaluates derivatives and differences
    notes: dict[str, None] = field(default_factory=dict[str, None])  # what the report has to note if the check passes

    def with_autodiff(self, mode: ADMode) -> list[JacobianBlock]:
        """Compares the function's rule with autodiff of the function without it.

        The device returns the difference of each two entries, minus what their size allows. Only vectors with a larger
        result than the least tolerance are evaluated again and compared exactly.
        """
        slope, least = self.tolerance.slope, self.tolerance.precise(0.0, _TINY)

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
                blocks += self._wrong(mode, basis, suspects, partial(self.entries_with_autodiff, mode))
        return blocks

    def entries_with_autodiff(self, mode: ADMode, basis: Basis, which: Sequence[int]) -> Evaluated:
        """Returns rows or columns of the Jacobian by the rule, by autodiff, and their tolerance."""

        def evaluate(comparison: Comparison) -> Evaluated:
            pairs = zip(*comparison.evaluator.along(mode.rule_and_reference, basis.vectors(which)), strict=True)
            return [(a, r, 0.0) for a, r in pairs]

        return self.compare_with_autodiff(evaluate)

    def entries_with_differences(
        self, mode: ADMode, derivative: Derivative, basis: Basis, which: Sequence[int], *, coarsely: bool = False
    ) -> Evaluated:
        """Returns rows or columns of the Jacobian by a derivative, by finite differences, and their tolerance."""

        def evaluate(comparison: Comparison) -> Evaluated:
            values = comparison.values(derivative, basis, which)
            return list(zip(values, *comparison.differences(mode, basis, which), strict=True))

        return self.compare_with_differences(evaluate, coarsely=coarsely)

    def compare_with_autodiff(self, evaluate: Callable[[Comparison], Evaluated]) -> Evaluated:
        """Returns values, autodiff and tolerances; `evaluate` returns zeros instead of tolerances."""
        t = self.tolerance
        return self._compare(evaluate, lambda reference, _: t.of_entries(reference), t.of_rounding, 0.0)

    def compare_with_differences(self, evaluate: Callable[[Comparison], Evaluated], *, coarsely: bool) -> Evaluated:
        """Returns values, finite differences and tolerances; `evaluate` returns errors instead of tolerances."""
        t = self.tolerance.strict() if coarsely else self.tolerance
        compared = self._compare(evaluate, t.coarse if coarsely else t.estimated, t.coarse, self.step)
        if coarsely:  # autodiff is compared
            is_missing = [np.isfinite(a) & ~np.isfinite(n) for a, n, _ in compared]
            self.notes.update({_NO_DIFFERENCES: None} if any(map(np.any, is_missing)) else {})
            return [(a, np.where(m, a, n), t) for (a, n, t), m in zip(compared, is_missing, strict=True)]
        if any((excess(a, n, t.plain(n)) > 1).any() for a, n, _ in compared):
            self.notes[_LARGE_ERRORS] = None
        return compared

    def _compare(
        self,
        evaluate: Callable[[Comparison], Evaluated],
        bound: Callable[[Any, Any], Any],
        bound_of_rounding: Callable[[Any, Any], Any],
        step: float,
    ) -> Evaluated:
        """Returns analytic values, references and tolerances; differences that change at nudged inputs are rounding.

        Args:
          evaluate: returns analytic values, references and estimated errors of these.
          bound, bound_of_rounding: return the tolerance, from references and their errors.
          step: the step of the references, 0 for autodiff.
        """
        found = evaluate(self)
        tolerances = [bound(r, error) for _, r, error in found]
        differ = [excess(a, r, t) > 1 for (a, r, _), t in zip(found, tolerances, strict=True)]
        if any(map(np.any, differ)):
            for size in (1.0, _NEARER):
                errors, changes, movements = ([0.0] * len(found) for _ in range(3))
                is_near = True
                for nudged in self._nudged(step, size):
                    for i, (there, (a, r, error)) in enumerate(zip(evaluate(nudged), found, strict=True)):
                        change, movement = abs(there[0] - there[1] - (a - r)), abs(there[0] - a)
                        errors[i] = np.fmax(errors[i], np.fmax(error, there[2]))
                        changes[i], movements[i] = np.fmax(changes[i], change), np.fmax(movements[i], movement)
                        is_far = (movement > _FAR * abs(a)) & (change < _FAR * movement) | ~np.isfinite(change)
                        is_near &= not (differ[i] & np.isfinite(a - r) & is_far).any()
                if is_near:
                    break
            for i, (a, r, _) in enumerate(found):
                # If the analytic values do not change, the references do: that is their error.
                error = np.fmax(errors[i], np.where(_STEADY * movements[i] <= changes[i], changes[i], 0.0))
                is_rounding = _STEADY * changes[i] >= abs(a - r)
                tolerances[i] = np.where(is_rounding, bound_of_rounding(r, error), bound(r, errors[i]))
        return [(a, r, t) for (a, r, _), t in zip(found, tolerances, strict=True)]

    def _nudged(self, step: float, size: float) -> Iterator[Comparison]:
        """Yields comparisons at inputs so near that derivatives are almost equal and roundings are not."""
        xs = list(map(np.asarray, self.evaluator.xs))
        # Functions may have a kink at zero. There, other steps change roundings.
        sizes = [size * (step + np.sqrt(self.tolerance.precision) * largest(x)) * (x != 0) for x in xs]
        for seed in range(_NUDGES):
            vectors = random_vectors(self.derivatives.inputs, seed)
            moved = [x + size * v for x, size, v in zip(xs, sizes, vectors, strict=True)]
            yield replace(self, evaluator=self.evaluator.at(moved), step=self.step * (1 - (seed + 1) / 20))

    def with_differences(self, mode: ADMode, derivative: Derivative, *, coarsely: bool = False) -> list[JacobianBlock]:
        """Compares a derivative with finite differences.

        With `coarsely` the tolerance is that of a coarse reference, whatever the estimated errors of the differences.
        """
        compute = partial(self.entries_with_differences, mode, derivative, coarsely=coarsely)
        return [
            block for basis in bases(mode.seed_leaves) for block in self._wrong(mode, basis, range(basis.size), compute)
        ]

    def _wrong(
        self,
        mode: ADMode,
        basis: Basis,
        which: Sequence[int],
        compute: Callable[[Basis, Sequence[int]], Evaluated],
    ) -> list[JacobianBlock]:
        """Returns the blocks of the Jacobian with wrong entries along some of the unit vectors in a basis.

        For a part of these vectors `compute` returns, for each result leaf, values, references and tolerances.
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

    def values(self, derivative: Derivative, basis: Basis, which: Sequence[int]) -> Arrays:
        """Returns rows or columns of the Jacobian: an array of shape (vectors, size) for each result leaf."""
        return self.evaluator.along([derivative], basis.vectors(which))[0]

    def differences(self, mode: ADMode, basis: Basis, which: Sequence[int]) -> tuple[Arrays, Arrays]:
        """Returns finite differences, in the form of `values`, and bounds of their errors."""
        if mode.is_forward:
            values, errors = self.columns(basis.vectors(which))
        else:
            values = [np.zeros((len(which), 0)) for _ in self.derivatives.inputs]
            errors = list(values)
            for columns in bases(self.derivatives.inputs):
                arrays = self.columns(columns.vectors())
                computed = [rows_of_columns(array, columns, basis, which) for array in arrays]
                for i in columns.chosen:
                    values[i], errors[i] = (rows[i] for rows in computed)
        return values, list(map(abs, errors))

    def columns(self, vectors: Vectors) -> tuple[Arrays, Arrays]:
        """Returns finite differences along vectors of inputs, and bounds of their errors."""
        return self.evaluator.differences(self.derivatives.target, vectors, self.step, self.tolerance.precision)


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
