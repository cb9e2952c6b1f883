"""The real torch.autograd.Function compared with jaxfn's: one source, in both, on equal NumPy numbers.

Rows B and C are compared in `tests/core/test_context.py` and `test_backward.py`, and rows A in `test_calling.py`.
Gradients are compared in torch's convention: JAX's of a complex input is the conjugate.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support.catalogue import FUNCTIONS
from tests.support.either_library import Torch
from tests.support.libraries import Jax, JittedJax, assert_same, of_arrays
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
@pytest.mark.parametrize("name", ["exp", "straight_through", "rounded_and_saved", "cube", "affine_in_the_gradient"])
@pytest.mark.usefixtures("double_precision")
def test_third_derivatives_of_a_composition_as_torch(name):
    def composed(f):
        return lambda x: f(x) * f(f(x)) + x

    args = [np.array([0.7, -0.3])]
    theirs, ours = (composed(FUNCTIONS[name].define(library).apply) for library in (Torch, Jax))
    want = Torch.derivatives(theirs, args, 3)
    for got, expected in zip(JittedJax.derivatives(ours, args, 3), want, strict=True):
        assert_same(got, expected)
