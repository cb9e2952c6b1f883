"""gradcheck and gradgradcheck next to torch's, on right and wrong Functions, and on planted mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.gradcheck_mutants import BASES, MISSED_BY_TORCH, MUTANTS, Base, Mutant
from tests.support.gradcheck_pairs import PAIRS, Pair, generated, verdict
from tests.support.libraries import Jax, Library, torch_library
from tests.support.marks import row, slow


@pytest.fixture
def torch_lib() -> Library:
    pytest.importorskip("torch")
    return torch_library()


def _marked(values: Sequence[Any], quick: set[str]) -> list[Any]:
    return [pytest.param(value, marks=() if str(value) in quick else slow, id=str(value)) for value in values]


# Where the verdicts differ, and each check with a right and a wrong Function.
QUICK_PAIRS = {str(pair) for pair in PAIRS if pair.ours != pair.torchs} | {
    "linear-gradcheck",
    "straight through round-gradcheck",
    "complex_and_real_inputs-gradcheck",
    "root_differentiated_implicitly-gradgradcheck",
    "nested_with_a_wrong_derivative-gradgradcheck",
}


@row("G1", "G5", "G6")
@pytest.mark.parametrize("pair", _marked(PAIRS, QUICK_PAIRS))
def test_verdict(pair: Pair) -> None:
    assert pair.verdict(Jax) == pair.ours


@row("G1", "G5", "G6")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_torchs_verdict(pair: Pair, torch_lib: Library) -> None:
    assert pair.verdict(torch_lib) == pair.torchs, pair.because


def _outputs_and_gradients(function: Any, base: Base) -> list[np.ndarray]:
    outputs, gradients = Jax.derivatives(function, generated(base.inputs, 0), 1)
    return [*outputs, *gradients]


@row("G2")
@pytest.mark.parametrize("kind", ["gradcheck", "gradgradcheck"])
@pytest.mark.parametrize("base", _marked(BASES, {"lookup", "complex_product"}))
def test_a_right_version_passes(base: Base, kind: Any) -> None:
    assert verdict(Jax, kind, base.define(Jax), generated(base.inputs, 0)) == "passes"


QUICK_MUTANTS = {
    "tanh: wrong for large values",
    "layer_norm: mean for sum",
    "recurrence: state cut off",
    "two_outputs: wrong saved tensor",
    "complex_product: missing conjugate of one factor",
    "undefined_gradients: undefined gradient forgotten",
}


@row("G2")
@pytest.mark.parametrize("mutant", _marked(MUTANTS, QUICK_MUTANTS))
def test_planted_mistake_is_caught(mutant: Mutant) -> None:
    said = verdict(Jax, mutant.kind, mutant.define(Jax), generated(mutant.base.inputs, 0))
    assert said == "fails", f"{mutant.old!r} -> {mutant.new!r}"


@row("G2")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_mistake_is_caught_by_torch(mutant: Mutant, torch_lib: Library) -> None:
    said = verdict(torch_lib, mutant.kind, mutant.define(torch_lib), generated(mutant.base.inputs, 0))
    assert said == ("passes" if str(mutant) in MISSED_BY_TORCH else "fails")


@row("G6")
@pytest.mark.parametrize("mutant", _marked([m for m in MUTANTS if m.kind == "gradgradcheck"], QUICK_MUTANTS))
def test_mistakes_for_gradgradcheck_have_the_right_first_derivative(mutant: Mutant) -> None:
    with jax.enable_x64(True):
        got, want = (_outputs_and_gradients(define(Jax), mutant.base) for define in (mutant.define, mutant.base.define))
    for mine, right in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-12, atol=1e-12)
