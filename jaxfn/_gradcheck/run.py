"""One whole check, from the problem to the report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfn._gradcheck.checks import Checks, Findings
from jaxfn._gradcheck.compare import Comparison, Pair
from jaxfn._gradcheck.derivatives import Derivatives, UnavailableError, available, derive
from jaxfn._gradcheck.diagnosis import Diagnosis
from jaxfn._gradcheck.problem import Problem
from jaxfn._gradcheck.programs import Engine, Mode
from jaxfn._gradcheck.progress import Progress
from jaxfn._gradcheck.projections import PROJECTIONS, Projections
from jaxfn._gradcheck.report import Mismatch, Report
from jaxfn._gradcheck.sweep import Sweep
from jaxfn._gradcheck.tolerance import Default, Tolerance

REFERENCES = ("both", "finite_differences", "autodiff")
_DOUBLE_EPS = float(np.finfo(np.float64).eps)
# In fast mode a failing Jacobian of up to so many entries is computed after all, to show which ones are wrong.
_EXPLAINED = 1 << 20

_WAY_OUT = (
    "a rule that is deliberately not the derivative of forward (straight-through, say) disagrees with finite "
    "differences and autodiff alike. Declare it with surrogate=, a function whose derivative the rule claims to be."
)


@dataclass(frozen=True)
class Options:
    """What a check was asked for; see `gradcheck`."""

    eps: float
    atol: float
    rtol: float
    nondet_tol: float
    check_undefined_grad: bool
    check_grad_dtypes: bool
    check_batched_grad: bool
    check_batched_forward_grad: bool
    check_forward_ad: bool
    check_backward_ad: bool
    fast_mode: bool
    reference: str
    has_surrogate: bool
    max_memory: int
    name: str = "gradcheck"

    def __post_init__(self) -> None:
        if self.reference not in REFERENCES:
            raise ValueError(f"reference is {self.reference!r}; it must be one of {', '.join(map(repr, REFERENCES))}")
        needs = (
            ("check_batched_grad", self.check_batched_grad, "check_backward_ad", self.check_backward_ad),
            ("check_batched_forward_grad", self.check_batched_forward_grad, "check_forward_ad", self.check_forward_ad),
        )
        if not (self.check_forward_ad or self.check_backward_ad):
            raise ValueError("check_forward_ad and check_backward_ad are both off: nothing is left to check")
        for name, wanted, required, given in needs:
            if wanted and not given:
                raise ValueError(f"{name} needs {required}=True")


def run_check(problem: Problem, options: Options) -> Report:
    """Checks a problem; raises only what the function itself raises, and `ValueError` for impossible wishes."""
    # What is not a number is found by comparing; NumPy need not warn of it as well.
    with jax.enable_x64(True), np.errstate(all="ignore"):
        return _Check(problem, options).run()


class _Check:
    """A check under way: what is known so far, and the report that grows."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.options = options
        self.problem = problem
        self.report = Report(problem.name, options.name)
        self.derivatives = derive(
            problem,
            reverse=options.check_backward_ad,
            forward=options.check_forward_ad,
            reference=options.reference != "finite_differences",
        )
        self.report.source = _sources(self.derivatives)
        precision = self.derivatives.precision
        is_default = isinstance(options.atol, Default) and isinstance(options.rtol, Default)
        self.tolerance = Tolerance(float(options.atol), float(options.rtol), is_default, precision)
        self.step = _step(options.eps, precision)
        self.engine = Engine(self.derivatives.mode)
        self.outputs: Sequence[Any] = ()
        self.autodiff_agrees = False
        self.progress = Progress(f"{options.name} of {problem.name}")

    def run(self) -> Report:
        if not self._is_differentiable():
            return self.report
        self._note_how()
        self._small_checks()
        if self.report.passed:
            try:
                self._whole_jacobians()
            finally:
                self.progress.close()
        return self.report

    def _is_differentiable(self) -> bool:
        """Whether there is anything to compare; says what is wrong where there is not."""
        d, say = self.derivatives, self.report.problems.append
        if not (d.outputs or d.stopped):
            raise ValueError(f"{self.problem.name} has no floating or complex output, so it has no derivative to check")
        for derivative, wanted, name in (
            (d.pullback, self.options.check_backward_ad, "backward"),
            (d.pushforward, self.options.check_forward_ad, "forward mode"),
        ):
            if wanted and isinstance(derivative, UnavailableError):
                say(f"{name} raised {derivative}")
        if not d.outputs and self.report.passed:
            self._check_constant()
        return self.report.passed and bool(d.outputs)

    def _check_constant(self) -> None:
        """Without any differentiable output, none may change with the inputs."""
        d = self.derivatives
        steps = [self.step * (1 + abs(np.asarray(x))) for x in self.problem.values]
        for leaf, a, b in zip(
            d.stopped,
            d.forward_stopped(*self.problem.values),
            d.forward_stopped(*(x + s for x, s in zip(self.problem.values, steps, strict=True))),
            strict=True,
        ):
            if (np.asarray(a) != np.asarray(b)).any():
                self.report.problems.append(
                    f"{leaf.name} is not differentiable, and so is no other output, but it changes with the inputs: "
                    "its derivative was expected to be zero."
                )

    def _note_how(self) -> None:
        d, note = self.derivatives, self.report.notes.append
        if d.mode is Mode.PYTHON_LOOP:
            note("the function cannot be traced by JAX, so it ran in a Python loop")
        if d.precision > _DOUBLE_EPS:
            note(f"the function computes in lower precision than double (spacing {d.precision:.1g})")
        if self.options.reference == "autodiff":
            wanted = (
                (self.options.check_backward_ad, d.reference_pullback),
                (self.options.check_forward_ad, d.reference_pushforward),
            )
            for is_wanted, derivative in wanted:
                if is_wanted and isinstance(derivative, UnavailableError):
                    raise ValueError(f'reference="autodiff" is not possible for {self.problem.name}: {derivative}')
        elif self.options.reference == "both" and isinstance(d.reference_pullback, UnavailableError):
            note(f"compared with finite differences only, not with autodiff: {d.reference_pullback}")

    def _small_checks(self) -> None:
        o, d = self.options, self.derivatives
        checks = Checks(
            derivatives=d,
            xs=self.problem.values,
            step=self.step,
            tolerance=self.tolerance,
            nondet_tol=o.nondet_tol,
            undefined=o.check_undefined_grad,
            samples_autodiff=o.reference == "both" and not o.fast_mode,  # fast mode has projections of its own
            max_memory=o.max_memory,
        )
        if o.check_grad_dtypes:
            for where, got, wanted in d.casts:
                self.report.problems.append(f"{where}: backward returned a gradient of dtype {got} for {wanted}.")
        if o.check_backward_ad:
            self._in_fastest_mode(checks.reverse)
        if o.check_forward_ad:
            self._in_fastest_mode(checks.forward)
        if self.engine.mode is Mode.VECTORIZED:
            return  # so it was batched, and rightly
        if o.check_batched_grad:
            self._add_problem(checks.batched_gradients())
        if o.check_batched_forward_grad:
            self._add_problem(checks.batched_tangents())

    def _in_fastest_mode(self, check: Callable[[Engine], Findings]) -> None:
        """Runs checks in the fastest mode that gives right values, which is also the one for what comes after them."""
        found: Findings | None = None
        if self.engine.mode is Mode.VECTORIZED:
            reason = "batching gives other values than computing one by one"
            try:
                found = check(self.engine)
            except Exception as error:
                reason = f"it cannot be batched ({type(error).__name__}: {error})"
            if found is None or found.batches_wrong:
                self.engine, found = Engine(Mode.COMPILED_LOOP), None
                self.report.notes.append(f"ran in a compiled loop: {reason}")
        found = found or check(self.engine)
        self.report.problems += found.problems
        self.outputs = found.outputs
        self.autodiff_agrees = found.autodiff_agrees

    def _add_problem(self, problem: str | None) -> None:
        if problem is not None:
            self.report.problems.append(problem)

    def _whole_jacobians(self) -> None:
        sweep = Sweep(self.engine, self.problem.values, self.options.max_memory, self.progress)
        comparison = Comparison(self.derivatives, self.tolerance, self.step, sweep, self.outputs)
        mismatches = self._fast(comparison) if self.options.fast_mode else self._full(comparison)
        self.report.mismatches += mismatches
        if mismatches and not self.options.has_surrogate:
            self.report.notes.append(_WAY_OUT)

    def _full(self, comparison: Comparison) -> list[Mismatch]:
        o, d = self.options, self.derivatives
        trusted = self._trusted(comparison)
        found: list[Mismatch] = []
        if o.check_backward_ad:
            if trusted and not isinstance(d.reference_pullback, UnavailableError):
                pairs = comparison.rows_with_autodiff()
            else:
                pairs = comparison.rows_with_differences(available(d.pullback))
            found += self._diagnosis(comparison, False, trusted).mismatches(pairs)
        if o.check_forward_ad:
            if trusted and not isinstance(d.reference_pushforward, UnavailableError):
                pairs = comparison.columns_with_autodiff()
            else:
                pairs = comparison.columns_estimated(available(d.pushforward))
            found += self._diagnosis(comparison, True, trusted).mismatches(pairs)
        return found

    def _fast(self, comparison: Comparison) -> list[Mismatch]:
        o, d = self.options, self.derivatives
        self.report.notes.append(f"fast mode: {PROJECTIONS} random projections for each output and each input")
        projections = Projections(comparison, reverse=o.check_backward_ad, forward=o.check_forward_ad)
        trusted = o.reference == "autodiff" or self._trusted_by(projections)
        found: list[Mismatch] = []
        if o.check_backward_ad:
            if trusted and not isinstance(d.reference_pullback, UnavailableError):
                pairs = projections.rows_with_autodiff()
            else:
                pairs = projections.scalars_with_differences("analytic")
            found += self._explained(comparison, False, trusted, pairs)
        if o.check_forward_ad:
            if trusted and not isinstance(d.reference_pushforward, UnavailableError):
                pairs = projections.columns_with_autodiff()
            else:
                pairs = projections.columns_estimated("jvp")
            found += self._explained(comparison, True, trusted, pairs)
        return found

    def _explained(
        self, comparison: Comparison, is_forward: bool, trusted: bool, pairs: Sequence[Pair]
    ) -> list[Mismatch]:
        """Mismatches of projections; where that is affordable, with the entries that make them."""
        d = self.derivatives
        found: list[Mismatch] = []
        for pair in pairs:
            diagnosis = self._diagnosis(comparison, is_forward, trusted)
            if d.outputs[pair.output].num_components * d.inputs[pair.input].num_components <= _EXPLAINED:
                explained = diagnosis.whole(pair)
            else:
                explained = diagnosis.named(pair)
            found += [explained] if explained else []
        return found

    def _trusted(self, comparison: Comparison) -> bool:
        """Whether autodiff of the bare function may decide: finite differences agree with it, or are not asked."""
        d = self.derivatives
        if self.options.reference != "both":
            return self.options.reference == "autodiff"
        if self.autodiff_agrees:
            return True
        if not isinstance(d.reference_pushforward, UnavailableError):
            pairs = comparison.columns_with_differences(d.reference_pushforward)
        elif not isinstance(d.reference_pullback, UnavailableError):
            pairs = comparison.rows_with_differences(d.reference_pullback)
        else:
            return False
        return self._noted(pairs)

    def _trusted_by(self, projections: Projections) -> bool:
        d = self.derivatives
        if self.options.reference != "both":
            return False
        if not isinstance(d.reference_pushforward, UnavailableError):
            return self._noted(projections.columns_with_differences("autodiff jvp"))
        if not isinstance(d.reference_pullback, UnavailableError):
            return self._noted(projections.scalars_with_differences("autodiff"))
        return False

    def _noted(self, pairs: Sequence[Pair]) -> bool:
        if pairs:
            d = self.derivatives
            where = f"{d.outputs[pairs[0].output].name} with respect to {d.inputs[pairs[0].input].name}"
            self.report.notes.append(
                f"autodiff of the function without its rule and finite differences disagree (on {where}), as where "
                "forward stops a gradient or rounds: finite differences decided"
            )
        return not pairs

    def _diagnosis(self, comparison: Comparison, is_forward: bool, trusted: bool) -> Diagnosis:
        d = self.derivatives
        reference = d.reference_pushforward if is_forward else d.reference_pullback
        by_autodiff = trusted and not isinstance(reference, UnavailableError)
        return Diagnosis(comparison, is_forward, by_autodiff, self.options.reference != "autodiff")


def _step(eps: float, precision: float) -> float:
    """The step of finite differences: the caller's, or the default, longer where values are coarse."""
    if isinstance(eps, Default) and precision > _DOUBLE_EPS:
        return float(precision ** (1 / 3))
    return float(eps)


def _sources(derivatives: Derivatives) -> list[str]:
    """Where the rules are defined."""
    places: list[str] = []
    for function in derivatives.functions:
        for name in ("backward", "vjp", "jvp"):
            method = inspect.unwrap(getattr(function, name, None) or _sources)
            if getattr(method, "_jaxfn_undefined", False) or method is _sources:
                continue
            try:
                file, line = inspect.getsourcefile(method), inspect.getsourcelines(method)[1]
            except (OSError, TypeError):
                continue
            places.append(f"{file}:{line} ({function.__name__}.{name})")
    return places
