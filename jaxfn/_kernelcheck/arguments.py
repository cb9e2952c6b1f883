"""The arguments of a kernel: in float64, resized, rounded to a dtype, and varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.arguments import Arguments, flatten_arguments
from jaxfn._check.draws import random_generator
from jaxfn._tree import is_array_leaf, is_inexact, is_key

_SAMPLE_ULPS = 4  # the largest difference of two samples, in units in the last place
_ALIGNMENT = 64  # bytes; JAX does not copy NumPy arrays with this alignment
_RESIZE_NOISE = 0.125  # relative change of repeated numbers, so that no two rows are equal

Arrays = list[Any]


def kernel_arguments(
    function: Callable[..., Any], inputs: Any, argnums: int | Sequence[int] | None, generator: np.random.Generator
) -> Arguments:
    """Flattens a tuple of inputs, or the only input, with floating-point arrays in float64.

    Raises:
      ValueError: nothing is differentiable, or a `jax.ShapeDtypeStruct` is not floating-point.
      TypeError: an input is complex.
    """

    def convert(name: str, leaf: Any, _: bool) -> Any:
        is_spec = isinstance(leaf, jax.ShapeDtypeStruct)
        if not (is_spec or is_array_leaf(leaf)):
            return leaf
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if not is_inexact(dtype):
            if is_spec:
                raise ValueError(f"{name} is a shape of {dtype}: only floating-point arrays are drawn, give its values")
            return jnp.asarray(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{name} is {dtype}; kernelcheck is for real numbers. gradcheck takes complex ones.")
        return generator.standard_normal(leaf.shape) if is_spec else np.asarray(leaf, np.float64)

    arguments = flatten_arguments(function, inputs, argnums, convert)
    if not arguments.values:
        raise ValueError("kernelcheck expects at least one floating-point array among its inputs")
    return arguments


def resized(arguments: Arguments, old: int, new: int) -> Arguments:
    """Returns arguments in which every dimension of size `old` has size `new`, filled by repetition."""
    generator = random_generator("size", new)

    def resize(array: Any) -> Any:
        for axis in [axis for axis, size in enumerate(array.shape) if size == old]:
            array = np.take(array, np.arange(new) % old, axis)
        return array

    values: Arrays = []
    for value in arguments.values:
        factors = 1 + _RESIZE_NOISE * generator.uniform(-1, 1, resize(value).shape) if old in value.shape else 1.0
        values.append(resize(value) * factors)
    others = [x if is_key(x) else jnp.asarray(resize(np.asarray(x))) for x in arguments.others]
    return replace(arguments, values=values, others=others)


def sizes(arguments: Arguments) -> list[int]:
    """Returns the distinct sizes above 1 of all dimensions."""
    arrays = [*arguments.values, *(x for x in arguments.others if not is_key(x))]
    return sorted({size for array in arrays for size in array.shape if size > 1})


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
