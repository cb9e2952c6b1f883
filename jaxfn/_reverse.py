"""One call of a Function as a `jax.custom_vjp`.

    arrays --primal--> Outputs                      nothing is differentiated
    arrays --fwd-----> Outputs, Residuals           detach, the user's forward, attach
    Residuals, cotangents --bwd--> cotangents       the user's backward

What `forward` decided besides arrays leaves the traced function as the static part of the `Outputs` and `Residuals`
pytree nodes, never through a closure: JAX may cache a trace and not run the function again.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._attach import attach, detach
from jaxfn._leaves import as_array, is_inexact, is_traced
from jaxfn._outputs import OutputLayout
from jaxfn._run import Call, Run, run_forward


class Outputs:
    """The outputs' array leaves, with their layout: a pytree node."""

    def __init__(self, arrays: Sequence[Any], layout: OutputLayout) -> None:
        self.arrays = arrays
        self.layout = layout


class Site:
    """One place in a program where a Function is called, and the runs of `forward` there: a pytree node without leaves.

    JAX keeps the trace of `fwd` for every pattern of perturbed inputs (under `cond`, `scan` and `jit`), but the tree of
    the residuals only of the last one. So the tree must not depend on the pattern: it holds the site, and which run the
    residuals are of is told by the shape of a last, empty one.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def keep(self, run: Run, residuals: list[Any]) -> Residuals:
        """The residuals of a run here."""
        self.runs.append(run)
        if run.has_one_pattern:
            return Residuals(residuals, self)
        if run.read_needs_input_grad:
            # What such a forward saves may depend on the pattern, so their number must not show either.
            residuals = residuals + [_token(0)] * (_RESIDUALS_ROUNDED_TO - len(residuals) % _RESIDUALS_ROUNDED_TO)
        # Looked up, not counted: two threads may be differentiating the same traced call.
        return Residuals([*residuals, _token(self.runs.index(run))], self)


_RESIDUALS_ROUNDED_TO = 16


@lru_cache
def _token(number: int) -> np.ndarray[Any, Any]:
    return np.zeros((0, number), bool)


class Residuals:
    """The arrays kept for backward, and where they belong: a pytree node."""

    def __init__(self, arrays: Sequence[Any], site: Site) -> None:
        self.arrays = arrays
        self.site = site

    @property
    def run(self) -> Run:
        """The run that kept them."""
        runs = self.site.runs
        return runs[-1] if runs[-1].has_one_pattern else runs[self.arrays[-1].shape[-1]]


jax.tree_util.register_pytree_node(Outputs, lambda o: (o.arrays, o.layout), lambda layout, a: Outputs(a, layout))
jax.tree_util.register_pytree_node(Residuals, lambda r: (r.arrays, r.site), lambda site, a: Residuals(a, site))
jax.tree_util.register_pytree_node(Site, lambda site: ((), site), lambda site, _: site)


def differentiable(call: Call) -> Callable[..., Outputs]:
    """A function of a `Site` and a call's array leaves, differentiable by the Function's own rule at every order."""

    def primal(site: Site, *arrays: Any) -> Outputs:
        run, outputs, _ = run_forward(call, [as_array(x) for x in arrays], call.unperturbed)
        return Outputs(outputs, run.outputs)

    def fwd(site: Site, *primals: Any) -> tuple[Outputs, Residuals]:
        inputs = [as_array(p.value) for p in primals]
        # JAX's coming checkpoint says of integers too that they are perturbed.
        perturbed = tuple(p.perturbed and is_inexact(x.dtype) for p, x in zip(primals, inputs, strict=True))
        run, outputs, own = _run_attached(call, inputs, perturbed)
        return Outputs(outputs, run.outputs), site.keep(run, run.residuals(inputs, outputs, own))

    def bwd(residuals: Residuals, cotangents: Outputs) -> tuple[Any, ...]:
        return None, *residuals.run.backward(residuals.arrays, cotangents.arrays)

    primal.__name__ = primal.__qualname__ = call.name
    return _custom_vjp(primal, fwd, bwd)


class _Bound(inspect.BoundArguments):
    """Positional arguments, bound to `*args`."""

    def __init__(self, signature: inspect.Signature, args: tuple[Any, ...]) -> None:
        super().__init__(signature, OrderedDict(args=args))

    def apply_defaults(self) -> None:
        pass


class _Positional(inspect.Signature):
    """The signature `(*args)`. JAX binds arguments to it several times a call, and `inspect` does so slowly."""

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return _Bound(self, args)


_POSITIONAL = _Positional([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


def _custom_vjp(primal: Callable[..., Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    for function in (primal, fwd, bwd):
        vars(function)["__signature__"] = _POSITIONAL
    rule = jax.custom_vjp(primal)
    rule.defvjp(fwd, bwd, symbolic_zeros=True)
    return rule


def _run_attached(
    call: Call, inputs: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Run, Sequence[Any], Sequence[Any]]:
    """Runs forward so that an outer differentiation sees the Function's rule: the run, outputs and intermediates."""
    call.refuse_perturbed_refs(perturbed)
    run, outputs, own = _run_detached(call, inputs, perturbed)
    return run, _outputs_attached(run, outputs, own, inputs), own


def _run_detached(
    call: Call, inputs: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[Run, Sequence[Any], Sequence[Any]]:
    """Runs forward so that nothing differentiates its own operations, which may have no derivative (a kernel, say).

    Where forward saved intermediates, those have the derivative of its operations, so it runs on the inputs themselves.
    That is seen at the first traced run, which is then done again, and remembered.
    """
    if not any(map(is_traced, inputs)):
        return run_forward(call, inputs, perturbed)
    if not call.methods.saves_intermediates:
        run, outputs, own = run_forward(call, _detached(call, inputs), perturbed)
        if not run.saves_intermediates:
            return run, outputs, own
        if any(call.are_refs):  # which must not be written twice
            if run.hides_arrays:
                raise NotImplementedError(
                    f"{call.name} takes a jax.Ref and keeps a JAX array inside a closure or an object on ctx, where "
                    "its derivative cannot be had. Save the array itself: ctx.save_for_backward(array)."
                )
            own = attach(own, (), call.without_refs(inputs), _Refusal(call.name), made_is_detached=True)
            return run, outputs, own
        call.methods.saves_intermediates = True
    run, outputs, own = run_forward(call, inputs, perturbed)
    run.is_detached = False
    return run, outputs, own


class _Refusal:
    """Stands for the derivative of an intermediate that cannot be had."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *operands: Any) -> Sequence[Any]:
        raise NotImplementedError(
            f"{self.name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot be "
            "differentiated twice: forward would have to write twice. Save inputs or outputs instead."
        )


def _detached(call: Call, inputs: Sequence[Any]) -> list[Any]:
    """The inputs without derivatives, each an object of its own: what was saved is known by identity."""
    detached = [x if is_traced(x) else jnp.array(x) for x in detach(call.without_refs(inputs))]
    if len(detached) == len(inputs):
        return detached
    remaining = iter(detached)
    return [x if is_ref else next(remaining) for x, is_ref in zip(inputs, call.are_refs, strict=True)]


def _outputs_attached(run: Run, outputs: Sequence[Any], own: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs with the Function's own rule for an outer differentiation; see `_attach`."""
    operands = run.call.without_refs(inputs)
    if any(map(is_traced, operands)) and any(is_inexact(x.dtype) for x in operands):
        rule = _OutputsRule(run, len(outputs), len(own))
        outputs = attach(outputs, own, operands, rule, made_is_detached=run.is_detached)
    return run.outputs.without_derivatives(outputs)


class _OutputsRule:
    """Returns the outputs among (outputs..., intermediates..., inputs...); their derivative is the user's backward.

    Hashed by identity, and made into a custom_vjp when something differentiates it, which is seldom.
    """

    def __init__(self, run: Run, num_outputs: int, num_own: int) -> None:
        self.run = run
        self.num_outputs = num_outputs
        self.num_own = num_own

    def __repr__(self) -> str:
        return self.run.call.name

    def __call__(self, *operands: Any) -> Sequence[Any]:
        call, num_outputs = self.run.call, self.num_outputs
        num_before = num_outputs + self.num_own

        def primal(site: Site, *operands: Any) -> list[Any]:
            return list(operands[:num_outputs])

        def fwd(site: Site, *primals: Any) -> tuple[Sequence[Any], Residuals]:
            values = [as_array(p.value) for p in primals]
            inputs = call.with_refs(values[num_before:], None)
            perturbed = call.with_refs([p.perturbed for p in primals[num_before:]], False)
            run, own = _widened(self.run, values[num_outputs:num_before], inputs, tuple(perturbed))
            outputs = _outputs_attached(run, values[:num_outputs], own, inputs)
            return outputs, site.keep(run, run.residuals(inputs, outputs, own))

        def bwd(residuals: Residuals, cotangents: list[Any]) -> tuple[Any, ...]:
            of_inputs = residuals.run.backward(residuals.arrays, cotangents)
            return None, *[None] * num_before, *call.without_refs(of_inputs)

        return _custom_vjp(primal, fwd, bwd)(Site(), *operands)


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
    again, _, own = _run_detached(run.call, inputs, union)
    if again.outputs != run.outputs:
        raise RuntimeError(
            f"{run.call.name}.forward returned outputs of another structure when ctx.needs_input_grad was "
            f"{again.needs_input_grad} than when it was {run.needs_input_grad}. What forward returns must "
            "not depend on ctx.needs_input_grad."
        )
    return again, own
