"""User contexts by which jaxfn's tools inspect programs, and the labels that they find there."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfn._compat import VmapAxis, callback_effects, make_identity, make_primitive
from jaxfn._jaxpr import identity_primitives
from jaxfn._traces import is_in_loop_condition, is_ref
from jaxfn._tree import TreeSpec, as_array, is_array_leaf, is_key, is_traced, leaves_with_path, replace_at

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
    """Arrays or lines that a tool looks for."""

    LINES = "the lines of the operations in forward"
    RESIDUALS = "what backward reads of what forward saved"
    VALUES = "all arrays that pass between JAX and the methods of a Function"


# A user context is thread-local and part of the key of jit's cache: a program is traced again, with its labels.
OBSERVATION: Any = jax.make_user_context(default_value=None)
"""Its `value` is the active `Observation`, if any: then Functions label arrays, by an identity that lowers away."""

LOGS: Any = jax.make_user_context(default_value=None)
"""Its `value` is the active `LogTarget`, if any: then `ctx.log` stages a callback."""


class LogTarget(NamedTuple):
    """A reference to the open log: the log itself must not be part of the key of jit's cache.

    Attributes:
      number: a number that no other open `logged` has.
      ordered: whether the callbacks of a program run in its order.
      is_in_loop_condition: whether a Function is called in the condition of a `while` loop.
    """

    number: int
    ordered: bool
    is_in_loop_condition: bool = False


open_logs: dict[int, dict[str, list[Any]]] = {}
"""By the number of the target, the values that were logged, by name, in the order in which they came."""


class Label(NamedTuple):
    """The role of an array in a forward pass."""

    function: str
    method: str  # "forward", "backward" or "jvp": the method that takes or returns the array
    role: str  # "input", "output", "saved", "grad_output", "gradient" or "tangent"
    name: str  # of the parameter, output or saved value
    source: str = ""  # "input", "output" or "intermediate", for a saved array
    is_packed: bool = False  # whether saved-tensor hooks have packed it
    factors: tuple[str, ...] | None = None  # of a saved array, those of the Function's sharding rule


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
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], Sequence[Any]]:
    return label_p.bind(*operands, **params), dims


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


def log(name: str, value: Any) -> None:
    """Logs a value each time it is computed, for the `logged` that is active here; without one, does nothing."""
    target = LOGS.value
    if target is not None:
        log_p.bind(as_array(value.copy() if isinstance(value, np.ndarray) else value), name=name, target=target)


def log_scope() -> Any:
    """Returns a context for the call of a Function: JAX hides from a custom derivative what surrounds it."""
    target = LOGS.value
    if target is None or not is_in_loop_condition():
        return nullcontext()
    return LOGS(target._replace(is_in_loop_condition=True))


def _record(value: Any, *, name: str, target: LogTarget) -> list[Any]:
    value = as_array(value)  # a scalar may have become a literal
    impl = jax.random.key_impl(value) if is_key(value) else None

    def append(value: Any) -> None:
        if target.number in open_logs:
            key_or_value = value if impl is None else jax.random.wrap_key_data(value, impl=impl)
            open_logs[target.number].setdefault(name, []).append(key_or_value)

    if not is_traced(value):
        jax.effects_barrier()  # an eager callback would overtake those of programs that run
    jax.debug.callback(append, value if impl is None else jax.random.key_data(value), ordered=target.ordered)
    return []


def _no_results(*_: Any, **params: Any) -> list[Any]:
    return []


def _log_jvp(primals: Sequence[Any], _: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    return log_p.bind(*primals, **params), []


def _transpose_log(*_: Any, **params: Any) -> list[None]:
    return [None]


def _batch_log(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[int], **params: Any
) -> tuple[list[Any], Sequence[Any]]:
    return log_p.bind(axis.to_axis_0(operands[0], dims[0]), **params), []


def log_effects(target: LogTarget | None, **_: Any) -> Collection[Any]:
    """Returns the effects of code that logs."""
    if target is None:
        return ()
    # Under `jax.vmap`, JAX evaluates a loop with an ordered effect in its condition too often (0.10.0 to 0.12.0).
    if target.ordered and (target.is_in_loop_condition or is_in_loop_condition()):
        raise NotImplementedError(
            "ctx.log cannot log in order inside the condition of a while loop. Use jaxfn.logged(ordered=False)."
        )
    return callback_effects(target.ordered)


log_p = make_primitive(
    "log",
    evaluate=_record,
    avals=_no_results,
    effects=log_effects,
    jvp=_log_jvp,
    batch=_batch_log,
    transpose=_transpose_log,
    runs_user_code=True,
)
