"""The arguments that a kernel is tried on: taken apart, rounded to a dtype, and varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_unflatten

from jaxfn._gradcheck.problem.problem import named_leaves
from jaxfn._tree import is_array_leaf, is_inexact, is_key

_MOVED = 4  # units in the last place, at most, between draws
_ALIGNED = 64  # bytes: where arrays begin that JAX takes over without copying
_RESIZED = 0.125  # how far copied numbers are moved relatively, so that no two rows are the same

Arrays = list[Any]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, without their floating-point arrays.

    Attributes:
      tree: how they are arranged.
      leaves: all of them; `None` stands for a floating-point array.
      floats: the positions of those.
      values: these arrays, in float64.
      names: what reports call them.
      differentiated: which of them are differentiated, by position in `floats`.
      argument_indices: which argument each of them belongs to.
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
        """The other arrays: whole numbers, truth values, keys."""
        return [leaf for leaf in self.leaves if is_array_leaf(leaf)]

    def call(self, function: Callable[..., Any], fixed: Sequence[Any], values: Sequence[Any]) -> Any:
        """The function of these arguments with other arrays in them."""
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
        """Every dimension of one size made another size, filled with what there is."""
        generator = np.random.default_rng(new)

        def resize(array: Any) -> Any:
            for axis, size in enumerate(array.shape):
                if size == old:
                    array = np.take(array, np.arange(new) % old, axis)
            return array

        values: list[np.ndarray[Any, Any]] = []
        for value in self.values:
            factors = 1 + _RESIZED * generator.uniform(-1, 1, resize(value).shape) if old in value.shape else 1.0
            values.append(resize(value) * factors)
        leaves = [
            jnp.asarray(resize(np.asarray(leaf))) if is_array_leaf(leaf) and not is_key(leaf) else leaf
            for leaf in self.leaves
        ]
        return replace(self, values=tuple(values), leaves=tuple(leaves))

    def sizes(self) -> list[int]:
        """The different sizes above 1 of all dimensions."""
        arrays = [*self.values, *(leaf for leaf in self.fixed if not is_key(leaf))]
        return sorted({size for array in arrays for size in array.shape if size > 1})


def flatten_arguments(
    function: Callable[..., Any], inputs: Any, argnums: int | Sequence[int] | None, generator: np.random.Generator
) -> Arguments:
    """Makes `Arguments` of a tuple of inputs, or of the one input.

    Raises:
      ValueError: there is nothing to differentiate, or an array that cannot be drawn.
      TypeError: complex numbers.
    """
    named, tree, chosen = named_leaves(function, inputs, argnums)
    leaves: list[Any] = []
    floats: list[int] = []
    values: list[np.ndarray[Any, Any]] = []
    described: list[str] = []
    argument_indices: list[int] = []
    for position, (argument, name, leaf) in enumerate(named):
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
        floats.append(position)
        values.append(generator.standard_normal(leaf.shape) if is_spec else np.asarray(leaf, np.float64))
        described.append(name)
        argument_indices.append(argument)
    if not floats:
        raise ValueError("kernelcheck expects at least one floating-point array among its inputs")
    differentiated = tuple(i for i, argument in enumerate(argument_indices) if argument in chosen)
    return Arguments(
        tree, tuple(leaves), tuple(floats), tuple(values), tuple(described), differentiated, tuple(argument_indices)
    )


def rounded(array: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """An array's values as the dtype has them, in float64."""
    with np.errstate(all="ignore"):
        return np.asarray(array, np.float64).astype(dtype).astype(np.float64)


def sample_nearby(values: Sequence[Any], draws: int, dtype: Any, generator: np.random.Generator) -> Arrays:
    """Arrays that are near to some: these themselves first, then others a few units in the last place away."""
    eps = _MOVED * float(jnp.finfo(dtype).eps)
    found: Arrays = []
    for value in values:
        factors = 1 + eps * generator.uniform(-1, 1, (draws, *value.shape))
        factors[0] = 1
        found.append(rounded(value * factors, dtype))
    return found


def add_rounding_noise(arrays: Sequence[Any], dtype: Any, generator: np.random.Generator) -> Arrays:
    """Each number moved by less than half a unit in the last place; a zero by the least there is."""
    info = jnp.finfo(dtype)
    moved: Arrays = []
    for array in arrays:
        signs = generator.uniform(-1, 1, array.shape)
        moved.append(array * (1 + signs * float(info.eps) / 2) + np.where(array == 0, signs * float(info.tiny), 0.0))
    return moved


def nan_padded(array: Any) -> jax.Array:
    """An array whose memory lies between NaNs, on backends that take over what NumPy has."""
    given = np.asarray(array)
    guard = max(_ALIGNED, given.nbytes // _ALIGNED * _ALIGNED)
    memory = np.full((2 * guard + given.nbytes + 2 * _ALIGNED) // given.itemsize, np.nan, given.dtype)
    start = (guard + -memory.ctypes.data % _ALIGNED) // given.itemsize
    inside = memory[start : start + given.size].reshape(given.shape)
    inside[...] = given
    return jax.device_put(inside, may_alias=True)
