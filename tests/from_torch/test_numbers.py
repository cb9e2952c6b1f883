"""Rows H2, H4 and H13: integers, copies, constant masks and whole functions of torch, next to torch."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import cells, row, slow

torch = pytest.importorskip("torch")

from tests.support.torch_code import function_of, rule  # noqa: E402

functional = torch.nn.functional

X = np.linspace(-2, 2.3, 5).astype(np.float32)
OUTSIDE = torch.ones(5)
MASK = torch.tensor([True, False, True, True, False])


def assert_same(code: Callable[..., Any], *arrays: Any, rtol: float = 1e-5, theirs: Any = None) -> None:
    """Asserts that torch, JAX and JAX under jit return equal results of `code`."""
    wanted = (theirs or code)(*(torch.tensor(np.asarray(x)) for x in arrays))
    wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
    for run in (jaxfn.from_torch(code), jax.jit(jaxfn.from_torch(code))):
        got = run(*map(jnp.asarray, arrays))
        got = got if isinstance(got, (tuple, list)) else [got]
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w.detach().numpy(), rtol=rtol, atol=1e-5)


def with_gradients(code: Callable[..., Any]) -> Callable[..., Any]:
    """Also the gradients that autograd gives for every floating point argument."""

    def both(*tensors: Any) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
            value = code(*leaves)
            varied = [x for x in leaves if x.is_floating_point()]
            return value.detach(), *torch.autograd.grad(value.cos().sum(), varied)

    return both


# --- 64 bits without x64.

RANDOM = np.random.default_rng(0)
A, B = (RANDOM.integers(-(2**31), 2**31, 60).astype(np.int32) for _ in range(2))
BITS = RANDOM.integers(0, 64, 60).astype(np.int32)
PRIMES = torch.tensor([1, 2654435761, 805459861])


def _wide(x: Any) -> Any:
    return x.long() * 6364136223846793005


def _digits(x: Any) -> Any:
    return torch.stack([x & 0x7FFFFFFF, (x >> 31) & 0x7FFFFFFF, (x >> 62) & 3])


def _with_primes(a: Any, b: Any, n: Any) -> Any:
    products = torch.stack([a, b, n], -1).long() * PRIMES
    return functools.reduce(operator.xor, products.unbind(-1)) % 2**19


def _hash_with_writes(a: Any, b: Any, n: Any) -> Any:
    h = a.long() * 73856093
    h ^= b.long() * 19349663
    h[0] = 2**40 + h[1]
    return h % 1000003


WIDE: dict[str, Callable[..., Any]] = {
    "hash": lambda a, b, n: ((a.long() * 73856093) ^ (b.long() * 19349663)) % 1000003,
    "primes": _with_primes,
    "written": _hash_with_writes,
    "mul": lambda a, b, n: _digits(_wide(a) * _wide(b)),
    "add": lambda a, b, n: _digits(torch.add(_wide(a), _wide(b), alpha=12345678901)),
    "sub": lambda a, b, n: _digits(3 - _wide(a) - _wide(b)),
    "or": lambda a, b, n: _digits(_wide(a) | b),
    "and": lambda a, b, n: _digits(_wide(a) & ~_wide(b)),
    "neg abs": lambda a, b, n: _digits(-_wide(a).abs()),
    "remainder": lambda a, b, n: torch.stack([_wide(a) % -77, _wide(a) % b.long(), torch.fmod(_wide(a), 1234567)]),
    "quotient": lambda a, b, n: _digits(_wide(a) // -1000003),
    "truncated": lambda a, b, n: _digits(torch.div(_wide(a), 77, rounding_mode="trunc")),
    "left": lambda a, b, n: _digits(_wide(a) << n.long()),
    "right": lambda a, b, n: _digits(_wide(a) >> n.long()),
    "compare": lambda a, b, n: torch.stack([_wide(a) < _wide(b), _wide(a) >= 2**40, _wide(a) == _wide(b)]),
    "float": lambda a, b, n: _wide(a).float() / 3,
    "where": lambda a, b, n: _digits(torch.where(a > 0, _wide(a), b.long())),
    "clamp": lambda a, b, n: _wide(a).clamp(-100000, 2**30),
    "moved": lambda a, b, n: _digits(torch.cat([_wide(a).view(2, -1).t().flip(0)[3:7].reshape(-1), b.long()])),
    "power": lambda a, b, n: _digits(a.long() ** 3 * 2**20),
    "digits of 31": lambda a, b, n: functools.reduce(lambda h, x: h * 31 + x, n.view(10, 6).long()) % 1000003,
    "index": lambda a, b, n: a[(_wide(b) % 60)],
    "int": lambda a, b, n: _wide(a).int(),
    "constant": lambda a, b, n: torch.stack([a.long() < 2**40, a.long() != 2**32 + 5, b.long() <= -(2**35)]),
    "ratio": lambda a, b, n: torch.stack([a.long() / 2**40, 2**40 / (b.long() | 1), a.long() / -(2**31), a / 2**40]),
    "constant on the right": lambda a, b, n: torch.stack([n.long() // 2**40, torch.fmod(n.long(), 2**40 + 1)]),
    "sum with a range": lambda a, b, n: n.long() * 100 + torch.arange(60) * 2,
    "count": lambda a, b, n: (n > 3).cumsum(0),
    "index of a range": lambda a, b, n: torch.arange(64)[(n.long() * 1000000 + 5) // 1000000],
    "index of a pixel": lambda a, b, n: (n.long() * 640 + n) * 480 + n,
}


@row("H13")
@pytest.mark.parametrize("name", WIDE)
def test_integers_of_64_bits_without_x64(name: str):
    assert_same(WIDE[name], A, B, BITS, rtol=1e-6)


@row("H13")
@pytest.mark.parametrize(
    "code",
    [
        lambda n: n.long() * 73856093,
        lambda n: torch.sort(n.long() * 73856093)[0],
        lambda n: n.long() << 40,
        lambda n: torch.full((60,), torch.iinfo(torch.int64).max) + 0 * n,
        lambda n: torch.tensor(2**40) + n.long(),
        lambda n: n.long() + 2**33,
    ],
    ids=["mul", "sort", "shift", "full", "tensor", "plus"],
)
def test_int64_integers_that_are_returned_raise(code: Any):
    with pytest.raises(jaxfn.TranslationError, match=r"(?s)test_numbers.*needs 64 bits.*enable_x64"):
        jaxfn.from_torch(code)(BITS)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jaxfn.from_torch(code)(BITS), code(torch.tensor(BITS)))


TakesHash = rule(lambda x, h: x.sin(), lambda g, _, h: (g * (h % 7), None))


@row("H13")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
@pytest.mark.parametrize(
    ("code", "ops"),
    [
        (lambda x, n: TakesHash.apply(x, n.long() * 6364136223846793005), {}),
        (lambda x, n: x * torch.neg(n.long() * 6364136223846793005), {"aten::neg": jnp.negative}),
    ],
    ids=["a Function", "a replacement"],
)
def test_64_bits_do_not_enter_a_jax_function(code: Any, ops: Any, wrap: Any):
    """Its derivative runs elsewhere, where JAX has 32 bits: `h % 7` would be of the last 32 bits of h."""
    f = jaxfn.from_torch(code, ops=ops)
    with pytest.raises(jaxfn.TranslationError, match=r"aten.mul.Tensor, called at .*needs 64 bits"):
        wrap(jax.grad(lambda x: f(x, BITS).sum()))(np.ones(60, np.float32))


# --- Numbers at the ends.

ENDS = np.array([300.7, -129.2, 1e10, -3e9, np.nan, np.inf, -np.inf, -1.5, 70000, -40000, 1e20, 4e9, 255.9], np.float32)


@row("H2")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_floats_that_fit_no_integer_and_signs(dtype: str):
    with jax.enable_x64(dtype == "int64"):
        assert_same(lambda x: (x.to(getattr(torch, dtype)), torch.sign(x)), ENDS)


@row("H2")
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_numbers_that_do_not_fit_a_narrow_tensor(dtype: Any):
    def code(x: Any) -> Any:
        return x + 128, x * 300, 300 - x, x // 300, x & 300, x > 128

    assert_same(code, np.array([1, 5, 100], dtype))


# --- Constant masks, copies, derivatives inside, old-style sizes.


def _diagonal(x: Any) -> Any:
    matrix = x[:, None] * x[None]
    matrix[torch.eye(5).bool()] += x
    return matrix


def _slices(x: Any) -> Any:
    written = OUTSIDE.clone()
    view = written[2:]
    view += x[2:]
    written[0] = 7
    return written.mul_(2)


def _types(x: Any) -> Any:
    assert x.type() == "torch.FloatTensor" and (x > 0).type() == "torch.BoolTensor"
    assert x.half().type() == "torch.HalfTensor" and x[:1].long().type() == "torch.LongTensor"
    return x.type("torch.DoubleTensor").type(torch.zeros(1).type())


SUPPORTED: dict[str, Callable[..., Any]] = {
    "constant diagonal": _diagonal,
    "constant mask": lambda x: x[torch.tensor([True, False, True, True, False])],
    "captured mask": lambda x: x.expand(2, 5)[:, MASK],
    "masked_select": lambda x: x.masked_select(MASK),
    "slices of a copy": _slices,
    "write to a copy": lambda x: OUTSIDE.clone().add_(1) * x,
    "write to zeros": lambda x: torch.zeros_like(OUTSIDE).add_(x),
    "deep copy": lambda x: copy.deepcopy(OUTSIDE).add_(x),
    "deep copy of an argument": lambda x: copy.deepcopy(x).add_(1) + x,
    "hessian": torch.func.hessian(lambda x: (x**3).sum()),
    "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(lambda x: (x**4).sum()), (x,), (x,))[1],
    "out=": lambda x: torch.pow(x, 2, out=x.new()).mul_(x),
    "names of types": _types,
    "repeats of a known size": lambda x: x.repeat_interleave((x > 0) + 1, output_size=8),
    "geqrf": lambda x: tuple(torch.geqrf(x[:, None] ** torch.arange(3))),
}


@row("H2")
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*computes in float64")
@pytest.mark.parametrize("name", SUPPORTED)
def test_code_that_needs_no_values(name: str):
    assert_same(SUPPORTED[name], X)
    np.testing.assert_array_equal(OUTSIDE, np.ones(5))


@row("H3")
def test_an_external_mask_may_change():
    mask = torch.tensor([True, False])
    taken = jaxfn.from_torch(lambda x: x[mask])
    assert taken(X[:2]).shape == (1,)
    mask[1] = True
    assert taken(X[:2]).shape == (2,)


# --- Labels of 32 bits.

LABELS, SCORES = np.array([0, 2, 1, 2, 0], np.int32), RANDOM.standard_normal((5, 3)).astype(np.float32)


OF_LABELS: dict[str, Callable[..., Any]] = {
    "one_hot": lambda x, i: functional.one_hot(i, 3),
    "take": lambda x, i: x.take(i) + torch.take(x, index=i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:, None], 1),
    "gather": lambda x, i: x.gather(1, i[:, None]),
    "cross_entropy": lambda x, i: functional.cross_entropy(x, i, label_smoothing=0.1),
    "nll_loss": lambda x, i: functional.nll_loss(x, i, reduction="none"),
}


@row("H13")
@pytest.mark.parametrize("name", OF_LABELS)
def test_labels_of_32_bits(name: str):
    code = OF_LABELS[name]
    assert_same(code, SCORES, LABELS, theirs=lambda x, i: code(x, i.long()))


@row("H13")
def test_int32_is_traced_as_int64_only_where_torch_wants_that():
    taken = jaxfn.from_torch(lambda i: i.take(i) * (1 if i.dtype == torch.int32 else 2))
    np.testing.assert_array_equal(taken(LABELS), LABELS[LABELS] * 2)
    unchanged = jaxfn.from_torch(lambda i: i * (1 if i.dtype == torch.int32 else 2))
    np.testing.assert_array_equal(unchanged(LABELS), LABELS)


@row("H2")
@pytest.mark.filterwarnings("ignore:.*mark_dirty")
def test_a_function_of_the_old_style():
    function = torch.nn.modules._functions.CrossMapLRN2d
    images = RANDOM.standard_normal((2, 7, 3, 5)).astype(np.float32)
    ours = jaxfn.from_torch(function).apply
    assert_same_as_torch(lambda x: ours(x, 3), lambda x: function.apply(x, 3), [images])


@row("H4")
def test_a_function_in_torch_names_the_line_that_called_it():
    def code(x: Any) -> Any:
        return torch.distributions.Categorical(logits=x).enumerate_support().float() * torch.tensor(x.numpy())

    with pytest.raises(jaxfn.TranslationError, match=r"Runs: .*`.numpy\(\)`(?s:.*)test_numbers"):
        jax.jit(jaxfn.from_torch(function_of(code)).apply)(X)


# --- Functions that are replaced as a whole.

WEIGHT = RANDOM.standard_normal((7, 3)).astype(np.float32)
INDICES = np.array([0, 2, 1, 6, 0, 2, 4], np.int32)


@row("H2")
@cells(
    "mode, options",
    [("sum", {}), ("mean", {"include_last_offset": True}), ("max", {"padding_idx": 2})],
    ["sum", "mean", "max"],
    [{}, {"padding_idx": 2}, {"include_last_offset": True}],
)
def test_bags_of_embeddings(mode: str, options: dict[str, Any]):
    offsets = torch.tensor([0, 3, 3, 5, 7] if "include_last_offset" in options else [0, 3, 3, 5])
    code = with_gradients(lambda w, i: functional.embedding_bag(i, w, offsets.to(i.dtype), mode=mode, **options))
    assert_same(code, WEIGHT, INDICES)


@row("H2")
def test_weighted_bags_of_embeddings():
    weights = RANDOM.standard_normal((2, 3)).astype(np.float32)
    code = with_gradients(
        lambda w, s, i: functional.embedding_bag(i[:6].view(2, 3), w, mode="sum", per_sample_weights=s)
    )
    assert_same(code, WEIGHT, weights, INDICES)


STEPS, SIZES = np.array([6, 5], np.int32), np.array([2, 3], np.int32)
TARGETS = np.array([[1, 2, 0], [2, 2, 3]], np.int32)


@row("H2")
@cells("reduction, is_joined", [("mean", True)], ["none", "mean", "sum"], [False, True])
def test_ctc_loss(reduction: str, is_joined: bool):
    def code(x: Any, targets: Any, steps: Any, sizes: Any) -> Any:
        targets = torch.cat([targets[0, :2], targets[1]]) if is_joined else targets
        return functional.ctc_loss(x.log_softmax(-1), targets, steps, sizes, reduction=reduction)

    scores = RANDOM.standard_normal((6, 2, 4)).astype(np.float32)
    assert_same(with_gradients(code), scores, TARGETS, STEPS, SIZES, rtol=1e-4)


@row("H2")
@slow
def test_ctc_loss_of_targets_that_are_too_long():
    def code(x: Any, targets: Any) -> Any:
        return functional.ctc_loss(x.log_softmax(-1), targets, (2, 2), (2, 3), zero_infinity=True)

    assert_same(with_gradients(code), RANDOM.standard_normal((2, 2, 4)).astype(np.float32), TARGETS, rtol=1e-4)


@row("H2")
def test_spherical_bessel_function_over_all_its_range():
    points = np.concatenate([[0.0, -0.0, np.inf, np.nan, -1, -5, -30, 25, 25.001], np.logspace(-6, 2.2, 60)])
    with jax.enable_x64(True):
        got = jaxfn.from_torch(torch.special.spherical_bessel_j0)(points)
    np.testing.assert_allclose(got, torch.special.spherical_bessel_j0(torch.tensor(points)), rtol=1e-9, atol=1e-13)


def selected(x: Any) -> Any:
    return x[x > 0].prod()


def observed(x: Any) -> Any:
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    on, ends = torch.ones(1, dtype=torch.int64), (-torch.ones(()), torch.ones(()))
    return torch.fused_moving_avg_obs_fake_quant(x, on, on, *ends, one, zero, 0.1, 0, 15, 0)


UNSUPPORTED: dict[str, tuple[Callable[..., Any], str]] = {
    "write to a view of a captured tensor": (lambda x: OUTSIDE.view(5)[:].add_(1) * x, "made outside the"),
    "linearize": (lambda x: torch.func.linearize(torch.sin, x)[0], "torch.func.jvp.*test_numbers"),
    "bincount": (lambda x: torch.bincount((x * x).long(), minlength=6), "index_add_"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), "output_size="),
    "embedding_bag": (
        lambda x: functional.embedding_bag(torch.arange(2)[None], x[:, None], scale_grad_by_freq=True),
        "another row",
    ),
    "ldl_factor": (lambda x: torch.linalg.ldl_factor(x[:, None] * x).LD, "eigh or lu_factor"),
    "bessel_j0": (torch.special.bessel_j0, "aten.special_bessel_j0.*ops="),
    "observer": (observed, "aten._fused_moving_avg_obs_fq_helper_functional.*ops="),
    "histogramdd": (lambda x: torch.histogramdd(x[:, None], [3])[0], "aten._histogramdd_from_bin_cts.*ops="),
    "bilinear": (lambda x: functional.bilinear(x[None], x[None], x.expand(2, 5, 5)), "aten._trilinear.*ops="),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=3), "aten.nonzero_static.*ops="),
    "lstsq": (lambda x: torch.linalg.lstsq(x[:, None], x[:, None])[0], "aten.linalg_lstsq.*ops="),
    "tensor_split": (lambda x: x.tensor_split(x[:2].long()), "tensor_split.*ops="),
    "copy": (copy.copy, "copy.copy.*ops="),
    "product of a selection": (selected, r"`prod` of elements selected by a mask, x\[mask\].*ops="),
}


@row("H4")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_operations_that_raise_say_what_to_do(name: str):
    code, message = UNSUPPORTED[name]
    with pytest.raises(jaxfn.TranslationError, match=f"(?s){message}"):
        jaxfn.from_torch(code)(X)
    np.testing.assert_array_equal(OUTSIDE, np.ones(5))


@row("H4")
def test_a_cumulative_batch_norm_raises():
    net = jaxfn.from_torch(torch.nn.BatchNorm1d(5, momentum=None))
    with pytest.raises(jaxfn.TranslationError, match=r"(?s)BatchNorm1d: .*value of a tensor.*ops="):
        net(X[None].repeat(2, 0))


@row("H9")
def test_a_jax_function_for_a_rare_operation():
    def code(x: Any) -> Any:
        return torch.special.zeta(x, x + 1).sin()

    ours, points = jaxfn.from_torch(code, ops={torch.special.zeta: jax.scipy.special.zeta}), X + 4
    np.testing.assert_allclose(ours(points), code(torch.tensor(points)), rtol=1e-5)


@row("H2")
@pytest.mark.parametrize("mask", [None, "causal", "tensor"])
def test_attention_differentiated_inside(mask: str | None):
    of_tensor = (torch.arange(35).view(5, 7) % 3 > 0) if mask == "tensor" else None

    def code(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=of_tensor, is_causal=mask == "causal")

    arguments = (RANDOM.standard_normal((2, 3, n, 4)).astype(np.float32) for n in (5, 7, 7))
    assert_same(with_gradients(code), *arguments, rtol=1e-4)


@row("H2")
@pytest.mark.parametrize("dim, shape", [(0, (5, 1, 1)), (2, (1, 1, 2))])
def test_weight_norm_differentiated_inside(dim: int, shape: Any):
    code = with_gradients(lambda v, g: torch._weight_norm(v, g, dim))
    norms = RANDOM.uniform(0.5, 2, shape).astype(np.float32)
    assert_same(code, RANDOM.standard_normal((5, 3, 2)).astype(np.float32), norms, rtol=1e-4)


# --- Half precision.

# Not here is what torch itself rounds on the way, such as `x**3` and `log_softmax`.
EACH_ROUNDED_ONCE = {
    "comparison with a number": lambda x, y: (x >= 0.7, x == 0.7, x <= y.new_tensor(0.7), x > 0.7),
    "addition of a number": lambda x, y: (x - 0.7012345, x + 0.7012345, 0.7012345 - x),
    "sums with a factor": lambda x, y: (torch.add(x, y, alpha=0.3), torch.sub(x, y, alpha=0.3)),
    "remainder by a number": lambda x, y: (x % 0.7012345, torch.fmod(x, 0.7012345), 0.7012345 % x),
    "power": lambda x, y: (x**0.7012345, 0.7012345**x, x.abs() ** y),
    "factor": lambda x, y: (x * 0.7012345, x / 0.7012345, x * y, x / y),
    "bounds": lambda x, y: (x.clamp(0.3012345, 0.7012345), torch.maximum(x, y)),
    "several steps in one operation": lambda x, y: (torch.addcmul(x, x, y), torch.lerp(x, y, 0.3), torch.hypot(x, y)),
    "activations": lambda x, y: (functional.gelu(x), functional.silu(x), functional.softplus(x), functional.elu(-x)),
    "sums": lambda x, y: (x.sum(), x.mean(), x.var(), x.std(), (x * y).norm(), x.cumsum(0)),
    "softmax": lambda x, y: (x.softmax(0), x.logsumexp(0)),
    "numbers beyond the range": lambda x, y: (
        (x * 65536.0) * 0.25,
        x.mul(1e-8).add(1.0),
        1e6 / (x + 1000),
        torch.addcmul(x, x * 300, x * 300, value=1e-6),
        torch.linalg.vector_norm(x * 300),
        (x > 1e9).to(x.dtype) + x,
    ),
    "next number": lambda x, y: (torch.nextafter(x, y),),
}


@row("H2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EACH_ROUNDED_ONCE)
def test_half_precision_is_rounded_to_once(name: str, dtype: Any):
    """A thousand numbers, of which nearly all come out to the last bit."""
    x, y = ((torch.linspace(0.05, 4, 999) * factor % 4).to(dtype) for factor in (1, 7.3))
    x[0] = 0.7
    code = EACH_ROUNDED_ONCE[name]
    got = jax.jit(jaxfn.from_torch(code))(*(jnp.asarray(t.float().numpy()).astype(str(dtype)[6:]) for t in (x, y)))
    for g, w in zip(got, code(x, y), strict=True):
        assert str(g.dtype) == str(w.dtype).removeprefix("torch.")
        ours, theirs = np.asarray(g.astype(np.float32)), w.float().numpy()
        differing = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
        assert differing.sum() <= (0 if w.dtype == torch.bool else max(1, 0.02 * differing.size)), name
        np.testing.assert_allclose(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


SPREAD: dict[str, Callable[..., Any]] = {
    "expand": lambda x, y: x.expand(2000),
    "repeat": lambda x, y: x.repeat(2000),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "where": lambda x, y: torch.where(y > 0.5, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0.5, 0.0),
    "gather": lambda x, y: x.gather(0, torch.zeros(2000, dtype=torch.long)),
    "copy_": lambda x, y: y.clone().copy_(x),
}


@row("H2")
@pytest.mark.parametrize("name", SPREAD)
def test_gradients_of_what_is_broadcast_in_half_precision_are_summed_in_single(name: str):
    """A sum in half precision ends at 256: one more is less than its last bit."""
    code = SPREAD[name]
    x, y = torch.tensor([0.75]).bfloat16(), torch.linspace(0.2, 1, 2000).bfloat16()
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(code(leaf, y).sum(), leaf)
    arrays = [jnp.asarray(tensor.float().numpy()).astype("bfloat16") for tensor in (x, y)]
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jaxfn.from_torch(code)(x, arrays[1]))))(arrays[0])
    assert abs(float(gradient[0]) - wanted.item()) <= 2.0**-7 * wanted.item() and wanted.item() > 256
