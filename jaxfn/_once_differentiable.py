"""`once_differentiable`: declares that a `backward` cannot be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxfn._context import FunctionCtx, collect_saved
from jaxfn._primitives import DeferredError, guard
from jaxfn._tree import as_array, flatten

_F = TypeVar("_F", bound=Callable[..., Any])


def once_differentiable(backward: _F) -> _F:
    """Declares that a `backward` cannot be differentiated itself.

    The first derivative works everywhere. Differentiating through `backward`, with respect to the gradients it gets or
    the values that `forward` saved, raises instead of returning a wrong second derivative, even if `backward` does not
    use them.

    Args:
      backward: The `backward` of a Function.

    Returns:
      A function that calls `backward`, and whose results raise when they are differentiated.

    Examples:
      >>> import jax, jaxfn
      >>> class Cube(jaxfn.Function):
      ...     @staticmethod
      ...     def forward(ctx, x):
      ...         ctx.save_for_backward(x)
      ...         return x ** 3
      ...     @staticmethod
      ...     @jaxfn.once_differentiable
      ...     def backward(ctx, grad_output):
      ...         (x,) = ctx.saved_tensors
      ...         return 3 * x ** 2 * grad_output
      >>> print(jax.grad(Cube.apply)(2.0))
      12.0
      >>> jax.grad(jax.grad(Cube.apply))(2.0)
      Traceback (most recent call last):
      ...
      RuntimeError: Cube.backward: trying to differentiate twice a function that was marked with @once_differentiable

    Torch counterpart: `torch.autograd.function.once_differentiable`.
    """

    message = (
        f"{backward.__qualname__}: trying to differentiate twice a function that was marked with @once_differentiable"
    )
    error = DeferredError(RuntimeError, message)

    @functools.wraps(backward)
    def guarded(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        # Read before backward runs: it may empty the list of its gradients or overwrite an attribute.
        sources, _ = flatten((grad_outputs, collect_saved(ctx)[1]))
        inputs = list(map(as_array, sources))
        gradients, spec = flatten(backward(ctx, *grad_outputs))
        return spec.unflatten(iter(guard(list(map(as_array, gradients)), inputs, error)))

    return cast(_F, guarded)
