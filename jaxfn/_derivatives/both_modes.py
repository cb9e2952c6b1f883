"""A rule as a `jax.custom_jvp`: forward mode by the user's `jvp` (push), reverse mode by the user's `backward` (pull).

    arrays, tangents --jvp--> Outputs, tangents of the outputs

The tangents go through one equation that does not say how it is computed; see `jaxfn._primitives.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxfn._compat import Batch, batches_of, zeros_of
from jaxfn._derivatives.names_for_jax import describe
from jaxfn._derivatives.rule import Differentiable, Rule
from jaxfn._primitives.linear import Cotangents, Linear, applied
from jaxfn._primitives.linearity import is_linear
from jaxfn._primitives.summing import NOT_MAPPED
from jaxfn._protocol.outputs import Outputs
from jaxfn._run.run import Run, Site
from jaxfn._values.arrays import as_array, is_inexact


def both_modes(rule: Rule) -> Differentiable:
    """The rule's function, differentiable in forward and in reverse mode, at every order and in every mix."""

    def primal(site: Site, *operands: Any) -> Outputs:
        # JAX 0.10 forgets a custom_jvp inside of another Function's forward in a scan, and differentiates its primal.
        outputs = rule.attached_primal(site, [as_array(x) for x in operands])
        site.outputs = outputs.layout
        return outputs

    def jvp(primals: Any, tangents: Any) -> tuple[Outputs, Outputs]:
        site, *operands = primals
        operands = [as_array(x) for x in operands]
        tangents_of_operands = [None if isinstance(t, SymbolicZero) else t for t in tangents[1:]]
        perturbed = tuple(
            t is not None and is_inexact(x.dtype) for t, x in zip(tangents_of_operands, operands, strict=True)
        )
        outputs, run, residuals = rule.linearized(operands, perturbed, site.hooks)
        site.check_outputs(run)
        tangents_of_inputs = rule.inputs_among(
            [t if p else None for t, p in zip(tangents_of_operands, perturbed, strict=True)]
        )
        tangents_of_outputs = _output_tangents(site, run, residuals, tangents_of_inputs, outputs)
        if any(
            batch in batches_of(tangents_of_outputs[i]) - batches_of(outputs.arrays[i]) for batch, i in site.unbatched
        ):
            raise NotImplementedError(NOT_MAPPED.format(name=rule.call.name))
        return outputs, Outputs(outputs.layout, tangents_of_outputs)

    describe(rule, primal, jvp)
    differentiable = jax.custom_jvp(primal)
    differentiable.defjvp(jvp, symbolic_zeros=True)
    return differentiable


def _output_tangents(
    site: Site, run: Run, residuals: list[Any], tangents_of_inputs: Sequence[Any], outputs: Outputs
) -> list[Any]:
    """A tangent for each array leaf of the outputs, symbolically zero where there is none."""
    avals = [jax.typeof(y).to_tangent_aval() for y in outputs.arrays]
    tangents: list[Any] = [SymbolicZero(aval) for aval in avals]
    marked = outputs.layout.non_differentiable
    differentiable = [i for i, y in enumerate(outputs.arrays) if is_inexact(y.dtype) and i not in marked]
    perturbed = [i for i, t in enumerate(tangents_of_inputs) if t is not None]
    linear = _OfRun(site, run, perturbed, differentiable, [avals[i] for i in differentiable])
    given = [tangents_of_inputs[i] for i in perturbed]
    for i, tangent in zip(differentiable, applied(linear, residuals, given), strict=True):
        tangents[i] = tangent
    return tangents


class _OfRun(Linear):
    """The derivative of a run of `forward`, from the array leaves `perturbed` to the array leaves `differentiable`."""

    def __init__(self, site: Site, run: Run, perturbed: list[int], differentiable: list[int], avals: list[Any]) -> None:
        self._site = site
        self._run = run
        self._perturbed = perturbed
        self._differentiable = differentiable
        self.avals = avals

    def __repr__(self) -> str:
        return self._run.call.name

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        if not self._run.call.methods.has_jvp:
            return self._transposed_pull(residuals, tangents)
        tangents_of_inputs: list[Any] = [None] * len(self._run.input_avals)
        for i, tangent in zip(self._perturbed, tangents, strict=True):
            tangents_of_inputs[i] = tangent
        tangents_of_outputs = self._run.jvp(residuals, tangents_of_inputs)
        pushed = [tangents_of_outputs[i] for i in self._differentiable]
        return [zeros_of(aval) if t is None else t for t, aval in zip(pushed, self.avals, strict=True)]

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        if not self._run.call.methods.has_backward:
            return self._transposed_push(residuals, cotangents)
        cotangents_of_outputs: list[Any] = [SymbolicZero(aval.to_tangent_aval()) for aval in self._run.output_avals]
        for i, cotangent in zip(self._differentiable, cotangents, strict=True):
            if cotangent is not None:
                cotangents_of_outputs[i] = cotangent
        cotangents_of_inputs = self._run.backward(residuals, cotangents_of_outputs)
        return [cotangents_of_inputs[i] for i in self._perturbed]

    def is_of_unbatched(self, result: int, batch: Batch) -> bool:
        return (batch, self._differentiable[result]) in self._site.unbatched

    def _transposed_pull(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """`generate_jvp_rule`: forward mode from `backward`."""

        def pull(*cotangents: Any) -> list[Any]:
            zeros = self._zeros_of_inputs()
            pulled = self.pull(residuals, cotangents)
            return [zero if ct is None else ct for ct, zero in zip(pulled, zeros, strict=True)]

        like = [zeros_of(aval) for aval in self.avals]
        return list(_transposed(pull, like, f"{self}.backward", "generate_jvp_rule", "gradients")(list(tangents)))

    def _transposed_push(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        """Reverse mode from `jvp`, where there is no `backward`."""
        given = [zeros_of(a) if ct is None else ct for a, ct in zip(self.avals, cotangents, strict=True)]

        def push(*tangents: Any) -> list[Any]:
            return self.push(residuals, tangents)

        like = self._zeros_of_inputs()
        return list(_transposed(push, like, f"{self}.jvp", "reverse mode", "tangents")(given))

    def _zeros_of_inputs(self) -> list[jax.Array]:
        return [zeros_of(self._run.input_avals[i].to_tangent_aval()) for i in self._perturbed]


def _transposed(
    function: Callable[..., Any], like: Sequence[Any], method: str, what_for: str, arguments: str
) -> Callable[..., Any]:
    """The transpose of user code that ought to be linear; raises where it is not."""
    problem = (
        f"{method} is not linear in its {arguments}, so {what_for}, which transposes it, cannot be had. Define the "
        "other rule by hand, or take the nonlinear part out of the Function."
    )
    if not is_linear(function, like):
        raise RuntimeError(problem)
    transpose = jax.linear_transpose(function, *like)

    def apply(values: Any) -> Any:
        try:
            return transpose(values)
        except Exception as error:  # of many kinds, by JAX's transposition rules
            raise RuntimeError(
                f"{problem} Or it is linear, and JAX has no transpose of something in it, such as a Function with "
                f"backward alone. JAX says: {error}"
            ) from error

    return apply
