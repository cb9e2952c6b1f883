"""Functions as a user writes them, with the obvious annotations: pyright and mypy accept this file in strict mode.

`test_types.py` runs it, too, and `typed_mistakes.py` has what both report.
"""

from typing import assert_type

import jax
import numpy as np

import jaxfn
from jaxfn import FunctionCtx


class Scale(jaxfn.Function):
    """A Function with a ctx."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: jax.Array, scale: float, offset: float = 0.0) -> jax.Array:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x * scale + offset

    @staticmethod
    def backward(ctx: FunctionCtx, grad_output: jax.Array) -> tuple[jax.Array, None, None]:
        (x,) = ctx.saved_tensors
        assert x.shape == grad_output.shape
        return grad_output * ctx.scale, None, None


class Named(jaxfn.Function):
    """A Function whose ctx has another name."""

    @staticmethod
    def forward(context: FunctionCtx, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, x + 1

    @staticmethod
    def backward(context: FunctionCtx, *grad_outputs: jax.Array) -> jax.Array:
        return grad_outputs[0] + grad_outputs[1]


class Square(jaxfn.Function):
    """A Function in separate style, with a forward mode and a batching rule."""

    @staticmethod
    def forward(x: jax.Array) -> jax.Array:
        return x * x

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[jax.Array], output: jax.Array) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_output: jax.Array) -> jax.Array | None:
        x: jax.Array = ctx.saved_tensors[0]
        return 2 * x * grad_output if ctx.needs_input_grad[0] else None

    @staticmethod
    def jvp(ctx: FunctionCtx, tangent: jax.Array) -> jax.Array:
        x: jax.Array = ctx.saved_tensors[0]
        return 2 * x * tangent

    @staticmethod
    def vmap(info: jaxfn.VmapInfo, in_dims: tuple[int | None], x: jax.Array) -> tuple[jax.Array, int | None]:
        return Square.apply(x), in_dims[0]


@jaxfn.function
def cube(ctx: FunctionCtx, x: jax.Array) -> jax.Array:
    """A function with rules, by a decorator."""
    ctx.save_for_backward(x=x)
    return x**3


@cube.backward
def _(ctx: FunctionCtx, grad_output: jax.Array) -> jax.Array:
    x: jax.Array = ctx.saved_variables.x
    return grad_output * (3 * x**2)


def twice_forward(x: jax.Array) -> jax.Array:
    return 2 * x


def twice_setup(ctx: FunctionCtx, inputs: tuple[jax.Array], output: jax.Array) -> None:
    ctx.factor = 2


def twice_backward(ctx: FunctionCtx, grad_output: jax.Array) -> jax.Array:
    factor: int = ctx.factor
    return grad_output * factor


twice = jaxfn.function(twice_forward, twice_backward, setup_context=twice_setup, name="twice")
again: jaxfn.function[[jax.Array], jax.Array] = jaxfn.autograd_function(twice_forward, twice_backward)
again.setup_context(twice_setup)
again.generate_jvp_rule = True


@jaxfn.function(generate_jvp_rule=True)
def negated(ctx: FunctionCtx, x: jax.Array) -> jax.Array:
    return -x


@negated.backward
def _(ctx: FunctionCtx, grad_output: jax.Array) -> jax.Array:
    return -grad_output


def backward_alone() -> jax.Array:
    """A rule without a call."""
    ctx = FunctionCtx()
    ctx.factor = 3
    return jaxfn.once_differentiable(twice_backward)(ctx, jax.numpy.ones(2))


def loss(x: jax.Array) -> jax.Array:
    """All of them."""
    scaled = Scale.apply(x, 2.0, offset=1.0)
    assert_type(scaled, jax.Array)
    first, second = Named.apply(scaled)
    assert_type(first, jax.Array)
    squared = Square.apply(second)
    assert_type(squared, jax.Array)
    cubed = cube(squared)
    assert_type(cubed, jax.Array)
    doubled = again(twice(cubed))
    assert_type(doubled, jax.Array)
    with jaxfn.save_on_host(), jaxfn.saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        flipped: jax.Array = negated(doubled)
        return (first * flipped).sum()


x = np.linspace(0.1, 0.5, 3)
report: jaxfn.reports.GradcheckReport = jaxfn.gradcheck(loss, x)
second_report: jaxfn.reports.GradcheckReport = jaxfn.gradgradcheck(loss, x)
ledger: jaxfn.reports.ResidualTable = jaxfn.residuals(loss, x)
total: int = ledger.total_bytes
found: jaxfn.reports.NanOrigin | None = jaxfn.find_nan(loss, x)
