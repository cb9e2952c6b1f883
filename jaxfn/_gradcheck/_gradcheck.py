"""The public functions `gradcheck` and `gradgradcheck`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._gradcheck._derivatives import UnavailableError
from jaxfn._gradcheck._problem import make_problem
from jaxfn._gradcheck._report import GradcheckError, Report
from jaxfn._gradcheck._run import Options, run_check
from jaxfn._gradcheck._second import second_order
from jaxfn._gradcheck._tolerance import Default

_EPS = Default(1e-6)
_ATOL = Default(1e-5)
_RTOL = Default(1e-3)
_MAX_MEMORY = 512 << 20


def gradcheck(
    func: Callable[..., Any],
    inputs: Any,
    eps: float = _EPS,
    atol: float = _ATOL,
    rtol: float = _RTOL,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_batched_forward_grad: bool = False,
    check_forward_ad: bool = False,
    check_backward_ad: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
    *,
    argnums: int | Sequence[int] | None = None,
    reference: str = "both",
    surrogate: Callable[..., Any] | None = None,
    max_memory: int = _MAX_MEMORY,
    return_report: bool = False,
) -> Any:
    options = Options(
        eps=eps,
        atol=atol,
        rtol=rtol,
        nondet_tol=nondet_tol,
        check_undefined_grad=check_undefined_grad,
        check_grad_dtypes=check_grad_dtypes,
        check_batched_grad=check_batched_grad,
        check_batched_forward_grad=check_batched_forward_grad,
        check_forward_ad=check_forward_ad,
        check_backward_ad=check_backward_ad,
        fast_mode=fast_mode,
        reference=reference,
        has_surrogate=surrogate is not None,
        max_memory=max_memory,
    )
    with jax.enable_x64(True):
        problem = make_problem(func, inputs, argnums, surrogate)
    return _concluded(run_check(problem, options), raise_exception, return_report)


def gradgradcheck(
    func: Callable[..., Any],
    inputs: Any,
    grad_outputs: Any = None,
    eps: float = _EPS,
    atol: float = _ATOL,
    rtol: float = _RTOL,
    gen_non_contig_grad_outputs: bool = False,
    raise_exception: bool = True,
    nondet_tol: float = 0.0,
    check_undefined_grad: bool = True,
    check_grad_dtypes: bool = False,
    check_batched_grad: bool = False,
    check_fwd_over_rev: bool = False,
    check_rev_over_rev: bool = True,
    fast_mode: bool = False,
    masked: bool | None = None,
    *,
    argnums: int | Sequence[int] | None = None,
    reference: str = "both",
    surrogate: Callable[..., Any] | None = None,
    max_memory: int = _MAX_MEMORY,
    return_report: bool = False,
) -> Any:
    options = Options(
        name="gradgradcheck",
        eps=eps,
        atol=atol,
        rtol=rtol,
        nondet_tol=nondet_tol,
        check_undefined_grad=check_undefined_grad,
        check_grad_dtypes=check_grad_dtypes,
        check_batched_grad=check_batched_grad,
        check_batched_forward_grad=False,
        check_forward_ad=check_fwd_over_rev,
        check_backward_ad=check_rev_over_rev,
        fast_mode=fast_mode,
        reference=reference,
        has_surrogate=surrogate is not None,
        max_memory=max_memory,
    )
    with jax.enable_x64(True):
        problem = make_problem(func, inputs, argnums, surrogate)
        try:
            problem = second_order(problem, grad_outputs)
        except UnavailableError as error:
            report = Report(problem.name, options.name, problems=[f"backward raised {error}"])
            return _concluded(report, raise_exception, return_report)
    return _concluded(run_check(problem, options), raise_exception, return_report)


def _concluded(report: Report, raise_exception: bool, return_report: bool) -> Any:
    if return_report:
        return report
    if report.passed:
        return True
    if raise_exception:
        raise GradcheckError(report)
    return False
