"""Memory that code reads by strides (row I2)."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.marks import row  # noqa: E402
from tests.support.torch_code import Net, rule  # noqa: E402

nn, F = torch.nn, torch.nn.functional


Every2nd = rule(
    lambda w: w.as_strided((4,), (2,)).clone(),
    lambda g, w: torch.zeros_like(w).as_strided_scatter(g, (4,), (2,)),
    name="Every2nd",
)
ReadsMemoryOfSaved = rule(
    torch.sum, lambda g, w: g * w.as_strided((4,), (2,)).sum() * torch.ones_like(w), name="ReadsMemoryOfSaved"
)
READS_MEMORY = {
    "directly": (
        lambda self, x: (self.w * x).as_strided((4,), (2,)).sum(),
        r"as_strided.*'w'.*channels_last.*contiguous\(\).*in <lambda>",
    ),
    "in forward": (lambda self, x: (Every2nd.apply(self.w) * x[0]).sum(), "Every2nd.*as_strided.*'w'.*channels_last"),
    "in backward": (
        lambda self, x: (ReadsMemoryOfSaved.apply(self.w) * x[0]).sum(),
        "ReadsMemoryOfSaved.*as_strided.*'w'.*channels_last",
    ),
}


@row("I2")
@pytest.mark.parametrize("name", READS_MEMORY)
def test_memory_of_a_parameter_is_read_only_where_it_is_in_JAXs_order(name):
    """Results take the order over from their operands; that of a parameter is not known to JAX."""
    run, message = READS_MEMORY[name]
    x = np.ones(4, np.float32)
    module = Net(run, w=nn.Parameter(torch.arange(24.0).reshape(1, 2, 3, 4)))
    net = jaxfn.from_torch(module)
    expected = module(torch.tensor(x))
    expected.backward()

    def value_and_gradients(net):
        return jax.value_and_grad(lambda p: net.apply(p, {}, x)[0])(net.parameters)

    value, gradients = value_and_gradients(net)
    assert value == expected.item()
    np.testing.assert_array_equal(gradients["w"], module.w.grad)
    module.w.data = module.w.data.contiguous(memory_format=torch.channels_last)
    assert module(torch.tensor(x)) != expected or name == "in backward"
    for failing in (net, jaxfn.from_torch(module)):
        with pytest.raises(TranslationError, match=f"(?s){message}"):
            value_and_gradients(failing)
    module.w.data = module.w.data.contiguous()
    assert value_and_gradients(net)[0] == expected.item()


ReturnsTransposed = rule(lambda x: (2 * x).t(), lambda g, _: 2 * g.t(), name="ReturnsTransposed")
StoresTransposed = rule(
    torch.sum,
    lambda g, y: g * y.as_strided((3, 4), (4, 1)),
    lambda inputs, _: [inputs[0].t()],
    name="StoresTransposed",
)
# What is read, from which memory.
IN_ANOTHER_ORDER = {
    "a transposed argument": lambda x: Every2nd.apply(x.t()),
    "an argument in channels_last": lambda x: Every2nd.apply(
        x.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    ),
    "a part of a tensor": lambda x: Every2nd.apply(x[1:]),
    "what a Function returns": lambda x: ReturnsTransposed.apply(x).as_strided((4,), (2,)),
    "what depends on that": lambda x: (ReturnsTransposed.apply(x) + 1).as_strided((4,), (2,)),
    "what a Function saves": StoresTransposed.apply,
}


@row("I2")
@pytest.mark.parametrize("read", IN_ANOTHER_ORDER.values(), ids=IN_ANOTHER_ORDER)
def test_memory_in_another_order_is_not_read_across_a_Function(read):
    """Arguments and results of a Function have no preferred strides."""
    net = jaxfn.from_torch(lambda x: read(x).sum())
    with pytest.raises(TranslationError, match=r"as_strided.*tensor.*transposed, or a part.*contiguous"):
        jax.grad(net)(np.arange(12, dtype=np.float32).reshape(3, 4))


ReadsMemoryOfGradient = rule(lambda x: x + 0, lambda g, _: g.as_strided((4, 3), (3, 1)), name="ReadsMemoryOfGradient")


@row("I2")
def test_memory_is_read_that_does_not_depend_on_what_is_in_another_order():
    """The first two Functions are not applied to the weight; that order comes to the last one with its gradient."""

    def run(self, x):
        y = (ReadsMemoryOfSaved.apply(x) * self.w).sum() + Every2nd.apply(x).sum()
        return y if self.training else y + (ReadsMemoryOfGradient.apply(x) * self.w).sum()

    module = Net(run, w=nn.Parameter(torch.arange(12.0).reshape(3, 4).t()))
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensor = torch.tensor(x, requires_grad=True)
    expected = module(tensor)
    net = jaxfn.from_torch(module)
    expected.backward()
    np.testing.assert_allclose(net(x), expected.item())
    np.testing.assert_allclose(jax.grad(net)(x), tensor.grad)
    net = net.as_eval()
    with pytest.raises(TranslationError, match="depend on a gradient, whose strides may come from 'w'"):
        jax.grad(net)(x)


@row("I2")
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_tensor_in_another_order_is_named(name):
    parameters = {key: nn.Parameter(torch.arange(12.0).reshape(3, 4).t()) for key in "ab"}
    module = Net(lambda self, x: Every2nd.apply(getattr(self, name) * x).sum(), **parameters)
    with pytest.raises(
        TranslationError, match=f"Every2nd reads memory by strides .as_strided. that depend on '{name}'"
    ):
        jaxfn.from_torch(module)(np.float32(2))
