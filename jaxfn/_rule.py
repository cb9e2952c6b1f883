"""The derivative of a call: the user's `backward` as a `jax.custom_vjp`, or his `jvp` as a `jax.custom_jvp`.

    function(call, arrays)   the user's forward                               -> outputs, saved intermediates
    fwd(call, arrays)        the same function again, for one derivative more -> outputs, saved intermediates; residuals
    bwd(residuals, ...)      the user's backward

Each Function class has one such function, made once and named like it.

# Note: why `fwd` calls the function again

    forward   y = round(x)          backward   g * 2 * x      (it saves x)

The operations in `fwd` are ordinary operations to an enclosing derivative. If they were those of `forward`, the
derivative of y there would be that of `round`: 0. As `fwd` calls the function itself, it is the Function's rule, 2 * x,
at every order. Derivatives of all orders are one recursion, and `forward` runs at its bottom.

A residual that is an input or an output is that very array, with its derivative. One that `forward` computed is a
further result of the call; its derivative is that of forward's own operations (`_intermediates`).

# Note: what depends on a run of `forward` is not in a pytree

JAX traces the `fwd` of a staged call once for each pattern of perturbed inputs, and uses the tree of the last residuals
for all of them. So they are a flat list. The shape of its first array, which is empty, says which derivative the others
belong to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import or_
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxfn._compat import shape_struct, zeros_of
from jaxfn._diagnostics import NEEDS_VALUES, hide_own_frames
from jaxfn._forward_pass import (
    CallResults,
    CallSpec,
    Differentiation,
    ForwardPass,
    Residuals,
    call_forward,
    run_forward,
)
from jaxfn._hooks import Hooks, pack
from jaxfn._intermediates import Intermediates
from jaxfn._jaxpr import needed_eqns
from jaxfn._linearity import describe_nonlinearity, is_linear
from jaxfn._mesh_types import match_cotangents
from jaxfn._methods import UserMethods
from jaxfn._observe import log_scope
from jaxfn._parts import differentiate_on_parts, is_call_partitioned, run_on_parts
from jaxfn._primitives import DeferredError, ErrorMap, LinearMap, bind_linear_map, guard, repeat_like, tie
from jaxfn._traces import (
    NewConstants,
    has_ended,
    is_differentiated,
    is_in_scope,
    is_staged,
    manual_axes_here,
    may_be_differentiated,
)
from jaxfn._tree import as_array, is_inexact, is_traced, replace_at

_T = TypeVar("_T")


@jax.tree_util.register_static
@dataclass(eq=False)
class _Call:
    """One call, without its arrays: the static argument of the custom derivative. Compared by identity.

    Attributes:
      spec: The Function, and the structure of its inputs.
      tracers: The tracers that the methods capture, those of `forward` first. Their values are arguments.
      num_forward_tracers: The number of those of `forward`.
      hooks: The saved-tensor hooks that were active.
      flags: The `ctx.needs_input_grad` of `forward`, for each array leaf.
      order: The number of derivatives that this call is for.
      passes: The runs of `forward` for this call.
      derivatives: Those that were taken of it.
    """

    spec: CallSpec
    tracers: Sequence[Any]
    num_forward_tracers: int
    hooks: Hooks | None
    flags: tuple[bool, ...]
    order: int = 0
    passes: list[ForwardPass] = field(default_factory=list[ForwardPass])
    derivatives: list[_Taken] = field(default_factory=list["_Taken"])

    def again(self, flags: Sequence[bool]) -> _Call:
        """Returns the call that `fwd` makes, for a further derivative."""
        union = tuple(map(or_, self.flags, flags))
        return _Call(self.spec, self.tracers, self.num_forward_tracers, self.hooks, union, self.order + 1)

    def bind(self, arrays: Sequence[Any]) -> CallResults:
        """Returns the results of the call, with its derivative."""
        # An eager `shard_map` takes no `custom_vjp` with symbolic zeros. It is the innermost transformation.
        if not any(map(is_traced, arrays)) or (manual_axes_here() and not any(map(may_be_differentiated, arrays))):
            return self.run(arrays)
        methods = self.spec.methods
        try:
            with log_scope():
                return methods.custom_derivative(_make_custom_derivative, _is_transposed.value)(self, arrays)
        except jax.errors.UnexpectedTracerError as error:
            raise methods.escaped_tracer_error("forward") from error
        except Exception as error:
            # Without a pass, the error is of something that `forward` differentiates.
            if not methods.has_forward_mode and self.passes and _NO_FORWARD_MODE in str(error):
                raise TypeError(methods.no_forward_mode) from None
            if type(error).__name__ == "CustomVJPException":  # a derivative by a value that is not an argument
                _captured_error(self).throw()
            raise

    def run(self, arrays: Sequence[Any]) -> CallResults:
        """Runs `forward`.

        For derivatives of order two and above it runs in a separate trace: an array that it stores outside ctx would be
        a constant to the outer derivative. As a tracer of a trace that has ended it raises.
        """
        if self.order < 2 or any(map(is_staged, arrays)):
            return self._run(arrays)
        try:
            jaxpr, shape = jax.make_jaxpr(self._run, return_shape=True)(arrays)
        except NEEDS_VALUES:
            return self._run(arrays)
        leaves = eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), list(map(as_array, leaves)))

    def _run(self, arrays: Sequence[Any]) -> CallResults:
        constants = NewConstants()
        forward_pass, results = self._forward(arrays)
        # A `custom_jvp` ignores the tangent of a constant.
        if constants.any(has_ended) or constants.any(is_differentiated):
            raise self.spec.methods.escaped_tracer_error("forward")
        self.passes.append(forward_pass)
        outputs, intermediates = results.outputs, results.intermediates if self.order else []
        if any(map(is_traced, arrays)) and not self.spec.inputs.has_refs:
            unmarked = [i for i in range(len(outputs)) if i not in forward_pass.outputs.non_differentiable]
            outputs = replace_at(unmarked, outputs, tie([outputs[i] for i in unmarked], arrays))
            intermediates = tie(intermediates, arrays)  # their cotangents too are those of each element
        return CallResults(outputs, intermediates)

    def _forward(self, arrays: Sequence[Any]) -> tuple[ForwardPass, CallResults]:
        run = run_forward if self.spec.methods.sharding_rule is None else run_on_parts
        return run(self.spec, arrays, self.tracers, self.flags, self.hooks is not None)

    def outputs_depend_on(self, arrays: Sequence[Any], captured: Sequence[bool]) -> bool:
        """Whether outputs depend on some of the captured tracers, or may do so."""

        def outputs(arrays: Sequence[Any]) -> list[Any]:
            return self._forward(arrays)[1].outputs

        try:
            jaxpr = jax.make_jaxpr(outputs)(arrays).jaxpr
        except NEEDS_VALUES:
            return True
        _, needed = needed_eqns(jaxpr, jaxpr.outvars)
        return any(compress([v in needed for v in jaxpr.invars[len(self.flags) :]], captured))


class _Taken(NamedTuple):
    """A derivative that was taken of a call."""

    derivative: Differentiation
    intermediates: Intermediates | None
    captures_perturbed: bool  # whether `forward` captures a value by which it was taken


# Whether code runs that JAX transposes: a `jvp`, or a `backward` that is transposed for `generate_jvp_rule`. A user
# context is part of the keys of JAX's caches.
_is_transposed: Any = jax.make_user_context(default_value=False)


def _make_custom_derivative(methods: UserMethods, is_transposed: bool) -> Callable[..., CallResults]:
    """Makes the custom derivative of one Function class.

    JAX forgets the rule of a `custom_jvp` in some second derivatives of `scan`, and differentiates its body (0.10.0 to
    0.12.0). So the body is a `custom_vjp`, except where JAX has to transpose it.
    """

    def function(call: _Call, arrays: Sequence[Any]) -> CallResults:
        return call.run(arrays)

    def function_with_vjp(call: _Call, arrays: Sequence[Any]) -> CallResults:
        return custom_vjp(call, arrays)

    for f in (function, function_with_vjp):  # for jaxprs and JAX's messages
        f.__name__ = f.__qualname__ = methods.name
        vars(f)["__signature__"] = _ANY_ARGUMENTS
        methods.show_source(f)
    custom_vjp = jax.custom_vjp(function)
    custom_vjp.defvjp(_fwd, _bwd, symbolic_zeros=True)
    if not methods.has_forward_mode:
        return custom_vjp
    custom_jvp = jax.custom_jvp(function if is_transposed else function_with_vjp)
    custom_jvp.defjvp(_jvp, symbolic_zeros=True)
    return custom_jvp


# JAX binds the signature of each function eight times for a call; this one binds quickly.
_ANY_ARGUMENTS = inspect.signature(lambda *args: None)

_NO_FORWARD_MODE = "forward-mode"  # in JAX's message for `jax.custom_vjp`


# Calls


def call_with_rule(spec: CallSpec, arrays: Sequence[Any], hooks: Hooks | None) -> Any:
    """Calls `forward` on arrays of which some are traced; returns its outputs with the Function's rule."""
    tracers, num_forward_tracers = spec.captured()
    call = _Call(spec, tracers, num_forward_tracers, hooks, spec.inputs.unperturbed)
    outputs = call.bind([*arrays, *tracers]).outputs
    forward_pass = call.passes[-1]
    return forward_pass.outputs.unflatten(forward_pass.outputs.stop_marked(outputs))


def call_untraced(spec: CallSpec, arrays: Sequence[Any]) -> Any:
    """Calls `forward` on arrays of which none is traced; a derivative with respect to what it captured raises."""
    if spec.captured()[1] or (spec.methods.sharding_rule is not None and is_call_partitioned(spec, arrays)):
        return call_with_rule(spec, arrays, None)
    _, _, returned = call_forward(spec, arrays, spec.inputs.unperturbed)
    if not any(map(is_traced, returned.arrays)):
        return returned.value
    error = _captured_error(_Call(spec, (), 0, None, spec.inputs.unperturbed))
    outputs = guard(returned.arrays, (), error)  # a derivative by a global, perhaps
    return returned.spec.unflatten(returned.spec.stop_marked(outputs))


def call_without_rule(spec: CallSpec, arrays: Sequence[Any]) -> Any:
    """Calls `forward`; returns its outputs with the derivative of its operations."""
    _, _, returned = call_forward(spec, arrays, spec.inputs.unperturbed)
    return returned.spec.unflatten(returned.spec.stop_marked(returned.arrays))


# Rules


def _hiding_own_frames(function: Callable[..., _T]) -> Callable[..., _T]:
    """Returns a function that hides jaxfn's own frames in the tracebacks of its errors."""

    def call(*args: Any) -> _T:
        try:
            return function(*args)
        except Exception as error:
            hide_own_frames(error)
            raise

    call.__name__ = function.__name__
    vars(call)["__signature__"] = _ANY_ARGUMENTS
    return call


def _differentiate(
    call: _Call, arrays: Sequence[Any], perturbed: Sequence[bool]
) -> tuple[_Taken, CallResults, list[Any]]:
    """Calls again, for a derivative; returns the derivative, the results, and the residuals as a flat list."""
    spec, num_inputs = call.spec, len(call.flags)
    arrays = list(map(as_array, arrays))  # JAX passes its own scalar types
    spec.check_no_perturbed_refs(perturbed[:num_inputs])
    moving = [p and is_inexact(x.dtype) for x, p in zip(arrays, perturbed, strict=True)]
    inputs, captured, flags = arrays[:num_inputs], arrays[num_inputs:], tuple(moving[:num_inputs])
    again = call.again(flags)
    results = again.bind(arrays)
    results = CallResults(list(map(as_array, results.outputs)), list(map(as_array, results.intermediates)))
    if not all(map(is_in_scope, (*results.outputs, *results.intermediates))):  # it found a tracer in a global, perhaps
        _captured_error(call).throw()
    forward_pass = again.passes[-1]
    results = forward_pass.name_results(results)
    if call.passes:
        forward_pass.check_returns_like(call.passes[0])
    outputs = forward_pass.outputs.stop_marked(results.outputs)
    saved, packed = forward_pass.residuals(inputs, outputs, results.intermediates), None
    if call.hooks is not None:
        with spec.scope("forward"):
            packed, saved = pack(spec.name, call.hooks, [s.is_packed for s in forward_pass.saved.sources], saved)
    returned, intermediates = forward_pass, None
    if not call.order:
        results = CallResults(results.outputs, [])
    elif call.passes and forward_pass.reads_flags and forward_pass.seen_flags != call.passes[0].seen_flags:
        # `forward` may save other arrays with these flags. What JAX knows as results are those without.
        same = call.again([False] * num_inputs)
        results = CallResults(results.outputs, same.bind(arrays).intermediates)
        returned = same.passes[-1]
    call.passes.append(returned)
    again_from = inputs if results.intermediates and not spec.inputs.has_refs else []
    leaves, treedef = jax.tree.flatten(Residuals(saved, captured, again_from))
    indices = [i for i, flag in enumerate(moving) if flag]
    if results.intermediates:
        intermediates = Intermediates(returned, call.tracers, results.intermediates, indices, treedef)
    union = tuple(map(or_, forward_pass.seen_flags, flags))
    own = [i for i in indices if i < num_inputs]
    derivative = Differentiation(forward_pass, call.tracers, union, own, packed, treedef)
    captures = any(moving[num_inputs : num_inputs + call.num_forward_tracers])
    captures = captures and again.outputs_depend_on(arrays, moving[num_inputs:])
    return _Taken(derivative, intermediates, captures), results, leaves


_RESIDUALS_ROUNDED_TO = 16


@_hiding_own_frames
def _fwd(call: _Call, primals: Sequence[CustomVJPPrimal]) -> tuple[CallResults, list[Any]]:
    was_staged = bool(call.passes)
    arrays = [x.value for x in primals]
    taken, results, leaves = _differentiate(call, arrays, [x.perturbed for x in primals])
    call.derivatives.append(taken)
    if not was_staged:
        return results, [call, *leaves]
    index = next(i for i, other in enumerate(call.derivatives, 1) if other is taken)  # other threads append too
    if taken.derivative.forward_pass.reads_flags:
        # With other flags it may save others. Of the last run JAX takes their number and batch axes, for all runs.
        leaves += [np.zeros(0, np.float32)] * (-len(leaves) % _RESIDUALS_ROUNDED_TO)
        leaves = repeat_like(leaves, arrays)
    # In `shard_map` an array without elements may lack a sharding.
    token = np.zeros((index, 1 if manual_axes_here() else 0), np.float32)
    return results, [_Staged(call), token, *leaves]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Staged:
    """A call that JAX staged before it differentiated it, perhaps several times."""

    call: _Call


@_hiding_own_frames
def _bwd(flat: list[Any], results: CallResults) -> tuple[None, list[Any]]:
    call, *leaves = flat
    if isinstance(call, _Staged):
        call, token = call.call, leaves.pop(0)
        taken = call.derivatives[token.shape[0] - 1]
    else:
        (taken,) = call.derivatives
    outputs, intermediates = list(map(_without_zero, results.outputs)), list(map(_without_zero, results.intermediates))
    has_output, has_intermediate = (any(ct is not None for ct in part) for part in (outputs, intermediates))
    cotangents: list[Any] = [None] * (len(call.flags) + len(call.tracers))
    if taken.captures_perturbed and has_output:  # not all that JAX differentiates by is used, as in a checkpoint
        indices = [i for i, x in enumerate(call.tracers[: call.num_forward_tracers]) if is_inexact(x.dtype)]
        error_map = ErrorMap([jax.typeof(call.tracers[i]).to_tangent_aval() for i in indices], _captured_error(call))
        errors = bind_linear_map(error_map, (), [ct for ct in outputs if ct is not None])
        cotangents = replace_at([len(call.flags) + i for i in indices], cotangents, errors)
    if has_output or not has_intermediate:
        cotangents[: len(call.flags)] = _pull(taken.derivative, leaves, outputs)
    if taken.intermediates is not None and has_intermediate:
        cotangents = list(map(_sum, cotangents, taken.intermediates.pull(leaves, intermediates)))
    return None, cotangents


def _pull(derivative: Differentiation, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Returns a cotangent for each array leaf of the inputs, by `backward`, or by transposing the only rule, `jvp`."""
    forward_pass = derivative.forward_pass
    if forward_pass.rule is not None:
        pulled = differentiate_on_parts(_pull, "backward", derivative, residuals, cotangents)
        return match_cotangents(pulled, forward_pass.input_avals) if forward_pass.is_on_mesh else pulled
    if forward_pass.spec.methods.has_backward or not forward_pass.spec.methods.has_jvp:
        return derivative.backward(residuals, cotangents)
    push, avals = _checked_jvp(derivative, residuals)
    pairs = zip(forward_pass.differentiable, derivative.avals, strict=True)
    cts = [zeros_of(aval) if cotangents[i] is None else cotangents[i] for i, aval in pairs]
    pulled = jax.linear_transpose(push, *map(shape_struct, avals))(cts)
    return replace_at(derivative.perturbed, [None] * len(forward_pass.input_avals), pulled)


def _checked_jvp(derivative: Differentiation, residuals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns `jvp` as a function of the perturbed inputs' tangents, and their types. Raises if it is not linear."""
    forward_pass = derivative.forward_pass

    def push(*tangents: Any) -> list[Any]:
        every: list[Any] = [None] * len(forward_pass.input_avals)
        with context(), _is_transposed(True):
            every = derivative.jvp(residuals, replace_at(derivative.perturbed, every, tangents))
        moved = zip([every[i] for i in forward_pass.differentiable], derivative.avals, strict=True)
        return [zeros_of(aval) if t is None else t for t, aval in moved]

    avals = [forward_pass.input_avals[i].to_tangent_aval() for i in derivative.perturbed]
    arguments = push, avals, f"{forward_pass.spec.name}.jvp", "reverse mode", "tangents"
    context: Callable[[], Any] = nullcontext
    try:
        _check_linear(*arguments)
    except NEEDS_VALUES:  # of residuals, perhaps
        context = jax.ensure_compile_time_eval
        _check_linear(*arguments)
    return push, avals


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _without_zero(vector: Any) -> Any:
    """Returns `None` for a tangent or cotangent that is symbolically zero, or of an array that has no derivative."""
    vector = vector if isinstance(vector, SymbolicZero) else as_array(vector)
    return None if isinstance(vector, SymbolicZero) or vector.dtype == jax.float0 else vector


@_hiding_own_frames
def _jvp(primals: tuple[_Call, list[Any]], tangents: tuple[Any, list[Any]]) -> tuple[CallResults, CallResults]:
    call, arrays = primals
    known = list(map(_without_zero, tangents[1]))
    taken, results, leaves = _differentiate(call, arrays, [t is not None for t in known])
    derivative = taken.derivative
    pushed = CallResults(*([SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in part] for part in results))
    nonzero = [known[i] for i in derivative.perturbed]
    if taken.captures_perturbed:
        linear_map: LinearMap = ErrorMap(derivative.avals, _captured_error(call))
        moved = bind_linear_map(linear_map, (), [t for t in known if t is not None])
    elif not nonzero:
        moved = [None] * len(derivative.forward_pass.differentiable)
    elif call.spec.methods.has_backward or derivative.forward_pass.rule is not None:
        operands = [*leaves, *_traces_of(arrays[: len(call.flags)])]
        moved = bind_linear_map(_DerivativeMap(derivative), operands, nonzero)
    else:
        with _is_transposed(True):
            every = derivative.jvp(leaves, known[: len(call.flags)])
        moved = [every[i] for i in derivative.forward_pass.differentiable]
        present = [i for i, t in enumerate(moved) if t is not None]
        if present and any(map(is_traced, nonzero)):
            check = _LinearityCheck(derivative, [derivative.avals[i] for i in present])
            checked = bind_linear_map(check, leaves, [*nonzero, *(moved[i] for i in present)])
            moved = replace_at(present, moved, checked)
    for i, t in zip(derivative.forward_pass.differentiable, moved, strict=True):
        pushed.outputs[i] = pushed.outputs[i] if t is None else as_array(t)
    nonzero = [t for t in known if t is not None]
    if taken.intermediates is not None and nonzero:
        moved = bind_linear_map(taken.intermediates, leaves, nonzero)
        for i, t in zip(taken.intermediates.indices, moved, strict=True):
            pushed.intermediates[i] = t
    return results, pushed


def _traces_of(inputs: Sequence[Any]) -> list[Any]:
    """Returns arrays without elements that depend on the inputs, as further operands of a linear map.

    So an enclosing derivative of the map by an input runs the rule, even where JAX needs no value of the map, and the
    rule finds what it uses in addition to the residuals.
    """
    return [jax.lax.broadcast(x, (0,)) for x in inputs if is_traced(x) and is_inexact(x.dtype)]


def _captured_error(call: _Call) -> DeferredError:
    """Returns the error for a derivative with respect to what `forward` captured."""
    where, inputs = "its closure or its defaults", call.spec.inputs
    for index, tree in enumerate(() if call.spec.methods.forward_captures() else inputs.trees):
        for leaf in tree.objects:
            where = f"{inputs.names.describe(index)}, inside an object of type {type(leaf).__name__}"
    return DeferredError(NotImplementedError, _CAPTURED.format(name=call.spec.name, where=where))


_CAPTURED = (
    "{name}.forward closes over a value that is being differentiated (in {where}), and a Function has derivatives with "
    "respect to the arrays among its arguments only. Pass that value to {name} as an argument, and return its gradient "
    "from backward."
)


class _DerivativeMap(LinearMap):
    """The derivative of a Function with both modes, from perturbed leaves of the inputs to differentiable outputs."""

    def __init__(self, derivative: Differentiation) -> None:
        self._derivative = derivative
        self.avals = derivative.avals

    def __repr__(self) -> str:
        return self._derivative.forward_pass.spec.name

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        derivative = self._derivative
        forward_pass = derivative.forward_pass
        is_partitioned = forward_pass.rule is not None
        if not (is_partitioned or forward_pass.spec.methods.has_jvp):
            return self._transpose_backward(residuals, tangents)
        input_tangents = replace_at(derivative.perturbed, [None] * len(forward_pass.input_avals), tangents)
        if is_partitioned:
            every = differentiate_on_parts(_push, "jvp", derivative, residuals, input_tangents)
        else:
            every = derivative.jvp(residuals, input_tangents)
        results = [every[i] for i in forward_pass.differentiable]
        return [zeros_of(aval) if t is None else t for t, aval in zip(results, self.avals, strict=True)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        derivative = self._derivative
        forward_pass = derivative.forward_pass
        nothing: list[Any] = [None] * len(forward_pass.output_avals)
        output_cotangents = replace_at(forward_pass.differentiable, nothing, cotangents)
        pull = derivative.backward if forward_pass.rule is None else partial(_pull, derivative)
        pulled = pull(residuals, output_cotangents)
        return [pulled[i] for i in derivative.perturbed]

    def _transpose_backward(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """Derives forward mode from `backward`, for `generate_jvp_rule`."""
        forward_pass = self._derivative.forward_pass
        name = forward_pass.spec.name
        input_avals = [forward_pass.input_avals[i].to_tangent_aval() for i in self._derivative.perturbed]

        def pull(*cotangents: Any) -> list[Any]:
            with _is_transposed(True):
                pulled = self.transpose(residuals, cotangents)
            return [zeros_of(aval) if ct is None else ct for ct, aval in zip(pulled, input_avals, strict=True)]

        _check_linear(pull, self.avals, f"{name}.backward", "generate_jvp_rule", "gradients")
        transpose = jax.linear_transpose(pull, *map(shape_struct, self.avals))
        try:
            return list(transpose(list(tangents)))
        except Exception as error:  # transposition rules of JAX raise many kinds
            problem = _NOT_LINEAR.format(method=f"{name}.backward", mode="generate_jvp_rule", vectors="gradients")
            raise RuntimeError(
                f"{problem} Or it is linear, and JAX has no transpose of something in it, such as a Function with "
                f"backward alone. JAX says: {error}"
            ) from error


def _push(derivative: Differentiation, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Returns a tangent for each array leaf of the outputs, `None` for those that have no derivative."""
    every: list[Any] = [None] * len(derivative.forward_pass.output_avals)
    moved = _DerivativeMap(derivative).apply(residuals, [tangents[i] for i in derivative.perturbed])
    return replace_at(derivative.forward_pass.differentiable, every, moved)


class _LinearityCheck(LinearMap):
    """Returns the tangents that a `jvp` returned, the last operands. Where JAX transposes it, checks that it is linear.

    The first operands are the tangents that `jvp` took: JAX transposes nothing that does not depend on them.
    """

    def __init__(self, derivative: Differentiation, avals: Sequence[Any]) -> None:
        self._derivative = derivative
        self.avals = avals

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return list(tangents[len(self._derivative.perturbed) :])

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        _checked_jvp(self._derivative, residuals)
        return [*[None] * len(self._derivative.perturbed), *cotangents]


def _check_linear(function: Callable[..., Any], avals: Sequence[Any], method: str, mode: str, vectors: str) -> None:
    """Raises if user code that is transposed is not linear: JAX would drop a constant in silence."""
    if not is_linear(function, avals):
        problem = _NOT_LINEAR.format(method=method, mode=mode, vectors=vectors)
        raise RuntimeError(f"{problem} What is not linear is {describe_nonlinearity(function, avals)}.")


_NOT_LINEAR = (
    "{method} is not linear in its {vectors}, so {mode}, which transposes it, is not possible. Define the other rule "
    "yourself, or move the nonlinear part out of the Function."
)
