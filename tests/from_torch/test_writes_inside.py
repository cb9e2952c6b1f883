"""Contract rows H2, H8, I2, I5: what a Function inside other torch code writes to its arguments, and what it copies."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn._torch.trace import detach  # noqa: E402
from tests.support.beside_torch import assert_same_as_torch  # noqa: E402
from tests.support.contexts import CONTEXTS  # noqa: E402
from tests.support.marks import row  # noqa: E402
from tests.support.torch_code import Net, rule  # noqa: E402

Base = torch.autograd.Function


def nothing_saved(inputs, output):
    return ()


nn = torch.nn
X = np.array([0.5, -1.25, 2.0], np.float32)


# A running average that is mutated and used, as in quantizers and normalizations.
Average = rule(
    lambda x, average: x / average.mul_(0.9).add_(x, alpha=0.1),
    lambda g, x, average: (3 * g / average, 5 * g * x),
    name="Average",
)


class SeparateAverage(Base):
    generate_vmap_rule = True
    forward = staticmethod(lambda x, average: x / average.mul_(0.9).add_(x, alpha=0.1))
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    backward = Average.backward


def write_several(x, written):
    """Writes to a part of one and to an integer, both in a list, and returns two."""
    average, count = written
    average[1:] += x[1:]
    count.add_(1)
    return x * average, x + count


Several = rule(write_several, lambda g, h: (2 * g + 7 * h, None), nothing_saved)
# Returns what it wrote to, which is an output with a derivative, and no input any more.
Returning = rule(lambda x, state: state.mul_(0.5).add_(x), lambda g: (3 * g, 11 * g), nothing_saved)


class ByModule(Base):
    """Writes to a buffer that is an argument and is the module's too, by one or the other."""

    @staticmethod
    def forward(ctx, x, average, module, written, read):
        named = {"argument": average, "module": module.average}
        named[written].mul_(0.9).add_(x, alpha=0.1)
        ctx.module, ctx.read = module, read
        ctx.save_for_backward(average)
        return x / named[read]

    @staticmethod
    def backward(ctx, grad_output):
        average = ctx.module.average if ctx.read == "module" else ctx.saved_tensors[0]
        return 3 * grad_output / average, None, None, None, None


# Applies a Function that mutates its argument.
Outer = rule(lambda x, average: Average.apply(x, average) + average, lambda g, _, average: (2 * g * average, None))


average_taken, separate_average_taken = Average.apply, SeparateAverage.apply


def write_without_gradients(module, x):
    with torch.no_grad():
        y = Average.apply(x, module.average)
    return y * x


def write_inside_autograd(module, x):
    z = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(Average.apply(z * z, module.average).sum(), z)
    return gradient * x


def write_to_intermediate(module, x, function):
    state = module.weight * module.average
    return function.apply(x, state) + 3 * state


def write_to_view(module, x):
    both = torch.stack([module.weight * x, x])
    return Average.apply(x, both[1].detach()) + both.sum(0)


WRITES: dict[str, Any] = {
    "a buffer": lambda m, x: Average.apply(x, m.average),
    "a buffer, setup_context": lambda m, x: SeparateAverage.apply(x, m.average),
    "a buffer, taken before": lambda m, x: average_taken(x, m.average),
    "a buffer, setup_context, taken before": lambda m, x: separate_average_taken(x, m.average),
    "a view of a buffer": lambda m, x: Average.apply(x, m.average.view(3, 1)[:, 0]),
    "a buffer without gradients": write_without_gradients,
    "a buffer inside autograd": write_inside_autograd,
    "a list, in part": lambda m, x: sum(Several.apply(x, [m.average, m.count])),
    "an intermediate": lambda m, x: write_to_intermediate(m, x, Average),
    "an intermediate that it returns": lambda m, x: write_to_intermediate(m, x, Returning),
    "a part of an intermediate": write_to_view,
    "a buffer that it returns": lambda m, x: Returning.apply(x, m.average),
    "a buffer by the module": lambda m, x: ByModule.apply(x, m.average, m, "module", "argument"),
    "a buffer by the argument": lambda m, x: ByModule.apply(x, m.average, m, "argument", "module"),
    "a buffer, two deep": lambda m, x: Outer.apply(x, m.average),
}


class Writes(Net):
    def __init__(self, code):
        super().__init__(code, weight=nn.Parameter(torch.tensor([1.5, -0.5, 2.0])))
        self.register_buffer("average", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.run(self, self.weight * x) + 3 * self.average.detach() + self.count


def torchs(code, x):
    """The output, the gradients and the buffers afterwards."""
    module, x = Writes(code), torch.tensor(x, requires_grad=True)
    y = module(x)
    y.sum().backward()
    gradients = [x.grad, module.weight.grad]
    return [np.asarray(z.detach()) for z in (y, *gradients, module.average, module.count)]


def ours(code, x):
    net = jaxfn.from_torch(Writes(code))

    def loss(x, parameters):
        y, buffers = net.apply(parameters, net.buffers, x)
        return y.sum(), (y, buffers)

    gradients, (y, buffers) = jax.grad(loss, (0, 1), has_aux=True)(x, net.parameters)
    return [y, gradients[0], gradients[1]["weight"], buffers["average"], buffers["count"]]


def assert_output_as_torch(code):
    net = jaxfn.from_torch(Writes(code))
    expected = Writes(code)(torch.tensor(X)).detach()
    np.testing.assert_allclose(net.apply(net.parameters, net.buffers, X)[0], expected, rtol=2e-6)


def mapped(code, x):
    """Over the last axis; the parameters and buffers have no batch."""
    others = jnp.stack([x + 1, x, 2 * x], 1)
    return [y[1] for y in jax.vmap(lambda x: ours(code, x), 1)(others)]


@row("H8", "I2", "I5")
@pytest.mark.parametrize("run", [ours, jax.jit(mapped, static_argnums=0)], ids=["eager", "jit of vmap"])
@pytest.mark.parametrize("name", WRITES)
def test_what_it_writes_is_there_afterwards(name: str, run: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run(WRITES[name], X)
    for result, expected in zip(results, torchs(WRITES[name], X), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-6)


class Marking(Base):
    @staticmethod
    def forward(ctx, x, state):
        ctx.mark_dirty(state)
        return x * state.add_(1), state

    @staticmethod
    def backward(ctx, of_product, of_state):
        return of_product, of_state


@row("H8", "I2")
@pytest.mark.parametrize("apply", [Average.apply, lambda x, y: Marking.apply(x, y)[0]], ids=["unmarked", "marked"])
@pytest.mark.parametrize(
    "other", [lambda x: x, lambda x: x[1:2], lambda x: x.view(3, 1)[:, 0]], ids=["itself", "a part", "a view"]
)
def test_a_write_that_is_seen_in_another_argument_raises(apply: Any, other: Any):
    net = jaxfn.from_torch(Writes(lambda module, x: (lambda y: apply(other(y), y))(x.clone())))
    with pytest.raises(jaxfn.TranslationError, match="mutates its tensor argument 1, .* with tensor argument 0"):
        net.apply(net.parameters, net.buffers, np.ones(3, np.float32))


def parts_that_do_not_overlap(module, x):
    both = torch.cat([x, module.average]).detach()
    return Average.apply(both[:3], both[3:]) + both[3:]


def outputs_that_share_memory(module, x):
    state = module.average.clone()
    y = Returns.apply(state, lambda x: (2 * x, x.sin().view(3, 1)))
    return x * state + y[0]


@row("H8", "I2")
@pytest.mark.parametrize("code", [parts_that_do_not_overlap, outputs_that_share_memory])
def test_memory_that_is_shared_and_not_written_to_is_supported(code: Any):
    assert_output_as_torch(code)


# --- A clone is another tensor, and on JAX an alias of the array.


def marks_clone(copied):
    def forward(x):
        y = x.sin()
        return y, copied(y)

    return rule(forward, lambda g, _, x: g * x.cos(), marked=1)


def saves_clone(copied):
    """Saves a copy of its output, whose derivative is that of the code, and not the Function's rule."""
    return rule(torch.exp, lambda g, y: g * 5 * y, lambda _, y: [copied(y)])


COPIED = {
    "clone": lambda y: y.clone(),
    "detach": lambda y: y.detach(),
    "view": lambda y: y.view(-1),
    "reshape": lambda y: y.reshape(3).contiguous(),
    "times one": lambda y: y * 1,
}


@row("H2", "B8")
@pytest.mark.parametrize("context", ["eager", "checkpoint"])
@pytest.mark.parametrize("copied", COPIED)
def test_a_mark_on_a_clone_of_an_output_is_not_a_mark_on_the_output(copied: str, context: str):
    def loss(apply, x):
        y, same = apply(x)
        return 2 * y + 3 * same

    function = marks_clone(COPIED[copied])
    apply = jaxfn.from_torch(function).apply
    assert_same_as_torch(CONTEXTS[context](lambda x: loss(apply, x)), lambda x: loss(function.apply, x), [X])


def sine_around_double(x):
    y = x.sin()
    return y, x * 2, y


@row("H2", "B8")
def test_a_mark_is_for_each_position_of_an_output():
    function = rule(sine_around_double, lambda a, g, b, _: 2 * g + 5 * a + 7 * b, marked=0)
    apply = jaxfn.from_torch(function).apply
    assert_same_as_torch(lambda x: sum(apply(x)), lambda x: sum(function.apply(x)), [X])


@row("H2", "D3")
@pytest.mark.parametrize("copied", COPIED)
def test_second_derivatives_where_a_clone_of_an_output_is_saved(copied: str):
    apply = jaxfn.from_torch(saves_clone(COPIED[copied])).apply
    slope = jax.grad(lambda x: apply(x).sum())
    second = jax.grad(lambda x: slope(x).sum())
    for found in (second(X), jax.jit(second)(X)):
        np.testing.assert_allclose(found, 0 * X if copied == "detach" else 5 * np.exp(X), rtol=1e-6)


# --- One tensor as several arguments or outputs.


def weighted_gradients(g, h, k, _):
    return 3 * g + 5 * h + 7 * k


InputTwice = rule(lambda x: (x, x * 2, x), weighted_gradients)
OutputTwice = rule(sine_around_double, weighted_gradients)
UndefinedTwice = rule(
    sine_around_double,
    lambda g, h, k, _: (1000 if g is None else 3 * g) + (0 if h is None else 5 * h) + 7 * k,
    materialize=False,
)


class DirtyTwice(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x * 2, x

    @staticmethod
    def backward(ctx, *gradients):
        return weighted_gradients(*gradients, None)


@row("H2", "H8")
@pytest.mark.filterwarnings("ignore:.*mark_dirty on a JAX array")
@pytest.mark.parametrize("is_inside", [False, True], ids=["direct", "inside"])
@pytest.mark.parametrize("function", [InputTwice, OutputTwice, UndefinedTwice, DirtyTwice])
def test_gradients_of_a_tensor_that_is_returned_twice(function: Any, is_inside: bool):
    def weighted(apply, x, weights):
        return sum(w * y for w, y in zip(weights, apply(x * 1.0), strict=True) if w)

    for weights in [(1, 0, 0), (0, 0, 1), (2, 11, 13)] if function is not UndefinedTwice else [(1, 0, 1), (2, 11, 13)]:
        theirs = functools.partial(weighted, function.apply, weights=weights)
        ours = functools.partial(weighted, jaxfn.from_torch(function).apply, weights=weights)
        assert_same_as_torch(jaxfn.from_torch(theirs) if is_inside else ours, theirs, [X])


class Returns(Base):
    @staticmethod
    def forward(ctx, x, how):
        return how(x)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return 3 * grad_outputs[0].view(3), None


SHARED: dict[str, Any] = {
    "its argument": (lambda x: x, lambda y, x: y),
    "a view of its argument": (lambda x: x.view(3, 1), lambda y, x: y),
    "a detached argument": (lambda x: x.detach(), lambda y, x: y),
    "its argument, which is written to": (lambda x: x, lambda y, x: x),
    "a part of another output": (lambda x: (lambda y: (y, y[1:]))(x.sin()), lambda y, x: y[1]),
}


@row("H8", "I2")
@pytest.mark.parametrize("is_by_data", [False, True], ids=["plain", "data"])
@pytest.mark.parametrize("name", SHARED)
def test_a_write_to_what_shares_memory_with_what_a_function_returned_raises(name: str, is_by_data: bool):
    how, written = SHARED[name]

    def code(module, x):
        state = module.average.clone()
        y = Returns.apply(state, how)
        target = written(y, state)
        (target.data if is_by_data else target).add_(1)
        return x * state + (y if isinstance(y, torch.Tensor) else y[0]).view(3)

    net = jaxfn.from_torch(Writes(code))
    with pytest.raises(jaxfn.TranslationError, match=r"storage of two tensors, an output of Returns and .*Copy one"):
        net.apply(net.parameters, net.buffers, X)


# --- What a Function stores is in torch the caller's memory.


class Stores(Base):
    """Stores what `select` returns of its second argument and its output, saved or as an attribute."""

    @staticmethod
    def forward(ctx, x, state, select, is_saved=False):
        y = x * state
        ctx.is_saved, ctx.stored = is_saved, None if is_saved else select(state, y)
        if is_saved:
            ctx.save_for_backward(select(state, y))
        return y

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * (ctx.saved_tensors[0] if ctx.is_saved else ctx.stored), None, None, None


def write_to_state(module, x, *select):
    y = Stores.apply(x, module.average, *select)
    module.average.mul_(3)
    return y


def write_to_output(module, x, *select):
    y = Stores.apply(x, module.average, *select)
    y.data.mul_(3)
    return y


STORED = {
    "attribute": lambda m, x: write_to_state(m, x, lambda state, y: state),
    "data": lambda m, x: write_to_state(m, x, lambda state, y: state.data, True),
    "output": lambda m, x: write_to_output(m, x, lambda state, y: y, True),
}


@row("H8", "I2")
@pytest.mark.parametrize("name", STORED)
def test_backward_that_would_find_what_was_written_afterwards_raises(name: str):
    assert_output_as_torch(STORED[name])
    net = jaxfn.from_torch(Writes(STORED[name]))
    with pytest.raises(jaxfn.TranslationError, match="Stores.backward uses the new value, after an in-place update"):
        jax.grad(lambda x: net.apply(net.parameters, net.buffers, x)[0].sum())(X)


@row("H8", "I2")
def test_a_copy_that_is_stored_may_be_written_to_afterwards():
    def copied(state, y):
        return state.clone()

    def code(module, x):
        return write_to_state(module, x, copied) + Stores.apply(x, module.average, copied)

    for result, expected in zip(ours(code, X), torchs(code, X), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-6)


class WritesInBackward(Base):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x * state

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.state.mul_(2), None


@row("H8", "I2")
def test_a_backward_that_writes_to_a_buffer_raises():
    net = jaxfn.from_torch(Writes(lambda module, x: WritesInBackward.apply(x, module.average)))
    net.apply(net.parameters, net.buffers, X)
    with pytest.raises(jaxfn.TranslationError, match="WritesInBackward.backward mutates input 1 of the call"):
        jax.grad(lambda x: net.apply(net.parameters, net.buffers, x)[0].sum())(X)


# --- Statistics.


def statistics_used(module, x):
    module.norm(x)
    return 2 * x + 3 * module.norm.running_mean[:, None] + module.norm.running_var[:, None]


def evaluation_after_training(module, x):
    y = module.norm(x)
    module.norm.eval()
    z = module.norm(x * x)
    module.norm.train()
    return y + z


@row("I2")
@pytest.mark.parametrize("code", [statistics_used, evaluation_after_training])
def test_running_statistics_have_no_derivative(code: Any):
    def Normalizes():
        return Net(code, norm=nn.BatchNorm1d(4, momentum=0.3))

    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    module, leaf = Normalizes(), torch.tensor(x, requires_grad=True)
    module(leaf).square().sum().backward()
    net = jaxfn.from_torch(Normalizes())

    def loss(x):
        y, buffers = net.apply(net.parameters, net.buffers, x)
        return jnp.square(y).sum() + sum(map(jnp.sum, jax.tree.leaves(buffers)))

    np.testing.assert_allclose(jax.grad(loss)(x), leaf.grad, rtol=1e-4, atol=1e-5)


@row("I2")
def test_updates_by_data_visit_each_node_of_autograd_once(monkeypatch):
    counts, saved_values = {5: 0, 10: 0}, detach.saved_values

    def count(node):
        counts[module.num_updates] += 1
        return saved_values(node)

    def updates(module, x):
        for _ in range(module.num_updates):
            x = torch.sin(module.weight * x)
            total = torch.zeros(3)
            total.data.add_(1)
            x = x + total
        return x

    monkeypatch.setattr(detach, "saved_values", count)
    for num_updates in counts:
        module = Net(updates, weight=nn.Parameter(torch.ones(3)), num_updates=num_updates)
        np.testing.assert_allclose(jaxfn.from_torch(module)(X), module(torch.tensor(X)).detach(), rtol=1e-6)
    assert 10 < counts[10] < 2.5 * counts[5]
