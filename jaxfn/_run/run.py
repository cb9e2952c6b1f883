"""One run of the user's `forward`, the `backward` and `jvp` that belong to it, and the place that keeps its runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jaxfn._compat import SymbolicZero, manual_axes_here
from jaxfn._observation import OBSERVATION
from jaxfn._protocol.context import ContextState, FunctionCtx, restored, show_saved_for_forward
from jaxfn._protocol.gradients import input_cotangents
from jaxfn._protocol.outputs import OutputLayout, Returned
from jaxfn._protocol.saved_tensor_hooks import Hooks
from jaxfn._protocol.tangents import input_tangents, output_tangents
from jaxfn._run.call import Call
from jaxfn._run.device_sums import refuse_repeated_sums
from jaxfn._run.forward import Saved, call_forward, save
from jaxfn._run.logging import hand_over_logs
from jaxfn._run.observed import observed_backward, observed_forward, observed_jvp
from jaxfn._run.packing import pack, unpack
from jaxfn._values.arrays import is_inexact, is_written_down
from jaxfn._values.layouts import Layout
from jaxfn._values.varying import match_cotangents


class Run:
    """One run of `forward`, less its arrays: all that `backward` and `jvp` need besides the residuals."""

    def __init__(
        self,
        call: Call,
        told: tuple[bool, ...],
        state: ContextState,
        hooks: Hooks | None,
        saved: Saved,
        inputs: Sequence[Any],
        returned: Returned,
    ) -> None:
        self.call = call
        self.told = told  # which array leaves forward was told are being differentiated
        self.perturbed = told
        self.needs_input_grad = state.needs_input_grad
        self.read_needs_input_grad = state.read_needs_input_grad
        self.materialize_grads = state.materialize_grads
        self.hooks = hooks
        self.saved = saved
        self._packed: list[Layout] = []  # under hooks, for each residual, what is kept of it
        self.hides_arrays = any(map(Layout.hides_arrays, saved.layouts))
        self.outputs = returned.layout
        # Types only: a closure over the arrays themselves would leak their tracers into backward.
        self.input_avals = [jax.typeof(x) for x in inputs]
        self.output_avals = [jax.typeof(x) for x in returned.arrays]
        differentiable = [aval for aval in self.input_avals if is_inexact(aval.dtype)]
        self._is_on_mesh = not all(aval.sharding.mesh.empty for aval in differentiable)

    def with_perturbed(self, perturbed: tuple[bool, ...]) -> Run:
        """The same run for another order of derivative, as if these inputs had been perturbed."""
        run = copy.copy(self)
        run.perturbed = perturbed
        run.needs_input_grad = self.call.needs_input_grad(perturbed)
        return run

    def residuals(
        self, inputs: Sequence[Any], outputs: Sequence[Any], intermediates: Sequence[Any]
    ) -> tuple[Run, list[Any]]:
        """The arrays to keep for `backward` and `jvp`, and the run that knows them."""
        arrays = {"input": inputs, "output": outputs, "intermediate": intermediates}
        kept = [arrays[source.kind][source.place] for source in self.saved.sources]
        run = self
        if self.hooks is not None:
            run = copy.copy(self)
            with jax.named_scope(self.call.scopes.forward):
                run._packed, kept = pack(self.call.name, self.hooks, self.saved.sources, kept)
        return run, kept

    def num_kept(self) -> list[int]:
        """How many arrays are kept for each of `saved.sources`."""
        return [layout.num_arrays for layout in self._packed] or [1] * len(self.saved.sources)

    def _ctx(self, residuals: Sequence[Any]) -> tuple[ContextState, FunctionCtx]:
        """The ctx as `forward` left it."""
        if self.hooks is not None:
            residuals = unpack(self.call.name, self.hooks, self.saved.sources, self._packed, residuals)
        state = ContextState(self.call.form, self.needs_input_grad)
        state.num_outputs = len(self.outputs.layouts)
        state.materialize_grads = self.materialize_grads
        arrays = iter([residuals[i] for i in self.saved.order])
        ctx = restored(state, self.saved.names, [layout.merge(arrays) for layout in self.saved.layouts])
        return state, ctx

    def hidden_elsewhere(self) -> Exception:
        """What to raise where a hidden array belongs to another program than the one that needs it."""
        return NotImplementedError(
            f"{self.call.name}.forward keeps a JAX array inside a closure or an object on ctx, and JAX has traced it "
            "into another program than backward, as it does in jit, scan and checkpoint, or differentiates it at "
            "another level. Save the array itself: ctx.save_for_backward(array), or ctx.name = array."
        )

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        """Calls the user's backward.

        Args:
          residuals: what `residuals` returned.
          cotangents: one for each array leaf of the outputs, symbolic zeros among them.

        Returns:
          A cotangent for each array leaf of the inputs, `None` for zero.
        """
        if OBSERVATION.value is None:  # as nearly always
            return self._backward(residuals, cotangents)
        return observed_backward(self, self._backward, residuals, cotangents)

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        grad_outputs = self.outputs.grad_outputs(cotangents, self.output_avals, self.materialize_grads)
        if grad_outputs is None:
            return [None] * len(self.input_avals)
        axes = manual_axes_here()
        is_distributed = bool(axes) and not self.hides_arrays
        if is_distributed and not is_written_down([*residuals, *_present(cotangents)]):
            return self._written_down(residuals, cotangents)
        with jax.named_scope(self.call.scopes.backward):
            state, ctx = self._ctx(residuals)
            try:
                returned = self.call.methods.backward(ctx, grad_outputs)
            except jax.errors.UnexpectedTracerError as error:
                if self.hides_arrays:
                    raise self.hidden_elsewhere() from error
                raise
            try:
                unplaced = input_cotangents(
                    self.call.name, self.call.form, returned, self.call.layouts, self.input_avals, self.perturbed
                )
                gradients = match_cotangents(unplaced, self.input_avals) if axes or self._is_on_mesh else unplaced
                if is_distributed:
                    given = _present(cotangents)
                    refuse_repeated_sums(self.call, self.input_avals, residuals, given, unplaced, gradients)
            except (RuntimeError, TypeError) as error:
                self.call.methods.add_place("backward", error)
                raise
        return hand_over_logs(self.call.name, "backward", state, gradients) if state.logged else gradients

    def _written_down(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        """`backward` as a part of a program, which can be looked through, where JAX is not writing one."""

        def program(residuals: list[Any], present: list[Any]) -> list[jax.Array | None]:
            values = iter(present)
            return self._backward(residuals, [x if isinstance(x, SymbolicZero) else next(values) for x in cotangents])

        return jax.jit(program)(list(residuals), _present(cotangents))

    def jvp(self, residuals: Sequence[Any], tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Calls the user's jvp.

        Args:
          residuals: what `residuals` returned.
          tangents: one for each array leaf of the inputs, `None` for zero.

        Returns:
          A tangent for each array leaf of the outputs, `None` for zero.
        """
        if OBSERVATION.value is None:
            return self._jvp(residuals, tangents)
        return observed_jvp(self, self._jvp, residuals, tangents)

    def _jvp(self, residuals: Sequence[Any], tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        with jax.named_scope(self.call.scopes.jvp):
            state, ctx = self._ctx(residuals)
            show_saved_for_forward(state)
            given = input_tangents(tangents, self.call.layouts, self.input_avals, self.materialize_grads)
            try:
                returned = self.call.methods.jvp(ctx, given)
            except jax.errors.UnexpectedTracerError as error:
                if self.hides_arrays:
                    raise self.hidden_elsewhere() from error
                raise
            try:
                pushed = output_tangents(self.call.name, returned, self.outputs, self.output_avals)
            except (RuntimeError, TypeError) as error:
                self.call.methods.add_place("jvp", error)
                raise
        return hand_over_logs(self.call.name, "jvp", state, pushed) if state.logged else pushed


def _present(cotangents: Sequence[Any]) -> list[Any]:
    return [x for x in cotangents if not isinstance(x, SymbolicZero)]


def run_forward(
    call: Call, inputs: Sequence[Any], told: tuple[bool, ...], hooks: Hooks | None
) -> tuple[Run, list[Any], list[Any]]:
    """Runs forward.

    Args:
      call: the call.
      inputs: its array leaves.
      told: which of them forward is told are being differentiated.
      hooks: the saved-tensor hooks that were in force where the Function was applied.

    Returns:
      The run, the outputs' array leaves, and the intermediates that were saved.
    """
    if OBSERVATION.value is None:  # as nearly always
        return _run_forward(call, told, hooks, inputs)
    return observed_forward(partial(_run_forward, call, told, hooks), call, inputs)


def _run_forward(
    call: Call, told: tuple[bool, ...], hooks: Hooks | None, inputs: Sequence[Any]
) -> tuple[Run, list[Any], list[Any]]:
    with jax.named_scope(call.scopes.forward):
        state, ctx, returned = call_forward(call, inputs, told)
    saved, intermediates = save(ctx, inputs, returned.originals, hooks)
    run = Run(call, told, state, hooks, saved, inputs, returned)
    return run, returned.arrays, intermediates
