"""A call of a Function: what is the same whatever its arrays hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from jaxfn._run.methods import Methods
from jaxfn._values.arguments import Form
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout


class Scopes(NamedTuple):
    """What compiled programs and profiles call the operations of a Function's methods."""

    forward: str
    backward: str
    jvp: str
    vmap: str


class Call:
    """A way of calling a Function: everything about the arguments but the arrays."""

    def __init__(self, methods: Methods, form: Form, layouts: tuple[Layout, ...]) -> None:
        self.methods = methods
        self.name = methods.name
        self.scopes = Scopes(*(f"{methods.name}.{method}" for method in Scopes._fields))
        self.form = form
        self.layouts = layouts
        self.are_refs = tuple(flag for layout in layouts for flag in layout.are_refs)  # one for each array leaf
        self.unperturbed = (False,) * len(self.are_refs)
        self.has_refs = any(self.are_refs)
        self.numbers = [layout.leaves[0] for layout in layouts if layout.is_number]
        self._are_arrays = all(layout is ARRAY_LAYOUT for layout in layouts)
        self.changeable = [i for i, layout in enumerate(layouts) if layout.may_be_changed]
        self.may_close_over = methods.may_close_over or not self._are_arrays
        self.differentiated_here: Any = None  # see `jaxfn._derivatives.rule`
        self._is_flat = all(layout.num_arrays == 1 for layout in layouts)

    @property
    def places_without_refs(self) -> list[int]:
        """Which array leaves are not references."""
        return [i for i, is_ref in enumerate(self.are_refs) if not is_ref]

    def without_refs(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The array leaves, or what belongs to them, that are not references."""
        if not self.has_refs:
            return leaves
        return [x for x, is_ref in zip(leaves, self.are_refs, strict=True) if not is_ref]

    def with_refs(self, leaves: Sequence[Any], stand_in: Any) -> Sequence[Any]:
        """The inverse: `stand_in` where the references are."""
        remaining = iter(leaves)
        return [stand_in if is_ref else next(remaining) for is_ref in self.are_refs]

    def refuse_perturbed_refs(self, perturbed: Sequence[bool]) -> None:
        """Raises where a reference itself is being differentiated, whose derivative would be lost silently."""
        owners = (i for i, layout in enumerate(self.layouts) for _ in range(layout.num_arrays))
        for owner, is_ref, is_perturbed in zip(owners, self.are_refs, perturbed, strict=True):
            if is_ref and is_perturbed:
                raise NotImplementedError(
                    f"{self.name}: {self.form.describe(owner)} is a jax.Ref that was made inside the function being "
                    "differentiated. What a Function reads from or writes to it would have no derivative. Make the Ref "
                    "outside, or return the value instead of writing it."
                )

    def refuse_changed_inputs(self, inputs: Sequence[Any], arrays: Sequence[Any], returned: Sequence[Any]) -> None:
        """Raises where `forward` has written to an object among its inputs, a copy, what it has not returned."""
        for position in self.changeable:
            layout = self.layouts[position]
            start = sum(layout.num_arrays for layout in self.layouts[:position])
            path = layout.changed_path(inputs[position], arrays[start : start + layout.num_arrays], returned)
            if path is not None:
                raise NotImplementedError(
                    f"{self.name}.forward changed {self.form.describe(position)}{path and ' at '}{path}. A Function is "
                    "given copies of objects that hold arrays, as jax.jit and jax.grad give them, so its caller would "
                    "never see the change. Return the new state from forward, and write it back where the Function is "
                    "called."
                )

    def needs_input_grad(self, perturbed: tuple[bool, ...]) -> tuple[bool, ...]:
        """For each input, whether some array leaf of it is perturbed."""
        if self._is_flat:
            return perturbed
        flags = iter(perturbed)
        return tuple(any(list(islice(flags, layout.num_arrays))) for layout in self.layouts)

    def inputs(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs, with these arrays in their places."""
        if self._are_arrays:
            return tuple(arrays)
        remaining = iter(arrays)
        return tuple(layout.merge(remaining) for layout in self.layouts)
