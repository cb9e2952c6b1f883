"""The Functions with `equinox.filter_custom_vjp`."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp


@eqx.filter_custom_vjp
def relu(x):
    return jnp.where(x > 0, x, 0.0)


@relu.def_fwd
def _(perturbed, x):
    mask = x > 0
    return jnp.where(mask, x, 0.0), mask


@relu.def_bwd
def _(mask, grad_output, perturbed, x):
    return jnp.where(mask, grad_output, 0.0)


@eqx.filter_custom_vjp
def swish(x):
    return x * jax.nn.sigmoid(x)


@swish.def_fwd
def _(perturbed, x):
    s = jax.nn.sigmoid(x)
    return x * s, s


@swish.def_bwd
def _(s, grad_output, perturbed, x):
    return grad_output * (s + x * s * (1 - s))


@eqx.filter_custom_vjp
def straight_through(x):
    return jnp.round(x * 16) / 16


@straight_through.def_fwd
def _(perturbed, x):
    return jnp.round(x * 16) / 16, None


@straight_through.def_bwd
def _(residuals, grad_output, perturbed, x):
    return grad_output


@eqx.filter_custom_vjp
def _linear(arguments):
    input, weight, bias = arguments
    output = input @ weight.T
    return output if bias is None else output + bias


@_linear.def_fwd
def _(perturbed, arguments):
    return _linear.fn(arguments), None  # equinox passes the arguments to the backward


@_linear.def_bwd
def _(residuals, grad_output, perturbed, arguments):
    input, weight, bias = arguments
    grad_input = grad_output @ weight if perturbed[0] else None
    grad_weight = grad_output.T @ input if perturbed[1] else None
    grad_bias = grad_output.sum(0) if bias is not None and perturbed[2] else None
    return grad_input, grad_weight, grad_bias


def linear(input, weight, bias=None):
    return _linear((input, weight, bias))
