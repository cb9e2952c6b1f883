"""Recipes of linear algebra, complex numbers and curvature, beside SciPy, torch and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load, normal64

pytestmark = [slow, pytest.mark.usefixtures("double_precision")]


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
def test_projector_on_equal_eigenvalues_beside_finite_differences(values):
    projector = load("eigenvectors").projector
    matrix = symmetric_with(values)
    expected = central_differences(lambda x: numpy_projector(x, 3), matrix)
    got = jax.jit(jax.jacrev(lambda x: projector(x, 3)))(jnp.asarray(matrix))
    np.testing.assert_allclose(projector(jnp.asarray(matrix), 3), numpy_projector(matrix, 3), atol=1e-12)
    np.testing.assert_allclose(got, expected, atol=1e-6 * np.abs(expected).max())


def test_projector_beside_torch_where_eigenvalues_differ():
    torch = pytest.importorskip("torch")
    projector = load("eigenvectors").projector

    def theirs(matrix):
        inside = torch.linalg.eigh((matrix + matrix.T) / 2)[1][:, :2]
        return inside @ inside.T

    assert_same_as_torch(lambda x: projector(x, 2), theirs, [symmetric_with((-2, -1, 0.5, 1, 3))], rtol=1e-12)


def test_projector_refuses_a_second_derivative():
    projector = load("eigenvectors").projector
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.jacrev(jax.grad(lambda x: projector(x, 1)[0, 1]))(jnp.diag(jnp.array([1.0, 2.0])))


@pytest.mark.parametrize("values", [(0.5, 1, 2, 4), (2, 2, 2, 2), (1, 1, 3, 3)])
def test_matrix_square_root_beside_scipy(values):
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
    assert jaxfn.gradcheck(of_symmetric, symmetric_with(values), reference="finite_differences", check_forward_ad=True)
    assert jaxfn.gradgradcheck(of_symmetric, symmetric_with(values), reference="finite_differences")


def test_lyapunov_of_a_right_side_that_is_not_symmetric():
    solve = load("matrix_square_root").Lyapunov.apply

    def of_symmetric(root, right):
        return solve((root + root.T) / 2, right)

    assert jaxfn.gradcheck(of_symmetric, (symmetric_with((0.5, 1, 2)), normal64(3, 3)), check_forward_ad=True)


def test_lambert_w_beside_scipy():
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
        """The same backward, as it is written for torch."""

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


def test_gauss_newton_loss_beside_torchs_dense_matrices():
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
