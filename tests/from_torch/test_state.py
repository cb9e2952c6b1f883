"""Rows I2 and I4: a module's state apart from parameters and buffers: its mode, attributes, and plain objects."""

from __future__ import annotations

import dataclasses
import re
import types
import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.support.torch_code import Net, function_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_objects")

X = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)


def called(module: Any, x: Any = X) -> Any:
    with torch.no_grad():
        return module(torch.tensor(x)).numpy()


# --- Train and eval mode.


def dropping() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))


@row("I4")
def test_eval_and_train_return_the_model_in_that_mode():
    module = dropping()
    net = jaxfn.from_torch(module)
    assert net.as_eval() is net.as_eval() is net.as_train().as_eval() and net.as_train() is not net.as_eval()
    np.testing.assert_allclose(net.as_eval()(X), called(module.eval()), rtol=1e-5)
    for in_train in (net.as_train(), net.as_eval().as_train()):
        _, buffers = in_train.apply(net.parameters, net.buffers, X, key=jax.random.key(0))
        assert buffers["2.num_batches_tracked"] == 1
        with pytest.raises(jaxfn.TranslationError, match="random numbers"):
            in_train(X)
    assert not module.training and not module[1].training


NAMES_OF_TORCH = {
    "train": "net.as_train() and net.as_eval()",
    "eval": "net.as_train() and net.as_eval()",
    "state_dict": "the dicts net.parameters and net.buffers",
    "params": "the dicts net.parameters and net.buffers",
    "load_state_dict": "net.load(",
    "forward": "net.apply(",
    "cuda": "jax.device_put",
    "zero_grad": "jax.grad",
}


@row("I4")
@pytest.mark.parametrize("name", NAMES_OF_TORCH)
def test_methods_of_torch_modules_say_what_replaces_them(name):
    net = jaxfn.from_torch(nn.Linear(2, 3))
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. Use {re.escape(NAMES_OF_TORCH[name])}"):
        getattr(net, name)()
    assert not hasattr(net, name)
    with pytest.raises(AttributeError, match="has no attribute 'paramters'$"):
        net.paramters  # noqa: B018


@row("I1")
def test_a_call_uses_the_parameters_of_its_time_or_raises():
    """They are never constants of a program that JAX keeps."""
    net = jaxfn.from_torch(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()))
    x = jax.numpy.asarray(X)
    calls = [
        net,
        jax.grad(lambda x: net(x).sum()),
        jax.vmap(net),
        jax.hessian(lambda x: net(x).sum()),
        jax.vmap(jax.grad(lambda x: net(x).sum())),
        lambda x: jax.jvp(net, (x,), (x,))[1],
    ]
    for factor in (1, 3):
        parameters = {name: factor * array for name, array in net.parameters.items()}
        net.load(parameters)

        def pure(x, parameters=parameters):
            return net.apply(parameters, {}, x)[0]

        expected = [
            pure(x),
            jax.grad(lambda x: pure(x).sum())(x),
            pure(x),
            jax.hessian(lambda x: pure(x).sum())(x),
            jax.grad(lambda x: pure(x).sum())(x),
            jax.jvp(pure, (x,), (x,))[1],
        ]
        for call, result in zip(calls, expected, strict=True):
            np.testing.assert_allclose(call(x), result, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(net.apply)(net.parameters, net.buffers, x)[0], pure(x), rtol=1e-6)


STAGED = {
    "jit": lambda net: jax.jit(net),
    "jit without arguments": lambda net: lambda x: jax.jit(lambda: net(x))(),
    "vmap in jit": lambda net: jax.jit(jax.vmap(net)),
    "grad in jit": lambda net: jax.jit(jax.grad(lambda x: net(x).sum())),
    "jit in grad": lambda net: jax.grad(jax.jit(lambda x: net(x).sum())),
    "checkpoint": lambda net: jax.grad(jax.checkpoint(lambda x: net(x).sum())),
    "map": lambda net: lambda x: jax.lax.map(net, x),
    "cond": lambda net: lambda x: jax.lax.cond(True, net, net, x),
    "scan": lambda net: lambda x: jax.lax.scan(lambda c, x: (c, net(x)), 0, x),
}


@row("I1")
@pytest.mark.parametrize("transform", STAGED)
def test_a_program_that_jax_keeps_does_not_contain_parameters(transform):
    call = STAGED[transform](jaxfn.from_torch(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"Linear: .*out of date after net.load. Call net.apply\(parameters, buffers"):
        call(jax.numpy.asarray(X))


@row("I4")
def test_the_mode_at_conversion_may_not_change():
    module = dropping()
    net = jaxfn.from_torch(module)
    step = jax.jit(lambda p, x: net.apply(p, net.buffers, x, key=jax.random.key(0))[0])
    before = step(net.parameters, X)
    module[1].eval()
    for call in (net, partial(jaxfn.explain, net), lambda x: step(net.parameters, x[:1])):
        with pytest.raises(
            jaxfn.TranslationError, match=r"1 was in train mode when .* in eval mode now.*net\.as_eval\(\)"
        ):
            call(X)
    np.testing.assert_array_equal(step(net.parameters, X), before)
    module.eval()
    np.testing.assert_allclose(jaxfn.from_torch(module)(X), net.as_eval()(X), rtol=1e-6)
    module.train()
    np.testing.assert_allclose(step(net.parameters, X), before)


@row("I4")
def test_eval_calls_an_overridden_train():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return self.norm(x) + self.training

    module = Frozen()
    net = jaxfn.from_torch(module)  # torch has the norm in train mode until `train` is called
    np.testing.assert_allclose(net.as_train()(X), called(module.train()), rtol=1e-5)
    np.testing.assert_allclose(net.as_eval()(X), called(module.eval()), rtol=1e-5)


@row("I4")
def test_a_train_that_changes_more_than_the_mode_raises():
    class Merges(nn.Linear):
        merged = False

        def train(self, mode=True):
            super().train(mode)
            if mode == self.merged:
                self.weight.data += 1.0 if not mode else -1.0
                self.merged = not mode
            return self

    module = Merges(2, 2)
    before = module.weight.detach().clone()
    with pytest.raises(jaxfn.TranslationError, match=r"Merges\.train\(False\) changes the attribute merged"):
        jaxfn.from_torch(module).as_eval()
    assert torch.equal(module.weight, before) and not module.merged and module.training


@row("I4")
def test_the_mode_in_a_backward_that_is_traced_later():
    def code(self, x):
        return function_of(lambda x: x * 1.0, slope=lambda x: 2.0 if self.training else 3.0).apply(x)

    net = jaxfn.from_torch(Net(code))
    for model, slope in ((net, 2.0), (net.as_eval(), 3.0), (net.as_train(), 2.0)):
        np.testing.assert_array_equal(jax.grad(lambda x: model(x).sum())(X), np.full_like(X, slope))


# --- State in attributes.


def in_an_attribute(self, x):
    self.h = torch.tanh(x + self.h)
    return self.h


def read_by_python(self, x):
    count = int(self.h)
    self.h = self.h + 1
    return x * count


def in_a_dict(self, x):
    self.state["h"] = torch.tanh(x + self.state["h"])
    return self.state["h"]


def in_an_object(self, x):
    self.state.h = torch.tanh(x + self.state.h)
    return self.state.h


@pytest.mark.parametrize(
    ("code", "attributes"),
    [
        (in_an_attribute, {"h": torch.zeros(2)}),
        (read_by_python, {"h": torch.zeros(())}),
        (in_a_dict, {"state": {"h": torch.zeros(2)}}),
        (in_an_object, {"state": types.SimpleNamespace(h=torch.zeros(2))}),
    ],
)
@row("I2")
def test_a_tensor_that_is_read_and_replaced_raises(code, attributes):
    module = Net(code, **attributes)
    net = jaxfn.from_torch(module)
    for call in (net, partial(jax.jit(net.apply), net.parameters, net.buffers), jax.grad(lambda x: net(x).sum())):
        with pytest.raises(jaxfn.TranslationError, match=r"Net reads the attribute (h|state) of .*register_buffer"):
            call(X)
    called(module)  # which torch can do afterwards


@row("I2")
def test_a_registered_buffer_is_returned():
    module = Net(in_an_attribute)
    module.register_buffer("h", torch.zeros(2, 2))
    net = jaxfn.from_torch(module)
    buffers = net.buffers
    for _ in range(3):
        ours, buffers = net.apply(net.parameters, buffers, X)
        np.testing.assert_allclose(ours, called(module), rtol=1e-6, atol=1e-6)


def overwritten(self, x):
    self.h.copy_(x)
    return x


@row("I2")
def test_an_in_place_update_names_that_fix_too():
    with pytest.raises(jaxfn.TranslationError, match=r"self\.register_buffer\(name, tensor\)"):
        jaxfn.from_torch(Net(overwritten, h=torch.zeros(2, 2)))(X)


def from_nothing(self, x):
    self.h = x if self.h is None else x + self.h
    return self.h


def absent(self, x):
    self.h = getattr(self, "h", 0.0) + x
    return self.h


def appended(self, x):
    self.h.append(x)
    return torch.stack(self.h).sum(0)


def a_number_in_an_object(self, x):
    self.h.count += 1
    return x * self.h.count


def set_by_python(self, x):
    count = int(self.h)
    self.h = torch.tensor(count + 1)
    return x * count


def read_by_a_function(self, x):
    y = function_of(lambda x: x * (self.h or 1.0)).apply(x)
    self.h = 3.0
    return y


def read_by_vars(self, x):
    x = x * (vars(self)["h"] or 1.0)
    self.h = 3.0
    return x


@pytest.mark.parametrize(
    ("code", "make"),
    [
        (from_nothing, lambda: {"h": None}),
        (absent, dict),
        (appended, lambda: {"h": []}),
        (a_number_in_an_object, lambda: {"h": types.SimpleNamespace(count=1)}),
        (set_by_python, lambda: {"h": torch.tensor(2)}),
        (read_by_a_function, lambda: {"h": None}),
        (read_by_vars, lambda: {"h": None}),
    ],
)
@row("I2")
def test_other_changes_are_warned_of_once(code, make):
    module = Net(code, **make())
    net = jaxfn.from_torch(module)
    with pytest.warns(UserWarning, match=r"Net changes the attribute h of the module \(Net\).*register_buffer"):
        first = net(X)
    np.testing.assert_array_equal(net(X), first)
    again, _ = jax.jit(net.apply)(net.parameters, net.buffers, X[:1])
    np.testing.assert_array_equal(again, first[:1])  # traced again: as often as there is
    np.testing.assert_array_equal(called(module), first)


def attention_is_shown(self, x):
    self.seen = x.softmax(-1)
    return self.seen * 2


def moved(self, x):
    self.table = self.table.to(x.device, x.dtype)
    return x * self.table


def created_once(self, x):
    if self.table is None:
        self.table = torch.arange(2.0)
    return x * self.table


def passed_on(self, x):
    self.reset = (x > 0).to(x.dtype).detach()
    return helped(self, x)


def helped(self, x):
    return x - self.reset


def counted_from_scratch(self, x):
    self.count = 0
    self.held = types.SimpleNamespace(h=x)
    for _ in range(3):
        self.count += 1
        self.held.h = self.held.h * 2
    return self.held.h * self.count


def starts_from_scratch(self, x):
    self.h = self.first
    for _ in range(2):
        self.h = torch.tanh(x + self.h)
    return self.h


ZEROS = torch.zeros(2)


@pytest.mark.parametrize(
    ("code", "attributes"),
    [
        (attention_is_shown, {"seen": torch.zeros(2)}),
        (moved, {"table": torch.arange(2.0)}),
        (created_once, {"table": None}),
        (attention_is_shown, {"seen": None}),
        (passed_on, {"reset": None}),
        (passed_on, {"reset": torch.ones(2)}),
        (counted_from_scratch, {}),
        (starts_from_scratch, {"h": ZEROS, "first": ZEROS}),
    ],
)
@row("I2")
def test_attributes_that_no_call_depends_on_are_not_state(code, attributes):
    module = Net(code, **attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(jaxfn.from_torch(module)(X), called(module), rtol=1e-6)


# --- Plain objects.


@dataclasses.dataclass
class Config:
    scale: float


@dataclasses.dataclass(frozen=True)
class Around:
    inner: Config


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float


# What a module, or a parameter, holds, and the object in it that changes.
SHAPES = {
    "namespace": (types.SimpleNamespace(scale=2.0), lambda held: held),
    "slots": (Slots(2.0), lambda held: held),
    "in a tuple in a list": ([(Config(2.0),)], lambda held: held[0][0]),
    "in a dict": ({"a": Config(2.0)}, lambda held: held["a"]),
    "in a frozen dataclass": (Around(Config(2.0)), lambda held: held.inner),
    "in a list of an object": (types.SimpleNamespace(parts=[Config(2.0)]), lambda held: held.parts[0]),
}


@pytest.mark.parametrize("owner", ["module", "parameter"])
@pytest.mark.parametrize("name", SHAPES)
@row("I4", "I8")
def test_a_changed_plain_object_is_seen(name, owner):
    held, config = SHAPES[name]
    module = Net(
        lambda self, x: x * config((self if owner == "module" else self.weight).config).scale,
        weight=nn.Parameter(torch.ones(2)),
    )
    (module if owner == "module" else module.weight).config = held
    net = jaxfn.from_torch(module)
    for scale in (2.0, 3.0, 2.0):
        config(held).scale = scale
        np.testing.assert_array_equal(net(X), X * np.float32(scale))
        np.testing.assert_array_equal(jax.grad(lambda x: net(x).sum())(X), np.full_like(X, scale))


@row("I4")
def test_a_changed_numpy_array_and_set_are_seen():
    module = Net(lambda self, x: x * torch.from_numpy(self.table) * len(self.seen), table=X.copy(), seen={1})
    net = jaxfn.from_torch(module)
    np.testing.assert_array_equal(net(X), X * X)
    module.table[0] = 7
    module.seen.add(2)
    np.testing.assert_array_equal(net(X), called(module))


@row("I4")
def test_objects_that_hold_each_other_are_supported():
    config = types.SimpleNamespace(scale=2.0)
    config.again = config
    module = Net(lambda self, x: x * self.config.scale, config=config)
    config.module, runs = module, []
    module.run, run = lambda self, x: runs.append(1) or run(self, x), module.run
    net = jaxfn.from_torch(module)
    for _ in range(3):
        np.testing.assert_array_equal(net(X), X * 2)
    assert len(runs) == 1


# --- Mistakes of the caller.


@row("I2")
def test_a_wrong_shape_names_layer_input_and_shapes(capfd):
    layers = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 2))
    net = jaxfn.from_torch(Net(lambda self, x: self.layers(x), layers=layers))
    for call in (net, partial(jax.jit(net.apply), net.parameters, net.buffers)):
        with pytest.raises(jaxfn.TranslationError) as info:
            call(X)
        text = str(info.value).partition("\n----")[0]
        assert "in layers.1 (Linear), with input of shape (2, 4)" in text and "(2, 4), (3, 2)" in text
        assert "self.layers(x)" in text and len(text.splitlines()) <= 5
        assert info.value.__cause__ is None and "fake_tensor" not in capfd.readouterr().err
