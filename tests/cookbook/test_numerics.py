"""Recipes of solutions, linear algebra, curvature, and sparse and soft choices.

They are compared with SciPy, torch, other packages for these problems, and finite differences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import isotonic_regression

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load, normal64

pytestmark = [slow, pytest.mark.usefixtures("double_precision")]


def test_sinkhorn_matches_pot():
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
        # a and b have equal sums, so a constant in a gradient makes no difference.
        other = tensor.grad.numpy()
        np.testing.assert_allclose(grad - grad.mean(), other - other.mean(), atol=1e-10)


def test_sinkhorn_at_the_second_order():
    transport = load("sinkhorn").Transport.apply
    b = jnp.array([0.5, 0.3, 0.2])

    def value(cost, a):
        return transport(cost, jax.nn.softmax(a), b, 0.5)

    args = np.abs(normal64(4, 3)), normal64(4, seed=1)
    # There is no reverse mode of the while loop in forward to compare with.
    assert jaxfn.gradcheck(value, args, against="finite_differences")
    assert jaxfn.gradgradcheck(value, args)


def test_deep_equilibrium_matches_torch_through_every_pass():
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


def test_newton_root_matches_optimistix():
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


def test_ode_adjoint_matches_torchdiffeq():
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


def symmetric_with(values, seed=0):
    basis, _ = np.linalg.qr(normal64(len(values), len(values), seed=seed))
    return basis * np.asarray(values) @ basis.T


def central_differences(f, x, step=1e-5):
    """The Jacobian of an array by an array, by NumPy alone."""
    columns = []
    for index in np.ndindex(x.shape):
        change = np.zeros_like(x)
        change[index] = step
        columns.append((f(x + change) - f(x - change)) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*columns[0].shape, *x.shape)


def numpy_projector(matrix, count):
    _, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return vectors[:, :count] @ vectors[:, :count].T


@pytest.mark.parametrize("values", [(-1, -1, -1, 2, 2), (1, 1, 1, 1 + 1e-2, 3), (0, 0, 0, 0.5, 0.5)])
def test_projector_on_equal_eigenvalues_matches_finite_differences(values):
    projector = load("eigenvectors").projector
    matrix = symmetric_with(values)
    expected = central_differences(lambda x: numpy_projector(x, 3), matrix)
    got = jax.jit(jax.jacrev(lambda x: projector(x, 3)))(jnp.asarray(matrix))
    np.testing.assert_allclose(projector(jnp.asarray(matrix), 3), numpy_projector(matrix, 3), atol=1e-12)
    np.testing.assert_allclose(got, expected, atol=1e-6 * np.abs(expected).max())


def test_projector_matches_torch_where_eigenvalues_differ():
    torch = pytest.importorskip("torch")
    projector = load("eigenvectors").projector

    def theirs(matrix):
        inside = torch.linalg.eigh((matrix + matrix.T) / 2)[1][:, :2]
        return inside @ inside.T

    assert_same_as_torch(lambda x: projector(x, 2), theirs, [symmetric_with((-2, -1, 0.5, 1, 3))], rtol=1e-12)


def test_second_derivative_of_the_projector_raises():
    projector = load("eigenvectors").projector
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.jacrev(jax.grad(lambda x: projector(x, 1)[0, 1]))(jnp.diag(jnp.array([1.0, 2.0])))


@pytest.mark.parametrize("values", [(0.5, 1, 2, 4), (2, 2, 2, 2), (1, 1, 3, 3)])
def test_matrix_square_root_matches_scipy(values):
    linalg = pytest.importorskip("scipy.linalg")
    root = load("matrix_square_root").SquareRoot.apply
    matrix, cotangent = symmetric_with(values), normal64(4, 4, seed=1)
    expected = linalg.sqrtm(matrix).real
    got, pullback = jax.vjp(jax.jit(root), jnp.asarray(matrix))
    (grad,) = pullback(jnp.asarray(cotangent))
    np.testing.assert_allclose(got, expected, atol=1e-12)
    np.testing.assert_allclose(grad, linalg.solve_sylvester(expected, expected, cotangent), atol=1e-12)
    along = cotangent + cotangent.T
    differences = (linalg.sqrtm(matrix + 1e-5 * along) - linalg.sqrtm(matrix - 1e-5 * along)).real / 2e-5
    np.testing.assert_allclose(jax.jvp(root, (jnp.asarray(matrix),), (along,))[1], differences, atol=1e-8)


@pytest.mark.parametrize("values", [(0.5, 1, 2), (2, 2, 2)])
def test_matrix_square_root_at_the_second_order(values):
    root = load("matrix_square_root").SquareRoot.apply

    def of_symmetric(x):
        return root((x + x.T) / 2)

    # Autodiff of eigh is nan where eigenvalues are equal.
    assert jaxfn.gradcheck(of_symmetric, symmetric_with(values), against="finite_differences", check_forward_ad=True)
    assert jaxfn.gradgradcheck(of_symmetric, symmetric_with(values), against="finite_differences")


def test_lyapunov_of_a_right_side_that_is_not_symmetric():
    solve = load("matrix_square_root").Lyapunov.apply

    def of_symmetric(root, right):
        return solve((root + root.T) / 2, right)

    assert jaxfn.gradcheck(of_symmetric, (symmetric_with((0.5, 1, 2)), normal64(3, 3)), check_forward_ad=True)


def test_lambert_w_matches_scipy():
    special = pytest.importorskip("scipy.special")
    lambert_w = load("holomorphic").LambertW.apply
    radius, angle = np.meshgrid(np.geomspace(1e-3, 1e6, 150), np.linspace(-3.14, 3.14, 150))
    z = radius * np.exp(1j * angle)
    np.testing.assert_allclose(jax.jit(lambert_w)(z), special.lambertw(z), rtol=1e-12)
    step = 1e-5 * np.abs(z)
    by_differences = (special.lambertw(z + step) - special.lambertw(z - step)) / (2 * step)
    slope = jax.jit(jax.vmap(jax.vmap(jax.grad(lambert_w, holomorphic=True))))(z)
    smooth = np.abs(z + 1 / np.e) > 0.1  # the slope is infinite at -1/e
    np.testing.assert_allclose(slope[smooth], by_differences[smooth], rtol=1e-6)
    assert jaxfn.gradcheck(lambert_w, (z[::50, 10::50],), check_forward_ad=True)


def test_lambert_w_has_the_conjugate_of_torchs_gradient():
    torch = pytest.importorskip("torch")
    lambert_w = load("holomorphic").LambertW.apply

    class LambertW(torch.autograd.Function):
        """The recipe's backward, written for torch."""

        @staticmethod
        def forward(ctx, z):
            w = torch.from_numpy(np.array(lambert_w(jnp.asarray(z.detach().numpy()))))
            ctx.save_for_backward(w)
            return w

        @staticmethod
        def backward(ctx, grad_output):
            (w,) = ctx.saved_tensors
            return grad_output * torch.conj(torch.exp(-w) / (1 + w))

    z = np.array([0.3 + 0.2j, -0.2 + 1.5j, 4.0 - 3.0j])
    tensor = torch.tensor(z, requires_grad=True)
    (LambertW.apply(tensor) - 0.5j).abs().square().sum().backward()
    grad = jax.grad(lambda z: jnp.sum(jnp.abs(lambert_w(z) - 0.5j) ** 2))(jnp.asarray(z))
    np.testing.assert_allclose(grad, np.conj(tensor.grad.numpy()), rtol=1e-12)


def test_gauss_newton_loss_matches_torchs_dense_matrices():
    torch = pytest.importorskip("torch")
    recipe = load("gauss_newton_loss")
    t, counts = np.linspace(0, 4, 9), np.array([1.0, 1, 2, 5, 7, 3, 1, 1, 2])
    weights, direction = np.array([1.0, 2.2, 0.5]), np.array([1.0, -2.0, 0.5])

    def line(weights):
        return weights[0] * torch.exp(-(((torch.tensor(t) - weights[1]) / weights[2]) ** 2))

    def poisson(output):
        return (torch.exp(output) - torch.tensor(counts) * output).sum()

    start = torch.tensor(weights)
    J = torch.autograd.functional.jacobian(line, start)
    dense = (J.T @ torch.autograd.functional.hessian(poisson, line(start)) @ J).numpy()
    gradient = torch.autograd.functional.jacobian(lambda w: poisson(line(w)), start).numpy()

    def loss(weights):
        return recipe.poisson(recipe.Linearized.apply(recipe.line, weights, jnp.asarray(t)), jnp.asarray(counts))

    w = jnp.asarray(weights)
    np.testing.assert_allclose(jax.grad(loss)(w), gradient, rtol=1e-10)
    for hessian in (jax.hessian(loss), jax.jacrev(jax.grad(loss)), jax.jacfwd(jax.jacfwd(loss))):
        np.testing.assert_allclose(jax.jit(hessian)(w), dense, rtol=1e-10)
    vhp = jax.vjp(jax.grad(loss), w)[1](jnp.asarray(direction))[0]
    np.testing.assert_allclose(vhp, direction @ dense, rtol=1e-10)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_entmax_is_that_of_the_package(alpha):
    package = pytest.importorskip("entmax")
    ours = load("sparsemax_entmax").entmax
    theirs = {1.5: package.entmax15, 2.0: package.sparsemax}.get(
        alpha, lambda x: package.entmax_bisect(x, alpha, n_iter=60)
    )
    x = 2 * normal64(3, 4, 7)
    assert_same_as_torch(lambda x: ours(x, alpha, 60), theirs, [x], rtol=1e-9)
    assert np.any(ours(x, alpha, 60) == 0)


def test_entmax_has_an_exact_second_derivative_where_its_slopes_are_steep():
    entmax = load("sparsemax_entmax").entmax
    assert jaxfn.gradgradcheck(lambda x: entmax(x, 1.3, 60), normal64(2, 4))


def test_soft_top_k_is_the_budget_of_entmax():
    package = pytest.importorskip("entmax")
    recipe = load("topk_sorting")
    for k in (1, 3):
        assert_same_as_torch(
            jax.vmap(lambda x, k=k: recipe.soft_top_k(x, k, 0.8)),
            lambda x, k=k: package.budget_bisect(x / 0.8, k, n_iter=60),
            [normal64(5, 7, seed=k)],
            rtol=1e-9,
        )


def sort_of_scipy(x, strength):
    rho = np.arange(len(x), 0, -1) / strength
    return rho - isotonic_regression(rho - np.sort(x)[::-1], increasing=False).x


def rank_of_scipy(x, strength):
    order = np.argsort(x)
    fit = isotonic_regression(-x[order] / strength - np.arange(len(x), 0, -1), increasing=False).x
    ranks = np.empty_like(x)
    ranks[order] = -x[order] / strength - fit
    return ranks


@pytest.mark.parametrize("strength", [0.05, 0.6, 2.0, 50.0])
@pytest.mark.parametrize("name, expected", [("soft_sort", sort_of_scipy), ("soft_rank", rank_of_scipy)])
def test_soft_sorting_and_ranking_are_isotonic_regressions_of_scipy(name, expected, strength):
    soft, x = getattr(load("topk_sorting"), name), normal64(9, seed=4)
    value, jacobian, forward = jax.jit(
        lambda x: [f(soft)(x, strength) for f in (lambda f: f, jax.jacobian, jax.jacfwd)]
    )(x)
    np.testing.assert_allclose(value, expected(x, strength), atol=1e-12)
    h = 1e-6
    differences = [(expected(x + h * e, strength) - expected(x - h * e, strength)) / (2 * h) for e in np.eye(9)]
    np.testing.assert_allclose(jacobian, np.transpose(differences), atol=1e-7)
    np.testing.assert_allclose(forward, jacobian, atol=1e-12)
