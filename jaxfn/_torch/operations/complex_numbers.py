"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch.operations.promotion import to_inexact
from jaxfn._torch.operations.table import operation, register_all

register_all(
    {
        "aten._conj": jnp.conj,
        "aten._conj_physical": jnp.conj,
        "aten._neg_view": jnp.negative,
    }
)


@operation("aten.complex")
def complex_of(real: Array, imag: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@operation("aten.view_as_real")
def view_as_real(x: Array) -> Array:
    return jnp.stack((jnp.real(x), jnp.imag(x)), -1)


@operation("aten.view_as_complex")
def view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


@operation("aten.angle")
def angle(x: Array) -> Array:
    """Returns 0 for positive real numbers, pi for negative ones. The derivative for real numbers is 0."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    x = to_inexact(x)
    return lax.stop_gradient(jnp.where(x < 0, np.pi, jnp.where(jnp.isnan(x), x, 0)))


@operation("aten.polar")
def polar(size: Array, angle: Array) -> Array:
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


def _normalize(x: Array, lengths: Sequence[int], normalization: int) -> Array:
    """Normalizes by torch's code: 0 for no factor, 1 for the root of the number of elements, 2 for the number."""
    count = np.prod(lengths, dtype=float)
    return x if normalization == 0 else x / jnp.asarray(np.sqrt(count) if normalization == 1 else count, x.dtype)


@operation("aten._fft_c2c")
def fft_c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    lengths = [x.shape[d] for d in dim]
    for axis in dim:
        x = jnp.fft.fft(x, axis=axis) if forward else jnp.fft.ifft(x, axis=axis, norm="forward")
    return _normalize(x, lengths, normalization)


@operation("aten._fft_r2c")
def fft_r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    lengths = [x.shape[d] for d in dim]
    x = jnp.fft.rfft(x, axis=dim[-1]) if onesided else jnp.fft.fft(x, axis=dim[-1])
    return _normalize(fft_c2c(x, dim[:-1], 0, True), lengths, normalization)


@operation("aten._fft_c2r")
def fft_c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    lengths = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    x = fft_c2c(x, dim[:-1], 0, False)
    return _normalize(jnp.fft.irfft(x, last_dim_size, dim[-1], norm="forward"), lengths, normalization)
