"""What `forward` returned: top-level outputs, their array leaves, and the gradients that `backward` gets for them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import jax

from jaxfn._compat import SymbolicZero, zeros_of
from jaxfn._values.arrays import as_array, conjugate, is_boxed_array, is_key
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout, split, value_key


class OutputLayout:
    """The outputs of one run of `forward` without their arrays; equal where they have the same structure."""

    __slots__ = ("container", "layouts", "non_differentiable")

    def __init__(self, container: type | None, layouts: tuple[Layout, ...], non_differentiable: frozenset[int]) -> None:
        self.container = container  # tuple or a namedtuple type; None: one output
        self.layouts = layouts
        self.non_differentiable = non_differentiable  # positions among the array leaves

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OutputLayout):
            return NotImplemented
        return (
            self.container is other.container
            and self.non_differentiable == other.non_differentiable
            and len(self.layouts) == len(other.layouts)
            and all(_look_alike(a, b) for a, b in zip(self.layouts, other.layouts, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self.container, self.non_differentiable, len(self.layouts)))

    def __repr__(self) -> str:
        """For JAX's messages, where the structure of outputs differs from run to run."""
        outputs = ", ".join(map(repr, self.layouts))
        return outputs if self.container is None else f"{self.container.__name__}({outputs})"

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The outputs as the caller gets them."""
        stopped = iter(self.without_derivatives(arrays))
        values = [layout.merge(stopped) for layout in self.layouts]
        if self.container is None:
            return values[0]
        make: Any = getattr(self.container, "_make", self.container)  # a namedtuple's constructor takes no iterable
        return make(values)

    def without_derivatives(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The array leaves, those marked non-differentiable under `stop_gradient`."""
        marked = self.non_differentiable
        if not marked:
            return arrays
        return [jax.lax.stop_gradient(array) if i in marked else array for i, array in enumerate(arrays)]

    def grad_outputs(self, cotangents: Sequence[Any], avals: Sequence[Any], materialize: bool) -> list[Any] | None:
        """One gradient for each top-level output, in torch's convention; `None` where all of them are zero.

        Args:
          cotangents: one for each array leaf, JAX's, possibly symbolic zeros.
          avals: the types of those leaves.
          materialize: whether zeros are given as arrays; as `None` otherwise.
        """
        marked = self.non_differentiable
        zero = [_is_zero(ct) or i in marked for i, ct in enumerate(cotangents)]
        if all(zero):
            return None
        if len(zero) == len(self.layouts) == 1 and self.layouts[0] is ARRAY_LAYOUT:  # by far the most frequent
            return [conjugate(as_array(cotangents[0]))]
        leaves: list[Any] = [
            (_zeros(aval) if materialize else None) if is_zero else conjugate(as_array(ct))
            for ct, aval, is_zero in zip(cotangents, avals, zero, strict=True)
        ]
        gradients: list[Any] = []
        for layout in self.layouts:
            own, leaves = leaves[: layout.num_arrays], leaves[layout.num_arrays :]
            all_none = all(leaf is None for leaf in own)
            gradients.append(None if all_none else layout.merge_or_none(iter(own)))
        return gradients


def _is_zero(cotangent: Any) -> bool:
    """Whether it is a zero by its type: what is no number has no other gradient, and comes as float0 out of loops."""
    return isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.dtypes.float0


def _zeros(aval: Any) -> Any:
    # Random keys have no zero.
    return None if is_key(aval) else zeros_of(aval)


def _look_alike(a: Layout, b: Layout) -> bool:
    """Whether two runs of the same `forward` gave this output alike; objects made anew each time count as alike."""
    no_tree = a.treedef is None or b.treedef is None  # PyTreeDef does not compare with None
    same_tree = a.treedef is b.treedef if no_tree else a.treedef == b.treedef
    return same_tree and all(value_key(x) == value_key(y) for x, y in zip(a.leaves, b.leaves, strict=True))


class Outputs:
    """The outputs' array leaves, with their layout: a pytree node."""

    def __init__(self, layout: OutputLayout, arrays: Sequence[Any]) -> None:
        self.layout = layout
        self.arrays = arrays

    def __repr__(self) -> str:
        return repr(self.layout)


jax.tree_util.register_pytree_node(Outputs, attrgetter("arrays", "layout"), Outputs)


class Returned(NamedTuple):
    """What `forward` returned, taken apart.

    Attributes:
      value: the outputs themselves, NumPy arrays in them made into JAX ones.
      arrays: their array leaves.
      originals: those as forward returned them, by whose identity it marks and saves them.
      container: `tuple` or a namedtuple type where there are several outputs, `None` where there is one.
      layouts: one per top-level output.
      non_differentiable: which array leaves were marked so.
    """

    value: Any
    arrays: list[Any]
    originals: list[Any]
    container: type | None
    layouts: tuple[Layout, ...]
    non_differentiable: frozenset[int] = frozenset()

    @property
    def layout(self) -> OutputLayout:
        return OutputLayout(self.container, self.layouts, self.non_differentiable)


def take_apart(value: Any) -> Returned:
    """Splits what `forward` returned into outputs: a tuple is several, anything else is one."""
    container: type | None = None
    outputs: tuple[Any, ...] = (value,)
    if isinstance(value, tuple):
        container, outputs = type(value), value
    arrays: list[Any] = []
    layouts: list[Layout] = []
    for output in outputs:
        leaves, layout = split(output)
        if layout is not ARRAY_LAYOUT and is_boxed_array(output):
            leaves, layout = (output,), ARRAY_LAYOUT
        arrays += leaves
        layouts.append(layout)
    converted = [as_array(array) for array in arrays]
    if not all(map(is_, arrays, converted)):
        value = OutputLayout(container, tuple(layouts), frozenset()).merge(converted)
    return Returned(value, converted, arrays, container, tuple(layouts))
