"""Comparing what user code returned, leaf by leaf, with a value of the structure that it should have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves

from jaxfn._values.arrays import is_boxed_array, is_none
from jaxfn._values.layouts import Layout


class StructureError(ValueError):
    """Says where two structures differ."""


class AvalLeaf:
    """An array leaf, in the place where it was. Has what pytree classes look at when they are rebuilt.

    Args:
      aval: its type.
      is_wanted: whether anything is wanted for it.
    """

    def __init__(self, aval: Any, is_wanted: bool) -> None:
        self.aval = aval
        self.is_wanted = is_wanted

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def ndim(self) -> int:
        return len(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype


def paired_leaves(value: Any, skeleton: Any, layout: Layout) -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of the skeleton: its path, what `value` has for it, and the leaf itself.

    Args:
      value: what was returned; `None` anywhere stands for the whole subtree.
      skeleton: the structure it should have.
      layout: the skeleton's.

    Raises:
      StructureError: `value` has another structure.
    """
    if layout.treedef is None:
        yield "", value, skeleton
        return
    wanted = tree_flatten_with_path(skeleton, is_leaf=_is_one_array)[0]
    got: dict[Any, Any] = {(): None}
    if value is not None:
        got = dict(tree_flatten_with_path(value, is_leaf=_is_one_array)[0])
    used: set[Any] = set()
    for path, leaf in wanted:
        returned_path = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in got), None)
        if returned_path is None:
            raise StructureError(f"nothing was returned for {_path_text(path)}")
        if len(returned_path) < len(path) and got[returned_path] is not None:
            raise StructureError(f"one value was returned at {_path_text(returned_path)}, where several leaves belong")
        used.add(returned_path)
        piece = got[returned_path]
        if is_boxed_array(leaf):  # by what the boxes hold; what JAX takes them for may be a function of that
            (leaf,) = tree_leaves(leaf)
            piece = tree_leaves(piece)[0] if is_boxed_array(piece) else piece
        yield keystr(path), piece, leaf
    for path, piece in got.items():
        if path not in used and piece is not None:
            raise StructureError(f"there is nothing at {_path_text(path)}")


def _is_one_array(value: object) -> bool:
    """Where both structures end: an array may stand for a box with one, and a box for an array."""
    return is_none(value) or is_boxed_array(value)


def _path_text(path: Iterable[Any]) -> str:
    return keystr(tuple(path)) or "its top"
