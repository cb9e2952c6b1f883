"""Rows H1, H2, H4, H5 and H10: memory, draws and dtypes of traced code, and operations without a translation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import row

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from jaxfn._torch.graph import recorder  # noqa: E402
from tests.support.beside_torch import assert_same_as_torch  # noqa: E402
from tests.support.direct_samples import numbers  # noqa: E402

X, Y = numbers(3, 4, dtype=torch.float32), numbers(4, dtype=torch.float32) + 0.1
ARRAYS = jnp.asarray(X.numpy()), jnp.asarray(Y.numpy())


def several(x: Any, y: Any) -> Any:
    x = x.clone()
    x[x > 1] = 0
    x[:, 1] += y[0]
    values, indices = torch.max(x, 1)
    return x @ y, values, indices, torch.linspace(0, 1, 3) * y[:3], x.double()


@row("H2")
@pytest.mark.filterwarnings("ignore:.*computes in float64")
@pytest.mark.parametrize("x64", [False, True])
def test_views_writes_and_masks(x64: bool) -> None:
    with jax.enable_x64(x64):
        for call in (jaxfn.from_torch(several), jax.jit(jaxfn.from_torch(several))):
            results = call(*ARRAYS)
            for got, wanted in zip(results, several(X, Y), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
            assert (results[4].dtype, results[2].dtype) == (("float64", "int64") if x64 else ("float32", "int32"))


def normalized(x: Any) -> Any:
    """Applies three equal layers, one that differs in a number, and one that differs in its shape."""
    for eps in (0.5, 0.5, 0.5, 0.25):
        x = torch.tanh(torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps))
    return torch.nn.functional.layer_norm(x.mT, x.mT.shape[-1:], eps=0.5)


@row("H2")
def test_an_operation_of_many_primitives_is_traced_once_for_equal_layers() -> None:
    eqns = jax.make_jaxpr(jaxfn.from_torch(normalized))(ARRAYS[0]).eqns
    if len(eqns) == 1:  # The whole graph, which JAX 0.12 inlines later.
        eqns = eqns[0].params["jaxpr"].eqns
    jaxprs = [eqn.params["jaxpr"] for eqn in eqns if eqn.params.get("name") == "native_layer_norm"]
    assert len(jaxprs) == 5 and jaxprs[0] is jaxprs[1] is jaxprs[2]
    assert len({id(jaxpr) for jaxpr in jaxprs}) == 3


@row("H2")
def test_second_derivatives_of_equal_layers_are_those_of_torch() -> None:
    def loss(x: Any) -> Any:
        return (normalized(x) ** 3).sum()

    hessian = torch.autograd.functional.hessian(loss, X)
    np.testing.assert_allclose(jax.jit(jax.hessian(jaxfn.from_torch(loss)))(ARRAYS[0]), hessian, rtol=1e-3, atol=1e-3)
    by_rows = jax.vmap(lambda row: jax.jvp(jaxfn.from_torch(loss), (row[None],), (row[None],))[1])(ARRAYS[0])
    expected = [(torch.func.grad(loss)(row[None]) * row).sum() for row in X]
    np.testing.assert_allclose(by_rows, expected, rtol=1e-3, atol=1e-4)


@row("H2")
def test_equal_python_numbers_of_an_operation_are_distinguished_by_type_and_sign() -> None:
    def call(x: Any) -> Any:
        return [torch.nn.functional.threshold(x, 0.5, value) for value in (0.0, -0.0, 1, 1.0, True)]

    for got, wanted in zip(jaxfn.from_torch(call)(ARRAYS[0]), call(X), strict=True):
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(jnp.signbit(got), torch.signbit(wanted))


@row("H2")
def test_memory_written_by_an_operation_is_read_afterwards() -> None:
    def call(x: Any) -> Any:
        mean, variance = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
        result = torch.ops.aten.native_batch_norm(x, None, None, mean, variance, True, 0.25, 1e-5)[0]
        return result, mean

    np.testing.assert_allclose(jaxfn.from_torch(call)(ARRAYS[0])[1], 0.25 * ARRAYS[0].mean(0), rtol=1e-6)


@row("H4")
@pytest.mark.parametrize("unused", ["special_airy_ai", "rand_like"])
def test_operations_whose_result_is_not_used_do_not_matter(unused: str) -> None:
    operation = getattr(torch.ops.aten, unused).default
    np.testing.assert_array_equal(jaxfn.from_torch(lambda x: (operation(x), x * 2)[1])(ARRAYS[0]), X * 2)


@row("H4")
def test_a_decomposition_that_writes_to_memory_raises(monkeypatch: Any) -> None:
    """None of torch 2.13 does; a graph that held such an operation would read the old value."""

    def decomposition(x: Any) -> Any:
        y = x * 2
        y.add_(1)
        return y * 1

    airy = torch.ops.aten.special_airy_ai.default
    monkeypatch.setattr(recorder, "decompositions", lambda: {airy: decomposition})
    with pytest.raises(TranslationError, match="aten.add_.Tensor, which mutates its arguments.*ops="):
        jaxfn.from_torch(lambda x: torch.special.airy_ai(x))(ARRAYS[0])


CONSTANT = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)[1:]

READ_IN_MEMORY = {
    "in order": lambda x: x.as_strided((2, 2), (1, 4)),
    "transposed": lambda x: x.t().as_strided((2, 3, 2), (1, 2, 1), 3),
    "copied and transposed": lambda x: x.t().contiguous().t().as_strided((3, 3), (3, 1), 1),
    "windows of what is permuted": lambda x: (y := x.reshape(3, 2, 2).permute(1, 0, 2)).as_strided(
        (2, 2, 2, 2), (y.stride(0), y.stride(1), y.stride(1), 1)
    ),
    "a part": lambda x: x[1:].as_strided((2, 2), (3, 2)),
    "several elements at one index": lambda x: x[:1].expand(3, 4).as_strided((2, 3), (1, 1)) * 2,
    "a part of a constant": lambda x: x[0] + CONSTANT.as_strided((4,), (3,)),
    "nothing": lambda x: torch.cat([x.t().as_strided((0, 4), (1, 4), 7), x]),
    "written": lambda x: (y := x.t().clone()).as_strided((2, 2), (1, 4)).mul_(3) * y[0, 0],
}


@row("H2", "I4")
@pytest.mark.parametrize("name", READ_IN_MEMORY)
def test_memory_is_read_in_torchs_order(name: str) -> None:
    assert_same_as_torch(jaxfn.from_torch(READ_IN_MEMORY[name]), READ_IN_MEMORY[name], [X.numpy()])


@row("H2")
def test_memory_around_a_tensor_is_not_read() -> None:
    with pytest.raises(TranslationError, match="(?s)as_strided.*a slice of another tensor"):
        jaxfn.from_torch(lambda x: x[1:].as_strided((2, 2), (1, 4), 0))(ARRAYS[0])


@row("H2")
@pytest.mark.parametrize("function", [torch.linalg.det, torch.logdet, lambda a: torch.linalg.solve(a, a[0] + 1).sum()])
@pytest.mark.parametrize("transposed", [False, True])
def test_factors_that_autograd_uses_again(function: Any, transposed: bool) -> None:
    """torch saves other parts of a factorization for other strides of its argument."""

    def slope(a: Any) -> Any:
        a = a.detach().requires_grad_()
        return torch.autograd.grad(function(a.t() if transposed else a), a)[0]

    matrix = numbers(3, 3, dtype=torch.float32) + 4 * torch.eye(3)
    got = jaxfn.from_torch(slope)(jnp.asarray(matrix.numpy()))
    np.testing.assert_allclose(got, slope(matrix), rtol=1e-4, atol=1e-5)


@row("H2")
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((4, 3), torch.float64, {}),
        ((2, 3, 4), torch.float64, {"atol": 0.01}),
        ((4, 3), torch.complex128, {"rtol": torch.tensor(1e-6, dtype=torch.float64)}),
    ],
)
def test_derivatives_of_a_pseudoinverse(shape: Any, dtype: Any, options: Any) -> None:
    a, weight = numbers(*shape, dtype=dtype), numbers(*shape[:-2], shape[-1], shape[-2], dtype=dtype) + 0.5

    def loss(a: Any) -> Any:
        return (torch.linalg.pinv(a, **options) * weight).abs().square().sum()

    x = a.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.abs().square().sum(), x)
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(jaxfn.from_torch(loss)))
        of_its_square = jax.grad(lambda array: jnp.square(jnp.abs(gradient(array))).sum())
        for in_jax, in_torch in ((gradient, first), (of_its_square, second)):
            got = in_jax(jnp.asarray(a.numpy())).conj()  # JAX conjugates complex gradients.
            np.testing.assert_allclose(got, in_torch.detach(), rtol=1e-8)


MANY = torch.full((20000,), 0.3, dtype=torch.float64)
DRAWS = {
    "bernoulli": torch.bernoulli,
    "bernoulli.p": lambda x: torch.ops.aten.bernoulli.p(x, 0.2),
    "cauchy": lambda x: x.clone().cauchy_(1, 2),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4),
    "exponential": lambda x: x.clone().exponential_(3),
    "geometric": lambda x: x.clone().geometric_(0.4),
    "log_normal": lambda x: x.clone().log_normal_(0.5, 0.3),
    "multinomial": lambda x: torch.multinomial(torch.stack((x, 2 * x, 4 * x), 1), 2).double().sum(1),
    "multinomial.replacement": lambda x: torch.multinomial(x[:4].cumsum(0), len(x), replacement=True).double(),
    "native_dropout": lambda x: torch.ops.aten.native_dropout.default(x, 0.4, True)[0],
    "normal": lambda x: torch.normal(x, 2.0),
    "normal_": lambda x: x.clone().normal_(1, 3),
    "rand": torch.rand_like,
    "randint": lambda x: torch.randint(-3, 9, x.shape).double(),
    "randn": torch.randn_like,
    "randn.complex": lambda x: torch.randn(x.shape, dtype=torch.complex128).abs(),
    "randperm": lambda x: torch.randperm(len(x)).double(),
    "uniform": lambda x: x.clone().uniform_(-2, 5),
}


@row("H5")
@pytest.mark.parametrize("name", DRAWS)
def test_distributions_are_those_of_torch(name: str) -> None:
    """The distribution functions of 20,000 draws of each differ by less than chance explains (4e-6 of the time)."""
    with jax.enable_x64(True):
        draw = jaxfn.from_torch(lambda x: DRAWS[name](x))
        got = np.asarray(draw(MANY.numpy(), key=jax.random.key(0)))
    torch.manual_seed(0)
    wanted = DRAWS[name](MANY).numpy()
    at = np.unique(np.concatenate((got, wanted)))
    below = [np.searchsorted(np.sort(draws), at, side="right") / len(draws) for draws in (got, wanted)]
    assert np.abs(below[0] - below[1]).max() < 2.5 * np.sqrt(2 / len(wanted))


@row("H1")
@pytest.mark.parametrize("name", ["int8", "bool", "float8_e5m2"])
def test_arrays_go_to_torch_and_back(name: str) -> None:
    array = jnp.asarray(np.arange(6).reshape(2, 3) % 2, jnp.dtype(name))
    seen = []
    result = jaxfn.from_torch(lambda x: (seen.append(x.dtype), x.t())[1])(array)
    assert seen == [getattr(torch, name)] and result.dtype == name
    np.testing.assert_array_equal(result, array.T)


@row("H1")
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    "program, dtype, message",
    [
        (lambda x: x + 1, "int4", "int4"),
        (lambda x: x.to(torch.complex32), "float32", "complex64"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 10, torch.quint8), "float32", "quint8|quantize"),
    ],
    ids=["int4", "complex32", "quantized"],
)
def test_tensors_without_a_counterpart_raise(program: Any, dtype: str, message: str) -> None:
    with pytest.raises(TranslationError, match=message):
        jaxfn.from_torch(program)(jnp.ones((2, 2), dtype))
