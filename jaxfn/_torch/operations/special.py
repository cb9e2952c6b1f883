"""Special functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import Array

from jaxfn._torch.operations.promotion import promoted_to_inexact, to_inexact
from jaxfn._torch.operations.table import enter_all, operation

enter_all(
    {
        "aten.erf": jsp.erf,
        "aten.erfc": jsp.erfc,
        "aten.erfinv": jsp.erfinv,
        "aten.i0": jsp.i0,
        "aten.igamma": promoted_to_inexact(jsp.gammainc),
        "aten.igammac": promoted_to_inexact(jsp.gammaincc),
        "aten.special_entr": jsp.entr,
        "aten.special_i0e": jsp.i0e,
        "aten.special_i1": jsp.i1,
        "aten.special_i1e": jsp.i1e,
        "aten.special_log_ndtr": promoted_to_inexact(jsp.log_ndtr),
        "aten.special_modified_bessel_i0": jsp.i0,
        "aten.special_modified_bessel_i1": jsp.i1,
        "aten.special_ndtri": promoted_to_inexact(jsp.ndtri),
        "aten.xlogy": promoted_to_inexact(jsp.xlogy),
        "aten.special_xlog1py": promoted_to_inexact(jsp.xlog1py),
        "aten.sinc": jnp.sinc,
    }
)


@operation("aten.special_zeta")
@promoted_to_inexact
def zeta(x: Array, q: Array) -> Array:
    """Infinite at its poles; nan where JAX has no formula, for negative q."""
    is_pole = (x == 1) | ((x > 1) & (q <= 0) & (q == jnp.floor(q)))
    return jnp.where(is_pole, np.inf, jnp.where((x < 1) | (q < 0), np.nan, jsp.zeta(x, jnp.where(q <= 0, 1, q))))


@operation("aten.polygamma")
def polygamma(n: int, x: Array) -> Array:
    """By reflection at 1/2 for arguments below, where JAX's, or its derivative, is not right."""
    x = to_inexact(x)
    sign = (-1) ** n
    is_low = x < 0.5
    is_pole = (x <= 0) & (x == jnp.floor(x))
    # Neither side may be computed where it is not used: its derivative could be nan there.
    above = jnp.where(is_low, 1 - x, x)
    high = jsp.digamma(above) if n == 0 else jsp.polygamma(n, above)
    cotangent = _cotangent
    for _ in range(n):
        cotangent = _derivative(cotangent)
    reflected = sign * high - cotangent(jnp.where(is_low & ~is_pole, x, 0.25))
    # torch's digamma has the sign of the zero's other side at 0, and none at the other poles.
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
    """JAX's own is the same, but the derivative of that one is wrong below 0."""
    return lgamma(*primals), tangents[0] * polygamma(0, *primals)


enter_all({"aten.lgamma": lgamma, "aten.digamma": partial(polygamma, 0)})


# ---------------------------------------------------------------------------------------------------- error function


@jax.custom_jvp
def erfcx(x: Array) -> Array:
    """exp(x**2) erfc(x): by these where they are not too large or small, by a continued fraction above."""
    is_large = x > 4
    near = jnp.where(is_large, 0, x)
    far = jnp.where(is_large, x, 4)
    fraction = far
    for k in range(40, 0, -1):
        fraction = far + k / 2 / fraction
    return jnp.where(is_large, 1 / (fraction * math.sqrt(math.pi)), jnp.exp(near * near) * jsp.erfc(near))


@erfcx.defjvp
def erfcx_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,) = primals
    value = erfcx(x)
    return value, tangents[0] * (2 * x * value - 2 / math.sqrt(math.pi))


enter_all({"aten.special_erfcx": promoted_to_inexact(erfcx)})


# ---------------------------------------------------------------------------------------------------- Bessel functions


def bessel_j(order: int, x: Array) -> Array:
    """By Bessel's integral up to 25, and by Hankel's expansion above."""
    x = to_inexact(x)
    size = jnp.abs(x)
    is_large = size > 25
    near = _bessel_integral(order, jnp.where(is_large, 0, size))
    value = jnp.where(is_large, _hankel(order, jnp.where(is_large, size, 25))[0], near)
    return jnp.where(x < 0, -value, value) if order % 2 else value


def _bessel_integral(order: int, x: Array) -> Array:
    """The function of the first kind up to 25, with as many points as make the integral exact."""
    angles = (np.pi * (np.arange(48) + 0.5) / 48).astype(x.dtype)
    return jnp.cos(order * angles - x[..., None] * np.sin(angles)).mean(-1)


def _hankel(order: int, x: Array) -> tuple[Array, Array]:
    """The functions of the first and the second kind, of large arguments."""
    k = np.arange(1, 16)
    terms = np.cumprod(np.concatenate([[1], (4 * order**2 - (2 * k - 1) ** 2) / (8 * k)]))
    terms[2::4], terms[3::4] = -terms[2::4], -terms[3::4]
    square = 1 / (x * x)
    cosines = _polynomial(terms[0::2].tolist(), square)
    sines = _polynomial(terms[1::2].tolist(), square) / x
    phase = x - (order / 2 + 0.25) * math.pi
    size, cosine, sine = jnp.sqrt(2 / (math.pi * x)), jnp.cos(phase), jnp.sin(phase)
    return size * (cosines * cosine - sines * sine), size * (cosines * sine + sines * cosine)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


def bessel_y(order: int, x: Array) -> Array:
    """By Neumann's series up to 25, summed under Bessel's integral, and by Hankel's expansion above."""
    x = to_inexact(x)
    is_large = x > 25
    near = jnp.where(is_large | (x <= 0), 1, x)
    angles = np.pi * (np.arange(96) + 0.5) / 96
    numbers = np.arange(1, 33)
    weights = ((-1.0) ** numbers * np.cos(2 * numbers * angles[:, None]) / numbers).sum(1)
    logarithm = jnp.log(near / 2) + np.euler_gamma
    weights, sines = weights.astype(x.dtype), np.sin(angles).astype(x.dtype)
    waves = near[..., None] * sines
    if order == 0:
        close = logarithm * _bessel_integral(0, near) - (weights * jnp.cos(waves)).sum(-1) / 48
    else:
        series = (weights * sines * jnp.sin(waves)).sum(-1) / 48
        close = logarithm * _bessel_integral(1, near) - _bessel_integral(0, near) / near - series
    far = _hankel(order, jnp.where(is_large, x, 25))[1]
    value = jnp.where(is_large, far, close * (2 / np.pi))
    return jnp.where(x < 0, np.nan, jnp.where(x == 0, -np.inf, value))


def modified_bessel_k(order: int, x: Array) -> Array:
    """The scaled one, less the scale."""
    return scaled_modified_bessel_k(order, x) * jnp.exp(-to_inexact(x))


def scaled_modified_bessel_k(order: int, x: Array) -> Array:
    """By power series up to 2, and above by the trapezoidal rule for the integral of exp(x - x cosh(t)) cosh(n t)."""
    x = to_inexact(x)
    is_small = x <= 2
    near = jnp.where(is_small & (x > 0), x, 1)
    series = (_series_k0 if order == 0 else _series_k1)(near) * jnp.exp(near)
    far = jnp.where(is_small, 2, x)
    width = 0.25
    points = width * np.arange(40, dtype=x.dtype) / jnp.sqrt(far)[..., None]
    heights = jnp.exp(-2 * far[..., None] * jnp.sinh(points / 2) ** 2) * jnp.cosh(order * points)
    integral = (heights.sum(-1) - heights[..., 0] / 2) * width / jnp.sqrt(far)
    value = jnp.where(is_small, series, integral)
    return jnp.where(x < 0, np.nan, jnp.where(x == 0, np.inf, jnp.where(jnp.isinf(x), 0, value)))


def _series_k0(x: Array) -> Array:
    square, term, harmonic = x * x / 4, jnp.ones_like(x), 0.0
    logarithm = jnp.log(x / 2) + np.euler_gamma
    total = -logarithm
    for k in range(1, 16):
        term, harmonic = term * square / k**2, harmonic + 1 / k
        total = total + term * (harmonic - logarithm)
    return total


def _series_k1(x: Array) -> Array:
    square, term, harmonic = x * x / 4, x / 2, 0.0
    logarithm = jnp.log(x / 2) + np.euler_gamma
    total = 1 / x + term * (logarithm - 0.5)
    for k in range(1, 16):
        term, harmonic = term * square / (k * (k + 1)), harmonic + 1 / k
        total = total + term * (logarithm - (2 * harmonic + 1 / (k + 1)) / 2)
    return total


for _order in (0, 1):
    enter_all(
        {
            f"aten.special_bessel_j{_order}": partial(bessel_j, _order),
            f"aten.special_bessel_y{_order}": partial(bessel_y, _order),
            f"aten.special_modified_bessel_k{_order}": partial(modified_bessel_k, _order),
            f"aten.special_scaled_modified_bessel_k{_order}": partial(scaled_modified_bessel_k, _order),
        }
    )


@operation("aten.special_spherical_bessel_j0")
def spherical_bessel_j0(x: Array) -> Array:
    x = to_inexact(x)
    return jnp.where(jnp.isinf(x), 0, jnp.sinc(x / np.pi))
