"""The public functions `gradcheck` and `gradgradcheck`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jaxfn._gradcheck.problem.derivatives import UnavailableError
from jaxfn._gradcheck.problem.problem import make_problem
from jaxfn._gradcheck.problem.second import second_order
from jaxfn._gradcheck.report.report import GradcheckError, Report
from jaxfn._gradcheck.run import Options, run_check
from jaxfn._gradcheck.tolerance import ATOL, RTOL, Default

_EPS = Default(1e-6)
_MAX_MEMORY = 512 << 20


@overload
def gradcheck(
    func: Callable[..., Any], inputs: Any, *args: Any, return_report: Literal[True], **options: Any
) -> Report: ...
@overload
def gradcheck(
    func: Callable[..., Any],
    inputs: Any,
    eps: float = _EPS,
    atol: float = ATOL,
    rtol: float = RTOL,
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
    dtype: Any = None,
    max_memory: int = _MAX_MEMORY,
    return_report: Literal[False] = False,
) -> bool: ...
def gradcheck(
    func: Callable[..., Any],
    inputs: Any,
    eps: float = _EPS,
    atol: float = ATOL,
    rtol: float = RTOL,
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
    dtype: Any = None,
    max_memory: int = _MAX_MEMORY,
    return_report: bool = False,
) -> bool | Report:
    """Checks a function's first derivatives against finite differences and against autodiff.

    Three ways to the same Jacobian are compared: the function's own rule, central finite differences, and JAX's
    autodiff of the operations in `forward`, with the rule taken off. Autodiff has to agree with finite differences, in
    random directions or else in every entry, and the rule has to agree with autodiff in every entry; where there is no
    autodiff that can be trusted, it has to agree with finite differences in every entry. Everything is computed in
    double precision, whatever `jax_enable_x64` says, and that setting is left alone.

    Besides the values it is checked that `backward` is linear in the gradients it gets, deterministic, respects
    `ctx.needs_input_grad` and takes undefined gradients for zeros.

    In a test suite one line does: `assert jaxfn.gradcheck(f, inputs)`.

    Args:
      func: any differentiable JAX callable: a Function's `apply`, a decorated function, a `jax.custom_vjp`, a lambda
        over any of these. It may take and return pytrees.
      inputs: a tuple of its arguments, or the one argument. NumPy's float64 arrays stay what they are.
      eps: the step of finite differences.
      atol: the absolute tolerance.
      rtol: the relative one. Chosen tolerances mean exactly `|analytic - reference| <= atol + rtol * |reference|`.
        If both are left to their defaults, a reference that is precise enough (autodiff, or finite differences with a
        small error estimate) has to be met a thousand times closer, but never closer than its errors and rounding
        allow: a factor of 1.001 is found.
      raise_exception: whether to raise where something is wrong, instead of returning False.
      nondet_tol: how far apart the results of two runs may be.
      check_undefined_grad: whether gradients of outputs, and tangents of inputs, may be undefined one at a time.
      check_grad_dtypes: whether `backward` has to return gradients in the inputs' dtypes.
      check_batched_grad: whether `backward` has to work under `jax.vmap`.
      check_batched_forward_grad: whether forward mode has to.
      check_forward_ad: whether to check forward mode.
      check_backward_ad: whether to check reverse mode.
      fast_mode: compares random projections, two for each output and each input, in place of whole Jacobians. With
        autodiff at hand these are rows `v^T J`, compared entry by entry: a wrong factor is always seen, and a mistake
        in a single entry of `J`, `d` times as large as the entry of `v^T J` that it goes into, is missed with a
        probability of about `(1e-6 / d)**2`. With finite differences alone it is the number `v^T J u`, as in torch,
        with a tolerance that grows with the arrays: a mistake in a few entries of a large Jacobian is lost in it.
      masked: accepted for torch's sake; there are no sparse arrays here.
      argnums: which arguments to differentiate with respect to; by default every floating or complex array in all of
        them. Python numbers are static unless their argument is named here.
      reference: "both", "finite_differences" or "autodiff". Where the two disagree with each other, as for a `forward`
        that stops a gradient, finite differences decide.
      surrogate: for a rule that is deliberately not the derivative (straight-through): a function of the same inputs
        whose derivative the rule claims to be.
      dtype: for a function that cannot run in double precision, such as a kernel with a float32 output: what its
        inputs are cast to. The reference is autodiff in float64, of `surrogate` or else of the operations in `forward`,
        and no finite differences are taken, since rounding would be most of them. Tolerances are those of the dtype: by
        default `rtol` is the square root of its epsilon, and `atol` a hundredth of that, for entries of order 1.
        `kernelcheck` judges by the errors that a plain implementation makes, which is sharper.
      max_memory: bytes that may be used at a time; large Jacobians are compared in parts and never held.
      return_report: whether to return the report, which is true where nothing is wrong, in place of True or False.

    Returns:
      True, or False where something is wrong and `raise_exception` is off.

    Raises:
      GradcheckError: something is wrong; its text says where, and `error.report` has it as data.
      ValueError: nothing can be differentiated, or the options contradict each other.

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
      >>> jaxfn.gradcheck(cube, np.linspace(-1, 1, 5))
      True

    Torch counterpart: `torch.autograd.gradcheck`.
    """
    atol, rtol = _tolerances(atol, rtol, dtype)
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
        dtype=dtype,
        max_memory=max_memory,
    )
    with jax.enable_x64(True):
        problem = make_problem(func, inputs, argnums, surrogate, dtype)
    return _concluded(run_check(problem, options), raise_exception, return_report)


@overload
def gradgradcheck(
    func: Callable[..., Any], inputs: Any, *args: Any, return_report: Literal[True], **options: Any
) -> Report: ...
@overload
def gradgradcheck(
    func: Callable[..., Any],
    inputs: Any,
    grad_outputs: Any = None,
    eps: float = _EPS,
    atol: float = ATOL,
    rtol: float = RTOL,
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
    dtype: Any = None,
    max_memory: int = _MAX_MEMORY,
    return_report: Literal[False] = False,
) -> bool: ...
def gradgradcheck(
    func: Callable[..., Any],
    inputs: Any,
    grad_outputs: Any = None,
    eps: float = _EPS,
    atol: float = ATOL,
    rtol: float = RTOL,
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
    dtype: Any = None,
    max_memory: int = _MAX_MEMORY,
    return_report: bool = False,
) -> bool | Report:
    """Checks a function's second derivatives: as `gradcheck`, of the gradient that its rule computes.

    The gradient is a function of the inputs and of the gradients of the outputs. Its finite differences are those of
    the rule as it is; autodiff differentiates the operations in `forward` twice.

    Args:
      func, inputs, eps, atol, rtol, raise_exception, nondet_tol: see `gradcheck`.
      grad_outputs: an array for each differentiable output; random ones by default.
      gen_non_contig_grad_outputs: accepted for torch's sake; JAX arrays have no strides.
      check_undefined_grad, check_grad_dtypes, check_batched_grad: see `gradcheck`.
      check_fwd_over_rev: whether to check forward mode over reverse mode.
      check_rev_over_rev: whether to check reverse mode over reverse mode.
      fast_mode, masked, argnums, reference, surrogate, dtype, max_memory, return_report: see `gradcheck`.

    Returns:
      True, or False where something is wrong and `raise_exception` is off.

    Raises:
      GradcheckError: something is wrong.
      ValueError: nothing can be differentiated, or the options contradict each other.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, jaxfn
      >>> jaxfn.gradgradcheck(jnp.tanh, np.linspace(-1, 1, 5))
      True

    Torch counterpart: `torch.autograd.gradgradcheck`.
    """
    atol, rtol = _tolerances(atol, rtol, dtype)
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
        dtype=dtype,
        max_memory=max_memory,
    )
    with jax.enable_x64(True):
        problem = make_problem(func, inputs, argnums, surrogate, dtype)
        try:
            problem = second_order(problem, grad_outputs)
        except UnavailableError as error:
            report = Report(problem.name, options.name, problems=[f"backward raised {error}"])
            return _concluded(report, raise_exception, return_report)
    return _concluded(run_check(problem, options), raise_exception, return_report)


def _tolerances(atol: float, rtol: float, dtype: Any) -> tuple[float, float]:
    """Both tolerances; where neither was chosen, those of the dtype."""
    if dtype is not None and isinstance(atol, Default) and isinstance(rtol, Default):
        root = math.sqrt(float(jnp.finfo(dtype).eps))
        return Default(root / 100), Default(root)
    return atol, rtol


def _concluded(report: Report, raise_exception: bool, return_report: bool) -> bool | Report:
    if return_report:
        return report
    if report.passed:
        return True
    if raise_exception:
        raise GradcheckError(report)
    return False
