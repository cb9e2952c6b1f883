"""What is being looked for in a program while it is traced, so that Functions leave marks in it.

See `jaxfn._primitives.mark`. Nothing is left in a program while nothing is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import jax


class Observation(Enum):
    """What is looked for."""

    RESIDUALS = "what backward reads of what forward saved"
    VALUES = "all arrays that pass between JAX and the methods of a Function"
    LOGS = "what `ctx.log` is given"
    EAGER_LOGS = "the same, outside of traced programs"


class Label(NamedTuple):
    """What an array of a run is.

    Attributes:
      function: the Function's name.
      method: "forward", "backward" or "jvp": which of its methods takes the array, or made it.
      role: "input", "output", "saved", "grad_output", "gradient", "tangent" or "log".
      name: of which parameter, output, saved or logged value.
      source: of a saved array, whether it is an "input", an "output", an "intermediate" or "closed over" by a rule.
      is_packed: whether saved-tensor hooks have packed it.
      log_depth: of what is logged, how many `with_logs` there are around: the innermost takes it.
    """

    function: str
    method: str
    role: str
    name: str
    source: str = ""
    is_packed: bool = False
    log_depth: int = 0


Log = dict[str, list[Any]]  # by name, the values in the order of the calls


# A user context is each thread's own, and a part of the key of jit's caches: a program is traced anew with its marks.
OBSERVATION: Any = jax.make_user_context(default_value=None)
"""Its `value` is what is looked for, an `Observation`, if anything."""

# How many `with_logs` there are around, each of which takes what is logged inside of it and not inside of another.
_log_depth: Any = jax.make_user_context(default_value=0)


# Not a part of that key: each log would have all programs traced anew, and caches would keep it, with its values.
_log: ContextVar[Log | None] = ContextVar("log", default=None)


def current_log_depth() -> int:
    """How many times over logs are looked for here."""
    return _log_depth.value


def current_log() -> Log | None:
    """Where what is logged in eager code goes, if anywhere."""
    return _log.get() if OBSERVATION.value is Observation.EAGER_LOGS else None


@contextmanager
def observing(observation: Observation) -> Generator[None]:
    """Looks for something, and for nothing else, in what is traced inside."""
    with OBSERVATION(observation), _log_depth(current_log_depth() + (observation is Observation.LOGS)):
        yield


@contextmanager
def collecting(log: Log) -> Generator[None]:
    """Adds what is logged in eager code inside to a log."""
    token = _log.set(log)
    try:
        with observing(Observation.EAGER_LOGS):
            yield
    finally:
        _log.reset(token)


def line_name(line: str) -> str:
    """A line of code as a part of an operation's name, for code that Python is not running when JAX sees it."""
    return "line{{" + line + "}}"


def named_line(names: str) -> str | None:
    """The innermost line in an operation's names, if there is one."""
    lines = re.findall(r"line\{\{(.*?)\}\}", names)
    return lines[-1] or None if lines else None
