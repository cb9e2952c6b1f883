"""Rows D2, D3, B8: which saved, returned or marked arrays are inputs or outputs, equally when eager and when staged.

Operations that change nothing return their very operand where JAX evaluates them eagerly, and another tracer where it
stages them, or the other way round. The rules here are not the derivative of the code, so that a saved array that is
taken for an intermediate gives another number than one that is known as an input or an output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.lax import stop_gradient

import jaxfn
from tests.support.cases import with_rules
from tests.support.contexts import CONTEXTS
from tests.support.marks import TRACES_ALWAYS, cells, row, slow

X = jnp.array([0.3, 1.4, -0.7], jnp.float32)


@jax.custom_jvp
def identity_with_a_tangent(x):
    return x


identity_with_a_tangent.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))


@jax.custom_vjp
def identity_with_a_gradient(x):
    return x


identity_with_a_gradient.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


# Eagerly these return their operand, and another tracer where they are staged.
SAME_OBJECT: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "stop_gradient": stop_gradient,
    "checkpoint_name": lambda x: checkpoint_name(x, "x"),
    "device_put": jax.device_put,
    "checkpoint": jax.checkpoint(lambda x: x),
    "custom_jvp": identity_with_a_tangent,
    "custom_vjp": identity_with_a_gradient,
    "Function": with_rules("both", lambda ctx, x: x, lambda ctx, g: 3 * g, lambda ctx, t: 3 * t),
    "astype": lambda x: x.astype(x.dtype),
    "asarray": jnp.asarray,
    "reshape": lambda x: x.reshape(x.shape),
    "lax.reshape": lambda x: jax.lax.reshape(x, x.shape),
    "transpose": lambda x: x.T,
    "convert_element_type": lambda x: jax.lax.convert_element_type(x, x.dtype),
    "two of them": lambda x: stop_gradient(checkpoint_name(x, "x")),
}
# Eagerly these return another array, and their very operand where they are staged.
NEW_OBJECT: dict[str, Callable[[Any], Any]] = {
    "ravel": jnp.ravel,
    "flatten": lambda x: x.flatten(),
    "real": jnp.real,
    "squeeze": jnp.squeeze,
    "positive": lambda x: +x,
    "broadcast_to": lambda x: jnp.broadcast_to(x, x.shape),
}


def cube(no_op, use, rules):
    """x³, with a rule that multiplies by what is saved: x, or the output."""

    def forward(ctx, x):
        y = x**3
        stored = no_op(y) if use == "saved output" else y if use == "returned" else no_op(x)
        if use == "attribute":
            ctx.stored = [stored]
        elif use == "named":
            ctx.save_for_backward(stored=stored)
        else:
            ctx.save_for_backward(stored)
        return no_op(y) if use == "returned" else y

    def rule(ctx, g):
        return g * (ctx.stored[0] if use == "attribute" else ctx.saved_tensors[0])

    f = jaxfn.autograd_function(forward, rule)
    if rules == "both":
        f.jvp(rule)
    return f


def expected(use, order):
    """The derivative of sin(f(x)), cos(y) k, and its derivative if the slope of y is k; k is x, or y with slope y."""
    y = X**3
    k, slope = (y, y) if use in ("saved output", "returned") else (X, 1.0)
    return jnp.cos(y) * k if order == 1 else -jnp.sin(y) * k * k + jnp.cos(y) * slope


def reverse(f, around, outside):
    first = jax.grad(lambda x: jnp.sum(jnp.sin(around(f)(x))))
    second = jax.grad(lambda x: jnp.sum(first(x)))
    return outside(first), outside(second), jax.grad(lambda x: jnp.sum(jax.jit(first)(x)))


def forward(f, around, outside):
    def tangent(g):
        return lambda x: jax.jvp(g, (x,), (jnp.ones_like(x),))[1]

    first = tangent(lambda x: jnp.sin(around(f)(x)))
    return outside(first), outside(tangent(first)), tangent(jax.jit(first))


NO_OPS = {**SAME_OBJECT, **NEW_OBJECT}
MODES = {"reverse": ("backward", reverse), "reverse with a jvp": ("both", reverse), "forward": ("both", forward)}
OUTSIDE = {"": lambda f: f, "jit of all": jax.jit}


def check(no_op, use, mode, context, outside):
    rules, derivatives = MODES[mode]
    f = cube(NO_OPS[no_op], use, rules)
    first, second, through_jit = derivatives(f, CONTEXTS[context], OUTSIDE[outside])
    np.testing.assert_allclose(first(X), expected(use, 1), rtol=1e-5)
    np.testing.assert_allclose(second(X), expected(use, 2), rtol=1e-5, atol=1e-6)
    if (no_op, context, outside) == ("checkpoint", "vmap", ""):  # JAX moves the batch of what `checkpoint` takes
        with pytest.raises(NotImplementedError, match="returned different values"):
            through_jit(X)
        return
    np.testing.assert_allclose(through_jit(X), expected(use, 2), rtol=1e-5, atol=1e-6)


@row("D2", "D3")
@cells(
    "no_op, use, mode, context, outside",
    [
        ("nothing", "saved output", "reverse", "vmap", "jit of all"),
        ("stop_gradient", "saved output", "reverse", "eager", ""),
        ("stop_gradient", "returned", "forward", "cond", "jit of all"),
        ("checkpoint_name", "saved input", "reverse with a jvp", "jit", ""),
        ("device_put", "attribute", "forward", "scan", ""),
        ("checkpoint", "saved output", "reverse", "vmap", ""),
        ("checkpoint", "named", "reverse", "jit", "jit of all"),
        ("custom_jvp", "saved output", "forward", "eager", "jit of all"),
        ("custom_vjp", "returned", "reverse", "checkpoint", ""),
        ("Function", "saved output", "reverse with a jvp", "vmap", "jit of all"),
        ("Function", "saved input", "reverse", "scan", ""),
        ("astype", "named", "forward", "checkpoint", "jit of all"),
        ("asarray", "saved output", "reverse", "cond", ""),
        ("reshape", "saved input", "forward", "vmap", ""),
        ("lax.reshape", "returned", "reverse", "scan", "jit of all"),
        ("transpose", "attribute", "reverse with a jvp", "eager", ""),
        ("convert_element_type", "saved output", "reverse", "jit", ""),
        ("two of them", "named", "reverse", "cond", "jit of all"),
        ("ravel", "saved output", "reverse", "eager", ""),
        ("ravel", "saved output", "reverse", "eager", "jit of all"),
        ("flatten", "saved input", "reverse with a jvp", "vmap", ""),
        ("real", "attribute", "forward", "eager", ""),
        ("squeeze", "saved output", "forward", "scan", ""),
        ("positive", "named", "reverse", "checkpoint", ""),
        ("broadcast_to", "returned", "reverse", "cond", ""),
    ],
)  # fmt: skip
@TRACES_ALWAYS
def test_whether_the_result_of_an_operation_that_changes_nothing_is_the_array(no_op, use, mode, context, outside):
    """A different array would be an intermediate, with the slope of its code."""
    check(no_op, use, mode, context, outside)


@row("D2", "D3")
@slow
@pytest.mark.parametrize("no_op", NO_OPS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_such_operation_in_every_context(context, no_op):
    check(no_op, "saved output", "reverse", context, "")


@row("D2")
@cells(
    "no_op, use, context",
    [
        ("stop_gradient", "saved output", "jit"), ("checkpoint", "saved output", "scan"),
        ("checkpoint_name", "returned", "vmap"), ("custom_jvp", "saved input", "cond"),
        ("Function", "saved input", "checkpoint"), ("Function", "saved input", "vmap"),
        ("checkpoint", "saved output", "vmap"), ("ravel", "saved output", "jit"), ("real", "returned", "scan"),
        ("squeeze", "saved input", "cond"),
    ],
)  # fmt: skip
def test_third_derivatives_are_those_of_eager_code(no_op, use, context):
    f = cube(NO_OPS[no_op], use, "backward")

    def third(around):
        first = jax.grad(lambda x: jnp.sum(jnp.sin(around(f)(x))))
        second = jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))
        return jax.grad(lambda x: jnp.sum(second(x)))

    np.testing.assert_allclose(third(CONTEXTS[context])(X), third(lambda f: f)(X), rtol=1e-4, atol=1e-5)


RETURNED, COPY, ORIGINAL = "what is returned", "what is computed from it", "what it is computed from"


@row("B8")
@cells(
    "no_op, marked, rules, context, outside",
    [
        ("nothing", RETURNED, "both", "eager", ""),
        ("nothing", COPY, "backward", "jit", "jit of all"),
        ("stop_gradient", COPY, "backward", "eager", ""),
        ("stop_gradient", ORIGINAL, "both", "jit", ""),
        ("checkpoint_name", COPY, "both", "checkpoint", ""),
        ("checkpoint", ORIGINAL, "backward", "vmap", ""),
        ("checkpoint", COPY, "backward", "scan", ""),
        ("custom_vjp", ORIGINAL, "backward", "scan", "jit of all"),
        ("Function", COPY, "both", "vmap", "jit of all"),
        ("asarray", COPY, "backward", "cond", ""),
        ("lax.reshape", ORIGINAL, "backward", "cond", "jit of all"),
        ("ravel", COPY, "backward", "eager", ""),
        ("ravel", COPY, "backward", "eager", "jit of all"),
        ("flatten", ORIGINAL, "both", "vmap", ""),
        ("real", COPY, "backward", "scan", ""),
        ("broadcast_to", ORIGINAL, "both", "eager", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.*mark_non_differentiable")
@TRACES_ALWAYS
def test_marking_an_output_by_an_operation_that_changes_nothing(no_op, marked, rules, context, outside):
    """The array is marked, except that a new one in an eager first derivative is warned of, and has no effect."""
    is_new = marked != RETURNED and no_op in NEW_OBJECT and no_op != "broadcast_to"
    is_new = is_new and context in ("eager", "vmap") and not outside
    # JAX moves the batch of what `checkpoint` takes.
    is_new = is_new or (no_op == "checkpoint" and marked != RETURNED and context == "vmap" and not outside)
    change_nothing, outside = NO_OPS[no_op], OUTSIDE[outside]

    def forward(ctx, x):
        y, z = x**2, x**3
        ctx.save_for_backward(x)
        returned = change_nothing(z) if marked == ORIGINAL else z
        ctx.mark_non_differentiable(change_nothing(z) if marked == COPY else z)
        return y, returned if marked != RETURNED else z

    def backward(ctx, g, of_marked):
        (x,) = ctx.saved_tensors
        return 5 * g * x + 7 * of_marked * x

    f = jaxfn.autograd_function(forward, backward)
    if rules == "both":
        f.jvp(lambda ctx, t: (5 * t * ctx.saved_tensors[0], 7 * t * ctx.saved_tensors[0]))

    def loss(x):
        y, z = CONTEXTS[context](f)(x)
        return jnp.sum(jnp.sin(y) + jnp.cos(z))

    first, second = jax.grad(loss), jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))
    y, z = X**2, X**3
    of_z = -7 * jnp.sin(z) * X if is_new else 0
    with pytest.warns(UserWarning, match="mark_non_differentiable was passed a value") if is_new else nullcontext():
        np.testing.assert_allclose(outside(first)(X), 5 * jnp.cos(y) * X + of_z, rtol=1e-5)
    expected = -jnp.sin(y) * 25 * X * X + 5 * jnp.cos(y)
    np.testing.assert_allclose(outside(second)(X), expected, rtol=1e-5, atol=1e-5)


IN_CONTEXTS = cells(
    "context, outside",
    [
        ("eager", ""), ("eager", "jit of all"), ("vmap", ""), ("checkpoint", "jit of all"), ("scan", ""),
    ],
    CONTEXTS,
    OUTSIDE,
)  # fmt: skip


@row("D2", "B3")
@IN_CONTEXTS
def test_of_outputs_that_are_one_object_the_first_counts(context, outside):
    """A saved output that is returned twice has the derivative of the first."""

    def forward(ctx, x):
        y = x**3
        ctx.save_for_backward(y, stop_gradient(y))
        return y, y

    def backward(ctx, g, h):
        y, copy = ctx.saved_tensors
        return g * (3 * y - copy) + h * (2 * y + 3 * copy)

    f = jaxfn.autograd_function(forward, backward)

    def loss(x):
        first, second = CONTEXTS[context](f)(x)
        return jnp.sum(first + jnp.sin(second))

    # The gradient is (2 + 5 cos(y)) y. In it the second output has the slope 5y, the saved y that of the first, 2y.
    y = X**3
    np.testing.assert_allclose(OUTSIDE[outside](jax.grad(loss))(X), (2 + 5 * jnp.cos(y)) * y, rtol=1e-5)
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))
    expected = (-5 * jnp.sin(y) * y) * 5 * y + (2 + 5 * jnp.cos(y)) * 2 * y
    np.testing.assert_allclose(OUTSIDE[outside](second)(X), expected, rtol=1e-5, atol=1e-5)


@row("D2")
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("same", [lambda x: x, stop_gradient], ids=["itself", "stop_gradient"])
def test_one_array_at_two_vmaps_is_two_inputs(outside, same):
    """Both inputs have one array underneath, if every pair of an array's rows is mapped over."""

    def forward(ctx, a, b):
        ctx.save_for_backward(same(a), same(b))
        return a * b

    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b**2, g * a**3

    f = jaxfn.autograd_function(forward, backward)
    of_pair = jax.grad(lambda b, a: jax.grad(f)(a, b))
    pairs = OUTSIDE[outside](lambda x: jax.vmap(lambda a: jax.vmap(lambda b: of_pair(b, a))(x))(x))(X)
    np.testing.assert_allclose(pairs, jnp.broadcast_to(2 * X, (3, 3)), rtol=1e-5)


@row("D2")
@pytest.mark.parametrize("reads", [True, False])
def test_one_array_that_is_two_arguments(reads):
    """Second derivatives by each are those of two arrays, also where `forward` runs on values."""

    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * x * w if not reads or x > 0 else x

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * x * w, g * x * x

    f, a = jaxfn.autograd_function(forward, backward), jnp.float32(3)
    for first, second in ((0, (6, 6)), (1, (6, 0))):
        assert jax.grad(jax.grad(f, first), (0, 1))(a, a) == second


@row("D3")
@IN_CONTEXTS
def test_an_intermediate_that_is_saved_twice(context, outside):
    """It has the derivative of the code of the first; the others have theirs."""

    def forward(ctx, x):
        z, w = x**2, x**3
        ctx.save_for_backward(z, stop_gradient(z), w)
        return jnp.sin(x)

    def backward(ctx, g):
        z, same, w = ctx.saved_tensors
        return g * (2 * z + 3 * same + 5 * w)

    f = jaxfn.autograd_function(forward, backward)
    second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(CONTEXTS[context](f)(x)))(x)))
    np.testing.assert_allclose(OUTSIDE[outside](second)(X), 10 * X + 15 * X**2, rtol=1e-5)


@row("D2", "D3")
@IN_CONTEXTS
def test_an_operation_that_computes_is_an_intermediate(context, outside):
    """Not every one that leaves the value alone: these are new arrays everywhere, with the derivative of the code."""

    def forward(ctx, x):
        y = x**3
        ctx.save_for_backward(y * 1, y + 0, jnp.copy(y), jax.device_put(y, may_alias=False))
        return y

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * sum(ctx.saved_tensors) / 4)
    first = jax.grad(lambda x: jnp.sum(CONTEXTS[context](f)(x)))
    np.testing.assert_allclose(OUTSIDE[outside](first)(X), X**3, rtol=1e-5)
    np.testing.assert_allclose(OUTSIDE[outside](jax.grad(lambda x: jnp.sum(first(x))))(X), 3 * X**2, rtol=1e-5)
