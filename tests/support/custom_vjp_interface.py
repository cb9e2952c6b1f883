"""`jax.custom_vjp`'s interface on a `jaxfn.Function`: what was written for the one runs on the other.

    f = custom_vjp(fun, nondiff_argnums=(0,))   # a decorator too
    f.defvjp(fwd, bwd, symbolic_zeros=True)

`fwd` is the forward that runs where something is differentiated, and its residuals are an attribute of ctx; `bwd` is
the backward. JAX takes Python numbers for arrays and its cotangents are the conjugates of torch's gradients, so both
are converted here.
"""

from __future__ import annotations

import functools
import inspect
import itertools
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

    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: Iterable[int] = (), nondiff_argnames: Iterable[str] = ()
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._signature = inspect.signature(fun)
        positions = [list(self._signature.parameters).index(name) for name in nondiff_argnames]
        self._nondiff_argnums = sorted({*nondiff_argnums, *positions})
        self._apply: Callable[..., Any] | None = None

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """As `jax.custom_vjp`'s; `optimize_remat`, which chooses among programs, has no effect."""
        name = getattr(self._fun, "__name__", "custom_vjp")
        # Neither function can see what the other one closes over.
        methods = {
            "forward": staticmethod(_forward(name, self._fun, fwd, self._nondiff_argnums, symbolic_zeros)),
            "backward": staticmethod(_backward(name, bwd, self._nondiff_argnums, symbolic_zeros)),
        }
        self._apply = type(name, (jaxfn.Function,), methods).apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._apply is None:
            raise AttributeError(f"{self.__name__} has no rule yet: call defvjp")
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(f"{self.__name__} takes no arguments by keyword alone: {', '.join(bound.kwargs)}")
        fixed = {i % len(bound.args) for i in self._nondiff_argnums}
        values = [x if i in fixed else jax.tree.map(jnp.asarray, x) for i, x in enumerate(bound.args)]
        (output,) = self._apply(*values)
        return output


def _forward(
    name: str, fun: Callable[..., Any], fwd: Callable[..., Any], nondiff_argnums: Sequence[int], symbolic_zeros: bool
) -> Callable[..., tuple[Any]]:
    def forward(ctx: jaxfn.FunctionCtx, *args: Any) -> tuple[Any]:
        """`fwd` where something is differentiated, the function itself elsewhere."""
        needed = ctx.needs_input_grad
        if not any(needed):
            return (_arrays(fun(*args)),)  # one output, of whatever structure
        fixed = {i % len(args) for i in nondiff_argnums}
        for i in fixed:
            if needed[i]:
                raise TypeError(f"{name}: argument {i} is among nondiff_argnums, and is being differentiated")
        given = args
        if symbolic_zeros:
            given = [
                x if i in fixed else jax.tree.map(lambda leaf, i=i: CustomVJPPrimal(leaf, needed[i]), x)
                for i, x in enumerate(args)
            ]
        output, ctx.residuals = fwd(*given)
        output = _arrays(output)
        ctx.fixed = [args[i] for i in sorted(fixed)]
        ctx.structures = [jax.tree.structure(x) for i, x in enumerate(args) if i not in fixed]
        ctx.avals = jax.tree.map(jax.typeof, output)
        ctx.set_materialize_grads(not symbolic_zeros)
        return (output,)

    return forward


def _backward(
    name: str, bwd: Callable[..., Any], nondiff_argnums: Sequence[int], symbolic_zeros: bool
) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: jaxfn.FunctionCtx, grad_output: Any) -> tuple[Any, ...]:
        """`bwd`, in JAX's convention on both sides."""
        cotangents = jax.tree.map(partial(_cotangent, symbolic_zeros), ctx.avals, grad_output)
        returned = bwd(*ctx.fixed, ctx.residuals, cotangents)
        if not isinstance(returned, (tuple, list)):
            raise TypeError(f"{name}: bwd must return a tuple, one entry for each differentiable argument")
        structures = itertools.chain(ctx.structures, itertools.repeat(_LEAF))
        gradients = [jax.tree.map(_gradient, _spread(x, of)) for x, of in zip(returned, structures, strict=False)]
        for i in sorted(i % ctx.num_inputs for i in nondiff_argnums):
            gradients.insert(i, None)
        return tuple(gradients)

    return backward


# For gradients of arguments that there are not, which jaxfn will refuse.
_LEAF = jax.tree.structure(0)


def _cotangent(symbolic_zeros: bool, aval: Any, gradient: Any) -> Any:
    if gradient is None and symbolic_zeros:
        return SymbolicZero(aval.to_tangent_aval())
    if gradient is None or not jnp.issubdtype(aval.dtype, jnp.inexact):
        return np.zeros(aval.shape, jax.float0)
    return _conjugate(gradient)


def _arrays(tree: Any) -> Any:
    """JAX takes Python numbers for arrays."""
    return jax.tree.map(jnp.asarray, tree)


def _spread(gradient: Any, structure: Any) -> Any:
    """A gradient may be a prefix of its argument's tree: what stands for a subtree is for each leaf of it."""

    def spread(part: Any, subtree: Any) -> Any:
        return None if part is None else jax.tree.map(lambda _: part, subtree)

    try:
        whole = structure.unflatten(range(structure.num_leaves))
        return jax.tree.map(spread, gradient, whole, is_leaf=lambda x: x is None)
    except ValueError:  # it has another structure, which jaxfn will say
        return gradient


def _gradient(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.float0:
        return None
    return _conjugate(jnp.asarray(cotangent))


def _conjugate(value: jax.Array) -> jax.Array:
    return jnp.conj(value) if jnp.iscomplexobj(value) else value
