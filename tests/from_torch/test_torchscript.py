"""Contract row H16: TorchScript in torch code, which jaxfn interprets, whatever its executor has compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from tests.support.libraries import assert_derivatives_as_torch, assert_same, torch_library  # noqa: E402
from tests.support.marks import row  # noqa: E402
from tests.support.torch_functions import scripted  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

nn = torch.nn
X = np.linspace(-1.3, 1.7, 12).reshape(4, 3)


@scripted
def mish(x: torch.Tensor, scale: float = 1.0):
    return x * torch.tanh(nn.functional.softplus(x)) * scale


@scripted
def repeated(x: torch.Tensor, times: int, flag: bool = False):
    for _ in range(times):
        x = mish(x, scale=1.5)
    if flag:
        x = x + x.detach().sin()
    return x


CODE = {
    "once": lambda x: mish(x),
    "nested": lambda x: repeated(x, 2),
    "keyword": lambda x: repeated(x, flag=True, times=1),
    "gradient inside": lambda x: torch.autograd.grad(mish(y := x * 1).sum(), y, create_graph=True)[0],
}


@row("H16")
@pytest.mark.parametrize("name", CODE)
def test_second_derivatives_before_and_after_torch_has_specialized_it(name):
    def code(x):
        return CODE[name](x if x.requires_grad else x.requires_grad_())

    assert_derivatives_as_torch(jaxfn.from_torch(code), code, [X])
    for _ in range(3):  # torch's executor specializes what it runs several times
        torch_library().derivatives(code, [X], 2)
    assert_derivatives_as_torch(jaxfn.from_torch(lambda x: code(x)), code, [X])
    assert_derivatives_as_torch(jaxfn.from_torch(lambda x: 1 * code(x)), code, [X], 1)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.ones(3))
        self.calls = 1
        self.seen = [1, 2]

    def forward(self, x, scale: float = 2.0):
        self.count += 1
        self.calls += 1
        self.seen.append(3)
        return self.norm(self.linear(x)) * self.count * self.calls * scale


class Outer(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner = scripted(Scripted())
        self.last = nn.Linear(3, 2)
        self.fails = fails

    def forward(self, x):
        y = self.last(self.inner(x))
        if self.fails:
            raise ValueError("after the script")
        return y


def state(module: Any) -> tuple[Any, ...]:
    tensors = {name: x.tolist() for name, x in module.state_dict().items()}
    return tensors, module.inner.calls, list(module.inner.seen), module.inner.training


@pytest.mark.filterwarnings("ignore:.*changes the attribute")
@row("H16", "I2")
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_script_module_inside_a_module(train):
    torch.manual_seed(0)
    module = Outer().double().train(train)
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X)
    before = state(module)
    for transform in (lambda f: f, jax.jit):
        loss = lambda p: net.apply(p, net.buffers, x)  # noqa: E731
        output, buffers = transform(loss)(net.parameters)
        gradients = transform(jax.grad(lambda p: (loss(p)[0] ** 2).sum()))(net.parameters)
        assert state(module) == before
    expected = module(torch.tensor(X))
    want = torch.autograd.grad((expected**2).sum(), list(module.parameters()))
    assert_same([output], [expected.detach().numpy()])
    names = [name for name, _ in module.named_parameters()]
    assert_same([gradients[name] for name in names], [g.numpy() for g in want])
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(buffers[name], buffer, rtol=1e-6)


@row("H16", "I2")
def test_a_module_of_which_a_call_fails_is_as_it_was():
    module = Outer(fails=True).double()
    before = state(module)
    net = jaxfn.from_torch(module)
    with pytest.raises(ValueError, match="after the script"):
        net.apply(net.parameters, net.buffers, X)
    assert state(module) == before
    module.fails = False
    assert torch.isfinite(module(torch.tensor(X))).all()


@pytest.mark.filterwarnings("ignore:.*changes the attribute")
@row("H16", "I1")
def test_a_script_module_alone():
    module = scripted(Scripted()).double()
    net = jaxfn.from_torch(module)
    output, buffers = net.apply(net.parameters, net.buffers, X, scale=3.0)
    assert_same([output], [module(torch.tensor(X), scale=3.0).detach().numpy()])
    np.testing.assert_array_equal(buffers["count"], module.count)


@pytest.mark.filterwarnings("ignore:.*changes the attribute")
@row("H16", "I4")
def test_what_a_script_module_holds_is_what_it_has_when_it_is_called():
    module = Outer().double().eval()
    net = jaxfn.from_torch(module)
    for calls in (3, 5):
        module.inner.calls = calls
        got = net.apply(net.parameters, net.buffers, X)[0]
        count_before = module.inner.count.clone()
        assert_same([got], [module(torch.tensor(X)).detach().numpy()])
        module.inner.count.copy_(count_before)
