"""Interpreters of jaxprs that do not know jaxfn: an exporter to ONNX (jax2onnx), and forward Laplacians (folx).

No rule here is the derivative of forward's operations, so that the numbers show which of the two was used.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import function_of
from tests.support.marks import EXPERIMENTAL, row, slow


def to_nearest(x):
    return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)  # jnp.round is jitted


# A straight-through estimator of slope 3 where |x| < 2.
rounded = function_of("backward", to_nearest, None, lambda saved, g: 3 * g * (jnp.abs(saved[0]) < 2))


class Dense(jaxfn.Function):
    """A layer that saves an intermediate."""

    @staticmethod
    def forward(ctx, x, w):
        y = jnp.tanh(x @ w)
        ctx.save_for_backward(x, w, y)
        return 2 * y

    @staticmethod
    def backward(ctx, grad_output):
        x, w, y = ctx.saved_tensors
        return 5 * (grad_output * y) @ w.T, 7 * x.T @ (grad_output * y)


def times_cosine(saved, g):
    return jnp.cos(saved[0]) * g


# Roundings with the derivative of the sine, in both modes: folx takes second derivatives in several ways.
SINES = {rules: function_of(rules, to_nearest, times_cosine, times_cosine) for rules in ("jvp", "both", "generated")}

RNG = np.random.default_rng(0)
X, V, W = (RNG.uniform(-3, 3, shape).astype(np.float32) for shape in [(4, 3), (4, 3), (3, 5)])
SLOPE = 3 * (abs(X) < 2)
Y = np.tanh(np.round(X) @ W)  # what Dense saves in `layers`


def weighted(x, v):
    return (rounded(x) ** 2 * v).sum()


def layers(x, w):
    return Dense.apply(rounded(x), w).sum()


def repeated(x):
    return jax.lax.scan(lambda x, _: (2 * rounded(x), None), x, None, length=2)[0]


# A program, its arguments, and its results by mathematics.
PROGRAMS = {
    "call": (layers, (X, W), [2 * Y.sum()]),
    "gradient": (jax.grad(weighted), (X, V), [2 * np.round(X) * V * SLOPE]),
    "gradient through intermediate": (jax.grad(layers, (0, 1)), (X, W), [SLOPE * (5 * Y @ W.T), 7 * np.round(X).T @ Y]),
    "checkpoint": (jax.grad(jax.checkpoint(layers), (0, 1)), (X, W), [SLOPE * (5 * Y @ W.T), 7 * np.round(X).T @ Y]),
    "second derivative": (jax.grad(lambda x, v: jax.grad(weighted)(x, v).sum()), (X, V), [2 * V * SLOPE**2]),
    "jvp": (lambda x, v: jax.jvp(SINES["jvp"], (x,), (v,)), (X, V), [np.round(X), np.cos(X) * V]),
    "gradient in both modes": (jax.grad(lambda x: SINES["both"](x).sum()), (X,), [np.cos(X)]),
    "scan": (repeated, (X,), [4 * np.round(X)]),
    "vmap": (jax.vmap(rounded), (X,), [np.round(X)]),
}
CHECK = pytest.mark.xfail(
    strict=True, reason="that jvp is linear is checked by a linear_map, which jax2onnx does not know"
)


@slow
@row("E1", "D1", "D4")
@pytest.mark.skipif(EXPERIMENTAL, reason="jax2onnx does not know call_hi_primitive")
@pytest.mark.parametrize("program", [pytest.param(name, marks=CHECK if name == "jvp" else ()) for name in PROGRAMS])
def test_an_exported_program_has_the_rules(program, monkeypatch):
    jax2onnx = pytest.importorskip("jax2onnx")
    reference = pytest.importorskip("onnx.reference")
    monkeypatch.setattr(jnp, "cumsum", jnp.cumsum)  # jax2onnx 0.17.1 replaces it, and does not put it back
    function, args, expected = PROGRAMS[program]
    model = jax2onnx.to_onnx(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    inputs = {value.name: x for value, x in zip(model.graph.input, args, strict=True)}
    results = reference.ReferenceEvaluator(model).run(None, inputs)
    for result, by_jax, value in zip(results, jax.tree.leaves(function(*args)), expected, strict=True):
        np.testing.assert_allclose(by_jax, value, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-5)


@row("D1", "D4", "D5", "D5b")
@pytest.mark.parametrize("rules", SINES)
def test_a_forward_laplacian_has_the_rule(rules):
    function = SINES[rules]
    folx = pytest.importorskip("folx")
    x = np.linspace(-2, 3, 5, dtype=np.float32)

    def f(x):
        return (function(x) ** 2).sum() + function(x[0] * x[1])

    found, product = folx.forward_laplacian(f)(x), x[0] * x[1]
    first = 2 * np.round(x) * np.cos(x)
    first[:2] += np.cos(product) * x[1::-1]
    second = 2 * np.cos(x) ** 2 - 2 * np.round(x) * np.sin(x)
    second[:2] -= np.sin(product) * x[1::-1] ** 2
    np.testing.assert_allclose(found.jacobian.dense_array, first, rtol=1e-5)
    np.testing.assert_allclose(found.laplacian, second.sum(), rtol=1e-5)


@row("D6")
def test_a_forward_laplacian_of_backward_alone_raises_the_error_of_JAX():
    folx = pytest.importorskip("folx")
    with pytest.raises(TypeError, match="forward-mode"):
        folx.forward_laplacian(lambda x: rounded(x).sum())(X[0])
