"""One whole check, from the problem to the report."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfn._gradcheck.checks import Checks, Findings
from jaxfn._gradcheck.compare import Comparison, Pair
from jaxfn._gradcheck.diagnosis import Diagnosis
from jaxfn._gradcheck.numbers.programs import Mode
from jaxfn._gradcheck.numbers.sweep import Sweep
from jaxfn._gradcheck.problem.derivatives import Derivatives, UnavailableError, available, derive
from jaxfn._gradcheck.problem.problem import Problem
from jaxfn._gradcheck.projections import PROJECTIONS, Projections
from jaxfn._gradcheck.report.progress import Progress
from jaxfn._gradcheck.report.report import Mismatch, Report
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
    """The options of a check; see `gradcheck`."""

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
    dtype: Any
    max_memory: int
    name: str = "gradcheck"

    def __post_init__(self) -> None:
        if self.reference not in REFERENCES:
            raise ValueError(f"reference is {self.reference!r}; it must be one of {', '.join(map(repr, REFERENCES))}")
        if self.dtype is not None and self.reference == "finite_differences":
            raise ValueError("with dtype= there are no finite differences, which would be mostly rounding")
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
        d = self.derivatives
        is_default = isinstance(options.atol, Default) and isinstance(options.rtol, Default)
        self.tolerance = Tolerance(float(options.atol), float(options.rtol), is_default, d.precision)
        self.step = _step(options.eps, d.precision)
        wanted = ((options.check_backward_ad, d.reverse), (options.check_forward_ad, d.forward))
        self.directions = [direction for is_wanted, direction in wanted if is_wanted]
        self.progress = Progress(f"{options.name} of {problem.name}")
        self.sweep = self._sweep(Mode.VECTORIZED if d.is_traced else Mode.PYTHON_LOOP)
        self.outputs: Sequence[Any] = ()
        self.autodiff_agrees = False

    def run(self) -> Report:
        if not self._is_differentiable():
            return self.report
        self._note_how()
        try:
            self._small_checks()
            if self.report.passed:
                self._whole_jacobians()
        finally:
            self.progress.close()
        return self.report

    def _sweep(self, mode: Mode) -> Sweep:
        return Sweep(mode, self.problem.values, self.options.max_memory, self.progress)

    def _is_differentiable(self) -> bool:
        """Whether there is anything to compare; says what is wrong where there is not."""
        d, say = self.derivatives, self.report.problems.append
        if not (d.outputs or d.stopped):
            raise ValueError(f"{self.problem.name} has no floating or complex output, so it has no derivative to check")
        for direction in self.directions:
            if isinstance(direction.rule, UnavailableError):
                say(f"{direction.name} raised {direction.rule}")
        if not d.outputs and self.report.passed:
            self._check_constant()
        return self.report.passed and bool(d.outputs)

    def _check_constant(self) -> None:
        """Without any differentiable output, none may change with the inputs."""
        d, xs = self.derivatives, self.problem.values
        moved = [x + self.step * (1 + abs(np.asarray(x))) for x in xs]
        for leaf, a, b in zip(d.stopped, d.primal(*xs), d.primal(*moved), strict=True):
            if (np.asarray(a) != np.asarray(b)).any():
                self.report.problems.append(
                    f"{leaf.name} is not differentiable, and so is no other output, but it changes with the inputs: "
                    "its derivative was expected to be zero."
                )

    def _note_how(self) -> None:
        d, note = self.derivatives, self.report.notes.append
        if not d.is_traced:
            note("the function cannot be traced by JAX, so it ran in a Python loop")
        dtype = self.problem.dtype
        if dtype is not None:
            of = "surrogate" if self.options.has_surrogate else "forward"
            by = f"atol {self.tolerance.atol:.2g}, rtol {self.tolerance.rtol:.2g}"
            note(f"computed in {dtype}, with tolerances for that ({by}); compared with autodiff of {of} in float64")
        elif d.precision > _DOUBLE_EPS:
            note(f"the function computes in lower precision than double (spacing {d.precision:.1g})")
        if self.options.reference == "autodiff" or dtype is not None:
            for direction in self.directions:
                if isinstance(direction.reference, UnavailableError):
                    why = direction.reference
                    if dtype is not None:
                        raise ValueError(
                            f"in {dtype} the reference is autodiff in float64, which is not possible for "
                            f"{self.problem.name}: {why}. Give surrogate=, a function of plain operations of JAX whose "
                            "derivative the rule claims to be."
                        )
                    raise ValueError(f'reference="autodiff" is not possible for {self.problem.name}: {why}')
        elif self.options.reference == "both" and isinstance(d.reverse.reference, UnavailableError):
            note(f"compared with finite differences only, not with autodiff: {d.reverse.reference}")

    def _small_checks(self) -> None:
        o, d = self.options, self.derivatives
        if o.check_grad_dtypes:
            for where, got, wanted in d.casts:
                self.report.problems.append(f"{where}: backward returned a gradient of dtype {got} for {wanted}.")
        for direction in self.directions:
            checks = Checks(
                derivatives=d,
                direction=direction,
                xs=self.problem.values,
                step=self.step,
                tolerance=self.tolerance,
                nondet_tol=o.nondet_tol,
                undefined=o.check_undefined_grad,
                # Fast mode has projections of its own.
                samples_autodiff=o.reference == "both" and not o.fast_mode and self.problem.dtype is None,
                max_memory=o.max_memory,
            )
            found = self._run_in_fastest_mode(checks)
            self.report.problems += found.problems
            self.outputs = found.outputs
            self.autodiff_agrees = found.autodiff_agrees
            is_batched = o.check_batched_forward_grad if direction.is_forward else o.check_batched_grad
            if is_batched and self.sweep.mode is not Mode.VECTORIZED:  # otherwise it was batched, and rightly
                self.report.problems += checks.batches_as_it_is()

    def _run_in_fastest_mode(self, checks: Checks) -> Findings:
        """Runs checks in the fastest mode that gives right values, which is also the one for what comes after them."""
        if self.sweep.mode is Mode.VECTORIZED:
            reason = "batching gives other values than computing one by one"
            try:
                found = checks.run(self.sweep.mode)
                if not found.batches_wrong:
                    return found
            except Exception as error:
                reason = f"it cannot be batched ({type(error).__name__}: {error})"
            self.sweep = self._sweep(Mode.COMPILED_LOOP)
            self.report.notes.append(f"ran in a compiled loop: {reason}")
        return checks.run(self.sweep.mode)

    def _whole_jacobians(self) -> None:
        comparison = Comparison(self.derivatives, self.tolerance, self.step, self.sweep, self.outputs)
        by: Comparison | Projections = comparison
        if self.options.fast_mode:
            self.report.notes.append(f"fast mode: {PROJECTIONS} random projections for each output and each input")
            by = Projections(comparison)
        is_trusted = self._is_trusted(by)
        takes_differences = self.options.reference != "autodiff" and self.problem.dtype is None
        for direction in self.directions:
            by_autodiff = is_trusted and direction.has_reference
            if by_autodiff:
                pairs = by.with_autodiff(direction)
            else:
                pairs = by.with_differences(direction, available(direction.rule))
            if pairs:
                diagnosis = Diagnosis(comparison, direction, by_autodiff, takes_differences)
                self.report.mismatches += self._explained(diagnosis, pairs)
        if self.report.mismatches and not self.options.has_surrogate:
            self.report.notes.append(_WAY_OUT)

    def _explained(self, diagnosis: Diagnosis, pairs: Sequence[Pair]) -> list[Mismatch]:
        """Mismatches with the entries that make them; those of projections only where that is affordable."""
        if not self.options.fast_mode:
            return diagnosis.mismatches(pairs)
        d = self.derivatives
        found: list[Mismatch] = []
        for pair in pairs:
            if d.outputs[pair.output].num_components * d.inputs[pair.input].num_components <= _EXPLAINED:
                explained = diagnosis.whole(pair)
                found += [explained] if explained else []
            else:
                found.append(diagnosis.named(pair))
        return found

    def _is_trusted(self, by: Comparison | Projections) -> bool:
        """Whether autodiff of the bare function may decide: finite differences agree with it, or are not asked."""
        d = self.derivatives
        if self.options.reference != "both" or self.problem.dtype is not None:
            return self.options.reference != "finite_differences"
        if self.autodiff_agrees:
            return True
        for direction in (d.forward, d.reverse):
            if direction.has_reference:
                return self._noted(by.with_differences(direction, available(direction.reference), coarsely=True))
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


def _step(eps: float, precision: float) -> float:
    """The step of finite differences: the caller's, or the default, longer where values are coarse."""
    if isinstance(eps, Default) and precision > _DOUBLE_EPS:
        return float(precision ** (1 / 3))
    return float(eps)


def _sources(derivatives: Derivatives) -> list[str]:
    """Returns the source locations of the rules."""
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
