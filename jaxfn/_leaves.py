"""Array leaves and static leaves: taking a value apart and putting it together again.

An array leaf is a `jax.Array` (traced or not), a NumPy array or scalar, a `jax.Ref`, or anything with
`__jax_array__`. Every other leaf is static and travels as the Python object that it is.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import is_ref

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# NumPy arrays of these kinds (objects, text, dates) cannot be JAX arrays, so they stay static.
_STATIC_KINDS = frozenset("OSUMm")


class _Array:
    """Stands in a `Layout` where an array leaf was taken out."""

    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


@lru_cache(maxsize=4096)
def _is_array_type(kind: type) -> bool:
    # JAX hands Python numbers on as subclasses of int, float, ... that have a dtype.
    is_typed_scalar = issubclass(kind, (int, float, complex)) and hasattr(kind, "dtype")
    return issubclass(kind, (jax.Array, jax.Ref)) or is_typed_scalar or hasattr(kind, "__jax_array__")


@lru_cache(maxsize=4096)
def _is_jax_type(kind: type) -> bool:
    return issubclass(kind, (jax.Array, jax.Ref))


def is_array_leaf(leaf: object) -> bool:
    """Whether a leaf is data for JAX rather than a Python value."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in _STATIC_KINDS
    # The metaclass check covers traced references, whose type alone does not say what they are.
    return _is_array_type(type(leaf)) or isinstance(leaf, jax.Array)


def is_traced(leaf: object) -> bool:
    """Whether an array leaf is a JAX tracer."""
    return isinstance(leaf, jax.core.Tracer)


def as_array(leaf: Any) -> jax.Array:
    """An array leaf as something that JAX takes as an operand."""
    if _is_jax_type(type(leaf)) or isinstance(leaf, jax.Array) or is_ref(leaf):
        return leaf
    return jnp.asarray(leaf)


class Layout:
    """A value with its array leaves taken out: what kind of tree it is and its static leaves.

    Two layouts are equal where their trees are and their static leaves are the same *values*: `1`, `1.0` and `True`
    differ, as do `0.0` and `-0.0`. Hashing raises `TypeError` where a static leaf is not a plain value, because a
    mutable object that compares equal today need not do so tomorrow.
    """

    __slots__ = ("_key", "leaves", "num_arrays", "treedef")

    def __init__(self, treedef: Any, leaves: tuple[object, ...]) -> None:
        self.treedef = treedef  # None: the value is its own single leaf
        self.leaves = leaves
        self.num_arrays = sum(leaf is _ARRAY for leaf in leaves)
        self._key: tuple[object, ...] | None = None

    def merge(self, arrays: Iterator[Any]) -> Any:
        """The value again, with the next `num_arrays` of `arrays` in the array leaves' places."""
        leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return leaves[0] if self.treedef is None else jax.tree_util.tree_unflatten(self.treedef, leaves)

    def merge_or_none(self, arrays: Iterator[Any]) -> Any:
        """As `merge`, with `None` for the static leaves too: a gradient of this structure."""
        leaves = [next(arrays) if leaf is _ARRAY else None for leaf in self.leaves]
        return leaves[0] if self.treedef is None else jax.tree_util.tree_unflatten(self.treedef, leaves)

    def skeleton(self) -> Any:
        """The value with `True` for each array leaf and `False` for each static one."""
        leaves = [leaf is _ARRAY for leaf in self.leaves]
        return leaves[0] if self.treedef is None else jax.tree_util.tree_unflatten(self.treedef, leaves)

    def key(self) -> tuple[object, ...]:
        """A hashable value that stands for this layout; `TypeError` where there is none."""
        if self._key is None:
            self._key = (self.treedef, *map(_value_key, self.leaves))
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


def _value_key(leaf: object) -> tuple[object, ...]:
    kind = type(leaf)
    if leaf is _ARRAY:
        return (_ARRAY,)
    if kind is float:
        return (kind, cast(float, leaf).hex())  # tells -0.0 from 0.0, and nan equals itself
    if kind is complex:
        number = cast(complex, leaf)
        return (kind, number.real.hex(), number.imag.hex())
    if kind in _SCALARS or isinstance(leaf, (type, np.dtype, enum.Enum)):
        return (kind, leaf)
    if isinstance(leaf, types.FunctionType) and leaf.__closure__ is None:
        return (kind, leaf)
    raise TypeError(f"{kind.__name__} is not compared by value")


_ARRAY_LAYOUT = Layout(None, (_ARRAY,))


def _is_none(value: object) -> bool:
    return value is None


def split(value: Any) -> tuple[Sequence[Any], Layout]:
    """Takes a pytree apart into its array leaves and the rest.

    Args:
      value: any pytree; `None` counts as a static leaf.

    Returns:
      The array leaves in tree order, as they are, and the `Layout` that puts them back.
    """
    if is_array_leaf(value):
        return (value,), _ARRAY_LAYOUT
    if type(value) in _SCALARS:
        return (), Layout(None, (value,))
    leaves, treedef = jax.tree_util.tree_flatten(value, is_leaf=_is_none)
    if len(leaves) == 1 and leaves[0] is value:
        return (), Layout(None, (value,))
    arrays = [leaf for leaf in leaves if is_array_leaf(leaf)]
    return arrays, Layout(treedef, tuple(_ARRAY if is_array_leaf(leaf) else leaf for leaf in leaves))


def split_saved(value: Any) -> tuple[Sequence[Any], Layout]:
    """As `split`, but a value without array leaves is kept as the very object that it is."""
    arrays, layout = split(value)
    return (arrays, layout) if arrays else ((), Layout(None, (value,)))
