"""Saved-tensor hooks: which functions pack what is saved for `backward`, and unpack it there.

What is in force is a JAX user context: each thread's own, and part of the key of jit's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax


class Hooks(NamedTuple):
    """A pair of hooks; equal where the functions are, so that entering them again traces nothing anew."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


HOOKS: Any = jax.make_user_context(None)
"""Its `value` is the innermost `Hooks` of this thread, if any."""

# Why there must be none, where that is so.
_disabled: Any = jax.make_user_context(None)


@contextmanager
def saved_tensors_hooks(pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> Generator[None]:
    """Packs every array that Functions applied inside save for `backward`; a context manager or a decorator.

    The innermost hooks apply. Under `jax.jit` they are those in force where the Function is traced; a jitted function
    is traced anew, once, for hooks that it was not yet called under, so keep the hooks themselves (a `lambda` written
    in a loop is another one each time). Attributes of ctx and what `save_for_forward` kept are not packed.

    A second derivative goes through what was packed as if it were the array itself, where `pack_hook` returns one
    floating array of the same shape; it raises `NotImplementedError` where the packed form is another (integers, say).

    Args:
      pack_hook: takes a saved array; what it returns (any pytree of arrays and Python values) is kept instead.
      unpack_hook: takes that; what it returns is what `backward` reads.

    Raises:
      RuntimeError: inside `disable_saved_tensors_hooks`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> @jaxfn.function
      ... def square(ctx, x):
      ...     ctx.save_for_backward(x)
      ...     return x * x
      >>> @square.backward
      ... def _(ctx, grad_output):
      ...     (x,) = ctx.saved_tensors
      ...     return 2 * x * grad_output
      >>> def pack(x):
      ...     return x.astype(jnp.bfloat16)
      >>> def unpack(x):
      ...     return x.astype(jnp.float32)
      >>> with jaxfn.saved_tensors_hooks(pack, unpack):
      ...     print(jax.grad(square)(1.001))
      2.0

    Torch counterpart: `torch.autograd.graph.saved_tensors_hooks`.
    """
    _refuse_if_disabled()
    with HOOKS(Hooks(pack_hook, unpack_hook)):
        yield


@contextmanager
def disable_saved_tensors_hooks(error_message: str) -> Generator[None]:
    """Forbids saved-tensor hooks inside; a context manager or a decorator.

    Args:
      error_message: what the error will say.

    Raises:
      RuntimeError: with that message, where hooks are entered inside, or in force already.

    Examples:
      >>> import jaxfn
      >>> with jaxfn.disable_saved_tensors_hooks("not in this block"):
      ...     with jaxfn.save_on_host():
      ...         pass
      Traceback (most recent call last):
      ...
      RuntimeError: not in this block

    Torch counterpart: `torch.autograd.graph.disable_saved_tensors_hooks`.
    """
    if HOOKS.value is not None:
        raise RuntimeError(error_message)
    with _disabled(error_message):
        yield


def _refuse_if_disabled() -> None:
    if _disabled.value is not None:
        raise RuntimeError(_disabled.value)


@contextmanager
def save_on_host() -> Generator[None]:
    """Keeps what Functions applied inside save for `backward` in host memory; a context manager or a decorator.

    On the CPU, JAX 0.10.0 takes all memory for host memory, and arrays stay where they are.

    Raises:
      RuntimeError: the default backend cannot place arrays in host memory.

    Examples:
      >>> import jax, jaxfn
      >>> @jaxfn.function
      ... def square(ctx, x):
      ...     ctx.save_for_backward(x)
      ...     return x * x
      >>> @square.backward
      ... def _(ctx, grad_output):
      ...     (x,) = ctx.saved_tensors
      ...     return 2 * x * grad_output
      >>> with jaxfn.save_on_host():
      ...     print(jax.grad(square)(3.0))
      6.0

    Torch counterpart: `torch.autograd.graph.save_on_cpu`.
    """
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise RuntimeError(
            f"save_on_host: the {device.platform} backend has no host memory for arrays (its memories: "
            f"{', '.join(kinds)}). Leave save_on_host out here, or recompute with jax.checkpoint instead."
        )
    with saved_tensors_hooks(_to_host, _to_device):
        yield


def _to_host(array: Any) -> Any:
    return jax.device_put(array, jax.memory.Space.Host)


def _to_device(array: Any) -> Any:
    return jax.device_put(array, jax.memory.Space.Device)
