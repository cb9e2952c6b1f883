"""Rows I1 and I2 on published models that learn: ten steps of optax next to ten of torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfn
from tests.support.marks import row, slow

torch = pytest.importorskip("torch")

from tests.support.published import Model, gpt2, outputs_of, resnet, spiking  # noqa: E402

STEPS = 10


def by_torch(model: Model, inputs: np.ndarray, goal: np.ndarray, optimizer: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the module's parameters and buffers in the end."""
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (output,) = outputs_of(model.module(torch.tensor(inputs)))
        loss = ((output - torch.tensor(goal)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: x.numpy() for name, x in model.module.state_dict().items()}


def by_jax(model: Model, inputs: np.ndarray, goal: np.ndarray, optimizer: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the parameters and buffers in the end."""
    net = jaxfn.from_torch(model.module)

    def loss(parameters: Any, buffers: Any) -> Any:
        returned, buffers = net.apply(parameters, buffers, inputs)
        (output,) = outputs_of(returned)
        return ((output - goal) ** 2).mean(), buffers

    @jax.jit
    def step(parameters: Any, buffers: Any, state: Any) -> Any:
        (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, buffers)
        updates, state = optimizer.update(gradients, state, parameters)
        return value, optax.apply_updates(parameters, updates), buffers, state

    parameters, buffers, state = net.parameters, net.buffers, optimizer.init(net.parameters)
    losses = []
    for _ in range(STEPS):
        value, parameters, buffers, state = step(parameters, buffers, state)
        losses.append(float(value))
    return losses, {**parameters, **buffers}


@row("I1", "I2", "I3")
@slow
@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize(
    "make, of_torch, of_optax",
    [
        (gpt2, lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.1)),
        (resnet, lambda p: torch.optim.SGD(p, 2e-4, momentum=0.9), optax.sgd(2e-4, momentum=0.9)),
        (spiking, lambda p: torch.optim.Adam(p, 1e-2), optax.adam(1e-2)),
    ],
    ids=["gpt2", "resnet", "spiking"],
)
def test_ten_steps_give_the_losses_of_torch(make: Callable[[], Model], of_torch: Any, of_optax: Any):
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    same = make()
    inputs = np.concatenate(model.batches[0])
    inputs = inputs.astype(np.float32) if inputs.dtype == np.float64 else inputs
    (output,) = outputs_of(make().module(torch.tensor(inputs)))
    goal = np.random.default_rng(1).standard_normal(tuple(output.shape)).astype(np.float32)
    ours, ours_after = by_jax(model, inputs, goal, of_optax)
    theirs, theirs_after = by_torch(same, inputs, goal, of_torch(same.module.parameters()))
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for name, x in ours_after.items():
        if name in theirs_after:
            np.testing.assert_allclose(x, jnp.asarray(theirs_after[name]), rtol=1e-2, atol=2e-3, err_msg=name)
