"""No tracer leaks, and nothing outlives its use (row B13)."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import jaxfn
from tests.support.cases import CASES
from tests.support.marks import CACHES_TRACES, cells, row, slow
from tests.support.transformations import transform

BY_NAME = {case.name: case for case in CASES}


@row("B13")
@cells(
    "program, name",
    [
        ("eager", "swap"),
        ("jit", "dense"),
        ("jit of grad", "rotate"),
        ("jit of grad of scan", "normalize"),
        ("jit of grad of cond", "exp"),
        ("while", "cross_entropy"),
        ("eval_shape", "linear"),
        *[
            pytest.param(program, "swish", marks=slow)
            for program in [
                "jit of grad of grad of vmap",
                "grad of jit",
                "carried scan",
                "jit of grad of grad of checkpoint nothing",
                "export of value_and_grad",
                "sharded jit explicit of value_and_grad of vmap",
                # Plain functions too leave traces behind in shard_map over several devices, outside a derivative.
                "jit of inside shard_map of grad of vmap",
            ]
        ],
    ],
)
def test_no_tracer_leaks(program, name, few_objects):
    case = BY_NAME[name]
    with jax.check_tracer_leaks():
        transform(program, case, case.apply)


class Token:
    """A static value whose lifetime can be watched."""


@row("B13")
@CACHES_TRACES
def test_ctx_and_residuals_are_freed():
    watched = []

    def run():
        @jaxfn.function
        def f(ctx, x):
            saved = x * 2
            ctx.save_for_backward(saved)
            ctx.token = Token()
            watched.extend([weakref.ref(ctx), weakref.ref(ctx.token), weakref.ref(saved)])
            return jnp.sin(saved)

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
@CACHES_TRACES
def test_static_arguments_are_not_cached_forever():
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
def test_statics_that_compare_equal_are_distinguished(first, second):
    f = jaxfn.autograd_function(
        lambda ctx, x, c: setattr(ctx, "seen", repr(c)) or (x * 1.0, repr(c)),
        lambda ctx, g, _: (g * len(ctx.seen), None),
    )
    for c in (first, second, first):
        assert jax.jit(lambda x, c=c: f(x, c)[0])(1.0) == 1.0
        value, pullback, label = jax.vjp(lambda x, c=c: f(x, c), 1.0, has_aux=True)
        assert label == repr(c)
        assert pullback(value)[0] == len(repr(c))
