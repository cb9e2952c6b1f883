"""Taking a value apart into its array leaves and a `Layout`, and putting it together again."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from jaxfn._compat import is_ref
from jaxfn._values.arrays import is_array_leaf, is_box, is_jax_type, is_none
from jaxfn._values.hidden import NoArrays, hides_arrays

_NUMBERS = frozenset({int, float, complex})
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})


class _Array(NoArrays):
    """Stands in a `Layout` where an array leaf was taken out."""

    def __repr__(self) -> str:
        return "array"


class _Ref(_Array):
    """Stands in a `Layout` for a `jax.Ref`, which is written in place and has no derivative of its own here."""

    def __repr__(self) -> str:
        return "ref"


_ARRAY = _Array()
_REF = _Ref()


@lru_cache(maxsize=4096)
def _is_torch_tensor_type(kind: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def _marker(leaf: Any) -> _Array:
    # Only a tracer does not show by its type whether it is a reference, and asking its value is slow.
    return _REF if type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and is_ref(leaf)) else _ARRAY


class Layout:
    """A value with its array leaves taken out: what kind of tree it is and its static leaves.

    Layouts are equal where they are of the same containers, Python's own, and their leaves are arrays or the same
    *values*: `1`, `1.0` and `True` differ, as do `0.0` and `-0.0`. Hashing raises `TypeError` for others: a mutable
    object that compares equal today need not do so tomorrow, and what a pytree node of another kind holds may compare
    equal and not be the same.
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

    @property
    def may_be_changed(self) -> bool:
        """Whether it has nodes of classes of their own, which code may write to."""
        return self.treedef is not None and not _is_of_plain_containers(self.treedef)

    def changed_path(self, value: Any, arrays: Sequence[Any], known: Sequence[Any]) -> str | None:
        """Where a value that `merge` made of these arrays holds something new by now, that is not known either."""
        new = self._new_paths(value, arrays, known)
        if new:  # what a node makes anew each time that it is taken apart is no change
            always = set(self._new_paths(self.merge(iter(arrays)), arrays, known))
            new = [path for path in new if path not in always]
        return new[0] if new else None

    def _new_paths(self, value: Any, arrays: Sequence[Any], known: Sequence[Any]) -> list[str]:
        given = iter(arrays)
        leaves = [next(given) if isinstance(leaf, _Array) else leaf for leaf in self.leaves]
        try:
            present, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_none)
        except ValueError:  # such as equinox's State, which nobody may use again once there is a newer one
            return []
        if len(present) != len(leaves):
            return [""]
        seen = set(map(id, known))
        new = [
            jax.tree_util.keystr(path)
            for (path, leaf), was in zip(present, leaves, strict=True)
            if leaf is not was and id(leaf) not in seen
        ]
        return [*new, ""] if _differ(treedef, self.treedef) else new

    def hides_arrays(self) -> bool:
        """Whether a static leaf, a closure or an object, holds JAX arrays."""
        return self is not ARRAY_LAYOUT and any(map(hides_arrays, self.leaves))

    def key(self) -> tuple[object, ...]:
        """A hashable value that stands for this layout; `TypeError` where there is none."""
        if self._key is None:
            if self.treedef is not None and not _is_of_plain_containers(self.treedef):
                raise TypeError("this pytree is not compared by value")
            keys = [value_key(leaf) for leaf in self.leaves]
            for key in keys:
                if len(key) == 1 and not isinstance(key[0], _Array):
                    raise TypeError(f"{key[0]} is not compared by value")
            self._key = (self.treedef, *keys)
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


def _differ(treedef: Any, other: Any) -> bool:
    """Whether two trees are known to differ; what their nodes hold besides arrays may refuse to be compared."""
    try:
        return bool(treedef != other)
    except Exception:
        return False


def _is_of_plain_containers(treedef: Any) -> bool:
    """Whether a tree is of tuples, named or not, lists, `None` and dicts with text for keys, which compare by value."""
    node = treedef.node_data()
    if node is None:
        return True
    kind: type = node[0]
    data: Any = node[1]
    if kind is dict:
        is_plain = all(type(key) is str for key in data)
    else:
        is_plain = kind is list or kind is type(None) or (issubclass(kind, tuple) and data is None)
    return is_plain and all(map(_is_of_plain_containers, treedef.children()))


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


# A value that is one array, by far the most frequent kind, shares its layout.
ARRAY_LAYOUT = Layout(None, (_ARRAY,))
_REF_LAYOUT = Layout(None, (_REF,))


def split(value: Any) -> tuple[Sequence[Any], Layout]:
    """Takes a pytree apart into its array leaves and the rest.

    Args:
      value: any pytree; `None` counts as a static leaf.

    Returns:
      The array leaves in tree order, as they are, and the `Layout` that puts them back.
    """
    if type(value) in _SCALARS:
        return (), Layout(None, (value,))
    if is_jax_type(type(value)) or (is_array_leaf(value) and not is_box(value)):
        return (value,), (ARRAY_LAYOUT if _marker(value) is _ARRAY else _REF_LAYOUT)
    try:
        leaves, treedef = jax.tree_util.tree_flatten(value, is_leaf=is_none)
    except ValueError:  # a dict whose keys cannot be sorted
        if hides_arrays(value):
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
