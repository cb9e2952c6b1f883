"""Row H2: idioms of published torch Functions that a trace could get wrong, compared with torch on equal numbers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row
from tests.support.runs import noting_runs

torch = pytest.importorskip("torch")

from tests.support.beside_torch import assert_as_torch  # noqa: E402
from tests.support.libraries import assert_derivatives_as_torch  # noqa: E402
from tests.support.torch_code import as_functions, function_of, rule  # noqa: E402

X = np.random.default_rng(0).standard_normal(5).astype(np.float32)


# --- A graph of autograd's that forward stores for backward to differentiate.


def storing_graph(code: Any, by_backward: bool = False) -> Any:
    class StoresGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = code(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, grad_output):
            if by_backward:
                ctx.y.backward(grad_output)
                return ctx.x.grad
            return torch.autograd.grad(ctx.y, ctx.x, grad_output)[0]

    return StoresGraph


def graph_and_another(inputs, _):
    with torch.enable_grad():
        leaf = inputs[0].detach().requires_grad_()
        return leaf, leaf.sin() * 2, leaf.detach().cos()


# A graph stored in saved tensors, next to tensors without a graph.
SavedGraph = rule(
    lambda x: x.sin() * 2,
    lambda g, leaf, y, cosine: torch.autograd.grad(y, leaf, g)[0] + 0 * cosine,
    graph_and_another,
)


@row("H2")
def test_second_derivative_through_a_stored_graph():
    function = jaxfn.from_torch(storing_graph(lambda x: x**3))
    second = jax.vmap(jax.grad(jax.grad(function.apply)))(X)
    np.testing.assert_allclose(second, 6 * X, rtol=1e-5)


@row("H5")
def test_a_stored_graph_with_random_numbers_raises():
    noisy = storing_graph(lambda x: x * torch.rand_like(x))
    with pytest.raises(jaxfn.TranslationError, match="StoresGraph.forward draws random .* stores .* graph on ctx"):
        jaxfn.from_torch(noisy).apply(X, key=jax.random.key(0))


# --- Sizes.


class FromSize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = x.size()
        return x.new(size).zero_() + x.sum()

    @staticmethod
    def backward(ctx, grad_output):
        assert isinstance(ctx.size, torch.Size)
        return grad_output.new(ctx.size).fill_(1.0) * grad_output.sum(), None


# --- Functions inside Functions.


class Flip(torch.autograd.Function):
    """Its backward is itself."""

    forward = staticmethod(lambda ctx, x: x.flip(0) * 2)
    backward = staticmethod(lambda ctx, gradient: Flip.apply(gradient))


def fail(*_):
    raise RuntimeError("not to be called")


NeverDifferentiated = rule(torch.round, fail)
AppliesIt = function_of(lambda x: NeverDifferentiated.apply(x) + x * 0)


class Roll(torch.autograd.Function):
    """Its backward applies a Function whose backward applies this one."""

    forward = staticmethod(lambda ctx, x: 3 * x.roll(1, 0))
    backward = staticmethod(lambda ctx, gradient: RollBack.apply(gradient))


class RollBack(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 3 * x.roll(-1, 0))
    backward = staticmethod(lambda ctx, gradient: Roll.apply(gradient))


class Applies(torch.autograd.Function):
    """Applies another Function, and has an equal backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return function.apply(x)

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.function.backward(ctx, grad_output), None


class Layer(torch.nn.Module):
    """Applies a Function, with more arguments where it has some, and multiplies by the result and by a weight."""

    def __init__(self, function: Any, *args: Any) -> None:
        super().__init__()
        self.function, self.args = function, args
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, 5, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return x * self.weight * self.function.apply(x, *self.args)


def assert_layer_as_torch(layer: Any) -> None:
    assert_derivatives_as_torch(*as_functions(layer), (np.linspace(-1, 1.5, 5), layer.weight.detach().numpy()))


@row("H8")
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("function", [Flip, Roll])
def test_a_backward_that_applies_itself(function: Any):
    """Directly, inside a Function and inside a module."""
    x, inside = np.linspace(-1, 1.5, 5), jaxfn.from_torch(Applies)
    assert_derivatives_as_torch(jaxfn.from_torch(function).apply, function.apply, [x])
    assert_derivatives_as_torch(lambda x: inside.apply(x, function), lambda x: Applies.apply(x, function), [x])
    assert_layer_as_torch(Layer(function))


@row("H8")
@pytest.mark.parametrize("derivatives", [0, 2])
def test_a_backward_that_applies_itself_is_traced_once_for_each_derivative(derivatives: int):
    """Applies itself again in advance. Traced until Python's recursion limit, it crashed the interpreter."""
    note, traces = noting_runs()

    CountedFlip = rule(lambda x: x.flip(0) * 2, lambda g, _: note("backward") or CountedFlip.apply(g))
    f = jaxfn.from_torch(lambda x: x * CountedFlip.apply(x))
    for _ in range(derivatives):
        f = jax.grad(lambda x, f=f: (f(x) ** 3).sum())
    f(X)
    assert len(traces) <= derivatives + 1


class ScaleByLayer(torch.autograd.Function):
    """Uses a layer's weight, which it does not take as an input, and gives it no gradient; its backward is itself."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        return x * layers[0].weight.detach()

    @staticmethod
    def backward(ctx, grad_output):
        return ScaleByLayer.apply(grad_output, ctx.layers), None


@row("H8", "I5")
@pytest.mark.usefixtures("double_precision")
def test_a_backward_that_applies_itself_and_uses_parameters():
    layers: list[Any] = []
    layers.append(Layer(ScaleByLayer, layers))
    assert_layer_as_torch(layers[0])


class ChangesWhatItStored(torch.autograd.Function):
    """Writes to what the call in its backward stores, which that call's own backward reads in torch."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad_output):
        scale = ctx.scale.clone()
        gradient = ChangesWhatItStored.apply(grad_output, scale)
        scale.mul_(2)
        return gradient, None


@row("H8")
@pytest.mark.usefixtures("double_precision")
def test_a_backward_that_applies_itself_and_writes_to_what_that_call_stores():
    """The first derivative is right. The second is twice as large in torch, and raises."""

    def cubed(x: Any, scale: Any) -> Any:
        return (ChangesWhatItStored.apply(x, scale) ** 3).sum()

    function = jaxfn.from_torch(cubed)
    first = jax.grad(lambda x: function(x, 3.0 + jnp.zeros(5)))
    np.testing.assert_allclose(first(jnp.ones(5)), np.full(5, 81.0))
    with pytest.raises(jaxfn.TranslationError, match="input 1 of the call in ChangesWhatItStored"):
        jax.grad(lambda x: first(x).sum())(jnp.ones(5))


@row("H5")
def test_a_backward_that_draws_while_another_thread_traces_it():
    """Whether the call needs a key is found out for each thread, whatever the other one is tracing."""
    tracing, finished = threading.Event(), threading.Event()

    def backward(g, _):
        if threading.current_thread() is not threading.main_thread():
            tracing.set()
            assert finished.wait(60)
        return g + torch.rand_like(g)

    NoisyGradient = rule(lambda x: x * 1, backward)

    def gradient() -> Any:
        function = jaxfn.from_torch(lambda x: NoisyGradient.apply(x) * 2)
        return jax.grad(lambda x: function(x, key=jax.random.key(0)).sum())(jnp.ones(5))

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(gradient)
        assert tracing.wait(60)
        try:
            drawn = gradient()
        finally:
            finished.set()
        assert (drawn > 2).all() and (drawn < 3).all()
        np.testing.assert_array_equal(other.result(60), drawn)


# --- Numbers written in the code, and external tensors.


Literal = rule(lambda x: x * torch.tensor(2).item(), lambda g, three: g * three.item(), lambda *_: [torch.tensor(3)])


# --- What requires a gradient.


class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.detached, ctx.computed = x.detach(), x * 2
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad_output):
        answers = [ctx.detached.requires_grad, ctx.detached[:1].requires_grad, ctx.computed.requires_grad]
        assert not any(answers)
        assert ctx.saved_tensors[0].requires_grad
        with torch.enable_grad():
            y = (ctx.saved_tensors[0] ** 2).sum()
        return grad_output * 2 + 0 * torch.autograd.grad(y, ctx.saved_tensors[0])[0]


# --- An input that was written to, without a word, and is asked whether it requires a gradient.


class WritesAndAsks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        x *= factor
        ctx.save_for_backward(x, x.contiguous())
        ctx.factor = factor
        return x + 1

    @staticmethod
    def backward(ctx, grad_output):
        written, same = ctx.saved_tensors
        return grad_output * ctx.factor if written.requires_grad and same.requires_grad else None, None


# --- What changes between calls.


@row("H3")
def test_a_number_in_the_code_is_not_an_external_value():
    note, traces = noting_runs()
    function = jaxfn.from_torch(function_of(lambda x: note("forward") or x * torch.tensor(2).item()))
    for _ in range(3):
        function.apply(X)
    assert len(traces) == 1


@row("H2")
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_autocast_is_not_taken_for_another_call(order: tuple[bool, bool]):
    squares = function_of(lambda x: x @ x.t())
    x = np.outer(X, X)
    for enabled in order:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            ours, theirs = jaxfn.from_torch(squares).apply(x), squares.apply(torch.tensor(x))
        assert str(theirs.dtype).removeprefix("torch.") == ours.dtype.name


# --- Autograd inside goes through these.


def with_gradient_inside(code: Any) -> Any:
    """A Function of code that returns a leaf, and what is computed of it."""

    class GradientInside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                leaf, y = code(x.detach())
                (ctx.gradient,) = torch.autograd.grad(y.sum(), leaf)
            return y.detach()

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * ctx.gradient

    return GradientInside


def as_tensors(x):
    leaf = x.requires_grad_()
    return leaf, torch.as_tensor(leaf) * torch.as_tensor(leaf, dtype=torch.float32) * leaf


def tensor_of_tensor(x):
    leaf = torch.tensor(x, requires_grad=True)
    return leaf, leaf**3


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.pow_(3)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * 3 * x**2


def dirty(x):
    leaf = x.requires_grad_()
    inner = leaf * 2
    return leaf, Tripled.apply(inner) * inner


def differentiated_by_vjp(g, x):
    return torch.autograd.functional.vjp(torch.sin, x, g, create_graph=torch.is_grad_enabled())[1]


def sine_without_gradients(x):
    assert not torch.is_grad_enabled()
    return x.sin()


PassesCreateGraph = rule(sine_without_gradients, differentiated_by_vjp)


@row("H2")
def test_a_backward_that_asks_whether_it_is_differentiated():
    x = torch.tensor(X, requires_grad=True)
    (gradient,) = torch.autograd.grad(PassesCreateGraph.apply(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.sum(), x)
    function = jaxfn.from_torch(PassesCreateGraph)
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(function.apply)))(X), expected, rtol=1e-5)
    assert torch.is_grad_enabled()


@row("H15")
def test_a_backward_that_raises_if_it_is_differentiated():
    def backward(g, x):
        if torch.is_grad_enabled():
            raise RuntimeError("first order only")
        return 3 * x**2 * g if (g != 0).any() else torch.zeros_like(x)

    FirstOrder = rule(lambda x: x**3, backward, name="FirstOrder")
    apply, x = jaxfn.from_torch(FirstOrder).apply, np.array(X, np.float32)
    tensor = torch.tensor(x, requires_grad=True)
    (expected,) = torch.autograd.grad(FirstOrder.apply(tensor).sum(), tensor)
    gradient = jax.grad(lambda x: apply(x).sum())
    np.testing.assert_allclose(gradient(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(gradient)(np.stack([x, x])), np.stack([expected] * 2), rtol=1e-6)
    for variables in (lambda x: gradient(x).sum(), lambda w: jax.vjp(apply, x)[1](w)[0].sum()):
        with pytest.raises(
            RuntimeError, match="FirstOrder.backward raises an error where .* RuntimeError: first order"
        ):
            jax.grad(variables)(x)


IDIOMS = {
    "a stored graph, by grad": storing_graph(lambda x: x**3),
    "a stored graph, by backward": storing_graph(lambda x: x**3, by_backward=True),
    "a stored graph of fake quantization": storing_graph(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 0, -2, 1) * x
    ),
    "a saved graph": SavedGraph,
    "a gradient inside, by as_tensor": with_gradient_inside(as_tensors),
    "a gradient inside, by tensor": with_gradient_inside(tensor_of_tensor),
    "a gradient inside, of a dirty tensor": with_gradient_inside(dirty),
    "a size": FromSize,
    "backward applies itself": Flip,
    "a Function inside whose backward fails": AppliesIt,
    "numbers in the code": Literal,
    "what requires a gradient": Asks,
    "what was written to requires a gradient": WritesAndAsks,
    "whether backward is differentiated": PassesCreateGraph,
}


@row("H2", "H3", "H8")
@pytest.mark.filterwarnings("ignore:.*mark_dirty on a JAX array")
@pytest.mark.filterwarnings("ignore:.*mutates one of its inputs")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", IDIOMS)
def test_values_and_gradients_are_those_of_torch(name: str):
    """Eagerly and under `jit`, for a fixed cotangent."""
    function = IDIOMS[name]
    constants = {FromSize: [torch.Size((2, 3))], WritesAndAsks: [3.0]}.get(function, [])
    apply = jaxfn.from_torch(function).apply
    assert_as_torch(lambda x: function.apply(x * 1, *constants), X, convert=lambda _: lambda x: apply(x, *constants))


# --- What cannot be traced is said.


@row("H9")
def test_a_replacement_for_what_is_in_no_module():
    scope: dict[str, Any] = {}
    exec("def hidden(x):\n    return x * 2", scope)
    hidden = scope["hidden"]

    with pytest.raises(
        jaxfn.TranslationError, match="Runs: ops= names <function hidden .* not an attribute of an imported module"
    ):
        jaxfn.from_torch(function_of(lambda x: hidden(x)), ops={hidden: lambda x: x * 3}).apply(X)


# --- Writes by `.data` to what autograd has saved, or has not.


def result_written(x):
    y = x.exp()
    y.data.mul_(2)
    return y


def result_written_after_use(x):
    y = x.tanh()
    z = y.sum()
    y.data.zero_()
    return z


def operand_written_after_use(x):
    y = torch.nn.functional.huber_loss(x, torch.ones_like(x), reduction="none")
    x.data.add_(1)
    return y


def view_of_a_result_written(x):
    y = x.relu()
    y.data.view(-1).add_(1)
    return y


def unsaved_result_written(x):
    y = x.sin()
    y.data.mul_(2)
    return y


def data_exchanged(x):
    y = torch.sigmoid(x)
    y.data = y.data * 2
    return y


def copy_written_before_use(x):
    x = x.clone()
    x.data.clamp_(0.1)
    return x**2


@pytest.mark.parametrize(
    "code", [result_written, result_written_after_use, operand_written_after_use, view_of_a_result_written]
)
@row("I2")
@pytest.mark.usefixtures("few_objects")
def test_data_that_is_saved_for_arguments_and_written_raises(code):
    converted = jaxfn.from_torch(code)
    np.testing.assert_allclose(converted(X), code(torch.tensor(X)), rtol=1e-6)
    for transform in (lambda f: f, jax.jit):
        with pytest.raises(
            jaxfn.TranslationError, match=rf"(?s){code.__name__} mutates by `.data`.*in {code.__name__}"
        ):
            transform(jax.grad(lambda x: converted(x).sum()))(X)


@pytest.mark.parametrize("code", [unsaved_result_written, data_exchanged, copy_written_before_use])
@row("I2")
def test_data_that_is_not_saved_is_written(code):
    x = torch.tensor(X, requires_grad=True)
    (gradient,) = torch.autograd.grad(code(x).sum(), x)
    converted = jaxfn.from_torch(code)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: converted(x).sum()))(X), gradient, rtol=1e-6)
