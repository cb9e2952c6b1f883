"""One call of a Function as a `jax.custom_vjp`.

    arrays --primal--> Outputs                      nothing is differentiated
    arrays --fwd-----> Outputs, Residuals           the user's forward, once; then attach
    Residuals, cotangents --bwd--> cotangents       the user's backward

What `forward` decided besides arrays (the outputs' structure, static ctx attributes, what was saved) leaves the traced
function as the static part of the `Outputs` and `Residuals` pytree nodes, never through a closure: JAX may cache a
trace and not run the function again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._attach import attach, detach
from jaxfn._leaves import as_array, is_inexact, is_traced
from jaxfn._run import Call, Run, run_forward


class Outputs:
    """The outputs' array leaves, with their layout: a pytree node."""

    def __init__(self, arrays: Sequence[Any], layout: Any) -> None:
        self.arrays = arrays
        self.layout = layout


class Residuals:
    """The arrays kept for backward, with the run that kept them: a pytree node."""

    def __init__(self, arrays: Sequence[Any], run: Run) -> None:
        self.arrays = arrays
        self.run = run


jax.tree_util.register_pytree_node(Outputs, lambda o: (o.arrays, o.layout), lambda layout, a: Outputs(a, layout))
jax.tree_util.register_pytree_node(Residuals, lambda r: (r.arrays, r.run), lambda run, a: Residuals(a, run))


def differentiable(call: Call) -> Callable[..., Outputs]:
    """A function of a call's array leaves, differentiable by the Function's own rule at every order."""

    def primal(*arrays: Any) -> Outputs:
        run, outputs, _ = run_forward(call, [as_array(x) for x in arrays], call.unperturbed)
        return Outputs(outputs, run.outputs)

    def fwd(*primals: Any) -> tuple[Outputs, Residuals]:
        inputs = [as_array(p.value) for p in primals]
        run, outputs, own = _run_underived(call, inputs, tuple(p.perturbed for p in primals))
        outputs = _attached(run, outputs, own, inputs)
        return Outputs(outputs, run.outputs), Residuals(run.residuals(inputs, outputs, own), run)

    def bwd(residuals: Residuals, cotangents: Outputs) -> tuple[Any, ...]:
        return tuple(residuals.run.backward(residuals.arrays, cotangents.arrays))

    primal.__name__ = primal.__qualname__ = call.name
    return _custom_vjp(primal, fwd, bwd)


def _custom_vjp(primal: Callable[..., Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    # JAX asks for all three signatures at every call; stated beforehand, they need not be read off the code each time.
    for function, signature in ((primal, _ARRAYS), (fwd, _ARRAYS), (bwd, _RESIDUALS_AND_COTANGENTS)):
        function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    rule = jax.custom_vjp(primal)
    rule.defvjp(fwd, bwd, symbolic_zeros=True)
    return rule


_ARRAYS = inspect.signature(lambda *arrays: None)
_RESIDUALS_AND_COTANGENTS = inspect.signature(lambda residuals, cotangents: None)


def _run_underived(call: Call, inputs: Sequence[Any], perturbed: tuple[bool, ...]) -> tuple[Run, list[Any], list[Any]]:
    """Runs forward so that nothing differentiates its operations unless a saved intermediate needs it.

    An outer differentiation would otherwise go through operations whose derivative nobody uses, and fail where they
    have none (a callback, a kernel). Whether a Function saves intermediates is seen the first time.
    """
    if any(call.are_refs):
        return _run_with_refs(call, inputs, perturbed)
    if not call.methods.keeps_intermediates and any(map(is_traced, inputs)):
        detached = [as_array(x) for x in detach(inputs)]
        # Inputs that differ only in what is differentiated may now be one object, and a saved one be taken for another.
        if len({*map(id, detached)}) == len({*map(id, inputs)}):
            underived = run_forward(call, detached, perturbed)
            if not call.methods.keeps_intermediates:
                return underived
    return run_forward(call, inputs, perturbed)


def _run_with_refs(call: Call, inputs: Sequence[Any], perturbed: tuple[bool, ...]) -> tuple[Run, list[Any], list[Any]]:
    """Runs a forward that may write to references: once, and never writing values that are being differentiated."""
    for index, (is_ref, is_perturbed) in enumerate(zip(call.are_refs, perturbed, strict=True)):
        if is_ref and is_perturbed:
            raise NotImplementedError(
                f"{call.name}: {call.describe_array(index)} is a jax.Ref that was made inside the function being "
                "differentiated. What a Function reads from or writes to it would have no derivative. Make the Ref "
                "outside, or return the value instead of writing it."
            )
    arrays = [x for x, is_ref in zip(inputs, call.are_refs, strict=True) if not is_ref]
    detached = iter([as_array(x) for x in detach(arrays)])
    mixed = [x if is_ref else next(detached) for x, is_ref in zip(inputs, call.are_refs, strict=True)]
    run, outputs, own = run_forward(call, mixed, perturbed)
    if own and any(map(is_traced, arrays)):
        own = attach(own, (), arrays, _Refusal(call.name))
    return run, outputs, own


class _Refusal:
    """Stands for the derivative of an intermediate that cannot be had: forward would have to write twice."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *operands: Any) -> list[Any]:
        raise NotImplementedError(
            f"{self.name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot be "
            "differentiated twice. Save inputs or outputs instead."
        )


def _attached(run: Run, outputs: Sequence[Any], own: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs with the Function's own rule for an outer differentiation; see `_attach`."""
    operands = [x for x, is_ref in zip(inputs, run.call.are_refs, strict=True) if not is_ref]
    if any(map(is_traced, operands)) and any(is_inexact(x.dtype) for x in operands):
        outputs = attach(outputs, own, operands, _Identity(run, len(outputs), len(own)))
    return run.outputs.without_derivatives(outputs)


class _Identity:
    """Returns the outputs among (outputs..., own..., inputs...); their derivative is one run's backward.

    Hashed by identity, and made into a custom_vjp when something differentiates or batches it, which is seldom.
    """

    def __init__(self, run: Run, num_outputs: int, num_own: int) -> None:
        self.run = run
        self.num_outputs = num_outputs
        self.num_own = num_own

    def __repr__(self) -> str:
        return self.run.call.name

    def __call__(self, *operands: Any) -> list[Any]:
        num_outputs, num_own, are_refs = self.num_outputs, self.num_own, self.run.call.are_refs

        def primal(*operands: Any) -> list[Any]:
            return list(operands[:num_outputs])

        def fwd(*primals: Any) -> tuple[Sequence[Any], Residuals]:
            remaining = iter(primals)
            outputs = [as_array(next(remaining).value) for _ in range(num_outputs)]
            own = [as_array(next(remaining).value) for _ in range(num_own)]
            leaves = [None if is_ref else next(remaining) for is_ref in are_refs]
            inputs = [None if p is None else as_array(p.value) for p in leaves]
            run, own = _widened(self.run, own, inputs, tuple(p is not None and p.perturbed for p in leaves))
            outputs = _attached(run, outputs, own, inputs)
            return outputs, Residuals(run.residuals(inputs, outputs, own), run)

        def bwd(residuals: Residuals, cotangents: list[Any]) -> tuple[Any, ...]:
            of_inputs = residuals.run.backward(residuals.arrays, cotangents)
            of_operands = [ct for ct, is_ref in zip(of_inputs, are_refs, strict=True) if not is_ref]
            return (None,) * (num_outputs + num_own) + tuple(of_operands)

        return _custom_vjp(primal, fwd, bwd)(*operands)


def _widened(run: Run, own: list[Any], inputs: Sequence[Any], perturbed: tuple[bool, ...]) -> tuple[Run, list[Any]]:
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
    again, _, own = _run_underived(run.call, inputs, union)
    if again.outputs != run.outputs:
        raise RuntimeError(
            f"{run.call.name}.forward returned outputs of another structure when ctx.needs_input_grad was "
            f"{again.needs_input_grad} than when it was {run.needs_input_grad}. What forward returns must "
            "not depend on ctx.needs_input_grad."
        )
    return again, own
