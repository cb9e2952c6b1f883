"""The derivative of a run of `forward`: the user's `backward` and `jvp`, at every order.

    inputs --stop--> the user's forward --> outputs, intermediates
    outputs --attach(outputs, intermediates, inputs)-->               what the caller gets

Where something differentiates the attached outputs it asks `_Rule`, which keeps the residuals and binds one equation,
`linear`, from tangents of the inputs to tangents of the outputs: forward mode calls its `push`, the user's `jvp`, and
reverse mode transposes it by `pull`, the user's `backward`.

# Note: two orders of a straight-through rounding

    forward   y = round(x)          backward   g * 2 * x      (it saves x)

    first order     forward runs on stop(x), so that nobody differentiates `round`; attach(y) has the rule, which keeps
                    x itself, and not its stopped copy
    second order    the outer derivative sees backward as plain operations: of g * 2 * x by x it is 2 * g. Where it meets
                    y, which the rule attached again, it asks the same rule: 2 * x, and not the 0 of `round`

A residual that is an input or an output is that array, so it has its derivative. One that forward computed is attached
as well, with the derivative of forward's own operations: should anybody ask for it, forward runs once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxfn._compat import has_tangent, zeros_of
from jaxfn._frames import hide_own_frames
from jaxfn._primitives.attach import attach, detach, stop
from jaxfn._primitives.linear import Cotangents, Linear, applied
from jaxfn._primitives.linearity import is_linear
from jaxfn._primitives.refusal import Refusal
from jaxfn._protocol.outputs import Outputs
from jaxfn._protocol.saved_tensor_hooks import HOOKS, Hooks
from jaxfn._run.call import Call
from jaxfn._run.forward import call_forward, save
from jaxfn._run.run import Run, run_forward
from jaxfn._values.arrays import agree, as_array, is_inexact, is_traced


def outputs_of_call(call: Call, arrays: Sequence[Any], hooks: Hooks | None) -> Outputs:
    """Runs forward on arrays that JAX traces: its outputs, with the Function's rule."""
    if not (call.methods.has_forward_mode or call.may_close_over) and any(map(has_tangent, arrays)):
        with suppress(_NotHere):
            call.differentiated_here = call.differentiated_here or _differentiated_here(call)
            return call.differentiated_here(*arrays)
    run, outputs, intermediates = _run_stopped(call, arrays, call.unperturbed, hooks)
    run = run.with_perturbed(call.unperturbed)
    return Outputs(run.outputs, _attached(run, outputs, intermediates, call.without_refs(arrays)))


class _NotHere(Exception):
    """What differentiates a call is further out than the program that it is written into."""


def _differentiated_here(call: Call) -> Callable[..., Outputs]:
    """The call as a `jax.custom_vjp`, which JAX carries out at once where it differentiates the arrays right here.

    It is never a part of a program, for which `attach` is cheaper and does more. Here it is the other way: JAX
    linearizes whatever is no custom_vjp by tracing it once more.
    """

    def primal(*_: Any) -> Any:
        raise _NotHere

    def fwd(*primals: Any) -> tuple[Outputs, _Kept]:
        arrays = [as_array(p.value) for p in primals]
        perturbed = tuple([p.perturbed and is_inexact(x.dtype) for p, x in zip(primals, arrays, strict=True)])
        if call.has_refs:
            call.refuse_perturbed_refs(perturbed)
        run, outputs, intermediates = _run_stopped(call, arrays, perturbed, HOOKS.value)
        outputs, linear, residuals = _linearized(
            run.with_perturbed(perturbed), outputs, intermediates, arrays, perturbed
        )
        return Outputs(run.outputs, outputs), _Kept(linear, residuals)

    def bwd(kept: _Kept, cotangents: Outputs) -> tuple[Any, ...]:
        try:
            return tuple(kept.linear.cotangents(kept.residuals, cotangents.arrays))
        except Exception as error:
            hide_own_frames(error)
            raise

    function = jax.custom_vjp(primal)
    function.defvjp(fwd, bwd, symbolic_zeros=True)
    return function


class _Kept:
    """Residuals, and what they are of: a pytree node."""

    def __init__(self, linear: _OfRun, residuals: Sequence[Any]) -> None:
        self.linear = linear
        self.residuals = residuals


jax.tree_util.register_pytree_node(_Kept, attrgetter("residuals", "linear"), _Kept)


def _run_stopped(
    call: Call, arrays: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None
) -> tuple[Run, Sequence[Any], Sequence[Any]]:
    """Runs forward so that nothing differentiates its own operations, which may have no derivative (a kernel, say).

    It is told of `perturbed`, and of what is being differentiated here already.
    """
    stopped, places = stop(call.without_refs(arrays), int(any(perturbed)))
    stopped = list(map(as_array, stopped))
    if len(set(map(id, stopped))) < len(stopped):  # what was saved is known by identity
        stopped = [x if is_traced(x) else x + np.zeros((), x.dtype) for x in stopped]
    if call.has_refs:
        remaining = iter(stopped)
        stopped = [x if is_ref else next(remaining) for x, is_ref in zip(arrays, call.are_refs, strict=True)]
    told = perturbed
    if places:
        here = call.with_refs([i in places for i in range(call.are_refs.count(False))], False)
        told = tuple(a or b for a, b in zip(perturbed, here, strict=True))
    return run_forward(call, stopped, told, hooks)


def _attached(
    run: Run, outputs: Sequence[Any], intermediates: Sequence[Any], inputs: Sequence[Any]
) -> Sequence[Any]:
    return attach(outputs, intermediates, inputs, _Rule(run), closed_over(run.call))


def closed_over(call: Call) -> Refusal:
    """For a derivative by what `forward` closes over."""
    return Refusal(NotImplementedError, _CLOSED_OVER.format(name=call.name))


_CLOSED_OVER = (
    "{name}.forward closes over a value that is being differentiated, and a Function has derivatives by the arrays "
    "among its arguments only. Pass that value to {name} as an argument, and return its gradient from backward."
)


class _Rule:
    """What the outputs of a run have for a derivative; see `attach.Rule`. The inputs are those that are no references."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(
        self, outputs: Sequence[Any], intermediates: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        call = self._run.call
        inputs = list(map(as_array, inputs))  # JAX hands on numbers of its own
        outputs, intermediates = list(map(as_array, outputs)), list(map(as_array, intermediates))
        leaves = call.with_refs(inputs, None)
        perturbed = tuple(call.with_refs([t is not None for t in tangents], False))
        run, outputs, intermediates = _widened(self._run, outputs, intermediates, leaves, perturbed)
        outputs, linear, residuals = _linearized(run, outputs, intermediates, leaves, perturbed)
        pushed: list[Any] = [None] * len(outputs)
        given = [t for t in tangents if t is not None]
        for i, tangent in zip(linear.differentiable, applied(linear, residuals, given), strict=True):
            pushed[i] = tangent
        return outputs, pushed


def _linearized(
    run: Run,
    outputs: Sequence[Any],
    intermediates: Sequence[Any],
    leaves: Sequence[Any],
    perturbed: tuple[bool, ...],
) -> tuple[Sequence[Any], _OfRun, Sequence[Any]]:
    """The outputs, attached for whatever differentiates further out, their derivative, and what that needs."""
    inputs = run.call.without_refs(leaves)
    is_further_out = any(map(is_traced, (*inputs, *outputs)))
    if is_further_out:
        outputs = _attached(run, outputs, intermediates, inputs)
        if intermediates:
            intermediates = _attached_intermediates(run, intermediates, inputs)
    outputs = run.outputs.without_derivatives(outputs)
    guards = inputs if run.hides_arrays and is_further_out else ()
    kept, residuals = run.residuals(leaves, outputs, intermediates)
    marked = run.outputs.non_differentiable
    places = [i for i, y in enumerate(outputs) if is_inexact(y.dtype) and i not in marked]
    linear = _OfRun(kept, [i for i, flag in enumerate(perturbed) if flag], places, len(guards))
    return outputs, linear, [*guards, *residuals]


def _widened(
    run: Run, outputs: Sequence[Any], intermediates: Sequence[Any], inputs: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Run, Sequence[Any], Sequence[Any]]:
    """The run as if these inputs too had been perturbed.

    A forward that looked at `ctx.needs_input_grad` may have saved less than the wider flags need, so it runs again.
    """
    call = run.call
    union = tuple(a or b for a, b in zip(run.perturbed, perturbed, strict=True))
    if not run.read_needs_input_grad or all(b or not a for a, b in zip(union, run.told, strict=True)):
        return run.with_perturbed(union), outputs, intermediates
    if call.has_refs:
        raise NotImplementedError(
            f"{call.name}.forward looks at ctx.needs_input_grad and would have to run again for this derivative, which "
            "would write to its jax.Ref arguments twice. Let it save the same whatever the flags are."
        )
    again, outputs, intermediates = _run_stopped(call, inputs, union, run.hooks)
    if again.outputs != run.outputs:
        raise RuntimeError(
            f"{call.name}.forward returned {again.outputs!r} when ctx.needs_input_grad was {again.needs_input_grad}, "
            f"and {run.outputs!r} when it was {run.needs_input_grad}. What forward returns, and marks as "
            "non-differentiable, must not depend on ctx.needs_input_grad."
        )
    return again.with_perturbed(union), outputs, intermediates


class _OfRun(Linear):
    """The derivative of a run of `forward`, from the array leaves `perturbed` to the array leaves `differentiable`."""

    def __init__(self, run: Run, perturbed: list[int], differentiable: list[int], num_guards: int) -> None:
        self._run = run
        self._perturbed = perturbed
        self.differentiable = differentiable
        self._num_guards = num_guards
        self.avals = [run.output_avals[i].to_tangent_aval() for i in differentiable]

    def __repr__(self) -> str:
        return self._run.call.name

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        methods = self._run.call.methods
        if not methods.has_forward_mode:
            raise TypeError(_REVERSE_ONLY.format(name=self))
        if not methods.has_jvp:
            return self._transposed_pull(residuals, tangents)
        tangents_of_inputs: list[Any] = [None] * len(self._run.input_avals)
        for i, tangent in zip(self._perturbed, tangents, strict=True):
            tangents_of_inputs[i] = tangent
        tangents_of_outputs = self._run.jvp(residuals[self._num_guards :], tangents_of_inputs)
        pushed = self._guarded(residuals, [tangents_of_outputs[i] for i in self.differentiable])
        return [zeros_of(aval) if t is None else t for t, aval in zip(pushed, self.avals, strict=True)]

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        methods = self._run.call.methods
        if methods.has_jvp and not methods.has_backward:
            return self._transposed_push(residuals, cotangents)
        cotangents_of_outputs: list[Any] = [SymbolicZero(aval.to_tangent_aval()) for aval in self._run.output_avals]
        for i, cotangent in zip(self.differentiable, cotangents, strict=True):
            if cotangent is not None:
                cotangents_of_outputs[i] = cotangent
        pulled = self.cotangents(residuals, cotangents_of_outputs)
        return [pulled[i] for i in self._perturbed]

    def cotangents(self, residuals: Sequence[Any], cotangents_of_outputs: Sequence[Any]) -> list[jax.Array | None]:
        """A cotangent for each array leaf of the inputs, by the user's `backward`."""
        pulled = self._run.backward(residuals[self._num_guards :], cotangents_of_outputs)
        return self._guarded(residuals, pulled)

    def _guarded(self, residuals: Sequence[Any], results: list[Any]) -> list[Any]:
        """What a rule returned that may use what forward hides: nothing is known of its derivative."""
        guards = residuals[: self._num_guards]
        places = [i for i, x in enumerate(results) if x is not None]
        if guards and places:
            refusal = Refusal(NotImplementedError, _HIDDEN.format(name=self))
            for i, x in zip(places, attach([results[i] for i in places], (), guards, refusal), strict=True):
                results[i] = x
        return results

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


_REVERSE_ONLY = (
    "can't apply forward-mode autodiff (jvp) to a custom_vjp function. {name} has backward alone, and so no forward "
    "mode. Define jvp(ctx, *tangents) too, or set generate_jvp_rule = True, which derives it from backward."
)
_HIDDEN = (
    "{name}.forward keeps a JAX array inside a closure or an object on ctx, which has no derivative of its own. Save "
    "the array itself: ctx.save_for_backward(array), or ctx.name = array."
)


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


def _attached_intermediates(run: Run, intermediates: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """Saved intermediates, with the derivative of the operations of forward that made them."""
    call = run.call
    if not any(is_inexact(x.dtype) for x in intermediates):
        return intermediates
    if call.has_refs:
        refusal = Refusal(NotImplementedError, _WITH_REFS.format(name=call.name))
        return attach(intermediates, (), inputs, refusal)
    return attach(intermediates, (), inputs, _IntermediatesRule(run))


_WITH_REFS = (
    "{name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot be differentiated "
    "twice: forward would have to write twice. Save inputs or outputs instead."
)


class _IntermediatesRule:
    """What saved intermediates have for a derivative; see `attach.Rule`."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(
        self, made: Sequence[Any], kept: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        made, inputs = list(map(as_array, made)), list(map(as_array, inputs))
        if any(map(is_traced, (*inputs, *made))):
            made = attach(made, (), inputs, self)
        places = [i for i, x in enumerate(made) if is_inexact(x.dtype)]
        moving = [i for i, t in enumerate(tangents) if t is not None]
        avals = [jax.typeof(made[i]).to_tangent_aval() for i in places]
        linear = _OfForward(self._run, moving, places, avals, len(inputs))
        pushed: list[Any] = [None] * len(made)
        given = [t for t in tangents if t is not None]
        for i, tangent in zip(places, applied(linear, [*inputs, *made], given), strict=True):
            pushed[i] = tangent
        return made, pushed


class _OfForward(Linear):
    """The derivative of intermediates by forward's own operations, which run again for it."""

    def __init__(self, run: Run, moving: list[int], places: list[int], avals: list[Any], num_inputs: int) -> None:
        self._run = run
        self._moving = moving
        self._places = places
        self._num_inputs = num_inputs
        self.avals = avals

    def __repr__(self) -> str:
        return self._run.call.name

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        function, values = self._function(residuals)
        return list(jax.jvp(function, values, list(tangents))[1])

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        function, values = self._function(residuals)
        made, back = jax.vjp(function, *values)
        cts = [zeros_of(jax.typeof(y)) if ct is None else ct for ct, y in zip(cotangents, made, strict=True)]
        return list(back(cts))

    def _function(self, residuals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        inputs, made = residuals[: self._num_inputs], residuals[self._num_inputs :]

        def function(*values: Any) -> list[Any]:
            arrays = list(inputs)
            for i, value in zip(self._moving, values, strict=True):
                arrays[i] = value
            again = self._again(arrays, made)
            return [again[i] for i in self._places]

        return function, [inputs[i] for i in self._moving]

    def _again(self, arrays: Sequence[Any], made: Sequence[Any]) -> Sequence[Any]:
        call = self._run.call
        with jax.named_scope(call.scopes.forward):
            _, ctx, returned = call_forward(call, arrays, self._run.told)
        _, again = save(ctx, arrays, returned.originals, self._run.hooks)
        known = [(a, b) for a, b in zip(detach(made), detach(again), strict=False) if not (is_traced(a) or is_traced(b))]
        if len(made) != len(again) or not all(agree(a, b) for a, b in known):
            raise NotImplementedError(_CHANGED.format(name=call.name))
        return again


_CHANGED = (
    "{name}.forward has to run again for this higher derivative, which goes through an array that it saved and that is "
    "neither an input nor an output, and computed something else than the first time: what it closes over has changed "
    "in between (a counter, a stateful source of random numbers, NumPy's random state). Pass the random key, or what "
    "changes, as an argument."
)
