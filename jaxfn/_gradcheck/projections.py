"""Fast mode: a few random projections of the Jacobian in place of all of its entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxfn._gradcheck.compare import Comparison, Pair
from jaxfn._gradcheck.derivatives import UnavailableError
from jaxfn._gradcheck.directions import random_vectors
from jaxfn._gradcheck.jacobian import Basis, columns, richardson_differences, rows
from jaxfn._gradcheck.problem import Leaf
from jaxfn._gradcheck.tolerance import SAFETY, excess

PROJECTIONS = 2  # for each output and each input


class Projections:
    """Random projections of every output and every input, by every means at hand.

    Args:
      comparison: of what.
      reverse, forward: which modes of the function's own are wanted.
    """

    def __init__(self, comparison: Comparison, *, reverse: bool, forward: bool) -> None:
        self._comparison = comparison
        d = comparison.derivatives
        engine, step = comparison.sweep.engine, comparison.step
        outputs = [i for i, leaf in enumerate(d.outputs) if leaf.size]
        inputs = [j for j, leaf in enumerate(d.inputs) if leaf.size]
        self.of_outputs = {i: _unit_vectors(d.outputs[i], 10 + i) for i in outputs}
        self.of_inputs = {j: _unit_vectors(d.inputs[j], 1000 + j) for j in inputs}

        def run(xs: Any, of_outputs: Any, of_inputs: Any) -> dict[str, Any]:
            found: dict[str, Any] = {"analytic": {}, "autodiff": {}, "differences": {}, "jvp": {}, "autodiff jvp": {}}
            for i, v in of_outputs.items():
                for name, pullback in (("analytic", d.pullback), ("autodiff", d.reference_pullback)):
                    if reverse and not isinstance(pullback, UnavailableError):
                        found[name][i] = rows(engine, pullback, xs, Basis(d.outputs, (i,)), [v])
            for j, u in of_inputs.items():
                basis = Basis(d.inputs, (j,))
                found["differences"][j] = tuple(richardson_differences(engine, d.measured, xs, basis, [u], step))
                for name, pushforward in (("jvp", d.pushforward), ("autodiff jvp", d.reference_pushforward)):
                    if not isinstance(pushforward, UnavailableError) and (forward or name != "jvp"):
                        found[name][j] = columns(engine, pushforward, xs, basis, [u])
            return found

        program = engine.program(run, comparison.sweep.xs, self.of_outputs, self.of_inputs)
        results = program(comparison.sweep.xs, self.of_outputs, self.of_inputs)
        self.results: dict[str, Any] = jax.tree.map(np.asarray, results)

    def rows_with_autodiff(self) -> list[Pair]:
        """`v^T J` by the rule and by autodiff, entry by entry."""
        return self._entries("analytic", "autodiff", is_forward=False)

    def columns_with_autodiff(self) -> list[Pair]:
        """`J u` by the function's forward mode and by autodiff, entry by entry."""
        return self._entries("jvp", "autodiff jvp", is_forward=True)

    def columns_with_differences(self, name: str) -> list[Pair]:
        """`J u` by some forward mode and by plain finite differences, entry by entry."""
        return self._columns(name, lambda numeric, error: self._comparison.tolerance.coarse(numeric, error))

    def columns_estimated(self, name: str) -> list[Pair]:
        """`columns_with_differences`, held as close as the differences' estimated errors allow."""

        def bound(numeric: Any, error: Any) -> Any:
            return self._comparison.tolerance.estimated(numeric, abs(numeric).max(initial=0.0), error)

        return self._columns(name, bound)

    def _columns(self, name: str, bound: Callable[[Any, Any], Any]) -> list[Pair]:
        pairs: list[Pair] = []
        for j, given in self.results[name].items():
            values, errors = self.results["differences"][j]
            for i, (g, n, error) in enumerate(zip(given, values, errors, strict=True)):
                pairs += _pair(Pair(i, j), excess(g, n, bound(n, SAFETY * abs(error) + self._rounding(i))))
        return pairs

    def scalars_with_differences(self, name: str) -> list[Pair]:
        """`v^T J u` by some reverse mode and by finite differences."""
        pairs: list[Pair] = []
        for i, given in self.results[name].items():
            v = self.of_outputs[i].reshape(PROJECTIONS, -1)
            for j, u in self.of_inputs.items():
                analytic = (given[j].conj() @ u.reshape(PROJECTIONS, -1).T).real
                values, errors = (columns[i] for columns in self.results["differences"][j])
                numeric = (v.conj() @ values.T).real
                error = abs(v) @ (SAFETY * abs(errors) + self._rounding(i)).T
                sums = np.outer(abs(v).sum(axis=1), abs(u.reshape(PROJECTIONS, -1)).sum(axis=1))
                tolerance = replace(self._comparison.tolerance, atol=self._comparison.tolerance.atol * sums)
                bound = tolerance.estimated(numeric, np.max(abs(numeric), initial=0.0), error)
                pairs += _pair(Pair(i, j), excess(analytic, numeric, bound))
        return pairs

    def _entries(self, name: str, reference: str, *, is_forward: bool) -> list[Pair]:
        pairs: list[Pair] = []
        for chosen, given in self.results[name].items():
            for other, (g, n) in enumerate(zip(given, self.results[reference][chosen], strict=True)):
                bound = self._comparison.tolerance.precise(n, np.max(abs(n), initial=0.0))
                pairs += _pair(Pair(other, chosen) if is_forward else Pair(chosen, other), excess(g, n, bound))
        return pairs

    def _rounding(self, output: int) -> Any:
        return self._comparison.rounding()[output]


def _pair(pair: Pair, excesses: Any) -> list[Pair]:
    pair.count = int((excesses > 1).sum())
    return [pair] if pair.count else []


def _unit_vectors(leaf: Leaf, seed: int) -> Any:
    """Random directions of length one."""
    vectors = np.stack([random_vectors([leaf], seed + 5000 * k)[0] for k in range(PROJECTIONS)])
    norms = np.sqrt((abs(vectors.reshape(PROJECTIONS, -1)) ** 2).sum(axis=1))
    return vectors / norms.reshape(PROJECTIONS, *[1] * len(leaf.shape))
