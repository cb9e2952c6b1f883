"""Diagnosis of wrong blocks of the Jacobian: the worst entries, their values, and the kind of mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxfn._check.closeness import excess
from jaxfn._gradcheck.compare import Comparison, JacobianBlock, Reference
from jaxfn._gradcheck.evaluation.vectors import Basis, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.report.kinds import KINK, mismatch_kind
from jaxfn._gradcheck.report.report import JacobianEntry, Mismatch

_DENSE = 1 << 16  # a Jacobian of up to this many entries is computed as a whole
_ASIDE = 1e-4  # relative step away from a kink
_BETWEEN = 0.01  # slack, relative to the difference of both sides
_SHOWN = 5
_BLOCKS_SHOWN = 8


@dataclass
class BlockValues:
    """Some entries of the derivative of one output with respect to one input, of shape (outputs, inputs)."""

    # rows, columns: the components of the output and the elements of the input (in forward mode: the elements of the
    # output and the components of the input)
    rows: Sequence[int]
    columns: Sequence[int]
    analytic: Any  # analytic, numeric, autodiff: the values; `None` for a reference that was not computed
    numeric: Any
    autodiff: Any
    tolerances: Any  # the tolerance of `analytic`


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of wrong blocks of the Jacobian."""

    comparison: Comparison  # the comparison that found them, along unit vectors
    by: Reference  # what it compared with
    with_differences: bool  # whether to compute finite differences

    @property
    def mode(self) -> ADMode:
        """The mode of differentiation."""
        return self.by.mode

    def mismatches(self, blocks: Sequence[JacobianBlock]) -> list[Mismatch]:
        """Returns a mismatch for each block, the first few in detail."""
        shown = [self._described(block, self._worst_values(block)) for block in blocks[:_BLOCKS_SHOWN]]
        return [*shown, *map(self.named, blocks[_BLOCKS_SHOWN:])]

    def whole(self, block: JacobianBlock) -> Mismatch | None:
        """Computes a block that projections have shown to be wrong, and returns its mismatch, if it has one."""
        values = self._values(block, *self._ranges(block), self.with_differences)
        block.count = int((self._excesses(values) > 1).sum())
        return self._described(block, values) if block.count else None

    def named(self, block: JacobianBlock) -> Mismatch:
        """Returns a mismatch without details."""
        output, input = self._leaves(block)
        num_rows, num_columns = map(len, self._ranges(block))
        return Mismatch(
            mode="forward" if self.mode.is_forward else "reverse",
            output=output.name,
            input=input.name,
            output_shape=output.shape,
            input_shape=input.shape,
            count=block.count,
            total=num_rows * num_columns,
        )

    def _described(self, block: JacobianBlock, values: BlockValues) -> Mismatch:
        mismatch = self.named(block)
        excesses = self._excesses(values)
        mismatch.entries = [self._entry(block, values, i, j) for i, j in _worst(excesses) if excesses[i, j] > 1]
        if values.analytic.size == mismatch.total:
            reference = self._reference(values)
            shapes = mismatch.output_shape, mismatch.input_shape
            mesh_axes = self.comparison.derivatives.mesh_axes
            mismatch.mistake = (self._is_kink(block, values) and KINK) or mismatch_kind(
                values.analytic, reference, *shapes, mesh_axes, is_forward=self.mode.is_forward
            )
            matrices = {"analytic": values.analytic, "numeric": values.numeric, "autodiff": values.autodiff}
            mismatch.matrices = {name: matrix for name, matrix in matrices.items() if matrix is not None}
        return mismatch

    def _is_kink(self, block: JacobianBlock, values: BlockValues) -> bool:
        """Whether the rule is right on two opposite sides, and its wrong values are between those of both sides."""
        wrong, references = self._excesses(values) > 1, list[Any]()
        if np.iscomplexobj(values.analytic) or not np.isfinite(values.analytic).all():
            return False
        evaluator = self.comparison.evaluator
        for sign in (1, -1):
            step = [sign * _ASIDE * (1 + abs(np.asarray(x))) for x in evaluator.xs]
            vectors = random_vectors(self.comparison.derivatives.inputs, 0)
            moved = [np.asarray(x) + s * v for x, s, v in zip(evaluator.xs, step, vectors, strict=True)]
            there = replace(self, comparison=replace(self.comparison, evaluator=evaluator.at(moved)))
            aside = there._values(block, values.rows, values.columns, with_differences=False)
            if (there._excesses(aside) > 1).any():
                return False
            references.append(self._reference(aside))
        low, high = np.minimum(*references), np.maximum(*references)
        slack = _BETWEEN * (high - low)
        is_between = (values.analytic >= low - slack) & (values.analytic <= high + slack)
        return bool((is_between & (slack > values.tolerances))[wrong].all())

    def _entry(self, block: JacobianBlock, values: BlockValues, i: int, j: int) -> JacobianEntry:
        output, input = self._leaves(block)
        output_index, part_of_output = output.locate(values.rows[i])
        input_index, part_of_input = input.locate(values.columns[j])
        value, expected = values.analytic[i, j].item(), self._reference(values)[i, j].item()
        numeric, autodiff = (None if m is None else m[i, j].item() for m in (values.numeric, values.autodiff))
        return JacobianEntry(
            output_index,
            value,
            expected,
            abs(value - expected),
            float(values.tolerances[i, j]),
            input_index,
            part_of_input if self.mode.is_forward else part_of_output,
            numeric,
            autodiff,
        )

    def _reference(self, values: BlockValues) -> Any:
        return values.autodiff if self.by.is_autodiff else values.numeric

    def _excesses(self, values: BlockValues) -> Any:
        return excess(values.analytic, self._reference(values), values.tolerances)

    def _leaves(self, block: JacobianBlock) -> tuple[Leaf, Leaf]:
        d = self.comparison.derivatives
        return d.outputs[block.output], d.inputs[block.input]

    def _ranges(self, block: JacobianBlock) -> tuple[range, range]:
        output, input = self._leaves(block)
        if self.mode.is_forward:
            return range(output.size), range(input.num_components)
        return range(output.num_components), range(input.size)

    def _worst_values(self, block: JacobianBlock) -> BlockValues:
        """Returns the values of a whole block if it is small, otherwise those of its worst entries."""
        rows, columns = self._ranges(block)
        if len(rows) * len(columns) <= _DENSE:
            return self._values(block, rows, columns, self.with_differences)
        some_rows, some_columns = (rows, block.worst) if self.mode.is_forward else (block.worst, columns)
        values = self._values(block, some_rows, some_columns, with_differences=False)
        indices = _worst(self._excesses(values))
        worst_rows = sorted({some_rows[i] for i, _ in indices})
        worst_columns = sorted({some_columns[j] for _, j in indices})
        return self._values(block, worst_rows, worst_columns, self.with_differences)

    def _values(
        self, block: JacobianBlock, rows: Sequence[int], columns: Sequence[int], with_differences: bool
    ) -> BlockValues:
        """Computes entries by the rule, by the reference that decides, and by the other one if it is to be shown."""
        d = self.mode
        seed, result = (block.input, block.output) if d.is_forward else (block.output, block.input)
        basis = Basis(d.seed_leaves, (seed,))
        which, others = (columns, rows) if d.is_forward else (rows, columns)

        def entries_of(arrays: Any) -> Any:
            """Selects entries from the results for all leaves, in shape (outputs, inputs)."""
            entries = arrays[result][:, others]
            return entries.T if d.is_forward else entries

        comparison = self.comparison
        compared = zip(*comparison.entries(self.by, basis, which), strict=True)
        analytic, numeric, tolerances = map(entries_of, compared)
        autodiff = None
        if self.by.is_autodiff:
            autodiff = numeric
            numeric = entries_of(comparison.differences(d, basis, which)[0]) if with_differences else None
        elif d.has_reference:
            autodiff = entries_of(comparison.values(available(d.reference), basis, which))
        return BlockValues(rows, columns, analytic, numeric, autodiff, tolerances)


def _worst(excesses: Any) -> list[tuple[int, int]]:
    """Returns the indices of the largest few, the largest first."""
    order = np.argsort(-excesses, axis=None, kind="stable")[:_SHOWN]
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, excesses.shape), strict=True)]
