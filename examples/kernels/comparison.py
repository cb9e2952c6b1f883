"""Comparison of a kernel with plain JAX: differences, saved bytes, and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import subjaxprs
from jax.sharding import Mesh, PartitionSpec

Call = Callable[..., jax.Array]  # of arrays


def differences(
    kernel: Call,
    plain: Call,
    args: Sequence[jax.Array],
    mapped: Sequence[int | None],
    split: Sequence[PartitionSpec],
    split_output: PartitionSpec,
) -> dict[str, float]:
    """Returns the largest relative differences of the value and of the gradients of all floating-point arguments.

    Args:
      kernel: the function under test.
      plain: the function in plain JAX.
      args: the arguments of both.
      mapped: for `jax.vmap`, the axis along which an argument is batched, with three elements.
      split: for `shard_map` over all devices, how each argument is split.
      split_output: how the output is split.
    """
    batch = [
        x if axis is None else jnp.stack([x, x[::-1], jnp.roll(x, 1, 0)], axis)
        for x, axis in zip(args, mapped, strict=True)
    ]
    mesh = Mesh(jax.devices(), ("devices",))
    # JAX cannot interpret a Pallas kernel under check_vma=True (0.10.0 to 0.12.0).
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=tuple(split), out_specs=split_output, check_vma=False)
    return {
        "jit": _difference(kernel, plain, args),
        "vmap": _difference(jax.vmap(kernel, tuple(mapped)), jax.vmap(plain, tuple(mapped)), batch),
        "shard_map": _difference(sharded, plain, args),
    }


def _difference(kernel: Call, plain: Call, args: Sequence[jax.Array]) -> float:
    return max(
        float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))
        for ours, theirs in zip(jax.jit(step(kernel))(*args), jax.jit(step(plain))(*args), strict=True)
    )


def value_and_gradients(function: Call, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the value, and the gradients for a cotangent whose entries differ."""
    value, pullback = jax.vjp(function, *args)
    gradients = pullback(jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape).astype(value.dtype))
    return [value, *(g for g in gradients if jnp.issubdtype(g.dtype, jnp.floating))]


def residual_bytes(function: Call, args: Sequence[Any]) -> int:
    """Returns the bytes that reverse mode saves."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    return sum(residual.size * residual.dtype.itemsize for residual in jax.tree.leaves(pullback))


def step(function: Call) -> Callable[..., list[jax.Array]]:
    """Returns a function of the arguments that computes the value and its gradients."""
    return lambda *args: value_and_gradients(function, args)


def temporary_bytes(function: Call, args: Sequence[Any]) -> int:
    """Returns the bytes that a compiled step needs in addition to its arguments and results."""
    return jax.jit(step(function)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def largest_array(function: Call, args: Sequence[Any]) -> int:
    """Returns the number of entries of the largest array in the jaxpr of a step, also inside kernels."""

    def largest(jaxpr: Any) -> int:
        sizes = [getattr(var.aval, "size", 0) for equation in jaxpr.eqns for var in equation.outvars]
        return max([0, *sizes, *map(largest, subjaxprs(jaxpr))])

    return largest(jax.make_jaxpr(step(function))(*args).jaxpr)


def show(differences: dict[str, float]) -> None:
    """Prints the differences on a line."""
    print("  from plain JAX: " + ", ".join(f"{way} {difference:.0e}" for way, difference in differences.items()))
