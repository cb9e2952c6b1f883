"""Contract row H15: `.requires_grad` of tensors while torch traces code."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from tests.support.libraries import Jax, assert_derivatives_as_torch, assert_same, loss, torch_library  # noqa: E402
from tests.support.marks import row  # noqa: E402
from tests.support.torch_code import Net, rule  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

X = np.linspace(-1.3, 1.7, 5)


Steep = rule(torch.sin, lambda g, x: g * 100 * x**3)


def an_argument(x):
    return x.sin() if x.requires_grad else x.detach().sin()


def a_function_behind_it(x):
    return Steep.apply(x) if x.requires_grad else torch.sin(x)


def an_intermediate(x):
    y = x.cos()
    return y * 3 if y.requires_grad else y.detach() * 3


def a_node(x):
    y = x.cos()
    return y.detach() if y.grad_fn is None else y * 3


def a_written_argument(x):
    y = x * 1
    y.mul_(2)
    return y.sin() if y.requires_grad and y[:2].requires_grad else y.detach()


def what_has_no_gradient(x):
    with torch.no_grad():
        a = x * 3
    others = [a, x.detach(), x.data, x > 0, torch.ones(3), x.detach().sin()]
    return x.detach() if any(y.requires_grad for y in others) else x.sin()


def a_leaf_if_needed(x):
    if not x.requires_grad:
        x.requires_grad_()
    (gradient,) = torch.autograd.grad((x**3).sum() + x.sin().sum(), x, create_graph=True)
    return gradient * 2


def a_leaf_that_is_required(x):
    energy = (x**3).sum()
    assert x.requires_grad and energy.requires_grad and not x.detach().requires_grad
    (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
    return gradient * energy


def asked_inside_a_function_of_torch(x):
    return torch.utils.checkpoint.checkpoint(an_intermediate, x, use_reentrant=False)


def in_a_list(x):
    return sum(y if y.requires_grad else y.detach() for y in (x, x.sin(), torch.ones(5)))


CODE = [
    an_argument, a_function_behind_it, an_intermediate, a_node, a_written_argument, what_has_no_gradient,
    a_leaf_if_needed, a_leaf_that_is_required, asked_inside_a_function_of_torch, in_a_list,
]  # fmt: skip


def of_module(code: Any) -> tuple[Any, Any]:
    def run(self, x):
        assert self.w.requires_grad and (self.w * 2).requires_grad
        assert not any(y.requires_grad for y in (self.frozen, self.mean, self.frozen * self.mean))
        return code(x * 1) * self.w + self.mean

    ones = torch.ones(5, dtype=torch.float64)
    module = Net(run, w=torch.nn.Parameter(ones * 2), frozen=torch.nn.Parameter(ones, requires_grad=False))
    module.register_buffer("mean", ones)
    net = jaxfn.from_torch(module)
    return lambda x: net.apply(net.parameters, net.buffers, x)[0], module


@row("H15")
@pytest.mark.parametrize("code", CODE)
def test_derivatives_of_modules(code):
    assert_derivatives_as_torch(*of_module(code), [X])


@row("H15")
@pytest.mark.parametrize("code", CODE)
def test_gradients_of_functions_under_vmap(code):
    f = jaxfn.from_torch(code)
    rows = np.stack([X, X + 0.2])
    gradients = jax.vmap(jax.grad(lambda x: loss(Jax, [f(x)])))(rows)
    assert_same(gradients, [torch_library().gradients(code, [x])[0] for x in rows])


@row("H15")
def test_writes_to_an_argument_and_its_gradient():
    def written(x):
        x.mul_(2)
        return x.sin() if x.requires_grad else x.detach()

    def of_gradient(x):
        if not x.requires_grad:
            x.requires_grad_()
        assert x.grad_fn is None and x.grad is None
        (x**3).sum().backward()
        return x.grad * 2

    assert_derivatives_as_torch(jaxfn.from_torch(written), lambda x: written(x * 1), [X], 1)
    assert_same([jaxfn.from_torch(of_gradient)(X)], [6 * X**2])


@row("H15")
def test_an_argument_that_is_frozen_has_no_derivative():
    f = jaxfn.from_torch(lambda x: x.requires_grad_(False).sin() * (1 + x.requires_grad))
    assert_same([f(X), jax.grad(lambda x: f(x).sum())(X)], [np.sin(X), np.zeros(5)])


def asks_whether_it_is_differentiated(gradient, x, w):
    """Has a faster way if it is not."""
    product = gradient * x
    product = product if product.requires_grad else product.detach()
    gradient = gradient if gradient.requires_grad else gradient.detach()
    flags = x.requires_grad, w.requires_grad
    return gradient * w.sin() if flags[0] else None, product * w.cos() if flags[1] else None


AsksInBackward = rule(lambda x, w: x * w.sin(), asks_whether_it_is_differentiated)


@row("H15")
@pytest.mark.parametrize("is_inside", [False, True], ids=["direct", "inside"])
def test_in_backward_whatever_may_be_differentiated_again(is_inside):
    def code(x, w):
        return AsksInBackward.apply(x, w) * x

    args = X, np.linspace(0.5, 2, 5)
    if is_inside:
        assert_derivatives_as_torch(jaxfn.from_torch(code), code, args, 2)
    else:
        assert_derivatives_as_torch(jaxfn.from_torch(AsksInBackward).apply, AsksInBackward.apply, args, 3)


@row("H15")
def test_inside_a_function_it_is_needs_input_grad():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            assert (x.requires_grad, w.requires_grad) == ctx.needs_input_grad
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            assert (x.requires_grad, w.requires_grad) == ctx.needs_input_grad
            return gradient * w, gradient * x

    for f in (jaxfn.from_torch(Asks).apply, jaxfn.from_torch(lambda x, w: Asks.apply(x, w))):
        for argnums in (0, 1, (0, 1)):
            jax.jit(jax.grad(lambda x, w, f=f: f(x, w).sum(), argnums))(X, X)
