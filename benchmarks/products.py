"""The operation count of the matrix products and convolutions of a jaxpr, in loops as often as they run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params


def flops_of_products(function: Callable[..., Any], *args: Any) -> int:
    """Counts multiplications and additions in the jaxpr of a function.

    XLA's own estimate counts the body of a loop once, however often it runs, so it cannot distinguish work that was
    moved out of a loop from additional work. Loops whose length is not known are counted once here too.
    """
    return _of(jax.make_jaxpr(function)(*args).jaxpr)


def _of(jaxpr: Any) -> int:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        return 2 * _products_of_convolution(equation)
    times = params["length"] if name == "scan" else 1
    return times * sum(_of(inner) for inner in jaxprs_in_params(params))


def _products_of_convolution(equation: Any) -> int:
    """Counts the products of a convolution, as if it had no padding or dilation."""
    kernel, axes = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec
    return equation.outvars[0].aval.size * math.prod(kernel[axis] for axis in axes[1:])
