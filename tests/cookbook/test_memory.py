"""Recipes that save little for the backward pass, compared with torch and JAX without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load, normal64

pytestmark = [slow, pytest.mark.usefixtures("double_precision")]


def test_reversible_blocks_match_torch():
    torch = pytest.importorskip("torch")
    recipe = load("reversible_blocks")

    def ours(*args):
        return jnp.stack(recipe.ReversibleStack.apply(recipe.layer, *args))

    def theirs(first, second, x, y):
        for v, w in zip(first, second, strict=True):
            x = x + torch.tanh(y @ v)
            y = y + torch.tanh(x @ w)
        return torch.stack([x, y])

    args = normal64(3, 4, 4), normal64(3, 4, 4, seed=1), normal64(5, 4, seed=2), normal64(5, 4, seed=3)
    assert_same_as_torch(ours, theirs, args, rtol=1e-10)


def block(weights, x, key):
    hidden = jnp.tanh(x @ weights["up"])
    return jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0) @ weights["down"], jnp.sum(hidden)


def test_activation_checkpoint_matches_jax_checkpoint():
    recipe = load("activation_checkpoint")
    weights = {"up": jnp.asarray(normal64(4, 8)), "down": jnp.asarray(normal64(8, 4, seed=1))}
    x, key = jnp.asarray(normal64(3, 4, seed=2)), jax.random.key(0)

    def loss(call, weights, x):
        output, total = call(block, weights, x, key)
        return jnp.sum(output**3) + total**2

    ours, theirs = recipe.CALLS["Checkpoint"], recipe.CALLS["jax.checkpoint"]

    def gradients(call):
        return jax.grad(lambda args: loss(call, *args))

    def second(call):
        """The derivative of the sum of all gradients."""
        return jax.grad(lambda args: sum(map(jnp.sum, jax.tree.leaves(gradients(call)(args)))))

    def per_example(call):
        return lambda args: jax.vmap(lambda x: gradients(call)((args[0], x)))(args[1][:, None])

    for derivative in (gradients, second, per_example):
        got, expected = (jax.tree.leaves(jax.jit(derivative(call))((weights, x))) for call in (ours, theirs))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_matches_torch(is_causal):
    torch = pytest.importorskip("torch")
    attention = load("memory_efficient_attention").Attention.apply
    keys = 12 if is_causal else 7

    def ours(q, k, v):
        return jax.vmap(jax.vmap(lambda q, k, v: attention(q, k, v, 4, is_causal)))(q, k, v)

    def theirs(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    args = normal64(2, 3, 12, 4), normal64(2, 3, keys, 4, seed=1), normal64(2, 3, keys, 5, seed=2)
    assert_same_as_torch(ours, theirs, args, rtol=1e-12)


def test_attention_is_differentiated_again():
    recipe = load("memory_efficient_attention")
    arrays = normal64(4, 2), normal64(4, 2, seed=1), normal64(4, 3, seed=2)

    def attention(q, k, v):
        return recipe.Attention.apply(q, k, v, 2, is_causal=True)

    assert jaxfn.gradgradcheck(attention, arrays)


def batch_of_sequences():
    return normal64(6, 2, 3), normal64(3, 3, seed=1), normal64(3, seed=2), normal64(3, seed=3)


def test_crf_matches_pytorch_crf():
    torch, torchcrf = pytest.importorskip("torch"), pytest.importorskip("torchcrf")
    recipe = load("crf")
    emissions, transitions, start, end = batch_of_sequences()
    tags = np.array([[0, 2], [1, 1], [2, 0], [0, 0], [1, 2], [2, 1]])
    model = torchcrf.CRF(3).double()
    parameters = model.transitions, model.start_transitions, model.end_transitions
    with torch.no_grad():
        for parameter, value in zip(parameters, (transitions, start, end), strict=True):
            parameter.copy_(torch.tensor(value))
    scores = torch.tensor(emissions, requires_grad=True)
    expected = model(scores, torch.tensor(tags), mask=torch.ones(tags.shape, dtype=torch.bool))
    expected.backward()

    def total(emissions, transitions, start, end):
        emissions = emissions.at[0].add(start).at[-1].add(end)  # what pytorch-crf scores first and last tags by
        return jax.vmap(recipe.log_likelihood, (1, None, 1))(emissions, transitions, jnp.asarray(tags)).sum()

    arrays = map(jnp.asarray, (emissions, transitions, start, end))
    value, grads = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arrays)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12)
    for grad, tensor in zip(grads, (scores, *parameters), strict=True):
        np.testing.assert_allclose(grad, tensor.grad.numpy(), atol=1e-12)


def test_crf_matches_autodiff_at_the_second_order():
    recipe = load("crf")
    emissions, transitions = jnp.asarray(normal64(5, 3)), jnp.asarray(normal64(3, 3, seed=1))
    got, expected = (
        jax.jit(jax.jacrev(jax.grad(f, (0, 1)), (0, 1)))(emissions, transitions)
        for f in (recipe.log_partition, recipe.by_autodiff)
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
