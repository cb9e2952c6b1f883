"""Checks of properties that every correct rule has: linearity, determinism, flags, undefined gradients.

They evaluate a rule a few times along random vectors, before whole Jacobians are compared. In the program that does so,
a small Jacobian is also evaluated, by the rule and by autodiff; if both agree, no further comparison is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.closeness import agree, excess, rounding_of_terms
from jaxfn._check.modes import Derivative, LeafFunction, PartialDerivative, batchings, parts
from jaxfn._check.staging import bytes_per_call, is_same_output, stage
from jaxfn._gradcheck.compare import rows_of_columns
from jaxfn._gradcheck.evaluation.batches import BATCH_BYTES, as_rows, differences, points
from jaxfn._gradcheck.evaluation.execution import ExecutionMode
from jaxfn._gradcheck.evaluation.operations import by_operations
from jaxfn._gradcheck.evaluation.vectors import Arrays, Basis, random_vectors, unit_bases
from jaxfn._gradcheck.problem.derivatives import ADMode, Derivatives, available
from jaxfn._gradcheck.problem.problem import Problem
from jaxfn._gradcheck.tolerance import Tolerance, is_resolved

_COMBINATION = (2.0, -3.0)
_NUM_VECTORS = 4  # along which every rule is evaluated: two random ones, their combination, zero
# The difference between two compilations of equal operations, relative to numbers of about that magnitude, and to all.
_RECOMPILED, _RECOMPILED_OF_ARRAY = 1e-13, 2e-15
_NUM_SAMPLES = 4  # vectors along which autodiff is compared with finite differences
_SHIFT = 1e-3  # added to the inputs, as some may be zero
_SHIFT_FACTOR = 1.001  # factor of the inputs for a second point, so that the items of a batch are not equal


@dataclass
class Findings:
    """The results of the property checks."""

    problems: list[str] = field(default_factory=list[str])  # the failures, as text
    batches_wrong: bool = False  # whether batching changes values, so that nothing may be computed in batches
    # whether autodiff of the function without its rule is known to agree with finite differences
    autodiff_agrees: bool = False
    is_resolved: bool = False  # whether they agree in the first digits of each output, however small
    matches_autodiff: bool = False  # whether the rule is known to agree with it in every entry
    is_nan: bool = False  # whether a result is NaN, so that the other properties were not checked

    @property
    def are_complete(self) -> bool:
        """Whether the checks have passed and no further comparison is needed."""
        return not self.problems and self.autodiff_agrees and self.matches_autodiff


class _Functions(NamedTuple):
    """The functions that the checks evaluate; of each kind in a list there may be none."""

    primal: LeafFunction
    alone: list[LeafFunction]  # `primal`, if its values may depend on whether it is batched
    target: list[LeafFunction]  # the function that finite differences evaluate, if that is another one
    autodiff: list[Derivative]
    rule: Derivative
    retraced: list[Derivative]
    parts: list[Derivative]


class _RunResults(NamedTuple):
    """The results of `_Functions`: for one vector, for the batch of all vectors, and at several points."""

    outputs: Arrays
    outputs_of_rule: Arrays
    results: Arrays
    retraced: list[Arrays]
    parts: list[Arrays]
    batch: Arrays
    at_points: Arrays
    target: list[Arrays]
    autodiff: list[Arrays]


@dataclass(frozen=True)
class PropertyChecks:
    """The property checks of one problem in one mode."""

    derivatives: Derivatives  # the function and its derivatives
    mode: ADMode  # the mode of differentiation
    xs: Sequence[Any]  # the point at which to differentiate
    step: float  # the step of finite differences
    tolerance: Tolerance  # the tolerance for values that should be equal
    nondet_tol: float  # the largest difference of two evaluations
    undefined: bool  # whether to check undefined vectors, one at a time
    samples_autodiff: bool  # whether to compare autodiff with finite differences along random vectors
    max_memory: int  # the number of bytes that one batch may use

    def run(self, execution: ExecutionMode) -> Findings:
        """Runs all property checks."""
        d = self.mode
        first, second = random_vectors(d.seed_leaves, 1), random_vectors(d.seed_leaves, 2)
        parts, problems = self._parts
        found = Findings(list(problems))
        a, b = _COMBINATION
        mixed = [a * u + b * v for u, v in zip(first, second, strict=True)]
        partial_vectors = [_with_zeros(first, part.seeds(d.is_forward)) for part, _ in parts]
        results, rerun = self._run_twice(
            execution, [first, second, mixed, list(map(np.zeros_like, first)), *partial_vectors]
        )
        found.autodiff_agrees, found.is_resolved = self._autodiff_agrees(results)
        found.problems += self._is_deterministic(results, rerun)
        if found.problems:
            return found
        found.batches_wrong = execution is ExecutionMode.VECTORIZED and not self._is_batched_right(results)
        found.is_nan = any(np.isnan(array).any() for array in results.batch)
        if found.batches_wrong or found.is_nan:  # the comparison of Jacobians tells where a derivative is NaN
            return found
        found.problems += self._has_one_value(results)
        found.problems += self._is_linear(results)
        found.problems += self._has_equal_parts(results)
        tolerance = replace(self.tolerance, least_scale=0.0) if found.is_resolved else self.tolerance
        found.matches_autodiff = self._matches_autodiff(results, tolerance)
        return found

    def _run_twice(self, execution: ExecutionMode, vectors: Sequence[Arrays]) -> list[_RunResults]:
        """Evaluates everything that the checks need, twice, with one executable."""
        d = self.derivatives
        samples = self._samples
        seeds, columns = [basis.arrays() for basis in self._bases] or ([], [])
        xs = list(map(np.asarray, self.xs))
        near = points(xs, samples, self.step) if samples else [np.zeros((0, *x.shape)) for x in xs]
        all_points = [np.concatenate([[x, _SHIFT_FACTOR * x], n]) for x, n in zip(xs, near, strict=True)]
        functions = _Functions(
            primal=d.primal,
            alone=[d.primal] if d.has_unknown_code else [],  # otherwise its batched values are right
            target=[] if d.target is d.primal else [d.target],
            autodiff=[available(d.forward.reference)] if samples else [],
            rule=available(self.mode.rule),
            retraced=[] if self.mode.retraced is None else [self.mode.retraced],
            parts=[derivative for _, derivative in self._parts[0]],
        )
        at_points = execution
        if execution is ExecutionMode.VECTORIZED and len(all_points[0]) * bytes_per_call(d.target) > self.max_memory:
            at_points = ExecutionMode.COMPILED_LOOP

        def run(
            functions: _Functions, xs: Arrays, vectors: Arrays, batch: Arrays, points: Arrays, samples: Arrays
        ) -> _RunResults:
            outputs_of_rule, results = functions.rule(xs, vectors)
            values = at_points.map(functions.primal, *points)
            (outputs,) = [f(*xs) for f in functions.alone] or [[y[0] for y in values]]
            return _RunResults(
                outputs=outputs,
                outputs_of_rule=outputs_of_rule,
                results=results,
                retraced=[f(xs, vectors)[1] for f in functions.retraced],
                parts=[f(xs, vectors) for f in functions.parts],
                batch=execution.map(partial(_results, functions.rule, xs), *batch),
                at_points=values,
                target=[at_points.map(f, *points) for f in functions.target],
                autodiff=[execution.map(partial(_results, f, xs), *samples) for f in functions.autodiff],
            )

        batch = [np.stack(items) for items in zip(*vectors, strict=True)]
        batch, samples = _appended(batch, seeds), _appended(samples, columns)
        if execution is ExecutionMode.OPERATIONS:
            sizes = [len(arrays[0]) for arrays in (batch, all_points, samples) if arrays]
            functions = by_operations(functions, max(sizes))
        args = functions, list(self.xs), vectors[0], batch, all_points, samples
        executable = execution.prepare(run, *args)
        return [executable.start(*args)() for _ in range(2)]

    def _is_deterministic(self, r: _RunResults, rerun: _RunResults) -> list[str]:
        problems: list[str] = []
        d = self.mode
        if not self._equal(r.outputs, rerun.outputs):
            problems.append("The function is not deterministic: two runs on equal inputs gave different outputs.")
        others = [(rerun.results, 0.0), *((again, _RECOMPILED) for again in r.retraced)]
        if not all(self._equal(r.results, other, relative) for other, relative in others):
            problems.append(
                f"{d.method} is not deterministic: two runs on equal inputs and {d.seed_name}s gave different "
                f"{d.result_name}s. They may differ by nondet_tol={self.nondet_tol:g}."
            )
        return problems

    def _is_batched_right(self, r: _RunResults) -> bool:
        batches, singles = (*r.batch, *r.at_points), (*r.results, *r.outputs_of_rule)
        return all(self.tolerance.agrees(batched[0], single) for batched, single in zip(batches, singles, strict=True))

    def _has_one_value(self, r: _RunResults) -> list[str]:
        return [
            f"{leaf.name} has different values when it is differentiated and when it is not."
            for leaf, a, b in zip(self.derivatives.outputs, r.outputs_of_rule, r.outputs, strict=True)
            if not self.tolerance.agrees(a, b)
        ]

    def _is_linear(self, r: _RunResults) -> list[str]:
        problems: list[str] = []
        d = self.mode
        a, b = _COMBINATION
        for leaf, (u, v, combined, zero, *_) in zip(d.result_leaves, r.batch, strict=True):
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

    def _has_equal_parts(self, r: _RunResults) -> list[str]:
        d = self.mode
        return [
            f"the {d.result_name} of {d.result_leaves[i].name} changes {part.condition}: {part.advice}"
            for position, ((part, _), results) in enumerate(zip(self._parts[0], r.parts, strict=True))
            for i, result in zip(part.results(d.is_forward), results, strict=True)
            if not self.tolerance.agrees(result, r.batch[i][_NUM_VECTORS + position])
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
        found = unit_bases(self.mode.seed_leaves), unit_bases(d.inputs)
        if not (self._samples and d.is_traced and len(found[0]) == len(found[1]) == 1):
            return ()
        (seeds,), (columns,) = found
        size = seeds.size * bytes_per_call(self.mode.rule) + columns.size * bytes_per_call(d.forward.reference)
        return (seeds, columns) if size <= min(BATCH_BYTES, self.max_memory) else ()

    def _matches_autodiff(self, r: _RunResults, tolerance: Tolerance) -> bool:
        """Whether the rule is known to agree with autodiff in every entry of the Jacobian."""
        d = self.mode
        if not self._bases:
            return False
        (seeds, columns), (autodiff,) = self._bases, r.autodiff
        references: Any = [as_rows(array[_NUM_SAMPLES:]) for array in autodiff]
        if not d.is_forward:
            references = rows_of_columns(references, columns, seeds, range(seeds.size))
        for i, array in enumerate(r.batch):
            rows, reference = as_rows(array[-seeds.size :]), references[i]
            if (excess(rows, reference, tolerance.of_entries(reference)) > 1).any():
                return False
        return True

    def _autodiff_agrees(self, r: _RunResults) -> tuple[bool, bool]:
        """Whether autodiff agrees with finite differences along random vectors, and resolves what is small.

        A wrong entry of the Jacobian shows along every vector that is not orthogonal to it.
        """
        values = r.target[0] if r.target else r.at_points
        found = differences([y[2:] for y in values], self.step, self.tolerance.precision)
        strict = self.tolerance.strict()
        for autodiff in r.autodiff:
            samples = [as_rows(exact[:_NUM_SAMPLES]) for exact in autodiff]
            for exact, numeric, error in zip(samples, *found, strict=True):
                if (excess(exact, numeric, strict.estimated(numeric, abs(error))) > 1).any():
                    return False, False
            return True, all(map(is_resolved, samples, found[0]))
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
    def _parts(self) -> tuple[list[tuple[PartialDerivative, Derivative]], list[str]]:
        """The parts of the derivative that may be computed differently, and the problems of computing them."""
        d, derivatives = self.mode, self.derivatives
        if not derivatives.has_unknown_code:  # the parts are those of the whole derivative
            return [], []
        inputs, outputs = ([leaf.name for leaf in leaves] for leaves in (derivatives.inputs, derivatives.outputs))
        found: list[tuple[PartialDerivative, Derivative]] = []
        problems: list[str] = []
        for part in parts(inputs, outputs, is_forward=d.is_forward):
            if part.is_undefined and not self.undefined:
                continue
            try:
                derivative = self._staged(part.of(derivatives.call, d.derivative_of, d.is_forward))
            except Exception as error:
                problems.append(f"{d.method} fails {part.condition}: {type(error).__name__}: {error} ({part.advice})")
                continue
            indices = part.results(d.is_forward)
            is_same = len(indices) == 1 and is_same_output(derivative, d.rule, len(outputs) + indices[0])
            found += [] if is_same else [(part, derivative)]
        return found, problems

    def _staged(self, derivative: Derivative) -> Derivative:
        vectors = random_vectors(self.mode.seed_leaves, 1)
        if self.derivatives.is_traced:
            return stage(derivative, self.xs, vectors)
        derivative(self.xs, vectors)
        return derivative

    def _equal(self, first: Arrays, second: Arrays, relative: float = 0.0) -> bool:
        return all(
            agree(b, a, self.nondet_tol + rounding_of_terms(a, relative, relative and _RECOMPILED_OF_ARRAY)).all()
            for a, b in zip(first, second, strict=True)
        )


def problems_of_vmap(problem: Problem, derivatives: Derivatives, tolerance: Tolerance) -> list[str]:
    """Compares outputs under `jax.vmap` with a loop, along two axes and with each input unbatched."""
    names = [leaf.name for leaf in problem.inputs]
    batch = [np.stack([x, _SHIFT_FACTOR * x + _SHIFT]) for x in problem.values]
    problems: list[str] = []
    for batching in batchings(range(len(names))):
        how = batching.condition(names)
        try:
            batched = batching.vmap(derivatives.call)(*batching.inputs(batch))
        except Exception as error:
            return [*problems, f"jax.vmap {how} raised {type(error).__name__}: {error}"]
        items = [derivatives.call(*item) for item in zip(*map(jnp.asarray, batching.items(batch)), strict=True)]
        for leaf, value, *expected in zip(derivatives.outputs, batched, *items, strict=True):
            if not tolerance.agrees(np.asarray(value), np.stack(expected)):
                problems.append(f"{leaf.name} is wrong under jax.vmap {how}: it differs from a loop over the elements.")
    return problems


def _appended(batch: Arrays, vectors: Arrays) -> Arrays:
    return [np.concatenate(arrays) for arrays in zip(batch, vectors, strict=True)] if vectors else batch


def _results(derivative: Derivative, xs: Arrays, *vectors: Any) -> Arrays:
    return derivative(xs, vectors)[1]


def _with_zeros(vectors: Arrays, defined: Sequence[int]) -> Arrays:
    return [v if i in defined else np.zeros_like(v) for i, v in enumerate(vectors)]
