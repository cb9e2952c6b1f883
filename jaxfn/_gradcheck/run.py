"""One check, from the problem to the report."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from jaxfn._check.arguments import require_numbers
from jaxfn._check.closeness import agree
from jaxfn._check.draws import draw
from jaxfn._check.partition import sharding_rule_problems
from jaxfn._diagnostics import source_location
from jaxfn._gradcheck.checks import Findings, PropertyChecks, problems_of_vmap
from jaxfn._gradcheck.compare import Comparison, JacobianBlock, Reference
from jaxfn._gradcheck.diagnosis import Diagnosis
from jaxfn._gradcheck.evaluation.batches import BatchedEvaluator
from jaxfn._gradcheck.evaluation.execution import ExecutionMode
from jaxfn._gradcheck.evaluation.vectors import PROJECTIONS, random_bases, unit_bases
from jaxfn._gradcheck.problem.derivatives import Derivatives, UnavailableError, available, derive
from jaxfn._gradcheck.problem.problem import Problem
from jaxfn._gradcheck.report.kinds import KINK, name_swapped
from jaxfn._gradcheck.report.progress import Progress
from jaxfn._gradcheck.report.report import GradcheckReport, Mismatch
from jaxfn._gradcheck.saved import explain_by_saved
from jaxfn._gradcheck.tolerance import ATOL, EPS, RTOL, Tolerance

REFERENCES = ("both", "finite_differences", "autodiff")
_DOUBLE_EPS = float(np.finfo(np.float64).eps)
# In fast mode a failing Jacobian of up to this many entries is computed as a whole, to show which entries are wrong.
_MAX_EXPLAINED_ENTRIES = 1 << 20

_KINK_HINT = (
    "kink: the rule is right a small step away on either side, and its value here is between those of both sides. "
    "Finite differences and autodiff may have another one: choose inputs off the kink."
)
_SURROGATE_HINT = (
    "a rule that is deliberately not the derivative of forward (straight-through, say) disagrees with finite "
    "differences and autodiff alike. Declare it with surrogate=, a function whose derivative the rule claims to be."
)


@dataclass(frozen=True)
class Options:
    """The options of a check; see `gradcheck`."""

    eps: float | None
    atol: float | None
    rtol: float | None
    nondet_tol: float
    check_undefined_grad: bool
    check_grad_dtypes: bool
    check_batched_grad: bool
    check_batched_forward_grad: bool
    check_forward_ad: bool
    check_backward_ad: bool
    check_vmap: bool
    fast_mode: bool
    against: str
    has_surrogate: bool
    max_memory: int
    name: str = "gradcheck"

    def __post_init__(self) -> None:
        require_numbers(self.name, eps=self.eps, max_memory=self.max_memory)
        require_numbers(self.name, can_be_zero=True, atol=self.atol, rtol=self.rtol, nondet_tol=self.nondet_tol)
        if self.against not in REFERENCES:
            raise ValueError(f"against is {self.against!r}; it must be one of {', '.join(map(repr, REFERENCES))}")
        needs = (
            ("check_batched_grad", self.check_batched_grad, "check_backward_ad", self.check_backward_ad),
            ("check_batched_forward_grad", self.check_batched_forward_grad, "check_forward_ad", self.check_forward_ad),
        )
        if not (self.check_forward_ad or self.check_backward_ad):
            raise ValueError("check_forward_ad and check_backward_ad are both off: nothing is left to check")
        for name, is_on, required, is_met in needs:
            if is_on and not is_met:
                raise ValueError(f"{name} needs {required}=True")


def run_check(problem: Problem, options: Options) -> GradcheckReport:
    """Checks a problem.

    Raises:
      ValueError: the options contradict each other, or there is nothing to check.
      Exception: any error of the function itself.
    """
    # NaN is found by comparison, so NumPy need not warn of it.
    with jax.enable_x64(True), np.errstate(all="ignore"):
        return _Check(problem, options).run()


class _Check:
    """A check in progress."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.options = options
        self.problem = problem
        self.report = GradcheckReport(problem.name, options.name)
        self.derivatives = derive(
            problem,
            reverse=options.check_backward_ad,
            forward=options.check_forward_ad,
            reference=options.against != "finite_differences",
            retrace=True,
        )
        self.report.source = _sources(self.derivatives)
        d = self.derivatives
        atol, rtol = (ATOL if options.atol is None else options.atol, RTOL if options.rtol is None else options.rtol)
        self.tolerance = Tolerance(float(atol), float(rtol), (atol, rtol) == (ATOL, RTOL), d.precision)
        self.step = _step(options.eps, d.precision)
        modes = ((options.check_backward_ad, d.reverse), (options.check_forward_ad, d.forward))
        self.modes = [mode for is_checked, mode in modes if is_checked]
        self.progress = Progress(f"{options.name} of {problem.name}", "directions")
        self.evaluator = self._new_evaluator(ExecutionMode.VECTORIZED if d.is_traced else ExecutionMode.PYTHON_LOOP)
        self.findings: dict[str, Findings] = {}  # by the name of the mode

    def run(self) -> GradcheckReport:
        if not self._is_differentiable():
            return self.report
        self._note_settings()
        with self.progress:
            self._check_properties()
            if self.report.passed:
                self._compare_jacobians()
        return self.report

    def _new_evaluator(self, mode: ExecutionMode) -> BatchedEvaluator:
        return BatchedEvaluator(mode, self.problem.values, self.options.max_memory, self.progress)

    def _is_differentiable(self) -> bool:
        """Whether there is anything to compare; otherwise adds the problem to the report."""
        d, say = self.derivatives, self.report.problems.append
        if not (d.outputs or d.stopped):
            raise ValueError(f"{self.problem.name} has no floating or complex output, so it has no derivative to check")
        for mode in self.modes:
            if isinstance(mode.rule, UnavailableError):
                say(f"{mode.name} raised {mode.rule}")
        if not d.outputs and self.report.passed:
            self._check_constant()
        return self.report.passed and bool(d.outputs)

    def _check_constant(self) -> None:
        """Adds a problem if an output without derivative changes with the inputs."""
        d, xs = self.derivatives, self.problem.values
        moved = [x + self.step * (1 + abs(np.asarray(x))) for x in xs]
        for leaf, a, b in zip(d.stopped, d.primal(*xs), d.primal(*moved), strict=True):
            if not agree(np.asarray(b), np.asarray(a), 0.0).all():
                self.report.problems.append(
                    f"{leaf.name} is not differentiable, nor is any other output, but it changes with the inputs: "
                    "its derivative was expected to be zero."
                )

    def _note_settings(self) -> None:
        d, note = self.derivatives, self.report.notes.append
        if not d.is_traced:
            note("JAX cannot trace the function, so it ran in a Python loop")
        if d.precision > _DOUBLE_EPS:
            note(f"the function computes in lower precision than double (spacing {d.precision:.1g})")
        for mode in self.modes if self.options.against == "autodiff" else ():
            if not mode.has_reference:
                raise ValueError(f'against="autodiff" is not possible for {self.problem.name}: {mode.reference}')

    def _check_properties(self) -> None:
        o, d = self.options, self.derivatives
        if o.check_grad_dtypes:
            for where, got, expected in d.casts:
                self.report.problems.append(f"{where}: backward returned a gradient of dtype {got} for {expected}.")
        for mode in self.modes:
            checks = PropertyChecks(
                derivatives=d,
                mode=mode,
                xs=self.problem.values,
                step=self.step,
                tolerance=self.tolerance,
                nondet_tol=o.nondet_tol,
                undefined=o.check_undefined_grad,
                # Fast mode compares autodiff by projections.
                samples_autodiff=o.against == "both" and not o.fast_mode,
                max_memory=o.max_memory,
            )
            found = self._run_by_operations(checks) or self._run_in_fastest_mode(checks)
            self.report.problems += found.problems
            self.findings[mode.name] = found
            is_batched = o.check_batched_forward_grad if mode.is_forward else o.check_batched_grad
            # In vectorized mode the checks themselves have batched the rule.
            if is_batched and self.evaluator.mode is not ExecutionMode.VECTORIZED:
                self.report.problems += checks.problems_of_eager_batching()

        if o.check_vmap and self.report.passed:
            self.report.problems += problems_of_vmap(self.problem, d, self.tolerance)
        if any(function.sharding_rule is not None for function in d.functions):
            for mode in self.modes:
                vectors = [draw("sharding rule", i, leaf) for i, leaf in enumerate(mode.seed_leaves)]
                run = partial(mode.derivative_of(d.call), self.problem.values, vectors)
                self.report.problems += sharding_rule_problems(run)

    def _run_by_operations(self, checks: PropertyChecks) -> Findings | None:
        """Runs the checks of a small function operation by operation; returns what they found if they all passed."""
        if self.evaluator.mode is not ExecutionMode.VECTORIZED or not checks.include_jacobian:
            return None
        try:
            found = checks.run(ExecutionMode.OPERATIONS)
        except Exception:  # unsuitable, or an error of the function itself, which the whole program then raises
            return None
        return found if found.are_complete else None

    def _run_in_fastest_mode(self, checks: PropertyChecks) -> Findings:
        """Runs checks in the fastest execution mode that gives right values, which later evaluations use too."""
        if self.evaluator.mode is ExecutionMode.VECTORIZED:
            reason = "batching changes values"
            try:
                found = checks.run(self.evaluator.mode)
                if not found.batches_wrong:
                    return found
            except Exception as error:
                reason = f"it cannot be batched ({type(error).__name__}: {error})"
            self.evaluator = self._new_evaluator(ExecutionMode.COMPILED_LOOP)
            self.report.notes.append(f"ran in a compiled loop: {reason}")
        return checks.run(self.evaluator.mode)

    def _compare_jacobians(self) -> None:
        d = self.derivatives
        bases = unit_bases
        if self.options.fast_mode:
            self.report.notes.append(f"fast mode: {PROJECTIONS} random projections of each output and each input")
            bases = random_bases
        comparison = Comparison(d, self.tolerance, self.step, self.evaluator, bases)
        is_trusted = self._is_trusted(comparison)
        if is_trusted and self._is_resolved(comparison):
            comparison = replace(comparison, tolerance=replace(self.tolerance, least_scale=0.0))
        takes_differences = self.options.against != "autodiff"
        for mode in self.modes:
            found = self.findings[mode.name]
            if is_trusted and found.matches_autodiff:
                continue
            by_autodiff = is_trusted and mode.has_reference
            if not by_autodiff:
                self._note_differences()
            reference = Reference(mode, available(mode.rule), by_autodiff)
            diagnosis = Diagnosis(replace(comparison, bases=unit_bases), reference, takes_differences)
            mismatches = self._explained(diagnosis, comparison.blocks(reference))
            self._classify(mismatches, comparison, reference)
            self.report.mismatches += mismatches
            if found.is_nan and not mismatches:
                self.report.problems.append(
                    f"{mode.method} is not linear: its {mode.result_name}s are NaN for some {mode.seed_name}s, but "
                    "right for unit vectors."
                )
        self.report.notes += comparison.notes if self.report.passed else ()
        of_backward = [m for m in self.report.mismatches if m.mode == "reverse"]
        if any(all(entry.value == 0 for entry in mismatch.entries) for mismatch in of_backward):
            self.report.notes += [f"{m} returned None for {x}, so its gradient is zero" for m, x in d.without_gradient]
        if any(mismatch.mistake == KINK for mismatch in self.report.mismatches):
            self.report.notes.append(_KINK_HINT)
        if any(map(_may_be_deliberate, self.report.mismatches)) and not self.options.has_surrogate:
            self.report.notes.append(_SURROGATE_HINT)

    def _note_differences(self) -> None:
        """Notes that finite differences decide because there is no autodiff."""
        if self.options.against == "both" and not self.derivatives.reverse.has_reference:
            note = f"compared with finite differences only, not with autodiff: {self.derivatives.reverse.reference}"
            self.report.notes += [note] if note not in self.report.notes else []

    def _classify(self, mismatches: Sequence[Mismatch], comparison: Comparison, reference: Reference) -> None:
        """Adds kinds that several mismatches of a mode show together."""
        name_swapped(mismatches)
        if any(mismatch.mistake != KINK for mismatch in mismatches):
            saved, stopped = explain_by_saved(comparison, reference)
            self.report.notes += [stopped] if stopped else []
            for mismatch in mismatches if saved else ():
                mismatch.mistake = f"{mismatch.mistake}, or {saved}" if mismatch.mistake else saved

    def _explained(self, diagnosis: Diagnosis, blocks: Sequence[JacobianBlock]) -> list[Mismatch]:
        """Returns mismatches with their entries; for projections only if the Jacobian is small."""
        if not self.options.fast_mode:
            return diagnosis.mismatches(blocks)
        d = self.derivatives
        found: list[Mismatch] = []
        for block in blocks:
            if d.outputs[block.output].num_components * d.inputs[block.input].num_components <= _MAX_EXPLAINED_ENTRIES:
                explained = diagnosis.whole(block)
                found += [explained] if explained else []
            else:
                found.append(diagnosis.named(block))
        return found

    def _is_trusted(self, comparison: Comparison) -> bool:
        """Whether autodiff decides: finite differences agree with it, or are not used."""
        d = self.derivatives
        if self.options.against != "both":
            return self.options.against != "finite_differences"
        if self.findings[self.modes[-1].name].autodiff_agrees:
            return True
        for mode in (d.forward, d.reverse):
            if mode.has_reference:
                reference = Reference(mode, available(mode.reference), is_autodiff=False, is_coarse=True)
                return self._autodiff_decides(comparison.blocks(reference))
        return False

    def _is_resolved(self, comparison: Comparison) -> bool:
        """Whether small entries of autodiff are exact, so that a rule is compared with them at every scale."""
        found, d = self.findings[self.modes[-1].name], self.derivatives
        if self.options.against == "autodiff" or found.autodiff_agrees:
            return self.options.against == "autodiff" or found.is_resolved
        mode = d.forward if d.forward.has_reference else d.reverse
        return replace(comparison, bases=random_bases).is_resolved(mode)

    def _autodiff_decides(self, blocks: Sequence[JacobianBlock]) -> bool:
        """Whether autodiff decides, from the blocks in which it differs from finite differences."""
        if not blocks:
            return True
        d = self.derivatives
        where = f"{d.outputs[blocks[0].output].name} with respect to {d.inputs[blocks[0].input].name}"
        has_surrogate = self.options.has_surrogate
        of, code = ("surrogate", "surrogate") if has_surrogate else ("the function without its rule", "forward")
        decides = "autodiff" if has_surrogate else "finite differences"
        self.report.notes.append(
            f"autodiff of {of} and finite differences disagree (on {where}), as they do if {code} stops a gradient or "
            f"rounds: {decides} decided"
        )
        return has_surrogate


def _may_be_deliberate(mismatch: Mismatch) -> bool:
    """Whether the wrong entries replace a derivative of 0, as that of rounding, or of the identity."""
    identity = mismatch.output_shape == mismatch.input_shape
    return mismatch.mistake != KINK and all(
        abs(e.expected) <= e.allowed or (identity and abs(e.expected - 1) <= e.allowed) for e in mismatch.entries
    )


def _step(eps: float | None, precision: float) -> float:
    """Returns the step of finite differences; the default is longer for values in low precision."""
    if eps in (None, EPS) and precision > _DOUBLE_EPS:
        return float(precision ** (1 / 3))
    return float(EPS if eps is None else eps)


def _sources(derivatives: Derivatives) -> list[str]:
    """Returns the source locations of the rules."""
    locations: list[str] = []
    for function in derivatives.functions:
        for name in ("backward", "vjp", "jvp"):
            method = getattr(function, name, None)
            if method is None or getattr(inspect.unwrap(method), "_jaxfn_undefined", False):
                continue
            location = source_location(method)
            locations += [f"{location} ({function.__name__}.{name})"] if location else []
    return locations
