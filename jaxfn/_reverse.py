"""A rule as a `jax.custom_vjp`: reverse mode by the user's `backward`.

    arrays --primal--> Outputs                      nothing is differentiated
    arrays --fwd-----> Outputs, Residuals           detach, the user's forward, attach
    Residuals, cotangents --bwd--> cotangents       the user's backward

What `forward` decided besides arrays leaves the traced function as the static part of the `Outputs` and `Residuals`
pytree nodes, never through a closure: JAX may cache a trace and not run the function again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxfn._compat import SymbolicZero, is_batched, zeros_of
from jaxfn._described import describe
from jaxfn._leaves import as_array, is_inexact
from jaxfn._linearity import is_zero
from jaxfn._outputs import Outputs
from jaxfn._rules import NOT_MAPPED, Differentiable, Rule, Site
from jaxfn._run import Run


def reverse_mode(rule: Rule) -> Differentiable:
    """The rule's function, differentiable in reverse mode, at every order."""

    def primal(site: Site, *operands: Any) -> Outputs:
        outputs = rule.primal(site, [as_array(x) for x in operands])
        site.outputs = outputs.layout
        return outputs

    def fwd(site: Site, *primals: Any) -> tuple[Outputs, Residuals]:
        operands = [as_array(p.value) for p in primals]
        # JAX's coming checkpoint says of integers too that they are perturbed.
        perturbed = tuple(p.perturbed and is_inexact(x.dtype) for p, x in zip(primals, operands, strict=True))
        outputs, run, residuals = rule.linearized(operands, perturbed, site.hooks)
        site.check_outputs(run)
        return outputs, _kept(site, _mapped(site, run, outputs.arrays, rule.of_inputs(operands)), residuals)

    def bwd(residuals: Residuals, cotangents: Outputs) -> tuple[Any, ...]:
        run = residuals.run
        if run.unmapped_outputs:
            _refuse_sums(run, residuals.arrays, cotangents.arrays)
        of_inputs = run.backward(residuals.arrays, cotangents.arrays)
        return None, *rule.of_operands(of_inputs)

    describe(rule, primal, fwd, bwd)
    differentiable = jax.custom_vjp(primal)
    differentiable.defvjp(fwd, bwd, symbolic_zeros=True)
    return differentiable


def _mapped(site: Site, run: Run, outputs: Sequence[Any], inputs: Sequence[Any]) -> Run:
    """The run, knowing which outputs have no batch beside mapped inputs, where a mapped call is differentiated."""
    suspects = range(len(outputs)) if site.is_mapped else site.unbatched
    if not suspects or not any(map(is_batched, inputs)):
        return run
    run = copy.copy(run)
    run.unmapped_outputs = [i for i in suspects if not is_batched(outputs[i])]
    run.mapped_inputs = [i for i, x in enumerate(inputs) if run.perturbed[i] and is_batched(x)]
    return run


def _refuse_sums(run: Run, residuals: Sequence[Any], cotangents: Sequence[Any]) -> None:
    """Raises where mapped inputs would get a gradient by an output without a batch.

    JAX has summed that output's cotangent over the batch (0.10.0 to 0.12.0), so no example's own is left.
    """
    zeros = [SymbolicZero(aval.to_tangent_aval()) for aval in run.output_avals]
    given = [i for i in run.unmapped_outputs if not isinstance(cotangents[i], SymbolicZero)]
    given = [i for i in given if is_inexact(run.output_avals[i].dtype)]

    def of_mapped_inputs(*values: Any) -> list[Any]:
        of_inputs = run.backward(
            residuals, [dict(zip(given, values, strict=True)).get(i, z) for i, z in enumerate(zeros)]
        )
        return [of_inputs[i] for i in run.mapped_inputs if of_inputs[i] is not None]

    if given and not is_zero(of_mapped_inputs, [zeros_of(run.output_avals[i]) for i in given]):
        raise NotImplementedError(NOT_MAPPED.format(name=run.call.name))


class Residuals:
    """The arrays kept for backward, and where they belong: a pytree node.

    JAX keeps the trace of `fwd` for every pattern of perturbed inputs (under `cond`, `scan` and `jit`), but the tree of
    the residuals only of the last one. So the tree must not depend on the pattern: it holds the site, and which run the
    residuals are of is told by the shape of a last, empty one.
    """

    def __init__(self, arrays: Sequence[Any], site: Site) -> None:
        self.arrays = arrays
        self.site = site

    @property
    def run(self) -> Run:
        """The run that kept them."""
        runs = self.site.runs
        return runs[-1] if runs[-1].has_one_pattern else runs[self.arrays[-1].shape[-1]]


jax.tree_util.register_pytree_node(Residuals, lambda r: (r.arrays, r.site), lambda site, a: Residuals(a, site))


def _kept(site: Site, run: Run, residuals: list[Any]) -> Residuals:
    """The residuals of a run at this site."""
    site.runs.append(run)
    if run.has_one_pattern:
        return Residuals(residuals, site)
    if run.read_needs_input_grad:
        # What such a forward saves may depend on the pattern, so their number must not show either.
        residuals = residuals + [_token(0)] * (_RESIDUALS_ROUNDED_TO - len(residuals) % _RESIDUALS_ROUNDED_TO)
    # Looked up, not counted: two threads may be differentiating the same traced call.
    return Residuals([*residuals, _token(site.runs.index(run))], site)


_RESIDUALS_ROUNDED_TO = 16


@lru_cache
def _token(number: int) -> np.ndarray[Any, Any]:
    return np.zeros((0, number), bool)
