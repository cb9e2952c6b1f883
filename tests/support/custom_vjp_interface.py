"""`jax.custom_vjp`'s interface on a `jaxfn.Function`: what was written for the one runs on the other.

    f = custom_vjp(fun, nondiff_argnums=(0,))   # a decorator too
    f.defvjp(fwd, bwd, symbolic_zeros=True)

`fwd` is the forward that runs where something is differentiated, and its residuals are an attribute of ctx; `bwd` is
the backward. JAX takes Python numbers for arrays and its cotangents are the conjugates of torch's gradients, so both
are converted here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

import jaxfn


class custom_vjp:  # noqa: N801
    """A function whose reverse-mode derivative is given by `defvjp`."""

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Iterable[int] = ()) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._nondiff_argnums = sorted(nondiff_argnums)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        # Neither function can see what the other one closes over.
        methods = {
            "forward": staticmethod(_forward(self._fun, fwd, self._nondiff_argnums, symbolic_zeros)),
            "backward": staticmethod(_backward(bwd, self._nondiff_argnums, symbolic_zeros)),
        }
        name = getattr(self._fun, "__name__", "custom_vjp")
        self._apply = type(name, (jaxfn.Function,), methods).apply

    def __call__(self, *args: Any) -> Any:
        values = [x if i in self._nondiff_argnums else _arrays(x) for i, x in enumerate(args)]
        (output,) = self._apply(*values)
        return output


def _forward(
    fun: Callable[..., Any], fwd: Callable[..., Any], nondiff_argnums: Sequence[int], symbolic_zeros: bool
) -> Callable[..., tuple[Any]]:
    def forward(ctx: jaxfn.FunctionCtx, *args: Any) -> tuple[Any]:
        """`fwd` where something is differentiated, the function itself elsewhere."""
        needed = ctx.needs_input_grad
        if not any(needed):
            return (_arrays(fun(*args)),)  # one output, of whatever structure
        inputs: Sequence[Any] = args
        if symbolic_zeros:
            inputs = [jax.tree.map(lambda leaf, i=i: CustomVJPPrimal(leaf, needed[i]), x) for i, x in enumerate(args)]
        output, ctx.residuals = fwd(*inputs)
        output = _arrays(output)
        ctx.fixed = [args[i] for i in nondiff_argnums]
        ctx.avals = jax.tree.map(jax.typeof, output)
        ctx.set_materialize_grads(not symbolic_zeros)
        return (output,)

    return forward


def _backward(
    bwd: Callable[..., Any], nondiff_argnums: Sequence[int], symbolic_zeros: bool
) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: jaxfn.FunctionCtx, grad_output: Any) -> tuple[Any, ...]:
        """`bwd`, in JAX's convention on both sides."""
        cotangents = jax.tree.map(partial(_cotangent, symbolic_zeros), ctx.avals, grad_output)
        gradients = [jax.tree.map(_gradient, x) for x in bwd(*ctx.fixed, ctx.residuals, cotangents)]
        for i in nondiff_argnums:
            gradients.insert(i, None)
        return tuple(gradients)

    return backward


def _cotangent(symbolic_zeros: bool, aval: Any, gradient: Any) -> Any:
    if gradient is None and symbolic_zeros:
        return SymbolicZero(aval.to_tangent_aval())
    if gradient is None or not jnp.issubdtype(aval.dtype, jnp.inexact):
        return np.zeros(aval.shape, jax.float0)
    return _conjugate(gradient)


def _arrays(tree: Any) -> Any:
    """JAX takes Python numbers for arrays."""
    return jax.tree.map(jnp.asarray, tree)


def _gradient(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.float0:
        return None
    return _conjugate(jnp.asarray(cotangent))


def _conjugate(value: jax.Array) -> jax.Array:
    return jnp.conj(value) if jnp.iscomplexobj(value) else value
