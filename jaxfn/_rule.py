"""The derivative of a forward pass: the user's `backward` and `jvp`, at every order.

    inputs --stop--> the user's forward --> outputs, intermediates
    outputs --attach(outputs, intermediates, inputs, rule)--> the caller's outputs

`attach` gives arrays a custom derivative, as `jax.custom_jvp` does.

Where something differentiates the attached outputs, `_FunctionRule` returns the residuals and one `LinearMap`, from
tangents of the inputs to tangents of the outputs: forward mode applies it (the user's `jvp`), reverse mode transposes
it (the user's `backward`).

# Note: two orders of a straight-through rounding

    forward   y = round(x)          backward   g * 2 * x      (it saves x)

    first order     forward runs on stop(x), so that nothing differentiates `round`; attach(y) has the rule, whose
                    residual is x itself, not its stopped copy
    second order    the outer derivative differentiates backward as plain operations: that of g * 2 * x with respect to
                    x is 2 * g. If g depends on y, it also goes through y, to which the rule is attached again: it
                    uses 2 * x, not the 0 of `round`

A residual that is an input or an output is that array, and so has its derivative. One that forward computed is attached
as well, with the derivative of forward's own operations, which run again if that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import compress, islice
from operator import and_, or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import (
    copy_array,
    derivative_order,
    is_differentiating,
    is_staged,
    outside_derivatives,
    shape_struct,
    staged_under,
    under_tracers,
    zeros_of,
)
from jaxfn._forward_pass import CallSpec, ForwardPass, ForwardResult, call_forward, run_forward, saved_leaves
from jaxfn._hooks import Hooks
from jaxfn._jaxpr import StagedFunction, stage
from jaxfn._linearity import describe_nonlinearity, is_linear
from jaxfn._observe import active_monitor
from jaxfn._outside import LiveArrays, find_outside, run_watched
from jaxfn._primitives import DeferredError, LinearizingRule, LinearMap, Rule, attach, stop
from jaxfn._tree import as_array, captures_arrays, is_inexact, is_traced


def call_with_rule(spec: CallSpec, arrays: Sequence[Any], hooks: Hooks | None) -> Any:
    """Calls `forward` on arrays of which some are traced; returns its outputs with the Function's rule."""
    result = _run_stopped(spec, arrays, spec.inputs.unperturbed, hooks)
    result = result._replace(captured=result.forward_pass.derivative_captures)
    outputs = _with_rule(result, spec.inputs.without_refs(arrays))
    return result.forward_pass.outputs.unflatten(outputs)


def call_untraced(spec: CallSpec, arrays: Sequence[Any]) -> Any:
    """Calls `forward` on arrays of which none is traced; a derivative with respect to what it captured raises."""
    _, _, returned = call_forward(spec, arrays, spec.inputs.unperturbed)
    if not any(map(is_traced, returned.arrays)):
        return returned.value
    error = captured_error(spec)
    outputs = list(returned.arrays)
    for i, x in enumerate(outputs):
        if is_inexact(x.dtype):
            is_marked = i in returned.spec.non_differentiable
            (outputs[i],) = [jax.lax.stop_gradient(x)] if is_marked else attach([x], (), (), error, error)
    return returned.spec.unflatten(outputs)


def call_without_rule(spec: CallSpec, arrays: Sequence[Any]) -> Any:
    """Calls `forward`; returns its outputs with the derivative of its operations."""
    _, _, returned = call_forward(spec, arrays, spec.inputs.unperturbed)
    outputs = list(returned.arrays)
    for i in returned.spec.non_differentiable:
        outputs[i] = jax.lax.stop_gradient(outputs[i])
    return returned.spec.unflatten(outputs)


def _run_stopped(
    spec: CallSpec, arrays: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None
) -> ForwardResult:
    """Runs `forward` so that nothing differentiates its own operations, which may have no derivative.

    Args:
      spec: The call.
      arrays: The array leaves of the inputs.
      perturbed: Which of them are differentiated, in addition to those that JAX reports.
      hooks: The saved-tensor hooks that were active at the call.
    """
    orders = list(map(derivative_order, arrays))
    is_higher_order = max(orders, default=0) + any(perturbed) > 1
    flags = tuple(map(or_, perturbed, map(bool, orders)))
    values = spec.inputs.without_refs(arrays)
    if spec.inputs.has_refs:
        spec.check_no_perturbed_refs(flags)
        refs = [x for x, is_ref in zip(arrays, spec.inputs.are_refs, strict=True) if is_ref]
        values = (
            attach(values, (), [ref[...] for ref in refs], _RefGuard(spec)) if any(map(is_traced, refs)) else values
        )
    may_capture = spec.may_capture_tracers
    is_outside = is_differentiating() and not may_capture
    with outside_derivatives() if is_outside else nullcontext():
        stopped = list(map(as_array, stop(values)))
        # `_save` recognizes saved arrays by identity. Copy, so that every input is a different object.
        if is_higher_order or len(set(map(id, stopped))) < len(stopped):
            stopped = [x if is_traced(x) else copy_array(x) for x in stopped]
        before = LiveArrays() if is_higher_order and not any(map(is_staged, map(staged_under, stopped))) else None
        if spec.inputs.has_refs:
            remaining, before = iter(stopped), None
            stopped = [x if is_ref else next(remaining) for x, is_ref in zip(arrays, spec.inputs.are_refs, strict=True)]
            result = run_forward(spec, stopped, flags, hooks)
        elif may_capture and spec.methods.forward_captures():
            result = _run_staged(spec, stopped, flags, hooks)
        else:
            result = run_forward(spec, stopped, flags, hooks)
    if before is None:
        return result
    watched = before.new(stopped)
    return result._replace(
        forward_pass=replace(result.forward_pass, watched=watched),
        outputs=[copy_array(x) for x in result.outputs],
        intermediates=[copy_array(x) for x in result.intermediates],
    )


class _RefGuard(Rule):
    """Raises if a staged call is differentiated with respect to the contents of a `jax.Ref`."""

    def __init__(self, spec: CallSpec) -> None:
        self._spec = spec

    def __call__(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        flags = iter([t is not None for t in tangents])
        self._spec.check_no_perturbed_refs([is_ref and next(flags) for is_ref in self._spec.inputs.are_refs])
        raise AssertionError("internal error: a rule was called although no input has a tangent")


def _run_staged(spec: CallSpec, arrays: Sequence[Any], flags: tuple[bool, ...], hooks: Hooks | None) -> ForwardResult:
    """Stages `forward` to a jaxpr and evaluates it, so that intermediates can be computed again.

    The trace of a captured tracer may have ended when the intermediates are computed again; as consts of the jaxpr,
    captured tracers become residuals.
    """
    passes: list[ForwardPass] = []

    def function(*arrays: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        result = run_forward(spec, arrays, flags, hooks)
        passes.append(result.forward_pass)
        return result.outputs, result.intermediates

    before = set(map(id, spec.methods.forward_captures()))
    staged, consts = stage(function, arrays)
    if any(is_staged(x) and id(x) not in before for x in spec.methods.forward_captures()):
        raise NotImplementedError(_STATEFUL.format(name=spec.name))
    outputs, intermediates = staged.evaluate(consts, arrays)
    return ForwardResult(passes[0], outputs, intermediates, staged, consts)


_STATEFUL = (
    "{name}.forward changes an object that it captures (a source of random numbers, a counter) and captures a traced "
    "array too, so that JAX traces it apart from the surrounding program and the change would be lost. Pass the random "
    "key, or what changes, as an argument."
)


def _with_rule(result: ForwardResult, inputs: Sequence[Any]) -> list[Any]:
    """Returns the array leaves of the outputs with the Function's rule, those marked non-differentiable without one."""
    forward_pass = result.forward_pass
    rule = _FunctionRule(result)
    outputs = list(result.outputs)
    for i in forward_pass.outputs.non_differentiable:
        outputs[i] = jax.lax.stop_gradient(outputs[i])
    operands = [outputs[i] for i in rule.differentiable]
    if operands:
        attached = attach(operands, rule.other_residuals(result), inputs, rule, captured_error(forward_pass.spec))
        for i, y in zip(rule.differentiable, attached, strict=True):
            outputs[i] = y
    return outputs


def captured_error(spec: CallSpec) -> DeferredError:
    """Returns the error for a derivative with respect to what `forward` captured."""

    def message() -> str:
        holder = "its closure or its defaults"
        for index, tree in enumerate(spec.inputs.trees):
            for leaf in filter(captures_arrays, tree.leaves):
                holder = f"{spec.inputs.names.describe(index)}, inside an object of type {type(leaf).__name__}"
        return _CAPTURED.format(name=spec.name, holder=holder)

    return DeferredError(NotImplementedError, message)


_CAPTURED = (
    "{name}.forward closes over a value that is being differentiated (in {holder}), and a Function has "
    "derivatives with respect to the arrays among its arguments only. Pass that value to {name} as an argument, and "
    "return its gradient from backward."
)


class _FunctionRule(LinearizingRule):
    """The rule of a forward pass, for the differentiable outputs, `other_residuals`, and the inputs without Refs.

    Args:
      result: The forward pass.
      differentiable: The indices of the outputs. Default: all that have a derivative.
    """

    def __init__(self, result: ForwardResult, differentiable: Sequence[int] | None = None) -> None:
        self.forward_pass = result.forward_pass
        self.differentiable = result.forward_pass.differentiable if differentiable is None else differentiable
        self._replay = result.replay
        sources = result.forward_pass.saved.sources
        # The saved outputs without a derivative, such as indices.
        self._constants = [s.idx for s in sources if s.kind == "output" and s.idx not in self.differentiable]
        self._intermediate_avals = list(map(jax.typeof, result.intermediates))

    @property
    def is_reverse_only(self) -> bool:
        """Whether the rule has reverse mode only."""
        return not self.forward_pass.spec.methods.has_forward_mode

    def other_residuals(self, result: ForwardResult) -> list[Any]:
        """Returns the residuals of the rule other than differentiable outputs and inputs."""
        return [*(result.outputs[i] for i in self._constants), *result.intermediates, *result.captured, *result.consts]

    def _result(self, outputs: Sequence[Any], res: Sequence[Any]) -> ForwardResult:
        """Returns the forward pass with these operands; outputs that are not needed are `None`."""
        found: list[Any] = [None] * len(self.forward_pass.output_avals)
        for i, y in [*zip(self.differentiable, outputs, strict=True), *zip(self._constants, res, strict=False)]:
            found[i] = y
        remaining = iter(res[len(self._constants) :])
        intermediates = list(islice(remaining, len(self._intermediate_avals)))
        captured = list(islice(remaining, len(self.forward_pass.derivative_captures)))
        return ForwardResult(self.forward_pass, found, intermediates, self._replay, list(remaining), captured)

    def linearize(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], perturbed: Sequence[bool]
    ) -> tuple[Sequence[Any], LinearMap, Sequence[Any]]:
        # JAX passes its own scalar types.
        outputs, res, inputs = (list(map(as_array, xs)) for xs in (outputs, res, inputs))
        result = self._result(outputs, res)
        spec = self.forward_pass.spec
        leaves = spec.inputs.with_refs(inputs, None)
        flags = tuple(spec.inputs.with_refs(perturbed, False))
        result = _with_flags(result, leaves, flags)
        forward_pass, intermediates = result.forward_pass, result.intermediates
        all_outputs = list(result.outputs)
        outputs = [all_outputs[i] for i in self.differentiable]  # those of the second run, if `forward` ran again
        is_differentiated_again = any(map(is_traced, (*inputs, *outputs)))
        if is_differentiated_again:
            # `forward` may have saved unused outputs when it ran with other flags: attach those too.
            dropped = _saved_outputs(forward_pass).difference(self.differentiable)
            if dropped:
                dropped.intersection_update(forward_pass.differentiable)
            rule = _FunctionRule(result, [*self.differentiable, *dropped])
            operands = [*outputs, *(all_outputs[i] for i in dropped)]
            attached = attach(operands, rule.other_residuals(result), inputs, rule, captured_error(spec))
            outputs = attached[: len(outputs)]
            for i, y in zip(rule.differentiable, attached, strict=True):
                all_outputs[i] = y
            intermediates = _attach_intermediates(result, inputs)
        is_guarded = is_differentiated_again and (forward_pass.captures_arrays or any(map(derivative_order, inputs)))
        guards = inputs if is_guarded else ()
        forward_pass, residuals = forward_pass.residuals(leaves, all_outputs, intermediates, result.captured)
        linear_map = _ForwardPassMap(forward_pass, flags, self.differentiable, len(guards))
        return outputs, linear_map, [*guards, *residuals]

    @property
    def is_transposable(self) -> bool:
        return not self.is_reverse_only

    def transpose(
        self, cotangents: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any]
    ) -> Sequence[jax.Array | None]:
        spec = self.forward_pass.spec
        if self.is_reverse_only:
            raise TypeError(
                f"{spec.name} is transposed by jax.linear_transpose (or by a linear solver), which a Function with "
                "backward alone does not support. Define jvp(ctx, *tangents) too, or set generate_jvp_rule = True."
            )
        flags = tuple(spec.inputs.with_refs([x is None for x in inputs], False))
        forward_pass = self.forward_pass.with_perturbed(flags)
        result = self._result([None] * len(cotangents), res)
        known = {
            "input": spec.inputs.with_refs(inputs, None),
            "output": result.outputs,
            "intermediate": result.intermediates,
        }
        avals = {
            "input": forward_pass.input_avals,
            "output": forward_pass.output_avals,
            "intermediate": self._intermediate_avals,
        }
        names: dict[tuple[str, int], str] = {}  # of residuals without a value
        for source, name in zip(forward_pass.saved.sources, forward_pass.saved.residual_names(), strict=True):
            if known[source.kind][source.idx] is None:
                names[source.kind, source.idx] = name

        def pull(cotangents: Sequence[Any], missing: Sequence[Any]) -> list[Any]:
            arrays = {kind: list(values) for kind, values in known.items()}
            for (kind, index), value in zip(names, missing, strict=True):
                arrays[kind][index] = value
            own, residuals = forward_pass.residuals(
                arrays["input"], arrays["output"], arrays["intermediate"], result.captured
            )
            return _ForwardPassMap(own, flags, self.differentiable, 0).transpose(residuals, cotangents)

        def pull_nonzero(*arrays: Any) -> list[Any]:
            num_outs = len(cotangents)
            return [ct for ct in pull(arrays[:num_outs], arrays[num_outs:]) if ct is not None]

        missing = [avals[kind][index] for kind, index in names]
        if missing and not is_linear(pull_nonzero, self._tangent_avals(), unused=missing):
            raise TypeError(
                f"{spec.name} is transposed by jax.linear_transpose (or by a linear solver), but is not linear: its "
                f"derivative depends on {', '.join(names.values())}, computed from what is transposed."
            )
        # The derivative of a linear function is constant, so zeros replace the values that are missing.
        remaining = iter(pull(cotangents, list(map(zeros_of, missing))))
        return [next(remaining) if x is None else None for x in inputs]

    @property
    def saves_inputs(self) -> bool:
        return self.forward_pass.saves_inputs

    def saves_outputs(self, output_avals: Sequence[Any], res_avals: Sequence[Any], input_avals: Sequence[Any]) -> bool:
        """Whether `backward` reads an output and is not linear in `grad_outputs`.

        If `jax.checkpoint` computes outputs again, an enclosing derivative sees two calls, and `backward` runs once for
        each, with a part of the cotangent. If `backward` is linear, the results add up; otherwise they do not.
        """
        forward_pass, spec = self.forward_pass, self.forward_pass.spec
        reads_output = any(s.kind == "output" and s.idx in self.differentiable for s in forward_pass.saved.sources)
        if not (reads_output and spec.methods.has_backward):
            return False
        are_inexact = spec.inputs.with_refs([is_inexact(aval.dtype) for aval in input_avals], False)
        flags = (
            tuple(map(and_, are_inexact, forward_pass.perturbed)) if any(forward_pass.perturbed) else tuple(are_inexact)
        )
        residual_avals = [output_avals, res_avals, input_avals]
        sizes = list(map(len, residual_avals))

        def pull(*arrays: Any) -> list[Any]:
            cotangents, rest = arrays[: sizes[0]], arrays[sizes[0] :]
            outputs, res, inputs = (rest[sum(sizes[:i]) :][: sizes[i]] for i in range(3))
            result = self._result(outputs, res)
            own, residuals = forward_pass.with_perturbed(flags).residuals(
                spec.inputs.with_refs(inputs, None), result.outputs, result.intermediates, result.captured
            )
            pulled = _ForwardPassMap(own, flags, self.differentiable, 0).transpose(residuals, cotangents)
            return [ct for ct in pulled if ct is not None]

        try:
            return not is_linear(pull, self._tangent_avals(), [aval for avals in residual_avals for aval in avals])
        except Exception:  # backward raises, and will again where it is used
            return True

    def _tangent_avals(self) -> list[Any]:
        return [self.forward_pass.output_avals[i].to_tangent_aval() for i in self.differentiable]

    def without_outputs(self, used: Sequence[bool]) -> tuple[Rule, Sequence[bool]]:
        saved = _saved_outputs(self.forward_pass)
        stay = [flag or i in saved for i, flag in zip(self.differentiable, used, strict=True)]
        rule = copy(self)
        rule.differentiable = list(compress(self.differentiable, stay))
        return rule, stay


def _saved_outputs(forward_pass: ForwardPass) -> set[int]:
    """Returns the indices of the outputs' array leaves that are saved."""
    return {source.idx for source in forward_pass.saved.sources if source.kind == "output"}


def _with_flags(result: ForwardResult, leaves: Sequence[Any], perturbed: tuple[bool, ...]) -> ForwardResult:
    """Returns the forward pass for derivatives with respect to the leaves that `perturbed` marks too.

    A `forward` that read `ctx.needs_input_grad` may have saved less than that needs, so it runs again.
    """
    forward_pass, spec = result.forward_pass, result.forward_pass.spec
    union = tuple(map(or_, forward_pass.perturbed, perturbed))
    if not forward_pass.reads_flags or all(b or not a for a, b in zip(union, forward_pass.seen_flags, strict=True)):
        return result._replace(forward_pass=forward_pass.with_perturbed(union))
    if spec.inputs.has_refs:
        raise NotImplementedError(
            f"{spec.name}.forward reads ctx.needs_input_grad and would have to run again for this derivative, which "
            "would write to its jax.Ref arguments twice. Make what it saves independent of the flags."
        )
    again = _run_stopped(spec, leaves, union, forward_pass.hooks)
    passes = again.forward_pass, forward_pass
    now, before = ([f"{x.dtype}{list(x.shape)}" for x in p.output_avals] for p in passes)
    if now != before or passes[0].outputs != passes[1].outputs:
        if passes[0].outputs != passes[1].outputs:
            now, before = (p.outputs for p in passes)
        flags = [spec.inputs.needs_input_grad(p.seen_flags) for p in passes]
        raise RuntimeError(
            f"{spec.name}.forward returned {now!r} when ctx.needs_input_grad was {flags[0]}, and {before!r} when "
            f"{f'it was {flags[1]}' if any(forward_pass.seen_flags) else 'nothing was differentiated'}. What forward "
            "returns, and marks as non-differentiable, must not depend on ctx.needs_input_grad."
        )
    rerun = replace(again.forward_pass, perturbed=union, derivative_captures=forward_pass.derivative_captures)
    return again._replace(forward_pass=rerun, captured=result.captured)


class _ForwardPassMap(LinearMap):
    """The derivative of a forward pass, from perturbed leaves of the inputs to differentiable leaves of the outputs.

    The first `num_guards` residuals are inputs. A derivative with respect to one of them raises if it would miss the
    dependence through an array in an object on ctx.
    """

    def __init__(
        self, forward_pass: ForwardPass, perturbed: Sequence[bool], differentiable: Sequence[int], num_guards: int
    ) -> None:
        self._forward_pass = forward_pass
        self._perturbed = [i for i, flag in enumerate(perturbed) if flag]
        self._differentiable = differentiable
        self._num_guards = num_guards

    @property
    def avals(self) -> list[Any]:
        """The types of the results."""
        return [self._forward_pass.output_avals[i].to_tangent_aval() for i in self._differentiable]

    def __repr__(self) -> str:
        return self._forward_pass.spec.name

    @property
    def is_reverse_only(self) -> bool:
        return not self._forward_pass.spec.methods.has_forward_mode

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        methods = self._forward_pass.spec.methods
        if self.is_reverse_only:
            raise TypeError(methods.no_forward_mode)
        if not methods.has_jvp:
            return self._jvp_by_transposition(residuals, tangents)
        input_tangents: list[Any] = [None] * len(self._forward_pass.input_avals)
        for i, tangent in zip(self._perturbed, tangents, strict=True):
            input_tangents[i] = tangent
        output_tangents = self._run("jvp", self._forward_pass.jvp, residuals, input_tangents)
        results = [output_tangents[i] for i in self._differentiable]
        return [zeros_of(aval) if t is None else t for t, aval in zip(results, self.avals, strict=True)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        methods = self._forward_pass.spec.methods
        if methods.has_jvp and not methods.has_backward:
            return self._vjp_by_transposition(residuals, cotangents)
        output_cotangents: list[Any] = [None] * len(self._forward_pass.output_avals)
        for i, cotangent in zip(self._differentiable, cotangents, strict=True):
            output_cotangents[i] = cotangent
        pulled = self._run("backward", self._forward_pass.backward, residuals, output_cotangents)
        return [pulled[i] for i in self._perturbed]

    def _run(
        self,
        method: str,
        rule: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        residuals: Sequence[Any],
        vectors: Sequence[Any],
    ) -> list[Any]:
        """Runs `backward` or `jvp`. If the results depend on an array that is not saved, their derivatives raise."""
        forward_pass, guards = self._forward_pass, list(residuals[: self._num_guards])
        watched = forward_pass.watched if guards else ()  # without guards nothing differentiates the results
        results, uses_watched = run_watched(rule, residuals[self._num_guards :], vectors, watched)
        num_captured = len(forward_pass.derivative_captures)
        operands = [*residuals[self._num_guards + num_captured :], *vectors]
        outside = find_outside(forward_pass.stopped, operands, results)
        if outside.has_escaped:
            methods = forward_pass.spec.methods
            if methods.derivatives_capture_staged():
                raise methods.escaped_tracer_error(method)
            raise NotImplementedError(_STORED_OUTSIDE.format(name=self, method=method))
        guards += outside.inputs
        indices = [i for i, x in enumerate(results) if x is not None]
        if (uses_watched or outside.inputs or forward_pass.captures_arrays) and guards and indices:
            on_ctx = forward_pass.captures_arrays
            message = forward_pass.captured_by_ctx() if on_ctx else _STORED_OUTSIDE.format(name=self, method=method)
            error = DeferredError(NotImplementedError, message)
            for i, x in zip(indices, attach([results[i] for i in indices], (), guards, error), strict=True):
                results[i] = x
        return results

    def _jvp_by_transposition(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """Derives forward mode from `backward`, for `generate_jvp_rule`."""

        def pull(*cotangents: Any) -> list[Any]:
            pulled = self.transpose(residuals, cotangents)
            return [zeros_of(aval) if ct is None else ct for ct, aval in zip(pulled, self._input_avals(), strict=True)]

        try:
            transposed = _transposed(pull, self.avals, f"{self}.backward", "generate_jvp_rule", "gradients")
        except jax.errors.UnexpectedTracerError as error:
            raise self._forward_pass.spec.methods.escaped_tracer_error("backward") from error
        return list(transposed(list(tangents)))

    def _vjp_by_transposition(
        self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Derives reverse mode from `jvp`, where there is no `backward`."""
        cts = [zeros_of(aval) if ct is None else ct for aval, ct in zip(self.avals, cotangents, strict=True)]

        def push(*tangents: Any) -> list[Any]:
            return self.apply(residuals, tangents)

        return list(_transposed(push, self._input_avals(), f"{self}.jvp", "reverse mode", "tangents")(cts))

    def _input_avals(self) -> list[Any]:
        return [self._forward_pass.input_avals[i].to_tangent_aval() for i in self._perturbed]


_STORED_OUTSIDE = (
    "{method} of {name} uses an array that forward stored outside ctx, where it has no derivative; write ctx.name = "
    "array."
)


def _transposed(
    function: Callable[..., Any], avals: Sequence[Any], method: str, what_for: str, arguments: str
) -> Callable[..., Any]:
    """Returns the transpose of user code that ought to be linear; raises if it is not."""
    problem = (
        f"{method} is not linear in its {arguments}, so {what_for}, which transposes it, is not possible. Define "
        "the other rule yourself, or move the nonlinear part out of the Function."
    )
    if not is_linear(function, avals):
        raise RuntimeError(f"{problem} What is not linear is {describe_nonlinearity(function, avals)}.")
    like = list(map(shape_struct, avals))
    # Stage first: `find_outside` needs eqns, and the partial evaluation in `jax.linear_transpose` records none.
    staged, consts = stage(lambda *arrays: (function(*arrays), ()), like)

    def staged_function(*arrays: Any) -> list[Any]:
        return staged.evaluate(consts, arrays)[0]

    transpose = jax.linear_transpose(staged_function, *like)

    def apply(values: Any) -> Any:
        try:
            return transpose(values)
        except Exception as error:  # transposition rules of JAX raise many kinds
            raise RuntimeError(
                f"{problem} Or it is linear, and JAX has no transpose of something in it, such as a Function with "
                f"backward alone. JAX says: {error}"
            ) from error

    return apply


def _attach_intermediates(result: ForwardResult, inputs: Sequence[Any]) -> Sequence[Any]:
    """Gives saved intermediates the derivative of the operations of `forward` that computed them."""
    spec, intermediates = result.forward_pass.spec, result.intermediates
    indices = [i for i, x in enumerate(intermediates) if is_inexact(x.dtype)]
    monitor = active_monitor()
    if not indices or (monitor is not None and monitor.stops_intermediates):
        return intermediates
    rule: Rule | DeferredError = _IntermediatesRule(result, indices)
    if spec.inputs.has_refs:
        rule = DeferredError(NotImplementedError, _WITH_REFS.format(name=spec.name))
    attached = list(intermediates)
    results = attach([intermediates[i] for i in indices], result.consts, inputs, rule)
    for i, x in zip(indices, results, strict=True):
        attached[i] = x
    return attached


_WITH_REFS = (
    "{name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot be differentiated "
    "twice: forward would have to write twice. Save inputs or outputs instead."
)


class _IntermediatesRule(LinearizingRule):
    """The derivative of saved intermediates."""

    def __init__(self, result: ForwardResult, indices: Sequence[int]) -> None:
        self._forward_pass = result.forward_pass
        self._replay = result.replay
        self._indices = indices

    def linearize(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], perturbed: Sequence[bool]
    ) -> tuple[Sequence[Any], LinearMap, Sequence[Any]]:
        outputs, inputs = list(map(as_array, outputs)), list(map(as_array, inputs))
        if any(map(is_traced, (*inputs, *outputs))):
            outputs = attach(outputs, res, inputs, self)
        indices = [i for i, flag in enumerate(perturbed) if flag]
        linear_map = _IntermediatesMap(self._forward_pass, self._replay, self._indices, indices, outputs, len(inputs))
        return outputs, linear_map, [*inputs, *outputs, *res]

    @property
    def saves_inputs(self) -> bool:
        return self._forward_pass.saves_inputs

    def without_outputs(self, used: Sequence[bool]) -> tuple[Rule, Sequence[bool]]:
        rule = copy(self)
        rule._indices = list(compress(self._indices, used))
        return rule, used


class _IntermediatesMap(LinearMap):
    """The derivative of intermediates by forward's own operations, which run again to compute it."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        replay: StagedFunction | None,
        indices: Sequence[int],
        perturbed: list[int],
        intermediates: Sequence[Any],
        num_inputs: int,
    ) -> None:
        self._forward_pass = forward_pass
        self._replay = replay
        self._indices = indices
        self._perturbed = perturbed
        self._num_inputs = num_inputs
        self._avals = [jax.typeof(x).to_tangent_aval() for x in intermediates]

    @property
    def avals(self) -> Sequence[Any]:
        return self._avals

    def __repr__(self) -> str:
        return self._forward_pass.spec.name

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        function, values = self._function(residuals)
        return list(jax.jvp(function, values, list(tangents))[1])

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        function, values = self._function(residuals)
        results, pull = jax.vjp(function, *values)
        cts = [zeros_of(jax.typeof(y)) if ct is None else ct for ct, y in zip(cotangents, results, strict=True)]
        return list(pull(cts))

    def _function(self, residuals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Returns the intermediates as a function of the perturbed inputs, and those inputs."""
        inputs, others = list(residuals[: self._num_inputs]), residuals[self._num_inputs :]
        intermediates, consts = others[: len(self._indices)], others[len(self._indices) :]
        replay = self._replay
        if replay is not None:

            def compute(*arrays: Any) -> list[Any]:
                again = replay.evaluate_second(consts, arrays)
                return [again[i] for i in self._indices]

        elif self._forward_pass.program is not None:
            compute = self._run_staged_again(inputs)
        else:

            def compute(*arrays: Any) -> list[Any]:
                return self._run_eagerly_again(arrays, stop(intermediates))

        def function(*values: Any) -> list[Any]:
            arrays = list(inputs)
            for i, value in zip(self._perturbed, values, strict=True):
                arrays[i] = value
            return compute(*arrays)

        return function, [inputs[i] for i in self._perturbed]

    def _run_again(self, *arrays: Any) -> list[Any]:
        """Runs `forward` again; returns the arrays that it saves in place of the intermediates, even outputs."""
        forward_pass = self._forward_pass
        with forward_pass.spec.scope("forward"):
            leaves = saved_leaves(call_forward(forward_pass.spec, arrays, forward_pass.seen_flags)[1])
        saved = forward_pass.saved
        if len(saved.order) != len(leaves):
            raise self._changed()
        return [leaves[saved.leaf_of("intermediate", i)] for i in self._indices]

    def _run_staged_again(self, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Stages the second run; raises if it has an operation or constant (a random number) that the first lacks."""
        staged, consts = stage(lambda *arrays: ([], self._run_again(*arrays)), inputs)
        self._forward_pass.check_program("forward", consts)
        if not staged.has_operations_among(self._forward_pass.operations, consts):
            raise self._changed()
        return lambda *arrays: staged.evaluate_second(consts, arrays)

    def _run_eagerly_again(self, arrays: Sequence[Any], intermediates: Sequence[Any]) -> list[Any]:
        """Returns the intermediates of a second run; raises if their values differ."""
        again = self._run_again(*arrays)
        values = stop(again)
        if not all(map(_are_close, intermediates, values)):
            # Under a derivative JAX may round differently, with a large effect on small elements. Such differences are
            # deterministic, so a further run must give exactly these values.
            is_pure = all(map(_are_equal, values, stop(self._run_again(*arrays))))
            if not (is_pure and all(map(partial(_are_close, by_largest=True), intermediates, values))):
                raise self._changed()
        return again

    def _changed(self) -> Exception:
        return NotImplementedError(_CHANGED.format(name=self._forward_pass.spec.name))


def _are_close(a: Any, b: Any, by_largest: bool = False) -> bool:
    """Whether arrays are equal up to rounding of each element, or of the largest; tracers count as equal."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5
    largest = jnp.max(jnp.abs(jnp.where(jnp.isfinite(a), a, 0.0)), initial=0.0) if by_largest else 0.0
    return _is_true(jnp.isclose(b, a, tolerance, tolerance * largest, equal_nan=True))


def _are_equal(a: Any, b: Any) -> bool:
    return _is_true((a == b) | (jnp.isnan(a) & jnp.isnan(b)))


def _is_true(flags: jax.Array) -> bool:
    """Whether all flags are true, under `jax.vmap` too; flags without a value count as true."""
    values = under_tracers(flags)
    # By NumPy: in an eager shard_map JAX would trace the operation.
    return not isinstance(values, jax.Array) or all(np.asarray(part.data).all() for part in values.addressable_shards)


_CHANGED = (
    "{name}.forward was run again for a higher-order derivative, which goes through an array that it saved and that is "
    "neither an input nor an output, and returned different values: something that it captures changed between the "
    "runs (a counter, a stateful source of random numbers, NumPy's random state). Pass the random key, or what "
    "changes, as an argument."
)
