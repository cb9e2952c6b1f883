"""Contract row E1c: `jax.vmap` with any axes of arguments and outputs, against plain JAX.

JAX batches a program and differentiates it later, or the other way round. An output of a Function has the batch if any
input has it, so the axis in `out_axes` is never `None` here, as plain JAX broadcasts an output without a batch too. The
arrays have odd sizes, each its own, so that a wrong axis shows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import jaxfn
from tests.support.marks import lane_cases, row, sampled, slow

MODES = ("reverse", "both", "generated", "jvp")
SAVES = ("input", "output", "intermediate", "attribute")
BATCH, ROWS, COLUMNS, WIDTH = 3, 7, 5, 9


def with_rules(mode: str, save: str, value: Any, slope: Any, push: Any, pull: Any) -> Callable[..., Any]:
    """A Function, and how it is differentiated.

    Args:
      mode: which rules it has.
      save: what it saves, of which `slope` is made in `backward`, or which is the slope.
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
            ctx.slope = {"kept": slope(args, leaves)}
        ctx.num_args = len(args)
        return outputs

    def restored(ctx):
        saved = ctx.saved_tensors
        args, others = saved[: ctx.num_args], saved[ctx.num_args :]
        if save == "attribute":
            return args, ctx.slope["kept"]
        if save == "intermediate":
            return args, others
        if save == "output":
            return args, slope(args, others)
        outputs = value(*args)
        return args, slope(args, outputs if isinstance(outputs, tuple) else (outputs,))

    attributes: dict[str, Any] = {"forward": staticmethod(forward)}
    if mode != "jvp":
        attributes["backward"] = staticmethod(lambda ctx, *gs: pull(*restored(ctx), *gs))
    if mode in ("both", "jvp"):
        attributes["jvp"] = staticmethod(lambda ctx, *ts: push(*restored(ctx), *ts))
    attributes["generate_jvp_rule"] = mode == "generated"
    return type("Mapped", (jaxfn.Function,), attributes).apply


def sine(mode, save):
    """One input; with the output saved, a function whose slope is one of its output."""
    if save == "output":
        value, slope = jnp.tanh, lambda args, ys: (1 - ys[0] ** 2,)
    else:
        value, slope = jnp.sin, lambda args, ys: (jnp.cos(args[0]),)
    rule = lambda args, s, t: s[0] * t  # noqa: E731
    return with_rules(mode, save, value, slope, rule, rule), value


def hard_sine(mode, save):
    """Whose rule is not its derivative."""
    value, slope = lambda x: jnp.sign(x) * x**2, lambda args, ys: (jnp.cos(args[0]),)
    rule = lambda args, s, t: s[0] * t  # noqa: E731
    reference = lambda x: jnp.sin(x) + stop_gradient(value(x) - jnp.sin(x))  # noqa: E731
    return with_rules(mode, save, value, slope, rule, rule), reference


def pair(mode, save):
    """Two inputs and two outputs that have nothing to do with each other."""
    if save == "output":
        value = lambda x, w: (jnp.tanh(x), jnp.tanh(w))  # noqa: E731
        slope = lambda args, ys: (1 - ys[0] ** 2, 1 - ys[1] ** 2)  # noqa: E731
    else:
        value = lambda x, w: (jnp.sin(x), jnp.cos(w))  # noqa: E731
        slope = lambda args, ys: (jnp.cos(args[0]), -jnp.sin(args[1]))  # noqa: E731
    rule = lambda args, s, t, u: (s[0] * t, s[1] * u)  # noqa: E731
    return with_rules(mode, save, value, slope, rule, rule), value


def product(mode, save):
    """An unbatched weight, whose gradient is summed over the batch."""
    value = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    slope = lambda args, ys: (1 - ys[0] ** 2,)  # noqa: E731
    push = lambda args, s, t, u: s[0] * (t @ args[1] + args[0] @ u)  # noqa: E731
    pull = lambda args, s, g: ((s[0] * g) @ args[1].T, args[0].T @ (s[0] * g))  # noqa: E731
    return with_rules(mode, save, value, slope, push, pull), value


# Each function of (mode, save): the Function's call and its reference.
FUNCTIONS = {"sine": sine, "hard_sine": hard_sine, "pair": pair, "product": product}
IN_AXES = (0, 1, 2, -1)
OUT_AXES = (0, 1, -1)
PAIRS = tuple(itertools.product(IN_AXES, OUT_AXES))


def operands(name: str, in_axis: int, batch: int = BATCH) -> tuple[jax.Array, ...]:
    """The mapped argument, with the batch where it is told, and the unbatched one."""
    x = jnp.sin(1.0 + 0.7 * jnp.arange(batch * ROWS * COLUMNS, dtype=jnp.float32)).reshape(batch, ROWS, COLUMNS)
    w = jnp.cos(0.3 * jnp.arange(COLUMNS * WIDTH, dtype=jnp.float32)).reshape(COLUMNS, WIDTH)
    x = jnp.moveaxis(x, 0, in_axis)
    return (x,) if name.endswith("sine") else (x, w)


def mapped(name: str, f: Any, in_axis: int, out_axis: int, of_second: int = 1) -> Callable[..., Any]:
    if name.endswith("sine"):
        return jax.vmap(f, in_axes=in_axis, out_axes=out_axis)
    out_axes = (out_axis, of_second) if name == "pair" else out_axis
    return jax.vmap(f, in_axes=(in_axis, None), out_axes=out_axes)


def scanned(f):
    """In the body of a scan of one step."""

    def outer(*args):
        body = lambda c, _: (c, f(*c))  # noqa: E731
        return jax.tree.map(lambda y: y[0], jax.lax.scan(body, args, None, length=1)[1])

    return outer


def chosen(f):
    """In a branch; the other one has the same types and is not taken."""

    def outer(*args):
        zeros = lambda *args: jax.tree.map(jnp.zeros_like, f(*args))  # noqa: E731
        return jax.lax.cond(args[0].size >= 0 * args[-1].ravel()[0], f, zeros, *args)

    return outer


def identity(f):
    return f


def copied(f):
    """A function of its own, which JAX traces anew."""
    return lambda *args: f(*args)


# What is put round the Function, and what round the mapped function.
CONTEXTS: dict[str, tuple[Any, Any]] = {
    "none": (identity, identity),
    "jit_outside": (identity, jax.jit),
    "jit_inside": (jax.jit, identity),
    "jit_both": (jax.jit, jax.jit),
    "checkpoint_outside": (identity, jax.checkpoint),
    "checkpoint_inside": (jax.checkpoint, identity),
    "scan_outside": (identity, scanned),
    "scan_inside": (scanned, identity),
    "cond_outside": (identity, chosen),
    "cond_inside": (chosen, identity),
}


def loss_of(f):
    """A number that tells every place of every output from the others."""

    def loss(*args):
        total = jnp.float32(0)
        for y in jax.tree.leaves(f(*args)):
            places = jnp.arange(1, y.size + 1, dtype=jnp.float32).reshape(y.shape) / max(y.size, 1)
            total += jnp.sum(jnp.sin(0.5 * y) * places)
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


def both_orders(name, f, context, pairs, num_second, has_forward, batch=BATCH, run=jax.jit):
    """The derivatives for all these axes, of one compiled program; for some, the second ones too."""
    inside, outside = CONTEXTS[context]

    def program():
        everything = []
        for i, (in_axis, out_axis) in enumerate(pairs):
            args = operands(name, in_axis, batch)
            over = outside(mapped(name, inside(copied(f)), in_axis, out_axis, (1, 0)[i % 2]))
            everything.append(first_order(over, args, has_forward))
            if i < num_second:
                everything[-1] += second_order(over, args, has_forward)
        return everything

    return jax.device_get(run(program)())


@functools.cache
def expected_of(name, kind, pairs, num_second, has_forward, batch):
    """What is put round plain operations makes no difference."""
    reference = FUNCTIONS[name]("reverse", kind)[1]
    return both_orders(name, reference, "none", pairs, num_second, has_forward, batch)


def check(name, mode, save, context, pairs, num_second=1, batch=BATCH, run=jax.jit):
    f, _ = FUNCTIONS[name](mode, save)
    has_forward = mode != "reverse"
    got = both_orders(name, f, context, pairs, num_second, has_forward, batch, run)
    kind = "output" if save == "output" else "input"  # which reference it has
    expected = expected_of(name, kind, pairs, num_second, has_forward, batch)
    for axes, ours, by_jax in zip(pairs, got, expected, strict=True):
        agree(ours, by_jax, (name, mode, save, context, axes))


# Each has every axis of the argument or of the outputs, and together they have all pairs of them.
SOME_PAIRS = (
    ((1, 0), (2, 1), (0, -1)),
    ((2, -1), (1, 1), (-1, 0)),
    ((-1, 1), (0, 0), (1, -1)),
    ((0, 1), (-1, -1), (2, 0)),
)
EVERY_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


@row("E1c")
@sampled
@EVERY_MODE
@pytest.mark.parametrize("context", CONTEXTS)
def test_axes_inside_and_outside_of_other_transformations(context, mode):
    """All pairs of axes in every context, some in each mode."""
    turn = list(CONTEXTS).index(context) + MODES.index(mode)
    check("sine", mode, SAVES[(turn + turn // 4) % 4], context, SOME_PAIRS[turn % 4])


@row("E1c")
@sampled
@EVERY_MODE
@pytest.mark.parametrize(
    ("context", "name"),
    [
        pytest.param(context, ("pair", "product")[i % 2], marks=slow if context.endswith("_inside") else ())
        for i, context in enumerate(CONTEXTS)
    ],
)
def test_axes_beside_an_unbatched_argument(context, name, mode):
    turn = list(CONTEXTS).index(context) // 2 + MODES.index(mode)
    check(name, mode, SAVES[(turn + turn // 4) % 4], context, SOME_PAIRS[turn % 4][:2])


@row("E1c")
@slow
@sampled
@pytest.mark.parametrize("name", ["pair", "product"])
@EVERY_MODE
def test_axes_beside_an_unbatched_argument_under_jit(mode, name):
    check(name, mode, SAVES[MODES.index(mode)], "jit_outside", PAIRS)


@row("E1c")
@sampled
@pytest.mark.parametrize("name", ["sine", "product"])
@EVERY_MODE
@pytest.mark.parametrize("save", SAVES)
def test_axes_whatever_is_saved(save, mode, name):
    check(name, mode, save, "jit_outside", SOME_PAIRS[list(FUNCTIONS).index(name)][:1])


@row("E1c")
@slow
@sampled
@EVERY_FUNCTION
@EVERY_MODE
def test_axes_where_nothing_is_compiled(mode, name):
    turn = MODES.index(mode)
    check(name, mode, SAVES[turn], "none", SOME_PAIRS[turn], run=identity)


@row("E1c")
@sampled
@EVERY_FUNCTION
@EVERY_MODE
@pytest.mark.parametrize("batch", [0, 1])
def test_axes_of_an_empty_batch_and_of_one_example(batch, mode, name):
    turn = MODES.index(mode)
    check(name, mode, SAVES[turn], ("none", "jit_outside")[turn % 2], SOME_PAIRS[turn][:1], batch=batch)


@row("E1c")
@sampled
@EVERY_FUNCTION
@EVERY_MODE
def test_whole_jacobians_and_hessians(mode, name):
    def all_of(f):
        x, *others = operands(name, 2, 2)
        over = jax.jit(mapped(name, copied(f), 2, -1))
        results = [jax.jacrev(over)(x[:1], *others)]  # of one row
        if mode != "reverse":
            results += [jax.jacfwd(over)(x[:1], *others), jax.hessian(loss_of(over))(x[:1], *others)]
        return results

    f, reference = FUNCTIONS[name](mode, "input")
    agree(*jax.device_get((jax.jit(lambda: all_of(f))(), jax.jit(lambda: all_of(reference))())))


NESTED = (((0, 0), (1, 1)), ((2, 1), (0, -1)), ((-1, -1), (1, 0)), ((3, 2), (2, 0)))


@row("E1c")
@sampled
@EVERY_MODE
@pytest.mark.parametrize(
    ("context", "name"),
    [(context, "sine") for context in ("none", "checkpoint_outside", "scan_inside")]
    + [pytest.param("jit_inside", "sine", marks=slow), pytest.param("jit_outside", "product", marks=slow)],
)
def test_vmap_of_vmap_along_different_axes(context, name, mode):
    """The outer axes of the argument and of the output, then the inner ones."""
    turn = MODES.index(mode) + list(CONTEXTS).index(context)
    inside, outside = CONTEXTS[context]

    def all_of(f):
        everything = []
        for (of_outer_x, of_outer_y), (of_inner_x, of_inner_y) in (NESTED[turn % 4], NESTED[(turn + 1) % 4]):
            x, *others = operands(name, of_inner_x)
            x = jnp.stack([x, 0.5 * x], of_outer_x)
            nones = (None,) * len(others)
            inner = jax.vmap(inside(copied(f)), in_axes=(of_inner_x, *nones), out_axes=of_inner_y)
            over = outside(jax.vmap(inner, in_axes=(of_outer_x, *nones), out_axes=of_outer_y))
            everything.append(first_order(over, (x, *others), mode != "reverse"))
        return everything, second_order(over, (x, *others), False)

    f, reference = FUNCTIONS[name](mode, SAVES[turn % 4])
    agree(*jax.device_get((jax.jit(lambda: all_of(f))(), jax.jit(lambda: all_of(reference))())))


def computing_otherwise(has_jvp):
    """Where something is differentiated, forward computes its outputs by other operations, with the batch elsewhere."""

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

    attributes = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    if has_jvp:
        attributes["jvp"] = staticmethod(lambda ctx, t, u: (t * ctx.saved_tensors[0], u))
    return type("Otherwise", (jaxfn.Function,), attributes).apply


@row("E1c")
@pytest.mark.parametrize(
    ("context", "has_jvp"),
    [pytest.param(context, False, marks=() if "outside" in context else slow) for context in CONTEXTS]
    + [pytest.param(context, True, marks=slow) for context in ("none", "jit_outside")]
    + [("scan_inside", True)],
)
def test_a_forward_that_computes_otherwise_where_it_is_differentiated(context, has_jvp):
    inside, outside = CONTEXTS[context]

    def all_of(f):
        everything = []
        for in_axis, out_axis in SOME_PAIRS[list(CONTEXTS).index(context) % 4][:2]:
            args = operands("pair", in_axis)
            over = outside(jax.vmap(inside(copied(f)), in_axes=(in_axis, None), out_axes=(out_axis, 0)))
            everything.append(first_order(over, args, has_jvp))
        return everything, second_order(over, args, False)

    got = jax.jit(lambda: all_of(computing_otherwise(has_jvp)))()
    agree(*jax.device_get((got, jax.jit(lambda: all_of(lambda x, w: (jnp.sin(x), w)))())))


class Constant(jaxfn.Function):
    """A Function whose output does not depend on its input, though its rule gives that a derivative."""

    @staticmethod
    def forward(ctx, x, w):
        return jnp.zeros(ROWS) + w

    @staticmethod
    def backward(ctx, g):
        return jnp.broadcast_to(2 * g[:, None], (ROWS, COLUMNS)), g.sum()


class ConstantWithJvp(Constant):
    @staticmethod
    def jvp(ctx, of_x, of_w):
        return 2 * of_x.sum(1) + of_w


class ConstantWithGeneratedJvp(Constant):
    generate_jvp_rule = True


@row("E1c")
@pytest.mark.parametrize("function", [Constant, ConstantWithJvp, ConstantWithGeneratedJvp])
@pytest.mark.parametrize("in_axis", [0, 1, -1])
def test_a_rule_that_gives_what_the_output_does_not_depend_on_a_gradient(function, in_axis):
    (x,) = operands("sine", in_axis)
    w = jnp.float32(0.3)
    example = lambda x: function.apply(x, w)  # noqa: E731
    per_example = jax.grad(lambda x: (function.apply(x, w) * jnp.arange(1.0, ROWS + 1)).sum())
    expected = jnp.broadcast_to(2 * jnp.arange(1.0, ROWS + 1)[:, None], (ROWS, COLUMNS))
    for wrap in (identity, jax.jit, jax.checkpoint):
        got = jax.vmap(wrap(per_example), in_axis, in_axis)(x)
        np.testing.assert_allclose(got, jnp.broadcast_to(jnp.expand_dims(expected, in_axis), x.shape))
        of_mapped = jax.vmap(example, in_axis)
        total = lambda x: (wrap(of_mapped)(x) * jnp.arange(1.0, ROWS + 1)).sum()  # noqa: E731
        for derivative in (jax.grad(total), jax.jit(jax.grad(total))):
            np.testing.assert_allclose(derivative(x), got)
    np.testing.assert_allclose(jax.vmap(example, in_axis)(x), jnp.full((BATCH, ROWS), w), rtol=1e-6)


class Scaled(jaxfn.Function):
    """A Function of which only the saved input is mapped; neither the output nor what is differentiated is."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return jnp.floor(3 * x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


def in_cond(f):
    return lambda x: jax.lax.cond(x.sum() > -1, f, lambda x: jnp.sin(f(x)), x)


def in_scan(f):
    return lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0 * f(x), length=2)[0] / 2


INSIDE = {"plain": identity, "jit": jax.jit, "checkpoint": jax.checkpoint, "cond": in_cond, "scan": in_scan}


@row("E1c")
@sampled
@pytest.mark.parametrize("nested", [False, True], ids=["vmap", "vmap-vmap"])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_program_inside_of_vmap_with_an_output_that_does_not_depend_on_the_batch(inside, nested):
    """Each example has its own gradient; for an output without the batch JAX would sum the cotangents first."""
    wrap, w = INSIDE[inside], jnp.float32(0.3)
    weights = jnp.arange(1.0, ROWS + 1)
    example = wrap(lambda x: Constant.apply(x, w) * weights)
    x = jnp.ones((2, BATCH, ROWS, COLUMNS) if nested else (BATCH, ROWS, COLUMNS))
    over_examples = (lambda f: jax.vmap(jax.vmap(f))) if nested else jax.vmap
    expected = jnp.broadcast_to(2 * weights[:, None], x.shape)
    per_example = over_examples(jax.grad(lambda x: example(x).sum()))
    of_all = jax.grad(lambda x: over_examples(example)(x).sum())
    for wrapped in (identity, jax.jit):
        np.testing.assert_allclose(wrapped(per_example)(x), expected)
        np.testing.assert_allclose(wrapped(of_all)(x), expected)
    np.testing.assert_allclose(per_example(x), expected)


@row("E1c")
@sampled
@pytest.mark.parametrize("function", [ConstantWithJvp, ConstantWithGeneratedJvp])
@pytest.mark.parametrize("inside", INSIDE)
def test_such_an_output_with_forward_mode(inside, function):
    """By hand JAX 0.10.0 to 0.12.0 gives a tangent of another shape than its primal, or the sum, or a bare error.

    Each program is right after each other one: JAX's coming implementations trace a call once for all of them.
    """
    jax.clear_caches()
    weights = jnp.arange(1.0, ROWS + 1)
    example = INSIDE[inside](lambda x: function.apply(x, jnp.float32(0.3)) * weights)
    x = jnp.ones((BATCH, ROWS, COLUMNS))
    expected = jnp.broadcast_to(2 * weights[:, None], x.shape)
    programs = {
        "grad of vmap": (jax.grad(lambda x: jax.vmap(example)(x).sum()), expected),
        "jvp of vmap": (lambda x: jax.jvp(jax.vmap(example), (x,), (x,))[1], expected.sum(2)),
        "vmap of grad": (jax.vmap(jax.grad(lambda x: example(x).sum())), expected),
        "vmap of jvp": (jax.vmap(lambda x: jax.jvp(example, (x,), (x,))[1]), expected.sum(2)),
    }
    for name, (program, wanted) in programs.items():
        for wrapped in (identity, jax.jit):
            np.testing.assert_allclose(wrapped(program)(x), wanted, err_msg=name)


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


@row("E1c")
@sampled
@pytest.mark.parametrize("function", lane_cases([OneForAll, OneForAllOrNone, OneForAllWithJvp], [OneForAll]))
@pytest.mark.parametrize("inside", lane_cases(["plain", "jit", "checkpoint"], ["plain"]))
@pytest.mark.parametrize("maps", lane_cases(["vmap", "vmap-vmap over x", "vmap-vmap over u"], ["vmap-vmap over x"]))
def test_the_cotangent_of_an_output_that_does_not_depend_on_the_batch_counts_once(maps, inside, function):
    """By hand it counts for each row on JAX 0.10.0, and 0.12.0 raises."""
    xs = jnp.array([0.1, 0.2, 0.3])

    def total(f, x, u):
        rows = jax.vmap(INSIDE[inside](lambda both: f(*both)), ((0, None),))
        if maps == "vmap":
            y, z = rows((x, u))
        elif maps == "vmap-vmap over x":
            y, z = jax.vmap(lambda x: rows((x, u)))(jnp.stack([x, 2 * x]))
        else:
            y, z = jax.vmap(lambda u: rows((x, u)))(u * jnp.array([1.0, 2.0]))
        return (y * y).sum() + jnp.sin(z).sum()

    derivatives = [
        lambda f: jax.grad(lambda u: total(f, xs, u)),
        lambda f: jax.grad(lambda u: total(f, u * xs, u)),
        lambda f: jax.jit(jax.grad(jax.jit(lambda u: total(f, xs, u)))),
        lambda f: jax.grad(jax.grad(lambda u: total(f, xs, u))),
        lambda f: lambda u: jax.vmap(jax.grad(lambda u: total(f, xs, u)))(u * jnp.ones(2)),
        lambda f: lambda u: jax.grad(lambda x: jax.grad(lambda u: total(f, x, u))(u))(xs),
    ]
    for derivative in derivatives:
        got = derivative(function.apply)(jnp.float32(0.7))
        expected = derivative(lambda x, u: (jnp.sin(u), x * u))(jnp.float32(0.7))
        np.testing.assert_allclose(got, expected, rtol=1e-5)


class OneForAllSaving(OneForAll):
    """The same, with an intermediate saved."""

    @staticmethod
    def forward(ctx, x, u):
        slope = jnp.cos(u)
        ctx.save_for_backward(x, u, slope)
        return jnp.sin(u), x * u

    @staticmethod
    def backward(ctx, g, h):
        x, u, slope = ctx.saved_tensors
        return h * u, g * slope + h * x


def of_shared(x, u):
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
    """The same function, by its jaxpr."""

    def function(x, u):
        program = jax.make_jaxpr(loss)(x, u)
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, x, u)[0]

    return function


# In each, derivatives lie inside of vmap, or on both sides of it.
INTERLEAVED = {
    "vmap(grad grad)": lambda f, x, u: jax.vmap(jax.grad(jax.grad(f, 1), 1), (0, None))(x, u),
    "vmap(grad3)": lambda f, x, u: jax.vmap(jax.grad(jax.grad(jax.grad(f, 1), 1), 1), (0, None))(x, u),
    "vmap(jacrev2)": lambda f, x, u: jax.vmap(jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)), (0, None))(x, u),
    "vmap(vmap(grad grad))": lambda f, x, u: jax.vmap(jax.vmap(jax.grad(jax.grad(f, 1), 1), (0, None)), (None, 0))(
        x, u * jnp.arange(1.0, 6)
    ),
    "vmap(grad grad vmap)": lambda f, x, u: jax.vmap(jax.grad(jax.grad(total_of(f, x))))(u * jnp.arange(1.0, 6)),
    "grad(vmap(grad))": lambda f, x, u: jax.grad(total_of(jax.grad(f, 1), x))(u),
    "grad(vmap(grad grad))": lambda f, x, u: jax.grad(lambda x: total_of(jax.grad(jax.grad(f, 1), 1), x)(u))(x),
    "grad3(vmap)": lambda f, x, u: jax.grad(jax.grad(jax.grad(total_of(f, x))))(u),
    "vmap(jitted pullback)": lambda f, x, u: jax.vmap(jitted_pullback(f), (0, None))(x, u),
    "grad(vmap(jitted pullback))": lambda f, x, u: jax.grad(total_of(jitted_pullback(f), x))(u),
    "vmap(grad(jaxpr))": lambda f, x, u: jax.vmap(jax.grad(evaluated(f), 1), (0, None))(x, u),
    "grad(vmap(jaxpr))": lambda f, x, u: jax.grad(total_of(evaluated(f), x))(u),
}


@row("E1c")
@sampled
@pytest.mark.parametrize("function", [OneForAll, OneForAllSaving])
@pytest.mark.parametrize("inside", ["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("derivative", lane_cases(INTERLEAVED, [d for d in INTERLEAVED if d.startswith("grad(vmap")]))
def test_derivatives_on_both_sides_of_vmap_where_an_output_does_not_depend_on_the_batch(derivative, inside, function):
    xs, u = jnp.array([0.1, 0.2, 0.3, 0.5]), jnp.float32(0.7)

    def wrapped(f):
        return INSIDE[inside](lambda both: coupled(f)(*both))

    def of(f):
        return INTERLEAVED[derivative](lambda x, u: wrapped(f)((x, u)), xs, u)

    expected = of(of_shared)
    for got in (of(function.apply), jax.jit(lambda: of(function.apply))()):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


@row("E1c")
@pytest.mark.parametrize("inside", INSIDE)
def test_a_mapped_array_that_was_saved_and_nothing_else_mapped(inside):
    x, ws = jnp.float32(0.7), jnp.arange(1.0, BATCH + 1)

    def example(x, w):
        return INSIDE[inside](lambda w: Scaled.apply(x, w) * w)(w)

    per_example = jax.vmap(jax.grad(example), (None, 0))
    of_all = jax.grad(lambda x: jax.vmap(example, (None, 0))(x, ws).sum())
    for wrapped in (identity, jax.jit):
        np.testing.assert_allclose(wrapped(per_example)(x, ws), ws**2)
        np.testing.assert_allclose(wrapped(of_all)(x), (ws**2).sum())
    np.testing.assert_allclose(per_example(x, ws), ws**2)


@row("E1c")
@pytest.mark.parametrize("function", [Constant, ConstantWithJvp, ConstantWithGeneratedJvp])
@pytest.mark.parametrize("wrap", [identity, jax.jit], ids=["eager", "jit"])
def test_only_what_is_not_mapped_is_differentiated(function, wrap):
    """The output depends on the weight, and neither has a batch."""
    (x,) = operands("sine", 0)
    total = lambda w: wrap(jax.vmap(lambda x: function.apply(x, w)))(x).sum()  # noqa: E731
    of_argument = lambda w: wrap(jax.vmap(function.apply, (0, None)))(x, w).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(of_argument)(0.3), BATCH * ROWS)
    assert total(0.3).shape == ()
