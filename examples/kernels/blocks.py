"""Helpers of the kernels: operands cut into blocks, the edges of blocks, and batches.

Every array that a kernel sees is of shape (batch, rows, columns), where a batch of 1 means that all elements share the
array. The grid is (batch, steps), so a batch needs no separate kernel.

The kernels are compiled on a GPU by Triton (which JAX 0.12 announces to remove from Pallas) and on a TPU by Mosaic, and
interpreted elsewhere. Triton requires block sizes that are powers of two, and a TPU 128 columns, so blocks extend
beyond arrays. Values there are undefined (NaN in the interpreter), and `load` replaces them by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import jaxfn


def platform() -> str:
    """Returns where kernels run: "gpu", "tpu", or "cpu", where they are interpreted."""
    return jax.default_backend()


def padded(size: int, most: int | None = None) -> int:
    """Returns the size of a block along an axis of this size; `most` is the largest."""
    least = 128 if platform() == "tpu" and most is None else 16  # the least that a matrix unit takes
    block = max(pl.next_power_of_2(size), least)
    return block if most is None else min(block, most)


Array = jax.ShapeDtypeStruct


class Block(NamedTuple):
    """An array, and the part of it that a step of the grid reads or writes.

    Attributes:
      array: its shape and dtype are enough for an output.
      sizes: the part's size, without the batch.
      index: where it is at a step, in parts.
    """

    array: Any
    sizes: tuple[int | None, ...]
    index: Callable[[Any], tuple[Any, ...]]

    def spec(self) -> pl.BlockSpec:
        is_shared = self.array.shape[0] == 1
        return pl.BlockSpec((None, *self.sizes), lambda batch, step: (0 if is_shared else batch, *self.index(step)))


def rows(array: Any, size: int) -> Block:
    """Returns a block of the next `size` rows at each step."""
    return Block(array, (size, padded(array.shape[2])), lambda step: (step, 0))


def numbers(array: Any, size: int) -> Block:
    """Returns a block of the next `size` rows of an array of one column."""
    return Block(array, (size, 1), lambda step: (step, 0))


def whole(block: Block) -> Block:
    """Returns a block of all rows at every step, for a loop inside the kernel.

    A GPU reads what the loop uses. A TPU stores all of it in the memory of a core, which limits its size.
    """
    size, columns = block.sizes
    assert size is not None
    return Block(block.array, (pl.cdiv(block.array.shape[1], size) * size, columns), lambda step: (0, 0))


def call(kernel: Callable[..., None], steps: int, inputs: Sequence[Block], outputs: Sequence[Block]) -> Any:
    """Runs a kernel over the grid (batch, steps)."""
    # Inside `shard_map` all values of a kernel vary over equal mesh axes.
    axes = frozenset[str]().union(*(jax.typeof(x.array).manual_axis_type.varying for x in inputs))
    arrays = [_varying(x.array, axes) for x in inputs]
    kind = jax.typeof(arrays[0]).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=(len(outputs[0].array), steps),
        in_specs=[x.spec() for x in inputs],
        out_specs=[x.spec() for x in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, manual_axis_type=kind) for x in outputs],
        interpret=platform() == "cpu",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2) if platform() == "gpu" else None,
    )(*arrays)


def _varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def within(shape: tuple[int, ...], num_rows: Any, num_columns: Any) -> jax.Array:
    """Returns a mask of a block: true in the rows and columns that are inside its array."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (row < num_rows) & (column < num_columns)


def load(ref: Any, num_rows: Any, num_columns: Any, at: Any = slice(None)) -> jax.Array:
    """Reads a block, or some rows of it, with zeros after the first `num_rows` and `num_columns`."""
    view = ref.at[at, :]
    mask = within(view.shape, num_rows, num_columns)
    if platform() == "tpu":  # its memory contains the whole block
        return jnp.where(mask, view[...], jnp.zeros((), ref.dtype))
    return triton.load(view, mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref: Any, value: jax.Array, num_rows: Any, num_columns: Any) -> None:
    """Writes the part of a block that is inside its array."""
    value = value.astype(ref.dtype)
    if platform() == "tpu":  # it does not copy the rest
        ref[...] = value
    else:
        triton.store(ref, value, mask=within(value.shape, num_rows, num_columns))


def dot(a: jax.Array, b: jax.Array, axis_of_a: int, axis_of_b: int) -> jax.Array:
    """Multiplies matrices, summing over these axes, in float32 for operands of any dtype."""
    dims = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def batch_of(*arrays: jax.Array) -> int:
    """Returns the batch size of arrays of which some may be shared."""
    batch = max(len(x) for x in arrays)
    if any(len(x) not in (1, batch) for x in arrays):
        raise ValueError(f"expected batches of {batch}, or of 1 to be shared; got {[len(x) for x in arrays]}")
    return batch


def apply_to_batch(
    function: Callable[..., Any], info: jaxfn.VmapInfo, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Any, Any]:
    """Implements `vmap`: merges the new batch axis with axis 0, and calls the Function once.

    Arrays with neither axis stay shared, and are not copied.
    """
    mapped = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, in_dims, strict=True)]
    inner = max(x.shape[d is not None] for x, d in zip(mapped, in_dims, strict=True) if isinstance(x, jax.Array))

    def joined(x: Any, dim: int | None) -> Any:
        if not isinstance(x, jax.Array) or (dim is None and len(x) == 1):
            return x
        if dim is None:
            x = x[None]
        if inner > 1 or dim is None:
            x = jnp.broadcast_to(x, (info.batch_size, inner, *x.shape[2:]))
        return x.reshape(-1, *x.shape[2:])

    outputs = function(*map(joined, mapped, in_dims))
    return jax.tree.map(lambda y: y.reshape(info.batch_size, inner, *y.shape[1:]), outputs), 0
