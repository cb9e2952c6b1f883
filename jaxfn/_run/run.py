"""One run of the user's `forward`, the `backward` and `jvp` that belong to it, and the place that keeps its runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jaxfn._compat import (
    Batch,
    SymbolicZero,
    current_trace,
    enclosing_batches,
    is_out_of_reach,
    manual_axes_here,
)
from jaxfn._observation import OBSERVATION
from jaxfn._primitives.attach import Mapping
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
from jaxfn._run.provenance import Fingerprint, is_written_down
from jaxfn._values.arrays import is_inexact, is_staged, is_traced
from jaxfn._values.layouts import Layout
from jaxfn._values.varying import match_cotangents


class Run:
    """One run of `forward`, less its arrays: all that `backward` and `jvp` need besides the residuals."""

    def __init__(
        self,
        call: Call,
        perturbed: tuple[bool, ...],
        expected: tuple[bool, ...],
        state: ContextState,
        hooks: Hooks | None,
        saved: Saved,
        intermediates: Sequence[Any],
        inputs: Sequence[Any],
        returned: Returned,
    ) -> None:
        self.call = call
        self.perturbed = perturbed
        self.expected = expected  # what forward was told of `perturbed`, and of derivatives further out
        self.needs_input_grad = state.needs_input_grad if perturbed == expected else call.needs_input_grad(perturbed)
        self.read_needs_input_grad = state.read_needs_input_grad
        self.materialize_grads = state.materialize_grads
        self.hooks = hooks
        self.saved = saved
        # Traced values that `backward` or `jvp` closes over. The first residuals stand in for them, one for each.
        self.closed_over_by_rules: Sequence[Any] = ()
        self._packed: list[Layout] = []  # under hooks, for each residual, what is kept of it
        # An array inside a closure or an object is an intermediate too, though no residual.
        self.hides_arrays = any(map(Layout.hides_arrays, saved.layouts))
        self._program = current_trace() if self.hides_arrays and self._hides_staged() else None
        self.saves_intermediates = self.hides_arrays or any(is_inexact(x.dtype) for x in intermediates)
        self.is_detached = True  # whether forward saw its inputs without their derivatives; see `detached`
        # Where outputs lack a batch: by the uses of vmap that map this call, the innermost first, and by those that map
        # programs with it. See `unbatched_outputs`.
        self.mappings: list[Mapping] = []
        self.mappings_of_program: list[Mapping] = []
        self.fingerprint: Fingerprint | None = None  # of what forward computed, where it may have to run again
        self.outputs = returned.layout
        # Types only: a closure over the arrays themselves would leak their tracers into backward.
        self.input_avals = [jax.typeof(x) for x in inputs]
        self.output_avals = [jax.typeof(x) for x in returned.arrays]
        differentiable = [aval for aval in self.input_avals if is_inexact(aval.dtype)]
        self.has_one_pattern = len(differentiable) == 1  # of perturbed inputs
        self._is_on_mesh = not all(aval.sharding.mesh.empty for aval in differentiable)

    @property
    def hides_staged(self) -> bool:
        """Whether it hides arrays that belong to the program that forward was written into."""
        return self._program is not None

    def _hides_staged(self) -> bool:
        """Whether hidden arrays belong to the program that forward is being written into, which alone can use them."""
        from_outside = set(map(id, self.call.closed_over_tracers()))
        return any(is_staged(tracer) and id(tracer) not in from_outside for tracer in self._hidden_tracers())

    def _hidden_tracers(self) -> list[Any]:
        tracers = (tracer for layout in self.saved.layouts for tracer in layout.hidden_tracers())
        return list(filter(is_traced, tracers))

    def with_perturbed(self, perturbed: tuple[bool, ...]) -> Run:
        """The same run for another order of derivative, as if these inputs had been perturbed."""
        run = copy.copy(self)
        run.mappings_of_program = []
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
        return run, [*self.values_for_rules(intermediates), *kept]

    def closing_over(self, tracers: Sequence[Any]) -> Run:
        """The same run, where the rules close over these, whose values are the last of the intermediates."""
        run = copy.copy(self)
        run.closed_over_by_rules = tracers
        return run

    def values_for_rules(self, intermediates: Sequence[Any]) -> Sequence[Any]:
        """The values of what the rules close over, which are the last of the intermediates."""
        return intermediates[len(intermediates) - len(self.closed_over_by_rules) :]

    def num_kept(self) -> list[int]:
        """How many arrays are kept for each of `saved.sources`."""
        return [layout.num_arrays for layout in self._packed] or [1] * len(self.saved.sources)

    def _ctx(self, residuals: Sequence[Any]) -> tuple[ContextState, FunctionCtx, dict[int, Any]]:
        """The ctx as `forward` left it, and what stands in for tracers that a rule closes over, by their `id`."""
        if self._program is not None and self._program != current_trace():
            raise self.hidden_elsewhere()
        if self.hides_arrays and any(map(is_out_of_reach, self._hidden_tracers())):
            raise self.hidden_elsewhere()
        stand_ins = {id(x): value for x, value in zip(self.closed_over_by_rules, residuals, strict=False)}
        residuals = residuals[len(stand_ins) :]
        if self.hooks is not None:
            residuals = unpack(self.call.name, self.hooks, self.saved.sources, self._packed, residuals)
        state = ContextState(self.call.form, self.needs_input_grad)
        state.num_outputs = len(self.outputs.layouts)
        state.materialize_grads = self.materialize_grads
        arrays = iter([residuals[i] for i in self.saved.order])
        ctx = restored(state, self.saved.names, [layout.merge(arrays) for layout in self.saved.layouts])
        return state, ctx, stand_ins

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
            state, ctx, stand_ins = self._ctx(residuals)
            try:
                returned = self.call.methods.backward(ctx, grad_outputs, stand_ins)
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
            state, ctx, stand_ins = self._ctx(residuals)
            show_saved_for_forward(state)
            given = input_tangents(tangents, self.call.layouts, self.input_avals, self.materialize_grads)
            try:
                returned = self.call.methods.jvp(ctx, given, stand_ins)
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


@jax.tree_util.register_static
class Site:
    """One place in a program where a Function is called, and what is the same for all that JAX makes of it there.

    # Note: what JAX keeps of a call, and what has to travel with it

    JAX may trace a call once and differentiate it later, in another order, or more than once:

        f = jax.jit(F.apply)      the primal runs: the Site is made here, with the hooks that are in force
        jax.grad(f)               fwd runs, when those hooks may be gone: it asks the Site for them
        a scan, twice             fwd runs for each pattern of perturbed inputs, bwd for each; the residuals of all
                                  patterns must be one pytree, as JAX keeps only the last one's structure

    A closure would not do: JAX keeps the trace, and calls no function again to make one. So a Site is the static part
    of a pytree node without leaves. It is the first operand, the primal's and fwd's alike, and it is in the residuals.

    Sites are equal where what a call there means is: JAX's coming custom_vjp keeps its traces by that, and would trace
    every call anew.

    Attributes:
      hooks: the saved-tensor hooks in force at the call. (JAX may run what differentiates it later, out of the block.)
      num_around: how many uses of `jax.vmap` map a derivative that is being taken of the call. Others map the call
        itself, so that its derivative is of the mapped call.
      outputs: the structure of what the primal returned, where it ran.
      unbatched: where the call was mapped as part of a program, the outputs that did not depend on which batch.
      runs: the runs of `forward` there; see `_derivatives/reverse.py`.
    """

    def __init__(self, hooks: Hooks | None) -> None:
        self.hooks = hooks
        self.num_around = enclosing_batches().num_around
        self.unbatched: set[tuple[Batch, int]] = set()
        self.outputs: OutputLayout | None = None
        self.runs: list[Run] = []

    def check_outputs(self, run: Run) -> None:
        """Raises where forward returned another structure than the primal, which JAX cannot put together."""
        if self.outputs is not None and self.outputs != run.outputs:
            raise RuntimeError(
                f"{run.call.name}.forward returned {run.outputs!r} when ctx.needs_input_grad was "
                f"{run.needs_input_grad}, and {self.outputs!r} when nothing was differentiated. What forward returns, "
                "and marks as non-differentiable, must not depend on ctx.needs_input_grad."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and self.hooks is other.hooks and self.num_around == other.num_around

    def __hash__(self) -> int:
        return hash(id(self.hooks))


def _present(cotangents: Sequence[Any]) -> list[Any]:
    return [x for x in cotangents if not isinstance(x, SymbolicZero)]


def run_forward(
    call: Call,
    inputs: Sequence[Any],
    perturbed: tuple[bool, ...],
    hooks: Hooks | None,
    expected: tuple[bool, ...] | None = None,
) -> tuple[Run, list[Any], list[Any]]:
    """Runs forward.

    Args:
      call: the call.
      inputs: its array leaves.
      perturbed: which of them are being differentiated.
      hooks: the saved-tensor hooks that were in force where the Function was applied.
      expected: which of them forward is told are being differentiated, `perturbed` and more.

    Returns:
      The run, the outputs' array leaves, and the intermediates that were saved.
    """
    expected = perturbed if expected is None else expected
    if OBSERVATION.value is None:  # as nearly always
        return _run_forward(call, perturbed, hooks, expected, inputs)
    return observed_forward(partial(_run_forward, call, perturbed, hooks, expected), call, inputs)


def _run_forward(
    call: Call, perturbed: tuple[bool, ...], hooks: Hooks | None, expected: tuple[bool, ...], inputs: Sequence[Any]
) -> tuple[Run, list[Any], list[Any]]:
    with jax.named_scope(call.scopes.forward):
        state, ctx, returned = call_forward(call, inputs, expected)
    saved, intermediates = save(ctx, inputs, returned.originals, hooks)
    return (
        Run(call, perturbed, expected, state, hooks, saved, intermediates, inputs, returned),
        returned.arrays,
        intermediates,
    )
