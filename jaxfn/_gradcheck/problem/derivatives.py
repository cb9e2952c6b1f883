"""The derivatives of a problem's function, by its own rules and by autodiff, in both modes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxfn._check.modes import Derivative, LeafFunction, forward_derivative, jacobian_rows, restrict_outputs
from jaxfn._check.staging import LAX_PRIMITIVES, JaxprFunction, stage
from jaxfn._compat import closed_call_p, custom_lin_p, is_code_of_jax
from jaxfn._gradcheck.problem.monitor import CallMonitor
from jaxfn._gradcheck.problem.problem import Leaf, Problem
from jaxfn._jaxpr import HAVE_RULES, identity_primitives, is_any_of, jaxprs_in_params, open_jaxpr, subjaxpr_rules
from jaxfn._primitives import linear_map_p
from jaxfn._tree import conjugate

_FindDerivative: TypeAlias = "Callable[[], Derivative | UnavailableError]"


class UnavailableError(Exception):
    """A derivative that cannot be computed; the message says why."""


class ReverseOnlyError(UnavailableError):
    """A function has no forward mode."""


def available(derivative: Any) -> Any:
    """Returns the derivative, or raises the `UnavailableError`."""
    if isinstance(derivative, UnavailableError):
        raise derivative
    return derivative


@dataclass(frozen=True)
class ADMode:
    """A mode of differentiation, reverse or forward, of one function.

    Its derivative takes one seed vector for each seed leaf, and returns one vector for each result leaf: cotangents of
    outputs and gradients of inputs in reverse mode, tangents of inputs and of outputs in forward mode. Unit vectors
    give the rows of the Jacobian in reverse mode, and its columns in forward mode. The gradients in a row are in
    torch's convention: for a complex input, the derivative with respect to the real part plus `1j` times that with
    respect to the imaginary part.
    """

    is_forward: ClassVar[bool]  # whether it is forward mode
    name: ClassVar[str]  # the name of the mode in reports
    method: ClassVar[str]  # the name of the method that users write for it
    seed_name: ClassVar[str]  # seed_name, result_name: the names of seed vectors and of results in reports
    result_name: ClassVar[str]
    derivative_of: ClassVar[Callable[[LeafFunction], Derivative]]  # makes the derivative of a function in this mode

    seed_leaves: tuple[Leaf, ...]  # the outputs in reverse mode, the inputs in forward mode
    result_leaves: tuple[Leaf, ...]  # the inputs in reverse mode, the outputs in forward mode
    rule: Derivative | UnavailableError  # the derivative by the function's own rule, or the reason why there is none
    retraced: Derivative | None  # `rule`, traced a second time; `None` if that trace has equal operations
    find_reference: _FindDerivative  # returns `reference`

    @cached_property
    def reference(self) -> Derivative | UnavailableError:
        """The derivative by autodiff of the function without its rule, or the reason why there is none."""
        return self.find_reference()

    @property
    def has_reference(self) -> bool:
        return not isinstance(self.reference, UnavailableError)

    def output_and_input(self, seed: int, result: int) -> tuple[int, int]:
        """Returns the indices of an output and an input, from those of a seed leaf and a result leaf."""
        return (result, seed) if self.is_forward else (seed, result)


class ReverseMode(ADMode):
    """Reverse mode."""

    is_forward = False
    name = method = "backward"
    seed_name, result_name = "cotangent", "gradient"
    derivative_of = staticmethod(jacobian_rows)


class ForwardMode(ADMode):
    """Forward mode."""

    is_forward = True
    name, method = "forward mode", "jvp"
    seed_name = result_name = "tangent"
    derivative_of = staticmethod(forward_derivative)


@dataclass(frozen=True)
class Derivatives:
    """A problem's function and its derivatives, staged to jaxprs if that is possible."""

    is_traced: bool  # whether they are staged; otherwise they are Python code that runs at every evaluation
    inputs: tuple[Leaf, ...]  # the leaves with respect to which the function is differentiated
    outputs: tuple[Leaf, ...]  # the outputs that have a derivative
    stopped: tuple[Leaf, ...]  # the floating-point and complex outputs that have none
    output_indices: Sequence[int]  # the indices of `outputs` among both
    primal: LeafFunction  # maps inputs to `outputs`, or to `stopped` if there are no others
    target: LeafFunction  # as `primal`, the function whose values finite differences use
    call: LeafFunction  # the function itself, not staged; maps inputs to outputs
    reverse: ADMode  # reverse mode
    forward: ADMode  # forward mode
    functions: list[Any]  # the Functions whose rules the references bypass
    # whether values or derivatives may depend on which inputs and outputs have a tangent or a cotangent, or on whether
    # they are batched
    has_unknown_code: bool
    # gradients that were returned in another dtype than their input's, as (location, dtype, input's dtype)
    casts: list[tuple[str, str, str]]
    # differentiated inputs for which `backward` returned `None`, as (method, input)
    without_gradient: list[tuple[str, str]]
    precision: float  # the relative spacing of the coarsest floating-point type that the function computes in

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The sizes of the mesh axes over which the function uses `shard_map`, by name."""
        return self.primal.mesh_axes() if isinstance(self.primal, JaxprFunction) else {}


def derive(
    problem: Problem, *, reverse: bool, forward: bool, reference: bool = False, retrace: bool = False
) -> Derivatives:
    """Returns the derivatives of a problem's function in the modes to be checked.

    With `reference`, the function without its rule is differentiated too; with `retrace`, the rules are traced twice.
    Errors of the function itself propagate.
    """
    try:
        return _derive(problem, _Tracer(problem, is_tracing=True), reverse, forward, reference, retrace)
    except _UntraceableError:
        return _derive(problem, _Tracer(problem, is_tracing=False), reverse, forward, reference, retrace)


class _UntraceableError(Exception):
    """Raised if the user's code reads concrete values, which a tracer does not have."""


def _derive(
    problem: Problem, tracer: _Tracer, reverse: bool, forward: bool, reference: bool, retrace: bool
) -> Derivatives:
    primal, avals = tracer.primal(problem.call)
    described = problem.describe_outputs()
    target = primal
    if problem.target is not problem.call:
        target, target_avals = tracer.primal(problem.target)
        if [(y.shape, y.dtype) for y in target_avals] != [(y.shape, y.dtype) for y in avals]:
            raise ValueError(f"surrogate returns {_listed(target_avals)}, but {problem.name} returns {_listed(avals)}")
    leaves = [Leaf(name, y.shape, y.dtype) for (name, _), y in zip(described, avals, strict=True)]
    precision = _precision(primal, [dtype for _, dtype in described])
    monitor = CallMonitor(bypass_rules=False)

    def rules(call: LeafFunction, outputs: Sequence[Leaf]) -> list[Derivative | UnavailableError]:
        """Returns the derivatives by the function's own rules, with calls monitored too."""
        return [
            tracer.derivative(monitored(jacobian_rows(call), monitor), outputs, retry_eagerly=True)
            if reverse
            else _UNCHECKED,
            tracer.derivative(monitored(forward_derivative(call), monitor), problem.inputs) if forward else _UNCHECKED,
        ]

    differentiable: set[int] = set()
    own = rules(recording_derivatives(problem.call, differentiable) if problem.may_stop else problem.call, leaves)
    if problem.may_stop and not all(isinstance(rule, UnavailableError) for rule in own):
        if problem.target is not problem.call:  # the rule may lack a derivative that its surrogate has
            rules(recording_derivatives(problem.target, differentiable), leaves)
        indices = sorted(differentiable)
    else:
        indices = list(range(len(leaves)))
    outputs = tuple(leaves[i] for i in indices)
    call, reference_call = problem.call, problem.reference
    if len(indices) < len(leaves):
        call, reference_call = restrict_outputs(call, indices), restrict_outputs(reference_call, indices)
        own = rules(call, outputs)
        if indices:
            primal = target = tracer.primal(restrict_outputs(problem.call, indices))[0]
            if problem.target is not problem.call:
                target = tracer.primal(restrict_outputs(problem.target, indices))[0]
    bypassing = CallMonitor(bypass_rules=True)
    references: Sequence[_FindDerivative] = [lambda: _UNCHECKED] * 2
    if reference:
        without_rules = monitored(reference_call, bypassing)
        references = _references(problem, tracer, without_rules, outputs, reverse, monitor, bypassing)
    retraced = map(_retraced, own, rules(call, outputs) if retrace else own)
    of_reverse, of_forward = zip(own, retraced, references, strict=True)
    return Derivatives(
        is_traced=tracer.is_tracing,
        inputs=problem.inputs,
        outputs=outputs,
        stopped=tuple(leaf for i, leaf in enumerate(leaves) if i not in indices),
        output_indices=indices,
        primal=primal,
        target=target,
        call=monitored(call, monitor),
        reverse=ReverseMode(outputs, problem.inputs, *of_reverse),
        forward=ForwardMode(problem.inputs, outputs, *of_forward),
        functions=list(bypassing.functions) or list(monitor.functions),
        has_unknown_code=monitor.reads_perturbation or _has_unknown_code(primal, own[1], monitor.functions),
        casts=list(monitor.casts),
        without_gradient=list(monitor.without_gradient),
        precision=precision,
    )


def _references(
    problem: Problem,
    tracer: _Tracer,
    without_rules: LeafFunction,
    outputs: Sequence[Leaf],
    reverse: bool,
    monitor: CallMonitor,
    bypassing: CallMonitor,
) -> tuple[_FindDerivative, _FindDerivative]:
    """Returns functions that find the references of reverse and of forward mode.

    Forward mode is traced here, reverse mode at the first call, as it is rarely needed.
    """
    columns = tracer.derivative(forward_derivative(without_rules), problem.inputs)
    rows = cache(lambda: tracer.derivative(jacobian_rows(without_rules), outputs) if reverse else _UNCHECKED)
    if isinstance(columns, UnavailableError) or monitor.functions.keys() - bypassing.functions.keys():
        rows()  # reverse mode may call Functions that forward mode has not reached
    if not bypassing.functions and not problem.has_reference:
        no_rule = UnavailableError("it has no rule: autodiff is the derivative that is checked")
        return (lambda: no_rule), (lambda: no_rule)
    if monitor.functions.keys() - bypassing.functions.keys():
        # Finite differences decide about reverse mode, and the rules of forward mode do not count as a reference.
        columns = UnavailableError("Functions inside the function are differentiated by their own rules")
    return rows, lambda: columns


_UNCHECKED = UnavailableError("that mode is not checked")

# `jvp` runs where a `linear_map` is lowered, after its trace. `closed_call` is what lowering leaves of JAX's
# experimental custom derivatives, which may read symbolic zeros (0.12.0).
_UNMONITORED = frozenset({linear_map_p, closed_call_p, "custom_vmap_call"})
# Primitives that run JAX's code alone, or that of Functions, which is monitored while JAX traces it.
_MONITORED = (LAX_PRIMITIVES | identity_primitives | subjaxpr_rules.keys()) - _UNMONITORED
_FOLDER = os.path.dirname(conjugate.__code__.co_filename)


def _has_unknown_code(primal: LeafFunction, forward_rule: object, functions: Iterable[Any]) -> bool:
    """Whether there is code, other than that of monitored Functions, that may see what is differentiated or batched."""
    if not isinstance(primal, JaxprFunction):
        return True
    codes = [getattr(function.forward, "__code__", None) for function in functions]
    locations = {(code.co_filename, code.co_firstlineno) for code in codes if code is not None}

    def is_unknown(eqn: Any) -> bool:
        if eqn.primitive in HAVE_RULES:
            called, _ = open_jaxpr(eqn.params["call_jaxpr"])
            source = called.debug_info.func_filename or "", called.debug_info.func_lineno
            if source in locations or os.path.dirname(source[0]) == _FOLDER:  # a call of a Function
                return False
        return eqn.params.get("symbolic_zeros") or not is_any_of(eqn, _MONITORED)

    has_linear_map = isinstance(forward_rule, JaxprFunction) and any(
        e.primitive is linear_map_p for e in forward_rule.eqns
    )
    return has_linear_map or any(map(is_unknown, primal.eqns))


class _Tracer:
    """Stages functions, or evaluates them once; an error becomes an `UnavailableError`."""

    def __init__(self, problem: Problem, *, is_tracing: bool) -> None:
        self.is_tracing = is_tracing
        self._values = problem.values
        self._inputs = _avals(problem.inputs)

    def primal(self, call: LeafFunction) -> tuple[LeafFunction, list[Any]]:
        """Returns a function, staged if possible, and the types of its outputs."""
        if not self.is_tracing:
            return call, [jax.typeof(y) for y in call(*self._values)]
        try:
            traced = stage(call, *self._inputs)
        except Exception as error:
            raise _UntraceableError from error
        return traced, [v.aval for v in traced.jaxpr.outvars]

    def derivative(
        self,
        derivative: Derivative,
        seed_leaves: Sequence[Leaf],
        retry_eagerly: bool = False,
    ) -> Derivative | UnavailableError:
        """Returns a derivative of the function, staged for vectors of some leaves."""
        try:
            if not self.is_tracing:
                derivative(self._values, [jnp.ones(leaf.shape, leaf.dtype) for leaf in seed_leaves])
                return derivative
            traced = stage(derivative, self._inputs, _avals(seed_leaves))
        except Exception as error:
            CallMonitor.end_epoch()
            if retry_eagerly and self.is_tracing:
                raise _UntraceableError from error
            unavailable = UnavailableError(f"{type(error).__name__}: {error}")
            unavailable.__cause__ = error
            return unavailable
        # JAX may have cached jaxprs of user code, which the next check has to trace again. It does not cache calls.
        cached = [jaxpr for eqn in traced.eqns if eqn.primitive not in HAVE_RULES for jaxpr in jaxprs_in_params(eqn)]
        if any(jaxpr.eqns and not is_code_of_jax(jaxpr) for jaxpr in cached):
            CallMonitor.end_epoch()
        # It computes the tangents of a `jax.custom_vjp`, and raises when it is evaluated.
        if any(eqn.primitive is custom_lin_p for eqn in traced.eqns):
            return ReverseOnlyError("it goes through a custom_vjp function, which has no forward mode")
        return traced


def recording_derivatives(call: LeafFunction, differentiable: set[int]) -> LeafFunction:
    """Returns the function; differentiating it records the outputs whose tangent is not a symbolic zero."""

    def recording(*xs: Any) -> list[Any]:
        return [_recorder(differentiable, i)(y) for i, y in enumerate(call(*xs))]

    return recording


def _recorder(differentiable: set[int], index: int) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def identity(y: Any) -> Any:
        return y

    def rule(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[0], SymbolicZero):
            differentiable.add(index)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return identity


def monitored(function: Callable[..., Any], monitor: CallMonitor) -> Callable[..., Any]:
    """The function under a monitor."""

    def run(*args: Any) -> Any:
        with monitor.active():
            return function(*args)

    return run


def _retraced(rule: Derivative | UnavailableError, again: Derivative | UnavailableError) -> Derivative | None:
    if isinstance(rule, UnavailableError):
        return None
    is_same = isinstance(rule, JaxprFunction) and isinstance(again, JaxprFunction) and rule.is_same_computation(again)
    return None if is_same else available(again)


def _avals(leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def _listed(avals: Sequence[Any]) -> str:
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals) or "nothing"


def _precision(primal: LeafFunction, dtypes: Sequence[Any]) -> float:
    """Returns the spacing of the coarsest dtype among the outputs and everything computed from the inputs."""
    intermediate = primal.dtypes_from_inputs() if isinstance(primal, JaxprFunction) else ()
    return max(float(jnp.finfo(dtype).eps) for dtype in (*dtypes, *intermediate, np.dtype(np.float64)))
