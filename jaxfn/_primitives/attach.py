"""Two identities: `stop` takes a derivative off, `attach` gives one.

A Function's forward is ordinary JAX code, written into the program at hand. Its inputs pass `stop` before, so that
nothing differentiates its operations; what it made passes `attach` after, which gives it the Function's own rule:

    inputs --stop--> forward --> made --attach(made, kept, inputs)--> outputs

Both cost one equation while tracing and lower to nothing. The rule is asked where something differentiates, and binds
`attach` again for whatever differentiates further out. So a first derivative and a tenth go one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxfn._compat import Primitive, ad, batching, in_front, mlir, partial_eval, without_tangent
from jaxfn._primitives.refusal import Refusal, refused_tangent
from jaxfn._values.arrays import is_inexact

# Called with what was made, what is kept, the inputs, and a tangent for each input, `None` for zero. Returns the arrays
# made, attached for whatever differentiates further out, and a tangent for each of them, `None` for zero.
Rule = Callable[
    [Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], "tuple[Sequence[Any], Sequence[Any]]"
]


class _Perturbed:
    """Which arrays were being differentiated where they were stopped; JAX says so while they are."""

    def __init__(self) -> None:
        self.places: set[int] = set()


stop_p = Primitive("stop")
stop_p.multiple_results = True


def stop(arrays: Sequence[Any], order: int = 0) -> tuple[list[Any], frozenset[int]]:
    """The arrays without a derivative, and which of them something is differentiating here, out of `order` derivatives."""
    perturbed = _Perturbed()
    stopped = [without_tangent(x) if isinstance(x, Tracer) else (x, 0) for x in arrays]
    # In a higher derivative what was saved is known by identity, so that each is an object of its own.
    values = [jnp.array(x) if order + own > 1 and not isinstance(x, Tracer) else x for x, own in stopped]
    if any(isinstance(x, Tracer) for x in values):
        values = stop_p.bind(*values, perturbed=perturbed)
    perturbed.places |= {i for i, (_, own) in enumerate(stopped) if own}
    return values, frozenset(perturbed.places)


def detach(arrays: Sequence[Any]) -> list[Any]:
    """The arrays without a derivative: `jax.lax.stop_gradient` in one equation."""
    return stop(arrays)[0]


def _stop_impl(*operands: Any, perturbed: _Perturbed) -> list[Any]:
    return list(operands)


def _stop_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, perturbed: _Perturbed) -> Any:
    perturbed.places |= {
        i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and is_inexact(jax.typeof(primals[i]).dtype)
    }
    # Bound again, for whatever differentiates further out.
    return stop_p.bind(*primals, perturbed=perturbed), [_zero(x) for x in primals]


def _stop_batch(operands: Sequence[Any], dims: Sequence[Any], *, perturbed: _Perturbed) -> Any:
    return stop_p.bind(*operands, perturbed=perturbed), dims


def _stop_lowering(ctx: Any, *operands: Any, perturbed: _Perturbed) -> list[Any]:
    return list(operands)


stop_p.def_impl(_stop_impl)
stop_p.def_abstract_eval(_stop_impl)
mlir.register_lowering(stop_p, _stop_lowering, cacheable=False)
ad.primitive_jvps[stop_p] = _stop_jvp
batching.primitive_batchers[stop_p] = _stop_batch


class _Attachment:
    """How arrays are attached; compared by identity, so that JAX looks it up fast.

    Attributes:
      rule: see `Rule`; or why there is none.
      num_made, num_kept: how many operands are which; the others are the inputs.
      closed_over: why the derivative that made arrays have besides cannot be had; `None`: it is added.
    """

    __slots__ = ("closed_over", "num_kept", "num_made", "rule")

    def __init__(self, rule: Rule | Refusal, num_made: int, num_kept: int, closed_over: Refusal | None) -> None:
        self.rule = rule
        self.num_made = num_made
        self.num_kept = num_kept
        self.closed_over = closed_over


attach_p = Primitive("attach")
attach_p.multiple_results = True


def attach(
    made: Sequence[Any],
    kept: Sequence[Any],
    inputs: Sequence[Any],
    rule: Rule | Refusal,
    closed_over: Refusal | None = None,
) -> list[Any]:
    """The arrays that forward made, with `rule`'s derivative with respect to the inputs.

    Args:
      made: the arrays. A derivative that they have themselves can only be by values that forward closed over.
      kept: what the rule needs besides the inputs.
      inputs: what it differentiates with respect to.
      rule: see `Rule`.
      closed_over: raised where the derivative that `made` has itself is used; `None`: it is added.
    """
    return attach_p.bind(*made, *kept, *inputs, attachment=_Attachment(rule, len(made), len(kept), closed_over))


def _attach_impl(*operands: Any, attachment: _Attachment) -> list[Any]:
    return list(operands[: attachment.num_made])


def _attach_lowering(ctx: Any, *operands: Any, attachment: _Attachment) -> list[Any]:
    return list(operands[: attachment.num_made])


def _attach_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, attachment: _Attachment) -> Any:
    num_made, rule = attachment.num_made, attachment.rule
    first_input = num_made + attachment.num_kept
    made, kept, inputs = primals[:num_made], primals[num_made:first_input], primals[first_input:]
    moving = [
        None if isinstance(t, ad.Zero) or not is_inexact(jax.typeof(x).dtype) else t
        for x, t in zip(inputs, tangents[first_input:], strict=True)
    ]
    present = [t for t in moving if t is not None]
    if not present or isinstance(rule, Refusal):
        attached: Sequence[Any] = attach_p.bind(*primals, attachment=attachment)
        by_rule: Sequence[Any] = [None] * num_made
        if isinstance(rule, Refusal) and present:
            by_rule = [_refused(x, present, rule) for x in made]
    else:
        attached, by_rule = rule(made, kept, inputs, moving)
    own: list[Any] = [None if isinstance(t, ad.Zero) else t for t in tangents[:num_made]]
    if attachment.closed_over is not None:
        own = [None if t is None else _refused(x, [t], attachment.closed_over) for x, t in zip(made, own, strict=True)]
    return attached, [_sum(y, a, b) for y, a, b in zip(attached, by_rule, own, strict=True)]


def _refused(primal: Any, tangents: Sequence[Any], refusal: Refusal) -> Any:
    aval = jax.typeof(primal).to_tangent_aval()
    return refused_tangent(aval, tangents, refusal) if is_inexact(aval.dtype) else None


def _sum(primal: Any, *tangents: Any) -> Any:
    present = [t for t in tangents if not (t is None or isinstance(t, ad.Zero) or t.dtype == jax.float0)]
    return sum(present[1:], start=present[0]) if present else _zero(primal)


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


class _Batched:
    """A rule over a batch: what was made has it at axis 0, all else there or not at all."""

    def __init__(self, rule: Rule, axis: Any, kept_axes: list[int | None], input_axes: list[int | None]) -> None:
        self._rule = rule
        self._axis = axis
        self._kept_axes = kept_axes
        self._input_axes = input_axes

    def __call__(
        self, made: Sequence[Any], kept: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        def one(made: Any, kept: Any, inputs: Any, tangents: Any) -> Any:
            attached, pushed = self._rule(made, kept, inputs, tangents)
            return list(attached), list(pushed)

        tangent_axes = [None if t is None else a for t, a in zip(tangents, self._input_axes, strict=True)]
        axis = self._axis
        mapped = jax.vmap(
            one,
            in_axes=(0, self._kept_axes, self._input_axes, tangent_axes),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        return mapped(list(made), list(kept), list(inputs), list(tangents))


def _attach_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, attachment: _Attachment) -> Any:
    """Where any operand has the batch, all that was made has it."""
    num_made, num_kept, rule = attachment.num_made, attachment.num_kept, attachment.rule
    if all(d is None for d in dims):  # JAX asks even so
        return attach_p.bind(*operands, attachment=attachment), [None] * num_made
    moved = [
        x if d is None and i >= num_made else in_front(x, d, axis)
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]
    axes = [None if d is None else 0 for d in dims[num_made:]]
    if not isinstance(rule, Refusal):
        rule = _Batched(rule, axis, axes[:num_kept], axes[num_kept:])
    batched = _Attachment(rule, num_made, num_kept, attachment.closed_over)
    return attach_p.bind(*moved, attachment=batched), [0] * num_made


def _attach_partial_eval(
    _policy: Any, unknowns_in: Sequence[bool], available_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """For `jax.checkpoint`: what a policy saves inside `forward` is saved attached, in its place.

    Recomputing the identity instead would keep the inputs as well, which the saved array makes needless. The policy
    itself was asked about the operation that made the array.
    """
    num_made = eqn.params["attachment"].num_made
    unavailable = [v for v, is_available in zip(eqn.invars, available_in, strict=True) if not is_available]
    if any(unknowns_in):
        return None, eqn, [True] * num_made, [True] * num_made, unavailable
    if all(available_in[:num_made]):
        return eqn, eqn, [False] * num_made, [True] * num_made, unavailable
    return eqn, None, [False] * num_made, [False] * num_made, []


attach_p.def_impl(_attach_impl)
attach_p.def_abstract_eval(_attach_impl)
# Not cacheable: every equation has a rule of its own, so that looking it up costs more than lowering it.
mlir.register_lowering(attach_p, _attach_lowering, cacheable=False)
ad.primitive_jvps[attach_p] = _attach_jvp
batching.fancy_primitive_batchers[attach_p] = _attach_batch
partial_eval.partial_eval_jaxpr_custom_rules[attach_p] = _attach_partial_eval
