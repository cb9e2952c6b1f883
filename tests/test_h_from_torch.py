"""Rows H1-H5, H8-H10: torch Functions taken over by `from_torch`, beside the very same classes in torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn

torch = pytest.importorskip("torch")

from tests.test_against_torch import Jax, JittedJax, Torch, assert_same  # noqa: E402
from tests.torch_functions import CASES, Case  # noqa: E402


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def of_arrays(function: Any, args: tuple[Any, ...]) -> tuple[Any, list[np.ndarray]]:
    """A function of the arrays among a Function's arguments, and those."""
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda leaf: leaf is None)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]

    def call(*arrays):
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return function.apply(*jax.tree.unflatten(tree, filled))

    return call, [leaves[i] for i in places]


@pytest.mark.parametrize("library", [Jax, JittedJax])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_H1_outputs_and_derivatives_are_those_of_torch(case: Case, library: Any):
    theirs, arrays = of_arrays(case.function, case.args)
    ours, _ = of_arrays(jaxfn.from_torch(case.function), case.args)
    want = Torch.derivatives(theirs, arrays, case.order)
    for got, expected in zip(library.derivatives(ours, arrays, case.order), want, strict=True):
        assert_same(got, expected, 1e-8)
