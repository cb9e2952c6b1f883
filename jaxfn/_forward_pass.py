"""One call of a Function (`CallSpec`), and one forward pass with the `backward` and `jvp` that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxfn._boundary import (
    ForwardOutputs,
    OutputSpec,
    check_dirty,
    input_cotangents,
    input_tangents,
    non_differentiable_outputs,
    output_tangents,
)
from jaxfn._captures import captured_tracers, with_captured
from jaxfn._compat import record_source_lines
from jaxfn._context import ContextState, FunctionCtx, SavedNames, collect_saved, restore_ctx, use_saved_for_forward
from jaxfn._hooks import PackedResiduals
from jaxfn._jaxpr import ArrayIdentity, checkpoint_name_of
from jaxfn._mesh_types import match_cotangents
from jaxfn._methods import UserMethods
from jaxfn._observe import OBSERVATION, Label, Observation, label_arrays, label_present, leaf_names
from jaxfn._sharding_rule import BoundRule
from jaxfn._signature import InputSpec
from jaxfn._traces import NewConstants, has_ended, is_mapped, manual_axes_here
from jaxfn._tree import ARRAY_SPEC, TreeSpec, as_array, flatten_saved, is_inexact, is_traced
from jaxfn._vmap_method import forward_with_vmap


class CallSpec:
    """The static part of a call: the Function's methods, and the names and tree spec of each input.

    Of a call on parts of arrays it has the mesh axes over which factors of the sharding rule are split.
    """

    def __init__(
        self, methods: UserMethods, inputs: InputSpec, axes: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.methods = methods
        self.name = methods.name
        self.inputs = inputs
        self.axes = axes

    def captured(self) -> tuple[list[Any], int]:
        """Returns the tracers that the methods and functions among the inputs capture, and how many are `forward`'s.

        These come first.
        """
        own = self.methods.forward_captures()
        if self.inputs.objects:
            own += captured_tracers(self.inputs.objects)
        others = [x for x in self.methods.rule_captures() if all(x is not y for y in own)]
        return [*own, *others], len(own)

    def with_captured(self, tracers: Sequence[Any], values: Sequence[Any]) -> CallSpec:
        """Returns the call with other values for captured tracers."""
        if not tracers:
            return self
        captured = dict(zip(map(id, tracers), values, strict=True))
        trees = self.inputs.trees
        if self.inputs.objects:
            trees = tuple(TreeSpec(t.treedef, with_captured(t.leaves, captured)) if t.objects else t for t in trees)
        return CallSpec(self.methods.with_captured(captured), InputSpec(self.inputs.names, trees), self.axes)

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

    def unflatten(self, residuals: Sequence[Any]) -> list[Any]:
        """Returns the values that have these residuals."""
        arrays = iter([residuals[i] for i in self.order])
        return [tree.unflatten(arrays) for tree in self.trees]

    def residual_names(self) -> list[str]:
        """Returns, for each residual, the names under which it was saved."""
        names: list[list[str]] = [[] for _ in self.sources]
        for residual, name in zip(self.order, leaf_names(self._names_on_ctx(), self.trees), strict=True):
            names[residual].append(name)
        return [", ".join(own) for own in names]

    def declared_factors(self) -> dict[int, str]:
        """Returns the `factors` that `ctx.save_for_backward` received, by the index of the intermediate."""
        pairs = zip(self.names.factors, self.trees, strict=False)
        texts = chain.from_iterable(repeat(text, tree.num_arrays) for text, tree in pairs)
        sources = [(self.sources[residual], text) for residual, text in zip(self.order, texts, strict=False)]
        return {source.idx: text for source, text in sources if source.kind == "intermediate" and text is not None}

    def _names_on_ctx(self) -> Iterable[str]:
        yield from (f"saved_tensors[{i}]" for i in range(self.names.num_tensors))
        yield from self.names.named
        yield from (f"saved_for_forward[{i}]" for i in range(self.names.num_for_forward or 0))
        yield from (f"ctx.{name}" for name in self.names.attributes)


class ForwardPass(NamedTuple):
    """One run of `forward`, without its arrays.

    Attributes:
      spec: The call.
      seen_flags: The `ctx.needs_input_grad` of `forward`, for each array leaf.
      reads_flags: Whether `forward` read `ctx.needs_input_grad`.
      materialize_grads: The argument of `ctx.set_materialize_grads`.
      saved: The static part of the values on ctx.
      outputs: The structure of the outputs.
      input_avals, output_avals: The types of the array leaves. (Arrays would leak their tracers into `backward`.)
      names: The names that `checkpoint_name` gave to results, by the part of `CallResults` and the index there.
      rule: The sharding rule, if it partitions the call.
    """

    spec: CallSpec
    seen_flags: tuple[bool, ...]
    reads_flags: bool
    materialize_grads: bool
    saved: SavedSpec
    outputs: OutputSpec
    input_avals: Sequence[Any]
    output_avals: Sequence[Any]
    names: Mapping[tuple[int, int], str]
    rule: BoundRule | None = None

    @property
    def differentiable(self) -> list[int]:
        """The indices of the outputs' array leaves that have a derivative."""
        marked = self.outputs.non_differentiable
        return [i for i, aval in enumerate(self.output_avals) if is_inexact(aval.dtype) and i not in marked]

    @property
    def is_on_mesh(self) -> bool:
        """Whether an input is an array on a mesh with explicit axes."""
        return not all(aval.sharding.mesh.empty for aval in self.input_avals if is_inexact(aval.dtype))

    def check_returns_like(self, other: ForwardPass) -> None:
        """Raises unless another run, with other flags, returned the same structure, shapes, dtypes and marks."""
        now, before = ([f"{x.dtype}{list(x.shape)}" for x in p.output_avals] for p in (self, other))
        if now == before and self.outputs == other.outputs:
            return
        now, before = (now, before) if self.outputs == other.outputs else (self.outputs, other.outputs)
        flags = [self.spec.inputs.needs_input_grad(p.seen_flags) for p in (self, other)]
        raise RuntimeError(
            f"{self.spec.name}.forward returned {now!r} when ctx.needs_input_grad was {flags[0]}, and {before!r} when "
            f"{f'it was {flags[1]}' if any(other.seen_flags) else 'nothing was differentiated'}. What forward returns, "
            "and marks as non-differentiable, must not depend on ctx.needs_input_grad."
        )

    def name_results(self, results: CallResults) -> CallResults:
        """Names results as `forward` did, for the policies of `jax.checkpoint`, which do not look into a call."""
        for (part, index), name in self.names.items():
            results[part][index] = checkpoint_name(results[part][index], name)
        return results

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any], intermediates: Sequence[Any]) -> list[Any]:
        """Returns the array of each residual."""
        found = {"input": inputs, "output": outputs, "intermediate": intermediates}
        return [found[source.kind][source.idx] for source in self.saved.sources]

    def output_names(self) -> list[str]:
        """Returns a name for each array leaf of the outputs."""
        trees = self.outputs.trees
        return leaf_names(map(str, range(len(trees))), trees)

    def intermediate_names(self) -> list[str]:
        """Returns the names under which each saved intermediate was saved."""
        pairs = zip(self.saved.sources, self.saved.residual_names(), strict=True)
        names = {source.idx: name for source, name in pairs if source.kind == "intermediate"}
        return [names[i] for i in range(len(names))]

    def label_results(self, results: CallResults) -> CallResults:
        """Labels the outputs and the saved intermediates."""
        function, names = self.spec.name, self.intermediate_names()
        return CallResults(
            label_present(results.outputs, function, "forward", "output", self.output_names()),
            label_present(results.intermediates, function, "forward", "saved", names),
        )


class CallResults(NamedTuple):
    """The arrays that a call returns: the array leaves of the outputs, and saved arrays that are not among those."""

    outputs: list[Any]
    intermediates: list[Any]


def run_forward(
    spec: CallSpec,
    arrays: Sequence[Any],
    tracers: Sequence[Any],
    flags: tuple[bool, ...],
    has_hooks: bool = False,
    use_vmap: bool = True,
) -> tuple[ForwardPass, CallResults]:
    """Runs `forward`.

    Args:
      spec: The call.
      arrays: Its arrays: the array leaves of the inputs, then the present values of captured tracers.
      tracers: The captured tracers.
      flags: The `ctx.needs_input_grad` of each array leaf.
      has_hooks: Whether saved-tensor hooks are active.
      use_vmap: Whether `jax.vmap` calls the user's `vmap`.
    """
    inputs, captured = list(map(as_array, arrays[: len(flags)])), arrays[len(flags) :]
    if len(set(map(id, inputs))) < len(inputs):  # what is saved is recognized by identity
        inputs = [x if is_traced(x) else x.copy() for x in inputs]
    names = input_names(spec) if OBSERVATION.value is Observation.VALUES else []
    if names:
        inputs = label_present(inputs, spec.name, "forward", "input", names)
    has_lines = names or OBSERVATION.value is Observation.LINES
    with spec.scope("forward"), record_source_lines() if has_lines else nullcontext():
        bound = spec.with_captured(tracers, captured)
        state, ctx, returned = call_forward(bound, inputs, flags, use_vmap)
        if any(flags):
            _check_python_numbers(spec, inputs, flags, returned.spec)
    saved, intermediates = _save(ctx, inputs, returned.originals, has_hooks)
    results = CallResults(list(returned.arrays), intermediates)
    traced = [(k, i, x) for k, part in enumerate(results) for i, x in enumerate(part) if is_traced(x)]
    named = {(k, i): checkpoint_name_of(x) for k, i, x in traced}
    forward_pass = ForwardPass(
        spec,
        flags,
        state.read_needs_input_grad,
        state.materialize_grads,
        saved,
        returned.spec,
        list(map(jax.typeof, inputs)),
        list(map(jax.typeof, returned.arrays)),
        {index: name for index, name in named.items() if name is not None},
    )
    return forward_pass, forward_pass.label_results(results) if names else results


class Residuals(NamedTuple):
    """The arrays that a derivative needs.

    Attributes:
      saved: What `forward` saved, packed if there are saved-tensor hooks.
      captured: The values of captured tracers.
      inputs: The array leaves of the inputs, for the derivative of intermediates; empty where it cannot be needed.
    """

    saved: list[Any]
    captured: list[Any]
    inputs: list[Any]


@dataclass(eq=False)
class Differentiation:
    """One differentiation of a forward pass, without its arrays: what `backward` and `jvp` need except the residuals.

    Attributes:
      forward_pass: The forward pass.
      tracers: The captured tracers, whose values are among the residuals.
      flags: The `ctx.needs_input_grad` of `backward`, for each array leaf of the inputs.
      perturbed: The indices of the array leaves by which this differentiation is.
      packed: The static part of packed residuals, under hooks.
      treedef: The treedef of the residuals, which are `Residuals`. The arrays may be followed by others.
    """

    forward_pass: ForwardPass
    tracers: Sequence[Any]
    flags: tuple[bool, ...]
    perturbed: list[int]
    packed: PackedResiduals | None
    treedef: Any

    @property
    def avals(self) -> list[Any]:
        """The types of the tangents of the differentiable outputs."""
        return [self.forward_pass.output_avals[i].to_tangent_aval() for i in self.forward_pass.differentiable]

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array | None]:
        """Calls the user's `backward`.

        Args:
          residuals: The arrays of the residuals.
          cotangents: One for each array leaf of the outputs, `None` for zero.

        Returns:
          A cotangent for each array leaf of the inputs, `None` for zero.
        """
        return self._call(self._backward, "backward", residuals, cotangents)

    def _backward(self, residuals: Residuals, cotangents: Sequence[Any]) -> list[jax.Array | None]:
        forward_pass, spec = self.forward_pass, self.forward_pass.spec
        grad_outputs = forward_pass.outputs.grad_outputs(
            cotangents, forward_pass.output_avals, forward_pass.materialize_grads
        )
        with spec.scope("backward"):
            _, ctx = self._restore_ctx(residuals)
            returned = self._methods(residuals).backward(ctx, grad_outputs)
            try:
                gradients = input_cotangents(spec.name, spec.inputs, returned, forward_pass.input_avals, self.flags)
                if manual_axes_here() or forward_pass.is_on_mesh:
                    gradients = match_cotangents(gradients, forward_pass.input_avals)
            except (RuntimeError, TypeError) as error:
                spec.methods.add_location("backward", error)
                raise
        return gradients

    def jvp(self, residuals: Sequence[Any], tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Calls the user's `jvp`.

        Args:
          residuals: The arrays of the residuals.
          tangents: One for each array leaf of the inputs, `None` for zero.

        Returns:
          A tangent for each array leaf of the outputs, `None` for zero.
        """
        return self._call(self._jvp, "jvp", residuals, tangents)

    def _jvp(self, residuals: Residuals, tangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        forward_pass, spec = self.forward_pass, self.forward_pass.spec
        with spec.scope("jvp"):
            state, ctx = self._restore_ctx(residuals)
            use_saved_for_forward(state)
            user_tangents = input_tangents(
                tangents, spec.inputs, forward_pass.input_avals, forward_pass.materialize_grads
            )
            returned = self._methods(residuals).jvp(ctx, user_tangents)
            try:
                results = output_tangents(spec.name, returned, forward_pass.outputs, forward_pass.output_avals)
            except (RuntimeError, TypeError) as error:
                spec.methods.add_location("jvp", error)
                raise
        return results

    def _methods(self, residuals: Residuals) -> UserMethods:
        """Returns the user's methods with the present values of captured tracers."""
        return self.forward_pass.spec.with_captured(self.tracers, residuals.captured).methods

    def _restore_ctx(self, residuals: Residuals) -> tuple[ContextState, FunctionCtx]:
        """Returns the ctx as `forward` left it."""
        forward_pass, inputs = self.forward_pass, self.forward_pass.spec.inputs
        saved = residuals.saved if self.packed is None else self.packed.unpack(residuals.saved)
        state = ContextState(inputs.names, inputs.needs_input_grad(self.flags))
        if forward_pass.spec.methods.sharding_rule is not None:
            state.axes = forward_pass.spec.methods.sharding_rule.axes_of_factors(forward_pass.spec.axes)
        state.num_outputs = len(forward_pass.outputs.trees)
        state.materialize_grads = forward_pass.materialize_grads
        ctx = restore_ctx(state, forward_pass.saved.names, forward_pass.saved.unflatten(saved))
        return state, ctx

    def _call(
        self,
        rule: Callable[[Residuals, Sequence[Any]], list[Any]],
        method: str,
        residuals: Sequence[Any],
        vectors: Sequence[Any],
    ) -> list[jax.Array | None]:
        """Calls `backward` or `jvp`; raises if it uses an array of a trace that has ended."""
        constants = NewConstants()
        methods = self.forward_pass.spec.methods
        restored = jax.tree.unflatten(self.treedef, residuals[: self.treedef.num_leaves])
        try:
            if OBSERVATION.value in (Observation.RESIDUALS, Observation.VALUES) and self.forward_pass.spec.axes is None:
                results = self._call_observed(rule, method, restored, vectors)
            else:
                results = rule(restored, vectors)
        except jax.errors.UnexpectedTracerError as error:
            raise methods.escaped_tracer_error(method) from error
        if constants.any(has_ended) or any(map(has_ended, results)):
            raise methods.escaped_tracer_error(method)
        return results

    def _call_observed(
        self,
        rule: Callable[[Residuals, Sequence[Any]], list[Any]],
        method: str,
        residuals: Residuals,
        vectors: Sequence[Any],
    ) -> list[jax.Array | None]:
        """Calls `backward` or `jvp` with labels on its residuals and, for `Observation.VALUES`, on all its arrays."""
        name, residuals = self.forward_pass.spec.name, self.label_saved(method, residuals)
        if OBSERVATION.value is Observation.RESIDUALS:
            return rule(residuals, vectors)
        inputs, outputs = input_names(self.forward_pass.spec), self.forward_pass.output_names()
        if method == "backward":
            role, names, result_role, result_names = "grad_output", outputs, "gradient", inputs
        else:
            role, names, result_role, result_names = "tangent", inputs, "tangent", outputs
        vectors = label_present(vectors, name, method, role, names)
        with record_source_lines():
            results = rule(residuals, vectors)
        return label_present(results, name, method, result_role, result_names)

    def label_saved(self, method: str, residuals: Residuals) -> Residuals:
        """Labels what was saved."""
        name, saved, rule = self.forward_pass.spec.name, self.forward_pass.saved, self.forward_pass.rule
        counts = [1] * len(saved.sources) if self.packed is None else [tree.num_arrays for tree in self.packed.trees]
        labels: list[Label] = []
        for source, own, count in zip(saved.sources, saved.residual_names(), counts, strict=True):
            factors = None if rule is None else rule.of(source.kind, source.idx)
            labels += [Label(name, method, "saved", own, source.kind, source.is_packed, factors)] * count
        return residuals._replace(saved=label_arrays(residuals.saved, labels))


def input_names(spec: CallSpec) -> list[str]:
    """Returns a name for each array leaf of the inputs."""
    return leaf_names(spec.inputs.names.names, spec.inputs.trees)


def call_forward(
    spec: CallSpec, arrays: Sequence[Any], perturbed: tuple[bool, ...], use_vmap: bool = True
) -> tuple[ContextState, FunctionCtx, ForwardOutputs]:
    """Calls the user's `forward`; returns the ctx that it filled and its outputs, without the Function's rule."""
    methods, inputs = spec.methods, spec.inputs
    state = ContextState(inputs.names, inputs.needs_input_grad(perturbed))
    if methods.sharding_rule is not None:
        state.axes = methods.sharding_rule.axes_of_factors(spec.axes)
    ctx = FunctionCtx(state)
    # `jax.vmap` passes a number that it does not map unchanged, where `jax.jit` would pass an array.
    if inputs.python_numbers:
        state.python_numbers = inputs.python_numbers
        state.can_save_numbers = not any(perturbed) or any(map(is_mapped, arrays))
    try:
        if methods.vmap is not None and use_vmap and any(map(is_traced, arrays)):
            returned = forward_with_vmap(methods, inputs, ctx, arrays)
        else:
            values = inputs.unflatten(arrays)
            returned = methods.forward(ctx, inputs, values)
            if inputs.mutable:
                inputs.check_inputs_unchanged(spec.name, values, arrays, returned.originals)
    except jax.errors.UnexpectedTracerError as error:
        raise methods.escaped_tracer_error("forward") from error
    if state.dirty:
        check_dirty(spec.name, state, arrays, returned.arrays, methods.warn_once)
    if state.non_differentiable:
        marked = non_differentiable_outputs(spec.name, state, arrays, returned.originals, methods.warn_once)
        returned = returned._replace(spec=OutputSpec(returned.spec.container, returned.spec.trees, marked))
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
    ctx: FunctionCtx, inputs: Sequence[Any], outputs: Sequence[Any], has_hooks: bool
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
        is_packed = has_hooks and position < names.num_for_backward
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
