"""Helpers of gradcheck's tests: functions to check, and assertions on the results."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import GradcheckError, gradcheck


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def failure(*args, check=gradcheck, **kwargs):
    """The report of a check that has to fail."""
    with pytest.raises(GradcheckError) as caught:
        check(*args, **kwargs)
    return caught.value.report


def passes(*args, check=gradcheck, **kwargs):
    report = check(*args, **kwargs)
    assert report.passed, str(report)
    return report


def rule(forward, backward):
    """A Function of `forward(ctx, *inputs)` and `backward(ctx, *grad_outputs)`."""
    function = jaxfn.function(forward)
    function.backward(backward)
    return function


def saving(compute, choose, backward):
    """A Function of `compute`, which saves what `choose(output, *inputs)` returns; `backward(g, *saved)`."""

    def forward(ctx, *inputs):
        output = compute(*inputs)
        ctx.save_for_backward(*choose(output, *inputs))
        return output

    return rule(forward, lambda ctx, g: backward(g, *ctx.saved_tensors))


def of_inputs(compute, backward):
    """A Function that saves its inputs."""
    return saving(compute, lambda output, *inputs: inputs, backward)


def scaled_sine(factor):
    """sin, with a backward that is `factor` times what it should be."""

    @jaxfn.function
    def sine(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x)

    @sine.backward
    def _(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return factor * grad_output * jnp.cos(x)

    return sine
