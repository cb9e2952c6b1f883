"""Row H6: a mistake in the backward of a port is found, whatever the seed of the inputs; a right port passes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxfn
from tests.support.gradcheck_mutants import BASES, MUTANTS, Base
from tests.support.gradcheck_pairs import generated
from tests.support.libraries import Jax, torch_library
from tests.support.marks import row, slow

pytest.importorskip("torch")

FIRST_ORDER = [mutant for mutant in MUTANTS if mutant.kind == "gradcheck"]
QUICK = {
    "linear: transposed",
    "tanh: wrong for large values",
    "undefined_gradients: undefined gradient forgotten",
    "two_outputs: wrong saved tensor",
}


def report_of(define, base: Base, seed: int) -> jaxfn.reports.ParitycheckReport:
    with jax.enable_x64(True):
        return jaxfn.paritycheck(
            define(Jax), base.define(torch_library()), generated(base.inputs, seed), raise_exception=False
        )


@row("H6")
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=() if str(m) in QUICK else slow, id=str(m)) for m in FIRST_ORDER]
)
def test_a_planted_mistake_is_found(mutant, seed):
    assert not report_of(mutant.define, mutant.base, seed)


@row("H6")
@pytest.mark.parametrize(
    "base", [pytest.param(b, marks=() if str(b) in ("linear", "two_outputs") else slow, id=str(b)) for b in BASES]
)
def test_a_right_port_passes(base):
    report = report_of(base.define, base, 0)
    assert report, report


@row("H6")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_backward_that_never_reads_its_gradient_is_found(seed):
    """Inputs are drawn as the command line and the pages draw them."""
    (x,) = (np.random.default_rng(seed).standard_normal((4,)).astype(np.float32),)

    @jaxfn.function
    def square(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @square.backward
    def _(ctx, grad_output):
        return 2 * ctx.saved_tensors[0] ** 2

    assert not jaxfn.paritycheck(square, lambda x: x * x, [x], second_order=False, raise_exception=False)
