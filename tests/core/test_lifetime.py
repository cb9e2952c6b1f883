"""Nothing leaks, nothing outlives its use, and threads do not disturb each other (row B13)."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import CASES, loss_of, make_args
from tests.support.marks import KEEPS_TRACERS, row, sampled
from tests.support.transformations import TRANSFORMATIONS

# Plain functions too leave traces behind in shard_map over several devices, as far as the checker can tell; and what
# takes it seconds, a few Functions stand for all there.
LEAK_CHECKED = [name for name in TRANSFORMATIONS if "shard_map" not in name] + ["grad_inside_shard_map"]
QUICK = ("eager", "jit", "jit_of_grad", "scan", "cond", "while_loop", "eval_shape")
FEW = ("exp", "gelu", "quantize")


@row("B13")
@KEEPS_TRACERS
@sampled
@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in LEAK_CHECKED for case in CASES if name in QUICK or case.name in FEW],
    ids=str,
)
def test_no_tracer_leaks(name, case, few_objects):
    with jax.check_tracer_leaks():
        TRANSFORMATIONS[name](case, case.apply)


class Token:
    """A static value whose lifetime can be watched."""


@row("B13")
def test_ctx_and_residuals_are_freed():
    watched = []

    def run():
        @jaxfn.function
        def f(ctx, x):
            kept = x * 2
            ctx.save_for_backward(kept)
            ctx.token = Token()
            watched.extend([weakref.ref(ctx), weakref.ref(ctx.token), weakref.ref(kept)])
            return jnp.sin(kept)

        @f.backward
        def _(ctx, g):
            watched.append(weakref.ref(ctx))
            return 2 * jnp.cos(ctx.saved_tensors[0]) * g

        watched.append(weakref.ref(f.Function))
        jax.block_until_ready(jax.grad(lambda x: f(x).sum())(jnp.ones(3)))
        value, pullback = jax.vjp(f, jnp.ones(3))
        jax.block_until_ready(pullback(value))

    run()
    gc.collect()
    assert len(watched) == 9
    assert [ref() for ref in watched] == [None] * 9


@row("B13")
def test_static_arguments_are_not_kept_forever():
    tokens = []

    def forward(ctx, x, token):
        ctx.token = token
        return x * 2

    f = jaxfn.autograd_function(forward, lambda ctx, g: (g * 2, None))

    def run():
        token = Token()
        tokens.append(weakref.ref(token))
        jax.grad(lambda x: f(x, token))(1.0)

    for _ in range(3):
        run()
    gc.collect()
    assert [token() for token in tokens] == [None] * 3


@row("B13")
def test_mutable_statics_are_never_stale():
    """A static object that compares equal but has changed is not mistaken for its earlier self."""

    class Config:
        scale = 2.0

        def __eq__(self, other):
            return isinstance(other, Config)

        def __hash__(self):
            return 0

    f = jaxfn.autograd_function(
        lambda ctx, x, c: setattr(ctx, "c", c) or x * c.scale, lambda ctx, g: (g * ctx.c.scale, None)
    )
    config = Config()
    assert jax.grad(f)(1.0, config) == 2.0
    config.scale = 5.0
    assert jax.grad(f)(1.0, config) == 5.0
    other = Config()
    other.scale = 7.0
    assert jax.grad(f)(1.0, other) == 7.0


@row("A3")
@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0.0, -0.0), (2, 2 + 0j)], ids=str)
def test_statics_that_compare_equal_are_told_apart(first, second):
    f = jaxfn.autograd_function(
        lambda ctx, x, c: setattr(ctx, "seen", repr(c)) or (x * 1.0, repr(c)),
        lambda ctx, g, _: (g * len(ctx.seen), None),
    )
    for c in (first, second, first):
        assert jax.jit(lambda x, c=c: f(x, c)[0])(1.0) == 1.0
        value, pullback, label = jax.vjp(lambda x, c=c: f(x, c), 1.0, has_aux=True)
        assert label == repr(c)
        assert pullback(value)[0] == len(repr(c))


@row("B13")
def test_eight_threads_agree_with_one():
    cases = CASES[:8]

    def work():
        results = []
        for case in cases:
            args = make_args(case)
            argnums = tuple(range(len(args)))
            gradient = jax.grad(loss_of(case.apply), argnums=argnums)
            results.append((case.apply(*args), gradient(*args), jax.jit(gradient)(*args)))
            results.append(jax.grad(loss_of(gradient), argnums=argnums)(*args))
        return results

    expected, got = work(), [None] * 8

    def run(i):
        got[i] = work()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in got:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), result, expected)
