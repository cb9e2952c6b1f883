"""Python functions of tensors (rows I3 and I6)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.marks import row  # noqa: E402
from tests.support.module_checks import Quantized, X, numbers  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@row("I3")
@pytest.mark.parametrize(
    ("compiled", "other", "message"),
    [
        (lambda x: x[9], torch.nonzero, "nonzero"),  # a mistake of the code's own says less
        (torch.nonzero, lambda x: x[9], "nonzero"),
        (torch.special.airy_ai, lambda x: x[9], "airy_ai"),
        (torch.special.airy_ai, torch.nonzero, "airy_ai"),
    ],
)
def test_code_that_fails_whether_or_not_it_is_compiled(compiled, other, message):
    def code(x):
        return (compiled if torch.compiler.is_compiling() else other)(x)

    with pytest.raises(TranslationError, match=message):
        jaxfn.from_torch(code)(numbers(X))


@row("I6")
@pytest.mark.parametrize(
    "function", [F.gelu, torch.sin, torch.nn.functional.linear, functools.partial(torch.add, alpha=3)]
)
def test_compiled_functions_have_no_signature(function):
    args = [X] if function in (F.gelu, torch.sin) else [X, X]
    got = jaxfn.from_torch(function)(*[jnp.asarray(x.numpy()) for x in args])
    np.testing.assert_allclose(got, function(*args), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError):
        jaxfn.from_torch(function)(jnp.ones(3), wrong=1)


def squared_distance(a, b, *, scale=2.0):
    """A loss."""
    with torch.no_grad():
        norm = (a**2).sum()
    return Quantized.apply((a - b) * scale).pow(2).mean() / norm


@row("I6")
@pytest.mark.parametrize("bound", [False, True], ids=["function", "partial"])
def test_functions_of_tensors(bound, scale=3.0):
    function = functools.partial(squared_distance, scale=scale) if bound else squared_distance
    ours = jaxfn.from_torch(function)
    options = {} if bound else {"scale": scale}
    a, b = X.clone().requires_grad_(), (X.flip(0) * 0.3).requires_grad_()
    value = function(a, b, **options)
    wanted = torch.autograd.grad(value, (a, b))
    x, y = jnp.asarray(numbers(a)), jnp.asarray(numbers(b))
    got, slopes = jax.value_and_grad(lambda x, y: ours(x, y, **options), (0, 1))(x, y)
    np.testing.assert_allclose(got, numbers(value), rtol=1e-5)
    for g, w in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)
    assert ours.__name__ == "squared_distance" and ours.__doc__ == "A loss."


@row("I6")
def test_functions_that_draw_and_what_they_close_over():
    def sampler(mean):
        return mean + torch.randn(mean.shape)

    sample = jaxfn.from_torch(sampler)
    with pytest.raises(TranslationError, match=r"sampler.*sampler\(\.\.\., key="):
        sample(jnp.zeros(3))
    draws = [sample(jnp.zeros(3), key=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()
    factor = [2.0]
    scaled = jaxfn.from_torch(lambda x: x * factor[0])
    assert scaled(jnp.ones(())) == 2
    factor[0] = 3.0
    assert scaled(jnp.ones(())) == 3


NUMBERS, TENSOR = [2.0], torch.tensor(2.0)


def traced_aloud(x, factor=3.0):
    print("traced")
    return torch.sin(x) * NUMBERS[0] * factor * TENSOR


@row("I6")
def test_a_function_is_traced_once_for_equal_shapes_and_captured_values(capsys):
    converted = jaxfn.from_torch(traced_aloud)
    for call in (converted, converted, jax.jit(converted), jax.grad(lambda x: converted(x).sum())):
        call(jnp.ones(2))
    jax.vmap(converted)(jnp.ones((3, 2)))
    assert capsys.readouterr().out.count("traced") == 1
    converted(jnp.ones(3))
    converted(jnp.ones(2), factor=2.0)
    NUMBERS[0] = 7.0
    TENSOR.fill_(7.0)
    converted(jnp.ones(2))
    assert capsys.readouterr().out.count("traced") == 3


@row("I6")
@pytest.mark.parametrize("wrong", [3, nn.Linear, "relu", None], ids=repr)
def test_what_is_neither_raises(wrong):
    with pytest.raises(TypeError, match="expected torch code: a subclass of torch.autograd.Function, a torch"):
        jaxfn.from_torch(wrong)


def total(x: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    return x + original


def blend(x, original, tracing=1.0):
    return x * tracing + original


@row("I2")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.utils.checkpoint.checkpoint(blend, x, original=x, tracing=3.0, use_reentrant=False),
        lambda x: blend(x, original=x, tracing=3.0),
        lambda x: total(x, original=3 * x),
        lambda x: torch.nn.BatchNorm1d(3, affine=False)(input=x),
        lambda x: torch.detach_(input=2 * x),
    ],
    ids=["checkpoint", "ops", "TorchScript", "BatchNorm", "detach_"],
)
def test_arguments_may_have_any_name(call):
    """Names include those of jaxfn's own functions, which replace what is called."""
    net = jaxfn.from_torch(call, ops={blend: lambda x, original, tracing: x * tracing + original})
    np.testing.assert_allclose(net(X.numpy()), call(X), rtol=1e-5, atol=1e-6)
