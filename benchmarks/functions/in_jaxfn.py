"""The Functions with jaxfn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


class Relu(jaxfn.Function):
    """Saves a boolean mask."""

    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        ctx.save_for_backward(mask)
        return jnp.where(mask, x, 0.0)

    @staticmethod
    def backward(ctx, grad_output):
        (mask,) = ctx.saved_tensors
        return jnp.where(mask, grad_output, 0.0)


class Swish(jaxfn.Function):
    """Saves its input and an intermediate."""

    @staticmethod
    def forward(ctx, x):
        s = jax.nn.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, grad_output):
        x, s = ctx.saved_tensors
        return grad_output * (s + x * s * (1 - s))


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


class Linear(jaxfn.Function):
    """torch's example: an optional bias, and gradients only where they are needed."""

    @staticmethod
    def forward(ctx, input, weight, bias=None):
        ctx.save_for_backward(input, weight, bias)
        output = input @ weight.T
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = grad_output.T @ input
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


relu = Relu.apply
swish = Swish.apply
twice_swish = TwiceSwish.apply
straight_through = StraightThrough.apply
linear = Linear.apply
