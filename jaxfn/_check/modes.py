"""The ways to run a function and its derivatives that have to give equal results.

A rule may compute something else if one cotangent is undefined, if one input alone is differentiated, or in a batch.
So the tools run a function in all of these ways, and compare with the results for zeros, for all inputs, and of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._tree import conjugate, replace_at

# A function of arrays that returns a list of arrays.
LeafFunction = Callable[..., list[Any]]
# (inputs, cotangents) -> (outputs, gradients), or (inputs, tangents) -> (outputs, output tangents); all are lists.
Derivative = Callable[[Sequence[Any], Sequence[Any]], Any]


def reverse_derivative(call: LeafFunction) -> Derivative:
    """Returns the derivative in reverse mode."""

    def reverse(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, pull = jax.vjp(call, *xs)
        return outputs, list(pull(list(cotangents)))

    return reverse


def forward_derivative(call: LeafFunction) -> Derivative:
    """Returns the derivative in forward mode."""

    def forward(xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jax.jvp(call, tuple(xs), tuple(tangents))

    return forward


def jacobian_rows(call: LeafFunction) -> Derivative:
    """Returns the derivative in reverse mode, in torch's convention for complex numbers.

    The cotangent of the functional "imaginary part" is -1j in JAX, and 1j in torch.
    """
    reverse = reverse_derivative(call)

    def rows(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, gradients = reverse(xs, list(map(conjugate, cotangents)))
        return outputs, list(map(conjugate, gradients))

    return rows


def restrict_outputs(call: LeafFunction, indices: Sequence[int]) -> LeafFunction:
    """Returns the function with some of its outputs."""

    def some(*xs: Any) -> list[Any]:
        outputs = call(*xs)
        return [outputs[i] for i in indices]

    return some


def restrict_inputs(call: LeafFunction, xs: Sequence[Any], indices: Sequence[int]) -> LeafFunction:
    """Returns the function of some of its inputs, with the values in `xs` for the others."""

    def some(*values: Any) -> list[Any]:
        return call(*replace_at(indices, xs, values))

    return some


@dataclass(frozen=True)
class PartialDerivative:
    """A derivative with respect to some inputs only, or of some outputs."""

    is_undefined: bool  # whether one cotangent or tangent is undefined; otherwise one input alone is differentiated
    condition: str  # both as text
    inputs: Sequence[int]  # the indices of the inputs that are differentiated; the tangents of others are undefined
    outputs: Sequence[int]  # the indices of the outputs that have a cotangent; those of others are undefined

    @property
    def advice(self) -> str:
        """The fix for a rule that is wrong under this condition."""
        return "treat it as zeros" if self.is_undefined else "respect ctx.needs_input_grad"

    def seeds(self, is_forward: bool) -> Sequence[int]:
        """Returns the indices of the defined tangents or cotangents."""
        return self.inputs if is_forward else self.outputs

    def results(self, is_forward: bool) -> Sequence[int]:
        """Returns the indices of the results."""
        return self.outputs if is_forward else self.inputs

    def of(
        self, call: LeafFunction, derivative_of: Callable[[LeafFunction], Derivative], is_forward: bool
    ) -> Derivative:
        """Returns this part of a function's derivative, which maps all inputs and seed vectors to its results."""

        def results(xs: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
            some = restrict_outputs(restrict_inputs(call, xs, self.inputs), self.outputs)
            defined = [vectors[i] for i in self.seeds(is_forward)]
            return derivative_of(some)([xs[i] for i in self.inputs], defined)[1]

        return results


def parts(inputs: Sequence[str], outputs: Sequence[str], *, is_forward: bool) -> list[PartialDerivative]:
    """Returns the parts with one of several seed vectors undefined, and those of one of several inputs."""
    every_input, every_output = range(len(inputs)), range(len(outputs))
    seed_name, seeds = ("tangent", inputs) if is_forward else ("cotangent", outputs)
    found: list[PartialDerivative] = []
    for i, name in enumerate(seeds) if len(seeds) > 1 else ():
        others = [j for j in range(len(seeds)) if j != i]
        defined = (others, every_output) if is_forward else (every_input, others)
        found.append(PartialDerivative(True, f"if the {seed_name} of {name} is undefined", *defined))
    if len(inputs) > 1 and not is_forward:
        found += [
            PartialDerivative(False, f"if {x} alone is differentiated", [i], every_output) for i, x in enumerate(inputs)
        ]
    return found


@dataclass(frozen=True)
class Batching:
    """A way to batch the inputs of a function."""

    axes: tuple[int | None, ...]  # the batch axis of each input, or `None`

    def condition(self, names: Sequence[str]) -> str:
        """Describes it by the names of the inputs."""
        axis = next(axis for axis in self.axes if axis is not None)
        unbatched = [name for name, axis in zip(names, self.axes, strict=True) if axis is None]
        return f"along axis {axis}" + (f", {', '.join(unbatched)} unbatched" if unbatched else "")

    def items(self, batch: Sequence[Any]) -> list[Any]:
        """Returns the inputs of a loop, from arrays with a leading axis: those of unbatched inputs are repeated."""
        return [np.broadcast_to(x[:1], x.shape) if a is None else x for x, a in zip(batch, self.axes, strict=True)]

    def inputs(self, batch: Sequence[Any]) -> list[Any]:
        """Returns the inputs of `vmap`, from arrays with a leading axis."""
        return [x[0] if a is None else jnp.moveaxis(x, 0, a) for x, a in zip(batch, self.axes, strict=True)]

    def vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of `inputs`, with results that are batched along the first axis."""
        return jax.vmap(function, in_axes=self.axes)


def batchings(owners: Sequence[int]) -> list[Batching]:
    """Returns the first axis, the last, and the first with one argument unbatched."""
    arguments = dict.fromkeys(owners)
    unbatched = [tuple(None if i == owner else 0 for i in owners) for owner in arguments if len(arguments) > 1]
    return [Batching(axes) for axes in [(0,) * len(owners), (-1,) * len(owners), *unbatched]]
