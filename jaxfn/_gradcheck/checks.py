"""The smaller checks: what every correct rule does, whatever its values.

They run a function a few times with random directions, in one program, before whole Jacobians are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.derivatives import Derivatives, Only, Pullback, UnavailableError, available, pullback_of
from jaxfn._gradcheck.directions import (
    COMBINATION,
    DIRECTIONS,
    Arrays,
    AutodiffAndDifferences,
    ForwardMode,
    ReverseMode,
    random_vectors,
)
from jaxfn._gradcheck.jacobian import Basis
from jaxfn._gradcheck.problem import OfLeaves
from jaxfn._gradcheck.programs import Engine, Mode, Traced, bytes_each
from jaxfn._gradcheck.tolerance import SAFETY, Tolerance, excess, rounding_of_differences

_SAME = 1e-8
_RETRACED_TWICE = 1e-13  # what compiling the same operations in another program may change, relatively
_SAMPLES = 4  # directions in which autodiff is compared with finite differences
_EVALUATIONS = 4 * _SAMPLES  # of the function, for those


@dataclass
class Findings:
    """What the small checks found.

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
    """The small checks of one problem.

    Attributes:
      derivatives: of what.
      xs: where.
      step: of finite differences.
      tolerance: how closely values that should be the same have to agree.
      nondet_tol: how far apart two runs may be.
      undefined: whether cotangents may be undefined, one at a time.
      samples_autodiff: whether autodiff is to be compared with finite differences in random directions.
      max_memory: bytes that may be used at a time.
    """

    derivatives: Derivatives
    xs: Sequence[Any]
    step: float
    tolerance: Tolerance
    nondet_tol: float
    undefined: bool
    samples_autodiff: bool
    max_memory: int

    def reverse(self, engine: Engine) -> Findings:
        """What can be seen in reverse mode."""
        d = self.derivatives
        found = Findings()
        pullback = d.pullback
        if isinstance(pullback, UnavailableError) or not d.outputs:
            return found
        first, second = random_vectors(d.outputs, 1), random_vectors(d.outputs, 2)
        missing = self._without_one_output(found) if self.undefined and len(d.outputs) > 1 else {}
        alone = self._with_one_input(found) if len(d.inputs) > 1 else {}
        sampled, samples = self._sampled(engine)
        run = ReverseMode(engine, d.forward, pullback, d.retraced, missing, alone, sampled)
        program = engine.program(run, self.xs, first, second, samples)
        results, rerun = (jax.tree.map(np.asarray, program(self.xs, first, second, samples)) for _ in range(2))
        found.outputs = results["outputs"]
        found.autodiff_agrees = self._autodiff_agrees(results)
        found.problems += self._is_deterministic(results, rerun)
        if found.problems:
            return found
        found.batches_wrong = not self._is_batched_right(results)
        if not found.batches_wrong:
            found.problems += self._has_one_value(results)
            found.problems += self._is_linear(results)
            found.problems += self._takes_undefined(results, list(missing))
            found.problems += self._respects_flags(results, list(alone))
        return found

    def _is_deterministic(self, r: Any, rerun: Any) -> list[str]:
        problems: list[str] = []
        if not self._equal(r["outputs"], rerun["outputs"]):
            problems.append("The function is not deterministic: two runs on the same inputs gave different outputs.")
        slack = 0.0 if self.derivatives.retraced is None else _RETRACED_TWICE
        if not (self._equal(r["gradients"], rerun["gradients"]) and self._equal(r["gradients"], r["again"], slack)):
            problems.append(
                "backward is not deterministic: two runs on the same inputs and cotangents gave different gradients. "
                f"They may differ by nondet_tol={self.nondet_tol:g}."
            )
        return problems

    def _is_batched_right(self, r: Any) -> bool:
        pairs = [*zip(r["batch"], r["gradients"], strict=True), *zip(r["outputs batch"], r["outputs"], strict=True)]
        return all(self._agree(batched[0], single) for batched, single in pairs)

    def _has_one_value(self, r: Any) -> list[str]:
        return [
            f"{leaf.name} has another value when it is differentiated than when it is not."
            for leaf, a, b in zip(self.derivatives.outputs, r["outputs of fwd"], r["outputs"], strict=True)
            if not self._agree(a, b)
        ]

    def _is_linear(self, r: Any) -> list[str]:
        problems: list[str] = []
        a, b = COMBINATION
        for leaf, (u, v, combined, zero, *_) in zip(self.derivatives.inputs, r["batch"], strict=True):
            scale = float(max(np.max(abs(a * u), initial=0.0), np.max(abs(b * v), initial=0.0)))
            if not self._agree(combined, a * u + b * v, scale):
                problems.append(
                    f"backward is not linear: the gradient of {leaf.name} for the cotangent {a:g} u {b:+g} v is not "
                    "that combination of the gradients for u and for v."
                )
            if zero.any():
                problems.append(
                    f"backward is not multiplied by grad_output: zero cotangents give {leaf.name} another gradient."
                )
        return problems

    def _takes_undefined(self, r: Any, missing: Sequence[int]) -> list[str]:
        d = self.derivatives
        return [
            f"backward takes an undefined cotangent of {d.outputs[i].name} for something else than zeros: it changes "
            f"the gradient of {leaf.name}. (check_undefined_grad=False leaves this check out.)"
            for position, i in enumerate(missing)
            for leaf, gradient, batch in zip(d.inputs, r["missing"][position], r["batch"], strict=True)
            if not self._agree(gradient, batch[DIRECTIONS + position])
        ]

    def _respects_flags(self, r: Any, alone: Sequence[int]) -> list[str]:
        return [
            f"the gradient of {self.derivatives.inputs[j].name} is another one when that input alone is "
            "differentiated: backward does not respect ctx.needs_input_grad."
            for j, gradient in zip(alone, r["alone"], strict=True)
            if not self._agree(gradient, r["gradients"][j])
        ]

    def forward(self, engine: Engine) -> Findings:
        """What can be seen in forward mode."""
        d = self.derivatives
        found = Findings()
        pushforward = d.pushforward
        if isinstance(pushforward, UnavailableError) or not d.outputs:
            return found
        first, second = random_vectors(d.inputs, 4), random_vectors(d.inputs, 5)
        missing = self._without_one_tangent(found) if self.undefined and len(d.inputs) > 1 else {}
        sampled, samples = self._sampled(engine)
        run = ForwardMode(engine, d.forward, pushforward, missing, sampled)
        program = engine.program(run, self.xs, first, second, samples)
        results = jax.tree.map(np.asarray, program(self.xs, first, second, samples))
        found.outputs = results["outputs"]
        found.autodiff_agrees = self._autodiff_agrees(results)
        pairs = zip(results["batch"], results["tangents"], strict=True)
        found.batches_wrong = not all(self._agree(batched[0], single) for batched, single in pairs)
        found.problems += [
            f"jvp takes an undefined tangent of {d.inputs[j].name} for something else than zeros: it changes the "
            f"tangent of {leaf.name}. (check_undefined_grad=False leaves this check out.)"
            for j, undefined, zero in zip(missing, results["missing"], results["zero"], strict=True)
            for leaf, a, b in zip(d.outputs, undefined, zero, strict=True)
            if not self._agree(a, b)
        ]
        return found

    def _sampled(self, engine: Engine) -> tuple[AutodiffAndDifferences | None, Arrays]:
        """What compares autodiff with finite differences, and the directions; none where that would not be decisive."""
        d = self.derivatives
        pushforward = d.reference_pushforward
        is_possible = not isinstance(pushforward, UnavailableError) and self.tolerance.is_double
        if not (self.samples_autodiff and is_possible):
            return None, []
        if engine.mode is Mode.VECTORIZED and _EVALUATIONS * bytes_each(d.measured) > self.max_memory:
            engine = Engine(Mode.COMPILED_LOOP)
        basis = Basis(d.inputs, tuple(range(len(d.inputs))))
        vectors = [random_vectors(d.inputs, 100 + k) for k in range(_SAMPLES)]
        samples = [np.stack(items) for items in zip(*vectors, strict=True)]
        return AutodiffAndDifferences(engine, available(pushforward), d.measured, basis, self.step), samples

    def _autodiff_agrees(self, r: Any) -> bool:
        """A disagreement in one entry of the Jacobian shows in every direction that is not orthogonal to it."""
        strict = self.tolerance.strict()
        floors = rounding_of_differences(r["outputs"], self.tolerance.precision, self.step)
        for (exact, numeric, error), floor in zip(r["samples"], floors, strict=bool(r["samples"])):
            bound = strict.estimated(numeric, _largest(numeric), SAFETY * abs(error) + floor)
            if (excess(exact, numeric, bound) > 1).any():
                return False
        return bool(r["samples"])

    def batched_tangents(self) -> str | None:
        """Whether forward mode can be batched as it is, outside of any program; what is wrong otherwise."""
        d = self.derivatives
        pushforward = available(d.pushforward)
        first, second = random_vectors(d.inputs, 4), random_vectors(d.inputs, 5)
        batch = [jnp.stack(items) for items in zip(first, second, strict=True)]
        try:
            batched = jax.vmap(partial(pushforward, self.xs))(batch)
        except Exception as error:
            return f"forward mode cannot be batched: {type(error).__name__}: {error}"
        return self._compared(batched, pushforward(self.xs, first), "batched tangents", "jvp")

    def batched_gradients(self) -> str | None:
        """Whether backward can be batched as it is, outside of any program; what is wrong otherwise."""
        d = self.derivatives
        first, second = random_vectors(d.outputs, 1), random_vectors(d.outputs, 2)
        _, pull = jax.vjp(lambda *xs: list(d.call(*xs)), *self.xs)
        batch = [jnp.stack(items) for items in zip(first, second, strict=True)]
        try:
            batched = jax.vmap(pull)(batch)
        except Exception as error:
            return f"backward cannot be batched: {type(error).__name__}: {error}"
        return self._compared(batched, pull([jnp.asarray(u) for u in first]), "batched gradients", "backward")

    def _compared(self, batched: Sequence[Any], single: Sequence[Any], what: str, rule: str) -> str | None:
        if all(self._agree(np.asarray(b)[0], np.asarray(s)) for b, s in zip(batched, single, strict=True)):
            return None
        return f"{what} are not those computed one by one: {rule} is wrong under jax.vmap."

    def _without_one_output(self, found: Findings) -> dict[int, Pullback]:
        """Pullbacks in which one output's cotangent is a symbolic zero."""
        d = self.derivatives
        made: dict[int, Pullback] = {}
        for i, leaf in enumerate(d.outputs):
            others = tuple(j for j in range(len(d.outputs)) if j != i)
            directions = random_vectors([d.outputs[j] for j in others], 1)
            try:
                made[i] = self._recorded(pullback_of(Only(d.call, others)), self.xs, directions)
            except Exception as error:
                found.problems.append(
                    f"backward fails where the cotangent of {leaf.name} is undefined: {type(error).__name__}: {error} "
                    "(check_undefined_grad=False leaves this check out.)"
                )
        return made

    def _with_one_input(self, found: Findings) -> dict[int, Pullback]:
        """Pullbacks in which one input alone is differentiated."""
        d = self.derivatives
        made: dict[int, Pullback] = {}
        for j, leaf in enumerate(d.inputs):
            try:
                made[j] = self._recorded(_one_input(d.call, j), self.xs, random_vectors(d.outputs, 1))
            except Exception as error:
                found.problems.append(
                    f"backward fails where {leaf.name} alone is differentiated: {type(error).__name__}: {error}"
                )
        return made

    def _without_one_tangent(self, found: Findings) -> dict[int, Callable[..., Any]]:
        """Pushforwards in which one input's tangent is a symbolic zero."""
        d = self.derivatives
        made: dict[int, Callable[..., Any]] = {}
        for j, leaf in enumerate(d.inputs):
            try:
                made[j] = self._recorded(_tangent_missing(d.call, j), self.xs, random_vectors(d.inputs, 4))
            except Exception as error:
                found.problems.append(
                    f"jvp fails where the tangent of {leaf.name} is undefined: {type(error).__name__}: {error} "
                    "(check_undefined_grad=False leaves this check out.)"
                )
        return made

    def _recorded(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.derivatives.mode is not Mode.PYTHON_LOOP:
            return Traced(function, *args)
        function(*args)
        return function

    def _agree(self, value: Any, expected: Any, scale: float | None = None) -> bool:
        if scale is None:
            scale = float(np.max(abs(expected), initial=0.0))
        # Not the last digits matter here; small entries may be what is left of large ones.
        bound = self.tolerance.precise(expected, np.float64(scale)) + _SAME * scale
        return bool((excess(value, expected, bound) <= 1).all())

    def _equal(self, first: Arrays, second: Arrays, slack: float = 0.0) -> bool:
        for a, b in zip(first, second, strict=True):
            bound = self.nondet_tol + slack * np.max(abs(a), initial=0.0)
            if not ((abs(a - b) <= bound) | (a == b) | (np.isnan(a) & np.isnan(b))).all():
                return False
        return True


def _largest(array: Any) -> Any:
    return np.max(abs(array), initial=0.0)


def _one_input(call: OfLeaves, position: int) -> Pullback:
    def pullback(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_one(x: Any) -> list[Any]:
            return list(call(*xs[:position], x, *xs[position + 1 :]))

        return jax.vjp(of_one, xs[position])[1](list(cotangents))[0]

    return pullback


def _tangent_missing(call: OfLeaves, position: int) -> Callable[..., Any]:
    def pushforward(xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        def of_others(*others: Any) -> list[Any]:
            return list(call(*others[:position], xs[position], *others[position:]))

        others = [x for i, x in enumerate(xs) if i != position]
        moves = [t for i, t in enumerate(tangents) if i != position]
        return jax.jvp(of_others, tuple(others), tuple(moves))[1]

    return pushforward
