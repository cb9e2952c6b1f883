"""The public function `kernelcheck`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.problem.problem import function_name
from jaxfn._kernelcheck.arguments import flatten_arguments
from jaxfn._kernelcheck.checks import NAMES, CheckOptions, run
from jaxfn._kernelcheck.comparison import Float64Reference, KernelComparison
from jaxfn._kernelcheck.report import KernelcheckError, KernelReport


def kernelcheck(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Any,
    *,
    dtypes: Sequence[Any] = ("float32", "bfloat16"),
    factor: float = 2.0,
    argnums: int | Sequence[int] | None = None,
    draws: int = 8,
    scales: Sequence[float] = (1e-3, 1e3),
    sizes: Sequence[Any] | None = None,
    shard: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    skip: Sequence[str] = (),
    allow_zero_gradients: bool = False,
    seed: int = 0,
    raise_exception: bool = True,
) -> KernelReport:
    """Checks a kernel, forward and backward, against a reference that is plainly right.

    Both run in each dtype, and the reference in float64 besides. The kernel passes where its error is at most `factor`
    times that of the reference in the same dtype, in the worst entry and in norm. What rounding of the inputs to the
    dtype does is allowed besides, so a kernel that rounds something once that is as large as they are, such as logits
    to bfloat16, is not told from one that does not.

    What is checked has a name in the report, and may be left out by that name:

    - "outputs", "gradients": of inputs near to those that are given, for random cotangents.
    - "determinism": two runs are equal to the bit, compiled and eagerly.
    - "scales": inputs that are scaled. Of larger ones it is asked only that nothing is infinite or NaN that is finite
      in the reference.
    - "constants": inputs that are zero, or the same number everywhere.
    - "vacuous": no gradient is zero in the reference, or so small that a kernel which returns zeros would pass.
    - "undifferentiated": outputs where no gradient is asked for, which is other code in a `jax.custom_vjp`.
    - "jit": run eagerly.
    - "padding": inputs that lie between NaNs in memory, which a kernel gets that reads out of bounds. (Pallas itself
      fills up blocks with NaNs in its interpret mode, so there it is "sizes" that shows it.)
    - "vmap": along the first axis and along the last, each argument unbatched once.
    - "undefined": one output is used, the others' cotangents are undefined.
    - "subsets": one input alone is differentiated.
    - "sizes": dimensions that do not divide a block. What the kernel refuses there is not wrong.
    - "donation": arguments keep their values, unless they are donated.
    - "shard": the same on several devices.

    The first four are made in each dtype, the others in the first one.

    Args:
      kernel: any differentiable JAX callable: a Function's `apply`, a decorated function, a `jax.custom_vjp`.
      reference: one with the same signature and the same outputs, by operations of JAX.
      inputs: a tuple of arguments, or the one argument: pytrees of arrays. Floating-point arrays are cast; a
        `jax.ShapeDtypeStruct` of such a dtype stands for normal random numbers.
      dtypes: what they are cast to. The first is the one that all checks are made in.
      factor: how many times the reference's error the kernel's may be.
      argnums: which arguments to differentiate with respect to; by default every floating-point array in all of them.
      draws: how many times outputs and gradients are computed, each for other cotangents and inputs that are a few
        units in the last place away. Fewer draws make the check less sharp, and never raise a false alarm.
      scales: factors of the inputs for the check of that name.
      sizes: inputs of other sizes. By default each size `n` of a dimension is made `2 * n + 1` wherever it occurs, or
        else `n - 1`, if the reference accepts that.
      shard: for that check, a function that puts the kernel on devices, such as
        `lambda f: jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)`.
      skip: names of checks to leave out.
      allow_zero_gradients: whether the reference may have a gradient of zero.
      seed: of what is random. The same seed gives the same report.
      raise_exception: whether to raise where something is wrong.

    Returns:
      The report, which is true where nothing is wrong.

    Raises:
      KernelcheckError: something is wrong; its text says what and where, and `error.report` has it as data.
      ValueError: an option is impossible, or there is nothing to check.
      TypeError: an input or an output is complex.
      Exception: whatever the reference raises.

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
    kinds = [_dtype(dtype) for dtype in dtypes]
    unknown = sorted({*skip} - {*NAMES})
    if unknown:
        raise ValueError(f"skip names {unknown[0]!r}; the checks are {', '.join(NAMES)}")
    if not kinds or draws < 1:
        raise ValueError("kernelcheck needs at least one dtype and one draw")
    generator = np.random.default_rng(seed)
    arguments = flatten_arguments(reference, inputs, argnums, generator)
    others = None if sizes is None else [flatten_arguments(reference, other, argnums, generator) for other in sizes]
    if "gradients" in skip:
        arguments = arguments.undifferentiated()
        others = others and [other.undifferentiated() for other in others]
    report = KernelReport(function_name(kernel), function_name(reference), factor)
    options = CheckOptions(scales, others, shard, frozenset(skip), allow_zero_gradients)
    exact = Float64Reference(reference, arguments)
    for position, kind in enumerate(kinds):
        comparison = KernelComparison(kernel, reference, arguments, kind, draws, factor, generator, exact)
        report.rows += run(comparison, options, is_first=position == 0)
    if exact.note:
        report.notes.append(exact.note)
    if raise_exception and not report.passed:
        raise KernelcheckError(report)
    return report


def _dtype(dtype: Any) -> np.dtype[Any]:
    kind = jnp.dtype(dtype)
    if not jnp.issubdtype(kind, jnp.floating) or kind.itemsize > 4:
        raise ValueError(f"{kind} cannot be judged against float64; dtypes are float32, bfloat16, float16 or smaller")
    return kind
