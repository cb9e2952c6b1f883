"""`jax.linear_transpose` of Functions that are linear in some of their inputs, by their own rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfn
from tests.support.cases import on_host, with_rules
from tests.support.contexts import CONTEXTS
from tests.support.marks import NO_REMAT_TRANSPOSE, cells, row

N, K = 4, 3
rng = np.random.default_rng(0)
A = rng.normal(size=(K, N)).astype(np.float32)
X = rng.normal(size=N).astype(np.float32)
Y = rng.normal(size=K).astype(np.float32)

JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
RULES = pytest.mark.parametrize("rules", ["both", "generated", "jvp"])


# --- what forward computes, and saves


def product(save: str, where: str, rules: str) -> Any:
    """a @ x, which saves the matrix, both, or what it computed from the matrix alone."""

    def forward(ctx, a, x):
        if save == "intermediate":
            ctx.a = jnp.tanh(a)
            ctx.a = jnp.arctanh(ctx.a)
        elif save == "of both":
            ctx.a, ctx.unused = a, jnp.exp(x).sum() * a
        else:
            ctx.a = a
        ctx.x = x if save in ("both", "of both") else None
        if where == "host":
            return on_host(np.matmul, jax.ShapeDtypeStruct(a.shape[:1], x.dtype), a, x)
        if where == "nonlinear":  # the rule, and not this, says what the function is
            return jnp.log(jnp.exp(a @ x)) + jnp.round(x[0] * x[1]) * 0
        return a @ x

    def backward(ctx, g):
        of_a = jnp.outer(g, ctx.x) if ctx.needs_input_grad.a and ctx.x is not None else None
        return of_a, ctx.a.T @ g

    return with_rules(rules, forward, backward, lambda ctx, ta, tx: ctx.a @ tx)


@row("D7")
@cells(
    "save,where,program,rules",
    [
        ("matrix", "here", "eager", "jvp"),
        ("matrix", "nonlinear", "jit", "generated"),
        ("both", "host", "eager", "both"),
        ("both", "nonlinear", "eager", "jvp"),
        pytest.param("both", "here", "checkpoint", "generated", marks=NO_REMAT_TRANSPOSE),
        ("intermediate", "host", "jit", "generated"),
        ("intermediate", "nonlinear", "eager", "both"),
        pytest.param("intermediate", "host", "checkpoint", "jvp", marks=NO_REMAT_TRANSPOSE),
        ("of both", "here", "jit", "both"),
        ("of both", "host", "eager", "generated"),
    ],
)
@JIT
def test_the_transpose_is_that_of_the_rule(wrap, save, where, program, rules):
    f = CONTEXTS[program](partial(product(save, where, rules), A))
    np.testing.assert_allclose(wrap(lambda y: jax.linear_transpose(f, X)(y)[0])(Y), A.T @ Y, rtol=1e-5)


@row("D7")
@RULES
@JIT
def test_the_transpose_by_all_inputs_of_a_sum(wrap, rules):
    def forward(ctx, pair, z):
        ctx.set_materialize_grads(False)
        return on_host(lambda x, y, z: 2 * x - 3 * y + z, pair["x"], pair["x"], pair["y"], z)

    f = with_rules(
        rules,
        forward,
        lambda ctx, g: {"pair": {"x": 2 * g, "y": -3 * g}, "z": g},
        lambda ctx, t, tz: sum(
            (scale * x for scale, x in ((2, t and t["x"]), (-3, t and t["y"]), (1, tz)) if x is not None), jnp.zeros(N)
        ),
    )
    pair, z = wrap(lambda g: jax.linear_transpose(f, {"x": X, "y": X}, X)(g))(X)
    np.testing.assert_allclose([pair["x"], pair["y"], z], [2 * X, -3 * X, X], rtol=1e-6)


class Two(NamedTuple):
    product: Any
    index: Any
    sums: Any


def two_outputs(rules: str, materialize: bool) -> Any:
    """(a @ x, an integer, {"first": sum(x), "rest": x})."""

    def forward(ctx, a, x):
        ctx.set_materialize_grads(materialize)
        ctx.save_for_backward(a, x)
        return Two(on_host(np.matmul, Y, a, x), jnp.int32(len(a)), {"first": x.sum(), "rest": x * 1})

    def backward(ctx, g, _, h):
        a, x = ctx.saved_tensors
        g = jnp.zeros(K) if g is None else g
        first, rest = (h["first"], h["rest"]) if h is not None else (None, None)
        first, rest = 0.0 if first is None else first, 0.0 if rest is None else rest
        return jnp.outer(g, x), a.T @ g + first + rest

    def jvp(ctx, ta, tx):
        a, x = ctx.saved_tensors
        of_a = 0 if ta is None else ta @ x
        return Two(of_a + a @ tx, None, {"first": tx.sum(), "rest": tx})

    return with_rules(rules, forward, backward, jvp)


@row("D7", "B3")
@cells(
    "used,materialize,rules,within",
    [
        ("all", True, "both", "eager"),
        ("all", False, "generated", "jit"),
        ("product", False, "both", "eager"),
        ("first", False, "jvp", "jit"),
        ("rest", False, "generated", "eager"),
        ("rest", True, "jvp", "jit"),
    ],
    ["all", "product", "first", "rest"],
    [True, False],
    ["both", "generated", "jvp"],
    ["eager", "jit"],
)
def test_the_transpose_of_several_outputs(used, materialize, rules, within):
    f = two_outputs(rules, materialize)

    def some(x):
        y, index, sums = f(A, x)
        del index
        return {"all": (y, sums["first"], sums["rest"]), "product": y, **sums}[used]

    def expected(x):
        return {"all": (A @ x, x.sum(), x * 1), "product": A @ x, "first": x.sum(), "rest": x * 1}[used]

    cotangents = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) + 2, expected(X))
    for wrap in (lambda f: f, jax.jit):
        (got,) = wrap(lambda ct: jax.linear_transpose(CONTEXTS[within](some), X)(ct))(cotangents)
        np.testing.assert_allclose(got, jax.linear_transpose(expected, X)(cotangents)[0], rtol=1e-5)


# --- programs


# Linear functions of x, of (a matrix product, a, x).
PROGRAMS: dict[str, Callable[..., Any]] = {
    "vmap, unmapped matrix": lambda f, a, x: jax.vmap(f, (None, 1), 1)(a, jnp.stack([x, 2 * x, -x], 1)),
    "vmap of the matrix": lambda f, a, x: jax.vmap(f, (2, None), 1)(jnp.stack([a, 2 * a], 2), x),
    "vmap of both": lambda f, a, x: jax.vmap(f, (2, 0), 1)(jnp.stack([a, 2 * a], 2), jnp.stack([x, 3 * x])),
    "vmap by name": lambda f, a, x: jax.vmap(
        lambda a, x: lax.psum(f(a, x), "i") + f(a, x), (2, None), 1, axis_name="i"
    )(jnp.stack([a, 2 * a], 2), x),
    "two vmaps": lambda f, a, x: jax.vmap(jax.vmap(f, (None, 0)), (2, None))(
        jnp.stack([a, 2 * a], 2), jnp.stack([x, 3 * x])
    ),
    "jit of vmap": lambda f, a, x: jax.jit(jax.vmap(f, (None, 1), 1))(a, jnp.stack([x, 2 * x, -x], 1)),
    "vmap of jit": lambda f, a, x: jax.vmap(jax.jit(f), (None, 1), 1)(a, jnp.stack([x, 2 * x, -x], 1)),
    "carried": lambda f, a, x: lax.scan(lambda c, b: (a.T @ f(b, c), c.sum()), x, jnp.stack([a, 2 * a])),
    "scanned": lambda f, a, x: lax.scan(lambda c, x: (c + f(a, x), f(2 * a, x)), jnp.zeros(K), jnp.stack([x, 3 * x])),
    "cond": lambda f, a, x: lax.cond(a[0, 0] > -9, lambda x: f(a, x), lambda x: 2 * f(a, x), x),
    "switch in scan": lambda f, a, x: lax.scan(
        lambda c, i: (c + lax.switch(i, [lambda x: f(a, x), lambda x: f(-a, x)], x), None), jnp.zeros(K), jnp.arange(2)
    )[0],
    "nested jits": lambda f, a, x: jax.jit(lambda x: jax.jit(lambda x: f(a, 2 * x))(x) + f(a, x))(x),
    "checkpoint": lambda f, a, x: jax.checkpoint(lambda x: f(a, x) * 2)(x),
    "twice": lambda f, a, x: f(a, a.T @ f(a, x)),
    "nothing of x": lambda f, a, x: (f(a, x), x),
}


@row("D7", "E1")
@cells(
    "program,where,rules",
    [
        ("vmap, unmapped matrix", "host", "both"),
        ("vmap of the matrix", "here", "generated"),
        ("vmap of both", "host", "jvp"),
        ("vmap by name", "here", "jvp"),
        ("two vmaps", "host", "generated"),
        ("jit of vmap", "here", "both"),
        ("vmap of jit", "host", "jvp"),
        ("carried", "host", "generated"),
        ("scanned", "here", "both"),
        ("cond", "host", "jvp"),
        ("switch in scan", "here", "generated"),
        ("nested jits", "host", "both"),
        pytest.param("checkpoint", "here", "jvp", marks=NO_REMAT_TRANSPOSE),
        ("twice", "host", "generated"),
        ("nothing of x", "here", "both"),
    ],
)
@JIT
def test_the_transpose_of_programs(wrap, program, where, rules):
    """Before: "Transpose rule for 'settle' not implemented"."""

    def transposed(f):
        linear = partial(PROGRAMS[program], f, A)
        like = jax.eval_shape(linear, X)
        cotangents = jax.tree.map(lambda x: jnp.sin(1.0 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), like)
        return jax.linear_transpose(linear, X)(cotangents)[0]

    f = product("both", where, rules)
    np.testing.assert_allclose(wrap(lambda: transposed(f))(), transposed(jnp.matmul), rtol=1e-4)


@row("D7", "D1")
@RULES
@JIT
def test_the_transpose_of_a_transpose_is_the_function(wrap, rules):
    """`backward` and `jvp` are plain operations here, which JAX transposes back."""
    f = partial(product("both", "host", rules), A)

    def twice(x):
        def transposed(y):
            return jax.linear_transpose(f, X)(y)[0]

        return jax.linear_transpose(transposed, Y)(x)[0]

    np.testing.assert_allclose(wrap(twice)(X), A @ X, rtol=1e-5)


@row("D7", "D1")
@pytest.mark.parametrize("rules", ["both", "generated"])
@JIT
def test_a_batch_and_derivatives_of_a_transpose(wrap, rules):
    def transposed(f, a, y):
        return jax.linear_transpose(lambda x: f(a, x), X)(y)[0]

    def mapped(f):
        return jax.vmap(partial(transposed, f), (None, 1), 1)(A, jnp.stack([Y, 2 * Y, -Y], 1))

    f = product("both", "host", rules)
    np.testing.assert_allclose(wrap(lambda: mapped(f))(), mapped(jnp.matmul), rtol=1e-4)
    for derivative in (jax.grad, jax.jacfwd):

        def derived(f, a, y, derivative=derivative):
            return derivative(lambda a, y: jnp.sum(jnp.sin(transposed(f, a, y))), (0, 1))(a, y)

        for got, expected in zip(wrap(partial(derived, f))(A, Y), derived(jnp.matmul, A, Y), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4)


@row("D7", "C16")
@RULES
@JIT
def test_complex_numbers_have_the_convention_of_torch_inside(wrap, rules):
    """`jax.linear_transpose` does not conjugate; a gradient inside `backward` is the conjugate of JAX's cotangent."""
    a, x, y = (z + 1j * np.roll(z, 1) for z in (A, X, Y))
    seen = []

    def forward(ctx, a, x):
        ctx.save_for_backward(a, x)
        return on_host(np.matmul, jax.ShapeDtypeStruct((K,), x.dtype), a, x)

    def backward(ctx, g):
        a, x = ctx.saved_tensors
        seen.append(g)
        return jnp.outer(g, x.conj()), a.conj().T @ g

    def jvp(ctx, ta, tx):
        a, x = ctx.saved_tensors
        return ta @ x + a @ tx

    f = partial(with_rules(rules, forward, backward, jvp), a.astype(np.complex64))
    got = wrap(lambda y: jax.linear_transpose(f, x)(y)[0])(y.astype(np.complex64))
    np.testing.assert_allclose(got, a.T @ y, rtol=1e-5)
    np.testing.assert_allclose(got, jax.linear_transpose(lambda x: a @ x, x)(y)[0], rtol=1e-5)
    if wrap is not jax.jit and rules != "jvp":
        concrete = [g for g in seen if not isinstance(g, jax.core.Tracer)]
        np.testing.assert_allclose(concrete[-1], y.conj(), rtol=1e-5)


@row("D7", "C16")
@JIT
def test_a_real_input_of_a_complex_output(wrap):
    @jaxfn.function
    def f(ctx, x):
        return x * (1 + 2j)

    f.backward(lambda ctx, g: (g * (1 - 2j)).real)
    f.jvp(lambda ctx, t: t * (1 + 2j))
    y = (X + 1j * X[::-1]).astype(np.complex64)
    (got,) = wrap(lambda y: jax.linear_transpose(lambda x: f(x), X)(y))(y)
    np.testing.assert_allclose(got, jax.linear_transpose(lambda x: x * (1 + 2j), X)(y)[0], rtol=1e-5)


# --- what forward captures, and packs


@row("A9", "D7")
@RULES
@JIT
def test_forward_captures_a_traced_matrix(wrap, rules):
    def transposed(a, y):
        def forward(ctx, x):
            ctx.save_for_backward(a)
            return on_host(np.matmul, Y, a, x)

        f = with_rules(
            rules, forward, lambda ctx, g: ctx.saved_tensors[0].T @ g, lambda ctx, t: ctx.saved_tensors[0] @ t
        )
        return jax.linear_transpose(jax.jit(lambda x: f(2 * x)), X)(y)[0]

    np.testing.assert_allclose(wrap(transposed)(A, Y), 2 * A.T @ Y, rtol=1e-5)


@row("F1")
@JIT
def test_packed_residuals(wrap):
    f = product("both", "host", "both")

    def transposed(y):
        with jaxfn.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
            return jax.linear_transpose(jax.jit(partial(f, A)), X)(y)[0]

    np.testing.assert_allclose(wrap(transposed)(Y), A.T @ Y, rtol=1e-5)


# --- what is not supported


def nonlinear(rules: str, save: str) -> Any:
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward({"input": x, "output": y, "intermediate": 2 * x}[save])
        return y

    def slope(ctx):
        (saved,) = ctx.saved_tensors
        return {"input": 2 * saved, "output": 2 * jnp.sqrt(saved), "intermediate": saved}[save]

    return with_rules(rules, forward, lambda ctx, g: slope(ctx) * g, lambda ctx, t: slope(ctx) * t)


@row("D7", "L1")
@cells(
    "save,within,rules",
    [
        ("input", "eager", "both"),
        ("input", "jit", "jvp"),
        ("output", "vmap", "generated"),
        ("intermediate", "scan", "jvp"),
        ("intermediate", "jit", "generated"),
    ],
)
def test_the_transpose_of_a_function_that_is_not_linear_raises(save, within, rules):
    with pytest.raises(TypeError, match=r"Linear is transposed .*not linear: its derivative depends on saved_tensors"):
        jax.linear_transpose(CONTEXTS[within](nonlinear(rules, save)), X)(X)


@row("D7", "L1")
@pytest.mark.parametrize("program", ["vmap of both", "scanned", "cond", "nested jits", "twice"])
@JIT
def test_a_function_without_forward_mode_is_named(wrap, program):
    @jaxfn.function
    def times(ctx, a, x):
        ctx.save_for_backward(a)
        return on_host(np.matmul, jax.ShapeDtypeStruct(a.shape[:1], x.dtype), a, x)

    times.backward(lambda ctx, g: (None, ctx.saved_tensors[0].T @ g))
    linear = partial(PROGRAMS[program], times, A)
    with pytest.raises(TypeError, match=r"times is transposed by jax.linear_transpose .*generate_jvp_rule = True"):
        wrap(lambda ct: jax.linear_transpose(linear, X)(ct))(jax.tree.map(jnp.ones_like, linear(X)))


# --- loops are evaluated, and not transposed


@row("A8", "E1")
@RULES
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.vmap], ids=["", "checkpoint", "vmap"])
def test_the_invariant_part_of_a_loop_is_taken_out_of_it(around, rules):
    """JAX evaluates the rest of the body, by partial evaluation, as in `linear_transpose`."""
    runs = []

    def forward(ctx, x, w):
        runs.append(1)
        ctx.save_for_backward(jnp.exp(w), x)
        return jnp.tanh(x) * jnp.exp(w) + 5

    def slope(ctx):
        e, x = ctx.saved_tensors
        return e * (1 - jnp.tanh(x) ** 2)

    f = with_rules(rules, forward, lambda ctx, g: (slope(ctx) * g, None), lambda ctx, tx, tw: slope(ctx) * tx)

    def loss(f, x, w):
        step = around(lambda x: f(x, w)) if around is not jax.vmap else lambda x: jax.vmap(f, (0, None))(x, w)
        return jnp.sum(lax.scan(lambda c, _: (0.1 * step(c), c), X if around is jax.vmap else x, None, length=3)[0] * x)

    def plain(x, w):
        return jnp.tanh(x) * jnp.exp(lax.stop_gradient(w)) + 5

    got = jax.jit(jax.grad(partial(loss, f)))(X, jnp.float32(0.3))
    assert len(runs) == 1
    np.testing.assert_allclose(got, jax.grad(partial(loss, plain))(X, jnp.float32(0.3)), rtol=1e-4)
    assert jax.jit(partial(loss, f))(X, 0.3) == pytest.approx(float(loss(plain, X, 0.3)), rel=1e-5)
    second = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(partial(loss, f))(x, jnp.float32(0.3)) ** 2)))(X)
    expected = jax.grad(lambda x: jnp.sum(jax.grad(partial(loss, plain))(x, jnp.float32(0.3)) ** 2))(X)
    np.testing.assert_allclose(second, expected, rtol=1e-3)
