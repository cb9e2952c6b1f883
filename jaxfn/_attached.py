"""Runs of `forward` as an outer differentiation is to see them: by the Function's own rule, at every order.

A run goes `detach`, the user's forward, `attach` (see `_attach`). What `attach` gives the outputs is again a function
that runs attached where it is differentiated, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxfn._attach import Refusal, attach, detach
from jaxfn._differentiable import differentiable
from jaxfn._hooks import Hooks
from jaxfn._leaves import is_inexact, is_traced
from jaxfn._outputs import Outputs
from jaxfn._rules import Linearized, Rule, Site
from jaxfn._run import Call, Run, run_forward


class CallRule(Rule):
    """One call of a Function: takes its array leaves, returns its outputs."""

    def __init__(self, call: Call) -> None:
        self.call = call

    @property
    def operand_names(self) -> tuple[str, ...]:
        names = zip(self.call.form.names, self.call.layouts, strict=True)
        return tuple(name for name, layout in names for _ in range(layout.num_arrays))

    def primal(self, operands: Sequence[Any]) -> Outputs:
        run, outputs, _ = run_forward(self.call, operands, self.call.unperturbed, None)
        return Outputs(outputs, run.outputs)

    def linearized(self, operands: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None) -> Linearized:
        self.call.refuse_perturbed_refs(perturbed)
        run, outputs, own = _run_detached(self.call, operands, perturbed, hooks)
        outputs = _attached(run, outputs, own, operands)
        return Linearized(Outputs(outputs, run.outputs), *run.residuals(operands, outputs, own))

    def of_inputs(self, of_operands: Sequence[Any]) -> Sequence[Any]:
        return of_operands

    def of_operands(self, of_inputs: Sequence[Any]) -> Sequence[Any]:
        return of_inputs


def _run_detached(
    call: Call, inputs: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None
) -> tuple[Run, Sequence[Any], Sequence[Any]]:
    """Runs forward so that nothing differentiates its own operations, which may have no derivative (a kernel, say).

    Where forward saved intermediates, those have the derivative of its operations, so it runs on the inputs themselves.
    That is seen at the first traced run, which is then done again, and remembered.

    Returns:
      The run, its outputs and its intermediates.
    """
    if not any(map(is_traced, inputs)):
        return run_forward(call, inputs, perturbed, hooks)
    if not call.methods.saves_intermediates:
        run, outputs, own = run_forward(call, _detached(call, inputs), perturbed, hooks)
        if not run.saves_intermediates:
            return run, outputs, own
        if any(call.are_refs):  # which must not be written twice
            if run.hides_arrays:
                raise NotImplementedError(
                    f"{call.name} takes a jax.Ref and keeps a JAX array inside a closure or an object on ctx, where "
                    "its derivative cannot be had. Save the array itself: ctx.save_for_backward(array)."
                )
            refusal = Refusal(
                f"{call.name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot "
                "be differentiated twice: forward would have to write twice. Save inputs or outputs instead."
            )
            own = attach(own, (), call.without_refs(inputs), refusal, made_is_detached=True)
            return run, outputs, own
        call.methods.saves_intermediates = True
    run, outputs, own = run_forward(call, inputs, perturbed, hooks)
    if call.closes_over_tracers() and not any(call.are_refs):
        # Only the outputs of a detached run show what derivative they have by what forward closed over.
        _, outputs, _ = run_forward(call, _detached(call, inputs), perturbed, hooks)
    else:
        run.is_detached = False
    return run, outputs, own


def _detached(call: Call, inputs: Sequence[Any]) -> list[Any]:
    """The inputs without derivatives, each an object of its own: what was saved is known by identity."""
    detached = [x if is_traced(x) else jnp.array(x) for x in detach(call.without_refs(inputs))]
    if len(detached) == len(inputs):
        return detached
    remaining = iter(detached)
    return [x if is_ref else next(remaining) for x, is_ref in zip(inputs, call.are_refs, strict=True)]


def _attached(run: Run, outputs: Sequence[Any], own: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs with the Function's own rule for an outer differentiation."""
    operands = run.call.without_refs(inputs)
    if any(map(is_traced, operands)) and any(is_inexact(x.dtype) for x in operands):
        rule = _OutputsRule(run, len(outputs), len(own))
        outputs = attach(outputs, own, operands, rule.outputs, made_is_detached=run.is_detached)
    return run.outputs.without_derivatives(outputs)


class _OutputsRule(Rule):
    """Returns the outputs among (outputs..., intermediates..., inputs...); their derivative is the user's."""

    def __init__(self, run: Run, num_outputs: int, num_own: int) -> None:
        self.call = run.call
        self._run = run
        self._num_outputs = num_outputs
        self._num_before = num_outputs + num_own

    def outputs(self, *operands: Any) -> Sequence[Any]:
        """The differentiable function. It is made where something differentiates it, which is seldom."""
        return list(differentiable(self)(Site(self._run.hooks), *operands).arrays)

    def primal(self, operands: Sequence[Any]) -> Outputs:
        return Outputs(operands[: self._num_outputs], self._run.outputs)

    def linearized(self, operands: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None) -> Linearized:
        inputs = self.of_inputs(operands)
        flags = tuple(self.call.with_refs(perturbed[self._num_before :], False))
        run, own = _widened(self._run, operands[self._num_outputs : self._num_before], inputs, flags)
        outputs = _attached(run, operands[: self._num_outputs], own, inputs)
        return Linearized(Outputs(outputs, run.outputs), *run.residuals(inputs, outputs, own))

    def of_inputs(self, of_operands: Sequence[Any]) -> Sequence[Any]:
        return self.call.with_refs(of_operands[self._num_before :], None)

    def of_operands(self, of_inputs: Sequence[Any]) -> Sequence[Any]:
        return [*[None] * self._num_before, *self.call.without_refs(of_inputs)]


def _widened(
    run: Run, own: Sequence[Any], inputs: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Run, Sequence[Any]]:
    """The run as if these inputs too had been perturbed, and its intermediates.

    A forward that looked at `ctx.needs_input_grad` may have saved less than the wider flags need, so it runs again.
    """
    union = tuple(a or b for a, b in zip(run.perturbed, perturbed, strict=True))
    if union == run.perturbed:
        return run, own
    if not run.read_needs_input_grad:
        return run.with_perturbed(union), own
    if any(run.call.are_refs):
        raise NotImplementedError(
            f"{run.call.name}.forward looks at ctx.needs_input_grad and would have to run again for this mixed second "
            "derivative, which would write to its jax.Ref arguments twice. Let it save the same whatever the flags are."
        )
    again, _, own = _run_detached(run.call, inputs, union, run.hooks)
    if again.outputs != run.outputs:
        raise RuntimeError(
            f"{run.call.name}.forward returned outputs of another structure when ctx.needs_input_grad was "
            f"{again.needs_input_grad} than when it was {run.needs_input_grad}. What forward returns must "
            "not depend on ctx.needs_input_grad."
        )
    return again, own
