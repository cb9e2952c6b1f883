"""Contract row E1c: outputs without a batch, and a forward that computes otherwise, against plain JAX.

An output of a Function has the batch if any input has it, so the axis in `out_axes` is never `None` here, as plain JAX
broadcasts an output without a batch too. `test_forward_mode.py` has the axes of all other arrays.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import jaxfn
from tests.support.cases import function_of, with_rules
from tests.support.contexts import CONTEXTS, eager, program
from tests.support.derivatives import STEPS, check, jit, taken
from tests.support.marks import cells, row, slow

ROWS, COLUMNS, BATCH = 7, 5, 3


def computing_otherwise(has_jvp):
    """A forward that uses other operations if something is differentiated, with the batch at another axis."""

    def forward(ctx, x, w):
        if any(ctx.needs_input_grad):
            first, second = jax.lax.map(lambda row: (jnp.sin(row), jnp.cos(row)), x)
            third = w * (1 + 0 * x.sum())
        else:
            first, second, third = jnp.sin(x.T).T, jnp.cos(x), w
        ctx.save_for_backward(second)
        return first, third

    def rule(ctx, moved, of_third):
        return moved * ctx.saved_tensors[0], of_third

    return with_rules("both" if has_jvp else "backward", forward, rule, rule, "Otherwise")


@row("E1c")
@cells(
    "has_jvp, inside, outside, in_axis, out_axis",
    [(False, "eager", "jit", 1, -1), (False, "eager", "scan", -1, 0), (True, "scan", "eager", 2, 1)],
)
def test_a_forward_that_computes_otherwise_where_it_is_differentiated(has_jvp, inside, outside, in_axis, out_axis):
    x = jnp.sin(1.0 + 0.7 * jnp.arange(BATCH * ROWS * COLUMNS)).reshape(BATCH, ROWS, COLUMNS)
    args = jnp.moveaxis(x, 0, in_axis), jnp.cos(0.3 * jnp.arange(9.0))

    def derived(f):
        over = CONTEXTS[outside](jax.vmap(CONTEXTS[inside](f), in_axes=(in_axis, None), out_axes=(out_axis, 0)))
        names = ("grad", "vjp of grad", "jvp")[: 2 + has_jvp]
        return jit(taken(over, names))(*args)

    check(derived(computing_otherwise(has_jvp)), derived(lambda x, w: (jnp.sin(x), w)))


# --- outputs that do not depend on the batch

WEIGHTS = jnp.arange(1.0, ROWS + 1)


def constant(rules):
    """An output of w alone, though the rule gives x a derivative too."""
    return function_of(
        rules,
        lambda x, w: WEIGHTS * w,
        lambda saved, of_x, of_w: 2 * (saved[0] * of_x).sum(1) + WEIGHTS * of_w,
        lambda saved, g: (2 * saved[0] * g[:, None], (WEIGHTS * g).sum()),
    )


def plain_constant(x, w):
    squares = (x * x).sum(1)
    return WEIGHTS * w + squares - stop_gradient(squares)


@row("E1c")
@cells(
    "rules, context, derivative, in_axes",
    [
        ("backward", "eager", "grad", (1,)),
        ("backward", "checkpoint", "grad of grad", (-1,)),
        ("backward", "scan", "grad", (0, 2)),
        ("backward", "cond", "grad", (2,)),
        ("jvp", "jit", "jvp", (2,)),
        ("both", "checkpoint", "grad", (1, 0)),
        ("generated", "scan", "jvp", (-1,)),
        ("generated", "cond", "grad of grad", (1,)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
def test_a_rule_that_gives_a_mapped_input_a_derivative_of_an_output_without_the_batch(
    rules, context, derivative, in_axes
):
    """That of each element, under one vmap or two; for a hand-written rule JAX adds the cotangents up, or raises."""
    x, w = jnp.sin(jnp.arange(ROWS * COLUMNS * 2.0 ** len(in_axes))), jnp.float32(0.3)
    sizes = [ROWS, COLUMNS]
    for axis in reversed(in_axes):
        sizes.insert(axis if axis >= 0 else len(sizes), 2)
    args = x.reshape(sizes), w

    def over(f):
        for axis in reversed(in_axes):
            f = jax.vmap(f, (axis, None))
        return f

    steps = STEPS | {"vmap": over}

    def both(f):
        """The weights show whether entries are exchanged."""
        weighed = CONTEXTS[context](lambda x, w: f(x, w) * WEIGHTS)
        names = f"vmap of {derivative}", f"{derivative} of vmap"
        return [program(name, **steps)(weighed)(*args) for name in names]

    for run in (eager, jax.jit) if context == "eager" else (jax.jit,):
        check(run(lambda: both(constant(rules)))(), jax.jit(lambda: both(plain_constant))())


def one_for_all(form):
    """The first output does not depend on the first argument."""

    def forward(ctx, x, u):
        ctx.set_materialize_grads(form != "None for zeros")
        ctx.save_for_backward(x, u, *[jnp.cos(u)] * (form == "an intermediate"))
        return jnp.sin(u), x * u

    def backward(ctx, g, h):
        x, u, *slope = ctx.saved_tensors
        of_u = 0 if g is None else g * (slope[0] if slope else jnp.cos(u))
        return (None, of_u) if h is None else (h * u, of_u + h * x)

    return with_rules("generated" if form == "generated" else "backward", forward, backward, None, "OneForAll")


FORMS = ["arguments", "None for zeros", "generated", "an intermediate"]


def jitted_pullback(loss):
    """The gradient by `u`, by a jitted function that returns what `jax.vjp` did."""
    vjp = jax.jit(lambda x, u: jax.vjp(loss, x, u))

    def gradient(x, u):
        y, pullback = vjp(x, u)
        return pullback(jnp.ones_like(y))[1]

    return gradient


def evaluated(loss):
    """Evaluates the function by its jaxpr."""

    def function(x, u):
        closed = jax.make_jaxpr(loss)(x, u)
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x, u)[0]

    return function


# Of a function of (x, u).
OF_U = {
    "grad": lambda f: jax.grad(lambda x, u: f(x, u).sum(), 1),
    "grad by x": lambda f: jax.grad(lambda x, u: f(x, u).sum()),
    "jacrev": lambda f: lambda x, u: jax.jacrev(f, (0, 1))(x, u),
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "vmap over u": lambda f: jax.vmap(f, (None, 0)),
    "x by u": lambda f: lambda x, u: f(u * x, u),
    "two u": lambda f: lambda x, u: f(x, u * jnp.array([1.0, 2.0])),
    "jitted pullback": jitted_pullback,
    "jaxpr": evaluated,
}
INTERLEAVED = [
    "grad of vmap",
    "grad of x by u of vmap",
    "grad of grad of grad of vmap",
    "vmap of grad of grad",
    "vmap of jacrev of jacrev",
    "grad of vmap of vmap",
    "grad of two u of vmap over u of vmap",
    "vmap over u of vmap of grad of grad",
    "vmap over u of grad of grad of vmap",
    "grad of vmap of grad",
    "grad by x of vmap of grad of grad",
    "vmap of jitted pullback",
    "grad of vmap of jitted pullback",
    "grad of vmap of jaxpr",
]


@row("E1c")
@cells(
    "form, derivative, context",
    [
        ("arguments", "grad of vmap", "eager"),
        ("arguments", "grad of vmap of vmap", "checkpoint"),
        ("arguments", "grad of vmap of grad", "jit"),
        ("arguments", "grad of vmap of jitted pullback", "eager"),
        ("None for zeros", "grad of x by u of vmap", "jit"),
        ("None for zeros", "grad of two u of vmap over u of vmap", "eager"),
        ("generated", "grad of grad of grad of vmap", "eager"),
        ("generated", "grad by x of vmap of grad of grad", "checkpoint"),
        ("an intermediate", "vmap over u of grad of grad of vmap", "eager"),
        ("an intermediate", "grad of vmap of jaxpr", "jit"),
        *[pytest.param("an intermediate", derivative, "checkpoint", marks=slow) for derivative in INTERLEAVED],
    ],
)
def test_the_cotangent_of_an_output_without_the_batch_counts_once(form, derivative, context):
    """A hand-written rule counts it for each element on JAX 0.10.0, and 0.12.0 raises."""
    steps = derivative.split(" of ")
    x = jnp.array([0.1, 0.2, 0.3, 0.5]).reshape([2] * (steps.count("vmap") - 1) + [-1])
    u = jnp.arange(1.0, 6) * 0.7 if steps[0] == "vmap over u" else jnp.float32(0.7)

    def coupled(f):
        def loss(both):
            y, z = f(*both)
            return y * y + jnp.sin(z) * y

        around = CONTEXTS[context](loss)
        return program(derivative, **OF_U)(lambda x, u: around((x, u)))(x, u)

    expected = jax.jit(lambda: coupled(lambda x, u: (jnp.sin(u), x * u)))()
    for run in (eager, jax.jit) if context == "eager" else (jax.jit,):
        check(run(lambda: coupled(one_for_all(form)))(), expected)


@row("E1c")
@cells("context", ["eager", "checkpoint", "scan"])
def test_a_mapped_array_that_was_saved_and_nothing_else_mapped(context):
    """Neither the output nor what is differentiated is."""
    scaled = function_of(
        "backward", lambda x, w: jnp.floor(3 * x), None, lambda saved, g: (g * saved[0], None), lambda args, y: args[1:]
    )
    x, ws = jnp.float32(0.7), jnp.arange(1.0, BATCH + 1)

    def one(x, w):
        return CONTEXTS[context](lambda w: scaled(x, w) * w)(w)

    of_each = jax.vmap(jax.grad(one), (None, 0))
    of_all = jax.grad(lambda x: jax.vmap(one, (None, 0))(x, ws).sum())
    for run in (eager, jax.jit):
        np.testing.assert_allclose(run(of_each)(x, ws), ws**2)
        np.testing.assert_allclose(run(of_all)(x), (ws**2).sum())


@row("E1c")
def test_a_scan_whose_carry_alone_is_batched():
    @jaxfn.function
    def scale(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    scale.backward(lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum()))
    x, factor = jnp.array([2.0, 6.75]), jnp.float32(2.0)

    def of(f):
        steps = jax.vmap(lambda x, u: jax.lax.scan(lambda x, _: (f(x, u), None), x, length=3)[0], (0, None))
        first = jax.grad(lambda x, u: jnp.sin(steps(x, u)).sum(), (0, 1))
        return steps(x, factor), first(x, factor), jax.grad(lambda u: first(x, u)[0].sum())(factor)

    check(of(scale), of(jnp.multiply))
