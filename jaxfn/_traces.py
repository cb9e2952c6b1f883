"""The one module that knows JAX's traces and tracers, none of which JAX promises (0.10.0 to 0.12.0).

An array under transformations is a pile of tracers: those of derivatives and of `jax.vmap` wrap another array, that
of a jaxpr being traced has a variable. What reads a jaxpr that is not finished is tried once, at import
(`CAN_READ_EQNS`); without it, programs have more eqns, and what cannot be right raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Var, find_top_trace
from jax.interpreters import partial_eval
from jax.ref import AbstractRef


@lru_cache
def _kind(array_type: type) -> str:
    """Returns "derivative", "vmap" or "jaxpr" for a type of tracers, and "" for other types."""
    if not issubclass(array_type, Tracer):
        return ""
    if issubclass(array_type, partial_eval.DynamicJaxprTracer):
        return "jaxpr"
    return "derivative" if hasattr(array_type, "tangent") else "vmap" if hasattr(array_type, "batch_dim") else ""


def layers(array: Any) -> Iterator[tuple[str, Any]]:
    """Yields an array and what is under it, the outermost tracer first, each with its kind (see `_kind`)."""
    while True:
        kind = _kind(type(array))
        yield kind, array
        if kind not in ("derivative", "vmap"):
            return
        array = array.primal if kind == "derivative" else array.val


def innermost(array: Any) -> Any:
    """Returns the array under the tracers of derivatives and vmaps."""
    return list(layers(array))[-1][1]


def is_concrete(array: Any) -> bool:
    """Whether an array has values under the tracers of derivatives and vmaps."""
    return not isinstance(innermost(array), (Tracer, jax.ShapeDtypeStruct))


def is_ref(value: Any) -> bool:
    """Whether an array leaf is a mutable reference, concrete or traced."""
    return isinstance(jax.typeof(value), AbstractRef)  # quicker than isinstance(value, jax.Ref)


def may_be_differentiated(array: Any) -> bool:
    """Whether an array is being differentiated or staged, and not only mapped by `vmap` or an eager `shard_map`."""
    return any(
        isinstance(layer, Tracer) and kind != "vmap" and type(layer).__name__ != "ShardMapTracer"
        for kind, layer in layers(array)
    )


def is_staged(array: Any) -> bool:
    """Whether an array is a value of a jaxpr that is being traced, under the tracers of derivatives and vmaps."""
    return _kind(type(innermost(array))) == "jaxpr"


def is_differentiated(array: Any) -> bool:
    """Whether an array has a tangent here."""
    return any(kind == "derivative" for kind, _ in layers(array))


def is_mapped(array: Any) -> bool:
    """Whether an array is batched by `jax.vmap` here."""
    return any(kind == "vmap" for kind, _ in layers(array))


def elements_under_vmaps(array: Any) -> np.ndarray[Any, Any]:
    """Returns the values of a concrete array for all elements of batches, along the first axis."""
    kind = _kind(type(array))
    if kind == "derivative":
        return elements_under_vmaps(array.primal)
    if kind != "vmap":
        return np.asarray(array)[None]
    values = elements_under_vmaps(array.val)
    if not isinstance(array.batch_dim, int):  # the same for all
        return values
    return np.moveaxis(values, array.batch_dim + 1, 1).reshape(-1, *array.shape)


def without_vmaps(array: Any) -> tuple[Any, dict[Any, int]]:
    """Returns the array under the tracers of vmaps, and by the trace of each vmap the axis of it that is mapped."""
    axes: dict[Any, int] = {}
    while _kind(type(array)) == "vmap":
        if isinstance(array.batch_dim, int):
            axes[array._trace] = array.batch_dim
        array = array.val
    return array, axes


def is_in_scope(tracer: Any) -> bool:
    """Whether a tracer may be used here, or is not known to belong to a derivative that JAX has left."""
    if _kind(type(tracer)) != "derivative":
        return True
    traces = list(_enclosing(find_top_trace(())))
    return tracer._trace in traces or type(traces[-1]).__name__ != "EvalTrace"  # else JAX does not know them all


def _enclosing(trace: Any) -> Iterator[Any]:
    """Yields a trace and those around it, the innermost first, as far as JAX knows them."""
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def is_in_loop_condition() -> bool:
    """Whether the condition of a `while` loop, or a function in it, is being staged here."""
    frames = [trace.frame for trace in _enclosing(find_top_trace(())) if hasattr(trace, "frame")]
    return any(frame.debug_info.traced_for == "while_cond" for frame in frames)


def staging_trace() -> Any:
    """Returns the innermost trace that stages to a jaxpr here; `None` outside `jit`."""
    return next((trace for trace in _enclosing(find_top_trace(())) if hasattr(trace, "frame")), None)


def manual_axes_here() -> Sequence[str]:
    """Returns the mesh axes that are manual in the current context, as inside `shard_map`."""
    return jax.sharding.get_abstract_mesh().manual_axes


# Jaxprs being traced


def variable(array: Any) -> Var | None:
    """Returns the variable of a staged array; `None` for other arrays, and for literals."""
    value = getattr(array, "val", None) if _kind(type(array)) == "jaxpr" else None
    return value if isinstance(value, Var) else None


def producer(array: Any) -> tuple[Any, int] | None:
    """Returns the eqn that computes a staged array, whose operands are staged arrays, and the index among its results.

    `None` for inputs and constants.
    """
    eqn = getattr(array, "parent", None)
    return None if eqn is None else (eqn, eqn.outvars.index(array.val))


class NewConstants:
    """The constants that the jaxpr being traced gets from now on."""

    def __init__(self) -> None:
        trace = staging_trace() if CAN_READ_EQNS else None
        self._constants = {} if trace is None else trace.frame.constvar_to_val
        self._before = len(self._constants)

    def any(self, condition: Callable[[Any], bool]) -> bool:
        """Whether a condition holds for one of them."""
        is_new = len(self._constants) > self._before
        return is_new and any(map(condition, list(self._constants.values())[self._before :]))


def has_ended(array: Any) -> bool:
    """Whether the trace of a staged array has surely ended: JAX then forgets its eqns, that of the array among them.

    In another jaxpr such an array is a constant, until that is compiled.
    """
    array = innermost(array)
    is_computed = _kind(type(array)) == "jaxpr" and array.parent is not None
    return is_computed and not array._trace.frame.tracing_eqns


def _can_read_eqns() -> bool:
    found: list[bool] = []

    def probe(x: Any) -> Any:
        y = jax.lax.stop_gradient_p.bind(x)
        eqn, index = producer(y) or (None, None)
        constants = staging_trace().frame.constvar_to_val
        found.append(
            eqn is not None
            and (index, eqn.primitive, eqn.invars[0].val) == (0, jax.lax.stop_gradient_p, x.val)
            and (producer(x), variable(x) is x.val, len(constants)) == (None, True, 0)
        )
        return y

    try:
        jax.make_jaxpr(probe)(jax.ShapeDtypeStruct((), np.float32))
    except Exception:
        return False
    return found == [True]


CAN_READ_EQNS = _can_read_eqns()
"""Whether this JAX lets the eqns of a jaxpr be read while it is traced."""
