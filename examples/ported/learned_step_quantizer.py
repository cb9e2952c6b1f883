"""examples.ported.originals.LearnedStepQuantizer, rewritten for JAX by jaxfn. The license of the original applies."""

import math

import jax.numpy as jnp

import jaxfn


class LearnedStepQuantizer(jaxfn.Function):
    """Quantizes weights to a few bits, with a learned step (LSQ)."""

    @staticmethod
    def forward(ctx, weight, step, bits):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        ctx.save_for_backward(weight, step)
        ctx.bounds = low, high
        return jnp.round(jnp.clip(weight / step, low, high)) * step

    @staticmethod
    def backward(ctx, grad_output):
        weight, step = ctx.saved_tensors
        low, high = ctx.bounds
        scaled = weight / step
        grad_weight = grad_step = None
        if ctx.needs_input_grad[0]:
            grad_weight = grad_output
            grad_weight = jnp.where((scaled < low) | (scaled > high), 0, grad_weight)
        if ctx.needs_input_grad[1]:
            # The scale of the LSQ paper, which balances the step's updates with the weights'.
            scale = 1 / math.sqrt(weight.size * high)
            inside = jnp.round(scaled) - scaled
            slope = jnp.where(scaled < low, low, jnp.where(scaled > high, high, inside))
            grad_step = (slope * grad_output).sum() * scale
        return grad_weight, grad_step, None
