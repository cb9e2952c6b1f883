"""The public functions `gradcheck` and `gradgradcheck`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._gradcheck.problem.derivatives import UnavailableError
from jaxfn._gradcheck.problem.problem import make_problem
from jaxfn._gradcheck.problem.second import second_order
from jaxfn._gradcheck.report.report import GradcheckReport
from jaxfn._gradcheck.run import Options, run_check
from jaxfn._reports import concluded

MAX_MEMORY = 512 << 20


def gradcheck(
    func: Callable[..., Any],
    inputs: Any,
    *,
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
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
    check_vmap: bool = False,
    argnums: int | Sequence[int] | None = None,
    against: str = "both",
    surrogate: Callable[..., Any] | None = None,
    max_memory: int | None = None,
) -> GradcheckReport:
    """Checks a function's first derivatives against finite differences and against autodiff.

    Three ways to compute the Jacobian are compared: the function's own rule, central finite differences, and JAX's
    autodiff of the operations in `forward`, with the rule bypassed. Autodiff must agree with finite differences, along
    random vectors or else in every entry, and the rule must agree with autodiff in every entry. Without a trusted
    autodiff, the rule must agree with finite differences in every entry. Everything is computed in double precision,
    whatever `jax_enable_x64` says.

    It is also checked that `backward` is linear in its gradients, deterministic, respects `ctx.needs_input_grad`, and
    treats undefined gradients as zeros.

    Args:
      func: A Function class or any differentiable JAX callable: a decorated function, a `jax.custom_vjp`, a lambda that
        calls any of these. It may take and return pytrees.
      inputs: A tuple or list of the arguments, or the only argument, if it is neither. A list that is the only argument
        is passed in a tuple. NumPy's float64 arrays stay in float64.
      eps: The step of finite differences. Default: 1e-6, or longer for a function that computes in lower precision.
      atol: The absolute tolerance. Default: 1e-5.
      rtol: The relative tolerance. Default: 1e-3. Any others mean exactly
        `|analytic - reference| <= atol + rtol * |reference|`. With these, the tolerance for a precise reference
        (autodiff, or finite differences with a small error estimate) is a thousand times smaller, but never smaller
        than its errors and rounding: a factor of 1.001 is found. Finite differences of a function that loses digits
        have larger errors, which are estimated and allowed. Next to the end of its domain shorter steps are taken.
      raise_exception: Whether to raise on failure, instead of returning a report that is false.
      nondet_tol: The largest difference of the results of two runs.
      check_undefined_grad: Whether gradients of outputs, and tangents of inputs, may be undefined one at a time.
      check_grad_dtypes: Whether `backward` must return gradients in the dtypes of the inputs.
      check_batched_grad: Whether `backward` must work under `jax.vmap`.
      check_batched_forward_grad: Whether forward mode must work under `jax.vmap`.
      check_forward_ad: Whether to check forward mode.
      check_backward_ad: Whether to check reverse mode.
      fast_mode: Whether to compare random projections, two per output and per input, instead of whole Jacobians. With
        autodiff these are rows `v^T J`, compared entry by entry: a wrong factor is always found, and a mistake in a
        single entry of `J`, `d` times as large as the entry of `v^T J` that contains it, is missed with a probability
        of about `(1e-6 / d)**2`. With finite differences alone it is the number `v^T J u`, as in torch: a mistake in a
        few entries of a large Jacobian may be missed.
      masked: Ignored, as there are no sparse arrays; accepted for torch's signature.
      check_vmap: Whether to compare outputs under `jax.vmap` with a loop: along the first and the last axis, and with
        each input unbatched. Use it for a Function with a `vmap` method. Only floating-point and complex arrays are
        batched and compared.
      argnums: The arguments to differentiate with respect to, as in `jax.grad`. Default: every floating-point or
        complex array in all arguments. Python numbers are static unless `argnums` names their argument.
      against: What the rule is compared with: "both", "finite_differences" or "autodiff". Where the two disagree
        with each other, as for a `forward` that stops a gradient, finite differences decide.
      surrogate: For a rule that is deliberately not the derivative (straight-through): a function of the same inputs
        whose derivative the rule claims to be. Its autodiff decides where finite differences disagree, as for
        `lambda x: x + stop_gradient(round(x) - x)`.
      max_memory: The number of bytes that may be used at a time (default: 512 MiB); large Jacobians are compared in
        parts.

    Returns:
      A `GradcheckReport`, which is true if the check passed.

    Raises:
      GradcheckError: A derivative is wrong; the text says where, and `error.report` has it as data.
      TypeError: `func` is torch code.
      ValueError: Nothing can be differentiated, a number is out of range, or the options contradict each other.

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
      >>> print(jaxfn.gradcheck(cube, np.linspace(-1, 1, 5)))
      gradcheck of cube: passed

    Torch counterpart: `torch.autograd.gradcheck`.
    JAX counterpart: `jax.test_util.check_grads`.
    """
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
        check_vmap=check_vmap,
        fast_mode=fast_mode,
        against=against,
        has_surrogate=surrogate is not None,
        max_memory=MAX_MEMORY if max_memory is None else max_memory,
    )
    with jax.enable_x64(True):
        problem = make_problem(options.name, func, inputs, argnums, surrogate)
    return concluded(run_check(problem, options), raise_exception)


def gradgradcheck(
    func: Callable[..., Any],
    inputs: Any,
    grad_outputs: Any = None,
    *,
    eps: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
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
    argnums: int | Sequence[int] | None = None,
    against: str = "both",
    surrogate: Callable[..., Any] | None = None,
    max_memory: int | None = None,
) -> GradcheckReport:
    """Checks a function's second derivatives, as `gradcheck` checks the first.

    The checked function is the gradient by the function's rule, a function of the inputs and of the gradients of the
    outputs. Finite differences are those of the rule; autodiff differentiates the operations in `forward` twice.

    Args:
      func, inputs, eps, atol, rtol, raise_exception, nondet_tol: See `gradcheck`.
      grad_outputs: An array for each differentiable output. Default: random arrays.
      gen_non_contig_grad_outputs: Ignored, as JAX arrays have no strides; accepted for torch's signature.
      check_undefined_grad, check_grad_dtypes, check_batched_grad: See `gradcheck`.
      check_fwd_over_rev: Whether to check forward mode over reverse mode.
      check_rev_over_rev: Whether to check reverse mode over reverse mode.
      fast_mode, masked, argnums, against, surrogate, max_memory: See `gradcheck`.

    Returns:
      A `GradcheckReport`, which is true if the check passed.

    Raises:
      GradcheckError: A derivative is wrong.
      TypeError: `func` is torch code.
      ValueError: Nothing can be differentiated, a number is out of range, or the options contradict each other.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, jaxfn
      >>> assert jaxfn.gradgradcheck(jnp.tanh, np.linspace(-1, 1, 5))

    Torch counterpart: `torch.autograd.gradgradcheck`.
    """
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
        check_vmap=False,
        fast_mode=fast_mode,
        against=against,
        has_surrogate=surrogate is not None,
        max_memory=MAX_MEMORY if max_memory is None else max_memory,
    )
    with jax.enable_x64(True):
        problem = make_problem(options.name, func, inputs, argnums, surrogate)
        try:
            problem = second_order(problem, grad_outputs)
        except UnavailableError as error:
            report = GradcheckReport(problem.name, options.name, problems=[f"backward raised {error}"])
            return concluded(report, raise_exception)
    return concluded(run_check(problem, options), raise_exception)
