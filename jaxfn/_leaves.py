"""Array leaves and static leaves: taking a value apart and putting it together again.

An array leaf is a `jax.Array` (traced or not), a NumPy array or scalar, a `jax.Ref`, or anything with
`__jax_array__`. Every other leaf is static and travels as the Python object that it is.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxfn._compat import is_ref, partial_eval

_NUMBERS = frozenset({int, float, complex})
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
# NumPy arrays of these kinds (objects, text, dates) cannot be JAX arrays, so they stay static.
_STATIC_KINDS = frozenset("OSUMm")


class _Array:
    """Stands in a `Layout` where an array leaf was taken out."""

    def __repr__(self) -> str:
        return "array"


class _Ref(_Array):
    """The same for a `jax.Ref`, which is written in place and has no derivative of its own here."""

    def __repr__(self) -> str:
        return "ref"


_ARRAY = _Array()
_REF = _Ref()


@lru_cache(maxsize=4096)
def _is_array_type(kind: type) -> bool:
    # JAX hands Python numbers on as subclasses of int, float and complex, its own ones, that have a dtype.
    is_typed_scalar = issubclass(kind, (int, float, complex)) and kind.__module__.partition(".")[0] == "jax"
    return _is_jax_type(kind) or is_typed_scalar or hasattr(kind, "__jax_array__")


@lru_cache(maxsize=4096)
def _is_torch_tensor_type(kind: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


@lru_cache(maxsize=4096)
def _is_jax_type(kind: type) -> bool:
    return issubclass(kind, (jax.Array, jax.Ref, Tracer))


@lru_cache(maxsize=4096)
def is_inexact(dtype: Any) -> bool:
    """Whether arrays of this dtype can be differentiated."""
    return jnp.issubdtype(dtype, jnp.inexact)


def double(dtype: Any) -> np.dtype[Any]:
    """The double-precision dtype of this kind."""
    return np.dtype(np.complex128 if np.dtype(dtype).kind == "c" else np.float64)


def is_key(array: Any) -> bool:
    """Whether an array holds random keys, which are no numbers."""
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def is_array_leaf(leaf: object) -> bool:
    """Whether a leaf is data for JAX rather than a Python value."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in _STATIC_KINDS
    return _is_array_type(type(leaf))


def is_traced(leaf: object) -> bool:
    """Whether an array leaf is a JAX tracer."""
    return isinstance(leaf, Tracer)


def as_array(leaf: Any) -> jax.Array:
    """An array leaf as something that JAX takes as an operand."""
    return leaf if _is_jax_type(type(leaf)) else jnp.asarray(leaf)


def _marker(leaf: Any) -> _Array:
    # Only a tracer does not show by its type whether it is a reference, and asking its value is slow.
    return _REF if type(leaf) is jax.Ref or (is_traced(leaf) and is_ref(leaf)) else _ARRAY


class NoArrays:
    """Base of jaxfn's own objects that hold no JAX arrays, so that nothing needs to look for one in them."""


class Opaque:
    """Base of jaxfn's own objects of which only some parts are to be looked through for arrays."""

    def visible_parts(self) -> Sequence[object]:
        """Those parts."""
        return ()


class Layout:
    """A value with its array leaves taken out: what kind of tree it is and its static leaves.

    Layouts of single leaves are equal where those are arrays or the same *values*: `1`, `1.0` and `True` differ, as do
    `0.0` and `-0.0`. Hashing raises `TypeError` for others: a mutable object that compares equal today need not do so
    tomorrow, and the static parts of a pytree may compare equal and not be the same.
    """

    __slots__ = ("_key", "are_refs", "leaves", "num_arrays", "treedef")

    def __init__(self, treedef: Any, leaves: tuple[object, ...]) -> None:
        self.treedef = treedef  # None: the value is its own single leaf
        self.leaves = leaves
        self.are_refs = tuple(leaf is _REF for leaf in leaves if isinstance(leaf, _Array))  # one for each array leaf
        self.num_arrays = len(self.are_refs)
        self._key: tuple[object, ...] | None = None

    def merge(self, arrays: Iterator[Any]) -> Any:
        """The value again, with the next `num_arrays` of `arrays` in the array leaves' places."""
        if self is ARRAY_LAYOUT:
            return next(arrays)
        leaves = [next(arrays) if isinstance(leaf, _Array) else leaf for leaf in self.leaves]
        return leaves[0] if self.treedef is None else jax.tree_util.tree_unflatten(self.treedef, leaves)

    def merge_or_none(self, arrays: Iterator[Any]) -> Any:
        """As `merge`, with `None` for the static leaves too: a gradient of this structure."""
        leaves = [next(arrays) if isinstance(leaf, _Array) else None for leaf in self.leaves]
        return leaves[0] if self.treedef is None else jax.tree_util.tree_unflatten(self.treedef, leaves)

    def __repr__(self) -> str:
        value = self.leaves[0] if self.treedef is None else jax.tree_util.tree_unflatten(self.treedef, self.leaves)
        return repr(value)

    @property
    def container(self) -> type | None:
        """The type of the pytree's topmost node; `None` where the value is a single leaf."""
        node = None if self.treedef is None else self.treedef.node_data()
        return None if node is None else node[0]

    @property
    def is_number(self) -> bool:
        """Whether the value is a Python number."""
        return self.treedef is None and type(self.leaves[0]) in _NUMBERS

    def refuse_torch(self, where: Callable[[], str]) -> None:
        """Raises where a static leaf is a torch tensor."""
        if self is not ARRAY_LAYOUT and any(_is_torch_tensor_type(type(leaf)) for leaf in self.leaves):
            raise TypeError(
                f"{where()} is a torch tensor. A Function takes JAX and NumPy arrays: pass tensor.numpy(), or adopt "
                "torch code with jaxfn.from_torch."
            )

    def hides_arrays(self) -> bool:
        """Whether a static leaf, a closure or an object, holds JAX arrays."""
        return self is not ARRAY_LAYOUT and any(True for leaf in self.leaves for _ in _hidden(leaf, _is_jax_type))

    def hidden_tracers(self) -> Iterator[object]:
        """The arrays in static leaves that JAX traces."""
        if self is ARRAY_LAYOUT:
            return iter(())
        return (tracer for leaf in self.leaves for tracer in hidden_tracers(leaf))

    def key(self) -> tuple[object, ...]:
        """A hashable value that stands for this layout; `TypeError` where there is none."""
        if self._key is None:
            if self.treedef is not None:
                raise TypeError("pytrees are not compared by value")
            self._key = value_key(self.leaves[0])
            if self._key == (type(self.leaves[0]),):
                raise TypeError(f"{self._key[0]} is not compared by value")
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


def value_key(leaf: object) -> tuple[object, ...]:
    """What a static leaf is compared by: its type, and its value where it is a plain one."""
    kind = type(leaf)
    if isinstance(leaf, _Array):
        return (leaf,)
    if kind is float:
        return (kind, cast(float, leaf).hex())  # tells -0.0 from 0.0, and nan equals itself
    if kind is complex:
        number = cast(complex, leaf)
        return (kind, number.real.hex(), number.imag.hex())
    if kind in _SCALARS or isinstance(leaf, (type, np.dtype, enum.Enum)):
        return (kind, leaf)
    if isinstance(leaf, types.FunctionType) and leaf.__closure__ is None:
        return (kind, leaf)
    return (kind,)


# How many objects to look through before taking it for granted that there is an array somewhere.
_SEARCH_LIMIT = 2000


def hidden_tracers(value: Any) -> Iterator[object]:
    """The arrays that JAX traces and that an object leads to."""
    return _hidden(value, lambda kind: issubclass(kind, Tracer))


def is_staged(array: object) -> bool:
    """Whether an array stands for a value in a program that JAX is writing down."""
    return isinstance(array, partial_eval.DynamicJaxprTracer)


def _hidden(value: Any, is_wanted: Callable[[type], bool]) -> Iterator[object]:
    """What an object leads to of a wanted type, by its attributes, items or closure.

    The object itself, where there is too much to look through.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if type(part) in _SCALARS or id(part) in seen:
            continue
        if len(seen) > _SEARCH_LIMIT:
            yield value
            return
        seen.add(id(part))
        if is_wanted(type(part)):
            yield part
        elif not isinstance(part, (type, types.ModuleType, np.ndarray, jax.Array, _Array, NoArrays)):
            pending += _parts(part)


def is_plain_function(value: object) -> bool:
    """Whether a value is a function that holds nothing: no closure and no defaults."""
    is_function = isinstance(value, types.FunctionType)
    return is_function and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)


def _parts(value: Any) -> Iterable[Any]:
    """What an object holds, as far as it can be seen without running its code."""
    if isinstance(value, Opaque):
        return value.visible_parts()
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return value
    members = [vars(kind).values() for kind in type(value).__mro__]
    slots = [m for member in members for m in member if isinstance(m, types.MemberDescriptorType)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, slot.__name__, None) for slot in slots)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# A value that is one array, by far the most frequent kind, shares its layout.
ARRAY_LAYOUT = Layout(None, (_ARRAY,))
_REF_LAYOUT = Layout(None, (_REF,))


def is_none(value: object) -> bool:
    """For `is_leaf`: pytrees would otherwise drop `None`."""
    return value is None


def split(value: Any) -> tuple[Sequence[Any], Layout]:
    """Takes a pytree apart into its array leaves and the rest.

    Args:
      value: any pytree; `None` counts as a static leaf.

    Returns:
      The array leaves in tree order, as they are, and the `Layout` that puts them back.
    """
    if type(value) in _SCALARS:
        return (), Layout(None, (value,))
    if is_array_leaf(value):
        return (value,), (ARRAY_LAYOUT if _marker(value) is _ARRAY else _REF_LAYOUT)
    try:
        leaves, treedef = jax.tree_util.tree_flatten(value, is_leaf=is_none)
    except ValueError:  # a dict whose keys cannot be sorted
        if any(True for _ in _hidden(value, _is_jax_type)):
            raise
        return (), Layout(None, (value,))
    if len(leaves) == 1 and leaves[0] is value:
        return (), Layout(None, (value,))
    arrays = [leaf for leaf in leaves if is_array_leaf(leaf)]
    return arrays, Layout(treedef, tuple(_marker(leaf) if is_array_leaf(leaf) else leaf for leaf in leaves))


def split_saved(value: Any) -> tuple[Sequence[Any], Layout]:
    """As `split`, but a value without array leaves is kept as the very object that it is."""
    arrays, layout = split(value)
    return (arrays, layout) if arrays else ((), Layout(None, (value,)))
