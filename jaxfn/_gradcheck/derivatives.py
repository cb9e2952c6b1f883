"""A function and its derivatives, as the rest computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import SymbolicZero, is_reverse_only
from jaxfn._gradcheck.problem import Leaf, OfLeaves, Problem
from jaxfn._gradcheck.programs import Mode, Traced, bytes_each, computation, equations
from jaxfn._values.arrays import is_inexact
from jaxfn._watch import Watch, watching

# (inputs, cotangents) -> (outputs, gradients), and (inputs, tangents) -> output tangents; all of them lists.
Pullback = Callable[[Sequence[Any], Sequence[Any]], Any]
Pushforward = Callable[[Sequence[Any], Sequence[Any]], Any]


def pullback_of(call: OfLeaves) -> Pullback:
    """Reverse mode."""

    def pullback(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, pull = jax.vjp(call, *xs)
        return outputs, list(pull(list(cotangents)))

    return pullback


def pushforward_of(call: OfLeaves) -> Pushforward:
    """Forward mode."""

    def pushforward(xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jax.jvp(call, tuple(xs), tuple(tangents))[1]

    return pushforward


@computation("call")
@dataclass(frozen=True)
class Only:
    """The function with some of its outputs."""

    call: OfLeaves
    positions: tuple[int, ...]

    def __call__(self, *xs: Any) -> list[Any]:
        outputs = self.call(*xs)
        return [outputs[i] for i in self.positions]

    @property
    def bytes_each(self) -> int:
        return bytes_each(self.call)


def telling(call: OfLeaves, is_differentiable: dict[int, bool]) -> OfLeaves:
    """The function itself; differentiating it notes which outputs have a derivative that is not known to be zero."""

    def told(*xs: Any) -> list[Any]:
        return [_teller(is_differentiable, i)(y) for i, y in enumerate(call(*xs))]

    return told


def _teller(is_differentiable: dict[int, bool], position: int) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def identity(y: Any) -> Any:
        return y

    def rule(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[0], SymbolicZero):
            is_differentiable[position] = True
        return primals[0], tangents[0]

    identity.defjvp(rule, symbolic_zeros=True)
    return identity


def watched(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    """The function under a watch."""

    def run(*args: Any) -> Any:
        with watching(watch):
            return function(*args)

    return run


class UnavailableError(Exception):
    """A derivative that cannot be computed; the message says why."""


def available(derivative: Any) -> Any:
    """The derivative; raises where there is none."""
    if isinstance(derivative, UnavailableError):
        raise derivative
    return derivative


@dataclass
class Derivatives:
    """A problem's function and derivatives, traced where that is possible.

    Attributes:
      mode: the fastest way to run them that may work.
      inputs: what is differentiated with respect to.
      outputs: what is differentiated: the outputs that have a derivative.
      stopped: the floating and complex outputs that have none.
      kept: the positions of `outputs` among both.
      forward: inputs to outputs.
      forward_stopped: inputs to the stopped ones.
      measured: as `forward`, the function whose values finite differences take.
      call: the function itself, untraced, inputs to outputs.
      pullback: reverse mode by the function's own rule, or why there is none.
      retraced: the same, traced once more; `None` where that recorded the very same operations.
      pushforward: forward mode by the function's own rule, or why there is none.
      reference_pullback, reference_pushforward: by autodiff of the function without its rule.
      functions: the Functions whose rules were taken off for that.
      casts: gradients that were returned in another dtype than their input's: (where, dtype, input's dtype).
      precision: the relative spacing of the coarsest floating-point type on the way.
    """

    mode: Mode
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    stopped: tuple[Leaf, ...]
    kept: tuple[int, ...]
    forward: OfLeaves
    forward_stopped: OfLeaves
    measured: OfLeaves
    call: OfLeaves
    pullback: Pullback | UnavailableError
    retraced: Pullback | None
    pushforward: Pushforward | UnavailableError
    reference_pullback: Pullback | UnavailableError
    reference_pushforward: Pushforward | UnavailableError
    functions: list[Any]
    casts: list[tuple[str, str, str]]
    precision: float


def derive(problem: Problem, *, reverse: bool, forward: bool, reference: bool) -> Derivatives:
    """Traces a problem's function and its derivatives.

    Args:
      problem: the function.
      reverse: whether reverse mode is to be checked.
      forward: whether forward mode is.
      reference: whether the function without its rule is differentiated too.

    Raises:
      Whatever the function itself raises.
    """
    try:
        return _derive(problem, Mode.VECTORIZED, reverse, forward, reference)
    except _UntraceableError:
        return _derive(problem, Mode.PYTHON_LOOP, reverse, forward, reference)


class _UntraceableError(Exception):
    """The function's Python needs values that a trace does not have."""


def _derive(problem: Problem, mode: Mode, reverse: bool, forward: bool, reference: bool) -> Derivatives:
    recorder = _Tracer(mode, problem)
    everything, avals = recorder.forward(problem.call)
    recorder.output_avals = avals
    names_and_dtypes = problem.describe_outputs()
    measured = everything
    if problem.measured is not problem.call:
        measured, meant = recorder.forward(problem.measured)
        if [(y.shape, y.dtype) for y in meant] != [(y.shape, y.dtype) for y in avals]:
            raise ValueError(f"surrogate returns {_listed(meant)}, but {problem.name} returns {_listed(avals)}")
    leaves = [Leaf(name, y.shape, y.dtype) for (name, _), y in zip(names_and_dtypes, avals, strict=True)]
    watch = Watch(undecorated=False)
    found: dict[int, bool] = {}
    told = telling(problem.call, found)
    unchecked = UnavailableError("that mode is not checked")
    pullback = recorder.pullback(told, watch, retry_eagerly=True) if reverse else unchecked
    pushforward = recorder.pushforward(watched(told, watch)) if forward else unchecked
    kept = tuple(i for i in range(len(leaves)) if found.get(i))
    told_nothing = isinstance(pullback, UnavailableError) and isinstance(pushforward, UnavailableError)
    if told_nothing or not problem.may_stop:
        kept = tuple(range(len(leaves)))
    retraced = _retraced(recorder, pullback, problem.call, watch)
    bare = Watch(undecorated=True)
    undecorated = watched(problem.reference, bare)
    reference_pullback = recorder.pullback(undecorated) if reference and reverse else unchecked
    reference_pushforward = recorder.pushforward(undecorated) if reference else unchecked
    if reference and not bare.functions and problem.reference is problem.call:
        reference_pullback = reference_pushforward = UnavailableError(
            "there is no rule to take off: it would be the derivative that is being checked"
        )
    elif watch.functions.keys() - bare.functions.keys():
        # Finite differences shall vouch for reverse mode then, and not for rules of forward mode, which are others.
        reference_pushforward = UnavailableError("Functions inside the function keep their own rules")
    others = tuple(i for i in range(len(leaves)) if i not in kept)
    return Derivatives(
        mode=mode,
        inputs=problem.inputs,
        outputs=tuple(leaves[i] for i in kept),
        stopped=tuple(leaves[i] for i in others),
        kept=kept,
        forward=Only(everything, kept),
        forward_stopped=Only(everything, others),
        measured=Only(measured, kept),
        call=watched(Only(problem.call, kept), watch),
        pullback=_restricted(pullback, kept, leaves),
        retraced=None if retraced is None else _restricted(retraced, kept, leaves),
        pushforward=_picking(pushforward, kept),
        reference_pullback=_restricted(reference_pullback, kept, leaves),
        reference_pushforward=_picking(reference_pushforward, kept),
        functions=list(bare.functions) or list(watch.functions),
        casts=list(watch.casts),
        precision=_precision(everything, [dtype for _, dtype in names_and_dtypes]),
    )


class _Tracer:
    """Traces, or in a Python loop runs once, what it is given; an error becomes an `UnavailableError`."""

    def __init__(self, mode: Mode, problem: Problem) -> None:
        self.mode = mode
        self.values = problem.values
        self.avals = [leaf.aval for leaf in problem.inputs]
        self.output_avals: list[Any] = []

    def forward(self, call: OfLeaves) -> tuple[OfLeaves, list[Any]]:
        """A function itself, and the types of what it returns."""
        if self.mode is Mode.PYTHON_LOOP:
            return call, [jax.typeof(y) for y in call(*self.values)]
        try:
            traced = Traced(call, *self.avals)
        except Exception as error:
            raise _UntraceableError from error
        return traced, [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in traced.out_avals()]

    def pullback(
        self, call: OfLeaves, watch: Watch | None = None, retry_eagerly: bool = False
    ) -> Pullback | UnavailableError:
        """Reverse mode; `watch` is in force for the rules too."""
        pullback = pullback_of(call) if watch is None else watched(pullback_of(call), watch)
        return self._record(pullback, self.avals, self.output_avals, retry_eagerly)

    def pushforward(self, call: OfLeaves) -> Pushforward | UnavailableError:
        pushforward = self._record(pushforward_of(call), self.avals, self.avals)
        if isinstance(pushforward, Traced) and any(map(is_reverse_only, equations(pushforward.jaxpr))):
            return UnavailableError("it goes through a custom_vjp function, which has no forward mode")
        return pushforward

    def _record(
        self, derivative: Callable[..., Any], xs: Sequence[Any], directions: Sequence[Any], retry_eagerly: bool = False
    ) -> Any:
        try:
            if self.mode is not Mode.PYTHON_LOOP:
                return Traced(derivative, xs, directions)
            derivative(self.values, [jnp.ones(d.shape, d.dtype) for d in directions])
            return derivative
        except Exception as error:
            if retry_eagerly and self.mode is not Mode.PYTHON_LOOP:
                raise _UntraceableError from error
            unavailable = UnavailableError(f"{type(error).__name__}: {error}")
            unavailable.__cause__ = error
            return unavailable


def _retraced(
    recorder: _Tracer, pullback: Pullback | UnavailableError, call: OfLeaves, watch: Watch
) -> Pullback | None:
    if isinstance(pullback, UnavailableError):
        return None
    again = recorder.pullback(call, watch)
    if isinstance(again, UnavailableError):
        raise again
    same = isinstance(pullback, Traced) and isinstance(again, Traced) and pullback.same_as(again)
    return None if same else again


def _listed(avals: Sequence[Any]) -> str:
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in avals) or "nothing"


@computation("pullback")
@dataclass(frozen=True)
class _Restricted:
    """The pullback as a function of the kept outputs' cotangents; the others' are zero."""

    pullback: Pullback
    kept: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    def __call__(self, xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        given = dict(zip(self.kept, cotangents, strict=True))
        every = [given[i] if i in given else jnp.zeros(y.shape, y.dtype) for i, y in enumerate(self.leaves)]
        outputs, gradients = self.pullback(xs, every)
        return [outputs[i] for i in self.kept], gradients

    @property
    def bytes_each(self) -> int:
        return bytes_each(self.pullback)


def _restricted(pullback: Pullback | UnavailableError, kept: tuple[int, ...], leaves: Sequence[Leaf]) -> Any:
    return pullback if isinstance(pullback, UnavailableError) else _Restricted(pullback, kept, tuple(leaves))


@computation("pushforward")
@dataclass(frozen=True)
class _Picking:
    """The pushforward to the kept outputs."""

    pushforward: Pushforward
    kept: tuple[int, ...]

    def __call__(self, xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        outputs = self.pushforward(xs, tangents)
        return [outputs[i] for i in self.kept]

    @property
    def bytes_each(self) -> int:
        return bytes_each(self.pushforward)


def _picking(pushforward: Pushforward | UnavailableError, kept: tuple[int, ...]) -> Any:
    return pushforward if isinstance(pushforward, UnavailableError) else _Picking(pushforward, kept)


def _precision(forward: OfLeaves, dtypes: Sequence[Any]) -> float:
    """The spacing of the coarsest type that an output has, or that something computed from the inputs has."""
    on_the_way = forward.from_inputs() if isinstance(forward, Traced) else []
    found = [*dtypes, *(aval.dtype for aval in on_the_way if is_inexact(getattr(aval, "dtype", np.dtype(bool))))]
    return max(float(jnp.finfo(dtype).eps) for dtype in found or [np.dtype(np.float64)])
