"""Row D7: JAX transposes the tangents of a Function by its own rule, and not its calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.cases import on_host, with_rules
from tests.support.contexts import CONTEXTS
from tests.support.marks import row

N, K = 4, 3
rng = np.random.default_rng(0)
A = rng.normal(size=(K, N)).astype(np.float32)
X = rng.normal(size=N).astype(np.float32)
Y = rng.normal(size=K).astype(np.float32)
RULES = ["both", "generated", "jvp"]
PROGRAMS = {
    **{name: CONTEXTS[name] for name in ("eager", "jit", "vmap", "checkpoint")},
    "cond": lambda f: lambda x: lax.cond(A[0, 0] > -9, f, lambda x: 2 * f(x), x),
}


def product(where: str, rules: str) -> Any:
    """a @ x, whose rules are three times its derivative."""

    def forward(ctx, a, x):
        ctx.save_for_backward(a, x)
        return on_host(np.matmul, jax.ShapeDtypeStruct(a.shape[:1], x.dtype), a, x) if where == "host" else a @ x

    def backward(ctx, g):
        a, x = ctx.saved_tensors
        return 3 * jnp.outer(g, x), 3 * a.T @ g

    def jvp(ctx, ta, tx):
        a, x = ctx.saved_tensors
        return 3 * (ta @ x + a @ tx)

    return with_rules(rules, forward, backward, jvp)


@row("D7")
@pytest.mark.parametrize("rules", [*RULES, "backward"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tangent_is_transposed_by_the_rule(program, rules):
    """Whatever forward computes, and also without a forward mode."""
    f = PROGRAMS[program](partial(product("host", rules), A))
    for wrap in (lambda f: f, jax.jit):
        pull = wrap(lambda y: jax.linear_transpose(jax.linearize(f, X)[1], X)(y)[0])
        np.testing.assert_allclose(pull(Y), 3 * A.T @ Y, rtol=1e-5)


@row("D7")
@pytest.mark.parametrize("rules", [*RULES, "backward"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_is_not_transposed(program, rules):
    f = PROGRAMS[program](partial(product("here", rules), A))
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(NotImplementedError, match=r"'custom_vjp_call' not implemented|must implement .transpose"):
            wrap(lambda y: jax.linear_transpose(f, X)(y))(Y)


# --- loops are evaluated, and not transposed


@row("E1")
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.vmap], ids=["", "checkpoint", "vmap"])
def test_the_invariant_part_of_a_loop_is_taken_out_of_it(around, rules):
    """JAX evaluates the rest of the body, by partial evaluation, as in `linear_transpose`."""

    def forward(ctx, x, w):
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
    np.testing.assert_allclose(got, jax.grad(partial(loss, plain))(X, jnp.float32(0.3)), rtol=1e-4)
    assert jax.jit(partial(loss, f))(X, 0.3) == pytest.approx(float(loss(plain, X, 0.3)), rel=1e-5)
    second = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(partial(loss, f))(x, jnp.float32(0.3)) ** 2)))(X)
    expected = jax.grad(lambda x: jnp.sum(jax.grad(partial(loss, plain))(x, jnp.float32(0.3)) ** 2))(X)
    np.testing.assert_allclose(second, expected, rtol=1e-3)
