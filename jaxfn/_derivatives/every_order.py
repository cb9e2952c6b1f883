"""Runs of `forward` as an outer differentiation is to see them: by the Function's own rule, at every order.

A run goes `detach`, the user's forward, `attach` (see `attach`). What `attach` gives the outputs is again a function
that runs attached where it is differentiated, and so on.

# Note: two orders of a straight-through rounding

    forward   y = round(x)          backward   g * 2 * x      (it saves x)

    first order     fwd runs forward on detach(x), so that nobody differentiates `round`, and returns attach(y);
                    bwd computes g * 2 * x from the residual, which is x itself and not its detached copy
    second order    the outer derivative sees bwd as plain operations: of g * 2 * x by x it is 2 * g. Where it meets
                    attach(y), `_OutputsRule` gives it y with the same rule again: 2 * x, and not the 0 of `round`

A residual that is an input or an output is that array, so it has its derivative. One that forward computed has the
derivative of the operations that computed it, which `detached` sees to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxfn._derivatives.differentiable import differentiable
from jaxfn._derivatives.rule import Linearized, Rule
from jaxfn._primitives.attach import Mapping, attach, settle
from jaxfn._primitives.refusal import Refusal
from jaxfn._protocol.outputs import Outputs
from jaxfn._protocol.saved_tensor_hooks import Hooks
from jaxfn._run.call import Call
from jaxfn._run.detached import CHANGED, Done, StandIns, is_elsewhere, recorded, run_once
from jaxfn._run.provenance import agree
from jaxfn._run.record import Record
from jaxfn._run.run import Run, Site, run_forward
from jaxfn._values.arrays import is_inexact, is_traced


class CallRule(Rule):
    """One call of a Function: takes its array leaves, returns its outputs.

    Args:
      call: the call.
      closed_over: traced values that `forward` closes over. They are operands too, after the array leaves, so that JAX
        says whether they are being differentiated, and so that forward has their values wherever JAX runs it: in
        `jit`, `checkpoint` and `scan` the tracers in its closure belong to another program than the one that its
        derivative is written into. (With a custom_vjp by hand JAX 0.10.0 to 0.12.0 raises there, or gives zero.)
      closed_over_by_rules: those that `backward` or `jvp` closes over, operands for the same reason. They are kept with
        the residuals. (By hand JAX raises in `jit`, `scan` and `cond`.)
    """

    def __init__(self, call: Call, closed_over: Sequence[Any] = (), closed_over_by_rules: Sequence[Any] = ()) -> None:
        self.call = call
        self._num_inputs = len(call.are_refs)
        self._num_forward = self._num_inputs + len(closed_over)
        self._closed_over = closed_over
        self._closed_over_by_rules = closed_over_by_rules

    @property
    def operand_names(self) -> tuple[str, ...]:
        names = zip(self.call.form.names, self.call.layouts, strict=True)
        inputs = tuple(name for name, layout in names for _ in range(layout.num_arrays))
        return inputs + tuple(
            f"closed over {i}" for i in range(len(self._closed_over) + len(self._closed_over_by_rules))
        )

    def primal(self, site: Site, operands: Sequence[Any]) -> Outputs:
        inputs, stand_ins = operands[: self._num_inputs], self._stand_ins(operands)
        done = None
        if not self.call.has_refs and is_elsewhere(stand_ins):
            done = recorded(self.call, inputs, inputs, self.call.unperturbed, None, stand_ins=stand_ins)
        run, outputs, *_ = done or run_forward(self.call, inputs, self.call.unperturbed, None)
        return Outputs(run.outputs, _settled_outputs(run, outputs, inputs, site))

    def attached_primal(self, site: Site, operands: Sequence[Any]) -> Outputs:
        inputs = operands[: self._num_inputs]
        done = self._run_closing_over(operands, self.call.unperturbed, site.hooks)
        return Outputs(done.run.outputs, _settled_outputs(done.run, _attached(done, inputs), inputs, site))

    def linearized(self, operands: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None) -> Linearized:
        inputs, perturbed_inputs = operands[: self._num_inputs], perturbed[: self._num_inputs]
        if self.call.has_refs:
            self.call.refuse_perturbed_refs(perturbed_inputs)
        self._refuse_perturbed_closed_over(inputs, perturbed[self._num_inputs : self._num_forward])
        return _linearized(self._run_closing_over(operands, perturbed_inputs, hooks), inputs)

    def inputs_among(self, operands: Sequence[Any]) -> Sequence[Any]:
        return operands[: self._num_inputs]

    def operands_with(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return [*inputs, *[None] * (len(self._closed_over) + len(self._closed_over_by_rules))]

    def _run_closing_over(self, operands: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None) -> Done:
        """A run of forward, with what its rules need of what they close over."""
        inputs = operands[: self._num_inputs]
        if any(map(is_traced, inputs)):
            done = run_once(self.call, inputs, perturbed, hooks, self._stand_ins(operands))
        else:
            done = Done(*run_forward(self.call, inputs, perturbed, hooks))
        if not self._closed_over_by_rules:
            return done
        run = done.run.closing_over(self._closed_over_by_rules)
        return done._replace(run=run, intermediates=[*done.intermediates, *operands[self._num_forward :]])

    def _refuse_perturbed_closed_over(self, inputs: Sequence[Any], perturbed: Sequence[bool]) -> None:
        """Raises where an output depends on a closed-over value that is being differentiated."""
        if not any(perturbed):
            return
        closed_over = [
            traced for traced, is_perturbed in zip(self._closed_over, perturbed, strict=True) if is_perturbed
        ]

        def program(*inputs: Any) -> tuple[Sequence[Any], Sequence[Any]]:
            return run_forward(self.call, inputs, self.call.unperturbed, None)[1], ()

        if self.call.has_refs or Record(program, inputs, ()).first_needs(closed_over):
            raise NotImplementedError(_CLOSED_OVER.format(name=self.call.name, holder=self.call.holder(closed_over)))

    def _stand_ins(self, operands: Sequence[Any]) -> StandIns:
        return list(zip(self._closed_over, operands[self._num_inputs : self._num_forward], strict=True))


_CLOSED_OVER = (
    "{name}.forward closes over a value that is being differentiated (in {holder}), and a Function has derivatives by "
    "the arrays among its arguments only. Pass that value to {name} as an argument, and return its gradient from "
    "backward."
)
_CLOSED_OVER_FURTHER_OUT = (
    "{name}.forward closes over a value and saves {what}, and a derivative by that value is taken together with one by "
    "the inputs. Pass the value to {name} as an argument."
)
_HIDDEN = "an array inside a closure or an object on ctx"


def _linearized(done: Done, inputs: Sequence[Any]) -> Linearized:
    """The outputs, attached, and what their derivative needs."""
    run = done.run
    outputs = _attached(done, inputs, run.mappings_of_program)
    run.mappings_of_program.clear()  # what maps this run itself is seen without
    return Linearized(Outputs(run.outputs, outputs), *run.residuals(inputs, outputs, done.intermediates))


def _attached(done: Done, inputs: Sequence[Any], mappings: list[Mapping] | None = None) -> Sequence[Any]:
    """The outputs with the Function's own rule for an outer differentiation."""
    run, outputs = done.run, done.outputs
    operands = run.call.without_refs(inputs) if run.call.has_refs else inputs
    is_uniform = run.read_needs_input_grad
    if any(map(is_traced, operands)) and any(is_inexact(x.dtype) for x in operands):
        rule = _OutputsRule(run, len(outputs), len(done.intermediates)).outputs
        outputs = attach(
            outputs,
            done.intermediates,
            operands,
            rule,
            made_is_detached=run.is_detached,
            is_uniform=is_uniform,
            mappings=mappings,
        )
    elif any(map(is_traced, outputs)):
        outputs = settle(outputs, operands, is_uniform=is_uniform)
    if done.closed_over:
        what = _HIDDEN if run.hides_arrays else "an array that is neither an input nor an output"
        refusal = Refusal(NotImplementedError, _CLOSED_OVER_FURTHER_OUT.format(name=run.call.name, what=what))
        outputs = attach(outputs, (), done.closed_over, refusal, made_is_detached=True)
    return run.outputs.without_derivatives(outputs)


def _settled_outputs(run: Run, outputs: Sequence[Any], inputs: Sequence[Any], site: Site) -> Sequence[Any]:
    """The outputs of a primal."""
    if not any(map(is_traced, outputs)):
        return outputs
    arrays = run.call.without_refs(inputs)
    return settle(outputs, arrays, is_uniform=run.read_needs_input_grad, unbatched=site.unbatched)


class _OutputsRule(Rule):
    """Returns the outputs among (outputs..., intermediates..., inputs...); their derivative is the user's."""

    def __init__(self, run: Run, num_outputs: int, num_intermediates: int) -> None:
        self.call = run.call
        self._run = run
        self._num_outputs = num_outputs
        self._num_before = num_outputs + num_intermediates

    def outputs(self, *operands: Any) -> Sequence[Any]:
        """The differentiable function. It is made where something differentiates it, which is seldom."""
        return list(differentiable(self)(Site(self._run.hooks), *operands).arrays)

    def primal(self, site: Site, operands: Sequence[Any]) -> Outputs:
        return Outputs(self._run.outputs, operands[: self._num_outputs])

    def attached_primal(self, site: Site, operands: Sequence[Any]) -> Outputs:
        outputs, intermediates = operands[: self._num_outputs], operands[self._num_outputs : self._num_before]
        done = Done(self._run, outputs, intermediates)
        return Outputs(self._run.outputs, _attached(done, self.inputs_among(operands)))

    def linearized(self, operands: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None) -> Linearized:
        inputs = self.inputs_among(operands)
        flags = tuple(self.call.with_refs(perturbed[self._num_before :], False))
        outputs, intermediates = operands[: self._num_outputs], operands[self._num_outputs : self._num_before]
        run, intermediates = _widened(self._run, outputs, intermediates, inputs, flags)
        return _linearized(Done(run, outputs, intermediates), inputs)

    def inputs_among(self, operands: Sequence[Any]) -> Sequence[Any]:
        return self.call.with_refs(operands[self._num_before :], None)

    def operands_with(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return [*[None] * self._num_before, *self.call.without_refs(inputs)]


def _widened(
    run: Run, outputs: Sequence[Any], intermediates: Sequence[Any], inputs: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Run, Sequence[Any]]:
    """The run as if these inputs too had been perturbed, and its intermediates.

    A forward that looked at `ctx.needs_input_grad` may have saved less than the wider flags need, so it runs again.
    """
    union = tuple(a or b for a, b in zip(run.perturbed, perturbed, strict=True))
    name = run.call.name
    told_enough = union == run.perturbed or all(b or not a for a, b in zip(union, run.expected, strict=True))
    if told_enough or not run.read_needs_input_grad:
        return run.with_perturbed(union), intermediates
    if run.call.has_refs:
        raise NotImplementedError(
            f"{name}.forward looks at ctx.needs_input_grad and would have to run again for this mixed second "
            "derivative, which would write to its jax.Ref arguments twice. Let it save the same whatever the flags are."
        )
    if run.call.closes_over_tracers():
        raise NotImplementedError(_CLOSED_OVER_FURTHER_OUT.format(name=name, what="what ctx.needs_input_grad asks for"))
    again, outputs_again, intermediates_again, _ = run_once(run.call, inputs, union, run.hooks, ())
    if again.outputs != run.outputs:
        raise RuntimeError(
            f"{name}.forward returned outputs of another structure when ctx.needs_input_grad was "
            f"{again.needs_input_grad} than when it was {run.needs_input_grad}. What forward returns must "
            "not depend on ctx.needs_input_grad."
        )
    if not _computed_the_same(run, again, outputs, outputs_again):
        raise NotImplementedError(CHANGED.format(name=name, why=", as it looks at ctx.needs_input_grad"))
    return again.closing_over(run.closed_over_by_rules), [*intermediates_again, *run.values_for_rules(intermediates)]


def _computed_the_same(run: Run, again: Run, outputs: Sequence[Any], outputs_again: Sequence[Any]) -> bool:
    if run.fingerprint is not None and again.fingerprint is not None:
        return run.fingerprint.agrees_with(again.fingerprint)
    return all(map(agree, outputs, outputs_again))
