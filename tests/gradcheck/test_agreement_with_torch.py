"""gradcheck and gradgradcheck beside torch's, on right and wrong Functions, and on planted mistakes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.gradcheck_mutants import BASES, CHECKS, MUTANTS, Base, Mutant
from tests.support.gradcheck_pairs import PAIRS, Pair, generated, verdict
from tests.support.libraries import Define, Jax, Library, torch_library
from tests.support.marks import row, slow

# How many random inputs each right version is checked on.
SEEDS = int(os.environ.get("GRADCHECK_SEEDS", "1"))


@pytest.fixture
def torch_lib() -> Library:
    pytest.importorskip("torch")
    return torch_library()


@row("G1", "G5", "G6")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_verdict_is_torchs(pair: Pair, torch_lib: Library) -> None:
    theirs, ours = pair.verdict(torch_lib), pair.verdict(Jax)
    if pair.ours is not None:
        assert theirs != pair.ours, f"torch agrees now: no need for a reason ({pair.because})"
        assert ours == pair.ours, pair.because
    elif theirs == "refuses":
        assert ours != "passes"
    else:
        assert ours == theirs


@row("G1")
def test_catalog_is_a_good_mix(torch_lib: Library) -> None:
    assert len({pair.define for pair in PAIRS}) >= 44
    said = Counter(pair.verdict(torch_lib) for pair in PAIRS)
    assert said["passes"] >= 40
    assert said["fails"] >= 40


def _outputs_and_gradients(library: Library, define: Define, inputs: Sequence[Any]) -> list[np.ndarray]:
    outputs, gradients = library.derivatives(define(library), generated(inputs, 0), 1)
    return [*outputs, *gradients]


@row("G1")
@pytest.mark.parametrize("base", BASES, ids=str)
def test_right_versions_compute_what_torchs_do(base: Base, torch_lib: Library) -> None:
    with jax.enable_x64(True):
        ours = _outputs_and_gradients(Jax, base.define, base.inputs)
    for got, want in zip(ours, _outputs_and_gradients(torch_lib, base.define, base.inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


# One mistake of each base is quickly looked for.
QUICK = {str(mutant.base): mutant for mutant in reversed(MUTANTS)}.values()
EACH_MISTAKE = [pytest.param(m, marks=() if m in [*QUICK][::3] else slow, id=str(m)) for m in MUTANTS]
FOR_GRADGRADCHECK = [mistake for mistake in EACH_MISTAKE if mistake.values[0].kind == "gradgradcheck"]


@row("G2")
@pytest.mark.parametrize("mutant", EACH_MISTAKE)
def test_planted_mistake_is_caught(mutant: Mutant) -> None:
    caught = not CHECKS["jaxfn full"](mutant.kind, mutant.define, generated(mutant.base.inputs, 0))
    assert caught, f"{mutant.old!r} -> {mutant.new!r}"


@row("G6")
@pytest.mark.parametrize("mutant", FOR_GRADGRADCHECK)
def test_mistakes_for_gradgradcheck_have_the_right_first_derivative(mutant: Mutant) -> None:
    with jax.enable_x64(True):
        got = _outputs_and_gradients(Jax, mutant.define, mutant.base.inputs)
        want = _outputs_and_gradients(Jax, mutant.base.define, mutant.base.inputs)
    for mine, right in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-12, atol=1e-12)


@row("G2")
@slow
@pytest.mark.parametrize("base", BASES, ids=str)
def test_no_false_alarm(base: Base) -> None:
    f = base.define(Jax)
    for seed in range(SEEDS):
        for kind in ("gradcheck", "gradgradcheck"):
            assert verdict(Jax, kind, f, generated(base.inputs, seed)) == "passes", (kind, seed)
