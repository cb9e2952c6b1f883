"""Contract row E1c: `jax.vmap` with any axes of arguments and outputs, against plain JAX.

JAX batches a program and differentiates it later, or the other way round. An output of a Function has the batch if any
input has it, so the axis in `out_axes` is never `None` here, as plain JAX broadcasts an output without a batch too. The
arrays have odd sizes, each its own, so that a wrong axis shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import jaxfn
from tests.support.cases import with_rules
from tests.support.contexts import CONTEXTS, eager
from tests.support.marks import cells, row, slow

MODES = ("backward", "both", "generated", "jvp")
BATCH, ROWS, COLUMNS, WIDTH = 3, 7, 5, 9


def saving(mode: str, save: str, value: Any, slope: Any, push: Any, pull: Any) -> Callable[..., Any]:
    """A Function, and how it is differentiated.

    Args:
      mode: which rules it has.
      save: what it saves: an "input" or "output", from which the rules compute `slope`, or the slope, as an
        "intermediate" or an "attribute".
      value: the outputs, of the arguments.
      slope: what the rules need, of arguments and outputs.
      push: tangents from arguments, slope and tangents.
      pull: cotangents from arguments, slope and cotangents.
    """

    def forward(ctx, *args):
        outputs = value(*args)
        leaves = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.save_for_backward(*args)
        if save == "output":
            ctx.save_for_backward(*args, *leaves)
        elif save == "intermediate":
            ctx.save_for_backward(*args, *slope(args, leaves))
        elif save == "attribute":
            ctx.slope = {"stored": slope(args, leaves)}
        ctx.num_args = len(args)
        return outputs

    def restored(ctx):
        saved = ctx.saved_tensors
        args, others = saved[: ctx.num_args], saved[ctx.num_args :]
        if save == "attribute":
            return args, ctx.slope["stored"]
        if save == "intermediate":
            return args, others
        if save == "output":
            return args, slope(args, others)
        outputs = value(*args)
        return args, slope(args, outputs if isinstance(outputs, tuple) else (outputs,))

    return with_rules(
        mode, forward, lambda ctx, *gs: pull(*restored(ctx), *gs), lambda ctx, *ts: push(*restored(ctx), *ts), "Mapped"
    )


def sine(mode, save):
    """One input; with the output saved, a function whose slope is one of its output."""
    if save == "output":
        value, slope = jnp.tanh, lambda args, ys: (1 - ys[0] ** 2,)
    else:
        value, slope = jnp.sin, lambda args, ys: (jnp.cos(args[0]),)
    rule = lambda args, s, t: s[0] * t  # noqa: E731
    return saving(mode, save, value, slope, rule, rule), value


def hard_sine(mode, save):
    """Whose rule is not its derivative."""
    value, slope = lambda x: jnp.sign(x) * x**2, lambda args, ys: (jnp.cos(args[0]),)
    rule = lambda args, s, t: s[0] * t  # noqa: E731
    reference = lambda x: jnp.sin(x) + stop_gradient(value(x) - jnp.sin(x))  # noqa: E731
    return saving(mode, save, value, slope, rule, rule), reference


def pair(mode, save):
    """Two inputs and two outputs that have nothing to do with each other."""
    if save == "output":
        value = lambda x, w: (jnp.tanh(x), jnp.tanh(w))  # noqa: E731
        slope = lambda args, ys: (1 - ys[0] ** 2, 1 - ys[1] ** 2)  # noqa: E731
    else:
        value = lambda x, w: (jnp.sin(x), jnp.cos(w))  # noqa: E731
        slope = lambda args, ys: (jnp.cos(args[0]), -jnp.sin(args[1]))  # noqa: E731
    rule = lambda args, s, t, u: (s[0] * t, s[1] * u)  # noqa: E731
    return saving(mode, save, value, slope, rule, rule), value


def product(mode, save):
    """An unbatched weight, whose gradient is summed over the batch."""
    value = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    slope = lambda args, ys: (1 - ys[0] ** 2,)  # noqa: E731
    push = lambda args, s, t, u: s[0] * (t @ args[1] + args[0] @ u)  # noqa: E731
    pull = lambda args, s, g: ((s[0] * g) @ args[1].T, args[0].T @ (s[0] * g))  # noqa: E731
    return saving(mode, save, value, slope, push, pull), value


# Each function of (mode, save): the Function's call and its reference.
FUNCTIONS = {"sine": sine, "hard_sine": hard_sine, "pair": pair, "product": product}


def operands(name: str, in_axis: int, batch: int = BATCH) -> tuple[jax.Array, ...]:
    """The mapped argument, with the batch at the axis that is passed, and the unbatched one."""
    x = jnp.sin(1.0 + 0.7 * jnp.arange(batch * ROWS * COLUMNS, dtype=jnp.float32)).reshape(batch, ROWS, COLUMNS)
    w = jnp.cos(0.3 * jnp.arange(COLUMNS * WIDTH, dtype=jnp.float32)).reshape(COLUMNS, WIDTH)
    x = jnp.moveaxis(x, 0, in_axis)
    return (x,) if name.endswith("sine") else (x, w)


def mapped(name: str, f: Any, in_axis: int, out_axis: int, of_second: int = 1) -> Callable[..., Any]:
    if name.endswith("sine"):
        return jax.vmap(f, in_axes=in_axis, out_axes=out_axis)
    out_axes = (out_axis, of_second) if name == "pair" else out_axis
    return jax.vmap(f, in_axes=(in_axis, None), out_axes=out_axes)


def chosen(f):
    """Runs the function in a branch that the last, unbatched argument chooses; the other branch has equal types."""

    def outer(*args):
        zeros = lambda *args: jax.tree.map(jnp.zeros_like, f(*args))  # noqa: E731
        return jax.lax.cond(args[0].size >= 0 * args[-1].ravel()[0], f, zeros, *args)

    return outer


# What is put around the Function, or around the mapped function.
AROUND = CONTEXTS | {"cond by w": chosen}


def loss_of(f):
    """A number that differs if entries of the outputs are exchanged."""

    def loss(*args):
        total = jnp.float32(0)
        for y in jax.tree.leaves(f(*args)):
            positions = jnp.arange(1, y.size + 1, dtype=jnp.float32).reshape(y.shape) / max(y.size, 1)
            total += jnp.sum(jnp.sin(0.5 * y) * positions)
        return total

    return loss


def waves(args):
    return tuple(jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in args)


def grad(f, args):
    return jax.grad(f, argnums=tuple(range(len(args))))


def first_order(f, args, has_forward):
    loss = loss_of(f)
    found = [jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)]
    if has_forward:
        found.append(jax.jvp(f, args, waves(args)))
    return found


def second_order(f, args, has_forward):
    slope = grad(loss_of(f), args)
    found = [grad(loss_of(slope), args)(*args)]
    if has_forward:
        found.append(jax.jvp(slope, args, waves(args))[1])
        found.append(jax.grad(lambda *args: loss_of(lambda *a: jax.jvp(f, a, waves(a))[1])(*args))(*args))
    return found


def agree(got, expected, message=""):
    assert jax.tree.structure(got) == jax.tree.structure(expected), message
    for ours, by_jax in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.shape == by_jax.shape, message
        atol = 2e-5 * max(1.0, float(np.abs(by_jax).max(initial=0)))
        np.testing.assert_allclose(ours, by_jax, rtol=2e-4, atol=atol, err_msg=str(message))


def both_orders(name, f, inside, outside, pairs, has_forward, batch=BATCH):
    """The derivatives for all these axes, of one compiled program; for the first axes, the second ones too."""

    def program():
        everything = []
        for i, (in_axis, out_axis) in enumerate(pairs):
            args = operands(name, in_axis, batch)
            over = AROUND[outside](mapped(name, AROUND[inside](f), in_axis, out_axis, (1, 0)[i % 2]))
            everything.append(first_order(over, args, has_forward))
            if i == 0:
                everything += second_order(over, args, has_forward)
        return everything

    return jax.device_get(jax.jit(program)())


@functools.cache
def expected_of(name, kind, pairs, has_forward, batch):
    """The plain function without its wrapper: wrappers of plain operations make no difference."""
    reference = FUNCTIONS[name]("backward", kind)[1]
    return both_orders(name, reference, "eager", "eager", pairs, has_forward, batch)


def check(name, mode, save, inside, outside, pairs, batch=BATCH):
    f, _ = FUNCTIONS[name](mode, save)
    got = both_orders(name, f, inside, outside, pairs, mode != "backward", batch)
    kind = "output" if save == "output" else "input"  # which reference it has
    agree(got, expected_of(name, kind, pairs, mode != "backward", batch))


@row("E1c")
@cells(
    "name, mode, save, inside, outside, pairs",
    [
        ("sine", "backward", "input", "eager", "eager", ((1, 0), (2, 1))),
        ("sine", "both", "output", "eager", "jit", ((-1, 1), (0, -1))),
        ("sine", "generated", "intermediate", "jit", "eager", ((2, -1), (1, 1))),
        ("hard_sine", "jvp", "attribute", "jit", "jit", ((-1, 0),)),
        ("pair", "backward", "output", "eager", "checkpoint", ((1, -1), (0, 1))),
        ("product", "both", "input", "checkpoint", "eager", ((2, 0),)),
        ("sine", "generated", "attribute", "eager", "scan", ((2, 1), (0, -1))),
        ("pair", "jvp", "intermediate", "scan", "eager", ((-1, 1),)),
        ("hard_sine", "backward", "intermediate", "eager", "cond", ((-1, -1), (0, 1))),
        ("product", "generated", "output", "cond by w", "eager", ((1, 1),)),
        ("product", "jvp", "input", "eager", "jit", ((0, 0),)),
    ],
    ids=str,
)
def test_axes_inside_and_outside_other_transformations(name, mode, save, inside, outside, pairs):
    """The pairs are axes of the mapped argument and of the output."""
    if jax.__version_info__ < (0, 11) and mode != "backward" and "scan" in (inside, outside):
        with pytest.raises(TypeError, match="forward-mode"):  # JAX forgets a custom_jvp there (row D7)
            check(name, mode, save, inside, outside, pairs)
        return
    check(name, mode, save, inside, outside, pairs)


@row("E1c")
@cells(
    "batch, name, mode",
    [(0, "sine", "generated"), (1, "pair", "backward"), (0, "product", "both"), (1, "hard_sine", "jvp")],
    [0, 1],
    FUNCTIONS,
    MODES,
)
def test_axes_of_an_empty_batch_and_of_one_element(batch, name, mode):
    check(name, mode, "input", "eager", "jit", ((1, 0),), batch=batch)


@row("E1c")
@cells(
    "name, mode",
    [("sine", "backward"), ("hard_sine", "generated"), ("pair", "jvp"), ("product", "both")],
    FUNCTIONS,
    MODES,
)
def test_whole_jacobians_and_hessians(name, mode):
    def all_of(f):
        x, *others = operands(name, 2, 2)
        over = jax.jit(mapped(name, f, 2, -1))
        results = [jax.jacrev(over)(x[:1], *others)]  # of one row
        if mode != "backward":
            results += [jax.jacfwd(over)(x[:1], *others), jax.hessian(loss_of(over))(x[:1], *others)]
        return results

    f, reference = FUNCTIONS[name](mode, "input")
    agree(*jax.device_get((jax.jit(lambda: all_of(f))(), jax.jit(lambda: all_of(reference))())))


@row("E1c")
@cells(
    "name, mode, save, inside, outside, outer, inner",
    [
        ("sine", "backward", "input", "eager", "checkpoint", (3, 2), (2, 0)),
        ("sine", "both", "output", "scan", "eager", (2, 1), (0, -1)),
        ("sine", "generated", "intermediate", "jit", "eager", (-1, -1), (1, 0)),
        pytest.param("product", "jvp", "attribute", "eager", "jit", (0, 0), (1, 1), marks=slow),
    ],
    ids=str,
)
def test_vmap_of_vmap_along_different_axes(name, mode, save, inside, outside, outer, inner):
    """Each with the axes of the argument and of the output."""

    def all_of(f):
        x, *others = operands(name, inner[0])
        x = jnp.stack([x, 0.5 * x], outer[0])
        nones = (None,) * len(others)
        mapped_once = jax.vmap(AROUND[inside](f), in_axes=(inner[0], *nones), out_axes=inner[1])
        over = AROUND[outside](jax.vmap(mapped_once, in_axes=(outer[0], *nones), out_axes=outer[1]))
        args = (x, *others)
        return first_order(over, args, mode != "backward"), second_order(over, args, False)

    f, reference = FUNCTIONS[name](mode, save)
    agree(*jax.device_get((jax.jit(lambda: all_of(f))(), jax.jit(lambda: all_of(reference))())))


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

    def backward(ctx, g, of_third):
        return g * ctx.saved_tensors[0], of_third

    def jvp(ctx, t, u):
        return t * ctx.saved_tensors[0], u

    return with_rules("both" if has_jvp else "backward", forward, backward, jvp, "Otherwise")


@row("E1c")
@cells(
    "has_jvp, inside, outside, in_axis, out_axis",
    [
        (False, "eager", "jit", 1, -1),
        (False, "eager", "scan", -1, 0),
        (True, "scan", "eager", 2, 1),
        pytest.param(False, "checkpoint", "eager", 2, 0, marks=slow),
        pytest.param(False, "eager", "cond", 0, 1, marks=slow),
        pytest.param(True, "jit", "checkpoint", 1, 1, marks=slow),
    ],
)
def test_a_forward_that_computes_otherwise_where_it_is_differentiated(has_jvp, inside, outside, in_axis, out_axis):
    def all_of(f):
        args = operands("pair", in_axis)
        over = AROUND[outside](jax.vmap(AROUND[inside](f), in_axes=(in_axis, None), out_axes=(out_axis, 0)))
        return first_order(over, args, has_jvp), second_order(over, args, False)

    got = jax.jit(lambda: all_of(computing_otherwise(has_jvp)))()
    agree(*jax.device_get((got, jax.jit(lambda: all_of(lambda x, w: (jnp.sin(x), w)))())))


# --- outputs that do not depend on the batch

WEIGHTS = jnp.arange(1.0, ROWS + 1)


class Constant(jaxfn.Function):
    """An output of w alone, though the rule gives x a derivative too."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return WEIGHTS * w

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g[:, None], (WEIGHTS * g).sum()


class ConstantWithJvp(Constant):
    @staticmethod
    def jvp(ctx, of_x, of_w):
        (x,) = ctx.saved_tensors
        return 2 * (x * of_x).sum(1) + WEIGHTS * of_w


class ConstantWithGeneratedJvp(Constant):
    generate_jvp_rule = True


def constant(x, w):
    squares = (x * x).sum(1)
    return WEIGHTS * w + squares - stop_gradient(squares)


def weighed(f):
    """A number that differs if entries of `f(x, w)` are exchanged."""
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)) * WEIGHTS)


# Of the function of one element, of the mapped function, and of `(x, w)`.
PER_ELEMENT = {
    "grad": lambda f: jax.grad(weighed(f), (0, 1)),
    "grad of grad": lambda f: jax.grad(lambda x, w: jnp.sum(jnp.cos(jax.grad(weighed(f))(x, w))), (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), 0.5 * w))[1],
}


@row("E1c")
@cells(
    "function, context, derivative, in_axes",
    [
        (Constant, "eager", "grad", (1,)),
        (Constant, "checkpoint", "grad of grad", (-1,)),
        (Constant, "scan", "grad", (0, 2)),
        (Constant, "cond", "grad", (2,)),
        (ConstantWithJvp, "jit", "jvp", (2,)),
        (ConstantWithJvp, "checkpoint", "grad", (1, 0)),
        (ConstantWithGeneratedJvp, "scan", "jvp", (-1,)),
        (ConstantWithGeneratedJvp, "cond", "grad of grad", (1,)),
        pytest.param(Constant, "jit", "grad of grad", (0, 1), marks=slow),
        pytest.param(ConstantWithJvp, "cond", "jvp", (1, 2), marks=slow),
        pytest.param(ConstantWithJvp, "scan", "grad of grad", (2,), marks=slow),
        pytest.param(ConstantWithGeneratedJvp, "checkpoint", "jvp", (0,), marks=slow),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
def test_a_rule_that_gives_a_mapped_input_a_derivative_of_an_output_without_the_batch(
    function, context, derivative, in_axes
):
    """That of each element, under one vmap or two; for a hand-written rule JAX adds the cotangents up, or raises."""
    x, w = jnp.sin(jnp.arange(ROWS * COLUMNS * 2.0 ** len(in_axes))), jnp.float32(0.3)
    sizes = [ROWS, COLUMNS]
    for axis in reversed(in_axes):
        sizes.insert(axis if axis >= 0 else len(sizes), 2)
    x = x.reshape(sizes)

    def over(f):
        for axis in reversed(in_axes):
            f = jax.vmap(f, (axis, None))
        return f

    def all_of(f):
        f = AROUND[context](f)
        return [
            over(PER_ELEMENT[derivative](f))(x, w),  # of each element
            PER_ELEMENT[derivative](lambda x, w: over(f)(x, w))(x, w),
        ]

    expected = jax.jit(lambda: all_of(constant))()
    for run in (eager, jax.jit) if context == "eager" else (jax.jit,):
        agree(run(lambda: all_of(function.apply))(), expected)


class OneForAll(jaxfn.Function):
    """The first output does not depend on the first argument."""

    @staticmethod
    def forward(ctx, x, u):
        ctx.save_for_backward(x, u)
        return jnp.sin(u), x * u

    @staticmethod
    def backward(ctx, g, h):
        x, u = ctx.saved_tensors
        return h * u, g * jnp.cos(u) + h * x


class OneForAllOrNone(OneForAll):
    @staticmethod
    def forward(ctx, x, u):
        ctx.set_materialize_grads(False)
        return OneForAll.forward(ctx, x, u)

    @staticmethod
    def backward(ctx, g, h):
        x, u = ctx.saved_tensors
        of_x, of_u = (None, None) if h is None else (h * u, h * x)
        if g is not None:
            of_u = g * jnp.cos(u) + (0 if of_u is None else of_u)
        return of_x, of_u


class OneForAllWithJvp(OneForAll):
    generate_jvp_rule = True


class OneForAllSaving(OneForAll):
    """Saves an intermediate too."""

    @staticmethod
    def forward(ctx, x, u):
        slope = jnp.cos(u)
        ctx.save_for_backward(x, u, slope)
        return jnp.sin(u), x * u

    @staticmethod
    def backward(ctx, g, h):
        x, u, slope = ctx.saved_tensors
        return h * u, g * slope + h * x


def one_for_all(x, u):
    return jnp.sin(u), x * u


def coupled(f):
    def loss(x, u):
        y, z = f(x, u)
        return y * y + jnp.sin(z) * y

    return loss


def total_of(loss, xs):
    return lambda u: jax.vmap(loss, (0, None))(xs, u).sum()


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
        program = jax.make_jaxpr(loss)(x, u)
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, x, u)[0]

    return function


# Derivatives inside vmap, outside it, or on both sides, of a loss f(x, u); the vmap is over x, u, or both.
INTERLEAVED = {
    "grad(vmap)": lambda f, x, u: jax.grad(total_of(f, x))(u),
    "grad(vmap) with x of u": lambda f, x, u: jax.grad(lambda u: total_of(f, u * x)(u))(u),
    "grad3(vmap)": lambda f, x, u: jax.grad(jax.grad(jax.grad(total_of(f, x))))(u),
    "vmap(grad grad)": lambda f, x, u: jax.vmap(jax.grad(jax.grad(f, 1), 1), (0, None))(x, u),
    "vmap(jacrev2)": lambda f, x, u: jax.vmap(jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)), (0, None))(x, u),
    "grad(vmap(vmap))": lambda f, x, u: jax.grad(
        lambda u: jax.vmap(lambda x: total_of(f, x)(u))(jnp.stack([x, 2 * x])).sum()
    )(u),
    "grad(vmap(vmap) over u)": lambda f, x, u: jax.grad(
        lambda u: jax.vmap(total_of(f, x))(u * jnp.array([1.0, 2.0])).sum()
    )(u),
    "vmap(vmap(grad grad))": lambda f, x, u: jax.vmap(jax.vmap(jax.grad(jax.grad(f, 1), 1), (0, None)), (None, 0))(
        x, u * jnp.arange(1.0, 6)
    ),
    "vmap(grad grad vmap)": lambda f, x, u: jax.vmap(jax.grad(jax.grad(total_of(f, x))))(u * jnp.arange(1.0, 6)),
    "grad(vmap(grad))": lambda f, x, u: jax.grad(total_of(jax.grad(f, 1), x))(u),
    "grad(vmap(grad grad))": lambda f, x, u: jax.grad(lambda x: total_of(jax.grad(jax.grad(f, 1), 1), x)(u))(x),
    "vmap(jitted pullback)": lambda f, x, u: jax.vmap(jitted_pullback(f), (0, None))(x, u),
    "grad(vmap(jitted pullback))": lambda f, x, u: jax.grad(total_of(jitted_pullback(f), x))(u),
    "grad(vmap(jaxpr))": lambda f, x, u: jax.grad(total_of(evaluated(f), x))(u),
}


@row("E1c")
@cells(
    "function, derivative, context",
    [
        (OneForAll, "grad(vmap)", "eager"),
        (OneForAll, "grad(vmap(vmap))", "checkpoint"),
        (OneForAll, "grad(vmap(grad))", "jit"),
        (OneForAll, "grad(vmap(jitted pullback))", "eager"),
        (OneForAllOrNone, "grad(vmap) with x of u", "jit"),
        (OneForAllOrNone, "grad(vmap(vmap) over u)", "eager"),
        (OneForAllWithJvp, "grad3(vmap)", "eager"),
        (OneForAllWithJvp, "grad(vmap(grad grad))", "checkpoint"),
        (OneForAllSaving, "vmap(grad grad vmap)", "eager"),
        (OneForAllSaving, "grad(vmap(jaxpr))", "jit"),
        *[
            pytest.param(function, derivative, context, marks=slow)
            for function, context in [
                (OneForAllOrNone, "checkpoint"),
                (OneForAllWithJvp, "jit"),
                (OneForAllSaving, "checkpoint"),
            ]
            for derivative in INTERLEAVED
        ],
    ],
)
def test_the_cotangent_of_an_output_without_the_batch_counts_once(function, derivative, context):
    """A hand-written rule counts it for each element on JAX 0.10.0, and 0.12.0 raises."""
    xs, u = jnp.array([0.1, 0.2, 0.3, 0.5]), jnp.float32(0.7)

    def of(f):
        wrapped = AROUND[context](lambda both: coupled(f)(*both))
        return INTERLEAVED[derivative](lambda x, u: wrapped((x, u)), xs, u)

    expected = jax.jit(lambda: of(one_for_all))()
    for run in (eager, jax.jit) if context == "eager" else (jax.jit,):
        agree(run(lambda: of(function.apply))(), expected)


class Scaled(jaxfn.Function):
    """A Function of which only the saved input is mapped; neither the output nor what is differentiated is."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return jnp.floor(3 * x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


@row("E1c")
@cells("context", ["eager", "checkpoint", "scan"], AROUND)
def test_a_mapped_array_that_was_saved_and_nothing_else_mapped(context):
    x, ws = jnp.float32(0.7), jnp.arange(1.0, BATCH + 1)

    def one(x, w):
        return AROUND[context](lambda w: Scaled.apply(x, w) * w)(w)

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

    agree(of(scale), of(jnp.multiply))
