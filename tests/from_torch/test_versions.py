"""from_torch on the torch that is installed: what it relies on is tried, and torch is left as it was found."""

import collections.abc
import copy
import functools
import gc
import inspect
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import cells, row

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from jaxfn._torch.convert import self_test  # noqa: E402
from tests.support.libraries import assert_derivatives_as_torch  # noqa: E402
from tests.support.torch_code import Net, as_functions, function_of, rule  # noqa: E402


@pytest.fixture
def untested_torch(monkeypatch):
    """A torch that jaxfn was not tested on, and that from_torch has not tested yet in this process."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    self_test._run_self_test.cache_clear()
    yield
    self_test._run_self_test.cache_clear()


def squared(slope):
    return function_of(lambda x: x * x, slope)


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
def test_no_self_test_runs_on_a_tested_version(untested_torch, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(self_test, "known_answers", lambda: pytest.fail("the self-test ran"))
    jaxfn.from_torch(Square)


@row("H11")
@pytest.mark.parametrize("version", ["2.9.1", "2.14.0", "2.16.0a0+git123", "3.8.0"])
def test_the_self_test_runs_once_on_another_version(untested_torch, monkeypatch, version):
    runs = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(self_test, "known_answers", lambda: runs.append(version) or {})
    jaxfn.from_torch(Square)
    jaxfn.from_torch(Square)
    assert runs == [version]


@row("H11")
def test_all_answers_that_differ_are_named(untested_torch, monkeypatch):
    def shift(answer):
        return answer._replace(expected=np.asarray(answer.expected) + 1)

    shifted = {name: shift(answer) for name, answer in self_test.known_answers().items()}
    monkeypatch.setattr(self_test, "known_answers", lambda: shifted)
    for _ in range(2):  # and the next call raises too
        with pytest.raises(TranslationError, match=r"torch 2\.99\.0, which differs .* Install torch 2\.8, ") as caught:
            jaxfn.from_torch(Square)
        assert all(
            f"{name} ({np.asarray(shifted[name].expected).tolist()} expected" in str(caught.value) for name in shifted
        )


@row("H11")
def test_an_error_in_the_self_test_is_named_too(untested_torch, monkeypatch):
    def fail(x):
        raise AttributeError("torch has lost it")

    name, answer = next(iter(self_test.known_answers().items()))
    monkeypatch.setattr(self_test, "known_answers", lambda: {name: answer._replace(compute=fail)})
    with pytest.raises(TranslationError, match=rf"{name} \(AttributeError: torch has lost it\)"):
        jaxfn.from_torch(Square)


@row("H11")
@pytest.mark.parametrize("around", ["jit of grad of vmap", "a jaxpr", "inference mode"])
def test_the_installed_torch_passes_the_self_test_inside_any_transformation(untested_torch, around):
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
        with torch.inference_mode():
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


# Its gradient is another one where an output has none.
Undefined = rule(
    lambda x: (2 * x, x * x),
    lambda g, h, x: (7 * x if g is None else 3 * g) + (11 * x if h is None else x * h),
    materialize=False,
)


round_taken, separate_taken, undefined_taken = Round.apply, SeparateRound.apply, Undefined.apply

APPLIED = {
    "with an option": lambda x: Round.apply(x, 2),
    "by super": lambda x: RoundBySuper.apply(x),
    "taken before, with an option": lambda x: round_taken(x, 2),
    "taken before, with setup_context": lambda x: separate_taken(x),
    "taken before, with setup_context and an option": lambda x: separate_taken(x, 2),
    "taken before, two outputs": lambda x: sum(undefined_taken(x)),
    "the first of two outputs": lambda x: Undefined.apply(x)[0],
    "taken before, the second of two outputs": lambda x: undefined_taken(x)[1],
    "taken before, twice": lambda x: round_taken(round_taken(x) * 1.3),
}


def inside_forward(apply):
    return rule(lambda x: x.clone(), lambda g, y: g * y, lambda inputs, _: [apply(*inputs)])


def inside_backward(apply):
    return squared(lambda x: 2 * apply(x))


def inside_autograd(apply):
    return squared(by_autograd(lambda x: apply(x) * x))


@row("H11")
@cells(
    "where, how",
    [
        (inside_forward, "with an option"),
        (inside_backward, "by super"),
        (inside_autograd, "taken before, with an option"),
        (inside_forward, "taken before, with setup_context"),
        (inside_backward, "taken before, with setup_context and an option"),
        (inside_autograd, "taken before, two outputs"),
        (inside_forward, "the first of two outputs"),
        (inside_autograd, "taken before, the second of two outputs"),
        (inside_backward, "taken before, twice"),
    ],
    [inside_forward, inside_backward, inside_autograd],
    APPLIED,
)
def test_a_function_that_another_one_applies_has_its_rule(where, how):
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
    """A Function that mutates its input to save memory, as published ones do."""

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


Marking = rule(lambda x: (2 * x, x.round()), lambda g, *_: 3 * g, marked=1)


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
    apply = taken if is_taken else function.apply
    weight = torch.nn.Parameter(torch.tensor([1.7, 0.6, -0.4]))
    module = Net(lambda self, x: code(apply, self.w * x, self).sum(), w=weight)
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
@pytest.mark.usefixtures("double_precision")
@cells(
    "where, how",
    [
        ("plainly", "with an option"),
        ("plainly", "taken before, the second of two outputs"),
        ("under no_grad", "taken before, with setup_context"),
        ("with gradients again", "by super"),
        ("in a checkpoint", "taken before, with setup_context and an option"),
        ("after what is detached", "taken before, two outputs"),
        ("after what is detached", "the first of two outputs"),
        ("in autograd", "taken before, twice"),
        ("in autograd", "taken before, with an option"),
    ],
    IN_A_MODULE,
    APPLIED,
)
def test_a_function_that_a_module_applies_has_its_rule(where, how):
    module = Net(
        lambda self, x: (IN_A_MODULE[where](APPLIED[how], self.w * x) * x).sum() + x.sum(),
        w=torch.nn.Parameter(torch.tensor([1.7, 0.6], dtype=torch.float64)),
    )
    assert_derivatives_as_torch(*as_functions(module), [np.array([2.3, -0.8]), np.array([1.7, 0.6])])


def masked(x):
    mask = torch.rand_like(x) + 0.5
    return x * mask, mask


Masked = rule(masked, lambda g, _, mask: g * mask, lambda inputs, outputs: outputs[1:])
masked_taken = Masked.apply
# A call, and the ratio of its slope and its value.
NOT_REPEATABLE = {
    "draws": (lambda x: Masked.apply(x)[0], lambda x: 1 / x),
    "draws, taken before": (lambda x: masked_taken(x)[0], lambda x: 1 / x),
    "mutates": (lambda x: InPlace.apply(x.clone()), lambda x: 5.0),
    "mutates, taken before": (lambda x: in_place_taken(x.clone()), lambda x: 5.0),
}


@row("H11")
@pytest.mark.filterwarnings("ignore:.*mark_dirty on a JAX array")
@pytest.mark.parametrize("how", NOT_REPEATABLE)
def test_a_call_that_cannot_be_repeated_raises_where_apply_is_compiled_and_was_taken_before(how):
    apply, ratio = NOT_REPEATABLE[how]

    def deviation(x):
        """The slope less what it should be, which is zero where both are of one call."""
        with torch.enable_grad():
            z = x.clone().requires_grad_()
            y = apply(z)
            (slope,) = torch.autograd.grad(y.sum(), z)
        return slope - y.detach() * ratio(x)

    ours = jaxfn.from_torch(squared(deviation)).apply
    options = {"key": jax.random.key(0)} if how.startswith("draws") else {}
    gradient = jax.grad(lambda x: ours(x, **options).sum())
    at = jnp.array([2.3, -0.8])
    if how.endswith("taken before") and torch.__version__ >= (2, 15):  # from which on `apply` is compiled
        with pytest.raises(TranslationError, match=f"{how.partition(',')[0]}.*looked up before.*Write \\w+.apply"):
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

    def fail(x):
        raise ValueError("somewhere in the user's code")

    with pytest.raises(ValueError, match="somewhere"):
        jaxfn.from_torch(function_of(fail)).apply(jnp.ones(2))
    assert attributes_of_torch() == before


class Holder:
    scale = None


@functools.lru_cache
def triangle(n):
    return torch.tril(torch.ones(n, n))


@row("H12")
def test_constants_that_code_stores_are_plain_tensors_afterwards():
    stored = {}
    layer = torch.nn.Linear(3, 3)

    def masked(x):
        Holder.scale = torch.tensor(2.0, requires_grad=True)
        stored["range"] = [torch.arange(4.0)[1:]]
        layer.count = torch.zeros(3, dtype=torch.int64) + 1
        return x * triangle(3) * Holder.scale

    function = function_of(masked, slope=lambda x: triangle(3) * Holder.scale * 10)
    f = jaxfn.from_torch(function).apply
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    for _ in range(2):
        np.testing.assert_allclose(f(x), x * np.tril(np.full((3, 3), 2)))
        np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), np.tril(np.full((3, 3), 20)))
    for tensor in (triangle(3), Holder.scale, *stored["range"], layer.count):
        assert type(tensor) is torch.Tensor
    assert torch.equal(triangle(3) @ torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
    (Holder.scale * 3).backward()
    assert Holder.scale.grad == 3
    assert stored["range"][0].tolist() == [1, 2, 3] and (layer.count * 2).tolist() == [2, 2, 2]
    np.testing.assert_allclose(function.apply(torch.tensor(x)), f(x))


NEURON = Net(lambda self, x: x)
STORED = []


def store_in_a_module(x):
    NEURON.mem = x * 2


def store_in_a_list(x):
    STORED.append(x * 2)


def store_in_a_closure(x, cell=[]):  # noqa: B006
    cell[:] = [x.sin()]


@row("H12")
@pytest.mark.parametrize("store", [store_in_a_module, store_in_a_list, store_in_a_closure])
def test_a_tensor_of_the_inputs_that_code_stores_raises(store):
    def storing(x):
        store(x)
        return x.clone()

    message = r"Runs.forward stores a tensor .*\(torch.float32\[3\]\), in a global.*ctx.save_for_backward"
    with pytest.raises(TranslationError, match=message):
        jaxfn.from_torch(function_of(storing)).apply(jnp.ones(3))
    if store is store_in_a_module:
        assert type(NEURON.mem) is torch.Tensor and NEURON.mem.is_meta
        function_of(storing).apply(torch.ones(3))
        assert NEURON.mem.tolist() == [2, 2, 2]
    STORED.clear()


def plain_tensors(x):
    return [torch.arange(3.0) * 2, x * 2]


def tensors_with_a_graph(x):
    leaf = torch.ones(3, requires_grad=True)
    with torch.enable_grad():
        return [leaf, (leaf * x).exp()]


def tensors_with_a_graph_in_a_cycle(x):
    """The graph is garbage, and holds what it multiplied by, as torch's own that Python does not see."""
    leaf, doubled = torch.ones(3), x * 2
    with torch.enable_grad():
        cycle = [(torch.ones(3, requires_grad=True) * doubled).grad_fn]
    cycle.append(cycle)
    return [leaf, doubled]


@row("H12")
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("store", [plain_tensors, tensors_with_a_graph, tensors_with_a_graph_in_a_cycle])
def test_what_a_failed_trace_leaves_is_plain(store):
    stored = []

    def failing(x):
        stored.extend(store(x))
        return x if x.sum() > 0 else -x

    with pytest.raises(TranslationError, match="value"):
        jax.jit(jaxfn.from_torch(function_of(failing)).apply)(jnp.ones(3))
    constant, dependent = stored
    assert type(constant) is type(dependent) is torch.Tensor
    assert constant.device.type == "cpu" and dependent.device.type == "meta"
    assert (constant + 1).shape == (3,)


@row("H12")
@pytest.mark.usefixtures("few_objects")
def test_what_code_drops_again_is_not_taken_for_a_tensor_that_it_stores():
    def dropping(x):
        cycle = [x * 2]
        cycle.append(cycle)
        return x * 3

    gc.disable()
    try:
        assert jaxfn.from_torch(function_of(dropping)).apply(2.0) == 6
    finally:
        gc.enable()


@row("H12")
def test_one_thread_traces_and_another_trains():
    """The other thread trains in torch, with separate Functions and distributions that check their parameters."""

    def train():
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

    def slope_of(factor):
        def forward(x):
            torch.distributions.Normal(torch.zeros(()), x.abs() + 1)
            return x * factor

        def backward(g, rounded):
            return g * factor * Round.apply(rounded)

        Scaled = rule(forward, backward, lambda inputs, _: [round_taken(*inputs)])
        return jax.grad(jaxfn.from_torch(Scaled).apply)(2.3)

    with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        training, factor = thread.submit(train), 0
        while not training.done() or factor < 3:
            factor += 1
            assert slope_of(factor) == 2 * factor
        training.result()


@row("H12")
def test_threads_that_trace_concurrently():
    def trace(factor):
        function = inside_backward(lambda x: round_taken(x * factor))
        return [float(jax.grad(jax.grad(jaxfn.from_torch(function).apply))(2.3)) for _ in range(5)]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(trace, (1, 2, 3))) == [[6] * 5, [12] * 5, [18] * 5]


@row("H12")
def test_classes_are_as_ever_to_a_thread_next_to_one_that_traces():
    made = []

    def inspect_classes():
        class Meta(type):
            pass

        made.extend([Meta, Meta("Made", (), {})])
        assert inspect.getattr_static(type(int), "mro") and pickle.loads(pickle.dumps(type(int))) is type
        assert isinstance(int, collections.abc.Hashable) and copy.deepcopy(type(Meta)) is type
        return type(int).__mro__, type(made)

    def run(x):
        with ThreadPoolExecutor(1) as thread:
            made.append(thread.submit(inspect_classes).result())
        return x * 2

    assert jaxfn.from_torch(function_of(run)).apply(2.0) == 4
    meta, class_, (mro, of_list) = made[:3]
    assert mro == (type, object) and of_list is list
    assert type(meta) is type and type(class_) is meta and meta.__mro__ == (meta, type, object)


@row("H14")
@pytest.mark.skipif(torch.__version__ >= (2, 13), reason="torch 2.13 and newer trace them")
def test_a_custom_operation_raises_on_a_torch_that_does_not_trace_it():
    double = torch.library.custom_op(
        "jaxfn_test_versions::double", lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    with pytest.raises(TranslationError, match="with its own autograd, which needs torch 2.13 or newer"):
        jaxfn.from_torch(lambda x: double(x))(jnp.ones(3))
