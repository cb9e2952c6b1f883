"""A rule as a `jax.custom_vjp`: reverse mode by the user's `backward`.

    arrays --primal--> Outputs                      nothing is differentiated
    arrays --fwd-----> Outputs, Residuals           detach, the user's forward, attach
    Residuals, cotangents --bwd--> cotangents       the user's backward

What `forward` decided besides arrays leaves the traced function as the static part of the `Outputs` and `Residuals`
pytree nodes, never through a closure: JAX may cache a trace and not run the function again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from jaxfn._compat import is_batched, refuses_forward_mode
from jaxfn._derivatives.names_for_jax import describe
from jaxfn._derivatives.rule import Differentiable, Rule
from jaxfn._derivatives.unbatched_outputs import pull_of, with_mappings
from jaxfn._frames import came_through, hide_own_frames
from jaxfn._protocol.outputs import Outputs
from jaxfn._run.mistakes import add_to_message
from jaxfn._run.run import Run, Site
from jaxfn._values.arrays import as_array, is_inexact


def reverse_mode(rule: Rule) -> Differentiable:
    """The rule's function, differentiable in reverse mode, at every order."""

    def primal(site: Site, *operands: Any) -> Outputs:
        outputs = rule.primal(site, [as_array(x) for x in operands])
        site.outputs = outputs.layout
        return outputs

    def fwd(site: Site, *primals: Any) -> tuple[Outputs, Residuals]:
        operands = [as_array(p.value) for p in primals]
        # JAX's coming checkpoint says of integers too that they are perturbed.
        perturbed = tuple([p.perturbed and is_inexact(x.dtype) for p, x in zip(primals, operands, strict=True)])
        outputs, run, residuals = rule.linearized(operands, perturbed, site.hooks)
        site.check_outputs(run)
        depended_on = [*rule.inputs_among(operands), *residuals[: len(run.closed_over_by_rules)]]
        if any(map(is_batched, depended_on)):
            run = with_mappings(site, run, outputs.arrays, depended_on)
        return outputs, _kept(site, run, residuals)

    def bwd(residuals: Residuals, cotangents: Outputs) -> tuple[Any, ...]:
        run = residuals.run
        pull = pull_of(run) if run.mappings or run.mappings_of_program else Run.backward
        try:
            cotangents_of_inputs = pull(run, residuals.arrays, cotangents.arrays)
        except Exception as error:
            hide_own_frames(error)
            raise
        return None, *rule.operands_with(cotangents_of_inputs)  # the first is the site's; to JAX each `None` is zero

    describe(rule, primal, fwd, bwd)
    differentiable = jax.custom_vjp(primal)
    differentiable.defvjp(fwd, bwd, symbolic_zeros=True)

    def applied(site: Site, *operands: Any) -> Outputs:
        try:
            return differentiable(site, *operands)
        except TypeError as error:
            if refuses_forward_mode(error) and not came_through(error, primal, fwd):
                add_to_message(error, _REVERSE_ONLY.format(name=rule.call.name))
            raise

    return applied


_REVERSE_ONLY = (
    "{name} has backward alone, and so no forward mode. Define jvp(ctx, *tangents) too, or set generate_jvp_rule = "
    "True, which derives it from backward."
)


class Residuals:
    """The arrays kept for backward, and where they belong: a pytree node.

    JAX keeps the trace of `fwd` for every pattern of perturbed inputs (under `cond`, `scan` and `jit`), but the tree of
    the residuals only of the last one. So the tree must not depend on the pattern: it holds the site, and which run the
    residuals are of is told by the shape of a last, empty one.
    """

    def __init__(self, site: Site, arrays: Sequence[Any]) -> None:
        self.site = site
        self.arrays = arrays

    @property
    def run(self) -> Run:
        """The run that kept them."""
        runs = self.site.runs
        return runs[-1] if runs[-1].has_one_pattern else runs[self.arrays[-1].shape[-1]]


jax.tree_util.register_pytree_node(Residuals, attrgetter("arrays", "site"), Residuals)


def _kept(site: Site, run: Run, residuals: list[Any]) -> Residuals:
    """The residuals of a run at this site."""
    site.runs.append(run)
    if run.has_one_pattern:
        return Residuals(site, residuals)
    if run.read_needs_input_grad:
        # What such a forward saves may depend on the pattern, so their number must not show either.
        residuals = residuals + [_token(0)] * (_RESIDUALS_ROUNDED_TO - len(residuals) % _RESIDUALS_ROUNDED_TO)
    # Looked up, not counted: two threads may be differentiating the same traced call.
    return Residuals(site, [*residuals, _token(site.runs.index(run))])


_RESIDUALS_ROUNDED_TO = 16


@lru_cache
def _token(number: int) -> np.ndarray[Any, Any]:
    return np.zeros((0, number), bool)
