"""Rows I1 and I2 on models that learn: steps of optax next to steps of torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfn
from tests.support.marks import cells, row, slow

torch = pytest.importorskip("torch")

from tests.support.published import Model, gpt2, outputs_of, resnet, spiking  # noqa: E402
from tests.support.torch_code import Net, function_of  # noqa: E402
from tests.support.training_jobs import PAIRS  # noqa: E402


def by_torch(module: Any, inputs: Any, goal: Any, optimizer: Any, steps: int) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the module's parameters and buffers in the end."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        (output,) = outputs_of(module(torch.tensor(inputs)))
        loss = ((output - torch.tensor(goal)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.numpy() for name, x in module.state_dict().items()}


def by_jax(module: Any, inputs: Any, goal: Any, optimizer: Any, steps: int) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the parameters and buffers in the end."""
    net = jaxfn.from_torch(module)

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
    for _ in range(steps):
        value, parameters, buffers, state = step(parameters, buffers, state)
        losses.append(float(value))
    return losses, {**parameters, **buffers}


def halved_tanh() -> Any:
    """A module with a running mean, and with a Function whose gradient is half of that of its forward."""
    bend = function_of(torch.tanh, lambda x: (1 - torch.tanh(x) ** 2) / 2)
    first, norm, last = torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
    return Net(lambda net, x: net.last(bend.apply(net.norm(net.first(x)))), first=first, norm=norm, last=last)


@row("I1", "I2", "I3")
@pytest.mark.usefixtures("double_precision")
@cells("name, dtype", [("sgd", np.float64), ("adamw", np.float64)], PAIRS, [np.float32, np.float64])
def test_fifty_steps_of_each_optimizer(name: str, dtype: Any):
    torch.manual_seed(0)
    module = halved_tanh().to(torch.tensor(dtype()).dtype)
    inputs, goal = (np.random.default_rng(i).standard_normal((5, n)).astype(dtype) for i, n in enumerate((4, 3)))
    of_torch, of_optax = PAIRS[name]
    ours, ours_after = by_jax(module, inputs, goal, of_optax, 50)
    theirs, theirs_after = by_torch(module, inputs, goal, of_torch([*module.parameters()]), 50)
    assert theirs[-1] < theirs[0]
    noise = 1e-3 if dtype is np.float32 else 1e-7 if name == "adafactor" else 1e-12
    np.testing.assert_allclose(ours, theirs, rtol=noise)
    for parameter, x in theirs_after.items():
        if parameter != "norm.num_batches_tracked":
            assert ours_after[parameter].dtype == dtype
            scale = np.abs(x).max()
            np.testing.assert_allclose(ours_after[parameter] / scale, x / scale, atol=noise, err_msg=parameter)


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
    ours, ours_after = by_jax(model.module, inputs, goal, of_optax, 10)
    theirs, theirs_after = by_torch(same.module, inputs, goal, of_torch(same.module.parameters()), 10)
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for name, x in ours_after.items():
        if name in theirs_after:
            np.testing.assert_allclose(x, jnp.asarray(theirs_after[name]), rtol=1e-2, atol=2e-3, err_msg=name)
