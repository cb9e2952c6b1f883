"""Saved-tensor hooks: functions that pack what is saved for `backward`, and unpack it there.

The active hooks are a JAX user context: thread-local, and part of the key of jit's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax

from jaxfn._primitives import DeferredError, guard
from jaxfn._tree import ARRAY_SPEC, TreeSpec, as_array, flatten, is_array_leaf, is_inexact, is_traced


class Hooks(NamedTuple):
    """A pair of hooks; equal if the functions are equal, so that entering them again does not retrace."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


HOOKS: Any = jax.make_user_context(None)
"""Its `value` is the innermost `Hooks` of this thread, if any."""

# The message of the error that entering hooks raises, if they are disabled.
_disabled: Any = jax.make_user_context(None)


@contextmanager
def saved_tensors_hooks(pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> Generator[None]:
    """Packs every array that Functions applied inside save for `backward`; a context manager or a decorator.

    The innermost hooks apply. Under `jax.jit` they are those that are active where the Function is traced; a jitted
    function is traced again, once, for each pair of hooks, so reuse the functions (a `lambda` in a loop is a new one
    each time). Attributes of ctx and arrays of `save_for_forward` are not packed.

    If `pack_hook` returns one floating array of the shape of its argument, a second derivative passes through the hooks
    as through an identity. For any other packed form (integers, say) it raises `NotImplementedError`.

    Args:
      pack_hook: takes a saved array, and returns any pytree of arrays and Python values to store instead.
      unpack_hook: takes that pytree, and returns the array that `backward` reads.

    Raises:
      TypeError: a hook is not a function.
      RuntimeError: inside `disable_saved_tensors_hooks`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> def forward(ctx, x):
      ...     ctx.save_for_backward(x)
      ...     return x * x
      >>> square = jaxfn.function(forward, lambda ctx, grad_output: 2 * ctx.saved_tensors[0] * grad_output)
      >>> def pack(x):
      ...     return x.astype(jnp.bfloat16)
      >>> def unpack(x):
      ...     return x.astype(jnp.float32)
      >>> with jaxfn.saved_tensors_hooks(pack, unpack):
      ...     print(jax.grad(square)(1.001))
      2.0

    Torch counterpart: `torch.autograd.graph.saved_tensors_hooks`.
    """
    for name, hook in (("pack_hook", pack_hook), ("unpack_hook", unpack_hook)):
        if not callable(hook):
            raise TypeError(f"saved_tensors_hooks: {name} is of type {type(hook).__name__}; expected a function.")
    return _entered(Hooks(pack_hook, unpack_hook))  # no generator itself, so that a call raises


def _entered(hooks: Hooks) -> Generator[None]:
    if _disabled.value is not None:
        raise RuntimeError(_disabled.value)
    with HOOKS(hooks):
        yield


@contextmanager
def disable_saved_tensors_hooks(error_message: str) -> Generator[None]:
    """Forbids saved-tensor hooks inside; a context manager or a decorator.

    Args:
      error_message: what the error will say.

    Raises:
      RuntimeError: with that message, if hooks are entered inside, or already active.

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


@contextmanager
def save_on_host() -> Generator[None]:
    """Stores what Functions applied inside save for `backward` in host memory; a context manager or a decorator.

    On the CPU, all memory is host memory to JAX 0.10.0, and arrays are not moved.

    Raises:
      RuntimeError: the default backend has no host memory for arrays.

    Examples:
      >>> import jax, jaxfn
      >>> def forward(ctx, x):
      ...     ctx.save_for_backward(x)
      ...     return x * x
      >>> square = jaxfn.function(forward, lambda ctx, grad_output: 2 * ctx.saved_tensors[0] * grad_output)
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


_to_host = partial(jax.device_put, device=jax.memory.Space.Host)
_to_device = partial(jax.device_put, device=jax.memory.Space.Device)


class PackedResiduals(NamedTuple):
    """The static part of packed residuals."""

    function: str  # its name, for messages
    hooks: Hooks
    are_packed: Sequence[bool]  # for each residual, whether it passed `pack_hook`
    trees: Sequence[TreeSpec]  # for each residual, the tree spec of its packed form

    def unpack(self, arrays: Sequence[Any]) -> list[Any]:
        """Restores the residuals from the arrays that `pack` returned."""
        remaining = iter(arrays)
        return [
            self._unpack_one(list(islice(remaining, tree.num_arrays)), tree) if is_packed else next(remaining)
            for is_packed, tree in zip(self.are_packed, self.trees, strict=True)
        ]

    def _unpack_one(self, leaves: Sequence[Any], tree: TreeSpec) -> Any:
        array = self.hooks.unpack(tree.unflatten(iter(map(jax.lax.stop_gradient, leaves))))
        if not is_array_leaf(array):
            raise TypeError(
                f"{self.function}: the unpack_hook of saved_tensors_hooks returned a {type(array).__name__}; expected "
                "the array that pack_hook received."
            )
        return _with_derivative_of(leaves, [as_array(array)], self.function)[0]


def pack(
    function: str, hooks: Hooks, are_packed: Sequence[bool], residuals: Sequence[Any]
) -> tuple[PackedResiduals, list[Any]]:
    """Packs residuals; returns how to unpack them, and all arrays to save."""
    trees: list[TreeSpec] = []
    packed: list[Any] = []
    for is_packed, residual in zip(are_packed, residuals, strict=True):
        if is_packed:
            leaves, tree = flatten(hooks.pack(as_array(jax.lax.stop_gradient(residual))))
            packed += _with_derivative_of([residual], list(map(as_array, leaves)), function)
        else:
            packed.append(residual)
            tree = ARRAY_SPEC
        trees.append(tree)
    return PackedResiduals(function, hooks, are_packed, trees), packed


def _with_derivative_of(sources: Sequence[Any], results: list[Any], function: str) -> list[Any]:
    """Gives the results of a hook the derivative of its argument."""
    if not any(is_traced(x) and is_inexact(x.dtype) for x in sources):
        return results
    is_like = (
        len(results) == len(sources) == 1 and is_inexact(results[0].dtype) and results[0].shape == sources[0].shape
    )
    error = DeferredError(
        NotImplementedError,
        f"{function}: a second derivative goes through an array that saved_tensors_hooks packed into something other "
        "than one floating array of its shape, which has no derivative. Differentiate twice without the hooks, or let "
        "pack_hook return such an array.",
    )
    return [_cast(results[0], sources[0])] if is_like else guard(results, sources, error)


@jax.custom_jvp
def _cast(result: jax.Array, source: jax.Array) -> jax.Array:
    """Returns the result of a hook that changes nothing but dtype and memory space, with that derivative."""
    return result


@_cast.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (result, source), tangent = primals, tangents[1].astype(primals[0].dtype)
    here, there = jax.typeof(source).memory_space, jax.typeof(result).memory_space
    if here != there:
        tangent = jax.device_put(tangent, there, src=here)  # its transpose moves back to src
    return _cast(result, source), tangent
