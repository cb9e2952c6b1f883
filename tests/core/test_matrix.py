"""Functions of `cases` through every transformation, against plain JAX with equal derivatives."""

import jax
import numpy as np
import pytest

from tests.support.cases import CASES
from tests.support.marks import row, slow
from tests.support.transformations import TRANSFORMATIONS

# For each transformation a case that always runs, and two slow ones.
MATRIX = {
    "eager": ("cross_entropy", "quantize", "swap"),
    "jit": ("spike", "swish", "dense"),
    "grad_eager": ("linear_no_bias", "gelu", "quantize"),
    "jit_of_grad": ("mul_constant", "cross_entropy", "normalize"),
    "grad_of_jit": ("square", "linear", "swish"),
    "value_and_grad": ("dense", "exp", "rotate"),
    "carried_scan": ("normalize", "gelu", "linear"),
    "while_loop": ("relu", "quantize", "dense"),
    "cond": ("linear", "swap", "exp"),
    "checkpoint_nothing": ("swap", "gelu", "quantize"),
    "checkpoint_everything": ("gelu", "exp", "relu"),
    "checkpoint_by_name": ("swish", "dense", "mul_constant"),
    "second_order": ("gelu", "spike", "dense"),
    "second_order_of_jit": ("exp", "swap", "linear_no_bias"),
    "third_order": ("straight_through", "gelu", "rotate"),
    "third_order_of_checkpoint": ("exp", "gelu", "straight_through"),
    "jacrev": ("rotate", "quantize", "dense"),
    "eval_shape": ("swish", "quantize", "cross_entropy"),
    "export_and_reload": ("quantize", "exp", "linear"),
    "vmap_of_grad": ("dense", "relu", "quantize"),
    "grad_of_vmap": ("quantize", "linear", "gelu"),
    "vmap_of_second_order": ("swap", "exp", "normalize"),
    "second_order_of_vmap": ("rotate", "gelu", "linear"),
    "grad_of_vmap_of_grad": ("spike", "square", "dense"),
    "scan": ("linear_no_bias", "gelu", "quantize"),
    "second_order_of_scan": ("mul_constant", "exp", "cross_entropy"),
    "sharded_jit_auto": ("normalize", "quantize", "dense"),
    "sharded_jit_explicit": ("linear", "gelu", "swish"),
    "shard_map_check_vma": ("quantize", "exp", "dense"),
    "shard_map_no_check_vma": ("relu", "linear", "swap"),
    "second_order_of_shard_map_check_vma": ("exp", "gelu", "linear"),
    "second_order_of_shard_map_no_check_vma": ("square", "rotate", "straight_through"),
    "grad_inside_shard_map": ("cross_entropy", "linear", "gelu"),
}
BY_NAME = {case.name: case for case in CASES}


def agree(transformation, name):
    run, case = TRANSFORMATIONS[transformation], BY_NAME[name]
    got, expected = run(case, case.apply), run(case, case.reference)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.dtype(ours.dtype) == np.dtype(theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@row("E1", "E2", "D1", "D2", "D3")
@pytest.mark.parametrize(("transformation", "name"), [(t, quick) for t, (quick, *_) in MATRIX.items()])
def test_matrix(transformation, name):
    agree(transformation, name)


@row("E1", "E2", "D1", "D2", "D3")
@slow
@pytest.mark.parametrize(("transformation", "name"), [(t, name) for t, (_, *more) in MATRIX.items() for name in more])
def test_more_of_the_matrix(transformation, name):
    agree(transformation, name)


def test_every_case_and_every_transformation_are_in_the_matrix():
    assert set(MATRIX) == set(TRANSFORMATIONS)
    assert {quick for quick, *_ in MATRIX.values()} == set(BY_NAME)
