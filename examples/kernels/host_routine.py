"""A routine of SciPy on the host, with a derivative: the Faddeeva function, and the Voigt profile computed from it.

    python examples/kernels/host_routine.py

Why a Function: JAX has no such function and cannot differentiate `pure_callback`, but w'(z) = 2i / sqrt(pi) - 2 z w(z).
Saved for backward are z and w, so derivatives of any order do not call the host again: w is saved as an output, and its
derivative is the Function's own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

import jaxfn

calls: list[tuple[int, ...]] = []  # the shape of each array that went to the host


class Faddeeva(jaxfn.Function):
    """The Faddeeva function w(z) = exp(-z^2) erfc(-iz), elementwise."""

    @staticmethod
    def forward(ctx, z: jax.Array) -> jax.Array:
        # It takes arrays of any shape, so a batch is one call.
        w = jax.pure_callback(_on_host, jax.ShapeDtypeStruct(z.shape, z.dtype), z, vmap_method="expand_dims")
        w = _varying_like(w, z)
        ctx.save_for_backward(z=z, w=w)
        return w

    @staticmethod
    def backward(ctx, grad_w: jax.Array) -> jax.Array:
        z, w = ctx.saved_tensors
        # The conjugate, since gradients are torch's in a backward.
        return grad_w * jnp.conj(2j / math.sqrt(math.pi) - 2 * z * w)


def _varying_like(result: jax.Array, operand: jax.Array) -> jax.Array:
    """Casts a result of the host to vary over the mesh axes over which the operand varies.

    Inside `shard_map` JAX types the result of a callback as replicated. The gradient of such a value is the sum over
    the devices, which is too large for a value that differs between devices.
    """
    axes = jax.typeof(operand).manual_axis_type.varying
    return jax.lax.pcast(result, tuple(sorted(axes)), to="varying") if axes else result


def _on_host(z: jax.Array) -> np.ndarray:
    calls.append(z.shape)
    return scipy.special.wofz(np.asarray(z)).astype(z.dtype)


def voigt(x: jax.Array, sigma: jax.Array | float, gamma: jax.Array | float) -> jax.Array:
    """Returns the density at x of a normal variable of deviation sigma plus a Cauchy variable of scale gamma."""
    z = jax.lax.complex(*jnp.broadcast_arrays(x, gamma)) / (sigma * math.sqrt(2))
    return jnp.real(Faddeeva.apply(z)) / (sigma * math.sqrt(2 * math.pi))


class Results(NamedTuple):
    difference: float  # from SciPy's profile
    slope_difference: float  # from its finite differences
    curvature_difference: float  # from finite differences of the second derivative
    host_calls: list[tuple[int, ...]]  # the arrays that went to the host for all the second derivatives


def main(sigma: float = 0.8, gamma: float = 0.4) -> Results:
    x = np.linspace(-3, 3, 31)
    with jax.enable_x64(True):

        def density(x: jax.Array) -> jax.Array:
            return voigt(x, sigma, gamma)

        value, slope = map(np.asarray, jax.jit(jax.vmap(jax.value_and_grad(density)))(x))
        calls.clear()
        curvature = np.asarray(jax.jit(jax.vmap(jax.grad(jax.grad(density))))(x))
        host_calls = list(calls)
        assert jaxfn.gradcheck(voigt, (x[::10], sigma, gamma), argnums=0)

    def expected(x: np.ndarray) -> np.ndarray:
        return scipy.special.voigt_profile(x, sigma, gamma)

    h = 1e-3
    results = Results(
        float(np.abs(value - expected(x)).max()),
        float(np.abs(slope - (expected(x + h) - expected(x - h)) / (2 * h)).max()),
        float(np.abs(curvature - (expected(x + h) - 2 * expected(x) + expected(x - h)) / h**2).max()),
        host_calls,
    )
    assert results.difference < 1e-12
    assert results.slope_difference < 1e-5
    assert results.curvature_difference < 1e-5
    assert host_calls == [x.shape]

    print(f"the Voigt profile at {len(x)} points")
    print(f"  from SciPy: {results.difference:.0e}; slope {results.slope_difference:.0e}", end="")
    print(f", curvature {results.curvature_difference:.0e} from finite differences")
    print(f"  arrays sent to the host for {len(x)} second derivatives: {len(host_calls)}, of shape {host_calls[0]}")
    return results


if __name__ == "__main__":
    main()
