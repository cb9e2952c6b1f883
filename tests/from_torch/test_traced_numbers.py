"""Numbers that `item()` returns in converted code, which stay traced: compared with torch."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import cells, row

torch = pytest.importorskip("torch")

from tests.support.reading_functions import INPUTS, in_jax, in_torch, scaled_by_item  # noqa: E402
from tests.support.torch_code import Net, counting, function_of, rule  # noqa: E402


class Quantizes(torch.autograd.Function):
    """Stores numbers on ctx, some in containers."""

    @staticmethod
    def forward(ctx, x):
        scale = x.abs().max().item() / 127
        ctx.scale, ctx.more = scale, {"count": [(x > 0).sum().item() + 1]}
        ctx.save_for_backward(x)
        return (x / scale).round() * scale + x.clamp(max=2 * scale, min=-scale)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g * ctx.scale).add(x * g, alpha=g.mean().item()) * x / ctx.more["count"][0]


def numbers_as_arguments(x):
    n, k = x.sum().item() + 0.25, (x > 0).sum().item()
    y = torch.full((len(x),), n).masked_fill(x > 1, -n) + torch.tensor(n) * torch.nn.functional.leaky_relu(x, abs(n))
    y[0] = n / 4
    return y.mul_(1 - n) + n**2 / (3 + x) - 2.0**n * x**2 + torch.ones(len(x)) * k + k / (x + 7) - (x > n / 9) * (k - 1)


NUMBERS = {
    "scaled_by_item": rule(scaled_by_item, lambda g, x: g * x.cos() * x.abs().max().item()),
    "Quantizes": Quantizes,
    "numbers_as_arguments": rule(
        numbers_as_arguments, lambda g, x: torch.where(x > 0, g * x, (g * x).sum().item() ** 2)
    ),
}


@row("H22")
@cells("name", ["Quantizes", "numbers_as_arguments"], NUMBERS)
def test_numbers_of_one_trace_are_those_of_torch(name: str):
    """Compares eager calls, compiled ones and a batch, with a number for each element, up to the second derivative."""
    theirs, (ours, runs) = NUMBERS[name], counting(NUMBERS[name])
    expected = [in_torch(theirs, np.array(values, np.float32)) for values in INPUTS]
    batch = jnp.array(INPUTS)
    compiled = jax.jit(lambda x: in_jax(ours, x))
    mapped = zip(*jax.vmap(lambda x: in_jax(ours, x))(batch), strict=True)
    for x, wanted, of_batch in zip(batch, expected, mapped, strict=True):
        for got in (in_jax(ours, x), compiled(x), of_batch):
            for result, reference in zip(got, wanted, strict=True):
                np.testing.assert_allclose(result, reference, rtol=5e-4, atol=1e-5)
    assert runs.count("forward") <= 2  # Whether gradients are needed may make a difference.


@row("H22")
@pytest.mark.filterwarnings("ignore:Combines computes in float64")
@pytest.mark.parametrize("is_on", [False, True], ids=["", "x64"])
def test_numbers_have_the_lowest_priority_in_promotion(is_on: bool):
    """Unlike tensors without dimensions, and as floats and integers of Python."""

    def combined(x: Any, n: Any, k: Any) -> Any:
        integers = x.to(torch.int64)
        return (
            *(x * n, x.sum() * n, n / x, x.bfloat16().sum() - n, integers * k, integers * n, x.to(torch.int8) * k),
            *(torch.full((2,), k), torch.where(x > 1, x, n), torch.where(x > 1, n, k), (x > 1) * k, torch.tensor(k)),
            *(x.float().pow(k), integers / k, x.to(torch.complex64) * n, x >= n),
            *(torch.full((2,), n, dtype=torch.float16), x.to(torch.int32) - k, (n * 3 + k - 1e-9) / 7 * x.double()),
        )

    Combines = function_of(lambda x: combined(x, x.double().mean().item(), (x > 1).sum().item()), name="Combines")

    with jax.enable_x64(is_on):
        for dtype in ("float32", "bfloat16", "int32", "uint8"):
            x = jnp.array([1.5, 2, 3, 1]).astype(dtype)
            tensor = torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, dtype))
            for got, expected in zip(jax.jit(jaxfn.from_torch(Combines).apply)(x), Combines.apply(tensor), strict=True):
                name = str(expected.dtype).removeprefix("torch.")
                assert str(got.dtype) == (name if is_on else str(jax.dtypes.canonicalize_dtype(jnp.dtype(name))))
                tolerance = 1e-13 if got.dtype == np.float64 else 1e-2 if "16" in name else 1e-6
                np.testing.assert_allclose(got.astype(complex), expected.to(torch.complex128), rtol=tolerance)


def counted(x: Any) -> Any:
    return (x > -9).sum().item()


def shifted_index(x: Any) -> Any:
    return x[: counted(x) // 2].sum() * x


def formatted(x: Any) -> Any:
    return x * float(f"{x.max().item():.1f}") * len(repr(x.sum().item())) * len(str(counted(x)))


def used_as_a_key(x: Any) -> Any:
    n = counted(x)
    return x * {len(x): 2.0}[n] * (n in (4, 5)) * [1.0, 2, 3, 4, 5][n]


def in_numpy(x: Any) -> Any:
    n = x.max().item()
    return x * torch.from_numpy(np.array([n, 2 * n, np.sqrt(n), np.float32(2) * n], np.float32)) * np.asarray(n).item()


def divided_and_rounded(x: Any) -> Any:
    n = x.max().item()
    return x * round(n) + n // 0.75 + n % 0.6 + divmod(n, 2)[1] + int(n) + math.floor(n) + math.exp(n) + (n * 1j).imag


def a_power_of_integers(x: Any) -> Any:
    k = counted(x)
    return x * k**k * (k & 6) / (10**18 * k * k % 1000007) + k.bit_length()


def sorted_numbers(x: Any) -> Any:
    low, *_, high = sorted([x[0].item(), x[1].item(), x[2].item(), 1.25])
    return x.clamp(low, high) if low < high else x


def shapes(x: Any) -> Any:
    k = counted(x)
    return (
        x.new_zeros(k)
        + x.view(k, 1)[:, 0]
        + torch.zeros(torch.Size([k]))
        + torch.arange(k)
        + sum(range(k)) * x.repeat(k)[:k]
    )


@row("H20", "H22")
@pytest.mark.parametrize(
    "code",
    [
        shifted_index,
        formatted,
        used_as_a_key,
        in_numpy,
        divided_and_rounded,
        a_power_of_integers,
        sorted_numbers,
        shapes,
    ],
    ids=lambda code: code.__name__,
)
def test_other_uses_of_numbers_read_them(code: Any):
    F = jaxfn.from_torch(function_of(code))
    for values in INPUTS[::2]:
        x = np.array(values, np.float32)
        np.testing.assert_allclose(F.apply(x), code(torch.tensor(x)), rtol=1e-5)
    with pytest.raises(jaxfn.TranslationError, match=f"reads the value of a tensor(?s:.*)in {code.__name__}\n"):
        jax.jit(F.apply)(x)


@row("H22")
def test_comparisons_of_numbers_are_read_as_conditions():
    """So there is one trace for each branch, and checks are skipped under `jit`."""

    def branches(x: Any) -> Any:
        n = copy.deepcopy(x.max().item())
        assert isinstance(n, float) and not isinstance(n, int)
        if n > 1e6 or not -n < 1e9:
            raise ValueError("too large")
        return x * (n if n > 1 else 2 * n)

    F, runs = counting(function_of(branches))
    for i in range(1, 40):
        np.testing.assert_allclose(
            F.apply(jnp.array([i / 20, 0.0])), [i * i / 400 * (2 if i <= 20 else 1), 0], rtol=1e-6
        )
    assert runs.count("forward") == 2
    with pytest.raises(ValueError, match="too large"):
        F.apply(jnp.array([1e7]))
    checked = jaxfn.from_torch(function_of(lambda x: checked_by_item(x) * x))
    with pytest.warns(UserWarning, match="a check of values is skipped(?s:.*)if n != n or n > 1e6"):
        np.testing.assert_array_equal(jax.jit(checked.apply)(jnp.array([3.0, 1])), [9, 3])


def checked_by_item(x: Any) -> Any:
    n = x.max().item()
    if n != n or n > 1e6:
        raise ValueError("too large")
    return n


@row("H22")
def test_numbers_have_no_derivative_in_forward_mode():
    class Scales(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.n = x.max().item()
            ctx.save_for_forward(x)
            return x * ctx.n

        @staticmethod
        def jvp(ctx: Any, t: Any) -> Any:
            return t * ctx.saved_tensors[0] * ctx.n

    x, v = jnp.array([1.0, 3.0]), jnp.array([0.5, 2.0])
    F = jaxfn.from_torch(Scales)
    for transform in (lambda f: f, jax.jit):
        tangent = transform(lambda x: jax.jvp(F.apply, (x,), (v,))[1])
        np.testing.assert_allclose(tangent(x), v * x * 3)
        np.testing.assert_allclose(jax.jvp(tangent, (x,), (v,))[1], v * v * 3)


@row("H22")
def test_numbers_in_modules_python_functions_nested_functions_and_autograd():
    def run(self, x: Any) -> Any:
        n = (self.weight * x).max().item()
        return scaled_by_item(self.weight * n) + Quantizes.apply(x / n)

    def differentiates(x: Any) -> Any:
        with torch.enable_grad():
            z, n = x.detach().requires_grad_(), x.max().item()
            return torch.autograd.grad((z.add(z * z, alpha=n) * n).sum(), z)[0]

    model, x = Net(run, weight=torch.nn.Parameter(torch.tensor([1.0, 2, 3]))), np.array([0.5, -2, 1.5], np.float32)
    net = jaxfn.from_torch(model)
    tensor = torch.tensor(x, requires_grad=True)
    expected = torch.autograd.grad(model(tensor).sum(), [model.weight, tensor])
    got = jax.jit(jax.grad(lambda p, x: net.apply(p, net.buffers, x)[0].sum(), (0, 1)))(net.parameters, x)
    for gradient, reference in zip((got[0]["weight"], got[1]), expected, strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=1e-5)
    np.testing.assert_allclose(jaxfn.from_torch(function_of(differentiates)).apply(x), differentiates(torch.tensor(x)))


@row("H22")
def test_integers_that_may_need_more_than_64_bits_are_read():
    def far(x: Any) -> Any:
        k = x.amin().item()
        return x * ((k - 1) / 2.0**60) + (-k) / 2.0**60, x * (2 * k / 2.0**60), torch.full((2,), 2**62) / (k * 1.0)

    with jax.enable_x64(True):
        for values in ([-(2**63), 5], [2**62, 2**62 + 1]):
            x = np.array(values)
            for got, expected in zip(jaxfn.from_torch(function_of(far)).apply(x), far(torch.tensor(x)), strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-6)


@row("H22")
def test_numbers_that_are_stored_or_that_compiled_code_does_not_take_are_read():
    stored: list[Any] = []

    def stores(x: Any) -> Any:
        stored.append(x.max().item() * 2)
        return x * stored[-1] + len(json.dumps(stored[-1]))

    F = jaxfn.from_torch(rule(stores, lambda g, _: g * stored[-1]))
    for largest in (0.5, 1.5):
        output, pull = jax.vjp(F.apply, jnp.array([largest, 0]))
        np.testing.assert_allclose(output[0], 2 * largest**2 + 3)
        np.testing.assert_allclose(pull(jnp.ones(2))[0], 2 * largest)
        assert stored[-1] == 2 * largest
    appends = jaxfn.from_torch(function_of(lambda x: (stored.append(x.max().item()), x)[1]))
    with pytest.raises(jaxfn.TranslationError, match="stores a number, the `.item... of a tensor"):
        jax.jit(appends.apply)(jnp.ones(2))
    for use in (lambda: float(stored[-1]), lambda: stored[-1] * 2, lambda: repr(stored)):
        with pytest.raises(jaxfn.TranslationError, match="uses a number, the(?s:.*)of another call"):
            use()


@row("H22")
def test_code_that_compares_types_reads_numbers():
    def by_type(x: Any) -> Any:
        n = x.max().item()
        return x * n if type(n) is float else -x

    F, x = jaxfn.from_torch(function_of(by_type)), jnp.array([0.5, 2.0])
    for values in (x, 3 * x):
        np.testing.assert_allclose(F.apply(values), by_type(torch.tensor(np.asarray(values))))
    with pytest.raises(jaxfn.TranslationError, match="as a number"):
        jax.jit(F.apply)(x)
