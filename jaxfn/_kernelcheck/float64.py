"""A reference in double precision, even if it casts its inputs.

# Note: casts in a reference

Many functions compute low precision in float32:

    def layer_norm(x, scale):
        h = x.astype(jnp.float32)
        return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True)) * scale).astype(x.dtype)

With float64 inputs this still computes in float32, and does not show the errors of a float32 kernel. So if the jaxpr of
a reference has anything below float64, it is evaluated eqn by eqn in float64, without the casts. JAX has differentiated
it before, by the rules that it has. References that draw random numbers are evaluated so too, as x64 changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_map, tree_unflatten

from jaxfn._check.staging import JaxprFunction, stage
from jaxfn._compat import make_jaxpr, random_bits_p, threefry2x32_p
from jaxfn._jaxpr import eval_jaxpr_with, open_jaxpr, subjaxprs
from jaxfn._tree import double, is_inexact

# Kinds of eqns that evaluate their sub-jaxpr once, so that it can be inlined.
_CALLS = frozenset({"jit", "call", "checkpoint"})
# Primitives that draw other random numbers with x64 from the same key.
_RANDOM = frozenset({random_bits_p, threefry2x32_p, jax.lax.rng_bit_generator_p})


def promote_to_float64(
    function: Callable[..., Any], *args: Any, same_random_numbers: bool = False
) -> tuple[Callable[..., Any], str]:
    """Returns a function in float64, and a note on how; x64 must be enabled.

    With `same_random_numbers` the caller has enabled it, so that random numbers are right as they are.
    """
    try:
        traced = stage(function, *args)
        draws = not same_random_numbers and any(eqn.primitive in _RANDOM for eqn in traced.eqns)
        why = "draws random numbers, which x64 changes" if draws else _casts(traced)
    except Exception as error:  # it may mix dtypes in a way that float64 does not allow
        traced, draws, why = None, True, f"does not run in float64 ({type(error).__name__})"
    if traced is not None and not why:
        return traced, ""
    if traced is None or draws:
        with jax.enable_x64(False):
            staged = stage(function, *tree_map(_single, args))
        unpromoted = stage(partial(_run_in_float32, staged), *args)
    else:
        staged = unpromoted = traced
    try:
        promoted = stage(lambda *args: _run_in_float64(staged, *args), *args)
    except Exception as error:
        return (
            unpromoted,
            f"the reference {why}, and cannot be promoted ({type(error).__name__}), so the bounds are less sharp",
        )
    return promoted, f"the reference {why}; the expected values were computed by the same operations in float64"


def _single(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an array in the precision of JAX's default."""
    return jax.ShapeDtypeStruct(array.shape, np.float32 if array.dtype == np.float64 else array.dtype)


def _run_in_float32(traced: JaxprFunction, *args: Any) -> Any:
    """Evaluates a function that was staged without x64, and returns its results in float64."""
    return tree_map(_promoted, traced(*(x.astype(_single(x).dtype) for x in tree_leaves(args))))


def _casts(traced: JaxprFunction) -> str:
    """Describes the dtypes below double precision in which a staged function computes."""
    found = {str(dtype) for dtype in traced.dtypes_from_inputs() if _is_coarse(dtype)}
    return f"computes in {', '.join(sorted(found))} even with float64 inputs" if found else ""


def _run_in_float64(traced: JaxprFunction, *args: Any) -> Any:
    """Evaluates a staged function with every floating-point number in float64."""
    return tree_unflatten(traced.tree, _eval_jaxpr_in_float64(traced.jaxpr, traced.constants, tree_leaves(args)))


def _eval_jaxpr_in_float64(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with every floating-point number in float64."""

    def promoted_results(_: int, eqn: Any, operands: list[Any]) -> list[Any]:
        return list(map(_promoted, _eval_eqn_in_float64(eqn, operands)))

    def promoted_literal(literal: Any) -> Any:
        return jnp.asarray(literal.val, _double(literal.aval.dtype))

    consts, args = list(map(_promoted, consts)), list(map(_promoted, args))
    return eval_jaxpr_with(promoted_results, jaxpr, consts, args, promoted_literal)


def _eval_eqn_in_float64(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an eqn in float64."""
    primitive, params = eqn.primitive, eqn.params
    casts = primitive in (jax.lax.convert_element_type_p, jax.lax.reduce_precision_p)
    if casts and is_inexact(operands[0].dtype):
        dtype = eqn.outvars[0].aval.dtype
        return [operands[0] if _is_coarse(dtype) else operands[0].astype(dtype)]
    if primitive is jax.lax.bitcast_convert_type_p:  # the bits depend on the dtype
        return [primitive.bind(operands[0].astype(eqn.invars[0].aval.dtype), **params)]
    inner = subjaxprs(eqn)
    if inner and inner[0].kind in _CALLS:
        return _eval_jaxpr_in_float64(inner[0].jaxpr, inner[0].consts, [operands[i] for i in inner[0].operands])
    results = primitive.bind(*operands, **{key: _parameter(item) for key, item in params.items()})
    return results if primitive.multiple_results else [results]


def _parameter(item: Any) -> Any:
    """Returns a param of an eqn with jaxprs and dtypes promoted to float64."""
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
