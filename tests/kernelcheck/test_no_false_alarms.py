"""Row K1: kernels that are as good as their references pass, from any source."""

from __future__ import annotations

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxfn import kernelcheck
from jaxfn._kernelcheck.arguments import kernel_arguments
from jaxfn._kernelcheck.comparison import Float64Reference, KernelComparison, combined
from jaxfn._kernelcheck.error_bounds import ExpectedArray
from tests.support.kernel_faults import all_but, shape
from tests.support.marks import row, slow


def operations(name):
    """A module of JAX's own Pallas kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return importlib.import_module(f"jax.experimental.pallas.ops.{name}")
        except ImportError:
            return pytest.skip(f"this JAX has no {name}")


@row("K1")
def test_softmax_in_pallas():
    softmax = operations("gpu.softmax").softmax

    def kernel(x):
        return softmax(x, interpret=True)

    report = kernelcheck(
        kernel, jax.nn.softmax, shape(6, 32), skip=["gradients", "vmap", "sizes"]
    )  # it has no gradients
    assert report.checks[0] == "outputs" and "gradients" not in report.checks


@row("K1")
@slow
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_in_pallas(name):
    module = operations(f"gpu.{name}")

    def kernel(x, weight, bias):
        return getattr(module, name)(x, weight, bias, interpret=True)

    assert kernelcheck(kernel, getattr(module, f"{name}_reference"), (shape(2, 4, 32), shape(32), shape(32)))


@row("K1")
@slow
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_in_pallas(causal):
    module = operations("gpu.attention")
    sizes = ("block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    blocks = module.BlockSizes(**dict.fromkeys(sizes, 16))

    def kernel(q, k, v):
        return module.mha(q, k, v, None, sm_scale=0.25, causal=causal, block_sizes=blocks, interpret=True)

    def reference(q, k, v):
        return module.mha_reference(q, k, v, None, sm_scale=0.25, causal=causal)

    report = kernelcheck(kernel, reference, (shape(2, 32, 2, 16),) * 3)
    assert any(
        "not supported" in r.message and "multiple of block_q" in r.message for r in report.rows if r.check == "sizes"
    )
    assert "by the same operations in float64" in report.notes[0]


@row("K1")
@slow
def test_kernels_for_tpus_in_pallas():
    """Interpreted kernels cannot be batched: JAX raises, and that check is skipped."""
    flash, product = operations("tpu.flash_attention"), operations("tpu.matmul")

    def attention(q, k, v):
        return flash.flash_attention(q, k, v, causal=True)

    def reference(q, k, v):
        return flash.mha_reference_no_custom_vjp(q, k, v, causal=True)

    def matmul(x, y):
        return product.matmul(x, y, block_shape=(8, 128), block_k=128)

    with pltpu.force_tpu_interpret_mode():
        assert kernelcheck(attention, reference, (shape(1, 1, 128, 128),) * 3, skip=["vmap"])
        # JAX's example of a matmul does not look at sizes, and is wrong unless they are multiples of its blocks.
        given = (shape(16, 128), shape(128, 256))
        report = kernelcheck(matmul, jnp.matmul, given, skip=["vmap", "gradients"], raise_exception=False)
    assert "outputs" in report.checks and report.failed_checks == ["sizes"]


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def attention_by_rows(q, k, v):
    def of_row(q):
        logits = jnp.einsum("nh,snh->ns", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        return jnp.einsum("ns,snh->nh", jax.nn.softmax(logits, -1).astype(v.dtype), v)

    return jax.vmap(of_row)(q)


def log_softmax(x):
    return x - jax.nn.logsumexp(x, -1, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + jax.lax.erf(x * np.sqrt(0.5).astype(x.dtype)))


def standardized(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def sigmoid(x):
    return 0.5 * (1 + jnp.tanh(0.5 * x))


def glu(x):
    half = x.shape[-1] // 2
    return x[..., :half] * sigmoid(x[..., half:])


def relu_of_product(x, w):
    return jnp.where((w.T @ x.T).T > 0, x @ w, 0)


PAIRS = {
    "softmax": (jax.nn.softmax, lambda x: jnp.exp(log_softmax(x)), [shape(7, 19)]),
    "log_softmax": (jax.nn.log_softmax, log_softmax, [shape(7, 19)]),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), gelu, [shape(40)]),
    "softplus": (jax.nn.softplus, lambda x: jnp.logaddexp(x, 0.0), [shape(40)]),
    "standardize": (lambda x: jax.nn.standardize(x, epsilon=1e-5), standardized, [shape(7, 19)]),
    "glu": (jax.nn.glu, glu, [shape(7, 12)]),
    "attention": (attention, attention_by_rows, [shape(9, 2, 4)] * 3),
    "one number": (jnp.sum, lambda x: x.reshape(-1, 4).sum(0).sum(), [shape(64)]),
    "relu of a product": (lambda x, w: jax.nn.relu(x @ w), relu_of_product, [shape(6, 8), shape(8, 5)]),
}
SEEDS = 100


def comparison_of(kernel, reference, inputs, dtype):
    generator = np.random.default_rng(0)
    arguments = kernel_arguments(reference, tuple(inputs), None, generator)
    exact = Float64Reference(reference, arguments)
    return KernelComparison(kernel, reference, arguments, jnp.dtype(dtype), 8, 2.0, generator, exact)


def alarms(kernel, reference, inputs, dtype):
    """Yields the failed rows of outputs and gradients for new inputs, again and again, by executables compiled once."""
    comparison = comparison_of(kernel, reference, inputs, dtype)
    for _ in range(SEEDS):
        values = comparison.arguments.values
        samples = comparison.sample([comparison.generator.standard_normal(value.shape) for value in values])
        rows = comparison.compare("outputs", comparison.run(samples), comparison.expect(samples))
        yield from (row for row in rows if not row.passed)


def textbook_softmax(x):
    """Autodiff adds the rounding errors of a row in the gradient of its largest entry."""
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@row("K1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nearly_equal_inputs_have_the_errors_of_numbers_of_their_magnitude(dtype):
    comparison = comparison_of(textbook_softmax, jax.nn.softmax, [shape(16, 33)], dtype)
    for _ in range(SEEDS):
        (value,) = (comparison.generator.standard_normal(x.shape) for x in comparison.arguments.values)
        usual, small = comparison.sample([value]), comparison.sample([1e-3 * value])
        expected = combined(comparison.expect(small), comparison.expect(usual), ExpectedArray.with_errors_of)
        assert not [r for r in comparison.compare("scales", comparison.run(small), expected) if not r.passed]


@row("K1")
def test_a_formula_that_loses_digits_for_small_inputs_is_found():
    report = kernelcheck(
        lambda x: jnp.exp(x) - 1,
        jnp.expm1,
        shape(30),
        dtypes=["float32"],
        skip=all_but("scales"),
        raise_exception=False,
    )
    assert report.failed_checks == ["scales"]


@row("K1")
@slow
@pytest.mark.parametrize("name", PAIRS)
def test_functions_of_jax_on_both_sides(name):
    """Two ways to compute one function, each as the reference of the other."""
    function, other, inputs = PAIRS[name]
    for kernel, reference in ((function, function), (other, function), (function, other)):
        for dtype in ("float32", "bfloat16"):
            assert list(alarms(kernel, reference, inputs, dtype)) == []
    assert kernelcheck(other, function, tuple(inputs), skip=["sizes"] if name in ("glu", "one number") else [])


@row("K1")
@slow
def test_a_formula_that_overflows_where_the_reference_does_not():
    """`exp(-x)` is infinite for large negative numbers, and its derivative then NaN."""
    report = kernelcheck(lambda x: x / (1 + jnp.exp(-x)), jax.nn.silu, shape(40), raise_exception=False)
    assert report.failed_checks == ["scales"]
    assert {r.what for r in report.failures} == {"gradient of input 0 ('x'), inputs times 1000"}
