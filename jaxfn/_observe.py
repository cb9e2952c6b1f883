"""User contexts by which jaxfn's tools inspect programs, and the labels that they find there."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import jax

from jaxfn._compat import VmapAxis, make_identity
from jaxfn._jaxpr import identity_primitives
from jaxfn._traces import is_ref
from jaxfn._tree import TreeSpec, as_array, is_array_leaf, is_jax_type, is_traced, leaves_with_path, replace_at

CALL_MONITOR: Any = jax.make_user_context(default_value=None)
"""Its `value` is the active `CallMonitor` of gradcheck, if any, which `with monitor.active():` sets."""


def active_monitor() -> Any:
    """Returns the active `CallMonitor`, for what it has to see; or `None`."""
    monitor: Any = CALL_MONITOR.value
    if monitor is not None:
        monitor.note_trace()
    return monitor


def record_perturbation_read() -> None:
    """Records for the active `CallMonitor` that a method may depend on what is differentiated."""
    monitor = active_monitor()
    if monitor is not None:
        monitor.reads_perturbation = True


class Observation(Enum):
    """A kind of arrays that a tool looks for."""

    RESIDUALS = "what backward reads of what forward saved"
    VALUES = "all arrays that pass between JAX and the methods of a Function"
    LOGS = "the values that `ctx.log` receives"
    EAGER_LOGS = "the values that `ctx.log` receives in eager code"


# A user context is thread-local and part of the key of jit's cache: a program is traced again, with its labels.
OBSERVATION: Any = jax.make_user_context(default_value=None)
"""Its `value` is the active `Observation`, if any: then Functions label arrays, by an identity that lowers away."""

LOG_DEPTH: Any = jax.make_user_context(default_value=0)
"""Its `value` is the number of enclosing `with_logs`. Each takes what is logged inside it and not in an inner one."""

# Not part of that key: each log would retrace all programs, and caches would store its values.
LOG: ContextVar[dict[str, list[Any]] | None] = ContextVar("log", default=None)
"""By name, the values that were logged in eager code, in the order of the calls."""


class Label(NamedTuple):
    """The role of an array in a forward pass."""

    function: str
    method: str  # "forward", "backward" or "jvp": the method that takes or returns the array
    role: str  # "input", "output", "saved", "grad_output", "gradient", "tangent" or "log"
    name: str  # of the parameter, output, saved or logged value
    source: str = ""  # "input", "output" or "intermediate", for a saved array
    is_packed: bool = False  # whether saved-tensor hooks have packed it
    log_depth: int = 0  # the number of enclosing `with_logs`, of which the innermost takes a logged value


def line_name(line: str) -> str:
    """Encodes a line of code as part of an operation's name, for code that does not run when JAX traces it."""
    return "line{{" + line + "}}"


def named_line(names: str) -> str | None:
    """Returns the innermost line in an operation's names, if there is one."""
    lines = re.findall(r"line\{\{(.*?)\}\}", names)
    return lines[-1] or None if lines else None


def label_arrays(arrays: Sequence[Any], labels: Sequence[Hashable]) -> list[Any]:
    """Returns the arrays; in a traced program each has its label."""
    return label_p.bind(*arrays, labels=tuple(labels), num_arrays=len(arrays)) if arrays else []


def _batch_label(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], *, labels: Any, num_arrays: int
) -> tuple[list[Any], Sequence[Any]]:
    values = [
        x if d is None else axis.to_axis_0(x, d) for x, d in zip(operands[num_arrays:], dims[num_arrays:], strict=True)
    ]
    arrays = operands[:num_arrays]
    return label_p.bind(*arrays, *values, labels=labels, num_arrays=num_arrays), dims[:num_arrays]


label_p = make_identity("label", _batch_label)
identity_primitives.add(label_p)


def label_present(arrays: Sequence[Any], function: str, method: str, role: str, names: Sequence[str]) -> list[Any]:
    """Labels those entries of a list that are arrays."""
    indices = [i for i, x in enumerate(arrays) if is_array_leaf(x) and not is_ref(x)]
    labels = [Label(function, method, role, names[i]) for i in indices]
    return replace_at(indices, arrays, label_arrays([arrays[i] for i in indices], labels))


def leaf_names(names: Iterable[str], trees: Sequence[TreeSpec]) -> list[str]:
    """Returns a name for each array leaf of values that have these names and tree specs."""
    found: list[str] = []
    for name, spec in zip(names, trees, strict=True):
        tree = spec.unflatten_gradient(iter(range(spec.num_arrays)))
        found += [name + jax.tree_util.keystr(path) for path, _ in leaves_with_path(tree)]
    return found


def emit_logs(function: str, method: str, logged: Sequence[tuple[str, Any]], results: list[Any]) -> list[Any]:
    """Emits the values that a method logged; returns its results, to which a traced program attaches those values."""
    log = LOG.get() if OBSERVATION.value is Observation.EAGER_LOGS else None
    if log is not None:
        for name, value in logged:
            # A Python number raises too: a compiled program, which runs without Python, could not log it.
            if any(map(is_traced, [value, *results])):
                raise RuntimeError(
                    f"{function}.{method} logs {name!r} inside jaxfn.logged(), where JAX traces it (jit, vmap, "
                    "scan, a higher derivative), so that there is no value yet. Use jaxfn.with_logs(f), which returns "
                    "the result and the logs, and jit that."
                )
            # Under a derivative of a Function with both modes, `jnp.asarray` makes a number a tracer (0.12.0).
            is_of_jax = is_jax_type(type(value)) or hasattr(value, "__jax_array__")
            log.setdefault(name, []).append(as_array(value) if is_of_jax else jax.device_put(value))
    if OBSERVATION.value is not Observation.LOGS:
        return results
    indices = [i for i, x in enumerate(results) if is_array_leaf(x)]
    if not indices:
        raise NotImplementedError(
            f"{function}.{method} logs {logged[0][0]!r} and returns no array, which would carry it out of the program "
            "for with_logs. Return zeros instead of None."
        )
    arrays, values = [results[i] for i in indices], [as_array(value) for _, value in logged]
    labels = [Label(function, method, "log", name, log_depth=LOG_DEPTH.value) for name, _ in logged]
    labels = (*[None] * len(arrays), *labels)
    labelled: Any = label_p.bind(*arrays, *values, labels=labels, num_arrays=len(arrays))
    return replace_at(indices, results, labelled)
