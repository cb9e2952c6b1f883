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


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x):
        return Root.apply(self.fc(x) ** 2 + 1, self.fc.bias[0])


@row("G1b", "I1")
def test_checks_take_a_converted_module_as_a_function_of_its_arguments():
    net, x = jaxfn.from_torch(Net()), jnp.asarray([[0.2, -0.7, 1.3]])
    with jax.enable_x64(True):
        report = jaxfn.check(net, x.astype(jnp.float64), second_order=False)
    assert report.function == "Net" and report.notes == ["forward mode is not defined, so it was not checked"]
    _, first = inspect.getsourcelines(Root.backward)
    assert f"test_inspection.py:{first}" in report.reports[0].source[0]
    assert {r.function for r in jaxfn.residuals(net, x.astype(jnp.float32))} >= {"Root"}
