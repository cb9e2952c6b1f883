"""Vector quantization and the rotation trick beside vector-quantize-pytorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load

pytestmark = slow

torch = pytest.importorskip("torch")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["StraightThrough", "Rotation"])
def test_a_layer_is_that_of_vector_quantize_pytorch(name):
    package = pytest.importorskip("vector_quantize_pytorch")
    recipe = load("vector_quantization")
    torch.manual_seed(0)
    layer = package.VectorQuantize(dim=6, codebook_size=11, rotation_trick=name == "Rotation")
    codebook = jnp.asarray(layer.codebook.detach().numpy().copy())  # the layer changes it

    def ours(x):
        return getattr(recipe, name).apply(x, jax.lax.stop_gradient(recipe.nearest(x, codebook)))

    assert_same_as_torch(ours, lambda x: layer(x[None])[0][0], [normal(20, 6)])


def test_the_rotation_is_that_of_vector_quantize_pytorch_for_codes_of_any_direction():
    module = pytest.importorskip("vector_quantize_pytorch.vector_quantize_pytorch")
    rotation = load("vector_quantization").Rotation.apply
    features, code = normal(9, 5), normal(9, 5, seed=1)
    features[0] = 0.01 * code[0]  # in the same direction
    assert_same_as_torch(lambda x: rotation(x, code), lambda x: module.rotate_to(x, torch.tensor(code)), [features])
