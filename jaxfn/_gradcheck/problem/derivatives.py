"""A function and its derivatives, in both directions, as the rest computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import SymbolicZero
from jaxfn._gradcheck.problem.problem import Leaf, OfLeaves, Problem
from jaxfn._gradcheck.problem.traced import Traced, trace, trace_without_x64
from jaxfn._jaxpr import is_reverse_only
from jaxfn._observe import CALL_MONITOR, CallMonitor

# (inputs, cotangents) -> (outputs, gradients), or (inputs, tangents) -> (outputs, output tangents); all of them lists.
Derivative = Callable[[Sequence[Any], Sequence[Any]], Any]


def reverse_of(call: OfLeaves) -> Derivative:
    """Reverse mode."""

    def reverse(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, pull = jax.vjp(call, *xs)
        return outputs, list(pull(list(cotangents)))

    return reverse


def forward_of(call: OfLeaves) -> Derivative:
    """Forward mode."""

    def forward(xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jax.jvp(call, tuple(xs), tuple(tangents))

    return forward


def rows_of(call: OfLeaves) -> Derivative:
    """Reverse mode in torch's convention: JAX's cotangent of the functional "imaginary part" is -1j, torch's 1j."""
    reverse = reverse_of(call)

    def rows(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, gradients = reverse(xs, [jnp.conj(ct) for ct in cotangents])
        return outputs, [jnp.conj(g) for g in gradients]

    return rows


def only(call: OfLeaves, positions: Sequence[int]) -> OfLeaves:
    """The function with some of its outputs."""

    def some(*xs: Any) -> list[Any]:
        outputs = call(*xs)
        return [outputs[i] for i in positions]

    return some


def function_of_some(call: OfLeaves, xs: Sequence[Any], positions: Sequence[int]) -> OfLeaves:
    """The function of some of its inputs, with the others as they are."""

    def some(*values: Any) -> list[Any]:
        given = dict(zip(positions, values, strict=True))
        return call(*(given.get(i, x) for i, x in enumerate(xs)))

    return some


class UnavailableError(Exception):
    """A derivative that cannot be computed; the message says why."""


def available(derivative: Any) -> Any:
    """The derivative; raises where there is none."""
    if isinstance(derivative, UnavailableError):
        raise derivative
    return derivative


@dataclass(frozen=True)
class Direction:
    """One mode of differentiation, reverse or forward.

    Its derivative gets one vector for each of the leaves that are varied, and returns one for each of the others. With
    unit vectors it gives the rows of the Jacobian in reverse mode, and its columns in forward mode. A row is what one
    component of one output depends on; a column is what one component of one input has influence on. The gradients in
    a row are in torch's convention: for a complex input, the derivative with respect to the real part plus `1j` times
    the one with respect to the imaginary part.

    Attributes:
      is_forward: which mode it is.
      name: what reports call it.
      method: what users write for it.
      given, result: what vectors for something varied, and for something returned, are called.
      derivative_of: makes the derivative of a function in this direction.
      varied: what vectors are given for: the outputs in reverse mode, the inputs in forward mode.
      returned: what vectors are returned for: the others.
      rule: the derivative by the function's own rule, or why there is none.
      retraced: the same, traced once more; `None` where that recorded the very same operations.
      reference: the derivative by autodiff of the function without its rule, or why there is none.
    """

    is_forward: ClassVar[bool]
    name: ClassVar[str]
    method: ClassVar[str]
    given: ClassVar[str]
    result: ClassVar[str]
    derivative_of: ClassVar[Callable[[OfLeaves], Derivative]]

    varied: tuple[Leaf, ...]
    returned: tuple[Leaf, ...]
    rule: Derivative | UnavailableError
    retraced: Derivative | None
    reference: Derivative | UnavailableError

    @property
    def has_reference(self) -> bool:
        return not isinstance(self.reference, UnavailableError)

    @property
    def both(self) -> list[Derivative]:
        """The rule, and the reference where there is one."""
        return [available(self.rule), *([available(self.reference)] if self.has_reference else [])]

    def leaves(self, varied: int, returned: int) -> tuple[int, int]:
        """The positions of an output and an input, from those of something varied and something returned."""
        return (returned, varied) if self.is_forward else (varied, returned)


class ReverseMode(Direction):
    """Reverse mode."""

    is_forward = False
    name = method = "backward"
    given, result = "cotangent", "gradient"
    derivative_of = staticmethod(rows_of)


class ForwardMode(Direction):
    """Forward mode."""

    is_forward = True
    name, method = "forward mode", "jvp"
    given = result = "tangent"
    derivative_of = staticmethod(forward_of)


@dataclass(frozen=True)
class Derivatives:
    """A problem's function and derivatives, traced where that is possible.

    Attributes:
      is_traced: whether they are; otherwise they are Python that runs each time.
      inputs: what is differentiated with respect to.
      outputs: what is differentiated: the outputs that have a derivative.
      stopped: the floating and complex outputs that have none.
      kept: the positions of `outputs` among both.
      primal: inputs to outputs, or to `stopped` where there are no others.
      measured: as `primal`, the function whose values finite differences take.
      call: the function itself, untraced, inputs to outputs.
      reverse: reverse mode.
      forward: forward mode.
      functions: the Functions whose rules were taken off for the references.
      casts: gradients that were returned in another dtype than their input's: (where, dtype, input's dtype).
      precision: the relative spacing of the coarsest floating-point type on the way.
      trace: makes a trace of something else about `call`.
    """

    is_traced: bool
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    stopped: tuple[Leaf, ...]
    kept: Sequence[int]
    primal: OfLeaves
    measured: OfLeaves
    call: OfLeaves
    reverse: Direction
    forward: Direction
    functions: list[Any]
    casts: list[tuple[str, str, str]]
    precision: float
    trace: Callable[..., Traced]

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The sizes of the mesh axes over which the function uses `shard_map`, by name."""
        return self.primal.mesh_axes() if isinstance(self.primal, Traced) else {}


def derive(problem: Problem, *, reverse: bool, forward: bool, reference: bool) -> Derivatives:
    """A problem's function and its derivatives in the modes that are to be checked.

    With a `reference`, the function without its rule is differentiated too. Raises whatever the function itself raises.
    """
    try:
        return _derive(problem, _Tracer(problem, is_tracing=True), reverse, forward, reference)
    except _UntraceableError:
        return _derive(problem, _Tracer(problem, is_tracing=False), reverse, forward, reference)


class _UntraceableError(Exception):
    """The function's Python needs values that a trace does not have."""


def _derive(problem: Problem, tracer: _Tracer, reverse: bool, forward: bool, reference: bool) -> Derivatives:
    primal, avals = tracer.primal(problem.call)
    described = problem.describe_outputs()
    measured = primal
    if problem.measured is not problem.call:
        measured, meant = tracer.primal(problem.measured, trace)
        if [(y.shape, y.dtype) for y in meant] != [(y.shape, y.dtype) for y in avals]:
            raise ValueError(f"surrogate returns {_listed(meant)}, but {problem.name} returns {_listed(avals)}")
    leaves = [Leaf(name, y.shape, y.dtype) for (name, _), y in zip(described, avals, strict=True)]
    precision = _precision(primal, [dtype for _, dtype in described])
    watch = CallMonitor(bypass_rules=False)

    def rules(call: OfLeaves, outputs: Sequence[Leaf]) -> list[Derivative | UnavailableError]:
        """Returns the derivatives by the function's own rules, with calls monitored too."""
        return [
            tracer.derivative(watched(rows_of(call), watch), outputs, retry_eagerly=True) if reverse else _UNCHECKED,
            tracer.derivative(watched(forward_of(call), watch), problem.inputs) if forward else _UNCHECKED,
        ]

    differentiable: set[int] = set()
    own = rules(telling(problem.call, differentiable), leaves)
    if problem.may_stop and not all(isinstance(rule, UnavailableError) for rule in own):
        kept = sorted(differentiable)
    else:
        kept = list(range(len(leaves)))
    outputs = tuple(leaves[i] for i in kept)
    call, bare_call = problem.call, problem.reference
    if len(kept) < len(leaves):
        call, bare_call = only(call, kept), only(bare_call, kept)
        own = rules(call, outputs)
        if kept:
            primal = measured = tracer.primal(only(problem.call, kept))[0]
            if problem.measured is not problem.call:
                measured = tracer.primal(only(problem.measured, kept), trace)[0]
    bare = CallMonitor(bypass_rules=True)
    without_rules = watched(bare_call, bare)
    references: list[Derivative | UnavailableError] = [
        tracer.derivative(rows_of(without_rules), outputs, trace) if reference and reverse else _UNCHECKED,
        tracer.derivative(forward_of(without_rules), problem.inputs, trace) if reference else _UNCHECKED,
    ]
    if reference and not bare.functions and not problem.has_reference:
        references = [UnavailableError("there is no rule to take off: it would be the derivative that is checked")] * 2
    elif watch.functions.keys() - bare.functions.keys():
        # Finite differences shall vouch for reverse mode then, and not for rules of forward mode, which are others.
        references[1] = UnavailableError("Functions inside the function keep their own rules")
    of_reverse, of_forward = zip(own, map(_retraced, own, rules(call, outputs)), references, strict=True)
    return Derivatives(
        is_traced=tracer.is_tracing,
        inputs=problem.inputs,
        outputs=outputs,
        stopped=tuple(leaf for i, leaf in enumerate(leaves) if i not in kept),
        kept=kept,
        primal=primal,
        measured=measured,
        call=watched(call, watch),
        reverse=ReverseMode(outputs, problem.inputs, *of_reverse),
        forward=ForwardMode(problem.inputs, outputs, *of_forward),
        functions=list(bare.functions) or list(watch.functions),
        casts=list(watch.casts),
        precision=precision,
        trace=tracer.trace,
    )


_UNCHECKED = UnavailableError("that mode is not checked")


class _Tracer:
    """Traces what it is given, or runs it once; an error becomes an `UnavailableError`."""

    def __init__(self, problem: Problem, *, is_tracing: bool) -> None:
        self.is_tracing = is_tracing
        self.trace = trace if problem.dtype is None else trace_without_x64
        self._values = problem.values
        self._inputs = _avals(problem.inputs)

    def primal(self, call: OfLeaves, trace: Callable[..., Traced] | None = None) -> tuple[OfLeaves, list[Any]]:
        """A function itself, and the types of what it returns.

        By default the trace is made as that of the function that is checked.
        """
        if not self.is_tracing:
            return call, [jax.typeof(y) for y in call(*self._values)]
        try:
            traced = (trace or self.trace)(call, *self._inputs)
        except Exception as error:
            raise _UntraceableError from error
        return traced, [v.aval for v in traced.jaxpr.outvars]

    def derivative(
        self,
        derivative: Derivative,
        varied: Sequence[Leaf],
        trace: Callable[..., Traced] | None = None,
        retry_eagerly: bool = False,
    ) -> Derivative | UnavailableError:
        """A derivative of the function, of vectors for some leaves."""
        try:
            if not self.is_tracing:
                derivative(self._values, [jnp.ones(leaf.shape, leaf.dtype) for leaf in varied])
                return derivative
            traced = (trace or self.trace)(derivative, self._inputs, _avals(varied))
        except Exception as error:
            if retry_eagerly and self.is_tracing:
                raise _UntraceableError from error
            unavailable = UnavailableError(f"{type(error).__name__}: {error}")
            unavailable.__cause__ = error
            return unavailable
        if any(map(is_reverse_only, traced.eqns)):
            return UnavailableError("it goes through a custom_vjp function, which has no forward mode")
        return traced


def telling(call: OfLeaves, differentiable: set[int]) -> OfLeaves:
    """The function itself; differentiating it notes which outputs have a derivative that is not known to be zero."""

    def told(*xs: Any) -> list[Any]:
        return [_teller(differentiable, i)(y) for i, y in enumerate(call(*xs))]

    return told


def _teller(differentiable: set[int], position: int) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def identity(y: Any) -> Any:
        return y

    def rule(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[0], SymbolicZero):
            differentiable.add(position)
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return identity


def watched(function: Callable[..., Any], watch: CallMonitor) -> Callable[..., Any]:
    """The function under a watch."""

    def run(*args: Any) -> Any:
        with CALL_MONITOR(watch):
            return function(*args)

    return run


def _retraced(rule: Derivative | UnavailableError, again: Derivative | UnavailableError) -> Derivative | None:
    if isinstance(rule, UnavailableError):
        return None
    is_same = isinstance(rule, Traced) and isinstance(again, Traced) and rule.same_as(again)
    return None if is_same else available(again)


def _avals(leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def _listed(avals: Sequence[Any]) -> str:
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals) or "nothing"


def _precision(primal: OfLeaves, dtypes: Sequence[Any]) -> float:
    """The spacing of the coarsest type that an output has, or that something computed from the inputs has."""
    on_the_way = primal.dtypes_from_inputs() if isinstance(primal, Traced) else ()
    return max(float(jnp.finfo(dtype).eps) for dtype in (*dtypes, *on_the_way, np.dtype(np.float64)))
