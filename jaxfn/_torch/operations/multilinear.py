"""Functions that are linear in each operand, with a formula for the gradient of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxfn._mesh_types import match_cotangents
from jaxfn._primitives import LinearMap, bind_linear_map

_Function = Callable[..., Array]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def multilinear(function: _Function, gradients: Sequence[_Function], *operands: Array) -> Array:
    """Computes a function that is linear in each operand. JAX's transpose of it may be slower than `gradients`.

    Args:
      function: The function.
      gradients: For each operand, its gradient as a function of all operands and the cotangent of the result.
      operands: Arrays, which are saved for the derivative.
    """
    return function(*operands)


@partial(multilinear.defjvp, symbolic_zeros=True)
def _multilinear_jvp(
    function: _Function, gradients: Sequence[_Function], operands: Sequence[Array], tangents: Sequence[Any]
) -> tuple[Array, Array]:
    result = multilinear(function, gradients, *operands)
    perturbed = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    linear_map = _MultilinearMap(function, gradients, perturbed, jax.typeof(result).to_tangent_aval())
    return result, bind_linear_map(linear_map, operands, [tangents[i] for i in perturbed])[0]


class _MultilinearMap(LinearMap):
    """The derivative of `multilinear` with respect to some operands. The operands are its residuals."""

    def __init__(
        self, function: _Function, gradients: Sequence[_Function], perturbed: Sequence[int], aval: Any
    ) -> None:
        self._function = function
        self._gradients = gradients
        self._perturbed = perturbed
        self.avals = [aval]

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Array]:
        terms = (
            self._function(*residuals[:i], tangent, *residuals[i + 1 :])
            for i, tangent in zip(self._perturbed, tangents, strict=True)
        )
        return [reduce(lax.add, terms)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Array | None]:
        found = [self._gradients[i](*residuals, *cotangents) for i in self._perturbed]
        return match_cotangents(found, [jax.typeof(residuals[i]) for i in self._perturbed])
