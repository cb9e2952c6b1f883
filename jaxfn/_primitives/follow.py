"""`follow`: an identity whose operand has a derivative only where another array is being differentiated.

What a `jax.custom_vjp` returns is being differentiated as a whole, as soon as one of its inputs is. Of an identity of
several arrays that is too much: an array that nothing differentiates should come out as one. It lowers to nothing.

# Note: `jax.checkpoint`

What is recomputed is there twice, and a second derivative goes through both, by each a part of the gradient. Where a
rule is not linear in the gradient, or asks by which way it came, the parts give something else than the whole. So what
comes out here is saved by `jax.checkpoint`, and what made it is there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxfn._compat import Primitive, ad, batching, mlir, partial_eval

follow_p = Primitive("follow")


def follow(made: jax.Array, leader: jax.Array) -> jax.Array:
    """`made`, without its derivative where `leader` has none."""
    return follow_p.bind(made, leader)


def _follow_impl(made: Any, leader: Any) -> Any:
    return made


def _follow_lowering(ctx: Any, made: Any, leader: Any) -> Any:
    return [made]


def _follow_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    of_made, of_leader = tangents
    is_still = isinstance(of_leader, ad.Zero)
    return follow_p.bind(*primals), ad.Zero(jax.typeof(primals[0]).to_tangent_aval()) if is_still else of_made


def _follow_batch(operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    return follow_p.bind(*operands), dims[0]


def _follow_partial_eval(
    _policy: Any, unknowns_in: Sequence[bool], available_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    if not any(unknowns_in):
        return eqn, None, [False], [False], []
    unavailable = [v for v, is_available in zip(eqn.invars, available_in, strict=True) if not is_available]
    return None, eqn, [True], [True], unavailable


follow_p.def_impl(_follow_impl)
follow_p.def_abstract_eval(_follow_impl)
mlir.register_lowering(follow_p, _follow_lowering)
ad.primitive_jvps[follow_p] = _follow_jvp
batching.primitive_batchers[follow_p] = _follow_batch
partial_eval.partial_eval_jaxpr_custom_rules[follow_p] = _follow_partial_eval
