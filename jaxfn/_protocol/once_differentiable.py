"""`once_differentiable`: a backward that must not be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxfn._primitives.refusal import Refusal, refused_tangent
from jaxfn._protocol.context import FunctionCtx, saved_by
from jaxfn._values.arrays import is_array_leaf, is_inexact


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Declares that a `backward` cannot be differentiated itself.

    The first derivative works everywhere. Differentiating through `backward`, by way of the gradients it gets or of
    what `forward` saved, raises instead of giving a wrong second derivative, also where `backward` does not use them.

    Args:
      backward: the `backward` of a Function.

    Returns:
      The guarded one.

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

    @functools.wraps(backward)
    def guarded(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        # Before backward, which may empty the list of its gradients or overwrite an attribute.
        sources = [leaf for leaf in jax.tree_util.tree_leaves((grad_outputs, saved_by(ctx)[1])) if is_array_leaf(leaf)]
        gradients = backward(ctx, *grad_outputs)
        leaves, tree = jax.tree_util.tree_flatten(gradients)
        arrays = [i for i, leaf in enumerate(leaves) if is_array_leaf(leaf)]
        barred = _barrier(backward.__qualname__)([leaves[i] for i in arrays], sources)
        for i, array in zip(arrays, barred, strict=True):
            leaves[i] = array
        return jax.tree_util.tree_unflatten(tree, leaves)

    return guarded


def _barrier(name: str) -> Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]:
    """The identity on its first argument; differentiating it with respect to either argument raises."""

    @jax.custom_jvp
    def barrier(gradients: Sequence[Any], sources: Sequence[Any]) -> Sequence[Any]:
        return gradients

    message = f"{name}: trying to differentiate twice a function that was marked with @once_differentiable"
    refusal = Refusal(RuntimeError, message)

    def refuse(primals: Any, tangents: Any) -> Any:
        moving = [t for t in jax.tree_util.tree_leaves(tangents) if not isinstance(t, SymbolicZero)]
        if not moving:
            return primals[0], tangents[0]
        gradients = barrier(*primals)  # again, for whatever differentiates further out
        return gradients, [
            refused_tangent(zero.aval, moving, refusal) if is_inexact(x.dtype) else zero
            for x, zero in ((x, SymbolicZero(jax.typeof(x).to_tangent_aval())) for x in gradients)
        ]

    barrier.defjvp(refuse, symbolic_zeros=True)
    return barrier
