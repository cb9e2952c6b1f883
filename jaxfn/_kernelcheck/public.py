"""The public function `kernelcheck`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._check.arguments import as_arguments, as_function, function_name, require_numbers
from jaxfn._check.draws import random_generator
from jaxfn._gradcheck.report.progress import Progress
from jaxfn._kernelcheck.arguments import kernel_arguments
from jaxfn._kernelcheck.checks import NAMES, CheckOptions, CustomCheck, run_checks
from jaxfn._kernelcheck.comparison import Float64Reference, KernelComparison
from jaxfn._kernelcheck.report import PLAIN_CHECKS, KernelcheckReport
from jaxfn._reports import concluded


def kernelcheck(
    func: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Any,
    *,
    factor: float = 2.0,
    raise_exception: bool = True,
    argnums: int | Sequence[int] | None = None,
    dtypes: Any | Sequence[Any] = ("float32", "bfloat16"),
    draws: int = 8,
    sizes: Sequence[Any] | None = None,
    shard: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    checks: Mapping[str, CustomCheck] | None = None,
    skip: str | Sequence[str] = (),
    allow_zero_gradients: bool = False,
    seed: int = 0,
) -> KernelcheckReport:
    """Checks a kernel, forward and backward, against a plain reference implementation.

    Both run in each dtype, and the reference in float64 as well. The kernel passes if its error is at most `factor`
    times that of the reference in the same dtype, in the worst entry and in norm. The effect of rounding the inputs to
    the dtype is allowed in addition, so a kernel that rounds an intermediate of the size of the inputs once, such as
    logits to bfloat16, passes.

    Each check has a name in the report, by which it can be skipped:

    - "outputs", "gradients": values for inputs near the given ones, and random cotangents.
    - "determinism": two runs are bitwise equal, compiled and eagerly.
    - "scales": scaled inputs. For larger inputs, results must only be finite where those of the reference are.
    - "constants": inputs that are zero, or one number everywhere.
    - "vacuous": no gradient of the reference is zero, or so small that a kernel that returns zeros would pass. An input
      that the reference has no derivative for, such as a mask, is noted.
    - "undifferentiated": outputs without differentiation, which a `jax.custom_vjp` computes by other code.
    - "jit": eager results.
    - "padding": inputs surrounded by NaNs in memory, to detect reads out of bounds. (In its interpret mode, Pallas
      itself pads blocks with NaNs, so there the check "sizes" detects them.)
    - "vmap": batched along the first axis and along the last, with each argument unbatched once.
    - "undefined": the cotangent of one output is undefined.
    - "subsets": one input alone is differentiated.
    - "sizes": sizes that are not a multiple of a block. A kernel may raise there.
    - "donation": arguments keep their values, unless they are donated.
    - "shard": results on several devices.

    The first four run in each dtype, the others in the first dtype. If outputs or gradients are wrong, or
    differ between two runs, nothing else is checked. A check of more than two seconds shows its progress, if tqdm is
    installed.

    Args:
      func: The kernel, a Function class or any differentiable JAX callable: a decorated function, a `jax.custom_vjp`.
      reference: What the kernel is compared with: a function with its signature and outputs, of operations of JAX.
      inputs: A tuple of the arguments, or the only argument: pytrees of arrays. Floating-point arrays are cast; for a
        `jax.ShapeDtypeStruct` of a floating-point dtype, standard normal numbers are drawn.
      factor: The largest allowed ratio of the kernel's error to the reference's.
      raise_exception: Whether to raise on failure.
      argnums: The arguments to differentiate with respect to, as in `jax.grad`. Default: every floating-point array in
        all arguments.
      dtypes: The dtypes (or one) to which to cast the inputs. All checks run in the first.
      draws: The number of samples of outputs and gradients, each with other cotangents and with inputs that differ by
        a few units in the last place. Fewer samples make the check less sharp, and never raise a false alarm. Large
        arrays have fewer, at least two, as each has many entries.
      sizes: Inputs of other sizes for the check "sizes". By default each size `n` becomes `2 * n + 1` wherever it
        occurs, or else `n - 1`, if the reference accepts that.
      shard: For the check "shard", a function that maps the kernel to a sharded one, such as
        `lambda f: jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)`.
      checks: Further checks by name: functions of `(func, reference, inputs)` that return a message on failure, or
        `None`. `inputs` are the arguments in the first dtype.
      skip: The names of checks to skip, or one name.
      allow_zero_gradients: Whether a gradient of the reference may be zero.
      seed: The seed of all random numbers. Equal seeds give equal reports.

    Returns:
      A `KernelcheckReport`, which is true if the check passed.

    Raises:
      CheckError: The kernel failed; the text says where, and `error.report` has it as data.
      ValueError: An option is invalid, or there is nothing to check.
      TypeError: The kernel or the reference is torch code, or an input or output is complex.
      Exception: Any error of the reference.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np, jaxfn
      >>> @jaxfn.function
      ... def softmax(ctx, x):
      ...     y = jnp.exp(x - x.max(-1, keepdims=True))
      ...     y = y / y.sum(-1, keepdims=True)
      ...     ctx.save_for_backward(y)
      ...     return y
      >>> @softmax.backward
      ... def _(ctx, grad_output):
      ...     (y,) = ctx.saved_tensors
      ...     g = y * grad_output
      ...     return g - y * g.sum(-1, keepdims=True)
      >>> report = jaxfn.kernelcheck(softmax, jax.nn.softmax, jax.ShapeDtypeStruct((4, 7), "float32"))
      >>> bool(report), report.checks[:3]
      (True, ['outputs', 'gradients', 'determinism'])

    Torch counterpart: none.
    """
    func, reference = as_function(func, "kernelcheck"), as_function(reference, "kernelcheck(reference=...)")
    require_numbers("kernelcheck", factor=factor)
    checked_dtypes = [_floating_dtype(dtype) for dtype in as_arguments(dtypes)]
    custom, skipped = dict(checks or {}), frozenset(as_arguments(skip))
    if not all(map(callable, custom.values())):
        raise TypeError("kernelcheck: checks= takes functions by name")
    if repeated := sorted({*custom} & {*NAMES}):
        raise ValueError(f"kernelcheck: checks= has {repeated[0]!r}, the name of a check that exists already")
    if unknown := sorted(skipped - {*NAMES} - {*custom}):
        raise ValueError(f"kernelcheck: skip= names {unknown[0]!r}; the checks are {', '.join([*NAMES, *custom])}")
    if not checked_dtypes or draws < 1:
        raise ValueError("kernelcheck needs at least one dtype and one sample")
    generator = random_generator("kernelcheck", seed)
    arguments = kernel_arguments(reference, inputs, argnums, generator)
    others = None if sizes is None else [kernel_arguments(reference, other, argnums, generator) for other in sizes]
    if "gradients" in skipped:
        arguments = replace(arguments, chosen=frozenset())
        others = others and [replace(other, chosen=frozenset()) for other in others]
    report = KernelcheckReport(function_name(func), function_name(reference), factor)
    options = CheckOptions(others, shard, custom, skipped, allow_zero_gradients)
    exact = Float64Reference(reference, arguments)
    with Progress(f"kernelcheck of {report.kernel}", "checks") as progress:
        for index, dtype in enumerate(checked_dtypes):
            comparison = KernelComparison(func, reference, arguments, dtype, draws, factor, generator, exact)
            rows = list(run_checks(comparison, options, progress, is_first=index == 0))
            report.rows += rows
            if any(row.check in PLAIN_CHECKS and not row.passed for row in rows):
                break
    if exact.note:
        report.notes.append(exact.note)
    return concluded(report, raise_exception)


def _floating_dtype(dtype: Any) -> np.dtype[Any]:
    result = jnp.dtype(dtype)
    if not jnp.issubdtype(result, jnp.floating) or result.itemsize > 4:
        raise ValueError(
            f"kernelcheck: dtypes= has {result}, expected float32, bfloat16, float16 or smaller: errors are measured "
            "against float64"
        )
    return result
