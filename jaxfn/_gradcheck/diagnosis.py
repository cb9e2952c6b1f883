"""From "somewhere in this block" to entries, values and a guess at the mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxfn._gradcheck.compare import Comparison, Pair
from jaxfn._gradcheck.numbers.vectors import Basis
from jaxfn._gradcheck.problem.derivatives import Direction, UnavailableError
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.report.kinds import kind_of
from jaxfn._gradcheck.report.report import Entry, Mismatch
from jaxfn._gradcheck.tolerance import excess

_DENSE = 1 << 16  # a Jacobian of up to so many entries is looked at whole
_SHOWN = 5
_PAIRS_SHOWN = 8
_REPEATS = 3
_LAST_DIGITS = 4  # how far inputs move to see what rounding does, in units of their last digits
_STEADY = 4  # a real mistake moves by less than this fraction of itself


@dataclass
class Block:
    """Some entries of the derivative of one output with respect to one input, as (outputs, inputs).

    Attributes:
      rows, columns: which components of the output and which elements of the input (in forward mode: which elements of
        the output and which components of the input).
      analytic, numeric, autodiff: the values; the latter two where there are any.
      errors: of the numeric ones.
    """

    rows: Sequence[int]
    columns: Sequence[int]
    analytic: Any
    numeric: Any
    errors: Any
    autodiff: Any


@dataclass(frozen=True)
class Diagnosis:
    """Looks into pairs of leaves that do not match.

    Attributes:
      by_autodiff: whether autodiff decides, and not finite differences.
      with_differences: whether finite differences are wanted at all.
    """

    comparison: Comparison
    direction: Direction
    by_autodiff: bool
    with_differences: bool

    def mismatches(self, pairs: Sequence[Pair]) -> list[Mismatch]:
        """One for each pair that is not rounding alone; the first few in detail."""
        found: list[Mismatch] = []
        for pair in pairs:
            if len(found) >= _PAIRS_SHOWN:
                found.append(self.named(pair))
                continue
            block = self._block(pair)
            if not self._is_rounding(pair, block):
                found.append(self._described(pair, block))
        return found

    def whole(self, pair: Pair) -> Mismatch | None:
        """A pair that projections have shown to be wrong: its Jacobian is computed after all, and decides."""
        block = self._values(pair, *self._ranges(pair), self.with_differences)
        pair.count = int((self._excesses(block) > 1).sum())
        return None if not pair.count or self._is_rounding(pair, block) else self._described(pair, block)

    def named(self, pair: Pair) -> Mismatch:
        """A mismatch without details."""
        output, input = self._leaves(pair)
        num_rows, num_columns = map(len, self._ranges(pair))
        return Mismatch(
            check=self.direction.name,
            output=output.name,
            input=input.name,
            output_shape=output.shape,
            input_shape=input.shape,
            count=pair.count,
            total=num_rows * num_columns,
        )

    def _described(self, pair: Pair, block: Block) -> Mismatch:
        mismatch = self.named(pair)
        excesses, tolerances = self._excesses(block), self._tolerances(block)
        for i, j in _worst(excesses):
            if excesses[i, j] > 1:
                mismatch.entries.append(self._entry(pair, block, i, j, float(tolerances[i, j])))
        if block.analytic.size == mismatch.total:
            reference = self._reference(block)
            shapes = mismatch.output_shape, mismatch.input_shape
            mesh_axes = self.comparison.derivatives.mesh_axes
            mismatch.kind = kind_of(block.analytic, reference, *shapes, mesh_axes)
            matrices = {"analytic": block.analytic, "numeric": block.numeric, "autodiff": block.autodiff}
            mismatch.matrices = {name: matrix for name, matrix in matrices.items() if matrix is not None}
        return mismatch

    def _entry(self, pair: Pair, block: Block, i: int, j: int, tolerance: float) -> Entry:
        output, input = self._leaves(pair)
        output_index, part_of_output = output.locate(block.rows[i])
        input_index, part_of_input = input.locate(block.columns[j])
        analytic = block.analytic[i, j].item()
        reference = self._reference(block)[i, j].item()
        numeric, autodiff = (None if m is None else m[i, j].item() for m in (block.numeric, block.autodiff))
        error = abs(analytic - reference)
        return Entry(
            output_index=output_index,
            input_index=input_index,
            part=part_of_input if self.direction.is_forward else part_of_output,
            analytic=analytic,
            numeric=numeric,
            autodiff=autodiff,
            absolute_error=error,
            relative_error=error / abs(reference) if reference else float("inf"),
            tolerance=tolerance,
        )

    def _is_rounding(self, pair: Pair, block: Block) -> bool:
        """Whether the differences are as unsteady as rounding is when the inputs change in their last digits."""
        tolerance = self.comparison.tolerance
        reference = self._reference(block)
        difference = block.analytic - reference
        wrong = self._excesses(block) > 1
        if not tolerance.is_tight or not (abs(difference) <= tolerance.plain(reference))[wrong].all():
            return False
        change = np.max([abs(self._nudged(seed).again(pair, block) - difference) for seed in range(_REPEATS)], axis=0)
        return bool((_STEADY * change >= abs(difference))[wrong].all())

    def _nudged(self, seed: int) -> Diagnosis:
        """A diagnosis of the same comparison, for inputs that are a few last digits away."""
        generator = np.random.default_rng(seed)
        sweep = self.comparison.sweep
        size = _LAST_DIGITS * np.finfo(np.float64).eps
        xs = [np.asarray(x) * (1 + size * generator.integers(-1, 2, x.shape)) for x in sweep.xs]
        return replace(self, comparison=replace(self.comparison, sweep=sweep.at(xs)))

    def again(self, pair: Pair, block: Block) -> Any:
        """Returns the errors of the entries of a block at this point."""
        values = self._values(pair, block.rows, block.columns, not self.by_autodiff)
        return values.analytic - self._reference(values)

    def _reference(self, block: Block) -> Any:
        return block.autodiff if self.by_autodiff else block.numeric

    def _tolerances(self, block: Block) -> Any:
        tolerance, reference = self.comparison.tolerance, self._reference(block)
        scale = abs(reference).max(initial=0.0)
        if self.by_autodiff:
            return tolerance.precise(reference, scale)
        return tolerance.estimated(reference, scale, block.errors)

    def _excesses(self, block: Block) -> Any:
        return excess(block.analytic, self._reference(block), self._tolerances(block))

    def _leaves(self, pair: Pair) -> tuple[Leaf, Leaf]:
        d = self.comparison.derivatives
        return d.outputs[pair.output], d.inputs[pair.input]

    def _ranges(self, pair: Pair) -> tuple[range, range]:
        output, input = self._leaves(pair)
        if self.direction.is_forward:
            return range(output.size), range(input.num_components)
        return range(output.num_components), range(input.size)

    def _block(self, pair: Pair) -> Block:
        """The whole Jacobian where it is small, otherwise the worst entries."""
        rows, columns = self._ranges(pair)
        if len(rows) * len(columns) <= _DENSE:
            return self._values(pair, rows, columns, self.with_differences)
        some_rows, some_columns = (rows, pair.worst) if self.direction.is_forward else (pair.worst, columns)
        block = self._values(pair, some_rows, some_columns, not self.by_autodiff)
        places = _worst(self._excesses(block))
        worst_rows = sorted({some_rows[i] for i, _ in places})
        worst_columns = sorted({some_columns[j] for _, j in places})
        return self._values(pair, worst_rows, worst_columns, self.with_differences)

    def _values(self, pair: Pair, rows: Sequence[int], columns: Sequence[int], with_differences: bool) -> Block:
        """Entries by every means at hand."""
        d = self.direction
        varied, returned = (pair.input, pair.output) if d.is_forward else (pair.output, pair.input)
        basis = Basis(d.varied, (varied,))
        which, others = (columns, rows) if d.is_forward else (rows, columns)

        def block(arrays: Any) -> Any:
            """From vectors and what they give to (outputs, inputs)."""
            entries = arrays[returned][:, others]
            return entries.T if d.is_forward else entries

        analytic, autodiff = (
            None if isinstance(f, UnavailableError) else block(self.comparison.values(f, basis, which))
            for f in (d.rule, d.reference)
        )
        numeric = errors = None
        if with_differences:
            numeric, errors = map(block, self.comparison.differences(d, basis, which))
        return Block(rows, columns, analytic, numeric, errors, autodiff)


def _worst(excesses: Any) -> list[tuple[int, int]]:
    """Returns the indices of the largest few, the largest first."""
    order = np.argsort(-excesses, axis=None, kind="stable")[:_SHOWN]
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, excesses.shape), strict=True)]
