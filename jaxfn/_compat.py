"""Everything that uses unpromised parts of JAX, each with the versions on which it was checked.

No module of JAX is re-exported, and nothing is imported from `jax._src`. `tests/core/test_workarounds.py` reproduces
each defect of JAX that is worked around, and fails once JAX has fixed it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Format
from jax.extend.core import DebugInfo, Jaxpr, Primitive, Var, find_top_trace, set_current_trace
from jax.extend.core.primitives import (
    add_jaxvals_p,
    call_p,
    closed_call_p,
    custom_jvp_call_p,
    custom_lin_p,
    custom_vjp_call_p,
    jit_p,
    name_p,
    random_bits_p,
    remat_p,
    threefry2x32_p,
    triangular_solve_p,
    tridiagonal_solve_p,
)
from jax.extend.source_info_util import current_name_stack, register_exclusion, summarize, user_context
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.ref import AbstractRef

__all__ = [
    "AbstractRef",
    "Primitive",
    "SymbolicZero",
    "Var",
    "add_jaxvals_p",
    "call_p",
    "closed_call_p",
    "custom_jvp_call_p",
    "custom_lin_p",
    "custom_vjp_call_p",
    "eval_context",
    "jit_p",
    "name_p",
    "random_bits_p",
    "remat_p",
    "threefry2x32_p",
    "triangular_solve_p",
    "tridiagonal_solve_p",
]

# The lines of operations are those of the user's code, not of jaxfn's (0.10.0 to 0.12.0).
register_exclusion(os.path.dirname(__file__) + os.sep)


# Traces and tracers


def is_differentiating() -> bool:
    """Whether the current trace is that of a derivative (0.10.0 to 0.12.0)."""
    return _is_derivative(find_top_trace(()))


def staging_traces() -> list[Any]:
    """Returns the traces that stage to jaxprs here, the innermost first: none outside `jit` (0.10.0 to 0.12.0)."""
    found: list[Any] = []
    trace: Any = find_top_trace(())
    while trace is not None:
        if hasattr(trace, "frame"):
            found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


class StagedEqns:
    """The eqns that JAX stages from now on (0.10.0 to 0.12.0)."""

    def __init__(self) -> None:
        self._frames: list[tuple[Any, int]] = []
        self.program: weakref.ref[Any] | None = None  # what stages the innermost of them
        trace: Any = find_top_trace(())
        while trace is not None:
            for own in (trace, getattr(trace, "tangent_trace", None)):  # tangents of reverse mode too
                frame = getattr(own, "frame", None)
                if frame is not None:
                    self._frames.append((frame, len(frame.tracing_eqns)))
                    if own is trace and self.program is None:
                        self.program = weakref.ref(trace)
            trace = getattr(trace, "parent_trace", None)

    def make_refs(self) -> bool:
        """Whether one of them makes a `jax.Ref`."""
        for frame in self._frames:
            for eqn in _eqns_backwards(*frame):
                if eqn.effects and any(type(x).__name__ == "InternalMutableArrayEffect" for x in eqn.effects):
                    return True
        return False

    def operations(self) -> Operations:
        """Returns their primitives, jaxprs and operands: the values of constants, the variables of others."""
        parts: list[Any] = []
        for frame, first in self._frames:
            consts = frame.constvar_to_val
            for eqn in _eqns_backwards(frame, first):
                parts.append(eqn.primitive)
                for tracer in operands_of(eqn):
                    atom = tracer.val
                    parts.append(consts.get(atom, atom) if isinstance(atom, Var) else atom)
                for value in eqn.params.values():
                    values = value if isinstance(value, tuple) else (value,)
                    parts += [x for x in values if hasattr(x, "eqns")]
        trace: Any = find_top_trace(())
        while not (hasattr(trace, "frame") or hasattr(trace, "to_batch_info")) and hasattr(trace, "parent_trace"):
            trace = trace.parent_trace
        return Operations(parts, hasattr(trace, "to_batch_info"))


class Operations(NamedTuple):
    """Primitives, jaxprs and operands of eqns that were staged."""

    parts: Sequence[Any]
    are_batched: bool


NO_OPERATIONS = Operations((), False)


def under_tracers(array: Any) -> Any:
    """Returns the array under tracers of derivatives and vmaps, the variable of a staged one (0.10.0 to 0.12.0)."""
    while isinstance(array, Tracer):
        array = getattr(array, "primal", getattr(array, "val", None))
    return getattr(array, "val", array)  # of a literal


def outside_derivatives() -> contextlib.AbstractContextManager[None]:
    """Makes the innermost trace that is not a derivative's the current one (0.10.0 to 0.12.0)."""
    trace: Any = find_top_trace(())
    while _is_derivative(trace):
        trace = trace.parent_trace
    return set_current_trace(trace)


def _is_derivative(trace: Any) -> bool:
    # The trace of jax.linearize and of reverse mode has no public name.
    return isinstance(trace, ad.JVPTrace) or hasattr(trace, "tangent_trace")


def is_staged(array: object) -> bool:
    """Whether an array is a value of a jaxpr that is being traced (0.10.0 to 0.12.0)."""
    return isinstance(array, partial_eval.DynamicJaxprTracer)


def traced_eqns() -> Iterator[Any]:
    """Yields the eqns of the jaxpr that is being traced, from the last one, or nothing without one (0.10.0 to 0.12.0).

    The operands of most of them are tracers.
    """
    return next(traced_eqns_of_each(), iter(()))


def traced_eqns_of_each() -> Iterator[Iterator[Any]]:
    """Yields the eqns of each jaxpr that is being traced, from the innermost one (0.10.0 to 0.12.0)."""
    return (_eqns_backwards(trace.frame) for trace in staging_traces())


def _eqns_backwards(frame: Any, first: int = 0) -> Iterator[Any]:
    entries = frame.tracing_eqns
    for index in range(len(entries) - 1, first - 1, -1):
        entry = entries[index]
        eqn = entry() if callable(entry) else entry  # functions (0.10.0) or weak references (both versions)
        if eqn is not None:
            yield eqn


def depend_on_only(results: Sequence[Any], known: Set[Var]) -> bool:
    """Whether results surely depend on these variables and on concrete constants only (0.10.0 to 0.12.0)."""
    pending = variables_under_tracers(results) - known
    traces = staging_traces()
    if not (pending and traces):
        return not pending
    frame = traces[0].frame
    consts = frame.constvar_to_val
    for eqn in _eqns_backwards(frame):
        if not pending.isdisjoint(eqn.outvars):
            pending.difference_update(eqn.outvars)
            for v in (x.val for x in operands_of(eqn)):
                if type(v) is Var and v not in known and (v not in consts or isinstance(consts[v], Tracer)):
                    pending.add(v)
            if not pending:
                break
    return not pending


def variables_under_tracers(arrays: Iterable[Any], *, and_tangents: bool = False) -> set[Var]:
    """Returns the variables of the staged arrays among these, under tracers of derivatives and vmaps too.

    (0.10.0 to 0.12.0)

    Args:
      arrays: The arrays.
      and_tangents: Whether to add the variables of their tangents.
    """
    kind = partial_eval.DynamicJaxprTracer
    found: set[Var] = set()
    pending = list(arrays)
    while pending:
        tracer: Any = pending.pop()
        if type(tracer) is kind:
            if type(tracer.val) is Var:
                found.add(tracer.val)
        elif isinstance(tracer, Tracer):
            if has_tangent(tracer):
                pending += [tracer.primal, tracer.tangent] if and_tangents else [tracer.primal]
            else:
                pending.append(getattr(tracer, "val", None))
    return found


def operands_of(eqn: Any) -> Sequence[Any]:
    """Returns the tracers of an eqn of a jaxpr that is being traced, where it has them (0.10.0 to 0.12.0)."""
    return getattr(eqn, "in_tracers", ())


def constant_of(array: Any) -> Any:
    """Returns the value of a staged array that is a const of its jaxpr, `None` for others (0.10.0 to 0.12.0)."""
    value = array.full_lower()
    return None if value is array else value


def has_escaped(array: Any) -> bool:
    """Whether an array is a tracer of a jaxpr that is surely not being traced any more (0.10.0 to 0.12.0)."""
    variable = staged_atom(array)
    if not is_staged(array) or not isinstance(variable, Var):
        return False
    trace: Any = find_top_trace(())
    while trace is not None:
        for frame in (getattr(own, "frame", None) for own in (trace, getattr(trace, "tangent_trace", None))):
            if frame is not None:
                if any(v is variable for v in (*frame.constvar_to_val, *frame.invars)):
                    return False
                if any(v is variable for eqn in _eqns_backwards(frame) for v in eqn.outvars):
                    return False
        if not hasattr(trace, "parent_trace"):
            return True
        trace = trace.parent_trace
    return False  # in `shard_map` the enclosing trace is unknown


def staged_under(array: Any) -> Any:
    """Returns the array under the tracers of derivatives and of `jax.vmap` (0.10.0 to 0.12.0)."""
    while isinstance(array, Tracer) and not is_staged(array):
        tracer: Any = array
        under = tracer.primal if has_tangent(tracer) else getattr(tracer, "val", None)
        if under is None:
            break
        array = under
    return array


def staged_atom(array: Any) -> Any:
    """Returns the variable or literal of a staged array, and anything else unchanged (0.10.0 to 0.12.0)."""
    return array.val if is_staged(array) else array


def value_under_vmaps(array: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the variable or array under the tracers of `jax.vmap`, and its axis at each level (0.10.0 to 0.12.0)."""
    dims: list[Any] = []
    trace: Any = find_top_trace(())
    while hasattr(trace, "parent_trace") and not hasattr(trace, "frame"):
        if hasattr(trace, "to_batch_info"):
            array, dim = trace.to_batch_info(array)
            dims.append(dim)
        trace = trace.parent_trace
    return staged_atom(array), tuple(dims)


def is_concrete(array: Any) -> bool:
    """Whether an array has values under the tracers of derivatives and of `jax.vmap` (0.10.0 to 0.12.0)."""
    while isinstance(array, Tracer):
        tracer: Any = array
        if not (has_tangent(tracer) or hasattr(tracer, "batch_dim")):
            return False
        array = tracer.primal if has_tangent(tracer) else tracer.val
    return not isinstance(array, jax.ShapeDtypeStruct)


def elements_under_vmaps(array: Any) -> np.ndarray[Any, Any]:
    """Returns the values of a concrete array for all elements of batches, along the first axis (0.10.0 to 0.12.0)."""
    if has_tangent(array):
        return elements_under_vmaps(array.primal)
    if not isinstance(array, Tracer):
        return np.asarray(array)[None]
    tracer: Any = array
    values = elements_under_vmaps(tracer.val)
    if not isinstance(tracer.batch_dim, int):  # the same for all
        return values
    return np.moveaxis(values, tracer.batch_dim + 1, 1).reshape(-1, *tracer.shape)


def has_tangent(array: object) -> bool:
    """Whether an array is itself a tracer of a derivative, not only wraps one (0.10.0 to 0.12.0)."""
    return _is_derivative_tracer(type(array))


@functools.lru_cache
def _is_derivative_tracer(kind: type) -> bool:
    return issubclass(kind, Tracer) and hasattr(kind, "tangent")


def without_tangent(array: Any) -> Any:
    """Returns the array under the tracers of derivatives (0.10.0 to 0.12.0).

    `jax.lax.stop_gradient` returns an equal one, at the cost of a whole linearization.
    """
    while has_tangent(array):
        array = array.primal
    return array


def derivative_order(array: Any) -> int:
    """Returns how many derivatives are being taken with respect to an array, under vmaps too (0.10.0 to 0.12.0)."""
    order = 0
    while isinstance(array, Tracer):
        if _is_derivative_tracer(type(array)):
            tracer: Any = array
            order += not isinstance(tracer.tangent, ad.Zero) and _is_inexact(tracer.dtype)
            array = tracer.primal
        else:
            array = getattr(array, "val", None)  # a tracer of vmap; that of a jaxpr has a variable there
    return order


@functools.lru_cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def is_ref(value: Any) -> bool:
    """Whether an array leaf is a mutable reference, concrete or traced (0.10.0 to 0.12.0)."""
    return isinstance(jax.typeof(value), AbstractRef)  # quicker than isinstance(value, jax.Ref)


# Primitives

_DEBUG_INFO = DebugInfo("custom derivative", "a jaxfn Function", None, None)


class VmapAxis:
    """One use of `jax.vmap`, as a batching rule sees it (0.10.0 to 0.12.0)."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        self.size: int = axis.size

    @property
    def is_named(self) -> bool:
        """Whether collectives may use the axis by a name; an unnamed one has a plain object for its name."""
        return type(self._axis.name) is not object

    def to_axis_0(self, array: Any, dim: int | None) -> Any:
        """Moves the batch of an array to axis 0, or repeats an array that has none."""
        return batching.bdim_at_front(array, dim, self.size, self._axis.explicit_mesh_axis)

    def batched_aval(self, aval: Any) -> Any:
        """Returns a type with the batch at axis 0."""
        shape = (self.size, *aval.shape)
        if aval.sharding.mesh.empty:
            return aval.update(shape=shape)
        spec = jax.sharding.PartitionSpec(self._axis.explicit_mesh_axis, *aval.sharding.spec)
        return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))

    def vmap(self, function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any = 0) -> Callable[..., Any]:
        """Maps a function over this axis, with its name.

        If no argument is batched, the function is evaluated once with the name bound, and no result may be batched.
        """
        axis = self._axis
        is_batched = any(dim is not None for dim in jax.tree_util.tree_leaves(in_axes, is_leaf=lambda x: x is None))

        def with_dummy(_: Any, *args: Any) -> Any:
            return function(*args)

        mapped = jax.vmap(
            with_dummy,
            (0, *in_axes),
            out_axes if is_batched else None,
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        return functools.partial(mapped, None if is_batched else np.zeros(self.size, bool))


class _OwningPrimitive(Primitive):
    """A primitive whose params are freed with their eqns, and which may have a rule for `jax.linearize`.

    JAX caches the types of results by the params of the eqn, and drops an entry early only when a jaxpr among them is
    freed (0.10.0 to 0.12.0). So the params include an empty jaxpr.
    """

    linearize: Callable[..., Any] | None = None

    def bind(self, *args: Any, **params: Any) -> Any:
        trace: Any = find_top_trace(())
        if self.linearize is not None and hasattr(trace, "tangent_trace"):
            results = self._bind_linearized(self.linearize, trace, args, params)
            if results is not None:
                return results
        return super().bind(*args, **_with_owner(params))

    def _bind_linearized(
        self, linearize: Callable[..., Any], trace: Any, args: Sequence[Any], params: dict[str, Any]
    ) -> Sequence[Any] | None:
        """Returns tracers of the results and their tangents, as a trace of `jax.linearize` makes them by such a rule.

        JAX's table of these rules is not public. Without a rule it traces the JVP rule to a jaxpr (0.10.0 to 0.12.0).
        """
        pairs = [trace.to_primal_tangent_pair(x) if has_tangent(x) else (x, None) for x in args]
        primals, tangents = [x for x, _ in pairs], [_nonzero(t) for _, t in pairs]
        perturbed = [t is not None for t in tangents]
        with set_current_trace(trace.parent_trace):
            if not any(perturbed):
                return self.bind(*primals, **params)
            linearized = linearize(primals, perturbed, **params)
        if linearized is None:
            return None
        results, push = linearized
        with set_current_trace(trace.tangent_trace):
            pushed = push(tangents)
        tracer = type(args[perturbed.index(True)])
        return [x if t is None else tracer(trace, x, t) for x, t in zip(results, pushed, strict=True)]


def _with_owner(params: dict[str, Any]) -> dict[str, Any]:
    return {"owner": Jaxpr((), (), (), (), frozenset(), _DEBUG_INFO), **params} if params else params


def _without_owner(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, owner: Any = None, **params: Any) -> Any:
        return function(*args, **params)

    return call


class PartialEvaluation:
    """One use of a primitive where some operands have no value, as under `jax.linear_transpose` (0.10.0 to 0.12.0).

    JAX stages what depends on these operands to a jaxpr, and transposes it, but evaluates that of the body of a loop.
    So the jaxpr has to be right for both.
    """

    def __init__(self, trace: Any, primitive: Primitive) -> None:
        self._trace = trace
        self._primitive = primitive

    def has_value(self, operand: Any) -> bool:
        """Whether an operand has a value."""
        return operand.is_known()

    def bind(self, operands: Sequence[Any], **params: Any) -> list[Any]:
        """Applies the primitive; the results have values if all operands do."""
        return self._trace.default_process_primitive(self._primitive, operands, _with_owner(params))

    def enclose(self, arrays: Sequence[Any], after: Primitive) -> list[Any]:
        """Returns arrays without a value, computed by one `jit` eqn.

        Backward passes skip that eqn if no cotangent reaches it. They look up a rule for any other eqn even then.

        Args:
          arrays: The arrays.
          after: The primitive from whose results the enclosed operations compute the arrays.
        """
        eqns: dict[int, Any] = {}
        pending = list(arrays)
        while pending:
            eqn = pending.pop().recipe
            if hasattr(eqn, "primitive") and eqn.eqn_id not in eqns:
                eqns[eqn.eqn_id] = eqn
                pending += eqn.in_tracers
        inside: set[int] = set()
        computed: set[int] = set()
        steps: list[tuple[Any, list[int], list[int]]] = []
        operands: dict[int, Any] = {}
        for _, eqn in sorted(eqns.items()):
            results = [id(reference()) for reference in eqn.out_tracer_refs]
            is_pure = all(type(effect).__name__ == "NamedAxisEffect" for effect in eqn.effects)
            if eqn.primitive is after:
                inside.update(results)
            elif is_pure and any(id(x) in inside for x in eqn.in_tracers):
                inside.update(results)
                operands.update((id(x), x) for x in eqn.in_tracers if id(x) not in computed)
                computed.update(results)
                steps.append((eqn._replace(in_tracers=(), out_tracer_refs=()), list(map(id, eqn.in_tracers)), results))
        enclosed = [i for i, x in enumerate(arrays) if id(x) in computed]
        names = list(map(id, arrays))

        def forward(*values: Any) -> list[Any]:
            env = dict(zip(operands, values, strict=True))
            for eqn, inputs, results in steps:
                env.update(zip(results, eval_eqn(eqn, [env[name] for name in inputs]), strict=True))
            return [env[names[i]] for i in enclosed]

        found = list(arrays)
        if [eqn.primitive for eqn, _, _ in steps] not in ([], [jit_p]):
            with set_current_trace(self._trace):
                for i, x in zip(enclosed, jax.jit(forward)(*operands.values()), strict=True):
                    found[i] = x
        return found


def make_primitive(
    name: str,
    *,
    evaluate: Callable[..., list[Any]],
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
    batch: Callable[..., tuple[Sequence[Any], Sequence[int | None]]],
    avals: Callable[..., Sequence[Any]] | None = None,
    linearize: Callable[..., tuple[Sequence[Any], Callable[..., Sequence[Any]]] | None] | None = None,
    transpose: Callable[..., Sequence[Any]] | None = None,
    drop_results: Callable[..., tuple[Sequence[bool], Sequence[bool], dict[str, Any]]] | None = None,
    evaluate_partially: Callable[..., Sequence[Any]] | None = None,
    partial_eval_in_checkpoint: Callable[..., Any] | None = None,
    on_transpose_error: Callable[[Exception], None] | None = None,
    may_use_axis_names: bool = False,
    lower_as_function: bool = False,
) -> Primitive:
    """Makes a primitive with several results and the rules that jaxfn's own primitives need (0.10.0 to 0.12.0).

    In these rules a tangent or cotangent that is symbolically zero is `None`, as everywhere in jaxfn.

    Args:
      name: What jaxprs call it.
      evaluate: Returns the results. An identity also works on the values that lowering handles.
      jvp: `jvp(primals, tangents, **params)` returns the results and a tangent for each.
      batch: `batch(axis, operands, dims, **params)` returns the results and the axis of the batch in each. Called only
        where an operand is batched, or where collectives may use the axis by its name.
      avals: Returns the types of the results. Default: `evaluate`, for identities.
      linearize: `linearize(primals, perturbed, **params)` returns the results, and the function from tangents of the
        operands to tangents of the results; or `None` if only `jvp` can tell. Default: `jvp`.
      transpose: `transpose(cotangents, *operands, **params)`, with `None` for the linear operands, returns a cotangent
        for each operand.
      drop_results: `drop_results(used, num_operands, **params)`, where not all results are used, returns which results
        and operands stay, and the params then. Default: all stay.
      evaluate_partially: `evaluate_partially(use, operands, **params)`, with a `PartialEvaluation`, returns the
        results where some operands have no value. Default: the results have none.
      partial_eval_in_checkpoint: JAX's rule for `jax.checkpoint`. Default: JAX's own.
      on_transpose_error: Called with an exception that `transpose` raises.
      may_use_axis_names: Whether the primitive runs user code, which may use the names of vmap axes.
      lower_as_function: Whether `evaluate` is traced to be lowered. Otherwise it is an identity.
    """
    evaluate, jvp, batch = map(_without_owner, (evaluate, jvp, batch))
    avals = _without_owner(avals or evaluate)
    primitive = _OwningPrimitive(name)
    primitive.multiple_results = True
    primitive.linearize = linearize and _without_owner(linearize)
    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(avals)

    def lower(_ctx: Any, *operands: Any, **params: Any) -> list[Any]:
        return evaluate(*operands, **params)

    # Not cacheable: most eqns have different params, so that looking one up costs more than lowering it.
    lowering = mlir.lower_fun(evaluate, multiple_results=True) if lower_as_function else lower
    mlir.register_lowering(primitive, lowering, cacheable=False)

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Sequence[Any], list[Any]]:
        results, result_tangents = jvp(primals, list(map(_nonzero, tangents)), **params)
        pairs = zip(results, result_tangents, strict=True)
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t for x, t in pairs]

    ad.primitive_jvps[primitive] = jvp_rule

    def batch_rule(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        use = VmapAxis(axis)
        # JAX calls the batching rule even when no operand is batched.
        if all(dim is None for dim in dims) and not (may_use_axis_names and use.is_named):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        return batch(use, operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batch_rule

    if transpose is not None:
        rule = _without_owner(transpose)

        def transpose_rule(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
            cts = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
            known = [None if ad.is_undefined_primal(x) else x for x in operands]
            returned: Sequence[Any] = [None] * len(operands)
            if any(ct is not None for ct in cts):
                try:
                    returned = rule(cts, *known, **params)
                except Exception as error:
                    if on_transpose_error is not None:
                        on_transpose_error(error)
                    raise
            pairs = zip(operands, returned, strict=True)
            return [
                (ad.Zero(x.aval.to_ct_aval()) if ct is None else ct) if ad.is_undefined_primal(x) else None
                for x, ct in pairs
            ]

        ad.primitive_transposes[primitive] = transpose_rule

    if drop_results is not None:
        drop = _without_owner(drop_results)

        def dce_rule(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
            eqn = rest[-1]  # 0.12.0 also passes, before it, which operands are still read
            if all(used):
                return [True] * len(eqn.invars), eqn
            if not any(used):
                return [False] * len(eqn.invars), None
            results, operands, params = drop(used, len(eqn.invars), **eqn.params)
            invars, outvars = (
                [v for v, stays in zip(atoms, flags, strict=True) if stays]
                for atoms, flags in ((eqn.invars, operands), (eqn.outvars, results))
            )
            return list(operands), eqn.replace(invars=invars, outvars=outvars, params=_with_owner(params))

        partial_eval.dce_rules[primitive] = dce_rule

    if evaluate_partially is not None:
        split = _without_owner(evaluate_partially)

        def partial_eval_rule(trace: Any, *tracers: Any, **params: Any) -> Sequence[Any]:
            return split(PartialEvaluation(trace, primitive), tracers, **params)

        partial_eval.custom_partial_eval_rules[primitive] = partial_eval_rule

    if partial_eval_in_checkpoint is not None:
        partial_eval.partial_eval_jaxpr_custom_rules[primitive] = partial_eval_in_checkpoint
    return primitive


def _nonzero(tangent: Any) -> Any:
    """Returns `None` for a tangent that is symbolically zero, or of an array that has no derivative."""
    return None if isinstance(tangent, ad.Zero) or getattr(tangent, "dtype", None) == jax.float0 else tangent


def copy_array(array: Any) -> jax.Array:
    """Returns a copy, in half of the time of `jnp.array(array, copy=True)` (0.10.0 to 0.12.0)."""
    return jax.lax.copy_p.bind(array)


def has_transpose(primitive: Primitive) -> bool:
    """Whether JAX has a transposition rule for a primitive (0.10.0 to 0.12.0).

    The rules of primitives that accumulate in place, such as slices and `scan`, are in a table that is not public.
    """
    return primitive in ad.primitive_transposes


def zeros_of(aval: Any) -> jax.Array:
    """Returns zeros of an abstract value, with its sharding and varying axes (0.10.0 to 0.12.0)."""
    return ad.zeros_like_aval(aval)


def shape_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns what `jax.make_jaxpr` and `jax.linear_transpose` take in place of an array of a type (0.10.0 to 0.12.0).

    Zeros would be computed, and outside `shard_map` they cannot have the type of an array inside.
    """
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, manual_axis_type=aval.manual_axis_type)


def dce_jaxpr(jaxpr: Any, used_outputs: Sequence[bool]) -> Any:
    """Returns a jaxpr with some of its outputs and all of its inputs, without dead code (0.10.0 to 0.12.0)."""
    return partial_eval.dce_jaxpr(jaxpr, list(used_outputs), instantiate=True)[0]


def keeps_constants_apart() -> bool:
    """Whether JAX passes a program's constants to its executable at every call (an option, off in 0.10.0 to 0.12.0).

    Otherwise they are part of the lowered program.
    """
    return bool(getattr(jax.config, "jax_use_simplified_jaxpr_constants", False))


def eval_eqn(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one eqn of a jaxpr as `jax.core.eval_jaxpr` does, which takes whole jaxprs only (0.10.0 to 0.12.0)."""
    with eqn_scope(eqn):
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def eqn_scope(eqn: Any) -> Generator[None]:
    """Gives operations inside the names, the source line and the settings of an eqn (0.10.0 to 0.12.0)."""
    source = eqn.source_info
    names = current_name_stack() + source.name_stack
    with user_context(source.traceback, name_stack=names), eqn.ctx.manager:
        yield


class _NoTraceback:
    """A substitute for a traceback that makes JAX take a new one for each operation."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        return None


@contextlib.contextmanager
def record_source_lines() -> Generator[None]:
    """Records for operations inside their own lines of code, even in a custom derivative (0.10.0 to 0.12.0).

    JAX records for those of `fwd` and `bwd` the line of the call. Taking tracebacks costs time, so this is only for the
    inspection of a program.
    """
    with user_context(_NoTraceback()):  # type: ignore[arg-type]
        yield


def eqn_source_line(eqn: Any) -> str:
    """Returns the line of user code that an eqn comes from, as "file:line (function)" (0.10.0 to 0.12.0)."""
    return summarize(eqn.source_info)


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a scan eqn (0.10.0 to 0.12.0).

    0.12.0 has them as a tree instead of two numbers.
    """
    tree = eqn.params.get("ft_in")
    if tree is None:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = tree.update(range(len(eqn.invars))).unpack()
    return len(list(consts)), len(list(carry))


def while_sizes(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of constants of a while loop's condition and of its body (0.10.0 to 0.12.0)."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def jit_options(eqn: Any) -> dict[str, Any]:
    """Returns the options of a `jit` eqn, for a function that returns a pair (0.10.0 to 0.12.0).

    Donations are omitted: JAX compiles a staged jaxpr as a whole, and may read a donated array again.

    Args:
      eqn: A `jit` eqn.

    Returns:
      Keyword arguments of `jax.jit`, for a function of the eqn's operands. Its first result is a tuple of the eqn's
      results; nothing is known of the second.
    """
    params = eqn.params

    def placed(shardings: Sequence[Any], layouts: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(shardings, layouts, strict=True)
        return tuple(sharding if layout is None else Format(layout, sharding) for sharding, layout in pairs)

    return {
        "in_shardings": placed(params["in_shardings"], params["in_layouts"]),
        "out_shardings": (placed(params["out_shardings"], params["out_layouts"]), None),
        "keep_unused": params["keep_unused"],
        "inline": params["inline"],
        "compiler_options": dict(params["compiler_options_kvs"]) or None,
    }


def is_plain_jit(eqn: Any) -> bool:
    """Whether a `jit` eqn has no shardings, layouts or compiler options."""
    params = eqn.params
    options = [*params["in_shardings"], *params["out_shardings"], *params["in_layouts"], *params["out_layouts"]]
    is_placed = any(x is not None and type(x).__name__ != "UnspecifiedValue" for x in options)  # 0.10.0 to 0.12.0
    return not (is_placed or params["compiler_options_kvs"])


def platforms_of_branches(eqn: Any) -> Sequence[tuple[str, ...] | None] | None:
    """Returns the platforms of each branch of a `cond` eqn, `None` for a default branch (0.10.0 to 0.12.0).

    `None` for a `cond` that does not choose by the platform.
    """
    return eqn.params.get("branches_platforms")


def manual_axes(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes of a `shard_map` eqn that are manual inside (0.10.0, and under another name 0.12.0)."""
    params = eqn.params
    return params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]


def manual_axes_here() -> Sequence[str]:
    """Returns the mesh axes that are manual in the current context, as inside `shard_map` (0.10.0 to 0.12.0)."""
    return jax.sharding.get_abstract_mesh().manual_axes


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes that a value varies over inside `shard_map(check_vma=True)`.

    They are in `manual_axis_type` (0.10.0 to 0.12.0), which has replaced `.vma`.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def cotangent_sharding(aval: Any) -> Any:
    """Returns the sharding of a value's cotangent on explicit mesh axes (0.10.0 to 0.12.0).

    It is that of the value with `reduced` and `unreduced` axes swapped.
    """
    return aval.to_ct_aval().sharding


def memory_space(array: Any) -> Any:
    """Returns the `jax.memory.Space` of an array, traced or not, or of a variable of a jaxpr (0.10.0 to 0.12.0)."""
    aval: Any = array.aval if isinstance(array, Var) else jax.typeof(array)
    return aval.memory_space


def make_jaxpr(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the jaxpr of a function, with the jaxprs of all its eqns.

    With JAX_CUSTOM_VJP3 (0.12.0) a custom_vjp is one eqn at first, and only lowering shows the jaxpr inside.
    """
    return lower_jaxpr(jax.make_jaxpr(function)(*args))


def lower_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr with the jaxprs of all its eqns; lowering drops custom derivatives. See `make_jaxpr`."""
    lower = getattr(partial_eval, "lower_jaxpr2", None)
    return jaxpr if lower is None or not jaxpr.jaxpr.is_high else lower(jaxpr)


_JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")


def is_code_of_jax(jaxpr: Any) -> bool:
    """Whether the function that was traced to a jaxpr is one of JAX's own (0.10.0 to 0.12.0)."""
    return (getattr(jaxpr, "jaxpr", jaxpr).debug_info.func_filename or "").startswith(_JAX_FOLDER)


def inner_jaxpr(eqn: Any) -> Any:
    """Returns what an eqn of JAX's experimental checkpoint or custom derivatives computes; `None` for other eqns.

    These eqns have no jaxpr among their params (0.12.0).
    """
    if eqn.primitive.name != "call_hi_primitive":
        return None
    return make_jaxpr(
        lambda *operands: eqn.primitive.bind(*operands, **eqn.params),
        *[zeros_of(operand.aval) for operand in eqn.invars],
    )


# XLA's own names, not promised to stay: no optimization, one module on the CPU, and no fusing of loops there. 0.10.0 to
# 0.10.2 know all three, 0.12.0 the first two.
_SHORT: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
_QUICK: list[dict[str, Any]] = [
    {**_SHORT, "xla_cpu_use_fusion_emitters": False},
    _SHORT,
    {"xla_backend_optimization_level": 0},
    {},
]


def compile_quickly(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles in a third of the usual time, for programs that run for less time than optimizing them takes."""
    for options in list(_QUICK[:-1]):
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError:  # an option that this XLA does not know
            with contextlib.suppress(ValueError):  # another thread may have removed it meanwhile
                _QUICK.remove(options)
    return lowered.compile()


def compile_as_written(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program so that each operation is rounded to its dtype; otherwise XLA may skip that between two."""
    try:
        return lowered.compile(compiler_options={"xla_allow_excess_precision": False})  # 0.10.0 and 0.12.0 know it
    except jax.errors.JaxRuntimeError:
        return lowered.compile()
