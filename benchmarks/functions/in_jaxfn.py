"""The Functions with jaxfn."""

from __future__ import annotations

import jax.numpy as jnp

import jaxfn
from tests.support.cases import Linear, Relu, Swish


class TwiceSwish(Swish):
    """Swish with a forward mode, for `jax.hessian`."""

    generate_jvp_rule = True


class StraightThrough(jaxfn.Function):
    """A quantizer whose gradient is the identity; saves nothing."""

    @staticmethod
    def forward(ctx, x):
        return jnp.round(x * 16) / 16

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


relu = Relu.apply
swish = Swish.apply
twice_swish = TwiceSwish.apply
straight_through = StraightThrough.apply
linear = Linear.apply
