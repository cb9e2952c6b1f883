"""Operations that are computed in one way on a CPU and in another way elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxfn._mesh_types import is_sharded
from jaxfn._primitives import LinearMap, bind_linear_map

Formulation = Callable[..., Array]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def by_platform(on_cpu: Formulation, elsewhere: Formulation, *operands: Array) -> Array:
    """Computes one of two equal functions, by the platform for which JAX lowers the program.

    Note: the derivative of `lax.platform_dependent` saves the residuals of both functions, those of the function that
    is not computed as zeros. Here it saves the operands, and computes again what else it needs.

    Args:
      on_cpu: The function on a CPU. It may reshape and concatenate in ways for which JAX infers no sharding, so it is
        not used for operands that are sharded over explicit mesh axes.
      elsewhere: The function on every other platform.
      operands: Arrays.
    """
    return lower_by_platform(on_cpu, elsewhere, *operands)


def lower_by_platform(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], *operands: Array) -> Any:
    """Computes `by_platform` with JAX's derivative, for results of any structure."""
    if any(map(is_sharded, operands)):
        return elsewhere(*operands)
    return lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)


def along_axis(f: Formulation, x: Array, axis: int, *operands: Array) -> Array:
    """Returns `f(x, axis, *operands)`, which reads along an axis. On a CPU that axis becomes the first one.

    The derivative writes along the axis then, which is faster if the elements for one index are contiguous.
    """

    def on_cpu(x: Array, *operands: Array) -> Array:
        return jnp.moveaxis(f(jnp.moveaxis(x, axis, 0), 0, *operands), 0, axis)

    def elsewhere(x: Array, *operands: Array) -> Array:
        return f(x, axis, *operands)

    return by_platform(on_cpu, elsewhere, x, *operands) if axis else f(x, 0, *operands)


@partial(by_platform.defjvp, symbolic_zeros=True)
def _by_platform_jvp(
    on_cpu: Formulation, elsewhere: Formulation, operands: Sequence[Array], tangents: Sequence[Any]
) -> tuple[Array, Array]:
    result = by_platform(on_cpu, elsewhere, *operands)
    perturbed = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    linear_map = _Derivative(on_cpu, elsewhere, perturbed, jax.typeof(result).to_tangent_aval())
    return result, bind_linear_map(linear_map, operands, [tangents[i] for i in perturbed])[0]


class _Derivative(LinearMap):
    """The derivative of `by_platform` with respect to some operands. The operands are its residuals."""

    def __init__(self, on_cpu: Formulation, elsewhere: Formulation, perturbed: Sequence[int], aval: Any) -> None:
        self._formulations = on_cpu, elsewhere
        self._perturbed = perturbed
        self.avals = [aval]

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Array]:
        def push(f: Formulation, *arrays: Array) -> Array:
            operands, tangents = arrays[: len(residuals)], arrays[len(residuals) :]
            primals = tuple(operands[i] for i in self._perturbed)
            return jax.jvp(_restrict(f, operands, self._perturbed), primals, tangents)[1]

        return [by_platform(*(partial(push, f) for f in self._formulations), *residuals, *tangents)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Array | None]:
        def pull(f: Formulation, index: int, *arrays: Array) -> Array:
            *operands, cotangent = arrays
            return jax.vjp(_restrict(f, operands, [index]), operands[index])[1](cotangent)[0]

        return [
            by_platform(*(partial(pull, f, index) for f in self._formulations), *residuals, *cotangents)
            for index in self._perturbed
        ]


def _restrict(f: Formulation, operands: Sequence[Array], indices: Sequence[int]) -> Formulation:
    """Returns `f` as a function of the operands at `indices`, with the others fixed."""

    def restricted(*values: Array) -> Array:
        changed = dict(zip(indices, values, strict=True))
        return f(*(changed.get(i, x) for i, x in enumerate(operands)))

    return restricted
