"""Recipes that differentiate a solution and not the way to it, beside other packages that solve the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load, normal64

pytestmark = [slow, pytest.mark.usefixtures("double_precision")]


def test_sinkhorn_beside_pot():
    torch, ot = pytest.importorskip("torch"), pytest.importorskip("ot")
    recipe = load("sinkhorn")
    cost, a, b = np.abs(normal64(5, 7)), np.array([0.1, 0.3, 0.2, 0.25, 0.15]), np.full(7, 1 / 7)
    weight, epsilon = normal64(5, 7, seed=1), 0.3
    tensors = [torch.tensor(x, requires_grad=True) for x in (cost, a, b)]
    expected = ot.sinkhorn(*tensors[1:], tensors[0], epsilon, method="sinkhorn_log", stopThr=1e-15, numItermax=2000)
    (torch.tensor(weight) * expected).sum().backward()
    plan, pullback = jax.vjp(lambda *args: recipe.Transport.apply(*args, epsilon), *map(jnp.asarray, (cost, a, b)))
    np.testing.assert_allclose(plan, expected.detach().numpy(), atol=1e-12)
    grads = pullback(jnp.asarray(weight))
    np.testing.assert_allclose(grads[0], tensors[0].grad.numpy(), atol=1e-10)
    for grad, tensor in zip(grads[1:], tensors[1:], strict=True):
        # a and b have the same sum, so that what a constant adds to a gradient is of no matter.
        other = tensor.grad.numpy()
        np.testing.assert_allclose(grad - grad.mean(), other - other.mean(), atol=1e-10)


def test_sinkhorn_at_the_second_order():
    transport = load("sinkhorn").Transport.apply
    b = jnp.array([0.5, 0.3, 0.2])

    def value(cost, a):
        return transport(cost, jax.nn.softmax(a), b, 0.5)

    args = np.abs(normal64(4, 3)), normal64(4, seed=1)
    # There is no reverse mode of the while loop in forward to compare with.
    assert jaxfn.gradcheck(value, args, reference="finite_differences")
    assert jaxfn.gradgradcheck(value, args)


def test_deep_equilibrium_beside_torch_through_every_pass():
    torch = pytest.importorskip("torch")
    recipe = load("deep_equilibrium")

    def ours(inner, bias, x):
        return recipe.FixedPoint.apply(recipe.block, {"inner": inner, "bias": bias}, x, tolerance=1e-14)

    def theirs(inner, bias, x):
        z = torch.zeros_like(x)
        for _ in range(100):
            z = torch.tanh(z @ inner + x + bias)
        return z

    assert_same_as_torch(ours, theirs, (normal64(6, 6) / 8, normal64(6, seed=1), normal64(3, 6, seed=2)), rtol=1e-10)


def curves(x, parameters):
    """Zero where a circle and a sine wave meet."""
    return jnp.stack([x @ x - parameters["radius"] ** 2, x[1] - jnp.sin(parameters["wave"] * x[0])])


def test_newton_root_beside_optimistix():
    optimistix = pytest.importorskip("optimistix")
    recipe = load("newton_root")
    start = jnp.array([1.0, 0.5])
    parameters = {"radius": jnp.array(1.5), "wave": jnp.array(1.2)}

    def theirs(parameters):
        solver = optimistix.Newton(rtol=1e-12, atol=1e-12)
        return optimistix.root_find(curves, solver, start, parameters, adjoint=optimistix.ImplicitAdjoint()).value

    def ours(parameters):
        return recipe.root(curves, start, parameters)

    np.testing.assert_allclose(ours(parameters), theirs(parameters), atol=1e-12)
    expected = jax.jit(jax.jacrev(theirs))(parameters)
    for derivative in (jax.jacrev, jax.jacfwd):
        got = jax.jit(derivative(ours))(parameters)
        for name in parameters:
            np.testing.assert_allclose(got[name], expected[name], atol=1e-10)


def test_ode_adjoint_beside_torchdiffeq():
    torch, torchdiffeq = pytest.importorskip("torch"), pytest.importorskip("torchdiffeq")
    recipe = load("ode_adjoint")

    class Pendulum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.tensor([2.0, 0.1], dtype=torch.float64))

        def forward(self, t, state):
            angle, speed = state
            stiffness, damping = self.weights
            return speed, -stiffness * torch.sin(angle) - damping * speed + 0.1 * t

    field = Pendulum()
    state = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.2)]
    times = torch.tensor([0.5, 3.0], dtype=torch.float64, requires_grad=True)
    angle, speed = torchdiffeq.odeint_adjoint(field, tuple(state), times, rtol=1e-10, atol=1e-10)
    (2 * angle[-1] - 3 * speed[-1]).backward()

    args = (
        {"angle": jnp.array(1.0), "speed": jnp.array(0.2)},
        {"stiffness": jnp.array(2.0), "damping": jnp.array(0.1)},
        jnp.array(0.5),
        jnp.array(3.0),
    )
    last, pullback = jax.vjp(jax.jit(lambda *args: recipe.Solve.apply(recipe.pendulum, *args, 400)), *args)
    np.testing.assert_allclose(last["angle"], angle[-1].item(), atol=1e-7)
    grad_state, grad_weights, *grad_times = pullback({"angle": jnp.array(2.0), "speed": jnp.array(-3.0)})
    got = [*grad_state.values(), grad_weights["stiffness"], grad_weights["damping"], *grad_times]
    expected = [*(tensor.grad.item() for tensor in state), *field.weights.grad.tolist(), *times.grad.tolist()]
    np.testing.assert_allclose(got, expected, atol=1e-6)
