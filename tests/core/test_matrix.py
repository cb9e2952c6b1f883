"""Functions of `cases` through every transformation, against plain JAX with equal derivatives."""

import jax
import numpy as np
import pytest

from tests.support.cases import CASES
from tests.support.marks import row, slow
from tests.support.transformations import OF_A_BATCH, OF_ONE_ELEMENT, transform

# For each program a case that always runs, and two slow ones.
MATRIX = {
    "eager": ("cross_entropy", "quantize", "swap"),
    "jit": ("spike", "gated", "dense"),
    "grad": ("linear_no_bias", "swish", "quantize"),
    "jit of grad": ("mul_constant", "cross_entropy", "normalize"),
    "grad of jit": ("square", "linear", "gated"),
    "value_and_grad": ("dense", "exp", "rotate"),
    "carried scan": ("normalize", "swish", "linear"),
    "while": ("relu", "quantize", "dense"),
    "jit of grad of cond": ("linear", "swap", "exp"),
    "jit of grad of grad of checkpoint nothing": ("swap", "swish", "quantize"),
    "jit of grad of grad of checkpoint everything": ("swish", "exp", "relu"),
    "jit of grad of checkpoint by_name": ("gated", "dense", "mul_constant"),
    "vjp of grad": ("swish", "spike", "dense"),
    "jit of grad of jit of grad of jit": ("exp", "swap", "linear_no_bias"),
    "jit of grad of grad of grad": ("straight_through", "swish", "rotate"),
    "jit of grad of grad of grad of checkpoint": ("exp", "swish", "straight_through"),
    "jacrev": ("rotate", "quantize", "dense"),
    "eval_shape": ("gated", "quantize", "cross_entropy"),
    "export of value_and_grad": ("quantize", "exp", "linear"),
    "vmap of grad": ("dense", "relu", "quantize"),
    "grad of vmap": ("quantize", "linear", "swish"),
    "jit of vmap of grad of grad": ("swap", "exp", "normalize"),
    "jit of grad of grad of vmap": ("rotate", "swish", "linear"),
    "jit of grad of vmap of grad": ("spike", "square", "dense"),
    "jit of grad of scan": ("linear_no_bias", "swish", "quantize"),
    "jit of grad of grad of scan": ("mul_constant", "exp", "cross_entropy"),
    "sharded jit auto of value_and_grad of vmap": ("normalize", "quantize", "dense"),
    "sharded jit explicit of value_and_grad of vmap": ("linear", "swish", "gated"),
    "jit of value_and_grad of shard_map check_vma": ("quantize", "exp", "dense"),
    "jit of value_and_grad of shard_map": ("relu", "linear", "swap"),
    "jit of grad of grad of shard_map check_vma": ("exp", "swish", "linear"),
    "jit of grad of grad of shard_map": ("square", "rotate", "straight_through"),
    "jit of inside shard_map of grad of vmap": ("cross_entropy", "linear", "swish"),
}
BY_NAME = {case.name: case for case in CASES}


@row("E1", "E2", "D1", "D2", "D3")
@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param(program, name, marks=[slow] * (i > 0))
        for program, names in MATRIX.items()
        for i, name in enumerate(names)
    ],
)
def test_matrix(program, name):
    case = BY_NAME[name]
    got, expected = transform(program, case, case.apply), transform(program, case, case.reference)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.dtype(ours.dtype) == np.dtype(theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_every_case_and_every_step_are_in_the_matrix():
    steps = {step for program in MATRIX for step in program.split(" of ")}
    assert {*OF_ONE_ELEMENT, *OF_A_BATCH} - steps == {"jvp", "linearize", "jacfwd", "hessian"}  # of forward mode
    assert {quick for quick, *_ in MATRIX.values()} == set(BY_NAME)
