"""Reports of `residuals` and `find_nan` on torch code."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        y = torch.sqrt(x)
        ctx.save_for_backward(y, scale)
        return y * scale

    @staticmethod
    def backward(ctx, grad_output):
        y, scale = ctx.saved_tensors
        quotients = [grad_output / (2 * y[:])]  # the culprit
        return quotients[0] * scale, (grad_output * y).sum()


X = jnp.array([1.0, 4.0, 0.0])


def line_of_culprit():
    lines, first = inspect.getsourcelines(Root)
    return first + next(i for i, line in enumerate(lines) if "culprit" in line)


@row("K4", "H1")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_line_of_torch_code_is_reported(around):
    f = around(jaxfn.from_torch(Root).apply)
    found = jaxfn.find_nan(jax.grad(lambda x, scale: f(x, scale).sum()), X, jnp.float32(2.0))
    assert (found.function, found.method, found.array, found.index) == ("Root", "backward", "gradient of x", (2,))
    assert f"test_inspection.py:{line_of_culprit()}: quotients" in found.line


@row("K2", "H1")
def test_residuals_of_a_converted_function_have_its_name():
    ledger = jaxfn.residuals(jaxfn.from_torch(Root).apply, X, jnp.float32(2.0))
    assert {(r.function, r.name, r.role) for r in ledger} == {
        ("Root", "saved_tensors[0]", "intermediate"),
        ("Root", "saved_tensors[1]", "input"),
    }
