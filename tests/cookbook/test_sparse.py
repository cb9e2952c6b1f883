"""Sparse and soft choices beside entmax and SciPy."""

import jax
import numpy as np
import pytest
import scipy.optimize

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load, normal64

pytestmark = slow


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_entmax_is_that_of_the_package(double_precision, alpha):
    package = pytest.importorskip("entmax")
    ours = load("sparsemax_entmax").entmax
    theirs = {1.5: package.entmax15, 2.0: package.sparsemax}.get(
        alpha, lambda x: package.entmax_bisect(x, alpha, n_iter=60)
    )
    x = 2 * normal64(3, 4, 7)
    assert_same_as_torch(lambda x: ours(x, alpha, 60), theirs, [x], rtol=1e-9)
    assert np.any(ours(x, alpha, 60) == 0)


def test_entmax_has_an_exact_second_derivative_where_its_slopes_are_steep(double_precision):
    entmax = load("sparsemax_entmax").entmax
    assert jaxfn.gradgradcheck(lambda x: entmax(x, 1.3, 60), normal64(2, 4))


def test_soft_top_k_is_the_budget_of_entmax(double_precision):
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
    return rho - scipy.optimize.isotonic_regression(rho - np.sort(x)[::-1], increasing=False).x


def rank_of_scipy(x, strength):
    order = np.argsort(x)
    fit = scipy.optimize.isotonic_regression(-x[order] / strength - np.arange(len(x), 0, -1), increasing=False).x
    ranks = np.empty_like(x)
    ranks[order] = -x[order] / strength - fit
    return ranks


@pytest.mark.parametrize("strength", [0.05, 0.6, 2.0, 50.0])
@pytest.mark.parametrize("name, expected", [("soft_sort", sort_of_scipy), ("soft_rank", rank_of_scipy)])
def test_soft_sorting_and_ranking_are_isotonic_regressions_of_scipy(double_precision, name, expected, strength):
    soft, x = getattr(load("topk_sorting"), name), normal64(9, seed=4)
    value, jacobian, forward = jax.jit(
        lambda x: [f(soft)(x, strength) for f in (lambda f: f, jax.jacobian, jax.jacfwd)]
    )(x)
    np.testing.assert_allclose(value, expected(x, strength), atol=1e-12)
    h = 1e-6
    differences = [(expected(x + h * e, strength) - expected(x - h * e, strength)) / (2 * h) for e in np.eye(9)]
    np.testing.assert_allclose(jacobian, np.transpose(differences), atol=1e-7)
    np.testing.assert_allclose(forward, jacobian, atol=1e-12)
