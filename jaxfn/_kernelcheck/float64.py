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

from jaxfn._compat import make_jaxpr, random_bits_p, threefry2x32_p
from jaxfn._gradcheck.problem.staging import JaxprFunction, single, stage, stage_without_x64
from jaxfn._jaxpr import eval_jaxpr_with, open_jaxpr, subjaxprs
from jaxfn._tree import double, is_inexact

# Kinds of sub-jaxprs that run once, as if their eqns were written in place of the eqn that runs them.
_CALLS = frozenset({"jit", "call", "checkpoint"})
# Operations that give other random numbers with x64, where the same key is to give the same ones.
_DRAWING = frozenset({random_bits_p, threefry2x32_p, jax.lax.rng_bit_generator_p})


def promote_to_float64(
    function: Callable[..., Any], *args: Any, draws_alike: bool = False
) -> tuple[Callable[..., Any], str]:
    """A function in float64, and what is to be said about that; x64 is switched on.

    Args:
      function: takes and returns pytrees of arrays.
      args: its arguments, floating-point ones in float64.
      draws_alike: whether it draws the random numbers that are wanted, since these are drawn with x64 too.
    """
    try:
        traced = stage(function, *args)
        draws = not draws_alike and any(eqn.primitive in _DRAWING for eqn in traced.eqns)
        why = "draws random numbers, which are others with x64" if draws else _casts(traced)
    except Exception as error:  # it may mix dtypes in a way that float64 does not go with
        traced, draws, why = None, True, f"does not run in float64 ({type(error).__name__})"
    if traced is not None and not why:
        return traced, ""
    if traced is None or draws:
        with jax.enable_x64(False):
            recorded = stage(function, *tree_map(single, args))
        as_it_is = stage_without_x64(function, *args)
    else:
        recorded = as_it_is = traced
    try:
        promoted = stage(lambda *args: _run_in_float64(recorded, *args), *args)
    except Exception as error:
        return as_it_is, f"the reference {why}, and cannot be made to ({type(error).__name__}), so less is certain"
    return promoted, f"the reference {why}; what is right was computed by the same operations on float64"


def _casts(traced: JaxprFunction) -> str:
    """Describes the dtypes coarser than double precision that a trace computes in."""
    found = {str(dtype) for dtype in traced.dtypes_from_inputs() if _is_coarse(dtype)}
    return f"computes in {', '.join(sorted(found))} even where its inputs are float64" if found else ""


def _run_in_float64(traced: JaxprFunction, *args: Any) -> Any:
    """Evaluates a trace with every floating-point number in float64."""
    return tree_unflatten(traced.tree, _eval_jaxpr_in_float64(traced.jaxpr, traced.constants, tree_leaves(args)))


def _eval_jaxpr_in_float64(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr where every floating-point number is float64."""

    def promoted_results(_: int, eqn: Any, operands: list[Any]) -> list[Any]:
        return list(map(_promoted, _eval_eqn_in_float64(eqn, operands)))

    def promoted_literal(literal: Any) -> Any:
        return jnp.asarray(literal.val, _double(literal.aval.dtype))

    consts, args = list(map(_promoted, consts)), list(map(_promoted, args))
    return eval_jaxpr_with(promoted_results, jaxpr, consts, args, promoted_literal)


def _eval_eqn_in_float64(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of one eqn on float64."""
    primitive, params = eqn.primitive, eqn.params
    casts = primitive in (jax.lax.convert_element_type_p, jax.lax.reduce_precision_p)
    if casts and is_inexact(operands[0].dtype):
        wanted = eqn.outvars[0].aval.dtype
        return [operands[0] if _is_coarse(wanted) else operands[0].astype(wanted)]
    if primitive is jax.lax.bitcast_convert_type_p:  # of bits, which are those of the dtypes there are
        return [primitive.bind(operands[0].astype(eqn.invars[0].aval.dtype), **params)]
    inner = subjaxprs(eqn)
    if inner and inner[0].kind in _CALLS:
        return _eval_jaxpr_in_float64(inner[0].jaxpr, inner[0].consts, [operands[i] for i in inner[0].operands])
    results = primitive.bind(*operands, **{key: _parameter(item) for key, item in params.items()})
    return results if primitive.multiple_results else [results]


def _parameter(item: Any) -> Any:
    """A parameter of an operation: a jaxpr in float64, a dtype of float64, or what it is."""
    if isinstance(item, tuple) and item and all(hasattr(i, "jaxpr") for i in item):
        return tuple(map(_parameter, item))
    if hasattr(item, "eqns"):
        inner, consts = open_jaxpr(item)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, _double(v.aval.dtype)) for v in inner.invars]
        closed = make_jaxpr(lambda *args: _eval_jaxpr_in_float64(inner, consts, args), *avals)
        return closed.jaxpr if inner is item else closed
    return _double(item) if isinstance(item, np.dtype) and _is_coarse(item) else item


def _promoted(value: Any) -> Any:
    dtype = jnp.result_type(value)
    return jnp.asarray(value, double(dtype)) if _is_coarse(dtype) else value


def _double(dtype: Any) -> Any:
    return double(dtype) if _is_coarse(dtype) else dtype


def _is_coarse(dtype: Any) -> bool:
    return is_inexact(dtype) and dtype != double(dtype)
