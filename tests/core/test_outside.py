"""Arrays that forward stores outside ctx and backward reads: right in an eager first derivative, else an error.

A global, class or list outside is not a residual: JAX does not know that backward depends on the inputs by it, so that
a nested derivative would be wrong in silence.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Relu
from tests.support.contexts import (
    GRADIENTS,
    GRADIENTS_OF_PROGRAMS,
    SECOND_DERIVATIVES,
    assert_right_or_escaped,
    program,
    raises_escaped_tracer,
    tangent,
)
from tests.support.marks import EXPERIMENTAL, TRACES_ALWAYS, cells, row

X = jnp.float32(0.5)

# --- where an array may be stored: each builds a function that stores it and one that reads it

GLOBAL: Any = None


class SomeClass:
    value: Any = None


def global_variable():
    def put(x):
        global GLOBAL
        GLOBAL = x

    return put, lambda: GLOBAL


def class_attribute():
    return (lambda x: setattr(SomeClass, "value", x)), lambda: SomeClass.value


def nonlocal_variable():
    value = None

    def put(x):
        nonlocal value
        value = x

    return put, lambda: value


def mutable_default():
    stored: list[Any] = []
    return (lambda x, stored=stored: stored.append(x)), lambda stored=stored: stored[-1]


HOLDERS = [global_variable, class_attribute, nonlocal_variable, mutable_default]
SLOPES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "input": (lambda x, y: x, jnp.cos),
    "intermediate": (lambda x, y: jnp.cos(x), lambda c: c),
    "output": (lambda x, y: y, lambda y: jnp.sqrt(1 - y * y)),
}


def storing(holder, what="input", rules="backward"):
    """sin, whose backward needs an array that forward stores outside."""
    put, get = holder()
    stored, slope = SLOPES[what]

    def forward(ctx, x):
        y = jnp.sin(x)
        put(stored(x, y))
        return y

    def rule(ctx, g):
        return g * slope(get())

    f = jaxfn.autograd_function(forward, rule, name="Storing")
    if rules == "both":
        f.jvp(rule)
    elif rules == "generated":
        f.Function.generate_jvp_rule = True
    return f


EVERY = [*GRADIENTS, *GRADIENTS_OF_PROGRAMS, *SECOND_DERIVATIVES]
EAGER = ("grad",) if EXPERIMENTAL else ("grad", "vmap of grad")  # JAX_CUSTOM_VJP3 stages under vmap
UNSUPPORTED = [name for name in EVERY if name not in (*EAGER, "grad of vmap")]
EVERY_HOLDER = pytest.mark.parametrize("holder", HOLDERS, ids=lambda h: h.__name__)


@pytest.fixture(autouse=True)
def _clear_state_of_other_tests():
    global GLOBAL
    GLOBAL = SomeClass.value = None
    Statistics.mean = jnp.float32(0.0)


@row("B14")
@EVERY_HOLDER
def test_an_array_stored_anywhere_outside_is_right_at_first_order_and_raises_at_second(holder):
    for name in EAGER:
        np.testing.assert_allclose(program(name)(storing(holder))(X), jnp.cos(X), rtol=1e-6)
    for name in ("grad of grad", "grad of jit of grad", "grad of jit"):
        with raises_escaped_tracer("Storing"):
            program(name)(storing(holder))(X)


KINDS = [("input", "backward"), ("intermediate", "both"), ("output", "generated")]


@row("B14")
@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize(("what", "rules"), KINDS)
def test_an_array_stored_outside_is_right_in_an_eager_first_derivative(what, rules, name):
    np.testing.assert_allclose(program(name)(storing(class_attribute, what, rules))(X), jnp.cos(X), rtol=1e-6)
    right_or_not = program("grad of vmap")(storing(class_attribute, what, rules))
    assert_right_or_escaped(lambda: right_or_not(X), jnp.cos(X), "Storing")


@row("B14", "L1")
@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize(("what", "rules"), KINDS)
def test_an_array_stored_outside_raises_where_its_derivative_would_be_lost(what, rules, name):
    with raises_escaped_tracer("Storing"):
        program(name)(storing(class_attribute, what, rules))(X)


@row("B14", "L1")
def test_the_error_says_to_save_the_array():
    with pytest.raises(NotImplementedError, match=r"outside ctx[\s\S]*ctx\.save_for_backward\(array\), or ctx"):
        jax.grad(jax.grad(storing(class_attribute)))(X)


class StoresOnItself(jaxfn.Function):
    """Stores its input on itself, as code does that was written for a single call."""

    @staticmethod
    def forward(ctx, x):
        StoresOnItself.x = x
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, g):
        return g * jnp.cos(StoresOnItself.x)


@row("B14")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_two_calls_that_store_in_one_attribute(name):
    """The second call's array overwrites the first's, so that even the first derivative is of no use there."""
    with raises_escaped_tracer("StoresOnItself"):
        program(name)(lambda x: StoresOnItself.apply(StoresOnItself.apply(x)))(X)


@row("B14")
def test_a_stored_array_that_backward_returns_unchanged():
    def storing_slope():
        stored: dict[str, Any] = {}

        def forward(ctx, x):
            stored["slope"] = jnp.cos(x)
            return jnp.sin(x)

        return jaxfn.autograd_function(forward, lambda ctx, g: stored["slope"], name="Storing")

    for name in EAGER:
        np.testing.assert_allclose(program(name)(storing_slope())(X), jnp.cos(X), rtol=1e-6)
    for name in UNSUPPORTED:
        with raises_escaped_tracer("Storing"):
            program(name)(storing_slope())(X)


@row("B14", "D4")
@pytest.mark.parametrize("what", SLOPES)
def test_an_array_stored_outside_and_read_by_jvp_is_right_at_first_order(what):
    np.testing.assert_allclose(tangent(storing(class_attribute, what, "both"))(X), jnp.cos(X), rtol=1e-6)


@row("B14", "D7")
@pytest.mark.parametrize("rules", ["both", "generated"])
@pytest.mark.parametrize(
    "name",
    ["jit of jvp", "jvp of jit", "vmap of jvp", "jvp of jvp", "jit of grad of jvp", "grad of jvp", "jvp of grad"],
)
def test_an_array_stored_outside_and_read_in_forward_mode_raises_elsewhere(name, rules):
    for what in SLOPES:
        with raises_escaped_tracer("Storing"):
            program(name)(storing(class_attribute, what, rules))(X)


# --- what is harmless

LOG: list[Any] = []
logger = logging.getLogger("tests.outside")


class Statistics:
    mean: Any = jnp.float32(0.0)
    shape: Any = None
    calls = 0


def sine(forward_too, backward_too=lambda g: g):
    """sin, with an effect in forward and in backward."""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        forward_too(x)
        return jnp.sin(x)

    return jaxfn.autograd_function(forward, lambda ctx, g: backward_too(g) * jnp.cos(ctx.saved_tensors[0]))


def counting(_):
    Statistics.calls += 1


def update_mean(x):
    Statistics.mean = jax.lax.stop_gradient(0.9 * Statistics.mean + 0.1 * x)


def store_shape(x):
    Statistics.shape = x.shape, x.dtype


@functools.cache
def table():
    with jax.ensure_compile_time_eval():
        return jnp.arange(3.0)


def log_both():
    return sine(LOG.append, lambda g: LOG.append(g) or g)


def log_of_tracers_by_a_handler():
    return sine(lambda x: logger.debug("forward %s", x), lambda g: logger.debug("backward %s", g) or g)


HARMLESS: dict[str, Callable[[], Any]] = {
    "log": log_both,
    "logging": log_of_tracers_by_a_handler,
    "running mean": lambda: sine(update_mean),
    "counter": lambda: sine(counting, lambda g: counting(g) or g),
    "shape": lambda: sine(store_shape, lambda g: g.reshape(Statistics.shape[0]).astype(Statistics.shape[1])),
    "cache of constants": lambda: sine(lambda x: table(), lambda g: g * table()[1]),
    "a list that is emptied": lambda: sine(LOG.append, lambda g: LOG.clear() or g),
}


@row("B14")
@cells(
    "kind,name",
    [
        ("log", "grad"),
        ("log", "grad of scan"),
        ("logging", "grad of jit"),
        ("logging", "jit of grad of grad"),
        ("log", "grad of checkpoint of grad"),
        ("running mean", "grad"),
        ("running mean", "jit of grad"),
        ("counter", "scan of grad"),
        ("counter", "vmap of grad of grad"),
        ("shape", "jit of vmap of grad"),
        ("shape", "grad of cond"),
        ("cache of constants", "jit of grad of jit"),
        ("cache of constants", "grad of scan of grad"),
        ("a list that is emptied", "grad of grad"),
        ("a list that is emptied", "grad of vmap"),
    ],
)
def test_what_backward_does_not_depend_on_may_be_stored_outside(kind, name):
    LOG.clear()
    got = program(name)(HARMLESS[kind]())(X)
    np.testing.assert_allclose(got, -jnp.sin(X) if name in SECOND_DERIVATIVES else jnp.cos(X), rtol=1e-6)


@row("A8", "B14")
@pytest.mark.parametrize("name", EVERY)
def test_traced_statistics_are_of_use_after_an_eager_first_derivative_alone(name):
    """Each run reads what the one before wrote: in the next program that is a tracer, which raises there or in JAX."""
    expected = -jnp.sin(X) if name in SECOND_DERIVATIVES else jnp.cos(X)
    assert_right_or_escaped(lambda: program(name)(HARMLESS["running mean"]())(X), expected)
    if name == "grad":
        np.testing.assert_allclose(Statistics.mean, 0.05, rtol=1e-6)


@row("B14")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_an_eqn_that_computes_a_value_and_its_tangent(wrap):
    """`jnp.where` is one eqn of `jit` for both, so the value seems to depend on the tangent of the gradient."""

    class WithForwardMode(Relu):
        generate_jvp_rule = True

    def tangent(f):
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(f(x**3))))
        return wrap(jax.grad(lambda x: jnp.sum(jax.jvp(slope, (x,), (x,))[1])))

    np.testing.assert_allclose(tangent(WithForwardMode.apply)(X), tangent(jax.nn.relu)(X), rtol=1e-5)


@row("B14")
@pytest.mark.parametrize("logs", [False, True])
@TRACES_ALWAYS
def test_a_backward_that_branches_on_values(logs):
    """Eagerly its values are known, and stay known where something is stored outside that it does not read."""
    seen: list[Any] = []

    def forward(ctx, x):
        if logs:
            seen.append(x)
        ctx.x = x if x > 0 else -x
        return jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * jnp.cos(ctx.x) if ctx.x > 0 else g)
    np.testing.assert_allclose(jax.grad(f)(X), jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.grad(f))(X), -jnp.sin(X), rtol=1e-6)
