"""Surroundings of the call of a torch Function in converted code; types and identities of traced tensors."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.overrides import handle_torch_function, has_torch_function_unary  # noqa: E402

import jaxfn  # noqa: E402
from tests.support.beside_torch import as_numpy, assert_as_torch  # noqa: E402
from tests.support.libraries import assert_derivatives_as_torch  # noqa: E402
from tests.support.marks import cells, row  # noqa: E402
from tests.support.torch_code import Net, rule  # noqa: E402

nn = torch.nn
X = np.array([-1.6, 0.3, 2.5, 0.7], np.float32)
TRANSFORMS = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


# --- torch's settings around a call.


class CastToHalf(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx, x):
        return x.float() * 1

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * (2 if torch.is_autocast_enabled("cpu") else 3)


class Product(torch.autograd.Function):
    """Asks for the flags, so it is traced again for a derivative by one input, in the same settings."""

    @staticmethod
    def forward(ctx, x, w):
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(w)
        product = x @ w
        return product.float() + 1000 * (product.dtype == torch.bfloat16) + 100 * ctx.needs_input_grad[1]

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].T * (3 if torch.is_autocast_enabled("cpu") else 2), None


def scaled_by_settings(x):
    is_deterministic, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    return x * (2 if is_deterministic else 3) + (10 if dtype is torch.float64 else 0)


Settings = rule(scaled_by_settings, lambda g, _: g * (2 if torch.are_deterministic_algorithms_enabled() else 3))


@contextlib.contextmanager
def other_settings():
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def cast_by_autocast(x):
    with torch.autocast("cpu", dtype=torch.float16):
        return CastToHalf.apply(x)


def product_by_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Product.apply(x[None], torch.ones(4, 2))


def with_other_settings(x):
    with other_settings():
        y = Settings.apply(x)
    return y + Settings.apply(x)


@row("H23")
@pytest.mark.parametrize("run", [cast_by_autocast, product_by_autocast, with_other_settings])
def test_a_function_runs_in_the_settings_around_its_call(run: Any):
    assert_as_torch(run, np.array([1e6, 1.23456789, 1e-9, 3], np.float32), rtol=1e-2 if "product" in str(run) else 1e-6)


@row("H23")
def test_autograd_inside_runs_backward_in_its_own_settings():
    def run(x):
        x = x * 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = Product.apply(x[None], torch.ones(4, 2)).sum()
            (with_autocast,) = torch.autograd.grad(y, x, retain_graph=True)
        return with_autocast + 10 * torch.autograd.grad(y, x)[0]

    converted, expected = jaxfn.from_torch(run), run(torch.tensor(X, requires_grad=True))
    np.testing.assert_allclose(converted(X), expected, rtol=1e-2)
    np.testing.assert_allclose(jax.jit(converted)(X), expected, rtol=1e-2)


# --- A tensor outside that a Function inside reads.

OUTSIDE = torch.ones(2, 2)
READS_OUTSIDE = {
    "values": lambda: OUTSIDE[0, 0],
    "values by asarray": lambda: torch.asarray(OUTSIDE)[0, 0],
    "a number": lambda: float(OUTSIDE[0, 0]),
    "a branch": lambda: 2 if OUTSIDE[0, 0] > 2 else 3,
    "values by an operation without a translation": lambda: torch.linalg.ldl_factor(OUTSIDE[:1, :1])[0][0, 0],
}


def with_a_gradient_inside(apply):
    def run(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x * torch.autograd.grad(apply(y).sum(), y)[0]

    return run


def in_a_function(run):
    return rule(lambda x: run(x) * (2 if x.sum() > 0 else 3), lambda g, x: g * run(x))


SURROUNDINGS = {
    "alone": lambda apply: apply,
    "with an index": lambda apply: lambda x: apply(x)[torch.tensor([2, 0])],
    "with a gradient": with_a_gradient_inside,
    "in a Function that reads values": in_a_function,
    "with a gradient, in a Function that reads values": lambda apply: in_a_function(with_a_gradient_inside(apply)),
}


@row("H2", "H23")
@cells(
    "read, surroundings",
    [
        ("values", "alone"),
        ("a number", "with an index"),
        ("a branch", "with a gradient"),
        ("values by an operation without a translation", "in a Function that reads values"),
        ("a number", "with a gradient, in a Function that reads values"),
        ("a branch", "alone"),
        ("values by asarray", "in a Function that reads values"),
    ],
    READS_OUTSIDE,
    SURROUNDINGS,
)
def test_a_function_inside_sees_new_values_of_a_tensor_outside(read: str, surroundings: str):
    value_outside = READS_OUTSIDE[read]
    Scale = rule(lambda x: x * x * value_outside(), lambda g, x: 2 * g * x * value_outside())
    code = SURROUNDINGS[surroundings](lambda x: Scale.apply(x))
    run, converted = (getattr(x, "apply", x) for x in (code, jaxfn.from_torch(code)))
    for value in (2.0, 3.0, 2.0, 5.0):
        OUTSIDE.fill_(value)
        x = torch.tensor(X, requires_grad=True)
        expected = run(x)
        np.testing.assert_allclose(converted(X), as_numpy(expected), rtol=1e-5)
        found, pullback = jax.vjp(converted, jnp.asarray(X))
        np.testing.assert_allclose(found, as_numpy(expected), rtol=1e-5)
        OUTSIDE.fill_(value + 1)  # backward runs later
        np.testing.assert_allclose(
            pullback(jnp.ones_like(found))[0], torch.autograd.grad(expected.sum(), x)[0], rtol=1e-5
        )


# --- Python state.

FLAGS = {"quantize": True, "scale": 1.0}


@contextlib.contextmanager
def flags(**changed: Any):
    before = dict(FLAGS)
    FLAGS.update(changed)
    try:
        yield
    finally:
        FLAGS.update(before)


Quantize = rule(
    lambda x: (x.round() if FLAGS["quantize"] else x * 1) * Quantize.factor,
    lambda g, _: g * FLAGS["scale"] * Quantize.factor,
)
Quantize.factor = 1.0


class ByConfiguration(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, config):
        ctx.bits = config.bits
        return x * config.bits

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.bits, None


CONVERTED = {
    "Function": lambda: jaxfn.from_torch(Quantize).apply,
    "function": lambda: jaxfn.from_torch(lambda x: Quantize.apply(x)),
    "module": lambda: jaxfn.from_torch(Net(lambda self, x: Quantize.apply(x))),
}


def switched_between_calls(x):
    low = Quantize.apply(x)
    with flags(quantize=False, scale=3.0):  # backward runs later
        full = Quantize.apply(x)
    return low + 10 * full


def configured_for_each_call(x):
    config, total = types.SimpleNamespace(bits=0), 0
    for config.bits in (2, 4, 8):
        total = total + config.bits * ByConfiguration.apply(x, config)
    return total


@row("H23")
@pytest.mark.parametrize("run", [switched_between_calls, configured_for_each_call])
def test_python_state_may_change_between_two_calls_in_one_trace(run: Any):
    assert_as_torch(run, X)


@row("H2", "I6")
@pytest.mark.parametrize("name", [*CONVERTED])
def test_python_state_may_change_between_calls_outside_jit(name: str, monkeypatch: pytest.MonkeyPatch):
    converted = CONVERTED[name]()
    for quantize, factor in [(True, 1.0), (False, 3.0), (True, 1.0)]:
        monkeypatch.setattr(Quantize, "factor", factor)
        with flags(quantize=quantize):
            np.testing.assert_allclose(converted(X), factor * (np.round(X) if quantize else X), rtol=1e-6)
            np.testing.assert_allclose(jax.grad(lambda x: converted(x).sum())(X), factor)


@row("H23")
@pytest.mark.parametrize("name", [*CONVERTED])
def test_python_state_may_change_between_forward_and_backward(name: str):
    converted = CONVERTED[name]()
    for scale in (2.0, 3.0, 2.0, 5.0):
        _, pullback = jax.vjp(converted, jnp.asarray(X))
        with flags(scale=scale):
            np.testing.assert_allclose(pullback(jnp.ones(4))[0], scale)


@dataclasses.dataclass(slots=True)
class Slots:
    value: float = 2.0


@dataclasses.dataclass
class Configuration:
    value: float = 2.0


class Mode(enum.Enum):
    ONE = 1


class Meta(type):
    value = 2.0


class WithMeta(metaclass=Meta):
    pass


TAGGED, TENSOR = torch.ones(1), torch.tensor(2.0)
SETTINGS = types.SimpleNamespace(one=2.0)
NAME, THIS = "one", sys.modules[__name__]
QUEUE = collections.deque([2.0])
ARRAY = np.array([2.0])
VARIABLE = contextvars.ContextVar[float]("value")
FIRST = [1.0]
LISTS = {"first": FIRST, "second": [1.0]}
READ = types.ModuleType("read")
NUMBERS = [2.0]


class Numbers:
    value = 2.0


def by_default(numbers=NUMBERS):
    return numbers[0]


def by_attribute():
    return by_attribute.value


STATE = {  # how code reads a value, and how it is set
    "a global": (lambda: NUMBERS[0], lambda value: NUMBERS.__setitem__(0, value)),
    "a function": (lambda: [by_default][0](), lambda value: NUMBERS.__setitem__(0, value)),
    "a captured value": ((lambda local: lambda: local[0])(NUMBERS), lambda value: NUMBERS.__setitem__(0, value)),
    "a partial": (functools.partial(by_default, NUMBERS), lambda value: NUMBERS.__setitem__(0, value)),
    "a class": (lambda: Numbers.value, lambda value: setattr(Numbers, "value", value)),
    "a module": (lambda: READ.value, lambda value: setattr(READ, "value", value)),
    "an attribute of a function": (by_attribute, lambda value: setattr(by_attribute, "value", value)),
    "the value of a captured tensor": (lambda: TENSOR * 1, TENSOR.fill_),
    "an object with __slots__": (lambda: SLOTS.value, lambda value: setattr(SLOTS, "value", value)),
    "a dataclass": (lambda: CONFIGURATION.value, lambda value: setattr(CONFIGURATION, "value", value)),
    "a member of an enum": (lambda: Mode.ONE.factor, lambda value: setattr(Mode.ONE, "factor", value)),
    "a metaclass": (lambda: WithMeta.value, lambda value: setattr(Meta, "value", value)),
    "a captured tensor": (lambda: TAGGED.factor, lambda value: setattr(TAGGED, "factor", value)),
    "a name in a global": (lambda: getattr(SETTINGS, NAME), lambda value: setattr(SETTINGS, "one", value)),
    "a computed name": (lambda: getattr(THIS, f"the_{NAME}"), lambda value: setattr(THIS, "the_one", value)),
    "a deque": (lambda: QUEUE[0], lambda value: QUEUE.__setitem__(0, value)),
    "an array of NumPy": (lambda: float(ARRAY[0]), lambda value: ARRAY.__setitem__(0, value)),
    "a context variable": (VARIABLE.get, VARIABLE.set),
    "the identity of lists": (
        lambda: 3.0 if LISTS["first"] is LISTS["second"] else 2.0,
        lambda value: LISTS.update(second=[1.0] if value == 2.0 else FIRST),
    ),
    "torch's precision of products": (
        lambda: 3.0 if torch.get_float32_matmul_precision() == "high" else 2.0,
        lambda value: torch.set_float32_matmul_precision("high" if value == 3.0 else "highest"),
    ),
}
SLOTS, CONFIGURATION = Slots(), Configuration()
KINDS = ["Function", "function", "module"]


@row("H2", "H23")
@cells(
    "name, kind",
    [*zip(STATE, itertools.cycle(KINDS)), *(("a dataclass", kind) for kind in ("Function", "module"))],
    STATE,
    KINDS,
)
def test_state_of_every_kind_may_change_between_calls(name: str, kind: str):
    read, write = STATE[name]

    Scale = rule(lambda x: x * read(), lambda g, _: g * read())
    run = {
        "Function": jaxfn.from_torch(Scale).apply,
        "function": jaxfn.from_torch(lambda x: x * read()),
        "module": jaxfn.from_torch(Net(lambda self, x: Scale.apply(x))),
    }[kind]
    for value in (
        2.0,
        3.0,
        2.0,
        *((0.0, -0.0) if name == "a global" else ()),
    ):
        write(value)
        np.testing.assert_allclose(run(X), X * value, rtol=1e-6)
        np.testing.assert_array_equal(jnp.signbit(run(X)), np.signbit(X * value))
        np.testing.assert_allclose(jax.grad(lambda x: run(x).sum())(X), value)


@row("H2")
def test_an_equal_complex_number_is_not_traced_again(capsys: pytest.CaptureFixture[str]):
    def run(x, factor):
        print("traced")
        return x * factor

    converted = jaxfn.from_torch(run)
    for factor in (complex(1, 2), complex(1, 2)):
        np.testing.assert_allclose(converted(X, factor), X * factor, rtol=1e-6)
    assert capsys.readouterr().out == "traced\n"


class ByStateLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, config):
        ctx.config = config
        return x * config.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * FLAGS["scale"] * ctx.config.factor, None


@row("H23")
def test_an_object_on_ctx_may_change_before_backward():
    config = types.SimpleNamespace()
    for scale in (3.0, 4.0, 3.0, 5.0):
        config.factor = 2.0
        y, pullback = jax.vjp(lambda x: jaxfn.from_torch(ByStateLater).apply(x, config), 1.0)
        config.factor = scale
        assert (y, pullback(1.0)[0]) == (2, scale)


@row("H23")
def test_forward_mode_belongs_to_the_call():
    class Pushes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * (2 if torch.is_autocast_enabled("cpu") else 3)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Pushes.apply(x)

    assert jax.jvp(jaxfn.from_torch(run), (1.0,), (1.0,))[1] == 2


@row("H23")
@pytest.mark.parametrize("make", [types.SimpleNamespace, nn.Module], ids=["compared", "not compared"])
def test_autograd_inside_runs_backward_in_the_state_there(make: Any):
    def run(x):
        config = make()
        x, config.factor = x * 1, 2.0
        y = ByStateLater.apply(x, config)
        with flags(scale=3.0):
            (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            config.factor = 5.0
            (second,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (third,) = torch.autograd.grad(y.sum(), x)
        config.factor = 7.0
        return x * (first + 10 * second + 100 * third)

    assert_as_torch(run, X)


@row("H23")
def test_autograd_inside_raises_if_backward_needs_values_and_the_state_has_changed():
    Branches = rule(lambda x: x * 1, lambda g, _: g * FLAGS["scale"] if g.sum() > 0 else g, name="Branches")

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            with torch.enable_grad(), flags(scale=scale):
                y = x.detach().requires_grad_()
                return torch.autograd.grad(Branches.apply(y).sum(), y)[0]

    apply = jaxfn.from_torch(Outer).apply
    np.testing.assert_array_equal(apply(X, 1.0), 1)
    with pytest.raises(jaxfn.TranslationError, match="Branches.backward, which needs values, .* argument of apply"):
        apply(X, 2.0)


@row("H23")
def test_a_trace_after_the_call_raises_if_the_state_has_changed():
    """The flags of the inputs are known when the translation runs."""

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (1 if ctx.needs_input_grad[0] else FLAGS["scale"])

        @staticmethod
        def backward(ctx, grad):
            return grad

    def run(x):
        with flags(scale=2.0):
            return Asks.apply(x)

    with pytest.raises(jaxfn.TranslationError, match="Asks.forward .* has changed since .* argument of apply"):
        jaxfn.from_torch(run)(X)


# --- Containers among the arguments.


class Recording(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        log.append(x.shape[0])
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


class Replacing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, items):
        items[0] = items[0] * 2
        return x + items[0]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@row("L4")
def test_what_forward_appends_to_a_list_is_seen_after_the_call():
    def run(x):
        log = []
        y = Recording.apply(Recording.apply(x, log), log)
        return y * (1 + len(log))

    assert_as_torch(run, X)
    log: list[int] = []
    for _ in range(2):
        jaxfn.from_torch(Recording).apply(X, log)
    assert log == [4, 4]


class KeepsLog(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(len(ctx.log))
        return grad * len(ctx.log), None


@row("L4", "H23")
@pytest.mark.parametrize("kind", [list, collections.deque])
def test_a_list_on_ctx_is_that_of_the_call(kind: Any):
    apply, logs = jaxfn.from_torch(KeepsLog).apply, [kind() for _ in range(3)]
    for log in logs:  # equal lists, so one trace of forward
        _, pullback = jax.vjp(lambda x, log=log: apply(x, log), X)
        log.extend([7] * logs.index(log))
        for expected in (len(log) + 1, len(log) + 2):
            np.testing.assert_allclose(pullback(jnp.ones(4))[0], expected)
    assert [len(log) for log in logs] == [2, 3, 4]


@row("L4")
@pytest.mark.parametrize("kind", [list, collections.deque])
def test_what_a_function_or_module_appends_to_a_list_is_seen_after_the_call(kind: Any):
    def appending(self, x, log):
        log.append(1)
        return x * len(log)

    for run in (jaxfn.from_torch(Net(appending)), jaxfn.from_torch(lambda x, log: Net(appending)(x, log))):
        log = kind()
        for expected in (1, 2, 3):
            np.testing.assert_allclose(run(X, log), X * expected)
        assert len(log) == 3


@row("L4")
def test_a_dict_of_arrays_that_a_function_changes_raises():
    def run(x, *, tensors):
        tensors["y"] = x * 2
        return tensors["y"]

    with pytest.raises(jaxfn.TranslationError, match="run changes argument 'tensors'"):
        jaxfn.from_torch(run)(X, tensors={"x": X})


@row("L4")
def test_a_native_forward_gets_the_very_list():
    logged = jaxfn.autograd_function(lambda ctx, x, log: log.append(3) or x * 3, lambda ctx, grad: (grad * 3, None))
    log: list[int] = []
    logged(jnp.ones(3), log)
    np.testing.assert_array_equal(jax.grad(lambda x: logged(x, log).sum())(X), 3)
    assert log == [3] * len(log) != [3]


@row("L4")
@pytest.mark.parametrize(
    "apply",
    [
        jaxfn.autograd_function(lambda ctx, x, items: items.append(x) or x, lambda ctx, grad: (grad, None)),
        lambda x, items: jaxfn.from_torch(Replacing).apply(x, items),
        lambda x, items: jaxfn.from_torch(lambda x, items: Replacing.apply(x, items))(x, items),
    ],
    ids=["native", "Function", "function"],
)
def test_a_changed_list_of_arrays_raises(apply: Any):
    with pytest.raises((NotImplementedError, jaxfn.TranslationError), match="forward change.*'items'"):
        apply(X, [jnp.ones(4)])


# --- The type of a traced tensor.


@functools.singledispatch
def dispatched(x):
    return 0 * x


@dispatched.register(torch.Tensor)
def _(x):
    return x * 2


def overridable(x):
    if has_torch_function_unary(x):
        return handle_torch_function(overridable, (x,), x)
    return x[x > 0].sum() * type(x)([3.0])


def by_type(x):
    class Meta(type):
        pass

    made = Meta("Made", (), {})
    assert isinstance(made, type) and issubclass(Meta, type) and type(made) is Meta and type(int) is type
    return x * 2 if type(x) is torch.Tensor and type(x.dim()) is int else x * 3


TYPES = {
    "type": by_type,
    "class": lambda x: x * 2 if x.__class__ is torch.Tensor else x * 3,
    "a dict": lambda x: {torch.Tensor: torch.sin}.get(type(x), torch.cos)(x),
    "singledispatch": dispatched,
    "constructor": lambda x: x * type(x)([1.0, 2.0, 3.0, 4.0]),
    "has_torch_function": lambda x: x * (3 if torch.overrides.has_torch_function((x,)) else 2),
    "handle_torch_function": overridable,
}


@row("H24")
@pytest.mark.parametrize("name", [*TYPES])
def test_a_traced_tensor_has_the_type_that_torch_gives_it(name: str):
    assert_as_torch(TYPES[name], X)
    assert type.__name__ == "type" and type is int.__class__  # It was restored.


@row("H24")
def test_a_class_created_in_a_trace_has_none_of_the_patched_type():
    made: list[Any] = []

    def run(x):
        class Meta(type):
            pass

        class Twice(type, metaclass=type):  # noqa: UP050
            pass

        made.extend([Meta, Twice, dataclasses.make_dataclass("Made", ["x"])])
        return x * (2 if issubclass(type, type) and isinstance(type, type) and type(type) is type else 3)

    assert_as_torch(run, X)
    for meta in made:
        assert type(meta) is type and {*meta.__mro__} <= {meta, type, object}


@row("H24")
def test_the_type_in_the_methods_of_a_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor if type(factor) == torch.Tensor else torch.tensor(float(factor))  # noqa: E721
            return x * ctx.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor * (1 if type(grad) is torch.Tensor else 100), None

    apply = jaxfn.from_torch(Double).apply
    assert_as_torch(lambda x: Double.apply(x, 2.0), X, convert=lambda run: lambda x: apply(x, 2.0))


# --- Type, identity and attributes of parameters.

RATES: dict[Any, float] = {}
RATES_BY_ID: dict[int, float] = {}


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return (
            x * w * getattr(w, "scale", 1.0) * (2 if isinstance(w, nn.Parameter) else 3) * RATES_BY_ID.get(id(w), 1.0)
        )

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        if hasattr(w, "main_grad"):
            w.main_grad = grad
        return grad * getattr(w, "scale", 1.0), grad


class Known(Net):
    def __init__(self, run):
        super().__init__(run, weight=nn.Parameter(torch.tensor(X)), other=nn.Parameter(torch.tensor(X * 2)))
        self.weight.scale = 4.0
        self.register_buffer("running", torch.tensor(X + 1))
        self.running.scale = 5.0
        self.rates, self.rates_by_id = {self.weight: 6.0}, {id(self.weight): 7.0}
        self.group = {self.other}


KNOWN = {
    "isinstance": lambda net, x: x * net.weight * (2 if isinstance(net.weight, nn.Parameter) else 3),
    "type": lambda net, x: x * net.weight * (2 if type(net.weight) is nn.Parameter else 3),
    "attribute": lambda net, x: x * net.weight * getattr(net.weight, "scale", 1.0),
    "attribute of a buffer": lambda net, x: x * net.weight * getattr(net.running, "scale", 1.0),
    "key": lambda net, x: x * net.weight * net.rates.get(net.weight, 1.0),
    "keys": lambda net, x: sum(x * key * rate for key, rate in net.rates.items()),
    "id": lambda net, x: x * net.weight * net.rates_by_id.get(id(net.weight), 1.0),
    "set": lambda net, x: sum(x * w for w in net.group) * (2 if net.other in net.group else 3) * net.weight,
    "global key": lambda net, x: x * net.weight * RATES.get(net.weight, 1.0) * RATES.get(net.other, 2.0),
    "Function": lambda net, x: Weighted.apply(x, net.weight) + Weighted.apply(x, net.other),
}


@row("I8")
@TRANSFORMS
@pytest.mark.parametrize("name", [*KNOWN])
def test_a_parameter_is_known_as_in_torch(name: str, transform: Any, monkeypatch: pytest.MonkeyPatch):
    module = Known(KNOWN[name])
    monkeypatch.setitem(RATES, module.weight, 8.0)
    monkeypatch.setitem(RATES_BY_ID, id(module.other), 9.0)
    net, x = jaxfn.from_torch(module), X + 2
    for scale in (4.0, 5.0):  # It is read at each call.
        module.weight.scale = scale
        expected = module(torch.tensor(x))
        gradients = torch.autograd.grad(expected.sum(), [module.weight, module.other], allow_unused=True)
        output, _ = transform(lambda p: net.apply(p, net.buffers, x))(net.parameters)
        np.testing.assert_allclose(output, as_numpy(expected), rtol=1e-5)
        found = transform(jax.grad(lambda p: net.apply(p, net.buffers, x)[0].sum()))(net.parameters)
        for key, gradient in zip(("weight", "other"), gradients, strict=True):
            np.testing.assert_allclose(found[key], 0 if gradient is None else as_numpy(gradient), rtol=1e-5)


class Doubling(nn.Parameter):
    def twice(self):
        return self * 2


class Adding(nn.Parameter):
    def __mul__(self, other):
        return torch.add(self, other)


@row("I8")
def test_a_subclass_of_parameter_has_its_methods():
    module = Known(lambda net, x: x * net.own.twice() * (2 if isinstance(net.own, Doubling) else 3))
    module.own = Doubling(torch.tensor(X))
    np.testing.assert_allclose(jaxfn.from_torch(module)(X), as_numpy(module(torch.tensor(X))), rtol=1e-6)


@row("I8")
def test_a_subclass_that_redefines_methods_of_tensors_raises():
    module = Known(lambda net, x: net.own * x)
    module.own = Adding(torch.tensor(X))
    with pytest.raises(jaxfn.TranslationError, match="own is a Adding, which redefines __mul__ of torch.Tensor"):
        jaxfn.from_torch(module)(X)


def sets_an_attribute(net, x):
    net.weight.seen = True
    return x * net.weight


@row("I8")
def test_an_attribute_that_is_set_raises():
    module = Known(sets_an_attribute)
    with pytest.raises(jaxfn.TranslationError, match="Known sets the attribute 'seen' of weight"):
        jaxfn.from_torch(module)(X)
    module = Known(KNOWN["Function"])
    module.weight.main_grad = None
    net = jaxfn.from_torch(module)
    with pytest.raises(jaxfn.TranslationError, match="Weighted sets the attribute 'main_grad' of weight"):
        jax.grad(lambda p: net.apply(p, net.buffers, X)[0].sum())(net.parameters)


# --- Masks without dimensions.


def zero_beyond_one(grad, x):
    grad = grad.clone()
    grad[x.abs() > 1] = 0
    return grad


@row("H3")
@TRANSFORMS
def test_a_mask_of_a_scalar(transform: Any):
    apply = jaxfn.from_torch(rule(torch.sign, zero_beyond_one)).apply
    np.testing.assert_array_equal(transform(jax.vmap(jax.grad(apply)))(jnp.array([0.5, 2.0])), [1, 0])
    assert transform(jax.grad(apply))(2.0) == 0


@row("H3")
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0])
def test_masks_without_dimensions(value: float):
    def run(x):
        y, z, w, u = x.clone(), torch.ones(2), torch.zeros(3, 2), x.clone()
        y[x > 1] = 7
        z[x > 1] = x
        w[x.abs() > 0.7] = x * torch.ones(2)
        u[x < 0] = u[x < 0] * 2
        return y + z.sum() + w.sum() + u + x[x > 1].sum()

    assert_as_torch(run, np.array(value, np.float32))


# --- Derivatives inside, by an argument.


def penalty(x):
    (slope,) = torch.autograd.grad((x * x).sin().sum(), x, create_graph=True)
    return (slope**2).sum()


def equation(x):
    (slope,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (slope * curvature).sum()


@row("H15")
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("run", [penalty, equation])
def test_a_gradient_inside_by_an_argument(run: Any):
    assert_derivatives_as_torch(jaxfn.from_torch(run), run, [X.astype(float)])
