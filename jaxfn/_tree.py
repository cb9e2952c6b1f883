"""Pytrees of arrays and Python values: which leaves are arrays, and everything else as a `TreeSpec`.

An *array leaf* is a `jax.Array`, traced or not, a NumPy array or scalar, a `jax.Ref`, or anything with
`__jax_array__`. Every other leaf is static and stays the Python object that it is.

An *array wrapper* is a pytree node that JAX accepts as an array, such as `nnx.Param`. As an argument it stays that
node, and may hold a pytree itself; a *wrapped array*, which holds one array, may be returned in place of an array.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import is_not
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from jaxfn._traces import is_ref

# NumPy arrays of these kinds (objects, text, dates) cannot be JAX arrays, so they are static.
_STATIC_KINDS = frozenset("OSUMm")
_NUMBERS = frozenset({int, float, complex})
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})


@lru_cache(maxsize=4096)
def _is_array_type(kind: type) -> bool:
    # JAX passes Python numbers on as its own subclasses of int, float and complex, which have a dtype.
    is_typed_scalar = issubclass(kind, (int, float, complex)) and kind.__module__.partition(".")[0] == "jax"
    return is_jax_type(kind) or is_typed_scalar or hasattr(kind, "__jax_array__")


@lru_cache(maxsize=4096)
def is_jax_type(kind: type) -> bool:
    """Whether objects of a type are JAX arrays, tracers and references included."""
    return issubclass(kind, (jax.Array, jax.Ref, Tracer))


@lru_cache(maxsize=4096)
def is_inexact(dtype: Any) -> bool:
    """Whether arrays of a dtype can be differentiated: floating, complex, and extended dtypes that have a tangent."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return ShapedArray((), dtype).to_tangent_aval().dtype != jax.float0
    return jnp.issubdtype(dtype, jnp.inexact)


def double(dtype: Any) -> np.dtype[Any]:
    """Returns float64, or complex128 for a complex dtype."""
    return np.dtype(np.complex128 if np.dtype(dtype).kind == "c" else np.float64)


def is_key(array: Any) -> bool:
    """Whether an array holds random keys, which are not numbers."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def is_array_leaf(leaf: object) -> bool:
    """Whether a leaf is data for JAX rather than a Python value."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in _STATIC_KINDS
    return _is_array_type(type(leaf))


def is_array_wrapper(value: object) -> bool:
    """Whether a value is a pytree node that JAX accepts as an array."""
    kind: type = type(value)
    may_be = not is_jax_type(kind) and hasattr(kind, "__jax_array__")
    return may_be and not jax.tree_util.all_leaves([value])


def is_wrapped_array(value: object) -> bool:
    """Whether a value is an array wrapper with one array in it."""
    return is_array_wrapper(value) and len(tree_leaves(value)) == 1


def is_traced(leaf: object) -> bool:
    """Whether an array leaf is a JAX tracer."""
    return isinstance(leaf, Tracer)


def as_array(leaf: Any) -> jax.Array:
    """Returns an array leaf as something that JAX takes as an operand."""
    return leaf if is_jax_type(type(leaf)) else jnp.asarray(leaf)


def replace_at(indices: Sequence[int], values: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """Returns the values, with new ones at these indices."""
    replaced = dict(zip(indices, new, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(values)]


def conjugate(gradient: jax.Array) -> jax.Array:
    """Converts a complex gradient between torch's and JAX's convention; each is the other's conjugate."""
    return jnp.conj(gradient) if jnp.issubdtype(gradient.dtype, np.complexfloating) else gradient


def is_none(value: object) -> bool:
    """Whether a value is `None`; as `is_leaf`, makes `None` a leaf of a pytree."""
    return value is None


class _ArrayMarker:
    """A marker of an array leaf in a `TreeSpec`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


_ARRAY = _ArrayMarker("array")
_REF = _ArrayMarker("ref")  # a jax.Ref is mutated and has no derivative here


@lru_cache(maxsize=4096)
def is_torch_tensor_type(kind: type) -> bool:
    """Whether a type is torch's tensor or derived from it."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def _marker(leaf: Any) -> _ArrayMarker:
    # The type of a tracer does not show whether it is a reference, and `is_ref` is slow.
    return _REF if type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and is_ref(leaf)) else _ARRAY


class TreeSpec:
    """The static part of a pytree: its treedef and its non-array leaves, with markers for the arrays.

    Specs are equal if their containers, of Python's own types, are equal, and their leaves are arrays or identical
    *values*: `1`, `1.0` and `True` differ, as do `0.0` and `-0.0`. Hashing raises `TypeError` for others: a mutable
    object that compares equal today need not do so tomorrow, and pytree nodes of other types may compare equal and
    still hold different data.

    Args:
      treedef: The treedef; `None` if the value is its own single leaf.
      leaves: The static leaves, and markers for the arrays.
      value: The value, if it is to be passed on as the very object: code may write to it.
    """

    __slots__ = ("_key", "_value", "are_refs", "leaves", "num_arrays", "treedef")

    def __init__(self, treedef: Any, leaves: tuple[object, ...], value: object = None) -> None:
        self.treedef = treedef
        self._value = value
        self.leaves = leaves
        self.are_refs = tuple(leaf is _REF for leaf in leaves if isinstance(leaf, _ArrayMarker))  # one per array leaf
        self.num_arrays = len(self.are_refs)
        self._key: tuple[object, ...] | None = None

    def unflatten(self, arrays: Iterator[Any]) -> Any:
        """Returns the value with the next `num_arrays` of `arrays` as its array leaves."""
        if self is ARRAY_SPEC:
            return next(arrays)
        return self._unflatten(self._with_arrays(arrays)) if self._value is None else self._value

    def _with_arrays(self, arrays: Iterator[Any]) -> list[Any]:
        return [next(arrays) if isinstance(leaf, _ArrayMarker) else leaf for leaf in self.leaves]

    def unflatten_gradient(self, arrays: Iterator[Any]) -> Any:
        """Returns a gradient of this structure: like `unflatten`, but with `None` for static leaves."""
        return self._unflatten([next(arrays) if isinstance(leaf, _ArrayMarker) else None for leaf in self.leaves])

    def _unflatten(self, leaves: Sequence[Any]) -> Any:
        return leaves[0] if self.treedef is None else tree_unflatten(self.treedef, leaves)

    def __repr__(self) -> str:
        return repr(self._unflatten(self.leaves))

    @property
    def container(self) -> type | None:
        """The type of the topmost node; `None` if the value is a single leaf."""
        node = None if self.treedef is None else self.treedef.node_data()
        return None if node is None else node[0]

    @property
    def is_number(self) -> bool:
        """Whether the value is a Python number."""
        return self.treedef is None and type(self.leaves[0]) in _NUMBERS

    def check_no_torch_tensors(self, where: Callable[[], str]) -> None:
        """Raises `TypeError` if a static leaf is a torch tensor."""
        if self is not ARRAY_SPEC and any(is_torch_tensor_type(type(leaf)) for leaf in self.leaves):
            raise TypeError(
                f"{where()} is a torch tensor. A Function takes JAX and NumPy arrays: pass tensor.numpy(), or "
                "convert torch code with jaxfn.from_torch."
            )

    @property
    def is_mutable(self) -> bool:
        """Whether it is a copy to which code may write."""
        return self.treedef is not None and self._value is None and bool(_writable_types(self.treedef))

    def mutated_path(self, value: Any, arrays: Sequence[Any], known: Sequence[Any]) -> str | None:
        """Returns the path at which a value that `unflatten` built from `arrays` has a leaf that is in neither list."""
        new = self._new_paths(value, arrays, known)
        if new:  # an object that a node creates each time that it is flattened is not a mutation
            always = set(self._new_paths(self.unflatten(iter(arrays)), arrays, known))
            new = [path for path in new if path not in always]
        return new[0] if new else None

    def _new_paths(self, value: Any, arrays: Sequence[Any], known: Sequence[Any]) -> list[str]:
        leaves = self._with_arrays(iter(arrays))
        try:
            present, treedef = tree_flatten_with_path(value, is_leaf=is_none)
        except ValueError:  # such as equinox's State, which may not be used again once there is a newer one
            return []
        if len(present) != len(leaves):
            return [""]
        seen = set(map(id, known))
        new = [
            keystr(path)
            for (path, leaf), before in zip(present, leaves, strict=True)
            if leaf is not before and id(leaf) not in seen
        ]
        with contextlib.suppress(Exception):  # static data of nodes may raise when it is compared
            if treedef != self.treedef:
                new.append("")
        return new

    @property
    def objects(self) -> list[object]:
        """The static leaves that are neither scalars nor classes, so that they may hold arrays."""
        others = (_ArrayMarker, type)
        return [x for x in self.leaves if not isinstance(x, others) and type(x) not in _SCALARS]

    def key(self) -> tuple[object, ...] | None:
        """Returns a hashable value that identifies this spec; `None` if some part is not compared by value."""
        is_new = self._key is None and self._value is None
        if is_new and (self.treedef is None or _has_plain_containers(self.treedef)):
            keys = [leaf_key(leaf) for leaf in self.leaves]
            if all(len(key) > 1 for key in keys):
                self._key = (self.treedef, *keys)
        return self._key

    @property
    def is_hashable(self) -> bool:
        """Whether the spec is compared by value."""
        return self is ARRAY_SPEC or self.key() is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeSpec):
            return NotImplemented
        return self is other or (self.is_hashable and self.key() == other.key())

    def __hash__(self) -> int:
        if not self.is_hashable:
            raise TypeError(f"{self!r} is not compared by value")
        return hash(self.key())


def _has_plain_containers(treedef: Any) -> bool:
    """Whether a tree consists of tuples, lists, `None` and dicts with string keys, which compare by value."""
    node = treedef.node_data()
    if node is None:
        return True
    kind: type = node[0]
    data: Any = node[1]
    if kind is dict:
        is_plain = all(type(key) is str for key in data)
    else:
        is_plain = kind is list or kind is type(None) or (issubclass(kind, tuple) and data is None)
    return is_plain and all(map(_has_plain_containers, treedef.children()))


def _writable_types(treedef: Any) -> set[type]:
    """Returns the types of nodes to which code may write: all but those of tuples and `None`."""
    node = treedef.node_data()
    own: set[type] = set() if node is None or issubclass(node[0], (tuple, type(None))) else {node[0]}
    return own.union(*map(_writable_types, treedef.children()))


def leaf_key(leaf: Any) -> tuple[object, ...]:
    """Returns what a static leaf is compared by: its type, and its value if that is a plain one."""
    kind: type = type(leaf)
    if kind is float:
        return (kind, leaf.hex())  # tells -0.0 from 0.0, and nan equals itself
    if kind is complex:
        return (kind, leaf.real.hex(), leaf.imag.hex())
    if isinstance(leaf, types.FunctionType):
        return (kind, leaf) if leaf.__closure__ is None else (kind,)
    return (kind, leaf) if kind in _SCALARS or isinstance(leaf, (_ArrayMarker, type, np.dtype, enum.Enum)) else (kind,)


# A value that is one array, by far the most frequent kind, shares its spec.
ARRAY_SPEC = TreeSpec(None, (_ARRAY,))
_REF_SPEC = TreeSpec(None, (_REF,))


@jax.tree_util.register_pytree_with_keys_class
class _UnsortedDict:
    """A pytree node for a dict whose keys cannot be sorted, in insertion order; it unflattens to a dict."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self._value = value

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(_dict_key(key), _with_sortable_dicts(x)) for key, x in self._value.items()], tuple(self._value)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], values: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip(keys, values, strict=True))


def _dict_key(key: Any) -> Any:
    return key if key is None else jax.tree_util.DictKey(key)  # which JAX 0.10.0 does not make of None


def _with_sortable_dicts(value: Any) -> Any:
    """Returns a pytree with `_UnsortedDict` nodes for dicts that JAX cannot flatten."""

    def is_unsorted(value: Any) -> bool:
        try:
            sorted(cast(dict[Any, Any], value) if type(value) is dict else ())
        except TypeError:
            return True
        return False

    def convert(value: Any) -> Any:
        return _UnsortedDict(value) if is_unsorted(value) else value

    return jax.tree_util.tree_map(convert, value, is_leaf=is_unsorted)


def flatten_input(value: Any) -> tuple[Sequence[Any], TreeSpec]:
    """Flattens an input of `forward`. Lists and dicts without arrays are passed to it as the very objects."""
    leaves, spec = flatten(value)
    types = set() if leaves or spec.treedef is None else _writable_types(spec.treedef)
    return leaves, TreeSpec(spec.treedef, spec.leaves, value) if types and types <= {list, dict} else spec


def flatten(value: Any) -> tuple[Sequence[Any], TreeSpec]:
    """Returns the array leaves of a pytree in tree order, unchanged, and the `TreeSpec` that restores it.

    `None` is a static leaf.
    """
    if type(value) in _SCALARS:
        return (), TreeSpec(None, (value,))
    if is_jax_type(type(value)) or (is_array_leaf(value) and not is_array_wrapper(value)):
        return (value,), (ARRAY_SPEC if _marker(value) is _ARRAY else _REF_SPEC)
    try:
        leaves, treedef = tree_flatten(value, is_leaf=is_none)
    except ValueError:  # a dict whose keys cannot be sorted
        leaves, treedef = tree_flatten(_with_sortable_dicts(value), is_leaf=is_none)
    if len(leaves) == 1 and leaves[0] is value:
        return (), TreeSpec(None, (value,))
    arrays = [leaf for leaf in leaves if is_array_leaf(leaf)]
    return arrays, TreeSpec(treedef, tuple(_marker(leaf) if is_array_leaf(leaf) else leaf for leaf in leaves))


def flatten_saved(value: Any) -> tuple[Sequence[Any], TreeSpec]:
    """Flattens like `flatten`, but a value without array leaves becomes one static leaf, restored as that object."""
    arrays, spec = flatten(value)
    return (arrays, spec) if arrays else ((), TreeSpec(None, (value,)))


class StructureError(ValueError):
    """An error that says where two structures differ."""


class ExpectedLeaf:
    """An array leaf that user code should return; has the attributes that pytree classes read when they are rebuilt."""

    def __init__(self, aval: Any, is_differentiated: bool) -> None:
        self.aval = aval
        self.is_differentiated = is_differentiated
        self.shape, self.ndim, self.dtype = aval.shape, len(aval.shape), aval.dtype


def match_leaves(
    value: Any, skeleton: Any, path: tuple[Any, ...] = (), by_name: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yields, for each leaf of the skeleton, its path, its counterpart in `value`, and the leaf itself.

    `None` matches a whole subtree. A node of a user's class (a module) may be matched by another container (a
    dict, `nnx.State`), by the names in it. Libraries omit values without a derivative, so names may be missing there.
    """
    wanted, got = _children(skeleton), _children(value)
    if wanted is None:
        if got is not None and path:
            raise StructureError(f"nothing was returned for {_path_text(path)}")
        if is_wrapped_array(skeleton):  # compared by contents: the wrapper's __jax_array__ may be a function of them
            (skeleton,) = tree_leaves(skeleton)
            value = tree_leaves(value)[0] if is_wrapped_array(value) else value
        yield keystr(path), value, skeleton
        return
    if got is None and value is not None:
        problem = "one value was returned at {}, where several leaves belong" if wanted else "there is nothing at {}"
        raise StructureError(problem.format(_path_text(path)))
    kind = type(skeleton)
    by_name = type(value) is not kind and (by_name or not issubclass(kind, (dict, list, tuple)))
    name_of: Callable[[Any], Any] = _name if by_name else lambda key: key
    children = {name_of(key): (key, child) for key, child in got or ()}
    for key, child in wanted:
        if value is not None and not by_name and key not in children:
            for missing, _ in leaves_with_path(child, _ends_path)[:1]:
                raise StructureError(f"nothing was returned for {_path_text((*path, key, *missing))}")
        _, piece = children.pop(name_of(key), (key, None))
        yield from match_leaves(piece, child, (*path, key), by_name)
    for key, child in children.values():
        for extra, leaf in leaves_with_path(child, _ends_path):
            if leaf is not None:
                raise StructureError(f"there is nothing at {_path_text((*path, key, *extra))}")


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the children of a pytree node and their keys; `None` for a leaf and for what is matched as one."""
    if is_jax_type(type(value)) or _ends_path(value):
        return None
    try:
        children, _ = tree_flatten_with_path(value, is_leaf=partial(is_not, value))
    except ValueError:  # a dict whose keys cannot be sorted
        return [(_dict_key(key), child) for key, child in value.items()]
    return None if any(path == () for path, _ in children) else [(key, child) for (key,), child in children]


def _name(key: Any) -> Any:
    """Returns the attribute, dict key or index of a key of a path."""
    return next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)


def _ends_path(value: object) -> bool:
    """Whether both structures end here: an array matches a wrapper of one, and a wrapper an array."""
    return is_none(value) or is_wrapped_array(value)


def leaves_with_path(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Sequence[tuple[Any, Any]]:
    """Returns the leaves of a pytree and their paths; also of dicts whose keys cannot be sorted."""
    try:
        return tree_flatten_with_path(value, is_leaf)[0]
    except ValueError:
        return tree_flatten_with_path(_with_sortable_dicts(value), is_leaf)[0]


def _path_text(path: Sequence[Any]) -> str:
    return keystr(tuple(path)) or "its top"
