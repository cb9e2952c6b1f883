"""Comparison of Jacobians with references: of all entries, or in fast mode along a few random vectors.

It is done in parts: only a small Jacobian is stored as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxfn._check.closeness import excess, largest
from jaxfn._check.modes import Derivative
from jaxfn._gradcheck.evaluation.batches import BatchedEvaluator
from jaxfn._gradcheck.evaluation.vectors import Arrays, Basis, Vectors, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, Derivatives, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import Tolerance, is_resolved

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

# For each result leaf values, references, and errors or tolerances of these.
Compared = Sequence[tuple[Any, Any, Any]]


@dataclass
class JacobianBlock:
    """The derivative of one output with respect to one input, with wrong entries."""

    output: int  # output, input: the indices of both
    input: int
    count: int = 0  # the number of wrong entries
    # the components of the output (in reverse mode) or input (in forward mode) with the most wrong entries
    worst: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Reference:
    """A derivative, and what it is compared with: autodiff of the function without its rule, or finite differences."""

    mode: ADMode  # the mode of the derivative
    derivative: Derivative  # the function's rule, or autodiff that is itself compared with differences
    is_autodiff: bool  # whether it is compared with autodiff
    is_coarse: bool = False  # whether the tolerance is that of a coarse reference, whatever the errors of differences

    @property
    def compared(self) -> list[Derivative]:
        """The derivative and autodiff."""
        return [self.derivative, available(self.mode.reference)]


@dataclass(frozen=True)
class Comparison:
    """A comparison of derivatives with references, at one point."""

    derivatives: Derivatives  # the function and its derivatives
    tolerance: Tolerance  # the tolerance of the comparison
    step: float  # the step of finite differences
    evaluator: BatchedEvaluator  # evaluates derivatives and differences
    bases: Callable[[tuple[Leaf, ...]], list[Basis]]  # the vectors: `unit_bases`, or `random_bases` in fast mode
    notes: dict[str, None] = field(default_factory=dict[str, None])  # what the report has to note if the check passes

    def blocks(self, reference: Reference) -> list[JacobianBlock]:
        """Returns the blocks of the Jacobian in which a derivative differs from its reference."""
        found: list[JacobianBlock] = []
        for basis in self.bases(reference.mode.seed_leaves):
            which = self._suspects(reference, basis) if reference.is_autodiff else range(basis.size)
            found += self._wrong(reference, basis, which)
        return found

    def _suspects(self, reference: Reference, basis: Basis) -> Sequence[int]:
        """Returns the vectors along which a derivative may differ from autodiff.

        The device returns the difference of each two entries, minus what their size allows. Only vectors with a larger
        result than the least tolerance are evaluated again and compared exactly.
        """
        slope, least = self.tolerance.slope, self.tolerance.precise(0.0, _TINY)

        def beyond(analytic: Arrays, reference: Arrays) -> list[Arrays]:
            return [[abs(a - r) - slope * abs(r) for a, r in zip(analytic, reference, strict=True)]]

        suspects: list[int] = []
        done = 0
        for (arrays,) in self.evaluator.batches(reference.compared, basis.vectors(), beyond):
            batch = range(done, done := done + len(arrays[0]))
            if not all(a.max(initial=0.0) <= least for a in arrays):  # false for NaN, too
                suspects += batch
                if not batch.start:  # probably all vectors are
                    return range(basis.size)
        return suspects

    def _evaluate(self, reference: Reference, basis: Basis, which: Sequence[int]) -> Compared:
        """Returns values, references and bounds of their errors along some of the vectors in a basis."""
        if reference.is_autodiff:
            pairs = zip(*self.evaluator.along(reference.compared, basis.vectors(which)), strict=True)
            return [(a, r, 0.0) for a, r in pairs]
        values = self.values(reference.derivative, basis, which)
        for columns in [] if reference.mode.is_forward else self.bases(self.derivatives.inputs):
            products = columns.products(values)
            for i in columns.chosen:
                values[i] = columns.entries(i, products)
        return list(zip(values, *self.differences(reference.mode, basis, which), strict=True))

    def entries(self, reference: Reference, basis: Basis, which: Sequence[int]) -> Compared:
        """Returns values, references and tolerances along some of the vectors in a basis.

        Differences that change at nudged inputs count as rounding.
        """
        t, found = self.tolerance, self._evaluate(reference, basis, which)
        bound, bound_of_rounding, step = t.of_entries, t.of_rounding, 0.0
        if not reference.is_autodiff:
            t = t.strict() if reference.is_coarse else t
            bound, bound_of_rounding, step = t.coarse if reference.is_coarse else t.estimated, t.coarse, self.step
        tolerances = [bound(r, error) for _, r, error in found]
        differ = [excess(a, r, t) > 1 for (a, r, _), t in zip(found, tolerances, strict=True)]
        if any(map(np.any, differ)):
            for size in (1.0, _NEARER):
                errors, changes, movements = ([0.0] * len(found) for _ in range(3))
                is_near = True
                for nudged in self._nudged(step, size):
                    there = nudged._evaluate(reference, basis, which)
                    for i, (nearby, (a, r, error)) in enumerate(zip(there, found, strict=True)):
                        change, movement = abs(nearby[0] - nearby[1] - (a - r)), abs(nearby[0] - a)
                        errors[i] = np.fmax(errors[i], np.fmax(error, nearby[2]))
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
        compared = [(a, r, t) for (a, r, _), t in zip(found, tolerances, strict=True)]
        if reference.is_coarse:
            is_missing = [np.isfinite(a) & ~np.isfinite(n) for a, n, _ in compared]
            self.notes.update({_NO_DIFFERENCES: None} if any(map(np.any, is_missing)) else {})
            return [(a, np.where(m, a, n), t) for (a, n, t), m in zip(compared, is_missing, strict=True)]
        if not reference.is_autodiff and any((excess(a, n, self.tolerance.plain(n)) > 1).any() for a, n, _ in compared):
            self.notes[_LARGE_ERRORS] = None
        return compared

    def is_resolved(self, mode: ADMode) -> bool:
        """Whether finite differences agree with autodiff in the first digits, however small the derivatives are."""
        reference = Reference(mode, available(mode.reference), is_autodiff=False)
        found = [self._evaluate(reference, basis, range(basis.size)) for basis in self.bases(mode.seed_leaves)]
        return all(is_resolved(a, n) for compared in found for a, n, _ in compared)

    def _nudged(self, step: float, size: float) -> Iterator[Comparison]:
        """Yields comparisons at inputs so near that derivatives are almost equal and roundings are not."""
        xs = list(map(np.asarray, self.evaluator.xs))
        # Functions may have a kink at zero. There, other steps change roundings.
        sizes = [size * (step + np.sqrt(self.tolerance.precision) * largest(x)) * (x != 0) for x in xs]
        for seed in range(_NUDGES):
            vectors = random_vectors(self.derivatives.inputs, seed)
            moved = [x + size * v for x, size, v in zip(xs, sizes, vectors, strict=True)]
            yield replace(self, evaluator=self.evaluator.at(moved), step=self.step * (1 - (seed + 1) / 20))

    def _wrong(self, reference: Reference, basis: Basis, which: Sequence[int]) -> list[JacobianBlock]:
        """Returns the blocks of the Jacobian with wrong entries along some of the vectors in a basis."""
        mode = reference.mode
        counts = [np.zeros(basis.size, int) for _ in mode.result_leaves]
        width = sum(leaf.num_components for leaf in mode.result_leaves)
        num_vectors = max(1, self.evaluator.max_memory // (_ARRAYS_PER_PART * _DOUBLE_BYTES * max(width, 1)))
        for start in range(0, len(which), num_vectors):
            part = which[start : start + num_vectors]
            for count, compared in zip(counts, self.entries(reference, basis, part), strict=True):
                count[part] = (excess(*compared) > 1).sum(axis=1)
        blocks: list[JacobianBlock] = []
        for result, count in enumerate(counts):
            for seed in basis.chosen:
                own = count[basis.part(seed)]
                if own.any():
                    order = np.argsort(-own, kind="stable")[:_MAX_WORST]
                    worst = [int(i) for i in order if own[i]]
                    blocks.append(JacobianBlock(*mode.output_and_input(seed, result), int(own.sum()), worst))
        return blocks

    def values(self, derivative: Derivative, basis: Basis, which: Sequence[int]) -> Arrays:
        """Returns a derivative along some vectors: an array of shape (vectors, size) for each result leaf."""
        return self.evaluator.along([derivative], basis.vectors(which))[0]

    def differences(self, mode: ADMode, basis: Basis, which: Sequence[int]) -> tuple[Arrays, Arrays]:
        """Returns finite differences, in the form of `values`, and bounds of their errors.

        In reverse mode they are the `entries` along the vectors of inputs.
        """
        if mode.is_forward:
            values, errors = self.columns(basis.vectors(which))
        else:
            values = [np.zeros((len(which), 0)) for _ in self.derivatives.inputs]
            errors = list(values)
            for columns in self.bases(self.derivatives.inputs):
                found, bounds = self.columns(columns.vectors())
                rows = rows_of_columns(found, columns, basis, which)
                bounds_of_rows = rows_of_columns(bounds, columns, basis, which, of_errors=True)
                for i in columns.chosen:
                    values[i], errors[i] = rows[i], bounds_of_rows[i]
        return values, list(map(abs, errors))

    def columns(self, vectors: Vectors) -> tuple[Arrays, Arrays]:
        """Returns finite differences along vectors of inputs, and bounds of their errors."""
        return self.evaluator.differences(self.derivatives.target, vectors, self.step, self.tolerance.precision)


def rows_of_columns(
    arrays: Arrays, columns: Basis, rows: Basis, which: Sequence[int], *, of_errors: bool = False
) -> dict[int, Any]:
    """Transposes columns of a Jacobian to some of its rows.

    Args:
      arrays: for each output, its entries in the columns, of shape (columns, size).
      columns: the vectors of the columns.
      rows: the vectors of the rows.
      which: the indices of the rows.
      of_errors: whether the arrays are bounds of errors.

    Returns:
      For each chosen input, its entries in the rows, of shape (rows, size).
    """
    products = rows.products(arrays, of_errors=of_errors)[:, which].T
    return {i: columns.entries(i, products) for i in columns.chosen}
