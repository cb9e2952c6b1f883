"""From "somewhere in this block" to entries, values and a guess at the mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxfn._gradcheck._compare import Comparison, Pair, real_components
from jaxfn._gradcheck._derivatives import Unavailable
from jaxfn._gradcheck._jacobian import Basis
from jaxfn._gradcheck._kinds import kind_of
from jaxfn._gradcheck._report import Entry, Mismatch
from jaxfn._gradcheck._tolerance import excess

_DENSE = 1 << 16  # a Jacobian of up to so many entries is looked at whole
_SHOWN = 5
_PAIRS_SHOWN = 8
_REPEATS = 3
_LAST_DIGITS = 4  # how far inputs move to see what rounding does, in units of their last digits
_STEADY = 4  # a real mistake moves less than a fraction of itself


@dataclass
class Block:
    """Some entries of the derivative of one output with respect to one input, as (outputs, inputs).

    Attributes:
      rows, columns: which components of the output and which elements of the input (in forward mode: which elements and
        which components).
      analytic, numeric, autodiff: the values; the latter two where there are any.
      errors: of the numeric ones.
    """

    rows: Sequence[int]
    columns: Sequence[int]
    analytic: Any
    numeric: Any | None
    errors: Any | None
    autodiff: Any | None


@dataclass(frozen=True)
class Diagnosis:
    """Looks into pairs of leaves that do not match.

    Attributes:
      comparison: what found them.
      is_forward: whether it is forward mode that was checked.
      decider: "autodiff" or "numeric": which reference the values are held against.
      with_differences: whether finite differences are wanted at all.
    """

    comparison: Comparison
    is_forward: bool
    decider: str
    with_differences: bool

    def mismatches(self, pairs: Sequence[Pair]) -> list[Mismatch]:
        """One for each pair that is not rounding alone; the first few in detail."""
        found: list[Mismatch] = []
        for pair in pairs:
            if len(found) < _PAIRS_SHOWN:
                block = self._block(pair)
                excesses = self._excesses(block)
                if self._is_rounding(pair, block, excesses):
                    continue
                found.append(self._described(pair, block, excesses))
            else:
                found.append(self.named(pair))
        return found

    def whole(self, pair: Pair) -> Mismatch:
        """A pair that only projections have shown to be wrong: its Jacobian is computed after all."""
        block = self._all(pair)
        excesses = self._excesses(block)
        pair.count = int((excesses > 1).sum())
        return self._described(pair, block, excesses) if pair.count else self.named(pair)

    def named(self, pair: Pair) -> Mismatch:
        d = self.comparison.derivatives
        output, input = d.outputs[pair.output], d.inputs[pair.input]
        num_rows, num_columns = map(len, self._ranges(pair))
        check = "forward mode" if self.is_forward else "backward"
        return Mismatch(check, output.name, input.name, output.shape, input.shape, pair.count, num_rows * num_columns)

    def _described(self, pair: Pair, block: Block, excesses: Any) -> Mismatch:
        mismatch = self.named(pair)
        order = np.argsort(-excesses, axis=None, kind="stable")[:_SHOWN]
        places = [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, excesses.shape), strict=True)]
        mismatch.entries = [self._entry(pair, block, i, j) for i, j in places if excesses[i, j] > 1]
        reference = self._reference(block)
        if block.analytic.size == mismatch.total:
            mismatch.kind = kind_of(block.analytic, reference, mismatch.output_shape, mismatch.input_shape)
            matrices = {"analytic": block.analytic, "numeric": block.numeric, "autodiff": block.autodiff}
            mismatch.matrices = {name: m for name, m in matrices.items() if m is not None}
        return mismatch

    def _entry(self, pair: Pair, block: Block, i: int, j: int) -> Entry:
        d = self.comparison.derivatives
        output_index, part_of_output = d.outputs[pair.output].locate(block.rows[i])
        input_index, part_of_input = d.inputs[pair.input].locate(block.columns[j])
        analytic = block.analytic[i, j].item()
        numeric, autodiff = (None if m is None else m[i, j].item() for m in (block.numeric, block.autodiff))
        reference = autodiff if self.decider == "autodiff" else numeric
        error = abs(analytic - reference)
        return Entry(
            output_index=output_index,
            input_index=input_index,
            part=part_of_input if self.is_forward else part_of_output,
            analytic=analytic,
            numeric=numeric,
            autodiff=autodiff,
            absolute_error=error,
            relative_error=error / abs(reference) if reference else float("inf"),
            tolerance=float(self._tolerances(block)[i, j]),
        )

    def _reference(self, block: Block) -> Any:
        return block.autodiff if self.decider == "autodiff" else block.numeric

    def _tolerances(self, block: Block) -> Any:
        tolerance, reference = self.comparison.tolerance, self._reference(block)
        scale = np.max(abs(reference), initial=0.0)
        if self.decider == "autodiff":
            return tolerance.precise(reference, scale)
        return tolerance.estimated(reference, scale, block.errors)

    def _excesses(self, block: Block) -> Any:
        reference = self._reference(block)
        return excess(block.analytic, reference, self._tolerances(block))

    def _is_rounding(self, pair: Pair, block: Block, excesses: Any) -> bool:
        """Whether the worst differences are as unsteady as rounding is when the inputs change in their last digits."""
        tolerance = self.comparison.tolerance
        reference = self._reference(block)
        difference = block.analytic - reference
        if not tolerance.is_tight or not (abs(difference) <= tolerance.plain(reference)).all():
            return False
        moved = [self._nudged(seed)._again(pair, block) for seed in range(_REPEATS)]
        change = np.max([abs(m - difference) for m in moved], axis=0)
        return bool((_STEADY * change >= abs(difference))[excesses > 1].all())

    def _nudged(self, seed: int) -> Diagnosis:
        """The same a few last digits away."""
        generator = np.random.default_rng(seed)
        sweep = self.comparison.sweep
        xs = [
            x * (1 + _LAST_DIGITS * np.finfo(np.float64).eps * generator.integers(-1, 2, x.shape))
            for x in map(np.asarray, sweep.xs)
        ]
        return replace(self, comparison=replace(self.comparison, sweep=sweep.at(xs)))

    def _again(self, pair: Pair, block: Block) -> Any:
        """The differences of the same entries."""
        again = self._values(pair, block.rows, block.columns, self.decider == "numeric")
        return again.analytic - self._reference(again)

    def _block(self, pair: Pair) -> Block:
        """The whole Jacobian where it is small, otherwise the worst entries."""
        rows, columns = self._ranges(pair)
        if len(rows) * len(columns) <= _DENSE:
            return self._all(pair)
        some_rows, some_columns = (rows, pair.worst) if self.is_forward else (pair.worst, columns)
        block = self._values(pair, some_rows, some_columns, self.decider == "numeric")
        worst = np.argsort(-self._excesses(block), axis=None, kind="stable")[:_SHOWN]
        i, j = (np.unique(places) for places in np.unravel_index(worst, block.analytic.shape))
        worst_rows, worst_columns = [some_rows[k] for k in i], [some_columns[k] for k in j]
        return self._values(pair, worst_rows, worst_columns, self.with_differences)

    def _all(self, pair: Pair) -> Block:
        rows, columns = self._ranges(pair)
        return self._values(pair, rows, columns, self.with_differences)

    def _ranges(self, pair: Pair) -> tuple[range, range]:
        d = self.comparison.derivatives
        output, input = d.outputs[pair.output], d.inputs[pair.input]
        if self.is_forward:
            return range(output.size), range(input.num_components)
        return range(output.num_components), range(input.size)

    def _values(self, pair: Pair, rows: Sequence[int], columns: Sequence[int], with_differences: bool) -> Block:
        """Entries by every means at hand."""
        c, d = self.comparison, self.comparison.derivatives
        outputs, inputs = Basis(d.outputs, [pair.output]), Basis(d.inputs, [pair.input])
        numeric = errors = None
        if self.is_forward:
            analytic, autodiff = (
                None if isinstance(p, Unavailable) else c.columns_of(p, inputs, columns)[pair.output].T[rows]
                for p in (d.pushforward, d.reference_pushforward)
            )
            if with_differences:
                computed = c.difference_columns_of(inputs, columns)
                numeric, errors = (arrays[pair.output].T[rows] for arrays in computed)
        else:
            analytic, autodiff = (
                None if isinstance(p, Unavailable) else c.rows_of(p, outputs, rows)[pair.input][:, columns]
                for p in (d.pullback, d.reference_pullback)
            )
            if with_differences:
                numeric, errors = self._difference_rows(pair, rows, columns)
        return Block(rows, columns, analytic, numeric, errors, autodiff)

    def _difference_rows(self, pair: Pair, rows: Sequence[int], columns: Sequence[int]) -> tuple[Any, Any]:
        c, d = self.comparison, self.comparison.derivatives
        leaf = d.inputs[pair.input]
        parts = [*columns, *(leaf.size + j for j in columns)] if leaf.is_complex else columns
        computed = c.difference_columns_of(Basis(d.inputs, [pair.input]), parts)
        values, errors = (real_components(arrays[pair.output]).T[rows] for arrays in computed)
        if leaf.is_complex:
            count = len(columns)
            values, errors = (array[:, :count] + 1j * array[:, count:] for array in (values, errors))
        return values, abs(errors)

    def named(self, pair: Pair) -> Mismatch:
        d = self.comparison.derivatives
        output, input = d.outputs[pair.output], d.inputs[pair.input]
        num_rows, num_columns = map(len, self._ranges(pair))
        check = "forward mode" if self.is_forward else "backward"
        return Mismatch(check, output.name, input.name, output.shape, input.shape, pair.count, num_rows * num_columns)

    def _described(self, pair: Pair, block: Block, excesses: Any) -> Mismatch:
        mismatch = self.named(pair)
        order = np.argsort(-excesses, axis=None, kind="stable")[:_SHOWN]
        places = [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, excesses.shape), strict=True)]
        mismatch.entries = [self._entry(pair, block, i, j) for i, j in places if excesses[i, j] > 1]
        reference = self._reference(block)
        if block.analytic.size == mismatch.total:
            mismatch.kind = kind_of(block.analytic, reference, mismatch.output_shape, mismatch.input_shape)
            matrices = {"analytic": block.analytic, "numeric": block.numeric, "autodiff": block.autodiff}
            mismatch.matrices = {name: m for name, m in matrices.items() if m is not None}
        return mismatch

    def _entry(self, pair: Pair, block: Block, i: int, j: int) -> Entry:
        d = self.comparison.derivatives
        output_index, part_of_output = d.outputs[pair.output].locate(block.rows[i])
        input_index, part_of_input = d.inputs[pair.input].locate(block.columns[j])
        analytic = block.analytic[i, j].item()
        numeric, autodiff = (None if m is None else m[i, j].item() for m in (block.numeric, block.autodiff))
        reference = autodiff if self.decider == "autodiff" else numeric
        error = abs(analytic - reference)
        return Entry(
            output_index=output_index,
            input_index=input_index,
            part=part_of_input if self.is_forward else part_of_output,
            analytic=analytic,
            numeric=numeric,
            autodiff=autodiff,
            absolute_error=error,
            relative_error=error / abs(reference) if reference else float("inf"),
            tolerance=float(self._tolerances(block)[i, j]),
        )

    def _reference(self, block: Block) -> Any:
        return block.autodiff if self.decider == "autodiff" else block.numeric

    def _tolerances(self, block: Block) -> Any:
        tolerance, reference = self.comparison.tolerance, self._reference(block)
        scale = np.max(abs(reference), initial=0.0)
        if self.decider == "autodiff":
            return tolerance.precise(reference, scale)
        return tolerance.estimated(reference, scale, block.errors)

    def _excesses(self, block: Block) -> Any:
        reference = self._reference(block)
        return excess(block.analytic, reference, self._tolerances(block))

    def _is_rounding(self, pair: Pair, block: Block, excesses: Any) -> bool:
        """Whether the worst differences are as unsteady as rounding is when the inputs change in their last digits."""
        tolerance = self.comparison.tolerance
        reference = self._reference(block)
        difference = block.analytic - reference
        if not tolerance.is_tight or not (abs(difference) <= tolerance.plain(reference)).all():
            return False
        moved = [self._nudged(seed)._again(pair, block) for seed in range(_REPEATS)]
        change = np.max([abs(m - difference) for m in moved], axis=0)
        return bool((_STEADY * change >= abs(difference))[excesses > 1].all())

    def _nudged(self, seed: int) -> Diagnosis:
        """The same a few last digits away."""
        generator = np.random.default_rng(seed)
        sweep = self.comparison.sweep
        xs = [
            x * (1 + _LAST_DIGITS * np.finfo(np.float64).eps * generator.integers(-1, 2, x.shape))
            for x in map(np.asarray, sweep.xs)
        ]
        return replace(self, comparison=replace(self.comparison, sweep=sweep.at(xs)))

    def _again(self, pair: Pair, block: Block) -> Any:
        """The differences of the same entries."""
        again = self._values(pair, block.rows, block.columns, self.decider == "numeric")
        return again.analytic - self._reference(again)
