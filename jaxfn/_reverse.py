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

from jaxfn._attach import Mapping
from jaxfn._compat import SymbolicZero, batches_of, enclosing_batches, is_batched, zeros_of
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
        return outputs, _kept(site, _mapped(site, run, outputs.arrays, operands), residuals)

    def bwd(residuals: Residuals, cotangents: Outputs) -> tuple[Any, ...]:
        run = residuals.run
        if mappings := _mappings(run):
            _refuse_sums(run, mappings, residuals.arrays, cotangents.arrays)
        of_inputs = run.backward(residuals.arrays, cotangents.arrays)
        return None, *rule.of_operands(of_inputs)

    describe(rule, primal, fwd, bwd)
    differentiable = jax.custom_vjp(primal)
    differentiable.defvjp(fwd, bwd, symbolic_zeros=True)
    return differentiable


def _mapped(site: Site, run: Run, outputs: Sequence[Any], operands: Sequence[Any]) -> Run:
    """The run, knowing which outputs lack a batch that an operand has, where a mapped call is differentiated."""
    if not any(map(is_batched, operands)):
        return run
    of_operands, of_outputs = list(map(batches_of, operands)), list(map(batches_of, outputs))
    mappings: list[Mapping] = []
    here = enclosing_batches().here
    for batch in here[: max(len(here) - site.num_around, 0)]:
        unbatched = frozenset(i for i, batches in enumerate(of_outputs) if batch not in batches)
        inputs = frozenset(i for i in range(len(run.input_avals)) if batch in of_operands[i])
        if unbatched:
            mappings.append(Mapping(batch, unbatched, inputs))
    if mappings:
        run = copy.copy(run)
        run.mappings = mappings
    return run


def _mappings(run: Run) -> list[Mapping]:
    """The uses of `jax.vmap` of which the derivative is taken from outside, where outputs lack their batch.

    # Note: grad of vmap, and vmap of grad, of a jitted function

    Under `jax.jit` forward runs where no batch is seen. `jax.vmap` maps the program that it was traced into, and there
    `attach` notes which operands are mapped. It does so in either order; but only where the derivative is taken from
    outside JAX runs `bwd` in the midst of that very vmap:

        grad(vmap(jit(f)))    fwd: jit            bwd: vmap, transposing jit
        vmap(grad(jit(f)))    fwd: jit            bwd: transposing jit, vmap
    """
    if not run.mappings_of_program:
        return run.mappings
    here = enclosing_batches().here
    return [*run.mappings, *(m for m in run.mappings_of_program if m.batch in here)]


def _refuse_sums(run: Run, mappings: Sequence[Mapping], residuals: Sequence[Any], cotangents: Sequence[Any]) -> None:
    """Raises where an input's gradient by an output without a batch depends on that batch.

    JAX has summed that output's cotangent over the batch (0.10.0 to 0.12.0), so no example's own is left. The gradient
    depends on the batch where the input has it, or where something that was saved has it.
    """
    zeros: list[Any] = [SymbolicZero(aval.to_tangent_aval()) for aval in run.output_avals]
    for place in frozenset[int]().union(*(m.unbatched for m in mappings)):
        if isinstance(cotangents[place], SymbolicZero) or not is_inexact(run.output_avals[place].dtype):
            continue

        def pulled(cotangent: Any, place: int = place) -> list[Any]:
            return run.backward(residuals, [*zeros[:place], cotangent, *zeros[place + 1 :]])

        absent = [m for m in mappings if place in m.unbatched]
        suspects = {
            i
            for i, of_input in enumerate(pulled(cotangents[place]))
            for m in absent
            if of_input is not None and (i in m.inputs or m.batch in batches_of(of_input))
        }

        def pulled_suspects(cotangent: Any, pulled: Any = pulled, suspects: set[int] = suspects) -> list[Any]:
            return [x for i, x in enumerate(pulled(cotangent)) if i in suspects and x is not None]

        if suspects and not is_zero(pulled_suspects, [zeros_of(run.output_avals[place])]):
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
