"""The arguments of a kernel: flattened, rounded to a dtype, and varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_unflatten

from jaxfn._check.arguments import named_leaves
from jaxfn._check.draws import random_generator
from jaxfn._tree import is_array_leaf, is_inexact, is_key

_SAMPLE_ULPS = 4  # the largest difference of two samples, in units in the last place
_ALIGNMENT = 64  # bytes; JAX does not copy NumPy arrays with this alignment
_RESIZE_NOISE = 0.125  # relative change of repeated numbers, so that no two rows are equal

Arrays = list[Any]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, without their floating-point arrays.

    Attributes:
      tree: the treedef of the arguments.
      leaves: all leaves, with `None` for each floating-point array.
      floats: the indices of the floating-point arrays.
      values: the floating-point arrays, in float64.
      names: the names of the floating-point arrays in reports.
      differentiated: the differentiated arrays, as indices into `floats`.
      argument_indices: the position of the argument of each floating-point array.
    """

    tree: Any
    leaves: tuple[Any, ...]
    floats: tuple[int, ...]
    values: tuple[np.ndarray[Any, Any], ...]
    names: tuple[str, ...]
    differentiated: tuple[int, ...]
    argument_indices: tuple[int, ...]

    @property
    def fixed(self) -> Arrays:
        """The other arrays: integers, booleans, keys."""
        return [leaf for leaf in self.leaves if is_array_leaf(leaf)]

    def call(self, function: Callable[..., Any], fixed: Sequence[Any], values: Sequence[Any]) -> Any:
        """Calls a function with these arguments, with other arrays in place of their arrays."""
        others, floats = iter(fixed), iter(values)
        merged = [
            next(floats) if i in self.floats else next(others) if is_array_leaf(leaf) else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        return function(*tree_unflatten(self.tree, merged))

    def undifferentiated(self) -> Arguments:
        """Returns these arguments with nothing differentiated."""
        return replace(self, differentiated=())

    def resized(self, old: int, new: int) -> Arguments:
        """Returns arguments in which every dimension of size `old` has size `new`, filled by repetition."""
        generator = random_generator("size", new)

        def resize(array: Any) -> Any:
            for axis, size in enumerate(array.shape):
                if size == old:
                    array = np.take(array, np.arange(new) % old, axis)
            return array

        values: list[np.ndarray[Any, Any]] = []
        for value in self.values:
            factors = 1 + _RESIZE_NOISE * generator.uniform(-1, 1, resize(value).shape) if old in value.shape else 1.0
            values.append(resize(value) * factors)
        leaves = [
            jnp.asarray(resize(np.asarray(leaf))) if is_array_leaf(leaf) and not is_key(leaf) else leaf
            for leaf in self.leaves
        ]
        return replace(self, values=tuple(values), leaves=tuple(leaves))

    def sizes(self) -> list[int]:
        """Returns the distinct sizes above 1 of all dimensions."""
        arrays = [*self.values, *(leaf for leaf in self.fixed if not is_key(leaf))]
        return sorted({size for array in arrays for size in array.shape if size > 1})


def flatten_arguments(
    function: Callable[..., Any], inputs: Any, argnums: int | Sequence[int] | None, generator: np.random.Generator
) -> Arguments:
    """Makes `Arguments` of a tuple of inputs, or of the only input.

    Raises:
      ValueError: nothing is differentiable, or a `jax.ShapeDtypeStruct` is not floating-point.
      TypeError: an input is complex.
    """
    named, tree, chosen = named_leaves(function, inputs, argnums)
    leaves: list[Any] = []
    floats: list[int] = []
    values: list[np.ndarray[Any, Any]] = []
    names: list[str] = []
    argument_indices: list[int] = []
    for index, (argument, name, leaf) in enumerate(named):
        is_spec = isinstance(leaf, jax.ShapeDtypeStruct)
        if not (is_spec or is_array_leaf(leaf)):
            leaves.append(leaf)
            continue
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if not is_inexact(dtype):
            if is_spec:
                raise ValueError(f"{name} is a shape of {dtype}: only floating-point arrays are drawn, give its values")
            leaves.append(jnp.asarray(leaf))
            continue
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{name} is {dtype}; kernelcheck is for real numbers. gradcheck takes complex ones.")
        leaves.append(None)
        floats.append(index)
        values.append(generator.standard_normal(leaf.shape) if is_spec else np.asarray(leaf, np.float64))
        names.append(name)
        argument_indices.append(argument)
    if not floats:
        raise ValueError("kernelcheck expects at least one floating-point array among its inputs")
    differentiated = tuple(i for i, argument in enumerate(argument_indices) if argument in chosen)
    return Arguments(
        tree, tuple(leaves), tuple(floats), tuple(values), tuple(names), differentiated, tuple(argument_indices)
    )


def rounded(array: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Returns an array rounded to a dtype, in float64."""
    with np.errstate(all="ignore"):
        return np.asarray(array, np.float64).astype(dtype).astype(np.float64)


def sample_nearby(values: Sequence[Any], draws: int, dtype: Any, generator: np.random.Generator) -> Arrays:
    """Returns samples near some arrays: the arrays themselves first, then others a few units in the last place away."""
    eps = _SAMPLE_ULPS * float(jnp.finfo(dtype).eps)
    samples: Arrays = []
    for value in values:
        factors = 1 + eps * generator.uniform(-1, 1, (draws, *value.shape))
        factors[0] = 1
        samples.append(rounded(value * factors, dtype))
    return samples


def add_rounding_noise(arrays: Sequence[Any], dtype: Any, generator: np.random.Generator) -> Arrays:
    """Changes each number by less than half a unit in the last place, and a zero by less than the smallest number."""
    info = jnp.finfo(dtype)
    moved: Arrays = []
    for array in arrays:
        signs = generator.uniform(-1, 1, array.shape)
        moved.append(array * (1 + signs * float(info.eps) / 2) + np.where(array == 0, signs * float(info.tiny), 0.0))
    return moved


def nan_padded(array: Any) -> jax.Array:
    """Returns an array surrounded by NaNs in memory, on backends that do not copy NumPy arrays."""
    values = np.asarray(array)
    guard = max(_ALIGNMENT, values.nbytes // _ALIGNMENT * _ALIGNMENT)
    memory = np.full((2 * guard + values.nbytes + 2 * _ALIGNMENT) // values.itemsize, np.nan, values.dtype)
    start = (guard + -memory.ctypes.data % _ALIGNMENT) // values.itemsize
    inside = memory[start : start + values.size].reshape(values.shape)
    inside[...] = values
    return jax.device_put(inside, may_alias=True)
