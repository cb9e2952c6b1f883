"""The public function `check`: all checks of a Function that need no reference, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxfn._check.arguments import as_arguments, as_double, as_function, function_name
from jaxfn._check.closeness import agree, by_magnitude, largest, magnitude_groups, rounding_of_terms
from jaxfn._check.draws import random_generator
from jaxfn._gradcheck.problem.derivatives import ReverseOnlyError, derive
from jaxfn._gradcheck.problem.problem import make_problem
from jaxfn._gradcheck.public import gradcheck, gradgradcheck
from jaxfn._gradcheck.report.report import GradcheckReport
from jaxfn._reports import Report, concluded, public
from jaxfn._tree import is_array_leaf

_ROUNDING = 1e4  # difference of eager and compiled results, in units in the last place of numbers of that magnitude
_SAMPLES = 2  # of inputs that differ in the last digits, at which the rounding of numbers that cancel is measured
_ULPS = 4
_ONCE = "trying to differentiate twice a function that was marked with @once_differentiable"


@public
@dataclass(repr=False, eq=False)
class CheckReport(Report):
    """The report of `check`; true if every check passed.

    Attributes:
      function: the name of the function.
      reports: the reports of `gradcheck` and `gradgradcheck`.
      problems: other failures, as text.
      notes: which checks did not apply.
    """

    function: str
    reports: list[GradcheckReport] = field(default_factory=list[GradcheckReport])
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def failures(self) -> list[GradcheckReport | str]:
        """The failed reports and the other problems."""
        return [*(report for report in self.reports if not report.passed), *self.problems]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain Python values."""
        return super().to_dict() | {"reports": [report.to_dict() for report in self.reports]}

    def __str__(self) -> str:
        head = f"check of {self.function}: {'passed' if self.passed else 'FAILED'}"
        return "\n".join([head, *map(str, self.reports), *self.problems, *(f"note: {note}" for note in self.notes)])


def check(
    func: Callable[..., Any],
    inputs: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    fast_mode: bool = False,
    raise_exception: bool = True,
    argnums: int | Sequence[int] | None = None,
    surrogate: Callable[..., Any] | None = None,
    second_order: bool = True,
) -> CheckReport:
    """Runs every check of a function that needs no reference implementation: use this first.

    These are `gradcheck` in each mode that the function has, with `jax.vmap` of the function and of its gradients,
    `gradgradcheck`, and a comparison of compiled with eager results. Use `gradcheck` for its other options.

    Args:
      func: A Function class or any differentiable JAX callable; see `gradcheck`.
      inputs: A tuple or list of the arguments, or the only argument, if it is neither.
      atol, rtol: The tolerances of derivatives; see `gradcheck`.
      fast_mode: Whether to compare random projections instead of whole Jacobians; see `gradcheck`.
      raise_exception: Whether to raise on failure.
      argnums: The arguments to differentiate with respect to, as in `jax.grad`. Default: every inexact array.
      surrogate: The function whose derivative the rule claims to be; see `gradcheck`.
      second_order: Whether to check second derivatives.

    Returns:
      A `CheckReport`, which is true if every check passed.

    Raises:
      CheckError: A check failed, and `error.report` has the report.
      TypeError: `func` is torch code.
      ValueError: Nothing can be differentiated, or a tolerance is out of range.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, jaxfn
      >>> @jaxfn.function
      ... def cube(ctx, x):
      ...     ctx.save_for_backward(x)
      ...     return x ** 3
      >>> @cube.backward
      ... def _(ctx, grad_output):
      ...     (x,) = ctx.saved_tensors
      ...     return 3 * x ** 2 * grad_output
      >>> report = jaxfn.check(cube, np.linspace(-1, 1, 5))
      >>> report.passed, [r.check for r in report.reports]
      (True, ['gradcheck', 'gradgradcheck'])

    Torch counterpart: `torch.autograd.gradcheck` and `gradgradcheck`, two calls.
    """
    func = as_function(func, "check")
    report = CheckReport(function_name(func))
    options: dict[str, Any] = {"argnums": argnums, "surrogate": surrogate, "atol": atol, "rtol": rtol}
    options |= {"fast_mode": fast_mode, "raise_exception": False}
    with jax.enable_x64(True):
        problem = make_problem("check", func, inputs, argnums, surrogate)
        # So that the checks below do not warn of lower precision again.
        inputs = jax.tree.map(_as_double, as_arguments(inputs))
        derivatives = derive(problem, reverse=False, forward=True)
        has_forward_mode = not isinstance(derivatives.forward.rule, ReverseOnlyError)
        if derivatives.is_traced:
            report.problems += _problems_of_jit(problem.call, problem.values, derivatives.precision)
        else:
            report.notes.append("JAX cannot trace the function, so jax.jit was not checked")
    if not has_forward_mode:
        report.notes.append("forward mode is not defined, so it was not checked")
    report.reports.append(
        gradcheck(
            func,
            inputs,
            check_batched_grad=True,
            check_forward_ad=has_forward_mode,
            check_batched_forward_grad=has_forward_mode,
            check_vmap=True,
            **options,
        )
    )
    if second_order and report.passed:
        try:
            second = gradgradcheck(func, inputs, **options)
        except ValueError as error:
            report.notes.append(f"second derivatives were not checked: {error}")
        else:
            if second.problems and all(problem.endswith(_ONCE) for problem in second.problems):
                report.notes.append("backward is marked with @once_differentiable, so there are no second derivatives")
            else:
                report.reports.append(second)
    return concluded(report, raise_exception)


def _as_double(leaf: Any) -> Any:
    return as_double(leaf) if is_array_leaf(leaf) else leaf


def _problems_of_jit(call: Callable[..., list[Any]], values: Sequence[Any], precision: float) -> list[str]:
    """Compares compiled with eager outputs."""
    generator = random_generator("jit")

    def outputs_nearby() -> list[Any]:
        factors = [1 + _ULPS * precision * generator.uniform(-1, 1, x.shape) for x in values]
        return list(map(np.asarray, call(*(x * factor for x, factor in zip(values, factors, strict=True)))))

    eager, compiled = (list(map(np.asarray, f(*values))) for f in (call, jax.jit(call)))
    nearby = zip(*(outputs_nearby() for _ in range(_SAMPLES)), strict=True)
    return [
        f"output {index} differs between an eager call and jax.jit by more than rounding."
        for index, (a, b, others) in enumerate(zip(eager, compiled, nearby, strict=True))
        if not agree(b, a, _allowed(a, np.stack(others), precision)).all()
    ]


def _allowed(output: Any, nearby: Any, precision: float) -> Any:
    """Returns the allowed differences of an output, from its values at inputs that differ in the last digits."""
    with np.errstate(invalid="ignore"):
        errors, magnitudes = abs(nearby - output), np.where(np.isfinite(output), abs(output), 0.0)
    groups = magnitude_groups(magnitudes, floor=largest(errors[np.isfinite(errors)]))
    return by_magnitude(errors, magnitudes, groups).largest + rounding_of_terms(output, _ROUNDING * precision, 0.0)
