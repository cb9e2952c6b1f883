"""Identities that change what goes backward: beside pytorch_revgrad, and beside hooks of torch's."""

import numpy as np
import pytest

from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load

pytestmark = slow

torch = pytest.importorskip("torch")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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
