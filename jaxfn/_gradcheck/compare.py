"""Whole Jacobians compared with references, part by part: none is ever held at once unless it is small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfn._gradcheck.numbers.sweep import Sweep
from jaxfn._gradcheck.numbers.vectors import Arrays, Basis, bases
from jaxfn._gradcheck.problem.derivatives import Derivative, Derivatives, Direction, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import SAFETY, Tolerance, largest, rounding_of_differences

_WORST_KEPT = 8
_DOUBLE_BYTES = 8
_ARRAYS_HELD = 6  # of a block of the Jacobian: analytic, numeric, errors, and what comparing them makes


@dataclass
class Pair:
    """Where one output's derivative with respect to one input is wrong.

    Attributes:
      output, input: their positions.
      count: how many entries are.
      worst: components of the output (in reverse mode) or of the input (in forward mode) with the most of them.
    """

    output: int
    input: int
    count: int = 0
    worst: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class Comparison:
    """How derivatives are compared.

    Attributes:
      derivatives: of what.
      tolerance: how closely.
      step: of finite differences.
      sweep: runs it.
      outputs: the values of what is differentiated.
    """

    derivatives: Derivatives
    tolerance: Tolerance
    step: float
    sweep: Sweep
    outputs: Sequence[Any]

    def with_autodiff(self, direction: Direction) -> list[Pair]:
        """The function's rule against autodiff of the bare function."""
        both = [available(direction.rule), available(direction.reference)]
        pairs: list[Pair] = []
        for basis in bases(direction.varied):
            counts = [
                [self._count(a, r, self.tolerance.precise(r, largest(r))) for a, r in zip(*batch, strict=True)]
                for batch in self.sweep.batches(both, basis.vectors())
            ]
            pairs += _pairs(direction, basis, map(np.concatenate, zip(*counts, strict=True)))
        return pairs

    def with_differences(self, direction: Direction, derivative: Derivative, *, coarsely: bool = False) -> list[Pair]:
        """Any derivative against finite differences.

        Args:
          direction: in which.
          derivative: which.
          coarsely: whether it need not come as close as the differences' estimated errors allow.
        """
        width = sum(leaf.num_components for leaf in direction.returned)
        held = max(1, self.sweep.max_memory // (_ARRAYS_HELD * _DOUBLE_BYTES * max(width, 1)))
        pairs: list[Pair] = []
        for basis in bases(direction.varied):
            counts: list[list[Any]] = []
            for start in range(0, basis.size, held):
                part = range(start, min(start + held, basis.size))
                analytic = self.values(derivative, basis, part)
                found = zip(analytic, *self.differences(direction, basis, part), strict=True)
                counts.append([self._count(a, n, self.bound(n, error, coarsely)) for a, n, error in found])
            pairs += _pairs(direction, basis, map(np.concatenate, zip(*counts, strict=True)))
        return pairs

    def bound(self, numeric: Any, error: Any, coarsely: bool) -> Any:
        """How far a derivative may be from finite differences with an estimated error."""
        if coarsely:
            return self.tolerance.coarse(numeric, error)
        return self.tolerance.estimated(numeric, largest(numeric), error)

    def _count(self, analytic: Any, reference: Any, bound: Any) -> Any:
        """How many entries are off for each vector; what is not a number is."""
        is_right = abs(analytic - reference) <= bound
        if is_right.all():
            return np.zeros(len(is_right), int)
        is_wrong = ~(is_right | (analytic == reference))
        return is_wrong.sum(axis=tuple(range(1, is_wrong.ndim)))

    def values(self, derivative: Derivative, basis: Basis, which: Sequence[int]) -> Arrays:
        """Rows or columns of the Jacobian as they are: for everything returned an array of (vectors, size)."""
        return self.sweep.along([derivative], basis.vectors(which))[0]

    def differences(self, direction: Direction, basis: Basis, which: Sequence[int]) -> tuple[Arrays, Arrays]:
        """Finite differences in place of `values`, and what their errors are at most."""
        if direction.is_forward:
            values, errors = self._columns(basis, which)
            return values, [abs(error) for error in errors]
        inputs = self.derivatives.inputs
        values = [np.zeros((len(which), 0)) for _ in inputs]
        errors = list(values)
        for columns in bases(inputs):
            computed = [_turned(arrays, basis, which) for arrays in self._columns(columns)]
            for i in columns.chosen:
                leaf, offset = inputs[i], columns.offsets[i]
                block = slice(offset, offset + leaf.num_components)
                values[i], errors[i] = (_complex_entries(array[:, block], leaf) for array in computed)
        return values, [abs(error) for error in errors]

    def _columns(self, basis: Basis, which: Sequence[int] | None = None) -> tuple[Arrays, Arrays]:
        """Finite differences along unit vectors of inputs, and their errors, real and imaginary parts' apart."""
        values, errors = self.sweep.differences(self.derivatives.measured, basis.vectors(which), self.step)
        return values, [_at_most(error, floor) for error, floor in zip(errors, self.rounding(), strict=True)]

    def rounding(self) -> Arrays:
        """What rounding of the outputs does to finite differences, for each output an array."""
        return rounding_of_differences(self.outputs, self.tolerance.precision, self.step)


def _at_most(error: Any, floor: Any) -> Any:
    bound = SAFETY * abs(error.real) + floor
    return bound + 1j * (SAFETY * abs(error.imag) + floor) if np.iscomplexobj(error) else bound


def _turned(columns: Arrays, basis: Basis, which: Sequence[int]) -> Any:
    """Columns as an array of some of the rows of `basis`."""
    parts = [_real_components(columns[i]) for i in basis.chosen]
    return np.concatenate(parts, axis=1)[:, which].T


def _real_components(columns: Any) -> Any:
    """Complex columns as real ones: all real parts, then all imaginary parts."""
    return np.concatenate([columns.real, columns.imag], axis=1) if np.iscomplexobj(columns) else columns


def _complex_entries(array: Any, leaf: Leaf) -> Any:
    """Real components of an input side by side, as the rows' complex entries."""
    return array[:, : leaf.size] + 1j * array[:, leaf.size :] if leaf.is_complex else array


def _pairs(direction: Direction, basis: Basis, found: Any) -> list[Pair]:
    """The pairs of leaves with mismatches; `found` has the counts, for everything returned by unit vector."""
    pairs: list[Pair] = []
    for returned, counts in enumerate(found):
        for varied in basis.chosen:
            offset = basis.offsets[varied]
            own = counts[offset : offset + basis.leaves[varied].num_components]
            if own.any():
                order = np.argsort(-own, kind="stable")[:_WORST_KEPT]
                worst = [int(i) for i in order if own[i]]
                pairs.append(Pair(*direction.leaves(varied, returned), int(own.sum()), worst))
    return pairs
