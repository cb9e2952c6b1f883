"""Spiking neurons beside snnTorch's."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load

pytestmark = slow

torch = pytest.importorskip("torch")


def test_spiking_layers_are_those_of_snntorch_over_time():
    snntorch, surrogate = pytest.importorskip("snntorch"), pytest.importorskip("snntorch.surrogate")
    recipe = load("spiking_surrogate")
    generator = np.random.default_rng(0)
    x = generator.random((5, 12), np.float32)
    weights = [generator.standard_normal(shape).astype(np.float32) * 0.5 for shape in [(12, 9), (9, 4)]]
    seen = []

    def of_torch(first, second, x):
        layers = [snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(slope=5)) for _ in range(2)]
        potentials = [layer.init_leaky() for layer in layers]
        total = 0
        for _ in range(15):
            spikes = x
            for i, weight in enumerate((first, second)):
                spikes, potentials[i] = layers[i](spikes @ weight, potentials[i])
            total = total + spikes
        seen.append(total.detach().numpy())
        return total

    assert_same_as_torch(lambda *args: recipe.counts(list(args[:2]), args[2], steps=15), of_torch, [*weights, x])
    assert 0 < np.mean(seen) < 15


@pytest.mark.parametrize("slope", [1.0, 25.0])
def test_a_spike_is_that_of_snntorch(slope):
    surrogate = pytest.importorskip("snntorch.surrogate")
    spike = load("spiking_surrogate").Spike.apply
    potential = np.array([-3, -0.2, 0, 1e-3, 0.7, 5], np.float32)
    assert_same_as_torch(lambda x: spike(x, slope), lambda x: surrogate.FastSigmoid.apply(x, slope), [potential])
    assert spike(jnp.float32(0), slope) == 0
