"""Whole Jacobians compared with references, part by part: none is ever held at once unless it is small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfn._gradcheck.numbers.sweep import Sweep
from jaxfn._gradcheck.numbers.vectors import Arrays, Basis, bases
from jaxfn._gradcheck.problem.derivatives import Derivative, Derivatives, Direction
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import SAFETY, Tolerance, largest, rounding_of_differences

_WORST_KEPT = 8
_DOUBLE_BYTES = 8
_ARRAYS_HELD = 6  # of a block of the Jacobian: analytic, numeric, errors, and what comparing them makes


@dataclass
class Pair:
    """The wrong entries of one output's derivative with respect to one input.

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
    """A comparison of derivatives at one point."""

    derivatives: Derivatives
    tolerance: Tolerance
    step: float
    sweep: Sweep
    outputs: Sequence[Any]

    def with_autodiff(self, direction: Direction) -> list[Pair]:
        """The function's rule against autodiff of the bare function.

        All of both is computed where functions run, and one number comes back for two: how far they are apart, beyond
        what their size allows. Only what exceeds the least that is allowed besides is looked at again.
        """
        slope, least = self.tolerance.slope, self.tolerance.precise(0.0, 0.0)

        def beyond(analytic: Arrays, reference: Arrays) -> list[Arrays]:
            return [[abs(a - r) - slope * abs(r) for a, r in zip(analytic, reference, strict=True)]]

        def precisely(basis: Basis, part: Sequence[int]) -> Iterator[tuple[Any, Any, Any]]:
            for a, r in zip(*self.sweep.along(direction.both, basis.vectors(part)), strict=True):
                yield a, r, self.tolerance.precise(r, largest(r))

        pairs: list[Pair] = []
        for basis in bases(direction.varied):
            suspects: list[int] = []
            done = 0
            for (arrays,) in self.sweep.batches(direction.both, basis.vectors(), beyond):
                batch = range(done, done := done + len(arrays[0]))
                if not all(a.max(initial=0.0) <= least for a in arrays):  # nor is what is not a number
                    suspects += batch
                    if not batch.start:  # probably all are
                        suspects = list(range(basis.size))
                        break
            if suspects:
                pairs += self._wrong(direction, basis, suspects, precisely)
        return pairs

    def with_differences(self, direction: Direction, derivative: Derivative, *, coarsely: bool = False) -> list[Pair]:
        """Any derivative against finite differences.

        Where it is compared `coarsely`, it need not come as close as the differences' estimated errors allow.
        """

        def estimated(basis: Basis, part: Sequence[int]) -> Iterator[tuple[Any, Any, Any]]:
            numeric = self.differences(direction, basis, part)
            for a, n, error in zip(self.values(derivative, basis, part), *numeric, strict=True):
                yield a, n, self.bound(n, error, coarsely)

        return [
            pair
            for basis in bases(direction.varied)
            for pair in self._wrong(direction, basis, range(basis.size), estimated)
        ]

    def _wrong(
        self,
        direction: Direction,
        basis: Basis,
        which: Sequence[int],
        compute: Callable[[Basis, Sequence[int]], Iterable[tuple[Any, Any, Any]]],
    ) -> list[Pair]:
        """The pairs of leaves with mismatches, as far as some of the unit vectors in a basis show them.

        For some of them `compute` gives, for everything returned: values, a reference, how far these may be apart.
        """
        counts = [np.zeros(basis.size, int) for _ in direction.returned]
        width = sum(leaf.num_components for leaf in direction.returned)
        held = max(1, self.sweep.max_memory // (_ARRAYS_HELD * _DOUBLE_BYTES * max(width, 1)))
        for start in range(0, len(which), held):
            part = which[start : start + held]
            for count, (value, reference, bound) in zip(counts, compute(basis, part), strict=True):
                is_right = (abs(value - reference) <= bound) | (value == reference)  # what is not a number is not
                count[part] = (~is_right).sum(axis=1)
        pairs: list[Pair] = []
        for returned, count in enumerate(counts):
            for varied in basis.chosen:
                offset = basis.offsets[varied]
                own = count[offset : offset + basis.leaves[varied].num_components]
                if own.any():
                    order = np.argsort(-own, kind="stable")[:_WORST_KEPT]
                    worst = [int(i) for i in order if own[i]]
                    pairs.append(Pair(*direction.leaves(varied, returned), int(own.sum()), worst))
        return pairs

    def bound(self, numeric: Any, error: Any, coarsely: bool) -> Any:
        """Returns the allowed distance from finite differences that have an estimated error."""
        if coarsely:
            return self.tolerance.coarse(numeric, error)
        return self.tolerance.estimated(numeric, largest(numeric), error)

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
        return values, [_bounded_error(error, floor) for error, floor in zip(errors, self.rounding(), strict=True)]

    def rounding(self) -> Arrays:
        """The effect of rounding of the outputs on finite differences, an array for each output."""
        return rounding_of_differences(self.outputs, self.tolerance.precision, self.step)


def _bounded_error(error: Any, floor: Any) -> Any:
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
