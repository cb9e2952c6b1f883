"""`logged`: collects the values that Functions log by `ctx.log`."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import jax

from jaxfn._diagnostics import add_to_message
from jaxfn._observe import LOGS, LogTarget, open_logs

_LOCK = threading.Lock()


@contextmanager
def logged(*, ordered: bool = True) -> Generator[dict[str, list[jax.Array]]]:
    """Collects the values that Functions log by `ctx.log` inside the block, in eager and in compiled code.

    Each time a program computes a logged value, `jax.debug.callback` adds it to the log. The context is part of the
    key of `jax.jit`'s cache: a function that was compiled outside is compiled again, with callbacks, when it is first
    called inside a block, and called without them outside. So a block in a training loop compiles once. Like other
    contexts of JAX it holds for the current thread. What `jax.jit(f).lower(x).compile()` returns logs if it was lowered
    inside a block.

    Args:
      ordered: Whether values come in the order of the program. Programs on several devices need `False`: then the
        order of the values of one program is XLA's, and under `shard_map` each device logs its own.

    Yields:
      A dict of lists of arrays, by name. It is complete when the block ends. There is an entry for each time that the
      value is computed: for each step of a loop, none for a branch that is not taken. Under `jax.vmap` a value has its
      batch at axis 0. Where `jax.checkpoint` computes `forward` again, that is not logged. A block inside another one
      takes what is logged inside it.

    Raises:
      NotImplementedError: A Function logs in the condition of a `while` loop, and `ordered` is true.

    Warns:
      UserWarning: Nothing was logged.

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
      >>> step = jax.jit(jax.grad(lambda x: (rounded(rounded(x)) ** 2).sum()))
      >>> with jaxfn.logged() as logs:
      ...     gradient = step(jnp.array([0.25, 1.5]))
      >>> print(logs["error"], logs["norm"])
      [Array(0.5, dtype=float32), Array(0., dtype=float32)] [Array(4., dtype=float32), Array(4., dtype=float32)]

    JAX counterpart: `jax.debug.callback`.
    """
    jax.effects_barrier()  # a callback of an earlier block may still have to run
    logs: dict[str, list[jax.Array]] = {}
    with _LOCK:
        number = next(i for i in itertools.count() if i not in open_logs)
        open_logs[number] = logs
    try:
        with LOGS(LogTarget(number, ordered)):
            yield logs
    except ValueError as error:
        if "ordered effects are not supported" in str(error):
            add_to_message(error, "Programs on several devices log without an order: jaxfn.logged(ordered=False).")
        raise
    finally:
        try:
            jax.effects_barrier()
        finally:
            del open_logs[number]
    if not logs:
        warnings.warn(
            "jaxfn.logged: nothing was logged. Functions log by ctx.log(name=value), if they run in this thread, and "
            "not in a program that was compiled ahead of time before.",
            stacklevel=3,
        )
