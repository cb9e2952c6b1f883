"""User contexts by which jaxfn's tools inspect programs, and the labels that they find there."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import jax

from jaxfn._compat import VmapAxis, make_primitive
from jaxfn._jaxpr import identity_primitives
from jaxfn._traces import is_ref, staging_traces
from jaxfn._tree import TreeSpec, as_array, is_array_leaf, is_jax_type, is_traced, leaves_with_path, replace_at


@dataclass(eq=False)
class CallMonitor:
    """A monitor of calls: what a check of derivatives learns of each, and how Functions run for the check.

    # Note: JAX's caches

    The active monitor is part of the keys of JAX's caches. Monitors with equal options are equal, so that JAX has the
    jaxprs of jax.numpy's functions from earlier checks, but only as long as the caches have no jaxpr that contains a
    call which the next monitor has to see: after a call in such a jaxpr, new monitors differ from all earlier ones.
    """

    bypass_rules: bool  # whether outermost Functions run as their bare `forward`, which JAX then differentiates
    stops_intermediates: bool = False  # whether saved intermediates have no derivative, as in torch
    # The Functions that were called, in order, each once.
    functions: dict[Any, None] = field(default_factory=dict[Any, None])
    # The gradients that `backward` returned in another dtype than its input's: (where, returned, expected).
    casts: dict[tuple[str, str, str], None] = field(default_factory=dict[tuple[str, str, str], None])
    # The differentiated inputs for which `backward` returned `None`: (method, input).
    without_gradient: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])
    # Whether a method may depend on what is differentiated: it read `ctx.needs_input_grad`, or receives `None`.
    reads_perturbation: bool = False
    _trace: Any = None  # the one in which the monitor was activated
    _epoch: object = field(default_factory=lambda: _epochs.current)

    def __hash__(self) -> int:
        return hash((self.bypass_rules, self.stops_intermediates, id(self._epoch)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallMonitor) and (
            (self.bypass_rules, self.stops_intermediates) == (other.bypass_rules, other.stops_intermediates)
            and self._epoch is other._epoch
        )

    @contextmanager
    def active(self) -> Generator[None]:
        """Activates the monitor."""
        before, self._trace = self._trace, _staging_trace()
        try:
            with CALL_MONITOR(self):
                yield
        finally:
            self._trace = before

    def note_trace(self) -> None:
        """Makes later monitors differ if JAX may cache the jaxpr that is being traced."""
        if _staging_trace() is not self._trace:
            self.end_epoch()

    @staticmethod
    def end_epoch() -> None:
        """Makes later monitors differ from earlier ones."""
        _epochs.current = object()


def _staging_trace() -> Any:
    return next(iter(staging_traces()), None)


class _Epochs(threading.local):
    """The current epoch of a thread: monitors of one epoch are equal if their options are."""

    def __init__(self) -> None:
        self.current = object()


_epochs = _Epochs()
CALL_MONITOR: Any = jax.make_user_context(default_value=None)
"""Its `value` is the active `CallMonitor`, if any, which `with monitor.active():` sets."""


def active_monitor() -> CallMonitor | None:
    """Returns the active monitor, for what it has to see; or `None`."""
    monitor: CallMonitor | None = CALL_MONITOR.value
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


def _label_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], Sequence[Any]]:
    return label_p.bind(*primals, **params), tangents[: params["num_arrays"]]


def _batch_label(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], *, labels: Any, num_arrays: int
) -> tuple[list[Any], Sequence[Any]]:
    values = [
        x if d is None else axis.to_axis_0(x, d) for x, d in zip(operands[num_arrays:], dims[num_arrays:], strict=True)
    ]
    arrays = operands[:num_arrays]
    return label_p.bind(*arrays, *values, labels=labels, num_arrays=num_arrays), dims[:num_arrays]


def _transpose_label(cotangents: Sequence[Any], *operands: Any, labels: Any, num_arrays: int) -> list[Any]:
    """Leaves out the values: where reverse mode transposes a `jvp`, its tangents have none."""
    return [*cotangents, *[None] * (len(operands) - num_arrays)]


def _evaluate_label(*operands: Any, labels: Any, num_arrays: int) -> list[Any]:
    return list(operands[:num_arrays])


label_p = make_primitive(
    "label", evaluate=_evaluate_label, jvp=_label_jvp, batch=_batch_label, transpose=_transpose_label
)
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
