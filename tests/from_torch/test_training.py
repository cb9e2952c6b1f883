"""Rows I1 and I2 on published models that learn: ten steps of optax beside ten of torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfn
from tests.support.marks import row
from tests.support.published import package

torch = pytest.importorskip("torch")

STEPS = 10


class Model(NamedTuple):
    """A model, and how it is trained.

    Attributes:
      module: in train mode.
      inputs: of each step.
      of_torch: makes torch's optimizer of parameters.
      of_optax: the same optimizer.
      output: takes from what the model returned what the loss is of.
    """

    module: Any
    inputs: np.ndarray
    of_torch: Callable[[Any], Any]
    of_optax: optax.GradientTransformation
    output: Callable[[Any], Any] = lambda returned: returned


def gpt2() -> Model:
    transformers = package("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout))
    tokens = np.random.default_rng(0).integers(1, 98, (4, 10)).astype(np.int32)

    def of_torch(parameters):
        return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1)

    def logits(returned):
        return returned["logits"]

    return Model(module, tokens, of_torch, optax.adamw(1e-3, weight_decay=0.1), logits)


def resnet18() -> Model:
    timm = package("timm")
    module = timm.create_model("resnet18", pretrained=False, num_classes=10)
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)

    def of_torch(parameters):
        return torch.optim.SGD(parameters, 2e-3, momentum=0.9)

    return Model(module, images, of_torch, optax.sgd(2e-3, momentum=0.9))


def spiking() -> Model:
    snntorch = package("snntorch")

    class Spiking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.lif1 = torch.nn.Linear(12, 16), snntorch.Leaky(beta=0.9)
            self.fc2, self.lif2 = torch.nn.Linear(16, 4), snntorch.Leaky(beta=0.8, learn_beta=True)

        def forward(self, x):
            m1, m2, out = self.lif1.init_leaky(), self.lif2.init_leaky(), []
            for _ in range(5):
                s1, m1 = self.lif1(self.fc1(x), m1)
                _, m2 = self.lif2(self.fc2(s1), m2)
                out.append(m2)
            return torch.stack(out)

    inputs = 2 * np.random.default_rng(0).standard_normal((6, 12)).astype(np.float32)
    return Model(Spiking(), inputs, lambda parameters: torch.optim.Adam(parameters, 1e-2), optax.adam(1e-2))


def of_torch(model: Model, inputs: np.ndarray, goal: np.ndarray) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses, and what the module has in the end."""
    optimizer = model.of_torch(model.module.parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = ((model.output(model.module(torch.tensor(inputs))) - torch.tensor(goal)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: x.numpy() for name, x in model.module.state_dict().items()}


def of_optax(model: Model, inputs: np.ndarray, goal: np.ndarray) -> tuple[list[float], dict[str, jax.Array]]:
    """The same on JAX."""
    net = jaxfn.from_torch(model.module)

    def loss(parameters, buffers):
        returned, buffers = net.apply(parameters, buffers, inputs)
        return ((model.output(returned) - goal) ** 2).mean(), buffers

    @jax.jit
    def step(parameters, buffers, state):
        (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, buffers)
        updates, state = model.of_optax.update(gradients, state, parameters)
        return value, optax.apply_updates(parameters, updates), buffers, state

    parameters, buffers = net.parameters, net.buffers
    state = model.of_optax.init(parameters)
    losses = []
    for _ in range(STEPS):
        value, parameters, buffers, state = step(parameters, buffers, state)
        losses.append(float(value))
    return losses, {**parameters, **buffers}


@row("I1", "I2", "I3")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("make", [gpt2, resnet18, spiking])
def test_ten_steps_give_the_losses_of_torch(make: Callable[[], Model]):
    def made() -> Model:
        torch.manual_seed(0)
        return make()

    model = made()
    outputs = model.output(model.module(torch.tensor(model.inputs))).shape
    goal = np.random.default_rng(1).standard_normal(tuple(outputs)).astype(np.float32)
    ours, ours_after = of_optax(made(), model.inputs, goal)
    theirs, theirs_after = of_torch(made(), model.inputs, goal)
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for name, x in ours_after.items():
        if name in theirs_after:
            np.testing.assert_allclose(x, jnp.asarray(theirs_after[name]), rtol=1e-2, atol=2e-3, err_msg=name)
