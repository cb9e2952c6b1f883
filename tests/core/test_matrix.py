"""Every Function of `cases` through every transformation, against plain JAX of the same derivatives."""

import jax
import numpy as np
import pytest

from tests.support.cases import CASES
from tests.support.marks import row, sampled
from tests.support.transformations import TRANSFORMATIONS


@row("E1", "E2", "D1", "D2", "D3")
@sampled
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_matrix(name, case):
    got = TRANSFORMATIONS[name](case, case.apply)
    expected = TRANSFORMATIONS[name](case, case.reference)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.dtype(ours.dtype) == np.dtype(theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
