"""The real torch.autograd.Function compared with jaxfn's: one source, in both, on equal NumPy numbers.

Rows B and C are compared in `tests/core/test_context.py` and `test_backward.py`, and rows A in `test_calling.py`.
Gradients are compared in torch's convention: JAX's of a complex input is the conjugate.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from tests.support.cases import Mul, StraightThrough, in_library
from tests.support.catalogue import FUNCTIONS
from tests.support.either_library import Torch, cotangent, gradients, in_each_library
from tests.support.libraries import Jax, JittedJax, assert_same, make_function, of_arrays, output_saved
from tests.support.marks import row

pytest.importorskip("torch")


@row("D1", "D9", "G1")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("library", "precision"), [(Jax, np.float64), (JittedJax, np.float32)], ids=["eager", "jit"])
@pytest.mark.usefixtures("double_precision")
def test_value_and_two_derivatives_as_torch(library, precision, name):
    define, args = FUNCTIONS[name]
    theirs, arrays = of_arrays(define(Torch), args)
    kinds = {"f": precision, "c": np.result_type(precision, 1j)}
    arrays = [np.array(a, kinds.get(a.dtype.kind, a.dtype)) for a in arrays]
    want = Torch.derivatives(theirs, arrays, 2)
    with jax.enable_x64(precision is np.float64):
        got = library.derivatives(of_arrays(define(Jax), args)[0], arrays, 2)
    for ours, theirs in zip(got, want, strict=True):
        assert [y.dtype for y in ours] == [y.dtype for y in theirs]
        assert_same(ours, theirs, rtol=1e-9 if precision is np.float64 else 5e-5)


@row("D2", "D9")
@pytest.mark.parametrize("name", ["exp", "straight_through", "cube", "affine_in_the_gradient"])
@pytest.mark.usefixtures("double_precision")
def test_third_derivatives_of_a_composition_as_torch(name):
    def composed(f):
        return lambda x: f(x) * f(f(x)) + x

    args = [np.array([0.7, -0.3])]
    theirs, ours = (composed(FUNCTIONS[name].define(library).apply) for library in (Torch, Jax))
    want = Torch.derivatives(theirs, args, 3)
    for got, expected in zip(JittedJax.derivatives(ours, args, 3), want, strict=True):
        assert_same(got, expected)


@row("D1", "D2")
@in_each_library
@pytest.mark.parametrize(
    ("define", "derivatives"),
    [
        (functools.partial(in_library, StraightThrough), [2, 2, 0]),
        (lambda lib: make_function(lib, lib.m.round, lambda g, y: g * y, output_saved), [4, 12, 28]),
    ],
    ids=["round", "saved"],
)
def test_the_derivatives_that_the_contract_names(lib, define, derivatives):
    apply = define(lib).apply
    for order, expected in enumerate(derivatives, 1):
        (got,) = gradients(lib, lambda x: (apply(x) - 1) ** 2, 2.3, order=order)
        np.testing.assert_allclose(got / cotangent(()) ** order, expected, atol=1e-12)


@row("D8")
@in_each_library
def test_mixed_partials(lib):
    """Each derivative needs the gradient of another input."""
    apply = in_library(Mul, lib).apply

    def of(x, w):
        return apply(x, w) ** 2

    if lib is Torch:
        x, w = (lib.m.tensor(v, requires_grad=True) for v in (2.0, 3.0))
        (first,) = lib.m.autograd.grad(of(x, w), x, create_graph=True)
        (mixed,) = lib.m.autograd.grad(first, w)
    else:
        mixed = lib.wrap(jax.grad(jax.grad(of), argnums=1))(2.0, 3.0)
    assert float(mixed) == 24.0
