"""Derivatives of the first and second order: rules that are not linear, pullbacks, forward modes, flags."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import function_of, hand_written_of, with_rules
from tests.support.contexts import CONTEXTS, SECOND_DERIVATIVES, program
from tests.support.derivatives import check, derivative
from tests.support.marks import cells, row

X = jnp.array([0.3, -1.2, 0.7], jnp.float32)

# --- rules that are not linear


def squares_its_gradient(save, rules):
    """3 * x, whose backward is not linear: g * g * x."""
    saved = {"input": lambda args, y: args, "output": lambda args, y: (y,)}[save]
    pull = lambda saved, g: g * g * (saved[0] / 3 if save == "output" else saved[0])  # noqa: E731
    return function_of(rules, lambda x: 3 * x, lambda saved, t: 5 * t, pull, saved)


def second_of_squares(x, save):
    """Returns the second derivative of y² for y = 3x and the rule g²x.

    The gradient is (2y)²x. Its derivative is 8yx by y, and 4y² by the saved x, or by the saved y / 3.
    """
    y = 3 * x
    if save == "output":
        return (8 * y * x + 4 * y**2 / 3) ** 2 * x
    return (8 * y * x) ** 2 * x + 4 * y**2


RULES = ["backward", "both", "generated"]


@row("D1", "D9")
@cells(
    "name,rules,save",
    [
        ("grad of grad", "both", "output"),
        ("jit of grad of grad", "generated", "input"),
        ("vmap of grad of grad", "backward", "output"),
        ("grad of jit of grad", "generated", "output"),
        ("grad of checkpoint of grad", "backward", "input"),
        ("grad of vmap of grad", "both", "input"),
        ("grad of scan of grad", "backward", "output"),
        ("grad of grad of jit", "both", "output"),
        ("grad of grad of checkpoint", "backward", "input"),
        ("grad of grad of vmap", "generated", "input"),
        ("grad of grad of scan", "both", "output"),
        ("grad of grad of cond", "generated", "output"),
    ],
    SECOND_DERIVATIVES,
    RULES,
    ["input", "output"],
)
def test_the_second_derivative_of_a_rule_that_is_not_linear(name, rules, save):
    """The gradients of an output that is used and saved are added before `backward` squares them."""
    if name == "grad of grad of checkpoint" and save == "output":
        return  # JAX adds what backward returns: test_checkpoint.py
    f, x = squares_its_gradient(save, rules), 0.25 * X
    got = program(name)(lambda x: f(x) ** 2)(x)
    np.testing.assert_allclose(got, second_of_squares(x, save), rtol=1e-5)


# --- a pullback is a function of its residuals


# What is saved of sin(x * w), and the slopes by x and by w from that.
SAVED = {
    "inputs": (lambda x, w, y: (x, w), lambda x, w: (w * jnp.cos(x * w), x * jnp.cos(x * w))),
    "output": (lambda x, w, y: (x, w, y), lambda x, w, y: (w * jnp.sqrt(1 - y * y), x * jnp.sqrt(1 - y * y))),
    "intermediates": (lambda x, w, y: (w * jnp.cos(x * w), x * jnp.cos(x * w)), lambda of_x, of_w: (of_x, of_w)),
}


def product(save, rules):
    """sin(x * w), with gradients 5 and 7 times too large."""
    saved, slopes = SAVED.get(save, SAVED["inputs"])

    def forward(ctx, x, w):
        y = jnp.sin(x * w)
        if save == "flags":
            ctx.read = any(ctx.needs_input_grad)
        if save == "attribute":
            ctx.residuals = {"deep": [x, w]}
        else:
            ctx.save_for_backward(*(i * x for i in range(18 if save == "many" else 0)), *saved(x, w, y))
        return y

    def backward(ctx, g):
        residuals = ctx.residuals["deep"] if save == "attribute" else ctx.saved_tensors
        of_x, of_w = slopes(*(residuals[-2:] if save == "many" else residuals))
        return 5 * g * of_x, 7 * g * of_w

    return with_rules(rules, forward, backward, lambda ctx, t, u: t + u)


def hand_written_product(save):
    saved, slopes = SAVED.get(save, SAVED["inputs"])

    def pull(residuals, g):
        of_x, of_w = slopes(*residuals)
        return 5 * g * of_x, 7 * g * of_w

    return hand_written_of(lambda x, w: jnp.sin(x * w), pull, lambda args, y: saved(*args, y))


@row("D2", "E1")
@cells(
    "save,context,rules,argument",
    [
        ("inputs", "jit", "backward", "both"),
        ("inputs", "vmap", "both", "w"),
        ("output", "jit", "both", "x"),
        ("output", "scan", "backward", "both"),
        ("intermediates", "checkpoint", "backward", "x"),
        ("intermediates", "eager", "both", "both"),
        ("attribute", "scan", "both", "both"),
        ("attribute", "checkpoint", "backward", "w"),
        ("flags", "eager", "both", "w"),
        ("flags", "jit", "backward", "x"),
        ("many", "vmap", "backward", "both"),
        ("many", "checkpoint", "both", "x"),
    ],
)
def test_a_pullback_is_an_argument_of_grad(save, context, rules, argument):
    """All leaves of the pullback are floating, as of a hand-written custom_vjp: a boolean would need `allow_int`."""
    g, w = jnp.cos(X), jnp.sin(X)
    results = []
    for f in (product(save, rules), hand_written_product(save)):
        around = CONTEXTS[context](f)
        call, args = {
            "x": (lambda x, around=around: around(x, w), (X,)),
            "w": (lambda w, around=around: around(X, w), (w,)),
            "both": (around, (X, w)),
        }[argument]
        _, pull = jax.vjp(call, *args)
        by_pull = jax.grad(lambda pull: sum(jnp.sum(jnp.sin(v)) for v in pull(g)))
        for derived in (by_pull, jax.jit(by_pull)):
            leaves = jax.tree.leaves(derived(pull))
            # Gradients by residuals that are not used are zero; the others may come in any order.
            results.append(np.sort(np.concatenate([np.ravel(v[v != 0]) for v in leaves])))
    for got in results[:-1]:
        np.testing.assert_allclose(got, results[-1], rtol=1e-5)
    assert results[-1].size >= X.size


# --- a forward mode has no part in reverse mode


def pull_clipped(saved, g):
    """Returns gradients of x * w that are not linear, and three times too large."""
    x, w = saved
    g = 3 * jnp.clip(g, -0.5, 0.5)
    return g * w, g * x


IN_AXES = {"both": (0, 0), "the first": (0, None), "the second": (None, 0), "other axes": (1, 0)}


@row("D4", "D5", "E1c")
@cells(
    "in_axes,context,rules",
    [
        ("both", "eager", "generated"),
        ("the first", "jit", "generated"),
        ("the second", "checkpoint", "generated"),
        ("other axes", "eager", "both"),
        ("the first", "checkpoint", "both"),
        ("the second", "jit", "both"),
    ],
    IN_AXES,
    ["eager", "jit", "checkpoint"],
    ["generated", "both"],
)
def test_reverse_mode_of_a_mapped_call_does_without_forward_mode(in_axes, context, rules):
    """A generated rule would raise as not linear, and `jvp` is not run, not even to learn shapes."""
    runs = []

    def push(saved, *tangents):
        runs.append(tangents)
        raise ValueError("jvp is not to run")

    axes = IN_AXES[in_axes]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 4) if axes[0] == 1 else (4, 5) if axes[0] == 0 else (5,)).astype(np.float32)
    w = rng.normal(size=(4, 5) if axes[1] == 0 else (5,)).astype(np.float32)

    def both_orders(f):
        over = jax.vmap(CONTEXTS[context](f), in_axes=axes)
        return [derivative(name, over)(x, w) for name in ("grad", "grad of grad")]

    ours = function_of(rules, jnp.multiply, push, pull_clipped)
    theirs = hand_written_of(jnp.multiply, pull_clipped)
    check(both_orders(ours), both_orders(theirs))
    assert not runs


@row("D5")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_generated_forward_mode_that_is_not_linear_names_the_operation_and_its_line(context):
    def first_line():
        return NotLinear.backward.__code__.co_firstlineno

    class NotLinear(jaxfn.Function):
        generate_jvp_rule = True

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            doubled = 2 * g
            return doubled / jnp.linalg.norm(doubled)

    line = first_line() + 3
    with pytest.raises(RuntimeError, match=rf"NotLinear\.backward[\s\S]*test_every_order\.py:{line}") as caught:
        jax.jvp(CONTEXTS[context](NotLinear.apply), (X,), (X,))
    assert any(name in str(caught.value) for name in ("sqrt", "div", "mul", "square", "dot_general", "norm"))


# --- a forward that reads its flags


INTEGERS = {
    "sum": lambda x: jnp.sum(x > 0),
    "arange": lambda x: jnp.arange(3),
    "mask": lambda x: x > 0,
    "argmax": jnp.argmax,
    "cast": lambda x: x.astype(jnp.int32),
    "size": lambda x: x.size,
}


def with_integer(integer, saves="needed"):
    """sin(x * w), which reads its flags and returns an integer; pure."""

    @jaxfn.function
    def counts(ctx, x, w):
        of_x, of_w = ctx.needs_input_grad
        c = jnp.cos(x * w)
        if saves == "needed":
            ctx.save_for_backward(w * c if of_x else None, x * c if of_w else None)
        else:
            ctx.save_for_backward(w * c, x * c)
        return jnp.sin(x * w), INTEGERS[integer](x)

    @counts.backward
    def _(ctx, g, _):
        of_x, of_w = ctx.saved_tensors
        return None if of_x is None else g * of_x, None if of_w is None else jnp.sum(g * of_w)

    return lambda x, w: counts(x, w)[0]


def mapped(axes):
    """Maps over two elements, and returns the results of the second one."""

    def outside(f):
        def call(*args):
            pairs = [a if d is None else jnp.stack([2 * a, a], d) for a, d in zip(args, axes, strict=True)]
            return jax.tree.map(lambda y: y[1], jax.vmap(f, axes)(*pairs))

        return call

    return outside


OVER = {"vmap over x": mapped((1, None)), "vmap over both": mapped((1, 0)), "vmap over w": mapped((None, 0))}


@row("A8", "D8")
@cells(
    "integer,context,outside,first",
    [
        ("sum", "eager", "vmap over x", "x"),
        ("sum", "scan", "eager", "w"),
        ("arange", "checkpoint", "vmap over x", "w"),
        ("mask", "cond", "jit of vmap over w", "x"),
        ("argmax", "vmap", "vmap over both", "x"),
        ("argmax", "eager", "jit", "w"),
        ("cast", "scan", "jit of vmap over w", "x"),
        ("size", "jit", "jit of vmap over w", "w"),
    ],
)
def test_mixed_derivatives_of_a_pure_forward_that_reads_its_flags_and_returns_an_integer(
    integer, context, outside, first
):
    """Before, it raised under `vmap` of `scan` and `checkpoint`, as if it had computed other values."""
    first, second = (0, 1) if first == "x" else (1, 0)

    def mixed(f):
        inner = jax.grad(lambda *args: jnp.sum(CONTEXTS[context](f)(*args)), first)
        return program(outside, **OVER)(jax.grad(lambda *args: jnp.sum(inner(*args)), second))(X, jnp.float32(1.5))

    expected = mixed(lambda x, w: jnp.sin(x * w))
    for saves in ("needed", "all"):
        np.testing.assert_allclose(mixed(with_integer(integer, saves)), expected, rtol=1e-4, atol=1e-5)


@row("A8", "D8")
@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_of_a_pure_forward_that_reads_its_flags_and_returns_a_mask(name):
    f, w = with_integer("mask"), jnp.float32(1.5)
    got = program(name)(lambda x: f(x, w))(X)
    np.testing.assert_allclose(got, -1.5 * 1.5 * jnp.sin(1.5 * X), rtol=1e-5)


# --- flags and caches


@row("B7", "D8")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_a_forward_that_saves_another_array_for_other_flags(around):
    """Saves one array in both cases, so that only the flags tell which it is."""

    def forward(ctx, x, w):
        ctx.x, ctx.w, ctx.both = x, w, all(ctx.needs_input_grad)
        ctx.save_for_backward(x + w if ctx.both else w * w)
        return x * w * w

    def backward(ctx, g):
        (s,) = ctx.saved_tensors
        return (g * (s - ctx.x) * ctx.w, 2 * g * ctx.x * (s - ctx.x)) if ctx.both else (g * s, None)

    f = around(jaxfn.autograd_function(forward, backward))
    np.testing.assert_allclose(jax.grad(jax.grad(f, 0), 1)(2.0, 3.0), 6.0)
    second = jax.grad(lambda x, w: jnp.sin(jax.grad(f, 0)(x, w)), 1)
    np.testing.assert_allclose(second(2.0, 3.0), 6 * np.cos(9.0), rtol=1e-5)


@row("B7", "D8", "E1")
@pytest.mark.parametrize(
    "around", ["jit", "vmap of jit", "jit of vmap", "jit of vmap of jit", "checkpoint of jit", "cond"]
)
def test_one_program_that_is_differentiated_by_each_argument(around):
    """Each pullback has what `forward` saved for it. A batch has as many rows as an array has elements: no shape tells
    them apart.
    """

    def forward(ctx, x, w):
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(w=w, steps=jnp.arange(2), positive=w > 0)
        else:
            ctx.save_for_backward(x=x)
        return x * w

    def backward(ctx, g):
        saved = ctx.saved_variables
        return (
            (g * saved.w * (10 + saved.steps + saved.positive), None)
            if ctx.needs_input_grad[0]
            else (None, g * saved.x)
        )

    x, w, g = jnp.array([1.0, 2.0]), jnp.array([3.0, -5.0]), jnp.array([1.0, 7.0])
    f = program(around)(jaxfn.autograd_function(forward, backward))
    _, by_x = jax.vjp(lambda x: f(x, w), x)
    _, by_w = jax.vjp(lambda w: f(x, w), w)
    np.testing.assert_array_equal(by_x(g)[0], [33, 7 * -55])
    np.testing.assert_array_equal(by_w(g)[0], [1, 7 * 2])


@row("B7", "B10", "E1")
@pytest.mark.parametrize("is_mapped", [False, True])
def test_one_program_with_a_reference_that_is_differentiated_by_each_argument(is_mapped):
    """Under `vmap` the reference alone has a batch, with as many rows as x and w have elements."""

    def forward(ctx, x, w, ref):
        value = ref[...]
        ctx.save_for_backward(value if ctx.needs_input_grad[0] else x)
        return x * value + w

    def backward(ctx, g):
        (saved,) = ctx.saved_tensors
        return (g * saved, None, None) if ctx.needs_input_grad[0] else (None, 10 * g * saved, None)

    x, w = jnp.array([1.0, 2.0]), jnp.array([3.0, -5.0])
    values = jnp.array([[1.0, 2.0], [4.0, 5.0]]) if is_mapped else jnp.array([5.0, 7.0])
    f = jax.jit(jaxfn.autograd_function(forward, backward))
    f, ref = jax.vmap(f, (None, None, 0)) if is_mapped else f, jax.new_ref(values)
    _, by_x = jax.vjp(lambda x: f(x, w, ref), x)
    _, by_w = jax.vjp(lambda w: f(x, w, ref), w)
    np.testing.assert_array_equal(by_x(jnp.ones_like(values))[0], [5, 7])
    np.testing.assert_array_equal(by_w(jnp.ones_like(values))[0], [20, 40] if is_mapped else [10, 20])


@row("D7")
def test_a_function_that_a_jvp_has_applied_keeps_its_rule_in_a_scan():
    def rule_of_cube(saved, g):
        return 3 * saved[0] ** 2 * g

    jitted = jax.jit(function_of("both", jnp.sin, rule_of_cube, rule_of_cube))
    applying = jaxfn.autograd_function(lambda ctx, x: ctx.save_for_backward(x) or jnp.cos(x))
    applying.jvp(lambda ctx, t: t * jax.jvp(jitted, (ctx.saved_tensors[0],), (jnp.float32(1),))[1])
    x = jnp.float32(0.7)
    np.testing.assert_allclose(jax.grad(applying)(x), 3 * 0.7**2, rtol=1e-6)

    def twice(f):
        return jax.grad(jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c) * x, None), x, None, 2)[0]))(x)

    plain = lambda x: x**3 + jax.lax.stop_gradient(jnp.sin(x) - x**3)  # noqa: E731
    np.testing.assert_allclose(twice(jitted), twice(plain), rtol=1e-5)
