"""One call of a Function (`CallSpec`), and one forward pass with the `backward` and `jvp` that belong to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr

from jaxfn._boundary import (
    ForwardOutputs,
    OutputSpec,
    check_dirty,
    input_cotangents,
    input_tangents,
    non_differentiable_outputs,
    output_tangents,
)
from jaxfn._compat import (
    NO_OPERATIONS,
    Operations,
    StagedEqns,
    is_staged,
    manual_axes_here,
    staging_traces,
    variables_under_tracers,
)
from jaxfn._context import ContextState, FunctionCtx, SavedNames, collect_saved, restore_ctx, use_saved_for_forward
from jaxfn._hooks import Hooks, PackedResiduals, pack
from jaxfn._jaxpr import ArrayIdentity, StagedFunction
from jaxfn._mesh_types import match_cotangents
from jaxfn._methods import UserMethods
from jaxfn._observe import OBSERVATION, Label, Observation, emit_logs, label_arrays, label_present, leaf_names, observe
from jaxfn._primitives import stop
from jaxfn._signature import InputSpec
from jaxfn._tree import ARRAY_SPEC, TreeSpec, as_array, flatten_saved, is_inexact, is_traced
from jaxfn._vmap_method import forward_with_vmap


class CallSpec:
    """The static part of a call: the Function's methods, and the names and tree spec of each input."""

    def __init__(self, methods: UserMethods, inputs: InputSpec) -> None:
        self.methods = methods
        self.name = methods.name
        self.inputs = inputs

    @property
    def may_capture_tracers(self) -> bool:
        """Whether `forward` may use tracers other than the array leaves: in a closure, or in an object it is passed."""
        return self.inputs.has_objects or self.methods.may_capture_tracers

    def scope(self, method: str) -> Any:
        """Names the operations of a method in compiled programs and profiles."""
        return jax.named_scope(f"{self.name}.{method}")

    def check_no_perturbed_refs(self, perturbed: Sequence[bool]) -> None:
        """Raises if a reference itself is being differentiated, since its derivative would be dropped silently."""
        for index, is_ref, is_perturbed in zip(self.inputs.per_leaf(), self.inputs.are_refs, perturbed, strict=True):
            if is_ref and is_perturbed:
                raise NotImplementedError(
                    f"{self.name}: {self.inputs.names.describe(index)} is a jax.Ref that was created inside the "
                    "function being differentiated. What a Function reads from or writes to it would have no "
                    "derivative. Create the Ref outside, or return the value instead of writing it."
                )


class ResidualSource(NamedTuple):
    """The origin of a residual.

    Attributes:
      kind: "input", "output" or "intermediate".
      idx: Its index among the arrays of that kind.
      is_packed: Whether saved-tensor hooks pack it.
    """

    kind: str
    idx: int
    is_packed: bool


class SavedSpec(NamedTuple):
    """The static part of the values that a ctx stores for `backward` and `jvp`.

    A saved input or output is not stored again: the residual *is* that input or output, and has its derivative. An
    intermediate has the derivative of the operations that computed it.

    Attributes:
      names: The names of the values.
      trees: The tree spec of each value.
      sources: The origin of each residual.
      order: For each array leaf of the values, the index of its residual.
    """

    names: SavedNames
    trees: list[TreeSpec]
    sources: list[ResidualSource]
    order: list[int]

    def leaf_of(self, kind: str, index: int) -> int:
        """Returns the index of the first array leaf that has this origin."""
        return next(i for i, residual in enumerate(self.order) if self.sources[residual][:2] == (kind, index))

    def residual_names(self) -> list[str]:
        """Returns, for each residual, the names under which it was saved."""
        names: list[list[str]] = [[] for _ in self.sources]
        for residual, name in zip(self.order, leaf_names(self._names_on_ctx(), self.trees), strict=True):
            names[residual].append(name)
        return [", ".join(own) for own in names]

    def _names_on_ctx(self) -> Iterable[str]:
        yield from (f"saved_tensors[{i}]" for i in range(self.names.num_tensors))
        yield from self.names.named
        yield from (f"saved_for_forward[{i}]" for i in range(self.names.num_for_forward or 0))
        yield from (f"ctx.{name}" for name in self.names.attributes)


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass, without its arrays: everything that `backward` and `jvp` need except the residuals.

    Attributes:
      spec: The call.
      seen_flags: The `ctx.needs_input_grad` of `forward`, for each array leaf.
      perturbed: The `ctx.needs_input_grad` of `backward`, for each array leaf.
      reads_flags: Whether `forward` read `ctx.needs_input_grad`.
      materialize_grads: The argument of `ctx.set_materialize_grads`.
      hooks: The saved-tensor hooks that were active at the call.
      packed: The static part of packed residuals, under hooks.
      saved: The static part of the values on ctx.
      captures_arrays: Whether arrays are in closures or objects on ctx, where they have no derivative.
      derivative_captures: The tracers that `backward` and `jvp` capture. Their present values are the first residuals.
      program: A weak reference to the trace in which `forward` ran; `None` if it ran eagerly.
      operations: The operations that `forward` staged there, if it may have to run again.
      outputs: The structure of the outputs.
      input_avals, output_avals: The types of the array leaves. (Arrays would leak their tracers into `backward`.)
      stopped: The variables of the inputs of `forward` (after `stop`) in the jaxpr being traced.
      watched: Weak references to arrays that `forward` created in an eager higher derivative. If `backward` uses one
        that was not saved on ctx, a derivative raises.
    """

    spec: CallSpec
    seen_flags: tuple[bool, ...]
    perturbed: tuple[bool, ...]
    reads_flags: bool
    materialize_grads: bool
    hooks: Hooks | None
    packed: PackedResiduals | None
    saved: SavedSpec
    captures_arrays: bool
    derivative_captures: Sequence[Any]
    program: Any
    operations: Operations
    outputs: OutputSpec
    input_avals: Sequence[Any]
    output_avals: Sequence[Any]
    stopped: Collection[Any]
    watched: Sequence[weakref.ref[Any]] = ()

    def with_perturbed(self, perturbed: tuple[bool, ...]) -> ForwardPass:
        """Returns the forward pass for derivatives with respect to these array leaves."""
        if perturbed == self.perturbed:
            return self
        forward_pass = object.__new__(ForwardPass)  # in a quarter of the time of `dataclasses.replace`
        vars(forward_pass).update(vars(self), perturbed=perturbed)
        return forward_pass

    @property
    def differentiable(self) -> list[int]:
        """The indices of the outputs' array leaves that have a derivative."""
        marked = self.outputs.non_differentiable
        return [i for i, aval in enumerate(self.output_avals) if is_inexact(aval.dtype) and i not in marked]

    @property
    def saves_inputs(self) -> bool:
        """Whether all inputs that have a derivative are saved."""
        saved = {source.idx for source in self.saved.sources if source.kind == "input"}
        return all(i in saved for i, aval in enumerate(self.input_avals) if is_inexact(aval.dtype))

    def residuals(
        self, inputs: Sequence[Any], outputs: Sequence[Any], intermediates: Sequence[Any], captured: Sequence[Any]
    ) -> tuple[ForwardPass, list[Any]]:
        """Returns the arrays to save for `backward` and `jvp`, and the forward pass that can read them."""
        arrays = {"input": inputs, "output": outputs, "intermediate": intermediates}
        saved = [arrays[source.kind][source.idx] for source in self.saved.sources]
        if self.hooks is None:
            return self, [*captured, *saved]
        with self.spec.scope("forward"):
            packed, saved = pack(self.spec.name, self.hooks, [s.is_packed for s in self.saved.sources], saved)
        return replace(self, packed=packed), [*captured, *saved]

    def _restore_ctx(self, residuals: Sequence[Any]) -> tuple[ContextState, FunctionCtx, dict[int, Any]]:
        """Returns the ctx as `forward` left it, and the present values of captured tracers by their `id`."""
        captured = {id(x): value for x, value in zip(self.derivative_captures, residuals, strict=False)}
        residuals = residuals[len(captured) :]
        if self.packed is not None:
            residuals = self.packed.unpack(residuals)
        inputs = self.spec.inputs
        state = ContextState(inputs.names, inputs.needs_input_grad(self.perturbed))
        state.num_outputs = len(self.outputs.trees)
        state.materialize_grads = self.materialize_grads
        arrays = iter([residuals[i] for i in self.saved.order])
        ctx = restore_ctx(state, self.saved.names, [tree.unflatten(arrays) for tree in self.saved.trees])
        return state, ctx, captured

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        """Calls the user's `backward`.

        Args:
          residuals: The arrays that `residuals` returned.
          cotangents: One for each array leaf of the outputs, `None` for zero.

        Returns:
          A cotangent for each array leaf of the inputs, `None` for zero.
        """
        return self._call_rule("backward", residuals, cotangents)

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        grad_outputs = self.outputs.grad_outputs(cotangents, self.output_avals, self.materialize_grads)
        if grad_outputs is None:
            return [None] * len(self.input_avals)
        spec, methods = self.spec, self.spec.methods
        with spec.scope("backward"):
            state, ctx, captured = self._restore_ctx(residuals)
            returned = methods.backward(ctx, grad_outputs, captured)
            try:
                gradients = input_cotangents(spec.name, spec.inputs, returned, self.input_avals, self.perturbed)
                if manual_axes_here() or self._is_on_mesh():
                    gradients = match_cotangents(gradients, self.input_avals)
            except (RuntimeError, TypeError) as error:
                methods.add_location("backward", error)
                raise
        return emit_logs(spec.name, "backward", state.logged, gradients) if state.logged else gradients

    def _is_on_mesh(self) -> bool:
        return not all(aval.sharding.mesh.empty for aval in self.input_avals if is_inexact(aval.dtype))

    def jvp(self, residuals: Sequence[Any], tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Calls the user's `jvp`.

        Args:
          residuals: The arrays that `residuals` returned.
          tangents: One for each array leaf of the inputs, `None` for zero.

        Returns:
          A tangent for each array leaf of the outputs, `None` for zero.
        """
        return self._call_rule("jvp", residuals, tangents)

    def _jvp(self, residuals: Sequence[Any], tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        spec, methods = self.spec, self.spec.methods
        with spec.scope("jvp"):
            state, ctx, captured = self._restore_ctx(residuals)
            use_saved_for_forward(state)
            user_tangents = input_tangents(tangents, spec.inputs, self.input_avals, self.materialize_grads)
            returned = methods.jvp(ctx, user_tangents, captured)
            try:
                results = output_tangents(spec.name, returned, self.outputs, self.output_avals)
            except (RuntimeError, TypeError) as error:
                methods.add_location("jvp", error)
                raise
        return emit_logs(spec.name, "jvp", state.logged, results) if state.logged else results

    def _call_rule(self, method: str, residuals: Sequence[Any], vectors: Sequence[Any]) -> list[jax.Array | None]:
        """Calls `backward` or `jvp`; raises if it uses an array of a trace that has ended."""
        rule = self._backward if method == "backward" else self._jvp
        if OBSERVATION.value in (Observation.RESIDUALS, Observation.VALUES):
            rule = partial(self._observed, method)
        try:
            is_captured = self.captures_arrays and self._ctx_captures(is_staged)
            if not ((is_captured or self.spec.methods.derivatives_capture_staged()) and self._has_ended()):
                return rule(residuals, vectors)
            args = list(residuals), list(vectors)
            closed, shapes = jax.make_jaxpr(rule, return_shape=True)(*args)
        except jax.errors.UnexpectedTracerError as error:
            raise self._escaped_tracer_error(method) from error
        self.check_program(method, closed.consts)
        results = map(as_array, eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args)))
        return [None if x is None else next(results) for x in shapes]

    def _has_ended(self) -> bool:
        """Whether the trace in which `forward` ran has ended."""
        return self.program is not None and self.program() not in staging_traces()

    def check_program(self, method: str, consts: Sequence[Any]) -> None:
        """Raises if an array that a method used belongs to a trace that has ended.

        To JAX, such a tracer is a constant, and compiling it fails.
        """
        if self._has_ended() and any(map(is_staged, consts)):
            raise self._escaped_tracer_error(method)

    def _escaped_tracer_error(self, method: str) -> Exception:
        is_on_ctx = method != "forward" and self._ctx_captures(is_traced)
        return (
            NotImplementedError(self.captured_by_ctx()) if is_on_ctx else self.spec.methods.escaped_tracer_error(method)
        )

    def captured_by_ctx(self) -> str:
        """Returns the message for an array in an object on ctx, needed in another trace or differentiated."""
        who = f"{self.spec.name} takes a jax.Ref and" if self.spec.inputs.has_refs else f"{self.spec.name}.forward"
        return (
            f"{who} stores a JAX array inside a closure or an object on ctx, which has no derivative. Save "
            "the array itself: ctx.save_for_backward(array), or ctx.name = array."
        )

    def _ctx_captures(self, are_sought: Callable[[Any], bool]) -> bool:
        return any(tree.captures_arrays(are_sought) for tree in self.saved.trees)

    def _observed(self, method: str, residuals: Sequence[Any], vectors: Sequence[Any]) -> list[jax.Array | None]:
        """Calls `backward` or `jvp` with labels on its residuals and, for `Observation.VALUES`, on all its arrays."""
        name = self.spec.name
        rule = self._backward if method == "backward" else self._jvp
        first = len(self.derivative_captures)
        residuals = [*residuals[:first], *label_arrays(residuals[first:], self._residual_labels(method))]
        if OBSERVATION.value is Observation.RESIDUALS:
            return rule(residuals, vectors)
        inputs, outputs = input_names(self.spec), self._output_names()
        if method == "backward":
            role, names, result_role, result_names = "grad_output", outputs, "gradient", inputs
        else:
            role, names, result_role, result_names = "tangent", inputs, "tangent", outputs
        return observe(
            name,
            method,
            lambda vectors: rule(residuals, vectors),
            vectors,
            role,
            names,
            lambda results: label_present(results, name, method, result_role, result_names),
        )

    def _residual_labels(self, method: str) -> list[Label]:
        """Returns a label for each residual, or for each array of its packed form."""
        counts = [1] * len(self.saved.sources) if self.packed is None else [t.num_arrays for t in self.packed.trees]
        labels: list[Label] = []
        for source, name, count in zip(self.saved.sources, self.saved.residual_names(), counts, strict=True):
            labels += [Label(self.spec.name, method, "saved", name, source.kind, source.is_packed)] * count
        return labels

    def label_results(self, outputs: list[Any], intermediates: list[Any]) -> tuple[list[Any], list[Any]]:
        """Labels the outputs and the saved intermediates of `forward`."""
        names = [""] * len(intermediates)
        for source, name in zip(self.saved.sources, self.saved.residual_names(), strict=True):
            if source.kind == "intermediate":
                names[source.idx] = name
        function = self.spec.name
        return (
            label_present(outputs, function, "forward", "output", self._output_names()),
            label_present(intermediates, function, "forward", "saved", names),
        )

    def _output_names(self) -> list[str]:
        """Returns a name for each array leaf of the outputs."""
        trees = self.outputs.trees
        return leaf_names(map(str, range(len(trees))), trees)


def input_names(spec: CallSpec) -> list[str]:
    """Returns a name for each array leaf of the inputs."""
    return leaf_names(spec.inputs.names.names, spec.inputs.trees)


class ForwardResult(NamedTuple):
    """A forward pass with its arrays.

    Attributes:
      forward_pass: Everything but the arrays.
      outputs: The array leaves of the outputs.
      intermediates: The saved arrays that are neither inputs nor outputs.
      replay, consts: `forward` as a jaxpr, if it was staged, and the arrays that it captures.
      captured: The values of the tracers that `backward` and `jvp` capture.
    """

    forward_pass: ForwardPass
    outputs: Sequence[Any]
    intermediates: Sequence[Any]
    replay: StagedFunction | None = None
    consts: Sequence[Any] = ()
    captured: Sequence[Any] = ()


def run_forward(
    spec: CallSpec, arrays: Sequence[Any], seen_flags: tuple[bool, ...], hooks: Hooks | None
) -> ForwardResult:
    """Runs `forward`.

    Args:
      spec: The call.
      arrays: The array leaves of the inputs.
      seen_flags: Which of them are marked as differentiated in the flags of `forward`.
      hooks: The saved-tensor hooks that were active at the call.
    """
    if OBSERVATION.value is not Observation.VALUES:  # as nearly always
        return _run_forward(spec, arrays, seen_flags, hooks)
    return observe(
        spec.name,
        "forward",
        lambda arrays: _run_forward(spec, arrays, seen_flags, hooks),
        arrays,
        "input",
        input_names(spec),
        lambda result: ForwardResult(
            result.forward_pass, *result.forward_pass.label_results([*result.outputs], [*result.intermediates])
        ),
    )


def _run_forward(
    spec: CallSpec, arrays: Sequence[Any], seen_flags: tuple[bool, ...], hooks: Hooks | None
) -> ForwardResult:
    eqns = StagedEqns()
    captured_before = spec.methods.derivative_captures()
    with spec.scope("forward"):
        state, ctx, returned = call_forward(spec, arrays, seen_flags)
        if any(seen_flags):
            _check_python_numbers(spec, arrays, seen_flags, returned.spec)
    outputs = returned.arrays
    if eqns.make_refs() and not spec.may_capture_tracers:
        outputs = stop(outputs)  # values read from a reference have a derivative in JAX
    saved, intermediates = _save(ctx, arrays, returned.originals, hooks)
    # A tracer that was not captured before `forward` ran was stored outside ctx by it.
    captured = [x for x in spec.methods.derivative_captures() if any(x is y for y in captured_before)]
    forward_pass = ForwardPass(
        spec,
        seen_flags,
        spec.inputs.unperturbed,
        state.read_needs_input_grad,
        state.materialize_grads,
        hooks,
        None,
        saved,
        any(tree.captures_arrays() for tree in saved.trees),
        captured,
        eqns.program,
        eqns.operations() if intermediates else NO_OPERATIONS,
        returned.spec,
        [jax.typeof(x) for x in arrays],
        [jax.typeof(x) for x in returned.arrays],
        variables_under_tracers(arrays),
    )
    return ForwardResult(forward_pass, outputs, intermediates)


def call_forward(
    spec: CallSpec, arrays: Sequence[Any], perturbed: tuple[bool, ...]
) -> tuple[ContextState, FunctionCtx, ForwardOutputs]:
    """Calls the user's `forward`; returns the ctx that it filled and its outputs, without the Function's rule."""
    methods, inputs = spec.methods, spec.inputs
    state = ContextState(inputs.names, inputs.needs_input_grad(perturbed))
    ctx = FunctionCtx(state)
    if inputs.python_numbers and not any(perturbed):
        state.python_numbers = inputs.python_numbers
    try:
        if methods.vmap is not None and any(map(is_traced, arrays)):
            returned = forward_with_vmap(methods, inputs, ctx, arrays)
        else:
            values = inputs.unflatten(arrays)
            returned = methods.forward(ctx, inputs, values)
            if inputs.mutable:
                inputs.check_inputs_unchanged(spec.name, values, arrays, returned.originals)
    except jax.errors.UnexpectedTracerError as error:
        raise methods.escaped_tracer_error("forward") from error
    if state.dirty and check_dirty(spec.name, state, arrays, returned.arrays):
        methods.warn_of_dirty()
    if state.non_differentiable:
        marked = non_differentiable_outputs(spec.name, state, arrays, returned.originals, methods.warn_once)
        returned = returned._replace(spec=OutputSpec(returned.spec.container, returned.spec.trees, marked))
    if state.logged:
        returned = returned._replace(arrays=emit_logs(spec.name, "forward", state.logged, returned.arrays))
    return state, ctx, returned


def _check_python_numbers(
    spec: CallSpec, arrays: Sequence[Any], perturbed: Sequence[bool], outputs: OutputSpec
) -> None:
    """Raises if an output is a Python number that depends on an input that is being differentiated.

    Such a number can only come from concrete arrays, so `forward` is traced to see whether it needs their values.
    """
    inputs, methods = spec.inputs, spec.methods
    known = {id(leaf) for tree in inputs.trees for leaf in tree.leaves}
    numbers = {
        i: leaf
        for i, tree in enumerate(outputs.trees)
        for leaf in tree.leaves
        if type(leaf) in (float, complex) and id(leaf) not in known
    }
    indices = [i for i, flag in enumerate(perturbed) if flag and not is_traced(arrays[i])]
    if not (numbers and indices):
        return

    def forward(values: Sequence[Any]) -> None:
        again = dict(enumerate(arrays)) | dict(zip(indices, values, strict=True))
        ctx = FunctionCtx(ContextState(inputs.names, inputs.needs_input_grad(tuple(perturbed))))
        methods.forward(ctx, inputs, inputs.unflatten(list(again.values())))

    try:
        jax.eval_shape(forward, [arrays[i] for i in indices])
    except Exception as error:  # code that needs concrete values may raise anything
        outputs_text = " and ".join(f"output {i} ({number!r})" for i, number in numbers.items())
        raise TypeError(_PYTHON_NUMBER.format(name=spec.name, outputs=outputs_text)) from error


_PYTHON_NUMBER = (
    "{name}.forward returned a Python number as {outputs}, which it seems to compute from an input that is being "
    "differentiated. A Python number has no derivative. Return the array, without float(...) or .item(); if it is to "
    "have no derivative, mark it with ctx.mark_non_differentiable(...)."
)


def _save(
    ctx: FunctionCtx, inputs: Sequence[Any], outputs: Sequence[Any], hooks: Hooks | None
) -> tuple[SavedSpec, list[jax.Array]]:
    """Returns the static part of the values on a ctx, and the intermediates among their arrays."""
    names, values = collect_saved(ctx)
    known = {id(x): ("input", i) for i, x in enumerate(inputs)}
    identity: ArrayIdentity | None = None
    by_key: dict[Hashable, tuple[str, int]] = {}
    output_ids = set(map(id, outputs))
    intermediates: list[Any] = []
    trees: list[TreeSpec] = []
    indices: dict[ResidualSource, int] = {}
    order: list[int] = []
    for position, value in enumerate(values):
        # Flattening an input or output again would cost more than this test.
        is_array = id(value) in known or id(value) in output_ids
        arrays, tree = ((value,), ARRAY_SPEC) if is_array else flatten_saved(value)
        trees.append(tree)
        is_packed = hooks is not None and position < names.num_for_backward
        for array in arrays:
            if id(array) not in known:
                if identity is None:
                    identity = ArrayIdentity(inputs)
                    for kind, others in (("output", outputs), ("input", inputs)):  # the first of equal outputs
                        by_key.update((identity.key(x), (kind, i)) for i, x in reversed([*enumerate(others)]))
                new = ("intermediate", len(intermediates))
                known[id(array)] = by_key.setdefault(identity.key(array), new)
                if known[id(array)] is new:
                    intermediates.append(array)
            residual = ResidualSource(*known[id(array)], is_packed)
            order.append(indices.setdefault(residual, len(indices)))
    return SavedSpec(names, trees, list(indices), order), [as_array(x) for x in intermediates]


def saved_leaves(ctx: FunctionCtx) -> list[jax.Array]:
    """Returns the array leaves of all values on a ctx, in the order of `SavedSpec.order`."""
    return [as_array(x) for value in collect_saved(ctx)[1] for x in flatten_saved(value)[0]]
