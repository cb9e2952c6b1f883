"""Quantizing recipes beside brevitas, torch's own fake quantization and torch's autograd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load

pytestmark = slow

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def quant():
    """brevitas' quantizers."""
    return pytest.importorskip("brevitas.core.quant")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_straight_through_quantization_is_brevitas(quant, bits):
    quantize = load("straight_through_quantization").Quantize.apply
    of_brevitas = quant.IntQuant(narrow_range=False, signed=True, input_view_impl=torch.nn.Identity())
    step, zero, width = torch.tensor(0.25), torch.tensor(0.0), torch.tensor(float(bits))
    assert_same_as_torch(
        lambda x: quantize(x, 0.25, bits), lambda x: of_brevitas(step, zero, width, x), [2 * normal(7, 30)]
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_learned_step_quantization_is_brevitas(quant, bits):
    quantize = load("learned_step_quantization").quantize
    of_brevitas = quant.IntQuant(narrow_range=False, signed=True, input_view_impl=torch.nn.Identity())
    zero, width = torch.tensor(0.0), torch.tensor(float(bits))
    assert_same_as_torch(
        lambda x, step: quantize(x, step, bits),
        lambda x, step: of_brevitas(step, zero, width, x),
        [normal(5, 40), np.float32(0.3)],
    )


def test_learned_step_quantization_is_the_fake_quantization_of_torch():
    quantize = load("learned_step_quantization").quantize

    def of_torch(x, step):
        return torch._fake_quantize_learnable_per_tensor_affine(x, step, torch.zeros(1), -8, 7, 1.0)

    assert_same_as_torch(
        lambda x, step: quantize(x, step[0], 4), of_torch, [normal(5, 40), np.array([0.21], np.float32)]
    )


def test_ternary_weights_are_those_of_autograd():
    ternary = load("ternary_weights").ternary

    def of_torch(weight, negative, positive):
        identity = weight - weight.detach()  # zero, with the derivative 1
        return torch.where(
            weight > 0.4,
            positive * (1 + identity),
            torch.where(weight < -0.4, negative * (identity - 1), identity),
        )

    args = normal(6, 9), np.float32(0.7), np.float32(1.3)
    assert_same_as_torch(lambda *args: ternary(*args, 0.4), of_torch, args)


def test_ternary_weights_are_brevitas_where_they_are_used(quant):
    """With one scale for both signs. brevitas has no gradient for the weights that are cut to zero."""
    ternary = load("ternary_weights").ternary
    scaling = torch.nn.Module()
    of_brevitas = quant.TernaryQuant(scaling, 0.5)

    def of_torch(weight, scale):
        scaling.forward = lambda _: scale
        return of_brevitas(weight)[0]

    def ours(weight, scale):
        used = jnp.abs(weight) > 0.4
        weight = jnp.where(used, weight, jax.lax.stop_gradient(weight))
        return ternary(weight, scale, scale, 0.4)

    assert_same_as_torch(ours, of_torch, [normal(6, 9), np.float32(0.8)])


def test_what_is_kept_as_int8_has_the_gradients_of_torch_on_rounded_activations():
    linear = load("bitwise_int8_activations").Linear.apply
    x, weight = normal(6, 20), normal(20, 3, seed=1)

    def of_torch(x, weight):
        scales = x.detach().abs().amax(1) / 127
        zeros = torch.zeros(6, dtype=torch.int32)
        rounded = torch.fake_quantize_per_channel_affine(x.detach(), scales, zeros, 0, -127, 127)
        for_x, for_weight = x @ weight.detach(), rounded @ weight
        return for_x + for_weight - for_weight.detach()  # the value is not rounded

    assert_same_as_torch(linear, of_torch, [x, weight])


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 13), (1,)])
def test_relu_of_bits_is_that_of_torch(shape):
    relu = load("bitwise_int8_activations").relu
    x = normal(*shape, seed=3)
    x.flat[-1] = abs(x.flat[-1])
    x.flat[: x.size // 3] *= -0.0  # both zeros among them
    assert_same_as_torch(relu, torch.nn.functional.relu, [x])
    batched = jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(relu(x)))))(x[None])
    np.testing.assert_allclose(batched[0], np.where(x > 0, np.cos(x), 0), rtol=1e-6)
