"""Two identities, `attach` and `detach`, that decide what an *outer* differentiation sees of a Function.

Inside a `jax.custom_vjp`, `fwd` is ordinary JAX code to an outer differentiation, which would see the raw operations of
the user's forward and not the Function's rule. So the inputs pass through `detach` before forward, which takes their
derivative off, and what forward made passes through `attach` after it, which gives it the Function's own rule.

Both cost one equation while tracing and lower to nothing. `attach` becomes a `jax.custom_vjp` again only when something
differentiates it. (A custom_vjp in its place made tracing 1.2 times slower.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._compat import Primitive, ad, batching, mlir, partial_eval

# A differentiable function of (made..., kept..., inputs...) that returns its first operands, `made`. Only the inputs
# have a derivative by it; `kept` is what it needs besides.
Rule = Callable[..., Sequence[jax.Array]]


class Refusal:
    """A `Rule` for a derivative that cannot be had: it raises, where something asks for it."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *operands: Any) -> Sequence[jax.Array]:
        raise NotImplementedError(self.message)


attach_p = Primitive("attach")
attach_p.multiple_results = True

detach_p = Primitive("detach")
detach_p.multiple_results = True


def attach(
    made: Sequence[Any], kept: Sequence[Any], inputs: Sequence[Any], rule: Rule, *, made_is_detached: bool
) -> list[Any]:
    """The arrays that forward made, with `rule`'s derivative with respect to the inputs.

    Args:
      made: the arrays.
      kept: what the rule needs besides the inputs.
      inputs: what it differentiates with respect to.
      rule: see `Rule`.
      made_is_detached: whether forward ran on detached inputs, so that a derivative that `made` still has can only
        come from values that forward closed over, and is added. Otherwise it may be that of forward's operations,
        and is dropped where inputs are being differentiated.
    """
    sizes = len(made), len(kept)
    return attach_p.bind(*made, *kept, *inputs, rule=rule, sizes=sizes, made_is_detached=made_is_detached)


def detach(arrays: Sequence[Any]) -> list[Any]:
    """The arrays without a derivative: `jax.lax.stop_gradient` in one equation."""
    return detach_p.bind(*arrays)


def _attach_impl(*operands: Any, rule: Rule, sizes: tuple[int, int], made_is_detached: bool) -> list[Any]:
    return list(operands[: sizes[0]])


def _attach_lowering(ctx: Any, *operands: Any, rule: Rule, sizes: tuple[int, int], made_is_detached: bool) -> list[Any]:
    return list(operands[: sizes[0]])


def _attach_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule, sizes: tuple[int, int], made_is_detached: bool
) -> Any:
    # jax.jvp of a custom_vjp is what reverse mode transposes; its `perturbed` flags are then exactly the tangents here.
    num_made = sizes[0]
    perturbed = [i for i, t in enumerate(tangents) if i >= sum(sizes) and not isinstance(t, ad.Zero)]

    def of_perturbed(*values: Any) -> Sequence[jax.Array]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return rule(*operands)

    if perturbed:
        given = [primals[i] for i in perturbed], [tangents[i] for i in perturbed]
        outputs, by_rule = jax.jvp(of_perturbed, *given)
    else:
        outputs = attach_p.bind(*primals, rule=rule, sizes=sizes, made_is_detached=made_is_detached)
        by_rule = [None] * num_made
    closed_over = tangents[:num_made] if made_is_detached or not perturbed else [None] * num_made
    return outputs, [_sum(y, a, b) for y, a, b in zip(outputs, by_rule, closed_over, strict=True)]


def _sum(primal: Any, *tangents: Any) -> Any:
    present = [t for t in tangents if not (t is None or isinstance(t, ad.Zero) or t.dtype == jax.float0)]
    return sum(present[1:], start=present[0]) if present else _zero(primal)


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _attach_batch(
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    rule: Rule,
    sizes: tuple[int, int],
    made_is_detached: bool,
) -> Any:
    if all(d is None for d in dims):  # JAX asks even so
        return attach_p.bind(*operands, rule=rule, sizes=sizes, made_is_detached=made_is_detached), [None] * sizes[0]
    moved = [x if d is None else batching.bdim_at_front(x, d, axis.size) for x, d in zip(operands, dims, strict=True)]
    axes = tuple(None if d is None else 0 for d in dims)
    batched = jax.vmap(
        rule,
        in_axes=axes,
        out_axes=list(axes[: sizes[0]]),
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    made = attach_p.bind(*moved, rule=batched, sizes=sizes, made_is_detached=made_is_detached)
    return made, list(axes[: sizes[0]])


def _attach_partial_eval(
    _policy: Any, unknowns_in: Sequence[bool], available_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """For `jax.checkpoint`: what a policy saves inside `forward` is saved attached, in its place.

    Recomputing the identity instead would keep the inputs as well, which the saved array makes needless. The policy
    itself was asked about the operation that made the array.
    """
    num_made = eqn.params["sizes"][0]
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


def _detach_impl(*operands: Any) -> list[Any]:
    return list(operands)


def _detach_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return detach(primals), [_zero(x) for x in primals]  # bound again, for whatever differentiates further out


def _detach_batch(operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    return detach(operands), dims


def _detach_lowering(ctx: Any, *operands: Any) -> list[Any]:
    return list(operands)


detach_p.def_impl(_detach_impl)
detach_p.def_abstract_eval(_detach_impl)
mlir.register_lowering(detach_p, _detach_lowering, cacheable=False)
ad.primitive_jvps[detach_p] = _detach_jvp
batching.primitive_batchers[detach_p] = _detach_batch
