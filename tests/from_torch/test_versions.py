"""from_torch on the torch that is installed: what it relies on is tried, and torch is left as it was found."""

import functools
import gc
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import row

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn._torch import _compat  # noqa: E402
from jaxfn._torch.convert import self_test as _self_test  # noqa: E402
from jaxfn._torch.values.errors import TranslationError  # noqa: E402


@pytest.fixture
def untested_torch(monkeypatch):
    """A torch that jaxfn was not tested on, and that from_torch has not tested yet in this process."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    _self_test._run_self_test.cache_clear()
    yield
    _self_test._run_self_test.cache_clear()


def squared(slope):
    """A Function that squares, with this derivative."""

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return g * slope(ctx.saved_tensors[0])

    return Outer


def by_autograd(function):
    """The derivative of a function of tensors, by torch."""

    def slope(x):
        with torch.enable_grad():
            z = x.clone() if x.requires_grad else x.clone().requires_grad_()
            return torch.autograd.grad(function(z).sum(), z, create_graph=True)[0]

    return slope


Square = squared(lambda x: 2 * x)


@row("H11")
@pytest.mark.parametrize("version", ["2.8.0", "2.13.1+cpu", "2.15.0"])
def test_a_tested_version_takes_no_self_test(untested_torch, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(_self_test, "known_answers", lambda: pytest.fail("the self-test ran"))
    jaxfn.from_torch(Square)


@row("H11")
@pytest.mark.parametrize("version", ["2.9.1", "2.14.0", "2.16.0a0+git123", "3.8.0"])
def test_another_version_is_tested_once(untested_torch, monkeypatch, version):
    runs = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(_self_test, "known_answers", lambda: runs.append(version) or {})
    jaxfn.from_torch(Square)
    jaxfn.from_torch(Square)
    assert runs == [version]


@row("H11")
@pytest.mark.parametrize("name", _self_test.known_answers())
def test_the_installed_torch_gives_each_known_answer(name):
    answer = _self_test.known_answers()[name]
    np.testing.assert_allclose(answer.compute(jnp.array(answer.at)), answer.expected, rtol=1e-5, atol=1e-6)


@row("H11")
def test_all_answers_that_differ_are_named(untested_torch, monkeypatch):
    def shift(answer):
        expected = np.asarray(answer.expected)
        return answer._replace(expected=~expected if expected.dtype == bool else expected + 1)

    shifted = {name: shift(answer) for name, answer in _self_test.known_answers().items()}
    monkeypatch.setattr(_self_test, "known_answers", lambda: shifted)
    for _ in range(2):  # and the next call is refused too
        with pytest.raises(TranslationError, match=r"torch 2\.99\.0, which differs .* Install torch 2\.8, ") as caught:
            jaxfn.from_torch(Square)
        assert all(
            f"{name} ({np.asarray(shifted[name].expected).tolist()} expected" in str(caught.value) for name in shifted
        )


@row("H11")
def test_an_error_in_the_self_test_is_named_too(untested_torch, monkeypatch):
    def fail(x):
        raise AttributeError("torch has lost it")

    answers = {"a draw": _self_test.known_answers()["a draw"]._replace(compute=fail)}
    monkeypatch.setattr(_self_test, "known_answers", lambda: answers)
    with pytest.raises(TranslationError, match=r"a draw \(AttributeError: torch has lost it\)"):
        jaxfn.from_torch(Square)


@row("H11")
@pytest.mark.parametrize("around", ["jit of grad of vmap", "a jaxpr", "no_grad", "inference mode"])
def test_the_self_test_runs_inside_any_transformation(untested_torch, around):
    """It leaves nothing in the jaxpr that is being traced, and needs gradients whatever is switched off."""

    def square(x):
        return jaxfn.from_torch(Square).apply(x)

    if around == "a jaxpr":
        first, second = (str(jax.make_jaxpr(square)(jnp.float32(1))) for _ in range(2))
        assert first == second
    elif around == "jit of grad of vmap":
        gradient = jax.jit(jax.grad(lambda x: jax.vmap(square)(x).sum()))
        np.testing.assert_array_equal(gradient(jnp.arange(3.0)), [0, 2, 4])
    else:
        with torch.no_grad() if around == "no_grad" else torch.inference_mode():
            np.testing.assert_array_equal(square(jnp.arange(3.0)), [0, 1, 4])


@row("H11")
def test_torch_that_is_too_old(untested_torch, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(TranslationError, match="needs torch 2.8 or newer, and this is 2.7.1"):
        jaxfn.from_torch(Square)


# ----------------------------------------------------------------------------------------- Functions inside Functions


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale=1):
        ctx.scale = scale
        return x.round() * scale

    @staticmethod
    def backward(ctx, grad_output):
        return 3 * ctx.scale * grad_output, None


class SeparateRound(torch.autograd.Function):
    @staticmethod
    def forward(x, scale=1):
        return x.round() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1] if len(inputs) > 1 else 1

    @staticmethod
    def backward(ctx, grad_output):
        return (3 * ctx.scale * grad_output, None)[: len(ctx.needs_input_grad)]


class RoundBySuper(Round):
    @classmethod
    def apply(cls, *args):
        return super().apply(*args)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return (x * y).round(), x + y

    @staticmethod
    def backward(ctx, of_rounded, of_sum):
        return 5 * of_rounded, 7 * of_sum


class Undefined(torch.autograd.Function):
    """Its gradient is another one where an output has none."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return 2 * x, x * x

    @staticmethod
    def backward(ctx, of_double, of_square):
        (x,) = ctx.saved_tensors
        return (7 * x if of_double is None else 3 * of_double) + (11 * x if of_square is None else x * of_square)


round_taken, separate_taken, both_taken = Round.apply, SeparateRound.apply, Both.apply
undefined_taken = Undefined.apply


def both(x, apply):
    rounded, total = apply(x, 3 * x)
    return 2 * rounded + total


APPLIED = {
    "by attribute": lambda x: Round.apply(x),
    "with an option": lambda x: Round.apply(x, 2),
    "by super": lambda x: RoundBySuper.apply(x),
    "taken before": lambda x: round_taken(x),
    "taken before, with an option": lambda x: round_taken(x, 2),
    "taken before, with setup_context": lambda x: separate_taken(x),
    "taken before, with setup_context and an option": lambda x: separate_taken(x, 2),
    "two outputs": lambda x: both(x, Both.apply),
    "taken before, two outputs": lambda x: both(x, both_taken),
    "the first of two outputs": lambda x: Undefined.apply(x)[0],
    "taken before, the second of two outputs": lambda x: undefined_taken(x)[1],
    "taken before, twice": lambda x: round_taken(round_taken(x) * 1.3),
}


def inside_forward(apply):
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = apply(x)
            ctx.save_for_backward(x, y)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[1]

    return Outer


def inside_backward(apply):
    return squared(lambda x: 2 * apply(x))


def inside_autograd(apply):
    return squared(by_autograd(lambda x: apply(x) * x))


@row("H11")
@pytest.mark.parametrize("how", APPLIED)
@pytest.mark.parametrize("where", [inside_forward, inside_backward, inside_autograd])
def test_a_function_that_another_one_applies_keeps_its_rule(where, how):
    function = where(APPLIED[how])
    x = torch.tensor([2.3, -0.8], requires_grad=True)
    y = function.apply(x)
    if where is inside_forward:  # what it saved there has no derivative in torch
        slope = APPLIED[how](x)
    else:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    ours = jaxfn.from_torch(function).apply
    at = jnp.array([2.3, -0.8])
    np.testing.assert_allclose(ours(at), y.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(at), slope.detach().numpy(), rtol=1e-5)
    second = jax.grad(lambda x: jax.grad(lambda x: ours(x).sum())(x).sum())
    np.testing.assert_allclose(second(at), curvature.numpy(), rtol=1e-5)


def under_no_grad(apply, x):
    with torch.no_grad():
        return apply(x)


def with_gradients_again(apply, x):
    with torch.no_grad(), torch.enable_grad():
        return apply(x)


IN_A_MODULE = {
    "plainly": lambda apply, x: apply(x),
    "under no_grad": lambda apply, x: under_no_grad(apply, x) * x,
    "with gradients again": with_gradients_again,
    "in a checkpoint": lambda apply, x: torch.utils.checkpoint.checkpoint(apply, x, use_reentrant=False),
    "after what is detached": lambda apply, x: apply(x.detach()) * x,
    "in autograd": lambda apply, x: torch.autograd.grad(apply(x).sum(), x, create_graph=True)[0] * x + 0 * apply(x),
}


class InPlace(torch.autograd.Function):
    """As published ones are, for memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.clamp_(min=0).mul_(2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return 5 * y * grad_output


class SeparateInPlace(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x.mul_(scale), x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, of_written, of_other):
        return 5 * ctx.scale * of_written + 7 * of_other, None


class Marking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return 2 * x, rounded

    @staticmethod
    def backward(ctx, grad_output, _):
        return 3 * grad_output


class Closing(torch.autograd.Function):
    """Uses a tensor of a module without taking it."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x * module.w

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward(x.detach() * ctx.module.w, grad_output)
        return 3 * grad_output, None


in_place_taken, separate_in_place_taken = InPlace.apply, SeparateInPlace.apply
marking_taken, closing_taken = Marking.apply, Closing.apply


def scale_by_flag(outputs, x):
    y, rounded = outputs
    return y * (1.0 if rounded.requires_grad else 10.0) + rounded * x


def written_and_used(apply, x):
    y = x * 3
    return apply(y) * y


def written_without_gradients(apply, x):
    y = x * 3
    with torch.no_grad():
        z = apply(y)
    return z * x + y


# What is done in a module to a tensor that depends on a parameter, by `apply` and by one that was taken before.
BY_BOTH = {
    "in place": (lambda apply, x, _: apply(x) * 3, InPlace, in_place_taken),
    "in place, and used": (lambda apply, x, _: written_and_used(apply, x), InPlace, in_place_taken),
    "in place, no gradients": (lambda apply, x, _: written_without_gradients(apply, x), InPlace, in_place_taken),
    "in place, in a checkpoint": (
        lambda apply, x, _: torch.utils.checkpoint.checkpoint(lambda y: apply(y * 2), x, use_reentrant=False),
        InPlace,
        in_place_taken,
    ),
    "in place, two outputs": (lambda apply, x, _: sum(apply(1 * x, 2)) * x, SeparateInPlace, separate_in_place_taken),
    "a mark": (lambda apply, x, _: scale_by_flag(apply(x), x), Marking, marking_taken),
    "a tensor of the module": (lambda apply, x, module: apply(x, module) * x, Closing, closing_taken),
}


@row("H11", "I2", "I5")
@pytest.mark.parametrize("is_taken", [False, True], ids=["by attribute", "taken before"])
@pytest.mark.parametrize("name", BY_BOTH)
def test_marks_and_tensors_of_a_module_are_seen_however_it_is_applied(name, is_taken):
    code, function, taken = BY_BOTH[name]

    class Applies(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.7, 0.6, -0.4]))

        def forward(self, x):
            return code(taken if is_taken else function.apply, self.w * x, self).sum()

    module = Applies()
    x = torch.tensor([1.3, -0.7, 0.4], requires_grad=True)
    value = module(x)
    value.backward()
    net = jaxfn.from_torch(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*mark_dirty on a JAX array")
        ours, (of_x, of_parameters) = jax.value_and_grad(lambda x, p: net.apply(p, {}, x)[0], (0, 1))(
            jnp.array([1.3, -0.7, 0.4]), net.parameters
        )
    np.testing.assert_allclose(ours, value.item(), rtol=1e-5)
    np.testing.assert_allclose(of_x, x.grad, rtol=1e-5)
    np.testing.assert_allclose(of_parameters["w"], module.w.grad, rtol=1e-5)


@row("H11", "I2", "I3")
@pytest.mark.parametrize("how", APPLIED)
@pytest.mark.parametrize("where", IN_A_MODULE)
def test_a_function_that_a_module_applies_keeps_its_rule(where, how):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.7, 0.6]))

        def forward(self, x):
            return (IN_A_MODULE[where](APPLIED[how], self.w * x) * x).sum() + x.sum()

    module = Scaled()
    x = torch.tensor([2.3, -0.8], requires_grad=True)
    value = module(x)
    slopes = torch.autograd.grad(value, (x, module.w), create_graph=True)
    curvature = torch.autograd.grad(slopes[0].sum() + slopes[1].sum(), x)[0]
    net = jaxfn.from_torch(module)

    def ours(at, parameters):
        return net.apply(parameters, {}, at)[0]

    at = jnp.array([2.3, -0.8])
    of_x, of_parameters = jax.grad(ours, (0, 1))(at, net.parameters)
    np.testing.assert_allclose(ours(at, net.parameters), value.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(of_x, slopes[0].detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(of_parameters["w"], slopes[1].detach().numpy(), rtol=1e-5)

    def total(at):
        of_x, of_parameters = jax.grad(ours, (0, 1))(at, net.parameters)
        return of_x.sum() + of_parameters["w"].sum()

    np.testing.assert_allclose(jax.grad(total)(at), curvature.numpy(), rtol=1e-5)


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) + 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


masked_taken, doubled_taken = Masked.apply, Doubled.apply
NOT_REPEATABLE = {
    "draws": (lambda x: Masked.apply(x), masked_taken),
    "writes": (lambda x: Doubled.apply(x.clone()), lambda x: doubled_taken(x.clone())),
}


@row("H11")
@pytest.mark.filterwarnings("ignore:.*mark_dirty on a JAX array")
@pytest.mark.parametrize("kind", NOT_REPEATABLE)
@pytest.mark.parametrize("is_taken_before", [False, True])
def test_a_call_that_cannot_be_made_again_is_right_or_refused(is_taken_before, kind):
    apply = NOT_REPEATABLE[kind][is_taken_before]

    def deviation(x):
        """Of the slope from the ratio, which is the same for what is linear."""
        with torch.enable_grad():
            z = x.clone().requires_grad_()
            y = apply(z)
            (slope,) = torch.autograd.grad(y.sum(), z)
        return slope - y.detach() / x

    ours = jaxfn.from_torch(squared(deviation)).apply
    options = {"key": jax.random.key(0)} if kind == "draws" else {}
    gradient = jax.grad(lambda x: ours(x, **options).sum())
    at = jnp.array([2.3, -0.8])
    if is_taken_before and _compat.HAS_COMPILED_APPLY:
        with pytest.raises(TranslationError, match=f"{kind}.*looked up before.*Write \\w+.apply"):
            gradient(at)
    else:
        np.testing.assert_allclose(gradient(at), [0, 0], atol=1e-6)


# ----------------------------------------------------------------------------------------- what is left behind


def attributes_of_torch():
    owners = [torch, torch.random, torch.autograd.Function, torch.autograd.function._SingleLevelFunction]
    owners += [torch.autograd.function.FunctionMeta, torch.distributions.Distribution]
    return [dict(vars(owner)) for owner in owners]


@row("H12")
def test_torch_is_as_it_was():
    before = attributes_of_torch()
    jax.grad(lambda x: jaxfn.from_torch(Square).apply(x))(2.0)

    class Failing(Square):
        @staticmethod
        def forward(ctx, x):
            raise ValueError("somewhere in the user's code")

    with pytest.raises(ValueError, match="somewhere"):
        jaxfn.from_torch(Failing).apply(jnp.ones(2))
    assert attributes_of_torch() == before


class Kept:
    scale = None


@functools.lru_cache
def triangle(n):
    return torch.tril(torch.ones(n, n))


@row("H12")
def test_constants_that_code_keeps_are_plain_tensors_afterwards():
    kept = {}
    layer = torch.nn.Linear(3, 3)

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            Kept.scale = torch.tensor(2.0, requires_grad=True)
            kept["range"] = [torch.arange(4.0)[1:]]
            layer.count = torch.zeros(3, dtype=torch.int64) + 1
            return x * triangle(3) * Kept.scale

        @staticmethod
        def backward(ctx, g):
            return g * triangle(3) * Kept.scale * 10

    f = jaxfn.from_torch(Masked).apply
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    for _ in range(2):
        np.testing.assert_allclose(f(x), x * np.tril(np.full((3, 3), 2)))
        np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), np.tril(np.full((3, 3), 20)))
    for tensor in (triangle(3), Kept.scale, *kept["range"], layer.count):
        assert type(tensor) is torch.Tensor
    assert torch.equal(triangle(3) @ torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
    (Kept.scale * 3).backward()
    assert Kept.scale.grad == 3 and kept["range"][0].tolist() == [1, 2, 3] and (layer.count * 2).tolist() == [2, 2, 2]
    expected = Masked.apply(torch.tensor(x))
    np.testing.assert_allclose(expected, f(x))


@row("H12")
def test_a_tensor_of_the_inputs_that_code_keeps_is_refused():
    neuron = torch.nn.Module()
    neuron.mem = None

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            neuron.mem = x * 2
            return (x > 1).to(x.dtype)

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(
        TranslationError, match=r"Spike.forward keeps a tensor .* in a Module.mem.*ctx.save_for_backward"
    ):
        jaxfn.from_torch(Spike).apply(jnp.ones(3))
    assert type(neuron.mem) is torch.Tensor and neuron.mem.is_meta
    neuron.mem = None
    Spike.apply(torch.ones(3))
    assert neuron.mem.tolist() == [2, 2, 2]


def kept_in_list(x):
    KEPT.append(x * 2)


def kept_in_closure(x, cell=[]):  # noqa: B006
    cell[:] = [x.sin()]


KEPT = []


@row("H12")
@pytest.mark.parametrize(("keep", "place"), [(kept_in_list, "test_versions.KEPT"), (kept_in_closure, "a list")])
def test_the_place_is_named(keep, place):
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            keep(x)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(TranslationError) as caught:
        jaxfn.from_torch(Keeping).apply(jnp.ones(3))
    assert place in str(caught.value)
    KEPT.clear()


def keep_plainly(x):
    return [torch.arange(3.0) * 2, x * 2]


def keep_with_a_graph(x):
    leaf = torch.ones(3, requires_grad=True)
    with torch.enable_grad():
        return [leaf, (leaf * x).exp()]


def keep_with_a_graph_in_a_cycle(x):
    """The graph is garbage, and holds what it multiplied by, as torch's own that Python does not see."""
    leaf, made = torch.ones(3), x * 2
    with torch.enable_grad():
        cycle = [(torch.ones(3, requires_grad=True) * made).grad_fn]
    cycle.append(cycle)
    return [leaf, made]


@row("H12")
@pytest.mark.parametrize("keep", [keep_plainly, keep_with_a_graph, keep_with_a_graph_in_a_cycle])
def test_what_a_refused_trace_leaves_is_plain(keep):
    kept = []

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept.extend(keep(x))
            return x if x.sum() > 0 else -x

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(TranslationError, match="value"):
        jaxfn.from_torch(Refused).apply(jnp.ones(3))
    constant, dependent = kept
    assert type(constant) is type(dependent) is torch.Tensor
    assert constant.device.type == "cpu" and dependent.device.type == "meta"
    assert (constant + 1).shape == (3,)


@row("H12")
def test_what_code_drops_again_is_no_leftover():
    class Dropping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            cycle = [x * 2]
            cycle.append(cycle)
            return x * 3

        @staticmethod
        def backward(ctx, g):
            return g * 3

    gc.disable()
    try:
        assert jax.grad(jaxfn.from_torch(Dropping).apply)(2.0) == 3
    finally:
        gc.enable()


@row("H12")
def test_one_thread_traces_and_another_trains():
    """In torch, with Functions of its own and distributions that check their parameters."""
    failures = []
    done = threading.Event()

    def train():
        try:
            for step in range(1000):
                w = torch.tensor([2.3, 0.7], requires_grad=True)
                loss = round_taken(Square.apply(w)).sum() + Round.apply(w, 2).sum()
                (slope,) = torch.autograd.grad(loss, w)
                np.testing.assert_allclose(slope, 3 * 2 * w.detach() + 6)
                assert torch.is_grad_enabled()
                torch.manual_seed(step)
                if step % 10 == 0:
                    with pytest.raises(ValueError, match="scale"):
                        torch.distributions.Normal(0.0, torch.tensor(-1.0))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    def slope_of(factor):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                torch.distributions.Normal(torch.zeros(()), x.abs() + 1)
                ctx.save_for_backward(round_taken(x))
                return x * factor

            @staticmethod
            def backward(ctx, g):
                return g * factor * Round.apply(ctx.saved_tensors[0])

        return jax.grad(jaxfn.from_torch(Scaled).apply)(2.3)

    thread = threading.Thread(target=train)
    with warnings.catch_warnings():
        thread.start()
        factor = 0
        while not done.is_set() or factor < 3:
            factor += 1
            assert slope_of(factor) == 2 * factor
        thread.join()
    assert not failures, failures


@row("H12")
def test_threads_that_trace_side_by_side():
    failures = []

    def trace(factor):
        try:
            for _ in range(5):
                function = inside_backward(lambda x: round_taken(x * factor))
                assert jax.grad(jax.grad(jaxfn.from_torch(function).apply))(2.3) == 6 * factor
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=trace, args=(factor,)) for factor in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@row("H14")
@pytest.mark.skipif(torch.__version__ >= (2, 13), reason="torch 2.13 and newer trace them")
def test_a_custom_operation_is_refused_on_a_torch_that_does_not_trace_it():
    double = torch.library.custom_op(
        "jaxfn_test_versions::double", lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    with pytest.raises(TranslationError, match="with its own autograd, which needs torch 2.13 or newer"):
        jaxfn.from_torch(lambda x: double(x))(jnp.ones(3))
