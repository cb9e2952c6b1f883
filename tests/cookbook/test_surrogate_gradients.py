"""Gradients that are not those of the value, compared with other packages and torch's autograd.

Reversed and clipped gradients, and gradients through samples, spikes, codes and roundings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load, normal

pytestmark = slow

torch = pytest.importorskip("torch")


def test_gradient_reversal_is_that_of_pytorch_revgrad():
    revgrad = pytest.importorskip("pytorch_revgrad.functional").revgrad
    reverse = load("gradient_reversal").reverse_gradient
    x, weight = normal(5, 4), normal(4, seed=1)
    assert_same_as_torch(
        lambda x, w: reverse(x * w, 0.6) @ w, lambda x, w: revgrad(x * w, torch.tensor(0.6)) @ w, [x, weight]
    )


def test_clipping_in_backward_is_a_hook_at_each_step():
    """The whole recurrent network: some gradients on the way are clipped, and some are not."""
    recipe = load("gradient_clipping")
    limit, clipped = 0.02, []

    def hook(gradient):
        norm = gradient.norm(dim=-1, keepdim=True)
        clipped.append((norm > limit).numpy())
        return torch.where(norm > limit, gradient * limit / norm, gradient)

    def of_torch(recurrent, input, output, heard):
        state, said = torch.zeros(heard.shape[1], len(input)), []
        for step, x in enumerate(heard):
            if step:
                state = state.clone()  # what goes back from the next step, without what comes from the output
                state.register_hook(hook)
            state = torch.tanh(state @ recurrent + x[:, None] * input)
            said.append(state @ output)
        return ((torch.stack(said)[1:] - heard[:-1]) ** 2).mean()

    def ours(recurrent, input, output, heard):
        return recipe.loss({"recurrent": recurrent, "input": input, "output": output}, heard, limit)

    args = normal(6, 6), normal(6, seed=1), normal(6, seed=2), normal(9, 4, seed=3)
    assert_same_as_torch(ours, of_torch, args)
    assert 0 < np.mean(clipped) < 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_a_sample_is_gumbel_softmax_of_torch(temperature):
    hard_max = load("gumbel_straight_through").HardMax.apply
    logits = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    torch.manual_seed(0)
    noise = -torch.empty(6, 5).exponential_().log().numpy()  # as torch draws it

    def of_torch(logits):
        torch.manual_seed(0)
        return torch.nn.functional.gumbel_softmax(logits, temperature, hard=True)

    assert_same_as_torch(lambda logits: hard_max(logits + noise, temperature), of_torch, [logits])


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
    features[0] = 0.01 * code[0]  # parallel to its code
    assert_same_as_torch(lambda x: rotation(x, code), lambda x: module.rotate_to(x, torch.tensor(code)), [features])


@pytest.fixture(scope="module")
def quant():
    """brevitas' quantizers."""
    return pytest.importorskip("brevitas.core.quant")


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
    """There is one scale for both signs. brevitas has no gradient for the weights that are cut to zero."""
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


def test_int8_residuals_have_the_gradients_of_torch_on_rounded_activations():
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
