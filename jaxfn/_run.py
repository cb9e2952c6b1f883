"""One run of the user's `forward`, and the `backward` and `jvp` that belong to it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import jax

from jaxfn import _compat
from jaxfn._arguments import Form
from jaxfn._attach import Mapping
from jaxfn._compat import current_trace, is_out_of_reach
from jaxfn._context import ContextState, FunctionCtx, SavedNames, restored, saved_by, show_saved_for_forward
from jaxfn._gradients import input_cotangents
from jaxfn._hooks import Hooks
from jaxfn._leaves import ARRAY_LAYOUT, Layout, as_array, is_inexact, is_staged, is_traced, split_saved
from jaxfn._marks import check_dirty, non_differentiable_positions
from jaxfn._methods import Methods
from jaxfn._outputs import Returned
from jaxfn._packing import pack, unpack
from jaxfn._provenance import Fingerprint
from jaxfn._tangents import input_tangents, output_tangents
from jaxfn._vmap import forward_with_vmap


class Call:
    """A way of calling a Function: everything about the arguments but the arrays."""

    def __init__(self, methods: Methods, form: Form, layouts: tuple[Layout, ...]) -> None:
        self.methods = methods
        self.name = methods.name
        self.form = form
        self.layouts = layouts
        self.are_refs = tuple(flag for layout in layouts for flag in layout.are_refs)  # one for each array leaf
        self.unperturbed = (False,) * len(self.are_refs)
        self.has_refs = any(self.are_refs)
        self._numbers = [layout.leaves[0] for layout in layouts if layout.is_number]
        self._may_close_over = methods.may_close_over or any(layout is not ARRAY_LAYOUT for layout in layouts)
        self._is_flat = all(layout.num_arrays == 1 for layout in layouts)

    @property
    def places_without_refs(self) -> list[int]:
        """Which array leaves are not references."""
        return [i for i, is_ref in enumerate(self.are_refs) if not is_ref]

    def without_refs(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The array leaves, or what belongs to them, that are not references."""
        if not self.has_refs:
            return leaves
        return [x for x, is_ref in zip(leaves, self.are_refs, strict=True) if not is_ref]

    def with_refs(self, leaves: Sequence[Any], stand_in: Any) -> Sequence[Any]:
        """The inverse: `stand_in` where the references are."""
        remaining = iter(leaves)
        return [stand_in if is_ref else next(remaining) for is_ref in self.are_refs]

    def refuse_perturbed_refs(self, perturbed: Sequence[bool]) -> None:
        """Raises where a reference itself is being differentiated, whose derivative would be lost silently."""
        if not self.has_refs:
            return
        owners = (i for i, layout in enumerate(self.layouts) for _ in range(layout.num_arrays))
        for owner, is_ref, is_perturbed in zip(owners, self.are_refs, perturbed, strict=True):
            if is_ref and is_perturbed:
                raise NotImplementedError(
                    f"{self.name}: {self.form.describe(owner)} is a jax.Ref that was made inside the function being "
                    "differentiated. What a Function reads from or writes to it would have no derivative. Make the Ref "
                    "outside, or return the value instead of writing it."
                )

    def closed_over_tracers(self) -> Iterator[object]:
        """The arrays that JAX traces and that `forward` sees beside the array leaves."""
        return chain(self.methods.closed_over_tracers(), *(layout.hidden_tracers() for layout in self.layouts))

    def closes_over_tracers(self) -> bool:
        """Whether there are any."""
        return self._may_close_over and any(True for _ in self.closed_over_tracers())

    def closed_over_operands(self) -> list[Any]:
        """Those of them that are no references, each once."""
        if not self._may_close_over:
            return []
        tracers = {id(x): x for x in self.closed_over_tracers() if is_traced(x)}
        return [x for x in tracers.values() if not _compat.is_ref(x)]

    def needs_input_grad(self, perturbed: tuple[bool, ...]) -> tuple[bool, ...]:
        """For each input, whether some array leaf of it is perturbed."""
        if self._is_flat:
            return perturbed
        flags = iter(perturbed)
        return tuple(any(list(islice(flags, layout.num_arrays))) for layout in self.layouts)

    def inputs(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs, with these arrays in their places."""
        remaining = iter(arrays)
        return tuple(layout.merge(remaining) for layout in self.layouts)

    def forward(self, arrays: Sequence[Any], perturbed: tuple[bool, ...]) -> tuple[ContextState, FunctionCtx, Returned]:
        """Runs the user's forward with these arrays in their places: the ctx that it filled and its outputs."""
        state = ContextState(self.form, self.needs_input_grad(perturbed))
        ctx = FunctionCtx(state)
        if self._numbers and not any(perturbed):
            state.numbers = self._numbers
        try:
            if self.methods.vmap is not None and any(map(is_traced, arrays)):
                returned = forward_with_vmap(self, ctx, arrays)
            else:
                returned = self.methods.forward(ctx, self.form, self.inputs(arrays))
        except jax.errors.UnexpectedTracerError as error:
            if self.closes_over_tracers():
                raise self.methods.out_of_reach("forward") from error
            raise
        if state.dirty and check_dirty(self.name, state, arrays, returned.arrays):
            self.methods.warn_of_dirty()
        if state.non_differentiable:
            marked = non_differentiable_positions(self.name, state, returned.originals)
            returned = returned._replace(non_differentiable=marked)
        return state, ctx, returned

    def undecorated(self, arrays: Sequence[Any]) -> Any:
        """The outputs as the user's forward computes them, without the Function's rule."""
        _, _, returned = self.forward(arrays, self.unperturbed)
        return returned.layout.merge(returned.arrays)


class Source(NamedTuple):
    """Where a residual comes from.

    Attributes:
      kind: "input", "output" or "own".
      place: its index among those.
      is_packed: whether it passes the saved-tensor hooks.
    """

    kind: str
    place: int
    is_packed: bool


class Saved(NamedTuple):
    """What a ctx keeps for `backward` and `jvp`, less its arrays.

    A saved input or output is not stored again: the residual *is* that input or output, and so it differentiates as
    that. An intermediate ("own") differentiates through the operations that made it.

    Attributes:
      names: what the kept values are called.
      layouts: one per kept value.
      sources: where each residual comes from.
      order: for each array leaf of the kept values, which residual it is.
    """

    names: SavedNames
    layouts: list[Layout]
    sources: list[Source]
    order: list[int]


def _save(
    ctx: FunctionCtx, inputs: Sequence[Any], outputs: Sequence[Any], hooks: Hooks | None
) -> tuple[Saved, list[jax.Array]]:
    """What this ctx keeps, and the intermediates among it."""
    names, values = saved_by(ctx)
    known = {id(x): ("output", i) for i, x in enumerate(outputs)}
    for i, x in enumerate(inputs):
        known[id(x)] = ("input", i)
    own: list[Any] = []
    layouts: list[Layout] = []
    places: dict[Source, int] = {}
    order: list[int] = []
    for position, value in enumerate(values):
        # Looking at an input or output again would cost more than asking first.
        arrays, layout = ((value,), ARRAY_LAYOUT) if id(value) in known else split_saved(value)
        layouts.append(layout)
        is_packed = hooks is not None and position < names.num_for_backward
        for array in arrays:
            if id(array) not in known:
                known[id(array)] = ("own", len(own))
                own.append(array)
            source = Source(*known[id(array)], is_packed)
            order.append(places.setdefault(source, len(places)))
    return Saved(names, layouts, list(places), order), [as_array(x) for x in own]


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
        own: Sequence[Any],
        inputs: Sequence[Any],
        returned: Returned,
    ) -> None:
        self.call = call
        self.perturbed = perturbed
        self.expected = expected  # what forward was told of `perturbed`, and of derivatives further out
        self.needs_input_grad = call.needs_input_grad(perturbed)
        self.read_needs_input_grad = state.read_needs_input_grad
        self.materialize_grads = state.materialize_grads
        self.hooks = hooks
        self.saved = saved
        self._packed: list[tuple[slice, Layout]] = []  # under hooks, for each residual, where what is kept of it is
        # An array inside a closure or an object is an intermediate too, though no residual.
        self.hides_arrays = any(map(Layout.hides_arrays, saved.layouts))
        self._program = current_trace() if self.hides_arrays and self._hides_staged() else None
        self.saves_intermediates = self.hides_arrays or any(is_inexact(x.dtype) for x in own)
        self.is_detached = True  # whether forward saw its inputs without their derivatives; see `_attached`
        # Where outputs lack a batch: by the uses of vmap that map this call, the innermost first, and by those that map
        # programs with it. See `_reverse`.
        self.mappings: list[Mapping] = []
        self.mappings_of_program: list[Mapping] = []
        self.fingerprint: Fingerprint | None = None  # of what forward computed, where it may have to run again
        self.outputs = returned.layout
        # Types only: a closure over the arrays themselves would leak their tracers into backward.
        self.input_avals = [jax.typeof(x) for x in inputs]
        self.output_avals = [jax.typeof(x) for x in returned.arrays]
        # Whether only one pattern of perturbed inputs is possible.
        self.has_one_pattern = [is_inexact(aval.dtype) for aval in self.input_avals].count(True) == 1

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
        """The same run, as if other inputs had been perturbed."""
        run = copy.copy(self)
        run.perturbed = perturbed
        run.needs_input_grad = self.call.needs_input_grad(perturbed)
        return run

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any], own: Sequence[Any]) -> tuple[Run, list[Any]]:
        """The arrays to keep for `backward` and `jvp`, and the run that knows them."""
        arrays = {"input": inputs, "output": outputs, "own": own}
        residuals = [arrays[source.kind][source.place] for source in self.saved.sources]
        return (self, residuals) if self.hooks is None else self._pack(self.hooks, residuals)

    def _pack(self, hooks: Hooks, residuals: Sequence[Any]) -> tuple[Run, list[Any]]:
        run = copy.copy(self)
        run._packed = []
        kept: list[Any] = []
        for source, residual in zip(self.saved.sources, residuals, strict=True):
            leaves, layout = pack(self.call.name, hooks, residual) if source.is_packed else ([residual], ARRAY_LAYOUT)
            run._packed.append((slice(len(kept), len(kept) + len(leaves)), layout))
            kept += leaves
        return run, kept

    def _unpack(self, hooks: Hooks, kept: Sequence[Any]) -> list[Any]:
        return [
            unpack(self.call.name, hooks, kept[where], layout) if source.is_packed else kept[where][0]
            for source, (where, layout) in zip(self.saved.sources, self._packed, strict=True)
        ]

    def _ctx(self, residuals: Sequence[Any]) -> tuple[ContextState, FunctionCtx]:
        """The ctx as `forward` left it."""
        if self._program is not None and self._program != current_trace():
            raise self.hidden_elsewhere()
        if self.hides_arrays and any(map(is_out_of_reach, self._hidden_tracers())):
            raise self.hidden_elsewhere()
        if self.hooks is not None:
            residuals = self._unpack(self.hooks, residuals)
        state = ContextState(self.call.form, self.needs_input_grad)
        state.num_outputs = len(self.outputs.layouts)
        state.materialize_grads = self.materialize_grads
        arrays = iter([residuals[i] for i in self.saved.order])
        return state, restored(state, self.saved.names, [layout.merge(arrays) for layout in self.saved.layouts])

    def hidden_elsewhere(self) -> Exception:
        """What to raise where a hidden array belongs to another program than the one that needs it."""
        return NotImplementedError(
            f"{self.call.name}.forward keeps a JAX array inside a closure or an object on ctx, and JAX has traced it "
            "into another program than backward, as it does in jit, scan and checkpoint, or differentiates it at "
            "another level. Save the array itself: ctx.save_for_backward(array), or ctx.name = array."
        )

    @contextmanager
    def _hidden_arrays_named(self) -> Generator[None]:
        """Says what is wrong where user code finds that a hidden array belongs elsewhere."""
        try:
            yield
        except jax.errors.UnexpectedTracerError as error:
            if self.hides_arrays:
                raise self.hidden_elsewhere() from error
            raise

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        """Calls the user's backward.

        Args:
          residuals: what `residuals` returned.
          cotangents: one for each array leaf of the outputs, symbolic zeros among them.

        Returns:
          A cotangent for each array leaf of the inputs, `None` for zero.
        """
        grad_outputs = self.outputs.grad_outputs(cotangents, self.output_avals, self.materialize_grads)
        if grad_outputs is None:
            return [None] * len(self.input_avals)
        _, ctx = self._ctx(residuals)
        with self._hidden_arrays_named():
            returned = self.call.methods.backward(ctx, grad_outputs)
        return input_cotangents(self.call, returned, self.call.layouts, self.input_avals, self.perturbed)

    def jvp(self, residuals: Sequence[Any], tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Calls the user's jvp.

        Args:
          residuals: what `residuals` returned.
          tangents: one for each array leaf of the inputs, `None` for zero.

        Returns:
          A tangent for each array leaf of the outputs, `None` for zero.
        """
        state, ctx = self._ctx(residuals)
        show_saved_for_forward(state)
        given = input_tangents(tangents, self.call.layouts, self.input_avals, self.materialize_grads)
        with self._hidden_arrays_named():
            returned = self.call.methods.jvp(ctx, given)
        return output_tangents(self.call.name, returned, self.outputs, self.output_avals)


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
    state, ctx, returned = call.forward(inputs, expected)
    saved, own = _save(ctx, inputs, returned.originals, hooks)
    return Run(call, perturbed, expected, state, hooks, saved, own, inputs, returned), returned.arrays, own
