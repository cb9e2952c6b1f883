"""examples.ported.originals.GroupNorm, rewritten for JAX by jaxfn. The license of the original applies."""

from jax import lax

import jaxfn

EPS = 1e-6  # keeps divisions finite


class GroupNorm(jaxfn.Function):
    """Normalizes groups of channels, and applies a weight and a bias for each channel."""

    @staticmethod
    def forward(ctx, x, weight, bias, num_groups):
        batch, channels = x.shape[0], x.shape[1]
        groups = x.reshape(batch, num_groups, -1)
        mean = groups.mean(axis=-1, keepdims=True)
        var = groups.var(axis=-1, keepdims=True)
        rstd = lax.rsqrt(var + EPS)
        normalized = ((groups - mean) * rstd).reshape(x.shape)
        ctx.num_groups = num_groups
        ctx.save_for_backward(normalized, rstd, weight)
        per_channel = (1, channels) + (1,) * (x.ndim - 2)
        out = normalized * weight.reshape(per_channel)
        if bias is not None:
            out += bias.reshape(per_channel)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        normalized, rstd, weight = ctx.saved_tensors
        batch, channels = normalized.shape[0], normalized.shape[1]
        other_dims = tuple(i for i in range(normalized.ndim) if i != 1)
        grad_weight = (grad_output * normalized).sum(axis=other_dims)
        grad_bias = grad_output.sum(axis=other_dims) if ctx.needs_input_grad[2] else None
        per_channel = (1, channels) + (1,) * (normalized.ndim - 2)
        grad = (grad_output * weight.reshape(per_channel)).reshape(batch, ctx.num_groups, -1)
        y = normalized.reshape(grad.shape)
        grad = grad - grad.mean(axis=-1, keepdims=True) - y * (grad * y).mean(axis=-1, keepdims=True)
        return (grad * rstd).reshape(normalized.shape), grad_weight, grad_bias, None
