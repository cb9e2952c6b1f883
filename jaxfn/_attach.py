"""attach: the identity on a call's outputs that gives them the Function's own rule as their derivative.

Inside a `jax.custom_vjp`, `fwd` is ordinary JAX code to an *outer* differentiation, which would see the raw operations
that made the outputs and not the Function's rule. So `fwd` passes them through this primitive, which costs one
equation while tracing, lowers to nothing, and becomes a `jax.custom_vjp` again only when something differentiates or
batches it. (A custom_vjp in its place made tracing 1.2 times slower.)

The operands are those of `identity`, a differentiable function of (outputs..., own residuals..., inputs...) that
returns its first `num_outputs` operands; only the inputs have a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._compat import Primitive, ad, batching, mlir, partial_eval

Identity = Callable[..., Sequence[jax.Array]]

attach_p = Primitive("attach")
attach_p.multiple_results = True


def attach(outputs: Sequence[Any], own: Sequence[Any], inputs: Sequence[Any], identity: Identity) -> list[Any]:
    """The outputs, with `identity`'s derivative with respect to the inputs."""
    return attach_p.bind(*outputs, *own, *inputs, identity=identity, num_outputs=len(outputs))


def detach(arrays: Sequence[Any]) -> list[Any]:
    """The arrays without a derivative: `stop_gradient` in one equation."""
    return attach_p.bind(*arrays, identity=None, num_outputs=len(arrays))


def _returned(*operands: Any, identity: Identity | None, num_outputs: int) -> list[Any]:
    return list(operands[:num_outputs])


def _lowering(ctx: Any, *operands: Any, identity: Identity | None, num_outputs: int) -> list[Any]:
    return list(operands[:num_outputs])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, identity: Identity | None, num_outputs: int) -> Any:
    # jax.jvp of a custom_vjp is what reverse mode transposes; its `perturbed` flags are then exactly the tangents here.
    if identity is None:
        return detach(primals), [_zero(x) for x in primals]  # bound again, for whatever differentiates further out
    perturbed = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_perturbed(*values: Any) -> Sequence[jax.Array]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return identity(*operands)

    outputs, output_tangents = jax.jvp(of_perturbed, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])
    return outputs, [
        _zero(output) if tangent.dtype == jax.float0 else tangent
        for output, tangent in zip(outputs, output_tangents, strict=True)
    ]


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, identity: Identity | None, num_outputs: int
) -> Any:
    if identity is None:
        return detach(operands), dims
    moved = [x if d is None else batching.bdim_at_front(x, d, axis.size) for x, d in zip(operands, dims, strict=True)]
    axes = tuple(None if d is None else 0 for d in dims)
    batched = jax.vmap(
        identity,
        in_axes=axes,
        out_axes=list(axes[:num_outputs]),
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    return attach_p.bind(*moved, identity=batched, num_outputs=num_outputs), list(axes[:num_outputs])


def _partial_eval(
    _policy: Any, unknowns_in: Sequence[bool], available_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """For `jax.checkpoint`: an output that a policy saves inside `forward` is saved attached, in its place.

    Recomputing the identity instead would keep the inputs as well, which the saved output makes needless. The policy
    itself was asked about the operation that made the output.
    """
    num_outputs = eqn.params["num_outputs"]
    if any(unknowns_in):
        return None, eqn, [True] * num_outputs, [True] * num_outputs, _unavailable(eqn.invars, available_in)
    if all(available_in[:num_outputs]):
        return eqn, eqn, [False] * num_outputs, [True] * num_outputs, _unavailable(eqn.invars, available_in)
    return eqn, None, [False] * num_outputs, [False] * num_outputs, []


def _unavailable(variables: Sequence[Any], available: Sequence[bool]) -> list[Any]:
    return [v for v, is_available in zip(variables, available, strict=True) if not is_available]


attach_p.def_impl(_returned)
attach_p.def_abstract_eval(_returned)
# Not cacheable: every equation has an `identity` of its own, so that looking it up costs more than lowering it.
mlir.register_lowering(attach_p, _lowering, cacheable=False)
ad.primitive_jvps[attach_p] = _jvp
batching.fancy_primitive_batchers[attach_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[attach_p] = _partial_eval
