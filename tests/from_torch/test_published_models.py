"""Rows I1 to I3 on whole models: small ones of published packages, unchanged, next to torch in double precision.

A model whose package is not there is skipped: `tests/support/published.py` says where they are looked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")

from tests.support import published  # noqa: E402
from tests.support.published import Model, outputs_of  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of other packages
    pytest.mark.usefixtures("double_precision"),
]

TRAINED = ["bert", "gpt2", "llama", "sew_d", "resnet", "vit", "spiking"]
# Where modes differ, without dropout: batch statistics, and what is drawn while training.
EVALUATED = ["bert", "resnet", "compression"]


class Called(torch.nn.Module):
    """A module that is called with a custom function."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.model, *args)


def weight(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """The factors of an output in the loss."""
    return np.random.default_rng(number).standard_normal(shape)


def of_torch(model: Model, args: list[Any]) -> tuple[list[np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs, the gradient of every parameter, and the buffers afterwards, of a copy of the module."""
    module = copy.deepcopy(model.module)
    outputs = outputs_of(model.call(module, *args))
    loss = sum((y * torch.tensor(weight(i, y.shape))).sum() for i, y in enumerate(outputs))
    loss.backward()
    after = {k: x.detach().numpy() for k, x in (*module.named_parameters(), *module.named_buffers())}
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return [y.detach().numpy() for y in outputs], gradients, after


def assert_close(found: Mapping[Any, Any], wanted: Mapping[Any, Any], precision: float, which: str) -> None:
    """Compares to the precision of the largest number: what is left of sums that cancel is rounding."""
    scale = max((float(np.abs(x).max(initial=0)) for x in wanted.values()), default=0.0)
    for name, theirs in wanted.items():
        assert found[name].shape == theirs.shape
        np.testing.assert_allclose(
            found[name], theirs, rtol=100 * precision, atol=precision * scale, err_msg=f"{which} {name}"
        )


@row("I1", "I2", "I3")
@pytest.mark.parametrize(
    "name, mode", [*((name, "train") for name in TRAINED), *((name, "eval") for name in EVALUATED)]
)
def test_published_models(name: str, mode: str) -> None:
    """Compares one batch under `jit`, and two under `vmap`, in one program."""
    torch.manual_seed(0)
    model = getattr(published, name)()
    model.module.train(mode == "train")
    if not model.is_single:
        model.module.double()
    precision = 1e-5 if model.is_single else 1e-10
    tensors = [torch.tensor(x) for x in model.batches]
    wanted = [of_torch(model, [x[i] for x in tensors]) for i in range(2)]
    net = jaxfn.from_torch(Called(model.module, model.call))

    def loss(parameters: Any, buffers: Any, args: Any) -> Any:
        returned, moved = net.apply(parameters, buffers, *args)
        outputs = outputs_of(returned)
        return sum((y * weight(i, y.shape)).sum() for i, y in enumerate(outputs)), (outputs, moved)

    step = jax.grad(loss, has_aux=True)

    @jax.jit
    def both(parameters: Any, buffers: Any, batches: Any) -> Any:
        one = step(parameters, buffers, [x[0] for x in batches])
        return one, jax.vmap(step, (None, None, 0))(parameters, buffers, batches)

    one, two = jax.device_get(both(net.parameters, net.buffers, [jnp.asarray(x) for x in model.batches]))
    split = [jax.tree.map(lambda x, i=i: x[i], two) for i in range(2)]
    for which, (outputs, gradients, after), got in (
        ("jit", wanted[0], one),
        ("vmap 0", wanted[0], split[0]),
        ("vmap 1", wanted[1], split[1]),
    ):
        slopes, (found, moved) = got
        assert len(found) == len(outputs)
        assert_close(dict(enumerate(found)), dict(enumerate(outputs)), precision, f"{which}, output")
        slopes = {name.removeprefix("model."): x for name, x in slopes.items()}
        assert slopes.keys() == gradients.keys()
        assert_close(slopes, gradients, precision, f"{which}, gradient of")
        moved = {name.removeprefix("model."): x for name, x in moved.items()}
        assert_close(moved, {name: after[name] for name in moved}, precision, f"{which}, buffer")
    for name in net.buffers:
        if name.endswith("running_mean"):
            assert np.array_equal(one[1][1][name], net.buffers[name]) == (mode == "eval")
