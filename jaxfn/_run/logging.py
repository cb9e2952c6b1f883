"""What `ctx.log` was given, handed to whoever looks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from jaxfn._observation import OBSERVATION, Label, Observation, current_log, current_log_depth
from jaxfn._primitives.mark import mark_beside
from jaxfn._protocol.context import ContextState
from jaxfn._values.arrays import as_array, is_array_leaf, is_jax_type, is_traced

_Arrays = TypeVar("_Arrays", bound=Sequence[Any])


def hand_over_logs(function: str, method: str, state: ContextState, results: _Arrays) -> _Arrays:
    """The results of a method; in a program that is looked into, they hold what the method logged.

    Args:
      function, method: the names of the Function and of the method.
      state: of the ctx that the method was given.
      results: array leaves of what it returned, `None`s among them.
    """
    log = current_log()
    if log is not None:
        for name, value in state.logged:  # a number too has no place in a program, which is run again without Python
            if any(map(is_traced, [value, *results])):
                raise RuntimeError(
                    f"{function}.{method} logs {name!r} inside of jaxfn.logged(), where JAX traces it (jit, vmap, "
                    "scan, a higher derivative), so that there is no value yet. Use jaxfn.with_logs(f), which returns "
                    "the result and the logs, and jit that."
                )
            # Under a derivative of a Function that has both modes, `jnp.asarray` makes a tracer of a number (0.12.0).
            is_of_jax = is_jax_type(type(value)) or hasattr(value, "__jax_array__")
            log.setdefault(name, []).append(as_array(value) if is_of_jax else jax.device_put(value))
    if OBSERVATION.value is not Observation.LOGS:
        return results
    places = [i for i, x in enumerate(results) if is_array_leaf(x)]
    if not places:
        raise NotImplementedError(
            f"{function}.{method} logs {state.logged[0][0]!r} and returns no array, which would carry it out of the "
            "program for with_logs. Return zeros instead of None."
        )
    depth = current_log_depth()
    labels = [Label(function, method, "log", name, log_depth=depth) for name, _ in state.logged]
    marked = mark_beside([results[i] for i in places], [as_array(value) for _, value in state.logged], labels)
    holding: Any = list(results)
    for i, x in zip(places, marked, strict=True):
        holding[i] = x
    return holding
