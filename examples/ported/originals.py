"""torch Functions, from which `jaxfn port` wrote the other files of this folder."""

import math

import torch
from torch.nn import functional

EPS = 1e-6  # keeps divisions finite


class FocalLoss(torch.autograd.Function):
    """The focal loss of binary logits, averaged: -(1 - p)^gamma log(p), with p the probability of the target."""

    @staticmethod
    def forward(ctx, logits, targets, gamma=2.0):
        signs = 2 * targets - 1
        log_p = functional.logsigmoid(signs * logits)
        p = log_p.exp()
        ctx.save_for_backward(logits, targets)
        ctx.gamma = gamma
        return -((1 - p) ** gamma * log_p).mean()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets = ctx.saved_tensors
        signs = 2 * targets - 1
        log_p = functional.logsigmoid(signs * logits)
        p = log_p.exp()
        # d/dz of the loss, where z = signs * logits and dp/dz = p (1 - p).
        slope = (1 - p) ** ctx.gamma * (ctx.gamma * p * log_p - (1 - p))
        return grad_output * signs * slope / logits.numel(), None, None


class LearnedStepQuantizer(torch.autograd.Function):
    """Quantizes weights to a few bits, with a learned step (LSQ)."""

    @staticmethod
    def forward(ctx, weight, step, bits):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        ctx.save_for_backward(weight, step)
        ctx.bounds = low, high
        return torch.clamp(weight / step, low, high).round() * step

    @staticmethod
    def backward(ctx, grad_output):
        weight, step = ctx.saved_tensors
        low, high = ctx.bounds
        scaled = weight / step
        grad_weight = grad_step = None
        if ctx.needs_input_grad[0]:
            grad_weight = grad_output.clone()
            grad_weight[(scaled < low) | (scaled > high)] = 0
        if ctx.needs_input_grad[1]:
            # The scale of the LSQ paper, which balances the step's updates with the weights'.
            scale = 1 / math.sqrt(weight.numel() * high)
            inside = scaled.round() - scaled
            slope = torch.where(scaled < low, low, torch.where(scaled > high, high, inside))
            grad_step = (slope * grad_output).sum() * scale
        return grad_weight, grad_step, None


def _normalize(logits, dim):
    return logits - torch.logsumexp(logits, dim=dim, keepdim=True)


class Sinkhorn(torch.autograd.Function):
    """Scales exp(logits) to a doubly stochastic matrix, by alternating normalizations of its rows and columns."""

    @staticmethod
    def forward(ctx, logits, num_steps):
        steps = []
        for _ in range(num_steps):
            rows = _normalize(logits, -1)
            logits = _normalize(rows, -2)
            steps.append((rows, logits))
        ctx.save_for_backward(*[x for step in steps for x in step])
        return logits.exp()

    @staticmethod
    def backward(ctx, grad_output):
        saved = ctx.saved_tensors
        grad = grad_output * saved[-1].exp()
        for i in reversed(range(len(saved))):
            # saved[i] is a normalization over columns if i is odd, and over rows if it is even.
            dim = -2 if i % 2 else -1
            grad = grad - saved[i].exp() * grad.sum(dim, keepdim=True)
        return grad, None


class GroupNorm(torch.autograd.Function):
    """Normalizes groups of channels, and applies a weight and a bias for each channel."""

    @staticmethod
    def forward(ctx, x, weight, bias, num_groups):
        batch, channels = x.size(0), x.size(1)
        groups = x.view(batch, num_groups, -1)
        mean = groups.mean(dim=-1, keepdim=True)
        var = groups.var(dim=-1, keepdim=True, unbiased=False)
        rstd = torch.rsqrt(var + EPS)
        normalized = ((groups - mean) * rstd).view_as(x)
        ctx.num_groups = num_groups
        ctx.save_for_backward(normalized, rstd, weight)
        per_channel = (1, channels) + (1,) * (x.dim() - 2)
        out = normalized * weight.view(per_channel)
        if bias is not None:
            out += bias.view(per_channel)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        normalized, rstd, weight = ctx.saved_tensors
        batch, channels = normalized.size(0), normalized.size(1)
        other_dims = tuple(i for i in range(normalized.dim()) if i != 1)
        grad_weight = (grad_output * normalized).sum(dim=other_dims)
        grad_bias = grad_output.sum(dim=other_dims) if ctx.needs_input_grad[2] else None
        per_channel = (1, channels) + (1,) * (normalized.dim() - 2)
        grad = (grad_output * weight.view(per_channel)).view(batch, ctx.num_groups, -1)
        y = normalized.view_as(grad)
        grad = grad - grad.mean(-1, keepdim=True) - y * (grad * y).mean(-1, keepdim=True)
        return (grad * rstd).view_as(normalized), grad_weight, grad_bias, None


class StochasticRounding(torch.autograd.Function):
    """Rounds up or down at random, so that the mean is exact. The gradient is that of the identity."""

    @staticmethod
    def forward(ctx, x, levels):
        scaled = x * levels
        low = torch.floor(scaled)
        up = torch.rand_like(x) < scaled - low
        return (low + up.to(x.dtype)).div_(levels)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None
