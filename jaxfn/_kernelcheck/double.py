"""A reference in double precision, whatever it casts to.

# Note: casts inside of a reference

Many functions are written so that low precision is computed in float32:

    def layer_norm(x, scale):
        h = x.astype(jnp.float32)
        return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True)) * scale).astype(x.dtype)

Called with float64 this computes in float32 all the same, and says nothing about errors of a float32 kernel. So its
program is looked at, and where anything is less than float64, the operations are carried out one by one on float64,
without the casts. JAX has differentiated them before, by whatever rules they have. The same is done where it draws
random numbers, since those are others with x64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map, tree_unflatten

from jaxfn._compat import is_variable, make_jaxpr
from jaxfn._gradcheck.problem.traced import Traced, single, trace, trace_without_x64
from jaxfn._inspection.subprograms import subprograms
from jaxfn._values.arrays import double, is_inexact

# Programs that run once, as if they were written in the place of the operation that runs them.
_CALLING = frozenset({"jit", "call", "checkpoint"})
# Operations that give other random numbers with x64, where the same key is to give the same ones.
_DRAWING = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})


def doubled(function: Callable[..., Any], *args: Any, draws_alike: bool = False) -> tuple[Callable[..., Any], str]:
    """A function in float64, and what is to be said about that; x64 is switched on.

    Args:
      function: takes and returns pytrees of arrays.
      args: its arguments, floating-point ones in float64.
      draws_alike: whether it draws the random numbers that are wanted, since these are drawn with x64 too.
    """
    try:
        traced = trace(function, *args)
        draws = not draws_alike and any(equation.primitive.name in _DRAWING for equation in traced.equations)
        why = "draws random numbers, which are others with x64" if draws else _casts(traced)
    except Exception as error:  # it may mix dtypes in a way that float64 does not go with
        traced, draws, why = None, True, f"does not run in float64 ({type(error).__name__})"
    if traced is not None and not why:
        return traced, ""
    if traced is None or draws:
        with jax.enable_x64(False):
            recorded = trace(function, *tree_map(single, args))
        as_it_is = trace_without_x64(function, *args)
    else:
        recorded = as_it_is = traced
    try:
        promoted = trace(lambda *args: _run_doubled(recorded, *args), *args)
    except Exception as error:
        return as_it_is, f"the reference {why}, and cannot be made to ({type(error).__name__}), so less is certain"
    return promoted, f"the reference {why}; what is right was computed by the same operations on float64"


def _casts(traced: Traced) -> str:
    """What a trace computes in, other than double precision, in words."""
    found = {str(dtype) for dtype in traced.dtypes_from_inputs() if _is_coarse(dtype)}
    return f"computes in {', '.join(sorted(found))} even where its inputs are float64" if found else ""


def _run_doubled(traced: Traced, *args: Any) -> Any:
    """What a trace returns where every floating-point number is float64."""
    return tree_unflatten(traced.tree, _evaluated(traced.jaxpr, traced.constants, *tree_leaves(args)))


def _evaluated(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[Any]:
    """What a program gives where every floating-point number is float64."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_promoted, constants), strict=True))
    known.update(zip(jaxpr.invars, map(_promoted, args), strict=True))

    def value(v: Any) -> Any:
        return known[v] if is_variable(v) else jnp.asarray(v.val, _double(v.aval.dtype))

    for equation in jaxpr.eqns:
        results = _carried_out(equation, [value(v) for v in equation.invars])
        known.update(zip(equation.outvars, map(_promoted, results), strict=True))
    return [value(v) for v in jaxpr.outvars]


def _carried_out(equation: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The results of one operation on float64."""
    name, params = equation.primitive.name, equation.params
    if name in ("convert_element_type", "reduce_precision") and is_inexact(args[0].dtype):
        wanted = equation.outvars[0].aval.dtype
        return [args[0] if _is_coarse(wanted) else args[0].astype(wanted)]
    if name == "bitcast_convert_type":  # of bits, which are those of the dtypes there are
        return [equation.primitive.bind(args[0].astype(equation.invars[0].aval.dtype), **params)]
    programs = subprograms(equation)
    if programs and programs[0].kind in _CALLING:
        return _evaluated(programs[0].jaxpr, programs[0].consts, *(args[i] for i in programs[0].operands))
    results = equation.primitive.bind(*args, **{key: _parameter(item) for key, item in params.items()})
    return results if equation.primitive.multiple_results else [results]


def _parameter(item: Any) -> Any:
    """A parameter of an operation: a program in float64, a dtype of float64, or what it is."""
    if isinstance(item, tuple) and item and all(hasattr(i, "jaxpr") for i in item):
        return tuple(map(_parameter, item))
    inner: Any = getattr(item, "jaxpr", item)
    if hasattr(inner, "eqns"):
        avals = [jax.ShapeDtypeStruct(v.aval.shape, _double(v.aval.dtype)) for v in inner.invars]
        closed = make_jaxpr(lambda *args: _evaluated(inner, getattr(item, "consts", ()), *args), *avals)
        return closed.jaxpr if inner is item else closed
    return _double(item) if isinstance(item, np.dtype) and _is_coarse(item) else item


def _promoted(value: Any) -> Any:
    dtype = jnp.result_type(value)
    return jnp.asarray(value, double(dtype)) if _is_coarse(dtype) else value


def _double(dtype: Any) -> Any:
    return double(dtype) if _is_coarse(dtype) else dtype


def _is_coarse(dtype: Any) -> bool:
    return is_inexact(dtype) and dtype != double(dtype)
