"""Modules: what goes in and out, modes and keys, transformations, and back into torch (rows I1 to I7)."""

import dataclasses
import functools
import re
import threading
import types
import warnings
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.contexts import CONTEXTS  # noqa: E402
from tests.support.marks import cells, row  # noqa: E402
from tests.support.module_checks import (  # noqa: E402
    Quantized,
    Weighted,
    X,
    frozen,
    numbers,
    of_torch,
    seeded,
    tied,
    weights_for,
)
from tests.support.runs import noting_runs  # noqa: E402
from tests.support.torch_code import Net, rule  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@row("I1")
def test_parameters_and_buffers_by_name():
    module = seeded(lambda: nn.Sequential(tied(), nn.BatchNorm1d(3), frozen()))()
    net = jaxfn.from_torch(module)
    trained = {name for name, x in module.named_parameters() if x.requires_grad}
    assert set(net.parameters) == trained and "0.2.weight" not in trained
    assert set(net.buffers) == {name for name, _ in module.named_buffers()} | {"2.0.weight", "2.0.bias"}
    for name, array in {**net.parameters, **net.buffers}.items():
        np.testing.assert_array_equal(array, numbers(module.state_dict()[name]))
    with pytest.raises(AttributeError, match="parameters"):
        net.parameters = {}


@row("I1")
def test_what_is_missing_or_unknown_is_named():
    net = jaxfn.from_torch(nn.BatchNorm1d(3))
    parameters, buffers, x = net.parameters, net.buffers, jnp.ones((4, 3))
    with pytest.raises(TypeError, match="BatchNorm1d: missing arrays for the parameters or buffers bias. "):
        net.apply({"weight": parameters["weight"]}, buffers, x)
    with pytest.raises(TypeError, match="BatchNorm1d has no parameter or buffer 'scale'"):
        net.apply({**parameters, "scale": x}, buffers, x)
    with pytest.raises(TypeError, match=r"expected an array of shape \(3,\) for weight, got shape \(4, 3\)"):
        net.apply({**parameters, "weight": x}, buffers, x)
    for forgotten in (x, {}):
        with pytest.raises(TypeError, match=r"net\.apply\(net\.parameters, net\.buffers, \.\.\.\)"):
            net.apply(parameters, forgotten, x)
    with pytest.raises(AttributeError, match=r"no attribute 'weight'; the torch module has: net\.torch_module\.weight"):
        _ = net.weight
    with pytest.raises(TypeError, match="bias is in both the parameters and the buffers"):
        net.apply(parameters, {**buffers, "bias": parameters["bias"]}, x)


@row("I1")
def test_parameters_passed_as_buffers_are_frozen():
    module = Weighted(lambda module, x: x @ module.w if module.w.requires_grad else x)
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X.numpy())
    output, buffers = net.apply({}, {**net.parameters, **net.buffers}, x)
    np.testing.assert_array_equal(output, x)
    assert set(buffers) == {"w", "mean"}


class Fields(OrderedDict):
    """A dict that can do more, as outputs of transformers are."""


@dataclasses.dataclass
class Result:
    """Not known to JAX."""

    loss: object
    logits: object = None
    name: str = "result"


Pair = namedtuple("Pair", "a b")


class Cache:
    """Neither."""

    def __init__(self, x):
        self.keys, self.size = [x], 3


OUTPUTS = {
    "tuple": (lambda x: (x, [x + 1]), lambda x: (x, [x + 1])),
    "namedtuple": (lambda x: Pair(x, x + 1), lambda x: Pair(x, x + 1)),
    "dict": (lambda x: {"a": x}, lambda x: {"a": x}),
    "dict of another kind": (lambda x: Fields(a=x, b=None, c=(x,)), lambda x: {"a": x, "c": (x,)}),
    "dataclass": (lambda x: Result(x), lambda x: {"loss": x}),
    "in a tuple": (lambda x: (Result(x), None), lambda x: ({"loss": x}, None)),
    "object": (lambda x: (x, Cache(x)), lambda x: (x, {"keys": [x]})),
    "of torch": (lambda x: x.max(0), lambda x: (x.max(0), x.argmax(0))),
}


@row("I2", "I6")
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_have_a_structure_that_jax_knows(name):
    function, expected = OUTPUTS[name]
    x = jnp.asarray(X.numpy())
    net = jaxfn.from_torch(Weighted(lambda module, x: function(x)))
    for call in (lambda x: net.apply(net.parameters, net.buffers, x)[0], jaxfn.from_torch(function)):
        got = jax.jit(lambda x, call=call: call(x))(x)
        assert jax.tree.structure(got) == jax.tree.structure(expected(x))
        jax.tree.map(np.testing.assert_array_equal, got, expected(x))


# ------------------------------------------------------------------------------------------------------- modes and keys


@row("I4")
def test_the_mode_is_that_of_the_call():
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))()
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X.numpy())
    with pytest.raises(TranslationError, match=r"Sequential.*key=jax.random.key"):
        net(x)
    dropped = [net(x, key=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert (dropped[0] == dropped[1]).all() and (dropped[0] != dropped[2]).any()
    stored = dropped[0] != 0
    np.testing.assert_allclose(dropped[0][stored], 2 * numbers(module[0](X))[stored], rtol=1e-5)
    np.testing.assert_allclose(net.as_eval()(x), numbers(module.eval()(X)), rtol=1e-5)
    module.train()
    assert (net(x, key=jax.random.key(0)) == dropped[0]).all()
    module[1].p = 0.0
    np.testing.assert_allclose(net(x, key=jax.random.key(0)), numbers(module[0](X)), rtol=1e-5)


@row("I4")
def test_a_parameter_of_forward_that_is_called_key():
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    x = jnp.ones((2, 5, 4))
    output, _ = jaxfn.from_torch(attention)(x, key=x, value=x, jax_key=jax.random.key(0))
    assert output.shape == (2, 5, 4)


# ------------------------------------------------------------------------------------------------------ transformations


def module_of_all():
    function = Net(lambda self, x: Quantized.apply(x) * torch.tanh(x))
    return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), function, nn.Linear(5, 2)))()


@row("I2")
@cells("name", ["vmap", "scan"], ["jit", "checkpoint", "vmap", "scan", "cond"])
def test_derivatives_in_every_context(name):
    module = module_of_all()
    net = jaxfn.from_torch(module)
    buffers, x = net.buffers, jnp.asarray(X.numpy())
    _, expected, _ = of_torch(module, (X,))
    (weights,) = weights_for([torch.zeros(4, 2)])

    def loss(*arrays):
        parameters = dict(zip(net.parameters, arrays, strict=True))
        return (net.apply(parameters, buffers, x)[0] * weights).sum()

    arrays = tuple(net.parameters.values())
    slopes = jax.grad(CONTEXTS[name](loss), range(len(arrays)))(*arrays)
    for key, ours in zip(net.parameters, slopes, strict=True):
        np.testing.assert_allclose(ours, numbers(expected[key]), rtol=1e-3, atol=1e-5, err_msg=key)


@row("I2")
def test_two_batches_at_once():
    module = module_of_all().eval()
    net = jaxfn.from_torch(module)
    batches = jnp.stack([jnp.asarray(X.numpy()), 1 - jnp.asarray(X.numpy())], axis=1)
    output, _ = jax.vmap(net.apply, (None, None, 1), (1, None))(net.parameters, net.buffers, batches)
    for i, x in enumerate((X, 1 - X)):
        np.testing.assert_allclose(output[:, i], numbers(module(x)), rtol=1e-4, atol=1e-6)


@row("I3")
def test_forward_mode_of_a_module_and_of_a_function_inside():
    Tripled = rule(lambda x: x.clone(), lambda g, _: g * 2, jvp=lambda tangent, _: tangent * 3)
    net = jaxfn.from_torch(Weighted(lambda module, x: Tripled.apply(x @ module.w)))
    x, buffers, parameters = jnp.asarray(X.numpy()), net.buffers, net.parameters
    f = functools.partial(lambda p: net.apply(p, buffers, x)[0].sum())
    tangents = jax.tree.map(jnp.ones_like, parameters)
    _, pushed = jax.jvp(f, (parameters,), (tangents,))
    np.testing.assert_allclose(pushed, 3 * 3 * x.sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.grad(f)(parameters)["w"], 2 * x.sum(0)[:, None] * np.ones((3, 3)), rtol=1e-5)


@row("I1")
def test_a_converted_module_is_a_constant_of_a_jitted_function():
    net = jaxfn.from_torch(Weighted(lambda module, x: torch.tanh(x @ module.w)))
    traces = []

    @jax.jit
    def step(parameters, x):
        traces.append(None)
        return net.apply(parameters, {"mean": jnp.zeros(3)}, x)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def called(net, parameters, x):
        traces.append(None)
        return net.apply(parameters, net.buffers, x)[0]

    for _ in range(2):
        step(net.parameters, jnp.ones((4, 3)))
        called(net, net.parameters, jnp.ones((4, 3)))
    assert len(traces) == 2


@row("I2")
def test_threads_trace_one_module():
    x = jnp.asarray(X.numpy())
    expected, net = jaxfn.from_torch(module_of_all())(x), jaxfn.from_torch(module_of_all())
    together = threading.Barrier(4)

    def call(length):
        together.wait()
        return net(jnp.concatenate([x] * length))[:4]

    with ThreadPoolExecutor(4) as threads:
        for output in threads.map(call, (1, 1, 2, 3)):  # the statistics of a batch are those of its copies
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ back into torch


@row("I7")
def test_weights_go_back_into_torch():
    module = module_of_all()
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X.numpy())
    parameters = jax.tree.map(lambda p: p * 0.5 + 1, net.parameters)
    _, buffers = net.apply(parameters, net.buffers, x)
    net.load(parameters, buffers)
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose({**parameters, **buffers}[name], numbers(tensor), rtol=1e-6)
    np.testing.assert_allclose(net.as_eval()(x), numbers(module.eval()(X)), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="has no parameter or buffer 'nothing'"):
        net.load({"nothing": x})


@row("I2", "I3")
def test_the_code_runs_once_for_its_shapes():
    """Eagerly, under jit and in every derivative, in whatever order the parameters' dict is."""
    note, runs = noting_runs()

    Counted = rule(lambda x: note("forward") or x.round(), lambda g, _: note("backward") or g)

    def forward(module, x):
        note("module")
        return Counted.apply(x @ module.w) * module.z

    module = Weighted(forward)
    module.z = nn.Parameter(torch.ones(3))
    module.a = nn.Parameter(torch.ones(3))
    net = jaxfn.from_torch(module)
    parameters, buffers = net.parameters, net.buffers

    def loss(parameters, x):
        return net.apply(parameters, buffers, x)[0].sum()

    x = jnp.asarray(X.numpy())
    net(x)
    loss(parameters, x)
    jax.grad(loss)(parameters, x)
    jax.jit(jax.grad(loss, (0, 1)))(dict(reversed(parameters.items())), x)
    jax.vmap(jax.grad(loss), (None, 0))(parameters, x[None])
    assert runs == ["module", "forward", "backward"]
    net(jnp.ones((5, 3)))
    assert runs.count("module") == 2


def is_fine(x):
    """A check, as libraries have them: it only warns or raises."""
    if x.isnan().any():
        warnings.warn("NaN", stacklevel=2)
    assert (x < 100).all()


class Asking(nn.Module):
    """Reads values in three lines: of a function, a method and forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def scaled(self, x):
        return x * 2 if x.sum() > 0 else -x

    def forward(self, x):
        is_fine(x)
        return self.scaled(Quantized.apply(self.linear(x))) * self.factor(x)

    def factor(self, x):
        return 3


class AskingMore(Asking):
    def factor(self, x):
        return int(x.abs().max())


@row("I7")
def test_every_line_that_reads_a_value_is_reported_at_once():
    net = jaxfn.from_torch(nn.Sequential(AskingMore(), AskingMore()))
    with pytest.raises(TranslationError) as caught:
        net(jnp.ones((4, 3)))
    explanation = jaxfn.explain(net, jnp.ones((4, 3)))
    lines = [(location.line.text, location.line.callable) for location in explanation.values_needed]
    here = f"{__name__}."
    assert lines == [
        ("if x.isnan().any():", f"{here}is_fine"),
        ("assert (x < 100).all()", f"{here}is_fine"),
        ("return x * 2 if x.sum() > 0 else -x", f"{here}Asking.scaled"),
        ("return int(x.abs().max())", f"{here}AskingMore.factor"),
    ]
    assert not explanation.is_supported
    for text, name in lines:
        assert text in str(caught.value) and f"ops={{{name}: jax_function}}" in str(caught.value)
        assert text in str(explanation)


@row("I7")
def test_functions_and_methods_that_ask_for_values_are_replaced():
    """A check is dropped by a function that returns nothing."""
    module = Asking()
    ops = {
        is_fine: lambda x: None,
        Asking.scaled: lambda self, x: jnp.where(x.sum() > 0, x * 2, -x),
    }
    net = jaxfn.from_torch(module, ops=ops)
    gradients = jax.grad(lambda p: net.apply(p, {}, jnp.asarray(X.numpy()))[0].sum())(net.parameters)
    module(X).sum().backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-5)


@row("I7")
def test_explain_lists_the_functions_in_it():
    Twice = rule(lambda x: Quantized.apply(x) * 2, lambda g, _: g * 2, jvp=lambda tangent, _: tangent * 2, name="Twice")

    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

    net = jaxfn.from_torch(Weighted(lambda module, x: Fixed.apply(Twice.apply(Quantized.apply(x @ module.w)))))
    found = {f.name: (f.times, f.rules) for f in jaxfn.explain(net, jnp.ones((4, 3))).parts[0].functions}
    assert jaxfn.explain(net, jnp.ones((4, 3))).is_supported
    assert "aten.mm.default" in jaxfn.explain(net, jnp.ones((4, 3))).parts[0].operations
    assert found == {"Fixed": (1, ()), "Twice": (1, ("backward", "jvp")), "Quantized": (2, ("backward",))}


def unsupported_inside(module, x):
    return torch.special.airy_ai(x @ module.w)


@row("I7")
def test_an_operation_without_a_translation_names_the_function_around_it():
    net = jaxfn.from_torch(Weighted(unsupported_inside))
    (entry,) = jaxfn.explain(net, jnp.ones((4, 3))).parts[0].unsupported
    assert entry.callable == f"{__name__}.unsupported_inside"
    with pytest.raises(TranslationError, match=re.escape(f"in {__name__}.unsupported_inside")):
        net(jnp.ones((4, 3)))


def make_potential():
    """A buffer that is empty until the module has seen an argument."""

    def forward(self, x):
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.potential = self.decay * self.potential + x
        return self.potential

    module = Net(forward, decay=nn.Parameter(torch.tensor(0.7)))
    module.register_buffer("potential", torch.zeros(0))
    return module


@row("I2", "I7")
def test_a_buffer_that_gets_its_shape_by_the_first_call():
    theirs, net = make_potential(), jaxfn.from_torch(make_potential())
    buffers = net.buffers
    for i in range(3):
        output, buffers = jax.jit(net.apply)(net.parameters, buffers, (i + 1) * jnp.asarray(X.numpy()))
        np.testing.assert_allclose(output, numbers(theirs((i + 1) * X)), rtol=1e-6)
    net.load({}, buffers)
    np.testing.assert_allclose(numbers(net.torch_module.potential), numbers(theirs.potential), rtol=1e-6)
    np.testing.assert_allclose(net(jnp.asarray(X.numpy())), numbers(theirs(X)), rtol=1e-6)
    with pytest.raises(TypeError, match="expected an array of shape"):
        net.apply(net.parameters, {"potential": jnp.ones((5, 3))}, jnp.asarray(X.numpy()))


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        self.last = x.shape
        return x * self.factor if self.training else -x


class Unregistered(nn.Module):
    """Has modules that torch does not register, and itself, in containers and a plain object."""

    def __init__(self):
        super().__init__()
        self.listed, self.table = [Scale(2.0), self], {"a": (Scale(3.0),)}
        self.plain = types.SimpleNamespace(inner=nn.Sequential(Scale(5.0)))

    def forward(self, x):
        return self.listed[0](x) + 10 * self.table["a"][0](x) + 100 * self.plain.inner(x)


@row("I2", "I4")
def test_attributes_of_modules_that_are_not_registered_are_read_and_restored():
    module = Unregistered()
    net = jaxfn.from_torch(module)
    changes = {
        "nothing": lambda: None,
        "in a list": lambda: setattr(module.listed[0], "factor", 7.0),
        "mode": lambda: module.table["a"][0].eval(),
        "in an object": lambda: setattr(module.plain.inner[0], "factor", 0.5),
        "a part": lambda: module.plain.inner.append(Scale(0.25)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changes the attribute last of listed")
        for name, change in changes.items():
            change()
            got = net.apply(net.parameters, net.buffers, jnp.ones(2))[0]
            assert not hasattr(module.listed[0], "last") and not hasattr(module.plain.inner[0], "last"), name
            np.testing.assert_array_equal(got, module(torch.ones(2)), name)
            del module.listed[0].last, module.plain.inner[0].last


@row("I4")
def test_numbers_in_attributes_are_distinguished_by_type_and_sign():
    module = Scale(1)
    net = jaxfn.from_torch(module)
    integers = torch.arange(3)
    for factor in (1, 1.0, True, 0.0, -0.0):
        module.factor = factor
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*changes the attribute last")
            got = net(jnp.arange(3))
        wanted = module(integers)
        assert jnp.issubdtype(got.dtype, jnp.floating) == wanted.is_floating_point()
        np.testing.assert_array_equal(jnp.signbit(got.astype(float)), torch.signbit(wanted.float()))
