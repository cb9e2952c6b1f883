"""The inputs at which a rewritten function is compared: the examples, other sizes, ties, zeros, NaN, infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxfn._torch.values.arrays import to_torch
from jaxfn._tree import is_array_leaf

# The number of other sizes.
_NUM_SIZES = 2


class Example(NamedTuple):
    """The arguments of a call: a flat list of NumPy arrays and other values, and the structure that they are in.

    Attributes:
      without_gradient: The indices of floating-point arrays for whose gradient the code raises an error.
    """

    leaves: list[Any]
    structure: Any
    without_gradient: tuple[int, ...] = ()

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        """Flattens the arguments of a call."""
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs), is_leaf=lambda x: is_array_leaf(x) or x is None)
        return Example([_as_numpy(x) if is_array_leaf(x) else x for x in leaves], structure)

    @property
    def arrays(self) -> list[int]:
        """The indices of the arrays."""
        return [i for i, x in enumerate(self.leaves) if isinstance(x, np.ndarray)]

    @property
    def inexact(self) -> list[int]:
        """The indices of the floating-point and complex arrays."""
        return [i for i in self.arrays if jax.numpy.issubdtype(self.leaves[i].dtype, jax.numpy.inexact)]

    @property
    def differentiable(self) -> list[int]:
        """The indices of the arrays that the code is differentiated by."""
        return [i for i in self.inexact if i not in self.without_gradient]

    def map(self, function: Callable[[Any], Any], indices: Iterable[int]) -> Example:
        """Returns the example with some leaves replaced."""
        leaves = list(self.leaves)
        for i in indices:
            leaves[i] = np.asarray(function(leaves[i])) if i in self.arrays else function(leaves[i])
        return self._replace(leaves=leaves)

    def arguments(self, leaves: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns `args` and `kwargs`, with other leaves if they are passed."""
        return jax.tree_util.tree_unflatten(self.structure, self.leaves if leaves is None else leaves)

    def in_torch(self, wanted: Iterable[int]) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Returns the arguments as tensors, and the leaves of autograd's graph that those of `wanted` depend on."""
        leaves = [to_torch(x) if isinstance(x, np.ndarray) else x for x in self.leaves]
        inputs: list[torch.Tensor] = []
        for i in wanted:
            inputs.append(leaves[i].requires_grad_())
            leaves[i] = inputs[-1] * 1  # A Function may update an argument in place, but not a leaf.
        args, kwargs = self.arguments(leaves)
        return args, kwargs, inputs


def _as_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Returns an array with the precision that it has in JAX; integers do not change, since torch indexes by int64."""
    array = np.asarray(x)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if array.dtype.kind in "fc" else array


def subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the subsets that are differentiated: all of up to 4 items, else those with one item or all."""
    if len(items) > 4:
        yield from [tuple(items), (), *((item,) for item in items)]
        return
    for bits in range(2 ** len(items) - 1, -1, -1):
        yield tuple(item for i, item in enumerate(items) if bits >> i & 1)


def other_sizes(example: Example, is_valid: Callable[[Example], bool]) -> list[Example]:
    """Returns examples of other sizes for which `is_valid`: equal lengths of axes change alike."""
    lengths = sorted({n for i in example.arrays for n in example.leaves[i].shape})
    changes = [{n: n + 1 for n in lengths if n > 1}, {n: 2 * n for n in lengths if n > 1}]
    changes += [{n: n + 2 for n in lengths if n > 1}, {n: 3 * n for n in lengths if n > 1}]
    for n in lengths:
        changes += [{n: 2 * n}, {n: n + 1}] if n > 1 else []
    found: list[Example] = []
    for change in changes:
        resized = example.map(partial(_resize, change=change), example.arrays)
        is_new = all(x.leaves[i].shape != resized.leaves[i].shape for x in found for i in example.arrays[:1])
        if change and is_new and is_valid(resized):
            found.append(resized)
        if len(found) == _NUM_SIZES:
            break
    return found


def _resize(x: np.ndarray[Any, Any], change: dict[int, int]) -> np.ndarray[Any, Any]:
    """Repeats an array's elements along its axes, with small differences between the copies of numbers."""
    shape: tuple[int, ...] = tuple(change.get(int(n), int(n)) for n in x.shape)
    for axis, length in enumerate(shape):
        x = np.take(x, np.arange(length) % max(x.shape[axis], 1), axis)
    if x.dtype.kind in "fc" and x.size:
        x = (x * (1 + 0.01 * np.sin(np.arange(x.size)).reshape(shape))).astype(x.dtype)
    return x


def variations(example: Example, constants: Sequence[float]) -> Iterator[tuple[str, Example]]:
    """Yields examples with other values: ties of elements and bounds, zeros, NaN, infinity."""
    yield "at the example", example
    yield "at the negated example, times 3", example.map(lambda x: (-3 * x).astype(x.dtype), example.inexact)
    yield "at equal elements", example.map(_round, example.inexact)
    for shift in (0, 1):
        yield "at constants of the code", example.map(partial(_cycle, values=constants, shift=shift), example.inexact)
    yield "at zeros", example.map(np.zeros_like, example.inexact)
    yield "at NaN", example.map(lambda x: _with(x, [np.nan]), example.inexact)
    yield "at infinity", example.map(lambda x: _with(x, [np.inf, -np.inf]), example.inexact)


def _round(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (np.round(x.astype(complex if x.dtype.kind == "c" else float) * 2) / 2).astype(x.dtype)


def _cycle(x: np.ndarray[Any, Any], values: Sequence[float], shift: int) -> np.ndarray[Any, Any]:
    signed = [sign * value for value in values for sign in (1, -1)]
    repeated = np.resize(np.roll(signed, shift * (len(signed) // 2 + 1)), x.shape)
    # Some elements of the example remain, so that not all are at a bound.
    return np.where(np.arange(x.size).reshape(x.shape) % 4 == 3, x, repeated).astype(x.dtype)


def _with(x: np.ndarray[Any, Any], values: Sequence[float]) -> np.ndarray[Any, Any]:
    new = np.array(x)
    flat = new.reshape(-1)
    for i, value in enumerate(values):
        flat[i :: max(3, x.size // 3)] = value
    return new
