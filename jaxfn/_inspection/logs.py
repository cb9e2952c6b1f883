"""`logged` and `with_logs`: return values that Functions log by `ctx.log`, in eager and in traced code."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import lower_jaxpr
from jaxfn._inspection.harvest import EqnLocation, Harvest, Probe, any_eqn, harvest, location_of
from jaxfn._jaxpr import open_jaxpr
from jaxfn._mesh_types import pcast_like
from jaxfn._observe import LOG, LOG_DEPTH, OBSERVATION, Observation, label_p
from jaxfn._primitives import DeferredError, guard
from jaxfn._tree import flatten, is_inexact, is_key

Logs = dict[str, list[jax.Array]]


@contextmanager
def logged() -> Generator[Logs]:
    """Collects the values that Functions log by `ctx.log` in eager code.

    Yields:
      A dict of lists of arrays, by name, in the order of the calls. It fills while the block runs.

    Raises:
      RuntimeError: A value is traced (under jit, vmap, scan). There, use `with_logs`.

    Examples:
      >>> import jax.numpy as jnp, jaxfn
      >>> @jaxfn.function
      ... def doubled(ctx, x):
      ...     ctx.log(mean=x.mean())
      ...     return 2 * x
      >>> with jaxfn.logged() as log:
      ...     y = doubled(doubled(jnp.ones(3)))
      >>> print(log["mean"])
      [Array(1., dtype=float32), Array(2., dtype=float32)]

    Torch counterpart: none.
    """
    log: Logs = {}
    token = LOG.set(log)
    try:
        with OBSERVATION(Observation.EAGER_LOGS):
            yield log
    finally:
        LOG.reset(token)


def with_logs(f: Callable[..., Any]) -> Callable[..., tuple[Any, Logs]]:
    """Transforms a function to one that also returns the values that Functions in it log by `ctx.log`.

    The logs are ordinary results, without callbacks, so all of it works under `jax.jit` and on every device. To include
    the logs of `backward`, put the derivative inside: `with_logs(jax.value_and_grad(loss))`. A nested `with_logs` takes
    the logs inside it. Arguments that an inner `jax.jit` donates are not donated: donate them to
    `jax.jit(with_logs(f), donate_argnums=...)`.

    Args:
      f: A function of arrays and static Python values that returns arrays, in pytrees.

    Returns:
      A function of the arguments of `f` that returns `(result, logs)`. `logs` is a dict of lists of arrays by name,
      one for each call of `ctx.log`, in program order. Each array has an axis for every enclosing loop, the
      outermost first: the steps of a `scan`, the devices of a `shard_map`; a value under `vmap` has its batch at axis
      0. From a `while` loop the last step is returned. For a branch that was not taken, and a loop without a step,
      floating-point numbers are NaN, integers the least of their dtype, booleans False, and random keys zeros. What
      `jax.checkpoint` computes again is logged once, and the tangents that a `jvp` logs are left out if reverse mode
      transposes it, as they have no value there.

    Raises:
      NotImplementedError: A method logs and returns no array, or a Function logs where no value can be returned from,
        such as in the condition of a `while` loop or in the operation of a `jax.lax.reduce`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> @jaxfn.function
      ... def rounded(ctx, x):
      ...     y = jnp.round(x)
      ...     ctx.log(error=jnp.abs(y - x).max())
      ...     return y
      >>> @rounded.backward
      ... def _(ctx, grad_output):
      ...     ctx.log(norm=jnp.linalg.norm(grad_output))
      ...     return grad_output
      >>> step = jax.jit(jaxfn.with_logs(jax.grad(lambda x: (rounded(x) ** 2).sum())))
      >>> gradient, logs = step(jnp.array([0.25, 1.5]))
      >>> print(logs["error"], logs["norm"])
      [Array(0.5, dtype=float32)] [Array(4., dtype=float32)]

    Torch counterpart: none.
    """

    @wraps(f)
    def logging(*args: Any, **kwargs: Any) -> tuple[Any, Logs]:
        arrays, spec = flatten((args, kwargs))
        trees: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            args, kwargs = spec.unflatten(iter(arrays))
            leaves, tree = jax.tree_util.tree_flatten(f(*args, **kwargs))
            trees[:] = [tree]
            return leaves

        with OBSERVATION(Observation.LOGS), LOG_DEPTH(LOG_DEPTH.value + 1):
            closed: Any = jax.make_jaxpr(flat)(*arrays)
            lowered = lower_jaxpr(closed)
            jaxpr, consts = open_jaxpr(lowered)
            probe = _Logs(LOG_DEPTH.value)
            results, harvested = harvest(jaxpr, consts, arrays, probe)
        if lowered is not closed:
            floating = [x for x in arrays if is_inexact(jax.typeof(x).dtype)]
            results = guard(results, floating, DeferredError(NotImplementedError, _INSIDE))
        logs: Logs = {}
        for path in sorted(harvested):
            location = location_of(jaxpr, path)
            label = probe.labels(location.eqn)[location.value_index]
            if label.method != "forward" or not _is_rematerialized(location):
                logs.setdefault(label.name, []).append(harvested[path])
        return jax.tree_util.tree_unflatten(trees[0], results), logs

    return logging


_INSIDE = (
    "with_logs(f) was differentiated, which JAX's experimental custom_vjp does not allow. Differentiate inside: "
    "jaxfn.with_logs(jax.value_and_grad(f))."
)


def _is_rematerialized(location: EqnLocation) -> bool:
    """Whether `jax.checkpoint` evaluates an eqn again for the backward pass."""
    is_differentiated = any(eqn.params.get("differentiated") for eqn, _ in location.enclosing)
    return is_differentiated or "rematted_computation" in location.names


class _Logs(Probe):
    keeps_rules = True

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def labels(self, eqn: Any) -> list[Any]:
        """Returns the labels of logged values of this `with_logs`."""
        logged = [label for label in eqn.params["labels"] if label is not None and label.role == "log"]
        return [label for label in logged if label.log_depth == self._depth]

    def is_wanted(self, eqn: Any) -> bool:
        return eqn.primitive is label_p and bool(self.labels(eqn))

    def values(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        return [jnp.asarray(x) for x in operands[eqn.params["num_arrays"] :]]

    def absent(self, value: Any) -> Any:
        zeros = pcast_like(jnp.zeros_like(value), value)
        if jnp.issubdtype(value.dtype, jnp.bool_) or is_key(value):
            return zeros
        return zeros + np.array(jnp.nan if is_inexact(value.dtype) else jnp.iinfo(value.dtype).min, value.dtype)

    def check_unreachable(self, jaxpr: Any, what: str) -> None:
        if any_eqn(jaxpr, self.is_wanted):
            raise NotImplementedError(
                f"with_logs: a Function logs inside {what}, which cannot return further values. Log outside it."
            )

    def later(self, before: Harvest, now: Harvest) -> Harvest:
        return now
