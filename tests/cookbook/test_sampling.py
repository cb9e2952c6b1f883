"""One-hot samples beside torch's, for the same noise."""

import numpy as np
import pytest

from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import slow
from tests.support.recipes import load

pytestmark = slow

torch = pytest.importorskip("torch")


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
