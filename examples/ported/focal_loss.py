"""examples.ported.originals.FocalLoss, rewritten for JAX by jaxfn. The license of the original applies."""

import jax
import jax.numpy as jnp

import jaxfn


class FocalLoss(jaxfn.Function):
    """The focal loss of binary logits, averaged: -(1 - p)^gamma log(p), with p the probability of the target."""

    @staticmethod
    def forward(ctx, logits, targets, gamma=2.0):
        signs = 2 * targets - 1
        log_p = jax.nn.log_sigmoid(signs * logits)
        p = jnp.exp(log_p)
        ctx.save_for_backward(logits, targets)
        ctx.gamma = gamma
        return -((1 - p) ** gamma * log_p).mean()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets = ctx.saved_tensors
        signs = 2 * targets - 1
        log_p = jax.nn.log_sigmoid(signs * logits)
        p = jnp.exp(log_p)
        # d/dz of the loss, where z = signs * logits and dp/dz = p (1 - p).
        slope = (1 - p) ** ctx.gamma * (ctx.gamma * p * log_p - (1 - p))
        return grad_output * signs * slope / logits.size, None, None
