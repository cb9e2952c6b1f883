"""The smaller checks: what every correct rule does, whatever its values.

They run a function a few times with random directions, before whole Jacobians are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.numbers.programs import Mode
from jaxfn._gradcheck.numbers.sweep import differences, points
from jaxfn._gradcheck.numbers.vectors import Arrays, random_vectors
from jaxfn._gradcheck.problem.derivatives import (
    Derivative,
    Derivatives,
    Direction,
    forward_of,
    function_of_some,
    only,
    rows_of,
)
from jaxfn._gradcheck.problem.problem import OfLeaves
from jaxfn._gradcheck.problem.traced import bytes_each, is_part
from jaxfn._gradcheck.tolerance import SAFETY, Tolerance, excess, largest, rounding_of_differences

_COMBINATION = (2.0, -3.0)
_DIRECTIONS = 4  # that every rule is tried in: two random ones, their combination, zero
_RETRACED_TWICE = 1e-13  # what compiling the same operations in another program may change, relatively
_SAMPLES = 4  # directions in which autodiff is compared with finite differences
_ELSEWHERE = 1.001  # times the inputs: another place, so that batches are not of equal items


@dataclass
class Findings:
    """Findings of the property checks.

    Attributes:
      problems: what is wrong.
      batches_wrong: whether batching changes values, so that nothing may be computed in batches.
      outputs: the values of the function.
      autodiff_agrees: whether autodiff of the function without its rule is known to agree with finite differences.
    """

    problems: list[str] = field(default_factory=list[str])
    batches_wrong: bool = False
    outputs: list[Any] = field(default_factory=list[Any])
    autodiff_agrees: bool = False


@dataclass(frozen=True)
class Checks:
    """The small checks of one problem in one direction.

    Attributes:
      derivatives: of what.
      direction: which mode.
      xs: where.
      step: of finite differences.
      tolerance: how closely values that should be the same have to agree.
      nondet_tol: how far apart two runs may be.
      undefined: whether vectors may be undefined, one at a time.
      samples_autodiff: whether autodiff is to be compared with finite differences in random directions.
      max_memory: bytes that may be used at a time.
    """

    derivatives: Derivatives
    direction: Direction
    xs: Sequence[Any]
    step: float
    tolerance: Tolerance
    nondet_tol: float
    undefined: bool
    samples_autodiff: bool
    max_memory: int

    def run(self, mode: Mode) -> Findings:
        """All of them."""
        d = self.direction
        found = Findings()
        first, second = random_vectors(d.varied, 1), random_vectors(d.varied, 2)
        missing = self._without_one(first, found) if self.undefined and len(d.varied) > 1 else {}
        alone = self._with_one_input(first, found) if not d.is_forward and len(d.returned) > 1 else {}
        a, b = _COMBINATION
        mixed = [a * u + b * v for u, v in zip(first, second, strict=True)]
        directions = [first, second, mixed, list(map(np.zeros_like, first)), *(_without(first, i) for i in missing)]
        results, rerun = self._run_twice(mode, directions, list(missing.values()), list(alone.values()))
        found.outputs = results["outputs"]
        found.autodiff_agrees = self._autodiff_agrees(results)
        found.problems += self._is_deterministic(results, rerun)
        if found.problems:
            return found
        found.batches_wrong = not self._is_batched_right(results)
        if found.batches_wrong:
            return found
        found.problems += self._has_one_value(results)
        found.problems += self._is_linear(results)
        found.problems += self._takes_undefined(results, list(missing))
        found.problems += self._respects_flags(results, list(alone))
        return found

    def _run_twice(
        self, mode: Mode, directions: Sequence[Arrays], missing: list[Derivative], alone: list[Derivative]
    ) -> list[dict[str, Any]]:
        """Runs all checks twice, in one program."""
        d = self.derivatives
        samples = self._samples()
        xs = list(map(np.asarray, self.xs))
        near = points(xs, samples, self.step) if samples else [np.zeros((0, *x.shape)) for x in xs]
        places = [np.concatenate([[x, _ELSEWHERE * x], n]) for x, n in zip(xs, near, strict=True)]
        functions = {
            "primal": d.primal,
            "measured": [] if d.measured is d.primal else [d.measured],
            "autodiff": [d.forward.reference] if samples else [],
            "rule": self.direction.rule,
            "retraced": [] if self.direction.retraced is None else [self.direction.retraced],
            "missing": missing,
            "alone": alone,
        }
        at_places = mode
        if mode is Mode.VECTORIZED and len(places[0]) * bytes_each(d.measured) > self.max_memory:
            at_places = Mode.COMPILED_LOOP

        def run(functions: Any, xs: Arrays, vectors: Arrays, batch: Arrays, places: Arrays, samples: Arrays) -> Any:
            outputs, results = functions["rule"](xs, vectors)
            return {
                "outputs": functions["primal"](*xs),
                "outputs of rule": outputs,
                "results": results,
                "results again": [f(xs, vectors)[1] for f in functions["retraced"]],
                "missing": [f(xs, vectors) for f in functions["missing"]],
                "alone": [f(xs, vectors) for f in functions["alone"]],
                "batch": mode.map(partial(_results, functions["rule"], xs), *batch),
                "at places": at_places.map(functions["primal"], *places),
                "measured": [at_places.map(f, *places) for f in functions["measured"]],
                "autodiff": [mode.map(partial(_results, f, xs), *samples) for f in functions["autodiff"]],
            }

        batch = [np.stack(items) for items in zip(*directions, strict=True)]
        args = functions, list(self.xs), directions[0], batch, places, samples
        program = mode.program(run, *args)
        return [program.start(*args)() for _ in range(2)]

    def _is_deterministic(self, r: Any, rerun: Any) -> list[str]:
        problems: list[str] = []
        d = self.direction
        if not self._equal(r["outputs"], rerun["outputs"]):
            problems.append("The function is not deterministic: two runs on the same inputs gave different outputs.")
        others = [(rerun["results"], 0.0), *((again, _RETRACED_TWICE) for again in r["results again"])]
        if not all(self._equal(r["results"], other, slack) for other, slack in others):
            problems.append(
                f"{d.method} is not deterministic: two runs on the same inputs and {d.given}s gave different "
                f"{d.result}s. They may differ by nondet_tol={self.nondet_tol:g}."
            )
        return problems

    def _is_batched_right(self, r: Any) -> bool:
        batches, singles = (*r["batch"], *r["at places"]), (*r["results"], *r["outputs"])
        return all(self.tolerance.agrees(batched[0], single) for batched, single in zip(batches, singles, strict=True))

    def _has_one_value(self, r: Any) -> list[str]:
        return [
            f"{leaf.name} has another value when it is differentiated than when it is not."
            for leaf, a, b in zip(self.derivatives.outputs, r["outputs of rule"], r["outputs"], strict=True)
            if not self.tolerance.agrees(a, b)
        ]

    def _is_linear(self, r: Any) -> list[str]:
        problems: list[str] = []
        d = self.direction
        a, b = _COMBINATION
        for leaf, (u, v, combined, zero, *_) in zip(d.returned, r["batch"], strict=True):
            scale = float(max(largest(a * u), largest(b * v)))
            if not self.tolerance.agrees(combined, a * u + b * v, scale):
                problems.append(
                    f"{d.method} is not linear: the {d.result} of {leaf.name} for the {d.given} {a:g} u {b:+g} v is "
                    f"not that combination of the {d.result}s for u and for v."
                )
            if zero.any():
                problems.append(
                    f"{d.method} is not multiplied by {'its tangents' if d.is_forward else 'grad_output'}: zero "
                    f"{d.given}s give {leaf.name} another {d.result}."
                )
        return problems

    def _takes_undefined(self, r: Any, missing: Sequence[int]) -> list[str]:
        d = self.direction
        return [
            f"{d.method} takes an undefined {d.given} of {d.varied[i].name} for something else than zeros: it changes "
            f"the {d.result} of {leaf.name}. (check_undefined_grad=False leaves this check out.)"
            for position, i in enumerate(missing)
            for leaf, result, batch in zip(d.returned, r["missing"][position], r["batch"], strict=True)
            if not self.tolerance.agrees(result, batch[_DIRECTIONS + position])
        ]

    def _respects_flags(self, r: Any, alone: Sequence[int]) -> list[str]:
        return [
            f"the gradient of {self.derivatives.inputs[j].name} is another one when that input alone is "
            "differentiated: backward does not respect ctx.needs_input_grad."
            for j, gradient in zip(alone, r["alone"], strict=True)
            if not self.tolerance.agrees(gradient, r["results"][j])
        ]

    def _samples(self) -> Arrays:
        """Directions in which autodiff is compared with finite differences; none where that would not be decisive."""
        d = self.derivatives
        if not (self.samples_autodiff and d.forward.has_reference and self.tolerance.is_double):
            return []
        samples = [random_vectors(d.inputs, 100 + k) for k in range(_SAMPLES)]
        return [np.stack(vectors) for vectors in zip(*samples, strict=True)]

    def _autodiff_agrees(self, r: Any) -> bool:
        """A disagreement in one entry of the Jacobian shows in every direction that is not orthogonal to it."""
        values = r["measured"][0] if r["measured"] else r["at places"]
        found = differences([y[2:] for y in values], self.step)
        strict = self.tolerance.strict()
        floors = rounding_of_differences(r["outputs"], self.tolerance.precision, self.step)
        for autodiff in r["autodiff"]:
            for exact, numeric, error, floor in zip(autodiff, *found, floors, strict=True):
                bound = strict.estimated(numeric, largest(numeric), SAFETY * abs(error) + floor)
                if (excess(exact.reshape(numeric.shape), numeric, bound) > 1).any():
                    return False
        return bool(r["autodiff"])

    def batches_as_it_is(self) -> list[str]:
        """Returns the problems of batching the rule eagerly, outside of any program."""
        d = self.direction
        first, second = random_vectors(d.varied, 1), random_vectors(d.varied, 2)
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
        return [f"batched {d.result}s are not those computed one by one: {d.method} is wrong under jax.vmap."]

    def _without_one(self, vectors: Arrays, found: Findings) -> dict[int, Derivative]:
        """Returns, by position, the derivative in which one vector is a symbolic zero."""
        d = self.direction
        made: dict[int, Derivative] = {}
        for i, leaf in enumerate(d.varied):
            others = [j for j in range(len(d.varied)) if j != i]
            try:
                made[i] = self._recorded(_undefined(d, self.derivatives.call, others), vectors)
            except Exception as error:
                found.problems.append(
                    f"{d.method} fails where the {d.given} of {leaf.name} is undefined: {type(error).__name__}: "
                    f"{error} (check_undefined_grad=False leaves this check out.)"
                )
        return made

    def _with_one_input(self, vectors: Arrays, found: Findings) -> dict[int, Derivative]:
        """Returns, by position, the gradient of an input that alone is differentiated, where it is another program."""
        d = self.direction
        made: dict[int, Derivative] = {}
        for j, leaf in enumerate(d.returned):
            try:
                alone = self._recorded(_one_input(self.derivatives.call, j), vectors)
            except Exception as error:
                found.problems.append(
                    f"backward fails where {leaf.name} alone is differentiated: {type(error).__name__}: {error}"
                )
                continue
            if not is_part(alone, d.rule, len(d.varied) + j):
                made[j] = alone
        return made

    def _recorded(self, derivative: Derivative, vectors: Arrays) -> Derivative:
        if self.derivatives.is_traced:
            return self.derivatives.trace(derivative, self.xs, vectors)
        derivative(self.xs, vectors)
        return derivative

    def _equal(self, first: Arrays, second: Arrays, slack: float = 0.0) -> bool:
        for a, b in zip(first, second, strict=True):
            bound = self.nondet_tol + (slack * largest(a) if slack else 0.0)
            if not ((abs(a - b) <= bound) | (a == b) | (np.isnan(a) & np.isnan(b))).all():
                return False
        return True


def _results(derivative: Derivative, xs: Arrays, *vectors: Any) -> Arrays:
    return derivative(xs, vectors)[1]


def _undefined(direction: Direction, call: OfLeaves, others: Sequence[int]) -> Derivative:
    """Returns the derivative in which only the vectors of `others` are defined; it takes all of them."""

    def results(xs: Sequence[Any], vectors: Sequence[Any]) -> Any:
        defined = [vectors[i] for i in others]
        if direction.is_forward:
            return forward_of(function_of_some(call, xs, others))([xs[i] for i in others], defined)[1]
        return rows_of(only(call, others))(xs, defined)[1]

    return results


def _one_input(call: OfLeaves, position: int) -> Derivative:
    def gradient(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        return rows_of(function_of_some(call, xs, [position]))([xs[position]], cotangents)[1][0]

    return gradient


def _without(vectors: Arrays, position: int) -> Arrays:
    return [np.zeros_like(v) if i == position else v for i, v in enumerate(vectors)]
