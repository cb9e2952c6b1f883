"""Special functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import Array

from jaxfn._torch.operations.promotion import promote_to_inexact, to_inexact
from jaxfn._torch.operations.table import mark_unsupported, operation, register_all

register_all(
    {
        "aten.erf": jsp.erf,
        "aten.erfc": jsp.erfc,
        "aten.erfinv": jsp.erfinv,
        "aten.i0": jsp.i0,
        "aten.igamma": promote_to_inexact(jsp.gammainc),
        "aten.igammac": promote_to_inexact(jsp.gammaincc),
        "aten.special_entr": jsp.entr,
        "aten.special_i0e": jsp.i0e,
        "aten.special_i1": jsp.i1,
        "aten.special_i1e": jsp.i1e,
        "aten.special_log_ndtr": promote_to_inexact(jsp.log_ndtr),
        "aten.special_modified_bessel_i0": jsp.i0,
        "aten.special_modified_bessel_i1": jsp.i1,
        "aten.special_ndtri": promote_to_inexact(jsp.ndtri),
        "aten.xlogy": promote_to_inexact(jsp.xlogy),
        "aten.special_xlog1py": promote_to_inexact(jsp.xlog1py),
        "aten.sinc": jnp.sinc,
    }
)


mark_unsupported(
    "torch decomposes it into an operation that JAX does not have",
    "aten.special_bessel_j0",
    "aten.special_bessel_j1",
    "aten.special_erfcx",
    "aten.special_zeta",
)


@operation("aten.polygamma")
def polygamma(n: int, x: Array) -> Array:
    """Reflects arguments below 1/2, where JAX's function or its derivative is wrong."""
    x = to_inexact(x)
    sign = (-1) ** n
    is_low = x < 0.5
    is_pole = (x <= 0) & (x == jnp.floor(x))
    # Neither branch is evaluated where it is not used: its derivative could be NaN there.
    above = jnp.where(is_low, 1 - x, x)
    high = jsp.digamma(above) if n == 0 else jsp.polygamma(n, above)
    cotangent = _cotangent
    for _ in range(n):
        cotangent = _derivative(cotangent)
    reflected = sign * high - cotangent(jnp.where(is_low & ~is_pole, x, 0.25))
    # torch's digamma is infinite with the opposite sign of the zero at 0, and NaN at the other poles.
    pole = jnp.where(x == 0, jnp.copysign(np.inf, -x), np.nan) if n == 0 else -sign * np.inf
    return jnp.where(is_pole, pole, jnp.where(is_low, reflected, high))


def _cotangent(x: Array) -> Array:
    return np.pi / jnp.tan(np.pi * x)


def _derivative(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@jax.custom_jvp
def lgamma(x: Array) -> Array:
    return jsp.gammaln(x)


@lgamma.defjvp
def lgamma_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Computes JAX's own derivative, whose own derivative is wrong below 0."""
    return lgamma(*primals), tangents[0] * polygamma(0, *primals)


register_all({"aten.lgamma": lgamma, "aten.digamma": partial(polygamma, 0)})


@operation("aten.special_spherical_bessel_j0")
def spherical_bessel_j0(x: Array) -> Array:
    x = to_inexact(x)
    return jnp.where(jnp.isinf(x), 0, jnp.sinc(x / np.pi))
