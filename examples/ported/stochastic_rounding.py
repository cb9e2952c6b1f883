"""examples.ported.originals.StochasticRounding, rewritten for JAX by jaxfn. The license of the original applies."""

import itertools

import jax
import jax.numpy as jnp

import jaxfn


class StochasticRounding(jaxfn.Function):
    """Rounds up or down at random, so that the mean is exact. The gradient is that of the identity."""

    @staticmethod
    def forward(ctx, x, levels, *, key=None):
        keys = (jax.random.fold_in(key, i) for i in itertools.count())
        scaled = x * levels
        low = jnp.floor(scaled)
        up = jax.random.uniform(next(keys), x.shape, x.dtype) < scaled - low
        return (low + up.astype(x.dtype)) / levels

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None, None
