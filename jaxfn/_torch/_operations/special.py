"""Special functions."""

from __future__ import annotations

import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import Array

from jaxfn._torch._operations._promotion import promoted, to_inexact
from jaxfn._torch._operations._table import enter_all, operation

enter_all(
    {
        "aten.erf": jsp.erf,
        "aten.erfc": jsp.erfc,
        "aten.erfinv": jsp.erfinv,
        "aten.i0": jsp.i0,
        "aten.igamma": jsp.gammainc,
        "aten.igammac": jsp.gammaincc,
        "aten.lgamma": jsp.gammaln,
        "aten.special_entr": jsp.entr,
        "aten.special_i0e": jsp.i0e,
        "aten.special_i1": jsp.i1,
        "aten.special_i1e": jsp.i1e,
        "aten.special_log_ndtr": jsp.log_ndtr,
        "aten.special_modified_bessel_i0": jsp.i0,
        "aten.special_modified_bessel_i1": jsp.i1,
        "aten.special_ndtri": jsp.ndtri,
        "aten.special_zeta": promoted(jsp.zeta),
        "aten.xlogy": promoted(jsp.xlogy),
        "aten.special_xlog1py": promoted(jsp.xlog1py),
        "aten.sinc": jnp.sinc,
    }
)


@operation("aten.digamma")
def digamma(x: Array) -> Array:
    """At 0 it is infinite, with the sign that is opposite to that of the zero."""
    x = to_inexact(x)
    return jnp.where(x == 0, jnp.copysign(np.inf, -x), jsp.digamma(x))


@operation("aten.polygamma")
def polygamma(n: int, x: Array) -> Array:
    x = to_inexact(x)
    return digamma(x) if n == 0 else jsp.polygamma(n, x)
