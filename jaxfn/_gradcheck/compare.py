"""Whole Jacobians compared with references, batch by batch: none is ever held at once unless it is small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxfn._gradcheck.derivatives import Derivatives, Pullback, Pushforward, available
from jaxfn._gradcheck.jacobian import (
    Basis,
    bases,
    central_differences,
    columns,
    richardson_differences,
    rows,
)
from jaxfn._gradcheck.problem import Leaf, OfLeaves
from jaxfn._gradcheck.programs import Engine, computation
from jaxfn._gradcheck.sweep import Sweep
from jaxfn._gradcheck.tolerance import SAFETY, Tolerance, rounding_of_differences

_WORST_KEPT = 8
_DOUBLE_BYTES = 8
_ARRAYS_HELD = 6  # of a block of rows: analytic, numeric, errors, and what comparing them makes


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

    def rows_with_autodiff(self) -> list[Pair]:
        """Reverse mode by the function's rule against reverse mode by autodiff of the bare function."""
        d = self.derivatives
        pullback, reference = available(d.pullback), available(d.reference_pullback)
        pairs: list[Pair] = []
        for basis in bases(d.outputs):
            compute = _Each(tuple(_Rows(self.sweep.engine, p, basis) for p in (pullback, reference)))
            found = self.sweep.judged(basis, compute, self._judge_precisely, [pullback, reference], _width(d.inputs))
            pairs += _pairs(basis, found, Pair)
        return pairs

    def columns_with_autodiff(self) -> list[Pair]:
        """Forward mode by the function's rule against forward mode by autodiff of the bare function."""
        d = self.derivatives
        pushforward, reference = available(d.pushforward), available(d.reference_pushforward)
        pairs: list[Pair] = []
        for basis in bases(d.inputs):
            compute = _Each(tuple(_Columns(self.sweep.engine, p, basis) for p in (pushforward, reference)))
            costs = [pushforward, reference]
            found = self.sweep.judged(basis, compute, self._judge_precisely, costs, _width(d.outputs))
            pairs += _pairs(basis, found, _turned_pair)
        return pairs

    def columns_with_differences(self, pushforward: Pushforward) -> list[Pair]:
        """Any forward mode against plain finite differences."""
        d = self.derivatives
        engine = self.sweep.engine
        errors = self.rounding()

        def judge(computed: Any) -> Any:
            return [
                _count(given, numeric, self.tolerance.coarse(numeric, error))
                for given, numeric, error in zip(*computed, errors, strict=True)
            ]

        pairs: list[Pair] = []
        for basis in bases(d.inputs):
            central = _CentralColumns(engine, d.measured, basis, self.step)
            compute = _Each((_Columns(engine, pushforward, basis), central))
            costs = [pushforward, d.measured, d.measured]
            found = self.sweep.judged(basis, compute, judge, costs, _width(d.outputs))
            pairs += _pairs(basis, found, _turned_pair)
        return pairs

    def columns_estimated(self, pushforward: Pushforward) -> list[Pair]:
        """Any forward mode against finite differences, as closely as their estimated errors allow."""
        d = self.derivatives
        engine = self.sweep.engine
        floors = self.rounding()

        def judge(computed: Any) -> Any:
            columns, (values, errors) = computed
            return [
                self._estimated(given, numeric, SAFETY * abs(error) + floor)
                for given, numeric, error, floor in zip(columns, values, errors, floors, strict=True)
            ]

        pairs: list[Pair] = []
        for basis in bases(d.inputs):
            differences = _DifferenceColumns(engine, d.measured, basis, self.step)
            compute = _Each((_Columns(engine, pushforward, basis), differences))
            costs = [pushforward] + [d.measured] * 4
            found = self.sweep.judged(basis, compute, judge, costs, _width(d.outputs))
            pairs += _pairs(basis, found, _turned_pair)
        return pairs

    def rows_with_differences(self, pullback: Pullback) -> list[Pair]:
        """Any reverse mode against finite differences, which come in columns: blocks of rows are held meanwhile."""
        d = self.derivatives
        num_columns = sum(leaf.num_components for leaf in d.inputs)
        held = max(1, self.sweep.max_memory // (_ARRAYS_HELD * _DOUBLE_BYTES * max(num_columns, 1)))
        pairs: list[Pair] = []
        for basis in bases(d.outputs):
            for start in range(0, basis.size, held):
                part = range(start, min(start + held, basis.size))
                analytic = self.rows_of(pullback, basis, part)
                numeric, errors = self.differences_of(basis, part)
                found = [self._estimated(*block) for block in zip(analytic, numeric, errors, strict=True)]
                pairs += _pairs(basis, found, Pair, start)
        return _merged(pairs)

    def rows_of(self, pullback: Pullback, basis: Basis, which: Sequence[int]) -> list[Any]:
        """Rows of the Jacobian as they are: for each input an array of (rows, size)."""
        return self.sweep.over(basis, _Rows(self.sweep.engine, pullback, basis), [pullback], which)

    def columns_of(self, pushforward: Pushforward, basis: Basis, which: Sequence[int]) -> list[Any]:
        """Columns of the Jacobian as they are: for each output an array of (columns, size)."""
        return self.sweep.over(basis, _Columns(self.sweep.engine, pushforward, basis), [pushforward], which)

    def difference_columns_of(self, basis: Basis, which: Sequence[int] | None = None) -> tuple[list[Any], list[Any]]:
        """Finite differences and their errors: for each output an array of (columns, size)."""
        measured = self.derivatives.measured
        compute = _DifferenceColumns(self.sweep.engine, measured, basis, self.step)
        values, errors = self.sweep.over(basis, compute, [measured] * 4, which)
        return values, [_bounds(error, floor) for error, floor in zip(errors, self.rounding(), strict=True)]

    @cached_property
    def _input_bases(self) -> list[Basis]:
        return bases(self.derivatives.inputs)

    def differences_of(self, basis: Basis, which: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Finite differences and their errors in rows, for each input an array of (rows, size)."""
        d = self.derivatives
        values = [np.zeros((len(which), 0)) for _ in d.inputs]
        errors = list(values)
        for inputs in self._input_bases:
            computed = [_turned(arrays, basis, which) for arrays in self.difference_columns_of(inputs)]
            for i in inputs.chosen:
                leaf, offset = d.inputs[i], inputs.offsets[i]
                block = slice(offset, offset + leaf.num_components)
                values[i], errors[i] = (_complex_columns(array[:, block], leaf) for array in computed)
        return values, [abs(error) for error in errors]

    def _judge_precisely(self, computed: Any) -> Any:
        return [
            _count(analytic, reference, self.tolerance.precise(reference, abs(reference).max(initial=0.0)))
            for analytic, reference in zip(*computed, strict=True)
        ]

    def _estimated(self, analytic: Any, numeric: Any, error: Any) -> Any:
        scale = abs(numeric).max(initial=0.0)
        return _count(analytic, numeric, self.tolerance.estimated(numeric, scale, error))

    def rounding(self) -> list[Any]:
        """What rounding of the outputs does to finite differences, for each output an array."""
        return rounding_of_differences(self.outputs, self.tolerance.precision, self.step)


def _bounds(error: Any, floor: Any) -> Any:
    """What the errors are at most, the real and the imaginary parts' apart."""
    bound = SAFETY * abs(error.real) + floor
    return bound + 1j * (SAFETY * abs(error.imag) + floor) if np.iscomplexobj(error) else bound


def _turned(columns: Sequence[Any], basis: Basis, which: Sequence[int]) -> Any:
    """Columns as an array of some of the rows of `basis`."""
    parts = [real_components(columns[i]) for i in basis.chosen]
    return np.concatenate(parts, axis=1)[:, which].T


def real_components(columns: Any) -> Any:
    """Complex columns as real ones: all real parts, then all imaginary parts."""
    return np.concatenate([columns.real, columns.imag], axis=1) if np.iscomplexobj(columns) else columns


def _complex_columns(array: Any, leaf: Leaf) -> Any:
    """Real components of an input side by side, as the rows' complex entries."""
    return array[:, : leaf.size] + 1j * array[:, leaf.size :] if leaf.is_complex else array


@computation("pullback")
@dataclass(frozen=True)
class _Rows:
    engine: Engine
    pullback: Pullback
    basis: Basis

    def __call__(self, xs: Any, numbers: Any) -> Any:
        return rows(self.engine, self.pullback, xs, self.basis, self.basis.vectors(numbers))


@computation("pushforward")
@dataclass(frozen=True)
class _Columns:
    engine: Engine
    pushforward: Pushforward
    basis: Basis

    def __call__(self, xs: Any, numbers: Any) -> Any:
        return columns(self.engine, self.pushforward, xs, self.basis, self.basis.vectors(numbers))


@computation("measured")
@dataclass(frozen=True)
class _CentralColumns:
    engine: Engine
    measured: OfLeaves
    basis: Basis
    step: float

    def __call__(self, xs: Any, numbers: Any) -> Any:
        return central_differences(self.engine, self.measured, xs, self.basis, self.basis.vectors(numbers), self.step)


@computation("measured")
@dataclass(frozen=True)
class _DifferenceColumns:
    engine: Engine
    measured: OfLeaves
    basis: Basis
    step: float

    def __call__(self, xs: Any, numbers: Any) -> Any:
        vectors = self.basis.vectors(numbers)
        return tuple(richardson_differences(self.engine, self.measured, xs, self.basis, vectors, self.step))


@computation("parts")
@dataclass(frozen=True)
class _Each:
    """The results of several computations."""

    parts: tuple[Callable[..., Any], ...]

    def __call__(self, xs: Any, numbers: Any) -> Any:
        return [part(xs, numbers) for part in self.parts]


def _turned_pair(input: int, output: int) -> Pair:
    return Pair(output, input)


def _width(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.num_components for leaf in leaves)


def _count(analytic: Any, reference: Any, tolerance: Any) -> Any:
    """How many entries of each row are off; what is not a number is."""
    return (~((abs(analytic - reference) <= tolerance) | (analytic == reference))).sum(axis=1)


def _pairs(basis: Basis, found: Sequence[Any], make: Callable[[int, int], Pair], start: int = 0) -> list[Pair]:
    """The pairs of leaves with mismatches; `found` has, for each other leaf, the counts."""
    pairs: list[Pair] = []
    for other, counts in enumerate(found):
        for chosen in basis.chosen:
            offset, size = basis.offsets[chosen] - start, basis.leaves[chosen].num_components
            begin, end = max(offset, 0), max(offset + size, 0)
            if not counts[begin:end].any():
                continue
            pair = make(chosen, other)
            pair.count = int(counts[begin:end].sum())
            order = np.argsort(-counts[begin:end], kind="stable")[:_WORST_KEPT]
            pair.worst = [int(begin + i - offset) for i in order if counts[begin + i]]
            pairs.append(pair)
    return pairs


def _merged(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair for each output and input, where blocks of rows found several."""
    merged: dict[tuple[int, int], Pair] = {}
    for pair in pairs:
        known = merged.setdefault((pair.output, pair.input), Pair(pair.output, pair.input))
        known.count += pair.count
        known.worst = (known.worst + pair.worst)[:_WORST_KEPT]
    return list(merged.values())
