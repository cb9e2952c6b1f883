"""Row K1: what `kernelcheck` takes and returns, its rule, and its checks of arguments and devices."""

from __future__ import annotations

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxfn import CheckError, kernelcheck
from jaxfn._kernelcheck.error_bounds import expect
from jaxfn._kernelcheck.float64 import promote_to_float64
from jaxfn.reports import KernelcheckReport
from tests.support.checking import rule
from tests.support.kernel_faults import KERNELS, all_but, shape
from tests.support.marks import cells, row, slow

QUICK = ["vmap", "sizes", "donation", "jit", "padding", "determinism", "undifferentiated"]


def saved(function):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return function(x)

    return forward


sine = rule(saved(jnp.sin), lambda ctx, g: g * jnp.cos(ctx.saved_tensors[0]))
wrong_sine = rule(saved(jnp.sin), lambda ctx, g: g * jnp.sin(ctx.saved_tensors[0]))


@row("K1")
def test_a_report_that_is_true():
    report = kernelcheck(sine, jnp.sin, np.linspace(-2, 2, 7))
    assert isinstance(report, KernelcheckReport) and report and report.passed and not report.failures
    assert report.checks[:6] == ["outputs", "gradients", "determinism", "scales", "constants", "vacuous"]
    assert {"jit", "padding", "vmap", "sizes", "donation"} <= set(report.checks)
    row = report.rows[0]
    assert (row.check, row.dtype, row.what) == ("outputs", "float32", "output 0")
    assert 0 <= row.entries[0].error <= row.entries[0].allowed
    table = str(report).splitlines()
    assert table[0].endswith("against sin: passed")
    assert table[1].split() == ["dtype", "worst", "entry", "error", "allowed", "ulps", "in", "norm", "allowed"]
    assert "bfloat16" in str(report) and "vmap: passed" in str(report)
    content = json.loads(report.to_json())
    assert content["passed"] and content["rows"][0]["entries"][0]["allowed"] == row.entries[0].allowed


@row("K1")
def test_an_error_that_says_what_is_wrong_and_where():
    with pytest.raises(CheckError) as caught:
        kernelcheck(wrong_sine, jnp.sin, np.linspace(-2, 2, 7), skip=QUICK)
    report = caught.value.report
    assert report.failed_checks == ["gradients"]
    worst = report.failures[0]
    assert worst.what == "gradient of input 0 ('x')" and worst.count == worst.total > 0
    x = np.linspace(-2, 2, 7, dtype=np.float32).astype(np.float64)
    entry = worst.entries[0]
    ratio = entry.value / entry.expected  # of the rule and the derivative, whatever the cotangent
    np.testing.assert_allclose(ratio, np.tan(x[entry.index]), rtol=1e-4)
    assert "entries have an error larger than allowed" in str(caught.value)
    assert not json.loads(report.to_json())["passed"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert not kernelcheck(wrong_sine, jnp.sin, np.linspace(-2, 2, 7), skip=QUICK, raise_exception=False)


@row("K1")
def test_the_same_seed_gives_the_same_report():
    first, second, other = (
        kernelcheck(sine, jnp.sin, shape(5), dtypes=["float32"], skip=QUICK, seed=seed).to_json() for seed in (0, 0, 1)
    )
    assert first == second != other


@row("K1")
def test_any_callable_will_do():
    @jax.custom_vjp
    def by_jax(x):
        return jnp.sin(x)

    by_jax.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    for kernel in (by_jax, sine.Function.apply, jax.jit(jnp.sin)):
        assert kernelcheck(kernel, jnp.sin, (shape(5),), skip=QUICK)


@row("K1")
@slow
def test_arguments_of_any_structure():
    def reference(params, tokens, key, power, *, mode="plain"):
        assert mode == "plain" and power == 2
        drawn = jax.random.bernoulli(key, 0.5, tokens.shape)
        looked_up = params["table"][tokens] * drawn[:, None]
        return {"y": looked_up**power + params["bias"], "hits": drawn.sum(), "name": "y"}

    params = {"table": np.arange(12.0).reshape(4, 3), "bias": np.ones(3, np.float32)}
    given = (params, np.array([1, 3, 3, 0, 2]), jax.random.key(0), 2)
    report = kernelcheck(reference, reference, given)
    names = [row.what for row in report.rows if row.check in ("outputs", "gradients") and row.dtype == "float32"]
    assert names == [
        "output 0['y']",
        "gradient of input 0 ('params')['bias']",
        "gradient of input 0 ('params')['table']",
        "output 0['hits']",
    ]

    def wrong(params, tokens, key, power):
        return reference(params, tokens, key, power) | {"hits": jnp.int32(-1)}

    (failure,) = kernelcheck(
        wrong, reference, given, skip=[*QUICK, "scales", "constants"], raise_exception=False, dtypes=["float32"]
    ).failures
    assert failure.what == "output 0['hits']" and "differ from the reference" in failure.message


@row("K1")
def test_argnums_choose_what_is_differentiated():
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    half = rule(forward, lambda ctx, g: (g * ctx.saved_tensors[1], None))
    given = shape(4), shape(4)
    assert kernelcheck(half, jnp.multiply, given, argnums=0, skip=QUICK)
    report = kernelcheck(half, jnp.multiply, given, argnums=(0, 1), skip=QUICK, raise_exception=False)
    wrong = {row.what for row in report.failures if row.check == "gradients"}
    assert len(wrong) == 1 and wrong.pop().startswith("gradient of input 1")


@row("K1")
@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"skip": "gradient"}, ValueError, "skip= names 'gradient'"),
        ({"dtypes": "float64"}, ValueError, "expected float32"),
        ({"dtypes": []}, ValueError, "at least one dtype"),
        ({"argnums": 3}, ValueError, "argnums names argument 3"),
        ({"inputs": np.arange(3)}, ValueError, "at least one floating-point array"),
        ({"inputs": jax.ShapeDtypeStruct((3,), "int32")}, ValueError, "only floating-point arrays are drawn"),
        ({"inputs": np.ones(3, np.complex64)}, TypeError, "gradcheck takes complex ones"),
    ],
)
def test_options_that_raise(kwargs, error, message):
    with pytest.raises(error, match=message):
        kernelcheck(sine, jnp.sin, **{"inputs": shape(3), **kwargs})


@row("K1")
@pytest.mark.parametrize(
    "kernel, returned", [(jnp.isnan, "bool[3] as output 0"), (lambda x: {"y": x}, "float32[3] as output 0['y']")]
)
def test_other_outputs_than_those_of_the_reference(kernel, returned):
    (failure,) = kernelcheck(kernel, jnp.sin, shape(3), dtypes="float32", raise_exception=False).failures
    assert failure.message == f"the kernel returns {returned}, and the reference float32[3] as output 0"


@row("K1")
def test_what_the_reference_raises_comes_through():
    def reference(x):
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        kernelcheck(sine, reference, shape(3))


# The rule.


@row("K1")
def test_zeros_pass_for_a_reference_whose_gradient_is_zero_and_that_is_said():
    """The sum of a softmax is 1, whatever goes in."""

    def reference(x):
        return jax.nn.softmax(x).sum(-1)

    kernel = rule(saved(reference), lambda ctx, g: 0 * ctx.saved_tensors[0])
    report = kernelcheck(kernel, reference, shape(4, 6), skip=[*QUICK, "scales", "constants"], raise_exception=False)
    assert report.failed_checks == ["vacuous"]
    assert kernelcheck(kernel, reference, shape(4, 6), skip=[*QUICK, "scales", "constants"], allow_zero_gradients=True)


@row("K1")
def test_an_input_without_a_derivative_in_the_reference_is_noted():
    def masked(x, mask):
        return jnp.where(mask > 0, jnp.sin(x), 0)

    report = kernelcheck(masked, masked, (1 + np.eye(5, 3), np.eye(5, 3)), dtypes=["float32"], skip=all_but("vacuous"))
    assert "gradient of input 1 ('mask'): is zero: the reference has no such derivative" in str(report)


def attention_to_one_key(is_right):
    """Rows attend to one key alone, so that only its value has a gradient; the rule is that of flash attention."""

    def reference(query, key, value):
        return jax.nn.softmax(query @ key.T) @ value

    def forward(ctx, query, key, value):
        output = reference(query, key, value)
        ctx.save_for_backward(query, key, value, output)
        return output

    def backward(ctx, g):
        query, key, value, output = ctx.saved_tensors
        of_weights = g @ value.T
        delta = (output * g)[:, ::-1].sum(-1, keepdims=True)  # rounded otherwise than the product before
        of_scores = of_weights - delta if is_right else of_weights
        return of_scores @ key, of_scores.T @ query, g.sum(0, keepdims=True)

    return rule(forward, backward), reference, (shape(8, 5), shape(1, 5), shape(1, 5))


@row("K1")
@slow
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_rounding_of_a_gradient_that_is_exactly_zero_is_allowed(scale):
    kernel, reference, given = attention_to_one_key(is_right=True)
    given = [scale * np.random.default_rng(i).standard_normal(s.shape) for i, s in enumerate(given)]
    assert np.any(np.asarray(jax.vjp(kernel, *map(jnp.float32, given))[1](jnp.float32(given[0]))[0]))
    report = kernelcheck(kernel, reference, given, raise_exception=False)
    assert report.failed_checks == ["vacuous"]
    assert kernelcheck(kernel, reference, given, allow_zero_gradients=True)
    wrong, *_ = attention_to_one_key(is_right=False)
    report = kernelcheck(wrong, reference, given, allow_zero_gradients=True, raise_exception=False)
    assert {row.dtype for row in report.failures if row.check == "gradients"} == {"float32", "bfloat16"}


@row("K1")
@cells("dtype", ["bfloat16"], ["float32", "bfloat16", "float16"])
def test_a_kernel_is_measured_by_the_reference(dtype):
    """A kernel may have some normally distributed errors that are little larger, but none many times as large."""
    generator = np.random.default_rng(0)
    eps = float(jnp.finfo(dtype).eps)
    false_alarms = missed = 0
    for size in (1, 3, 30, 1000):
        for _ in range(200):
            exact = generator.standard_normal((8, size))
            moved = exact * (1 + eps / 2 * generator.uniform(-1, 1, exact.shape))
            scale = 20 * eps * 10 ** generator.uniform(-1, 0, size)
            errors = scale * generator.standard_normal((2, *exact.shape))
            expected = expect(exact, exact + errors[0], moved, dtype)
            false_alarms += not expected.compare(exact + errors[1], 2.0).passed
            missed += size == 1000 and expected.compare(exact + 5 * errors[1], 2.0).passed
    assert false_alarms == missed == 0


@row("K1")
def test_a_reference_that_is_exact_by_luck_does_not_forbid_rounding():
    exact = np.full((8, 3), 4.75)
    expected = expect(exact, exact, exact, "bfloat16")
    one_off = exact + 4.75 * 2.0**-8
    assert expected.compare(exact, 2.0).passed and not expected.compare(one_off + 0.2, 2.0).passed
    assert expected.compare(np.where(np.arange(24).reshape(8, 3) == 0, one_off, exact), 2.0).passed


@row("K1")
def test_what_is_not_finite():
    exact = np.array([[np.inf, -np.inf, np.nan, 1e39, 1.0]])
    reference = np.array([[np.inf, -np.inf, np.nan, np.inf, 1.0]])
    expected = expect(exact, reference, exact, "float32")
    assert expected.compare(reference, 2.0).passed
    assert expected.compare(np.array([[np.inf, -np.inf, 5.0, 3e38, 1.0]]), 2.0).passed
    for values in ([0.0, -np.inf, np.nan, 1.0, 1.0], [np.inf, np.inf, 0.0, 0.0, 1.0], [np.inf, -np.inf, 0, 0, np.nan]):
        assert not expected.compare(np.array([values]), 2.0).passed


@row("K1")
def test_a_worse_formula_is_found_and_allowed_by_a_larger_factor():
    """The variance as a difference of large numbers, which cancel."""

    def worse(x):
        return (x * x).mean(-1) - x.mean(-1) ** 2

    def reference(x):
        return ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1)

    given = (50 + np.random.default_rng(0).standard_normal((6, 40)),)
    skip = [*QUICK, "scales", "constants"]
    assert not kernelcheck(worse, reference, given, dtypes=["float32"], skip=skip, raise_exception=False)
    assert kernelcheck(worse, reference, given, dtypes=["float32"], skip=skip, factor=1e4)


@row("K1")
def test_a_reference_that_casts_is_computed_in_double_precision():
    """Every kind of inner program, by the same function without casts."""

    def casting(x, w):
        h = x.astype(jnp.float32)
        h, ys = jax.lax.scan(lambda c, a: (c + jax.nn.silu(a) * jnp.float32(1.5), c), jnp.zeros(4, jnp.float32), h)
        h = jax.lax.cond(w.sum() > 0, lambda h: h.astype(jnp.bfloat16).astype(jnp.float32), lambda h: 2 * h, h)
        h = jax.lax.fori_loop(0, 3, lambda i, h: h * jnp.float32(1.25), h)
        h = jax.checkpoint(lambda h: jnp.sin(h.astype(jnp.float16)))(h).astype(jnp.float32)
        return (jnp.einsum("i,ij->j", h, w, preferred_element_type=jnp.float32) + ys.sum(0)[:3]).astype(x.dtype)

    def plain(x, w):
        c = jnp.cumsum(jax.nn.silu(x) * 1.5, 0)
        return jnp.sin(c[-1] * 1.25**3) @ w + c[:-1].sum(0)[:3]

    def with_gradients(function):
        def run(x, w, g):
            y, pull = jax.vjp(function, x, w)
            return y, *pull(g)

        return run

    generator = np.random.default_rng(0)
    given = [generator.uniform(0.1, 1, size) for size in ((5, 4), (4, 3), (3,))]
    with jax.enable_x64(True):
        function, note = promote_to_float64(with_gradients(casting), *given)
        for got, wanted in zip(jax.jit(function)(*given), with_gradients(plain)(*given), strict=True):
            assert got.dtype == wanted.dtype == np.float64
            np.testing.assert_allclose(got, wanted, rtol=1e-11)
        assert "bfloat16, float16, float32" in note
        assert promote_to_float64(with_gradients(plain), *given)[1] == ""


@row("K1")
def test_a_reference_that_draws_gets_the_same_numbers_in_double_precision():
    """Equal keys draw other numbers with x64."""

    def function(key, x):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return x * kept * jax.random.uniform(key, x.shape, jnp.float32)

    key, x = jax.random.key(0), np.random.default_rng(0).uniform(1, 2, 9).astype(np.float32)
    single = np.asarray(function(key, x))
    assert 0 < (single == 0).sum() < 9
    with jax.enable_x64(True):
        run, note = promote_to_float64(function, key, x.astype(np.float64))
        exact = np.asarray(run(key, x.astype(np.float64)))
    assert exact.dtype == np.float64 and "draws random numbers" in note and "by the same operations" in note
    np.testing.assert_allclose(exact, single, rtol=1e-6)
    assert (exact != single).any()  # it was not computed in float32


# Circumstances.


@row("K1")
def test_on_eight_devices():
    made = KERNELS["layer norm"]
    kernel = made.made()
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    given = shape(16, 5), shape(5), shape(5)

    def check(kernel):
        def sharded(f):
            return jax.shard_map(f, mesh=mesh, in_specs=(P("rows"), P(), P()), out_specs=P("rows"))

        return kernelcheck(kernel, made.reference, given, shard=sharded, skip=QUICK, raise_exception=False)

    report = check(kernel)
    assert report and report.checks[-1] == "shard"

    def by_index(x, weight, bias):  # right where there is one block of rows
        try:
            first = jax.lax.axis_index("rows") == 0
        except NameError:
            first = True
        return kernel(x, weight, bias) * jnp.where(first, 1, 1.5)

    assert check(by_index).failed_checks == ["shard"]


@row("K1")
def test_other_sizes_are_passed_or_derived():
    def only_even(x):
        if len(x) % 2:
            raise ValueError("an odd number of rows")
        return jnp.sin(x)

    report = kernelcheck(only_even, jnp.sin, shape(4, 3))
    refused = [r for r in report.rows if r.check == "sizes" and "not supported" in r.message]
    assert [r.what for r in refused] == ["4 made 9"] and "an odd number of rows" in refused[0].message

    def eight_columns(x):
        return jnp.sin(x).at[:, 8:].set(0)

    assert kernelcheck(eight_columns, jnp.sin, shape(4, 3), sizes=[shape(5, 8)], skip=["vmap"])
    report = kernelcheck(eight_columns, jnp.sin, shape(4, 3), sizes=[shape(5, 9)], raise_exception=False)
    assert report.failed_checks == ["sizes"]
    assert {r.what for r in report.failures} == {
        "output 0 for shapes (5, 9)",
        "gradient of input 0 ('x') for shapes (5, 9)",
    }


@row("K1")
def test_a_kernel_that_reads_past_the_end_of_a_block():
    """Pallas' interpret mode fills up blocks with NaN."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...].sum(0, keepdims=True)

    def summed(x):
        of_blocks = pl.pallas_call(
            kernel,
            grid=(pl.cdiv(len(x), 4),),
            in_specs=[pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((pl.cdiv(len(x), 4), x.shape[1]), x.dtype),
            interpret=True,
        )
        return of_blocks(x).sum(0)

    report = kernelcheck(
        summed, lambda x: x.sum(0), shape(8, 3), dtypes=["float32"], skip=["gradients"], raise_exception=False
    )
    assert report.failed_checks == ["sizes"]
    assert [r.what for r in report.failures] == ["output 0 for 8 made 17"]
    assert np.isnan(report.failures[0].entries[0].value)
