"""Identities that decide what JAX sees of a Function besides its custom derivative.

Inside a `jax.custom_vjp`, `fwd` is ordinary JAX code to an *outer* differentiation, which would see the raw operations
of the user's forward and not the Function's rule. So the inputs pass through `detach` before forward, which takes their
derivative off, and what forward made passes through `attach` after it, which gives it the Function's own rule.

`attach` also moves the batch of what it returns to axis 0, and `settle` does the same for a primal; see the note there.

All cost one equation while tracing and lower to nothing. `attach` becomes a `jax.custom_vjp` again only when something
differentiates it. (A custom_vjp in its place made tracing 1.2 times slower.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxfn._compat import (
    Batch,
    MappedOperations,
    Primitive,
    SeenPrimitive,
    ad,
    batches_of,
    batching,
    mlir,
    partial_eval,
)
from jaxfn._primitives.refusal import Refusal, refused_tangent
from jaxfn._values.arrays import is_inexact

# A differentiable function of (made..., kept..., inputs...) that returns its first operands, `made`. Only the inputs
# have a derivative by it; `kept` is what it needs besides. A `Refusal` is for a derivative that cannot be had.
DifferentiableIdentity = Callable[..., Sequence[jax.Array]] | Refusal


class Gate:
    """Whether the derivative of detached arrays passes after all, which is known once forward has run.

    # Note: one run of forward, whatever it saves

    What forward saves decides how its operations are to be seen by an outer differentiation. With

        def forward(ctx, x):
            s = jnp.sin(x)
            ctx.save_for_backward(s)   # neither input nor output
            return s * x

    `s` has the derivative of the operation that made it, so `sin` must see the derivative of `x`. Had forward saved
    `x`, `sin` must not see it: it may have none (a kernel), and the output has the Function's rule instead. Running
    forward again once that is known would draw other random numbers. But where JAX is writing a program down, it
    differentiates that program later, when forward has run: the gate is open or shut by then, and the equations that
    forward left behind are differentiated in place, or not at all.

    Where something differentiates right now (`jax.grad` of `jax.grad`), it asks `detach` before forward has run. The
    gate is shut then, and says so in `perturbed`.

    Attributes:
      is_open: whether derivatives pass.
      perturbed: which of the arrays were being differentiated where they were detached.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.perturbed: set[int] = set()


_SHUT = Gate()


class Mapping(NamedTuple):
    """What one use of `jax.vmap` maps of a run.

    Attributes:
      operations: what it interprets, the run itself or a program that it was traced into.
      unbatched: the places of arrays made that do not depend on the batch.
      inputs: the places of inputs that have it.
    """

    operations: MappedOperations
    unbatched: frozenset[int]
    inputs: frozenset[int]

    @property
    def batch(self) -> Batch:
        """Which use of `jax.vmap`."""
        return self.operations.batch


class _Attachment:
    """How arrays are attached; compared by identity, so that JAX looks it up fast.

    Attributes:
      rule: see `DifferentiableIdentity`.
      num_made, num_kept: how many operands are which; the others are the inputs.
      made_is_detached, is_uniform, mappings: see `attach`.
    """

    __slots__ = ("is_uniform", "made_is_detached", "mappings", "num_kept", "num_made", "rule")

    def __init__(
        self,
        rule: DifferentiableIdentity,
        num_made: int,
        num_kept: int,
        made_is_detached: bool,
        is_uniform: bool,
        mappings: list[Mapping] | None,
    ) -> None:
        self.rule = rule
        self.num_made = num_made
        self.num_kept = num_kept
        self.made_is_detached = made_is_detached
        self.is_uniform = is_uniform
        self.mappings = mappings

    def with_rule(self, rule: DifferentiableIdentity) -> _Attachment:
        return _Attachment(rule, self.num_made, self.num_kept, self.made_is_detached, self.is_uniform, self.mappings)

    def note_mapping(self, operations: MappedOperations, operands: Sequence[Any]) -> None:
        """Notes that `jax.vmap` maps some operands, where it leaves out some that were made."""
        if self.mappings is None or self.is_uniform:
            return
        has_batch = [operations.batch in batches_of(x) for x in operands]
        first_input = self.num_made + self.num_kept
        unbatched = frozenset(i for i, flag in enumerate(has_batch[: self.num_made]) if not flag)
        inputs = frozenset(i for i, flag in enumerate(has_batch[first_input:]) if flag)
        if any(has_batch) and unbatched:
            self.mappings[:] = [m for m in self.mappings if not m.operations.are_over]
            self.mappings.append(Mapping(operations, unbatched, inputs))


class _Settling:
    """How arrays are settled; compared by identity. See `settle`.

    Attributes:
      places: which of the arrays to be settled these are; some may have been left out of the program.
    """

    __slots__ = ("is_uniform", "num_made", "places", "unbatched")

    def __init__(self, places: Sequence[int], is_uniform: bool, unbatched: set[tuple[Batch, int]]) -> None:
        self.places = places
        self.num_made = len(places)
        self.is_uniform = is_uniform
        self.unbatched = unbatched


def _see_attach(operations: MappedOperations, operands: Sequence[Any], params: dict[str, Any]) -> None:
    params["attachment"].note_mapping(operations, operands)


attach_p = SeenPrimitive("attach", _see_attach)
attach_p.multiple_results = True

detach_p = Primitive("detach")
detach_p.multiple_results = True

settle_p = Primitive("settle")
settle_p.multiple_results = True


def attach(
    made: Sequence[Any],
    kept: Sequence[Any],
    inputs: Sequence[Any],
    rule: DifferentiableIdentity,
    *,
    made_is_detached: bool,
    is_uniform: bool = False,
    mappings: list[Mapping] | None = None,
) -> list[Any]:
    """The arrays that forward made, with `rule`'s derivative with respect to the inputs.

    Args:
      made: the arrays.
      kept: what the rule needs besides the inputs.
      inputs: what it differentiates with respect to.
      rule: see `DifferentiableIdentity`.
      made_is_detached: whether forward ran on detached inputs, so that a derivative that `made` still has can only
        come from values that forward closed over, and is added. Otherwise it may be that of forward's operations,
        and is dropped where inputs are being differentiated.
      is_uniform: see `settle`.
      mappings: where to note that `jax.vmap` maps inputs or what is kept, and not all that was made.
    """
    attachment = _Attachment(rule, len(made), len(kept), made_is_detached, is_uniform, mappings)
    return attach_p.bind(*made, *kept, *inputs, attachment=attachment)


def detach(arrays: Sequence[Any], gate: Gate = _SHUT) -> list[Any]:
    """The arrays without a derivative, unless the gate is opened: `jax.lax.stop_gradient` in one equation."""
    return detach_p.bind(*arrays, gate=gate)


def settle(
    made: Sequence[Any],
    inputs: Sequence[Any],
    *,
    is_uniform: bool = False,
    unbatched: set[tuple[Batch, int]] | None = None,
) -> list[Any]:
    """The arrays as they are, with the batch at axis 0 where `jax.vmap` is applied.

    # Note: primal and rule must leave the batch in the same place

    Where a program is batched first and differentiated later (`jax.grad` of `jax.jit` of `jax.vmap`), JAX takes the
    batch axes of a custom derivative's outputs from its primal, and uses them for what the rule returns as well:

        primal   x, batch at axis 1  --sin-->            y, batch at axis 1
        rule     x, batch at axis 1  --sin, attach-->    y, batch at axis 0, but JAX has noted axis 1

    gives a transposed array, in silence where it is square (JAX 0.10.0 to 0.12.0). Keeping the axis in `attach` does
    not help: forward may compute the same output by other operations where `ctx.needs_input_grad` says so. So both
    sides end in an identity that moves the batch to axis 0. What has no batch stays without one.

    Args:
      made: the arrays.
      inputs: what they were made from.
      is_uniform: whether all of them have the batch where any of the inputs has it: for a forward that has looked at
        `ctx.needs_input_grad`, whose outputs may depend on the batch on one side and not on the other.
      unbatched: where to note which of them had no batch, and of which `jax.vmap`, although others, or inputs, had it.
    """
    settling = _Settling(range(len(made)), is_uniform, set() if unbatched is None else unbatched)
    return settle_p.bind(*made, *inputs, settling=settling)


def _batch_in_front(
    operands: Sequence[Any], dims: Sequence[Any], size: int, num_made: int, is_uniform: bool
) -> list[Any]:
    """The operands, the batch at axis 0 where there is one, and where the first `num_made` need one."""
    return [
        x if d is None and not (is_uniform and i < num_made) else batching.bdim_at_front(x, d, size)
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]


def _batch_axes(dims: Sequence[Any], num_made: int, is_uniform: bool) -> list[int | None]:
    """The batch axes of what `_batch_in_front` returns."""
    return [0 if d is not None or (is_uniform and i < num_made) else None for i, d in enumerate(dims)]


def _attach_impl(*operands: Any, attachment: _Attachment) -> list[Any]:
    return list(operands[: attachment.num_made])


def _attach_lowering(ctx: Any, *operands: Any, attachment: _Attachment) -> list[Any]:
    return list(operands[: attachment.num_made])


def _attach_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, attachment: _Attachment) -> Any:
    # jax.jvp of a custom_vjp is what reverse mode transposes; its `perturbed` flags are then exactly the tangents here.
    num_made, rule = attachment.num_made, attachment.rule
    first_input = num_made + attachment.num_kept
    perturbed = [i for i, t in enumerate(tangents) if i >= first_input and not isinstance(t, ad.Zero)]

    moving = [tangents[i] for i in perturbed]
    if not perturbed or isinstance(rule, Refusal):
        outputs = attach_p.bind(*primals, attachment=attachment)
        by_rule: Sequence[Any] = [None] * num_made
        if isinstance(rule, Refusal) and perturbed:
            avals = [jax.typeof(y).to_tangent_aval() for y in outputs]
            by_rule = [refused_tangent(a, moving, rule) if is_inexact(a.dtype) else None for a in avals]
    else:

        def function(*values: Any) -> Sequence[jax.Array]:
            operands = list(primals)
            for i, value in zip(perturbed, values, strict=True):
                operands[i] = value
            return rule(*operands)

        outputs, by_rule = jax.jvp(function, [primals[i] for i in perturbed], moving)
    closed_over = tangents[:num_made] if attachment.made_is_detached or not perturbed else [None] * num_made
    return outputs, [_sum(y, a, b) for y, a, b in zip(outputs, by_rule, closed_over, strict=True)]


def _sum(primal: Any, *tangents: Any) -> Any:
    present = [t for t in tangents if not (t is None or isinstance(t, ad.Zero) or t.dtype == jax.float0)]
    return sum(present[1:], start=present[0]) if present else _zero(primal)


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _attach_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, attachment: _Attachment) -> Any:
    num_made = attachment.num_made
    if all(d is None for d in dims):  # JAX asks even so
        return attach_p.bind(*operands, attachment=attachment), [None] * num_made
    moved = _batch_in_front(operands, dims, axis.size, num_made, attachment.is_uniform)
    axes = _batch_axes(dims, num_made, attachment.is_uniform)
    if not isinstance(attachment.rule, Refusal):
        batched = jax.vmap(
            attachment.rule,
            in_axes=tuple(axes),
            out_axes=axes[:num_made],
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        attachment = attachment.with_rule(batched)
    return attach_p.bind(*moved, attachment=attachment), axes[:num_made]


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


def _detach_impl(*operands: Any, gate: Gate) -> list[Any]:
    return list(operands)


def _detach_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, gate: Gate) -> Any:
    detached = detach(primals, gate)  # bound again, for whatever differentiates further out
    if gate.is_open:
        return detached, list(tangents)
    if gate is not _SHUT:
        gate.perturbed |= {i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)}
    return detached, [_zero(x) for x in primals]


def _detach_batch(operands: Sequence[Any], dims: Sequence[Any], *, gate: Gate) -> Any:
    return detach(operands, gate), dims


def _detach_lowering(ctx: Any, *operands: Any, gate: Gate) -> list[Any]:
    return list(operands)


detach_p.def_impl(_detach_impl)
detach_p.def_abstract_eval(_detach_impl)
mlir.register_lowering(detach_p, _detach_lowering, cacheable=False)
ad.primitive_jvps[detach_p] = _detach_jvp
batching.primitive_batchers[detach_p] = _detach_batch


def _settle_impl(*operands: Any, settling: _Settling) -> list[Any]:
    return list(operands[: settling.num_made])


def _settle_lowering(ctx: Any, *operands: Any, settling: _Settling) -> list[Any]:
    return list(operands[: settling.num_made])


def _settle_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, settling: _Settling) -> Any:
    return settle_p.bind(*primals, settling=settling), list(tangents[: settling.num_made])


def _settle_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, settling: _Settling) -> Any:
    num_made = settling.num_made
    if all(d is None for d in dims):  # JAX asks even so
        return settle_p.bind(*operands, settling=settling), [None] * num_made
    batch = Batch(axis)
    settling.unbatched |= {(batch, place) for place, d in zip(settling.places, dims, strict=False) if d is None}
    axes = _batch_axes(dims, num_made, settling.is_uniform)
    moved = _batch_in_front(operands, dims, axis.size, num_made, settling.is_uniform)
    return settle_p.bind(*moved, settling=settling), axes[:num_made]


def _settle_dce(used: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
    """What is not used is left out of the program, as it is where a primal ends in no identity."""
    eqn = args[-1]  # 0.12 gives which operands are live before it
    if not any(used):
        return [False] * len(eqn.invars), None
    settling = eqn.params["settling"]
    wanted = [*used, *[True] * (len(eqn.invars) - len(used))]
    invars = [atom for atom, is_wanted in zip(eqn.invars, wanted, strict=True) if is_wanted]
    outvars = [var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used]
    places = [place for place, is_used in zip(settling.places, used, strict=True) if is_used]
    fewer = _Settling(places, settling.is_uniform, settling.unbatched)
    return wanted, eqn.replace(invars=invars, outvars=outvars, params={"settling": fewer})


settle_p.def_impl(_settle_impl)
settle_p.def_abstract_eval(_settle_impl)
mlir.register_lowering(settle_p, _settle_lowering, cacheable=False)
ad.primitive_jvps[settle_p] = _settle_jvp
batching.fancy_primitive_batchers[settle_p] = _settle_batch
partial_eval.dce_rules[settle_p] = _settle_dce
