"""Checks of properties that every correct rule has: linearity, determinism, flags, undefined gradients.

They evaluate a rule a few times along random vectors, before whole Jacobians are compared. In the program that does so,
a small Jacobian is also evaluated, by the rule and by autodiff; if both agree, no further comparison is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.staging import bytes_per_call, is_same_output, stage
from jaxfn._gradcheck.compare import rows_of_columns
from jaxfn._gradcheck.evaluation.batches import BATCH_BYTES, as_rows, differences, points
from jaxfn._gradcheck.evaluation.execution import ExecutionMode
from jaxfn._gradcheck.evaluation.operations import by_operations
from jaxfn._gradcheck.evaluation.vectors import Arrays, Basis, bases, random_vectors
from jaxfn._gradcheck.problem.derivatives import (
    ADMode,
    Derivative,
    Derivatives,
    forward_derivative,
    jacobian_rows,
    restrict_inputs,
    restrict_outputs,
)
from jaxfn._gradcheck.problem.problem import LeafFunction, Problem
from jaxfn._gradcheck.tolerance import Tolerance, are_resolved, excess, largest

_COMBINATION = (2.0, -3.0)
_NUM_VECTORS = 4  # along which every rule is evaluated: two random ones, their combination, zero
_RECOMPILED_RTOL = 1e-13  # the relative difference between two compilations of equal operations
_NUM_SAMPLES = 4  # vectors along which autodiff is compared with finite differences
_SHIFT = 1e-3  # added to the inputs, as some may be zero
_SHIFT_FACTOR = 1.001  # factor of the inputs for a second point, so that the items of a batch are not equal


@dataclass
class Findings:
    """The results of the property checks.

    Attributes:
      problems: the failures, as text.
      batches_wrong: whether batching changes values, so that nothing may be computed in batches.
      autodiff_agrees: whether autodiff of the function without its rule is known to agree with finite differences.
      is_resolved: whether they agree in the first digits of each output, however small.
      matches_autodiff: whether the rule is known to agree with it in every entry.
      is_nan: whether a result is NaN, so that the other properties were not checked.
    """

    problems: list[str] = field(default_factory=list[str])
    batches_wrong: bool = False
    autodiff_agrees: bool = False
    is_resolved: bool = False
    matches_autodiff: bool = False
    is_nan: bool = False

    @property
    def are_complete(self) -> bool:
        """Whether the checks have passed and no further comparison is needed."""
        return not self.problems and self.autodiff_agrees and self.matches_autodiff


@dataclass
class _Variants:
    """Derivatives with one undefined vector, or of one input, by its index; and the problems of computing them."""

    derivatives: dict[int, Derivative] = field(default_factory=dict[int, Derivative])
    problems: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class PropertyChecks:
    """The property checks of one problem in one mode.

    Attributes:
      derivatives: the function and its derivatives.
      mode: the mode of differentiation.
      xs: the point at which to differentiate.
      step: the step of finite differences.
      tolerance: the tolerance for values that should be equal.
      nondet_tol: the largest difference of two evaluations.
      undefined: whether to check undefined vectors, one at a time.
      samples_autodiff: whether to compare autodiff with finite differences along random vectors.
      max_memory: the number of bytes that one batch may use.
    """

    derivatives: Derivatives
    mode: ADMode
    xs: Sequence[Any]
    step: float
    tolerance: Tolerance
    nondet_tol: float
    undefined: bool
    samples_autodiff: bool
    max_memory: int

    def run(self, execution: ExecutionMode) -> Findings:
        """Runs all property checks."""
        d = self.mode
        first, second = random_vectors(d.seed_leaves, 1), random_vectors(d.seed_leaves, 2)
        found = Findings([*self._without_one.problems, *self._with_one_input.problems])
        a, b = _COMBINATION
        mixed = [a * u + b * v for u, v in zip(first, second, strict=True)]
        missing = self._without_one.derivatives
        vectors = [first, second, mixed, list(map(np.zeros_like, first)), *(_without(first, i) for i in missing)]
        results, rerun = self._run_twice(execution, vectors)
        found.autodiff_agrees, found.is_resolved = self._autodiff_agrees(results)
        found.problems += self._is_deterministic(results, rerun)
        if found.problems:
            return found
        found.batches_wrong = execution is ExecutionMode.VECTORIZED and not self._is_batched_right(results)
        found.is_nan = any(np.isnan(array).any() for array in results["batch"])
        if found.batches_wrong or found.is_nan:  # the comparison of Jacobians tells where a derivative is NaN
            return found
        found.problems += self._has_one_value(results)
        found.problems += self._is_linear(results)
        found.problems += self._takes_undefined(results)
        found.problems += self._respects_flags(results)
        tolerance = replace(self.tolerance, least_scale=0.0) if found.is_resolved else self.tolerance
        found.matches_autodiff = self._matches_autodiff(results, tolerance)
        return found

    def _run_twice(self, execution: ExecutionMode, vectors: Sequence[Arrays]) -> list[dict[str, Any]]:
        """Evaluates everything that the checks need, twice, with one executable."""
        d = self.derivatives
        samples = self._samples
        seeds, columns = [basis.arrays() for basis in self._bases] or ([], [])
        xs = list(map(np.asarray, self.xs))
        near = points(xs, samples, self.step) if samples else [np.zeros((0, *x.shape)) for x in xs]
        all_points = [np.concatenate([[x, _SHIFT_FACTOR * x], n]) for x, n in zip(xs, near, strict=True)]
        functions = {
            "primal": d.primal,
            "primal alone": [d.primal] if d.has_unknown_code else [],  # otherwise its batched values are right
            "target": [] if d.target is d.primal else [d.target],
            "autodiff": [d.forward.reference] if samples else [],
            "rule": self.mode.rule,
            "retraced": [] if self.mode.retraced is None else [self.mode.retraced],
            "missing": list(self._without_one.derivatives.values()),
            "alone": list(self._with_one_input.derivatives.values()),
        }
        at_points = execution
        if execution is ExecutionMode.VECTORIZED and len(all_points[0]) * bytes_per_call(d.target) > self.max_memory:
            at_points = ExecutionMode.COMPILED_LOOP

        def run(functions: Any, xs: Arrays, vectors: Arrays, batch: Arrays, points: Arrays, samples: Arrays) -> Any:
            outputs, results = functions["rule"](xs, vectors)
            return {
                "outputs of rule": outputs,
                "results": results,
                "outputs alone": [f(*xs) for f in functions["primal alone"]],
                "results again": [f(xs, vectors)[1] for f in functions["retraced"]],
                "missing": [f(xs, vectors) for f in functions["missing"]],
                "alone": [f(xs, vectors) for f in functions["alone"]],
                "batch": execution.map(partial(_results, functions["rule"], xs), *batch),
                "at points": at_points.map(functions["primal"], *points),
                "target": [at_points.map(f, *points) for f in functions["target"]],
                "autodiff": [execution.map(partial(_results, f, xs), *samples) for f in functions["autodiff"]],
            }

        batch = [np.stack(items) for items in zip(*vectors, strict=True)]
        batch, samples = _appended(batch, seeds), _appended(samples, columns)
        if execution is ExecutionMode.OPERATIONS:
            sizes = [len(arrays[0]) for arrays in (batch, all_points, samples) if arrays]
            functions = by_operations(functions, max(sizes))
        args = functions, list(self.xs), vectors[0], batch, all_points, samples
        executable = execution.prepare(run, *args)
        return [executable.start(*args)() for _ in range(2)]

    def _is_deterministic(self, r: Any, rerun: Any) -> list[str]:
        problems: list[str] = []
        d = self.mode
        if not self._equal(_outputs(r), _outputs(rerun)):
            problems.append("The function is not deterministic: two runs on equal inputs gave different outputs.")
        others = [(rerun["results"], 0.0), *((again, _RECOMPILED_RTOL) for again in r["results again"])]
        if not all(self._equal(r["results"], other, slack) for other, slack in others):
            problems.append(
                f"{d.method} is not deterministic: two runs on equal inputs and {d.seed_name}s gave different "
                f"{d.result_name}s. They may differ by nondet_tol={self.nondet_tol:g}."
            )
        return problems

    def _is_batched_right(self, r: Any) -> bool:
        batches, singles = (*r["batch"], *r["at points"]), (*r["results"], *r["outputs of rule"])
        return all(self.tolerance.agrees(batched[0], single) for batched, single in zip(batches, singles, strict=True))

    def _has_one_value(self, r: Any) -> list[str]:
        return [
            f"{leaf.name} has different values when it is differentiated and when it is not."
            for leaf, a, b in zip(self.derivatives.outputs, r["outputs of rule"], _outputs(r), strict=True)
            if not self.tolerance.agrees(a, b)
        ]

    def _is_linear(self, r: Any) -> list[str]:
        problems: list[str] = []
        d = self.mode
        a, b = _COMBINATION
        for leaf, (u, v, combined, zero, *_) in zip(d.result_leaves, r["batch"], strict=True):
            if not self.tolerance.agrees(combined, a * u + b * v, np.maximum(abs(a * u), abs(b * v))):
                problems.append(
                    f"{d.method} is not linear: the {d.result_name} of {leaf.name} for the {d.seed_name} {a:g} u "
                    f"{b:+g} v is not that combination of the {d.result_name}s for u and for v."
                )
            if zero.any():
                problems.append(
                    f"{d.method} is not multiplied by {'its tangents' if d.is_forward else 'grad_output'}: zero "
                    f"{d.seed_name}s give {leaf.name} another {d.result_name}."
                )
        return problems

    def _takes_undefined(self, r: Any) -> list[str]:
        d = self.mode
        return [
            f"{d.method} does not treat an undefined {d.seed_name} of {d.seed_leaves[i].name} as zeros: it changes "
            f"the {d.result_name} of {leaf.name}. (check_undefined_grad=False skips this check.)"
            for position, i in enumerate(self._without_one.derivatives)
            for leaf, result, batch in zip(d.result_leaves, r["missing"][position], r["batch"], strict=True)
            if not self.tolerance.agrees(result, batch[_NUM_VECTORS + position])
        ]

    def _respects_flags(self, r: Any) -> list[str]:
        return [
            f"the gradient of {self.derivatives.inputs[j].name} changes when that input alone is "
            "differentiated: backward does not respect ctx.needs_input_grad."
            for j, gradient in zip(self._with_one_input.derivatives, r["alone"], strict=True)
            if not self.tolerance.agrees(gradient, r["results"][j])
        ]

    @property
    def include_jacobian(self) -> bool:
        """Whether they compare every entry of the Jacobian with autodiff."""
        return bool(self._bases)

    @cached_property
    def _samples(self) -> Arrays:
        """Vectors along which to compare autodiff with finite differences; empty if that is not decisive."""
        d = self.derivatives
        if not (self.samples_autodiff and d.forward.has_reference and self.tolerance.is_double):
            return []
        samples = [random_vectors(d.inputs, 100 + k) for k in range(_NUM_SAMPLES)]
        return [np.stack(vectors) for vectors in zip(*samples, strict=True)]

    @cached_property
    def _bases(self) -> Sequence[Basis]:
        """The unit vectors of the seed leaves and of the inputs; empty unless one batch holds the Jacobian for each."""
        d = self.derivatives
        found = bases(self.mode.seed_leaves), bases(d.inputs)
        if not (self._samples and d.is_traced and len(found[0]) == len(found[1]) == 1):
            return ()
        (seeds,), (columns,) = found
        size = seeds.size * bytes_per_call(self.mode.rule) + columns.size * bytes_per_call(d.forward.reference)
        return (seeds, columns) if size <= min(BATCH_BYTES, self.max_memory) else ()

    def _matches_autodiff(self, r: Any, tolerance: Tolerance) -> bool:
        """Whether the rule is known to agree with autodiff in every entry of the Jacobian."""
        d = self.mode
        if not self._bases:
            return False
        (seeds, columns), (autodiff,) = self._bases, r["autodiff"]
        references: Any = [as_rows(array[_NUM_SAMPLES:]) for array in autodiff]
        if not d.is_forward:
            references = rows_of_columns(references, columns, seeds, range(seeds.size))
        for i, array in enumerate(r["batch"]):
            rows, reference = as_rows(array[-seeds.size :]), references[i]
            if (excess(rows, reference, tolerance.of_entries(reference)) > 1).any():
                return False
        return True

    def _autodiff_agrees(self, r: Any) -> tuple[bool, bool]:
        """Whether autodiff agrees with finite differences along random vectors, and resolves what is small.

        A wrong entry of the Jacobian shows along every vector that is not orthogonal to it.
        """
        values = r["target"][0] if r["target"] else r["at points"]
        found = differences([y[2:] for y in values], self.step, self.tolerance.precision)
        strict = self.tolerance.strict()
        for autodiff in r["autodiff"]:
            samples = [as_rows(exact[:_NUM_SAMPLES]) for exact in autodiff]
            for exact, numeric, error in zip(samples, *found, strict=True):
                if (excess(exact, numeric, strict.estimated(numeric, abs(error))) > 1).any():
                    return False, False
            return True, are_resolved(samples, found[0])
        return False, False

    def problems_of_eager_batching(self) -> list[str]:
        """Returns the problems of the rule under an eager `jax.vmap`."""
        d = self.mode
        first, second = random_vectors(d.seed_leaves, 1), random_vectors(d.seed_leaves, 2)
        derivative = d.derivative_of(self.derivatives.call)

        def results(vectors: Arrays) -> Arrays:
            return derivative(self.xs, vectors)[1]

        try:
            batched = jax.vmap(results)([jnp.stack(items) for items in zip(first, second, strict=True)])
        except Exception as error:
            return [f"{d.name} cannot be batched: {type(error).__name__}: {error}"]
        singles = results(list(map(jnp.asarray, first)))
        if all(self.tolerance.agrees(np.asarray(b)[0], np.asarray(s)) for b, s in zip(batched, singles, strict=True)):
            return []
        return [f"batched {d.result_name}s differ from those computed one by one: {d.method} is wrong under jax.vmap."]

    @cached_property
    def _without_one(self) -> _Variants:
        """The derivatives in which the vector of one seed leaf is a symbolic zero."""
        d, variants = self.mode, _Variants()
        if not (self.derivatives.has_unknown_code and self.undefined and len(d.seed_leaves) > 1):
            return variants  # these derivatives are those that are evaluated anyway
        for i, leaf in enumerate(d.seed_leaves):
            others = [j for j in range(len(d.seed_leaves)) if j != i]
            try:
                variants.derivatives[i] = self._staged(_undefined(d, self.derivatives.call, others))
            except Exception as error:
                variants.problems.append(
                    f"{d.method} fails if the {d.seed_name} of {leaf.name} is undefined: {type(error).__name__}: "
                    f"{error} (check_undefined_grad=False skips this check.)"
                )
        return variants

    @cached_property
    def _with_one_input(self) -> _Variants:
        """The gradient of each input that is computed differently if no other input is differentiated."""
        d, variants = self.mode, _Variants()
        if not self.derivatives.has_unknown_code or d.is_forward or len(d.result_leaves) < 2:
            return variants
        for j, leaf in enumerate(d.result_leaves):
            try:
                alone = self._staged(_one_input(self.derivatives.call, j))
            except Exception as error:
                variants.problems.append(
                    f"backward fails if {leaf.name} alone is differentiated: {type(error).__name__}: {error}"
                )
                continue
            if not is_same_output(alone, d.rule, len(d.seed_leaves) + j):
                variants.derivatives[j] = alone
        return variants

    def _staged(self, derivative: Derivative) -> Derivative:
        vectors = random_vectors(self.mode.seed_leaves, 1)
        if self.derivatives.is_traced:
            return stage(derivative, self.xs, vectors)
        derivative(self.xs, vectors)
        return derivative

    def _equal(self, first: Arrays, second: Arrays, slack: float = 0.0) -> bool:
        for a, b in zip(first, second, strict=True):
            bound = self.nondet_tol + (slack * largest(a) if slack else 0.0)
            if not ((abs(a - b) <= bound) | (a == b) | (np.isnan(a) & np.isnan(b))).all():
                return False
        return True


def problems_of_vmap(problem: Problem, derivatives: Derivatives, tolerance: Tolerance) -> list[str]:
    """Compares outputs under `jax.vmap` with a loop, along two axes and with each input unbatched."""
    count = len(problem.values)
    axes: list[list[int | None]] = [[0] * count, [-1] * count]
    axes += [[None if i == j else 0 for j in range(count)] for i in range(count)] if count > 1 else []
    problems: list[str] = []
    for in_axes in axes:
        items = [
            [x if axis is None else factor * x + shift for x, axis in zip(problem.values, in_axes, strict=True)]
            for factor, shift in ((1.0, 0.0), (_SHIFT_FACTOR, _SHIFT))
        ]
        batch = [a if axis is None else jnp.stack([a, b], axis) for a, b, axis in zip(*items, in_axes, strict=True)]
        unbatched = [leaf.name for leaf, axis in zip(problem.inputs, in_axes, strict=True) if axis is None]
        axis = next(axis for axis in in_axes if axis is not None)
        how = f"along axis {axis}" + "".join(f", {name} unbatched" for name in unbatched)
        try:
            batched = jax.vmap(derivatives.call, in_axes=in_axes)(*batch)
        except Exception as error:
            return [*problems, f"jax.vmap {how} raised {type(error).__name__}: {error}"]
        expected = [jnp.stack(outputs) for outputs in zip(*(derivatives.call(*item) for item in items), strict=True)]
        for leaf, value, reference in zip(derivatives.outputs, batched, expected, strict=True):
            if not tolerance.agrees(np.asarray(value), np.asarray(reference)):
                problems.append(f"{leaf.name} is wrong under jax.vmap {how}: it differs from a loop over the elements.")
    return problems


def _outputs(r: Any) -> Arrays:
    return r["outputs alone"][0] if r["outputs alone"] else [values[0] for values in r["at points"]]


def _appended(batch: Arrays, vectors: Arrays) -> Arrays:
    return [np.concatenate(arrays) for arrays in zip(batch, vectors, strict=True)] if vectors else batch


def _results(derivative: Derivative, xs: Arrays, *vectors: Any) -> Arrays:
    return derivative(xs, vectors)[1]


def _undefined(mode: ADMode, call: LeafFunction, others: Sequence[int]) -> Derivative:
    """Returns the derivative that uses the vectors of `others` only; the rest are symbolic zeros."""

    def results(xs: Sequence[Any], vectors: Sequence[Any]) -> Any:
        defined = [vectors[i] for i in others]
        if mode.is_forward:
            return forward_derivative(restrict_inputs(call, xs, others))([xs[i] for i in others], defined)[1]
        return jacobian_rows(restrict_outputs(call, others))(xs, defined)[1]

    return results


def _one_input(call: LeafFunction, index: int) -> Derivative:
    def gradient(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        return jacobian_rows(restrict_inputs(call, xs, [index]))([xs[index]], cotangents)[1][0]

    return gradient


def _without(vectors: Arrays, index: int) -> Arrays:
    return [np.zeros_like(v) if i == index else v for i, v in enumerate(vectors)]
