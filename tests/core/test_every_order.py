"""Derivatives of both orders that were wrong, refused or lost: rules, impure forwards, closures, runs of forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import COMING, row, sampled

X = jnp.array([0.3, -1.2, 0.7], jnp.float32)
EVERY_PROGRAM = pytest.mark.parametrize("program", CONTEXTS)


def total(f):
    return lambda *args: jnp.sum(f(*args))


def twice(f, inside=lambda f: f, outside=lambda f: f):
    """The gradient of a sum of gradients."""
    return outside(jax.grad(total(inside(jax.grad(total(f))))))


# Where jit, scan and the like are put at the second order: around the function, its gradient or all of it.
SECOND: dict[str, Callable[[Any], Any]] = {
    "eager": twice,
    "jit of all": lambda f: twice(f, outside=jax.jit),
    "jit of the gradient": lambda f: twice(f, inside=jax.jit),
    "jit of the function": lambda f: twice(jax.jit(f)),
    "jit everywhere": lambda f: twice(jax.jit(f), jax.jit, jax.jit),
    "vmap of all": lambda f: lambda x: jax.vmap(twice(f))(jnp.stack([2 * x, x]))[1],
    "vmap of the gradient": lambda f: twice(f, inside=lambda g: lambda x: jax.vmap(g)(jnp.stack([2 * x, x]))[1]),
    "vmap of the function": lambda f: twice(lambda x: jax.vmap(f)(jnp.stack([2 * x, x]))[1]),
    "scan of the function": lambda f: twice(CONTEXTS["scan"](f)),
    "scan of the gradient": lambda f: twice(f, inside=CONTEXTS["scan"]),
    "checkpoint of the function": lambda f: twice(jax.checkpoint(f)),
    "checkpoint of the gradient": lambda f: twice(f, inside=jax.checkpoint),
    "cond of the function": lambda f: twice(CONTEXTS["cond"](f)),
}
EVERY_SECOND = pytest.mark.parametrize("program", SECOND)


# --- jax.checkpoint leaves derivatives as they are


def squares_its_gradient(save, **attributes):
    """3 * x, whose backward is not linear: g * g * x."""

    class Squares(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            y = 3 * x
            ctx.save_for_backward(y if save == "output" else x)
            return y

        @staticmethod
        def backward(ctx, g):
            (kept,) = ctx.saved_tensors
            return g * g * (kept / 3 if save == "output" else kept)

    for name, value in attributes.items():
        setattr(Squares, name, value)
    return Squares.apply


def second_of_squares(x, save):
    """Returns the second derivative of y² for y = 3x and the rule g²x.

    The gradient is (2y)²x. Its derivative is 8yx by y, and 4y² by the saved x, or by the saved y / 3.
    """
    y = 3 * x
    if save == "output":
        return (8 * y * x + 4 * y**2 / 3) ** 2 * x
    return (8 * y * x) ** 2 * x + 4 * y**2


RULES = {
    "backward": {},
    "backward and jvp": {"jvp": staticmethod(lambda ctx, t: 5 * t)},
    "generate_jvp_rule": {"generate_jvp_rule": True},
}
CHECKPOINTS = {
    "checkpoint": jax.checkpoint,
    "everything_saveable": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
    "dots_saveable": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "prevent_cse=False": lambda f: jax.checkpoint(f, prevent_cse=False),
    "checkpoint twice": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "in a scan": lambda f: CONTEXTS["scan"](jax.checkpoint(f)),
    "vmap of checkpoint": lambda f: CONTEXTS["vmap"](jax.checkpoint(f)),
}


SAVED = pytest.mark.parametrize("save", ["input", "output"])


@row("D1", "D9", "E1")
@sampled
@SAVED
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("around", CHECKPOINTS)
@pytest.mark.parametrize("extent", ["the call", "the loss"])
def test_checkpoint_does_not_change_the_second_derivative_of_a_rule_that_is_not_linear(extent, around, rules, save):
    f, checkpointed = squares_its_gradient(save, **RULES[rules]), CHECKPOINTS[around]
    if extent == "the call":
        inner = checkpointed(f)

        def loss(x):
            return inner(x) ** 2
    else:
        loss = checkpointed(lambda x: f(x) ** 2)

    x = 0.25 * X
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_allclose(wrap(jax.grad(total(loss)))(x), 36 * x**3, rtol=1e-5)
        np.testing.assert_allclose(wrap(twice(loss))(x), second_of_squares(x, save), rtol=1e-5)


@row("D1", "D9")
@sampled
@SAVED
@EVERY_SECOND
@pytest.mark.parametrize("rules", RULES)
def test_the_second_derivative_of_a_rule_that_is_not_linear(rules, program, save):
    f = squares_its_gradient(save, **RULES[rules])
    x = 0.25 * X
    np.testing.assert_allclose(SECOND[program](lambda x: f(x) ** 2)(x), second_of_squares(x, save), rtol=1e-5)


# --- a pullback is a function of its residuals


def cubes(save):
    """x³ with the slope 5x², from what is saved."""

    def forward(ctx, x):
        y = x**3
        ctx.save_for_backward({"input": x, "output": y, "intermediate": 5 * x * x}[save])
        return y

    def backward(ctx, g):
        (kept,) = ctx.saved_tensors
        return g * {"input": 5 * kept**2, "output": 5 * jnp.cbrt(kept) ** 2, "intermediate": kept}[save]

    return jaxfn.autograd_function(forward, backward)


def cubes_by_hand(save):
    f = jax.custom_vjp(lambda x: x**3)

    def fwd(x):
        y = f(x)  # which has the rule at the second order, too
        return y, {"input": x, "output": y, "intermediate": 5 * x * x}[save]

    def bwd(kept, g):
        return (g * {"input": 5 * kept**2, "output": 5 * jnp.cbrt(kept) ** 2, "intermediate": kept}[save],)

    f.defvjp(fwd, bwd)
    return f


def gradient_by_pullback(f, x, g, wrap):
    """The gradient of what a pullback returns by all residuals of the shape of x, added up."""
    _, pull = jax.vjp(f, x)
    leaves, treedef = jax.tree.flatten(pull)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def weighed(values):
        present = list(leaves)
        for i, value in zip(floats, values, strict=True):
            present[i] = value
        return jnp.sum(jnp.sin(jax.tree.unflatten(treedef, present)(g)[0]))

    gradients = wrap(jax.grad(weighed))([leaves[i] for i in floats])
    return sum(v for v in gradients if v.shape == x.shape)


@row("D2", "E1")
@pytest.mark.parametrize("rules", ["backward", "jvp"])
@pytest.mark.parametrize("save", ["input", "output", "intermediate"])
@pytest.mark.parametrize("within", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit of grad"])
def test_the_derivative_with_respect_to_a_pullback(wrap, within, save, rules):
    f = cubes(save)
    if rules == "jvp":
        f.jvp(lambda ctx, t: 7 * t)
    g = jnp.cos(X)
    got = gradient_by_pullback(within(lambda x: f(x)), X, g, wrap)
    by_hand = cubes_by_hand(save)
    expected = gradient_by_pullback(within(lambda x: by_hand(x)), X, g, wrap)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert np.abs(expected).min() > 0.01


@row("D2", "E1")
@sampled
@pytest.mark.parametrize("save", ["input", "output", "intermediate"])
@pytest.mark.parametrize("rules", ["backward", "jvp"])
@pytest.mark.parametrize("program", ["eager", "jit", "checkpoint", "vmap", "scan"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit of grad"])
def test_a_pullback_is_an_argument_of_grad(wrap, program, rules, save):
    """As one of a hand-written custom_vjp, whose leaves are all floating: a boolean one would need `allow_int`."""
    g = jnp.cos(X)
    ours = cubes(save)
    if rules == "jvp":
        ours.jvp(lambda ctx, t: 7 * t)
    results = []
    for f in (ours, cubes_by_hand(save)):
        _, pull = jax.vjp(CONTEXTS[program](lambda x, f=f: f(x)), X)
        gradient = wrap(jax.grad(lambda pull: jnp.sum(pull(g)[0])))(pull)
        results.append(sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(*results, rtol=1e-5)
    assert results[0] > 1


def product(save, rules):
    """sin(x * w), with gradients 5 and 7 times too large, in ways of saving several arrays."""

    def forward(ctx, x, w):
        if save == "flags":
            ctx.read = any(ctx.needs_input_grad)
        if save == "attribute":
            ctx.kept = {"deep": [x, w]}
        elif save == "many":
            ctx.save_for_backward(*(i * x for i in range(18)), x, w)
        else:
            ctx.save_for_backward(x, w)
        return jnp.sin(x * w)

    def backward(ctx, g):
        x, w = ctx.kept["deep"] if save == "attribute" else ctx.saved_tensors[-2:]
        return 5 * g * w * jnp.cos(x * w), 7 * g * x * jnp.cos(x * w)

    f = jaxfn.autograd_function(forward, backward)
    if rules == "jvp":
        f.jvp(lambda ctx, t, u: t + u)
    return f


@jax.custom_vjp
def product_by_hand(x, w):
    return jnp.sin(x * w)


def _product_bwd(kept, g):
    x, w = kept
    return 5 * g * w * jnp.cos(x * w), 7 * g * x * jnp.cos(x * w)


product_by_hand.defvjp(lambda x, w: (product_by_hand(x, w), (x, w)), _product_bwd)


@row("D2", "E1")
@sampled
@pytest.mark.parametrize("save", ["inputs", "attribute", "flags", "many"])
@pytest.mark.parametrize("rules", ["backward", "jvp"])
@pytest.mark.parametrize("program", ["eager", "jit", "checkpoint", "vmap", "scan"])
@pytest.mark.parametrize("argument", ["x", "w", "both"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit of grad"])
def test_a_pullback_of_several_inputs_is_an_argument_of_grad(wrap, argument, program, rules, save):
    """Before: "grad requires real- or complex-valued inputs, but got bool"."""
    g, w = jnp.cos(X), jnp.sin(X)
    results = []
    for f in (product(save, rules), product_by_hand):
        around = CONTEXTS[program](lambda x, w, f=f: f(x, w))
        call, args = {
            "x": (lambda x, around=around: around(x, w), (X,)),
            "w": (lambda w, around=around: around(X, w), (w,)),
            "both": (around, (X, w)),
        }[argument]
        _, pull = jax.vjp(call, *args)
        gradient = wrap(jax.grad(lambda pull: sum(jnp.sum(jnp.sin(v)) for v in pull(g))))(pull)
        results.append(jax.tree.leaves(gradient))
    # Gradients by residuals that nobody uses are zero; the others are those of the hand-written rule, in any order.
    ours, by_hand = (np.sort(np.concatenate([np.ravel(v[v != 0]) for v in leaves])) for leaves in results)
    np.testing.assert_allclose(ours, by_hand, rtol=1e-5)


# --- generate_jvp_rule has no part in reverse mode


def clipped(**attributes):
    """x * w, whose backward clips: not linear, and three times too large."""

    class Clipped(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            g = 3 * jnp.clip(g, -0.5, 0.5)
            return g * w, g * x

    for name, value in attributes.items():
        setattr(Clipped, name, value)
    return Clipped.apply


@jax.custom_vjp
def clipped_by_hand(x, w):
    return x * w


def _clipped_bwd(kept, g):
    g = 3 * jnp.clip(g, -0.5, 0.5)
    return g * kept[1], g * kept[0]


# It calls itself, so that the second derivative follows the rule, too.
clipped_by_hand.defvjp(lambda x, w: (clipped_by_hand(x, w), (x, w)), _clipped_bwd)
IN_AXES = {"both": (0, 0), "the first": (0, None), "the second": (None, 0), "other axes": (1, 0)}


@row("D5", "E1c")
@pytest.mark.parametrize("in_axes", IN_AXES)
@pytest.mark.parametrize("within", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_generated_forward_mode_has_no_part_in_reverse_mode(order, within, in_axes):
    """Before, `grad(vmap(F, in_axes=(0, None)))` was refused as not linear."""
    axes = IN_AXES[in_axes]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 4) if in_axes == "other axes" else (4, 5) if axes[0] == 0 else (5,)).astype(np.float32)
    w = rng.normal(size=(4, 5) if axes[1] == 0 else (5,)).astype(np.float32)

    def derived(f):
        mapped = jax.vmap(within(lambda x, w: f(x, w)), in_axes=axes)
        first = jax.grad(lambda x, w: jnp.sum(jnp.sin(mapped(x, w))), argnums=(0, 1))
        if order == 1:
            return first(x, w)
        return jax.grad(lambda x, w: sum(jnp.sum(jnp.cos(g)) for g in first(x, w)), argnums=(0, 1))(x, w)

    for ours, by_hand in zip(derived(clipped(generate_jvp_rule=True)), derived(clipped_by_hand), strict=True):
        np.testing.assert_allclose(ours, by_hand, rtol=1e-4, atol=1e-5)


@row("D5")
@EVERY_PROGRAM
def test_a_generated_forward_mode_that_is_not_linear_names_the_operation_and_its_line(program):
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
        jax.jvp(CONTEXTS[program](NotLinear.apply), (X,), (X,))
    assert any(name in str(caught.value) for name in ("sqrt", "div", "mul", "square", "dot_general", "norm"))


# --- reverse mode does not call the user's jvp


@row("D4", "E1c")
@pytest.mark.parametrize("in_axes", IN_AXES)
@pytest.mark.parametrize("within", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_reverse_mode_of_a_mapped_call_does_not_run_jvp(within, in_axes):
    """Not even to learn shapes."""
    runs = []

    def jvp(ctx, *tangents):
        runs.append(tangents)
        raise ValueError("jvp is not to run")

    axes = IN_AXES[in_axes]
    x = jnp.ones((5, 4) if in_axes == "other axes" else (4, 5) if axes[0] == 0 else (5,))
    w = jnp.full((4, 5) if axes[1] == 0 else (5,), 0.25)
    f = clipped(jvp=staticmethod(jvp))

    def derived(f, order=1):
        mapped = jax.vmap(within(lambda x, w: f(x, w)), in_axes=axes)
        gradient = jax.grad(lambda x, w: jnp.sum(jnp.sin(mapped(x, w))), argnums=(0, 1))
        if order == 1:
            return gradient(x, w)
        return jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(g)) for g in gradient(x, w)), argnums=(0, 1))(x, w)

    for order in (1, 2):
        for ours, by_hand in zip(derived(f, order), derived(clipped_by_hand, order), strict=True):
            np.testing.assert_allclose(ours, by_hand, rtol=1e-5)
    assert not runs


# --- what forward closes over

OBJECTS = 3000


class Plain:
    """One of many objects in a closure."""

    def __init__(self, value):
        self.value = value


def behind_many_objects(w, mode):
    """x * w, whose forward finds w behind more objects than a search would look at."""
    many = [Plain(w)] + [Plain(i) for i in range(OBJECTS)]

    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.w = many[0].value
        return many[0].value * jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: 2 * g * ctx.w * jnp.cos(ctx.saved_tensors[0]))
    if mode == "both modes":
        f.jvp(lambda ctx, t: 5 * t * ctx.w)
    return f


OUTER = {
    "eager": lambda f: lambda w, x: f(w, x),
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([3 * w, w]), x)[1],
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda _, w: (None, f(w, x)), None, jnp.stack([3 * w, w]))[1][1],
}


@row("A9")
@sampled
@pytest.mark.parametrize("mode", ["backward", "both modes"])
@pytest.mark.parametrize("outer", OUTER)
@EVERY_PROGRAM
def test_a_traced_value_behind_thousands_of_objects(program, outer, mode):
    def gradient(w, x):
        return jax.grad(total(CONTEXTS[program](lambda x: behind_many_objects(w, mode)(x))))(x)

    np.testing.assert_allclose(OUTER[outer](gradient)(jnp.float32(1.5), X), 3 * jnp.cos(X), rtol=1e-5)


@row("A9")
@EVERY_PROGRAM
def test_a_differentiated_value_behind_thousands_of_objects_is_refused(program):
    """Never a zero."""

    def loss(w):
        return total(CONTEXTS[program](lambda x: behind_many_objects(w, "backward")(x)))(X)

    with pytest.raises(NotImplementedError, match="argument"):
        jax.grad(loss)(jnp.float32(1.5))


def closing_over(w):
    """sin(x * w), whose forward closes over w and saves intermediates."""

    def forward(ctx, x):
        ctx.save_for_backward(jnp.cos(x * w))
        ctx.w = w
        return jnp.sin(x * w)

    return jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.saved_tensors[0] * ctx.w)


CLOSED_PROGRAMS = {
    "jit": lambda f: jax.jit(f),
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    "checkpoint": lambda f: jax.checkpoint(f),
    "scan": CONTEXTS["scan"],
    "cond": CONTEXTS["cond"],
    "vmap": CONTEXTS["vmap"],
    "vmap of jit": lambda f: CONTEXTS["vmap"](jax.jit(f)),
}


@row("A9", "D3")
@sampled
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["", "jit of all"])
@pytest.mark.parametrize("where", ["made in the program", "made around it", "drawn in it"])
@pytest.mark.parametrize("program", CLOSED_PROGRAMS)
def test_forward_closes_over_a_traced_value_and_saves_an_intermediate(program, where, outside):
    """And is differentiated twice from outside of that program."""

    def in_program(x, scale):
        if where == "drawn in it":
            return closing_over(1.5 + 0 * jax.random.uniform(jax.random.key(0)))(x)
        return closing_over(scale)(x)

    def second(scale, x):
        if where == "made around it":
            return twice(CLOSED_PROGRAMS[program](lambda x: in_program(x, 2 * scale)))(x)
        made = CLOSED_PROGRAMS[program](lambda x: in_program(x, 2 * jax.lax.optimization_barrier(scale)))
        return twice(made)(x)

    got = outside(second)(jnp.float32(0.75), X)
    np.testing.assert_allclose(got, -1.5 * 1.5 * jnp.sin(1.5 * X), rtol=1e-5)


@row("A9")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("program", CLOSED_PROGRAMS)
@pytest.mark.parametrize("rule", ["backward", "jvp"])
def test_a_rule_that_closes_over_a_value_of_another_program(rule, program, order):
    """Right, or an error that names the Function: the value belongs to a program that is done."""

    def in_program(x):
        w = 2 * jax.lax.optimization_barrier(jnp.float32(0.75)) + 0 * jnp.sum(jax.lax.stop_gradient(x))

        class Scaled(jaxfn.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return jnp.sin(x)

            @staticmethod
            def backward(ctx, g):
                return g * w * jnp.cos(ctx.saved_tensors[0])

            @staticmethod
            def jvp(ctx, t):
                return t * w * jnp.cos(ctx.saved_tensors[0])

        return Scaled.apply(x)

    f = CLOSED_PROGRAMS[program](in_program)
    if rule == "jvp":
        derivative = lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]  # noqa: E731
        if order == 2:
            first = derivative
            derivative = lambda x: jax.jvp(first, (x,), (jnp.ones_like(x),))[1]  # noqa: E731
    else:
        derivative = twice(f) if order == 2 else jax.grad(total(f))
    try:
        got = derivative(X)
    except Exception as error:
        assert "Scaled" in str(error), error
    else:
        expected = 1.5 * jnp.cos(X) if order == 1 else -1.5 * jnp.sin(X)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@row("A9")
@pytest.mark.parametrize("around", ["jit", "vmap", "scan", "checkpoint", "eager"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_rule_that_closes_over_a_value_of_its_own_program_is_right(order, around):
    def derivative(w, x):
        f = jaxfn.autograd_function(
            lambda ctx, x: ctx.save_for_backward(x) or jnp.sin(x),
            lambda ctx, g: g * w * jnp.cos(ctx.saved_tensors[0]),
        )
        return (twice(f) if order == 2 else jax.grad(total(f)))(x)

    got = CONTEXTS[around](lambda x, w: derivative(w, x))(X, jnp.float32(1.5))
    np.testing.assert_allclose(got, 1.5 * jnp.cos(X) if order == 1 else -1.5 * jnp.sin(X), rtol=1e-5)


# --- arrays in closures and objects on ctx


def pulling(kind):
    def forward(ctx, x):
        c = jnp.cos(x)
        ctx.pull = {"closure": lambda g: g * c, "object": Plain(c)}[kind]
        return jnp.sin(x)

    return jaxfn.autograd_function(forward, lambda ctx, g: ctx.pull(g) if kind == "closure" else g * ctx.pull.value)


FIRST_HERE = {
    "grad": lambda f: jax.grad(total(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(total(f))),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([2 * x, x], 1)[..., None])[:, 1, 0],
    "scan of grad": lambda f: CONTEXTS["scan"](jax.grad(total(f))),
}


@row("B6")
@pytest.mark.parametrize("kind", ["closure", "object"])
@pytest.mark.parametrize("program", FIRST_HERE)
def test_an_array_in_a_closure_on_ctx_is_right_at_first_order(program, kind):
    np.testing.assert_allclose(FIRST_HERE[program](pulling(kind))(X), jnp.cos(X), rtol=1e-6)


FIRST_ELSEWHERE = {
    "grad of vmap": lambda f: jax.grad(total(jax.vmap(f))),
    "grad of jit": lambda f: jax.grad(total(jax.jit(f))),
    "grad of checkpoint": lambda f: jax.grad(total(jax.checkpoint(f))),
    "grad of scan": lambda f: jax.grad(total(CONTEXTS["scan"](f))),
    "grad of cond": lambda f: jax.grad(total(CONTEXTS["cond"](f))),
}


@row("B6")
@pytest.mark.parametrize("kind", ["closure", "object"])
@pytest.mark.parametrize("program", FIRST_ELSEWHERE)
def test_an_array_in_a_closure_on_ctx_is_right_or_refused_where_backward_runs_in_another_program(program, kind):
    try:
        got = FIRST_ELSEWHERE[program](pulling(kind))(X)
    except NotImplementedError as error:
        assert "ctx" in str(error)
    else:
        np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


@row("B6")
@pytest.mark.parametrize("kind", ["closure", "object"])
@EVERY_SECOND
def test_an_array_in_a_closure_on_ctx_is_right_or_refused_at_second_order(program, kind):
    try:
        got = SECOND[program](pulling(kind))(X)
    except NotImplementedError as error:
        assert "ctx" in str(error)
    except jax.errors.UnexpectedTracerError:
        assert COMING and "checkpoint" in program  # JAX notices it by itself
    else:
        np.testing.assert_allclose(got, -jnp.sin(X), rtol=1e-6)


@row("B6")
@pytest.mark.parametrize("kind", ["closure", "object"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_an_array_in_a_closure_on_ctx_whose_derivative_is_not_used(wrap, kind):
    """The refusal is of the derivative, and not of the call."""
    f = pulling(kind)

    def loss(x):
        return jnp.sum(jax.lax.stop_gradient(jax.grad(total(f))(x)) * x)

    np.testing.assert_allclose(wrap(jax.grad(loss))(X), jnp.cos(X), rtol=1e-6)


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

    class Counts(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, w):
            of_x, of_w = ctx.needs_input_grad
            c = jnp.cos(x * w)
            if saves == "needed":
                ctx.save_for_backward(w * c if of_x else None, x * c if of_w else None)
            else:
                ctx.save_for_backward(w * c, x * c)
            return jnp.sin(x * w), INTEGERS[integer](x)

        @staticmethod
        def backward(ctx, g, _):
            of_x, of_w = ctx.saved_tensors
            return None if of_x is None else g * of_x, None if of_w is None else jnp.sum(g * of_w)

    return lambda x, w: Counts.apply(x, w)[0]


def mapped(axes, around=lambda f: f):
    """Maps over two elements, and returns the results of the second one."""

    def outside(f):
        def call(*args):
            pairs = [a if d is None else jnp.stack([2 * a, a], d) for a, d in zip(args, axes, strict=True)]
            return jax.tree.map(lambda y: y[1], around(jax.vmap(f, axes))(*pairs))

        return call

    return outside


MIXED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": mapped((1, None)),
    "vmap over both": mapped((1, 0)),
    "jit of vmap": mapped((None, 0), jax.jit),
}


@row("A8", "D8")
@sampled
@pytest.mark.parametrize("first", [0, 1], ids=["x first", "w first"])
@pytest.mark.parametrize("outside", MIXED)
@EVERY_PROGRAM
@pytest.mark.parametrize("integer", INTEGERS)
def test_mixed_derivatives_of_a_pure_forward_that_reads_its_flags_and_returns_an_integer(
    integer, program, outside, first
):
    """Before, it was refused under `vmap` of `scan` and `checkpoint`, as if it had computed something else."""

    def mixed(f):
        inner = jax.grad(lambda *args: jnp.sum(CONTEXTS[program](f)(*args)), first)
        return MIXED[outside](jax.grad(lambda *args: jnp.sum(inner(*args)), 1 - first))(X, jnp.float32(1.5))

    expected = mixed(lambda x, w: jnp.sin(x * w))
    for saves in ("needed", "all"):
        np.testing.assert_allclose(mixed(with_integer(integer, saves)), expected, rtol=1e-4, atol=1e-5)


@row("A8", "D8")
@EVERY_SECOND
@pytest.mark.parametrize("integer", ["sum", "mask"])
def test_second_derivatives_of_a_pure_forward_that_reads_its_flags_and_returns_an_integer(integer, program):
    f, w = with_integer(integer), jnp.float32(1.5)
    np.testing.assert_allclose(SECOND[program](lambda x: f(x, w))(X), -1.5 * 1.5 * jnp.sin(1.5 * X), rtol=1e-5)


# --- a forward that draws

LARGE = 1e8


class Source:
    """Draws a factor, another one each time."""

    def __init__(self, kind):
        self.kind = kind
        self.rng = np.random.default_rng(0)
        self.count = 0

    def draw(self):
        if self.kind == "numpy":
            return self.rng.uniform(0.5, 1.5, size=3).astype(np.float32)
        if self.kind == "global numpy":
            return np.random.uniform(0.5, 1.5, size=3).astype(np.float32)
        self.count += 1
        return 1 + 0.1 * self.count


def drawing(source, shape, flags=False, mode="backward"):
    """m * sin(x) with the slope m * cos(x), of one draw m, in activations of several kinds."""

    def activations(m, x):
        if shape == "large":  # which hides a difference of the others where it is measured by the largest
            return jnp.append(m * jnp.sin(x), LARGE), jnp.append(m * jnp.cos(x), LARGE)
        return m * jnp.sin(x), m * jnp.cos(x)

    def forward(ctx, x):
        if flags:
            ctx.read = ctx.needs_input_grad[0]
        m = source.draw()
        # In an inner jit, arrays are constants of another jaxpr.
        y, c = (jax.jit(lambda x: activations(m, x)) if shape == "inner jit" else lambda x: activations(m, x))(x)
        ctx.save_for_backward(c)
        return y

    f = jaxfn.autograd_function(forward, lambda ctx, g: (g * ctx.saved_tensors[0])[:3], name="Drawing")
    if mode == "generated":
        f.Function.generate_jvp_rule = True
    return lambda x: f(x)[:3]


def of_all_orders(f, inside=lambda f: f, outside=lambda f: f, around=lambda f: f):
    """A function that returns value, slope and curvature of one call."""
    f = around(f)

    def slope(x):
        y, pull = jax.vjp(f, x)
        return pull(jnp.ones_like(y))[0], y

    def all_three(x):
        (first, pull, y) = jax.vjp(inside(slope), x, has_aux=True)
        return y, first, pull(jnp.ones_like(first))[0]

    return outside(all_three)


ALL_ORDERS: dict[str, Callable[[Any], Any]] = {
    "eager": of_all_orders,
    "jit of all": lambda f: of_all_orders(f, outside=jax.jit),
    "jit of the gradient": lambda f: of_all_orders(f, inside=jax.jit),
    "jit of the function": lambda f: of_all_orders(f, around=jax.jit),
    "jit of both": lambda f: of_all_orders(f, outside=jax.jit, around=jax.jit),
    "vmap": lambda f: lambda x: [y[1] for y in jax.vmap(of_all_orders(f))(jnp.stack([2 * x, x]))],
    "vmap of jit": lambda f: lambda x: [y[1] for y in jax.vmap(jax.jit(of_all_orders(f)))(jnp.stack([2 * x, x]))],
    "scan": lambda f: of_all_orders(f, around=CONTEXTS["scan"]),
    "scan of all": lambda f: CONTEXTS["scan"](of_all_orders(f)),
    "checkpoint": lambda f: of_all_orders(f, around=jax.checkpoint),
}


@row("A8")
@sampled
@pytest.mark.parametrize("flags", [False, True], ids=["", "reads its flags"])
@pytest.mark.parametrize("shape", ["plain", "large", "inner jit"])
@pytest.mark.parametrize("kind", ["numpy", "global numpy", "counter"])
@pytest.mark.parametrize("program", ALL_ORDERS)
def test_derivatives_of_a_forward_that_draws_are_of_one_draw_or_refused(program, kind, shape, flags):
    """Where forward runs again for a second derivative, and draws something else, that is noticed."""
    f = drawing(Source(kind), shape, flags)
    for _ in range(2):
        try:
            y, slope, curvature = ALL_ORDERS[program](lambda x: f(x))(X)
        except NotImplementedError as error:
            assert str(error).startswith("Drawing"), error
            return
        np.testing.assert_allclose(slope * jnp.sin(X), y * jnp.cos(X), rtol=1e-4)
        np.testing.assert_allclose(curvature, -y, rtol=1e-4)


def drawing_of_two(source, shape):
    """m * sin(x * w), which saves what its flags ask for."""

    def forward(ctx, x, w):
        of_x, of_w = ctx.needs_input_grad
        m = source.draw()

        def compute(x, w):
            y, c = m * jnp.sin(x * w), m * jnp.cos(x * w)
            if shape == "large":
                y = jnp.append(y, LARGE)
            return y, w * c, x * c

        y, x_slope, w_slope = (jax.jit(compute) if shape == "inner jit" else compute)(x, w)
        ctx.save_for_backward(x_slope if of_x else None, w_slope if of_w else None)
        return y

    def backward(ctx, g):
        of_x, of_w = ctx.saved_tensors
        return None if of_x is None else g[:3] * of_x, None if of_w is None else g[:3] * of_w

    f = jaxfn.autograd_function(forward, backward, name="Drawing")
    return lambda x, w: f(x, w)[:3]


@row("A8", "D8")
@sampled
@pytest.mark.parametrize("outside", MIXED)
@pytest.mark.parametrize("shape", ["plain", "large", "inner jit"])
@pytest.mark.parametrize("kind", ["numpy", "counter"])
@EVERY_PROGRAM
def test_mixed_derivatives_of_a_forward_that_draws_and_reads_its_flags_are_of_one_draw_or_refused(
    program, kind, shape, outside
):
    """The flags of the mixed derivative are wider, so that forward may run again."""
    f = drawing_of_two(Source(kind), shape)

    def mixed(x, w):
        def of_x(x, w):
            y, pull = jax.vjp(lambda x: CONTEXTS[program](f)(x, w), x)
            return pull(jnp.ones_like(y))[0], y

        slope, pull, y = jax.vjp(lambda w: of_x(x, w), w, has_aux=True)
        return y, slope, pull(jnp.ones_like(slope))[0]

    w = jnp.full(3, 1.5)
    try:
        y, slope, curvature = MIXED[outside](mixed)(X, w)
    except NotImplementedError as error:
        assert str(error).startswith("Drawing"), error
        return
    p = X * w
    np.testing.assert_allclose(slope * jnp.sin(p), y * w * jnp.cos(p), rtol=1e-4)
    np.testing.assert_allclose(curvature * jnp.sin(p), y * (jnp.cos(p) - p * jnp.sin(p)), rtol=1e-4, atol=1e-5)


@row("A8")
@pytest.mark.parametrize("kind", ["numpy", "counter"])
@pytest.mark.parametrize("mode", ["backward", "generated"])
@pytest.mark.parametrize("program", ["eager", "jit of all", "vmap"])
def test_first_derivatives_of_a_forward_that_draws_are_of_one_draw(program, mode, kind):
    f = drawing(Source(kind), "plain", mode=mode)

    def value_and_slope(x):
        y, pull = jax.vjp(f, x)
        return y, pull(jnp.ones_like(y))[0]

    around = {"eager": lambda f: f, "jit of all": jax.jit, "vmap": CONTEXTS["vmap"]}[program]
    y, slope = around(value_and_slope)(X)
    np.testing.assert_allclose(slope * jnp.sin(X), y * jnp.cos(X), rtol=1e-5)


# --- how often forward runs


class Runs:
    """Counts runs of forward, in Python."""

    def __init__(self):
        self.forward = 0

    def counted(self):
        before, self.forward = self.forward, 0
        return before


def counted_function(kept, runs):
    """sin, in ways of keeping what backward needs."""

    def forward(ctx, x):
        runs.forward += 1
        c = jnp.cos(x)
        if kept == "flags":
            ctx.read = any(ctx.needs_input_grad)
        if kept in ("intermediate", "flags"):
            ctx.save_for_backward(c)
        elif kept == "attribute":
            ctx.c = {"deep": c}
        elif kept == "closure":
            ctx.pull = lambda g: g * c
        else:
            ctx.save_for_backward(x)
        return jnp.sin(x)

    def backward(ctx, g):
        if kept == "attribute":
            return g * ctx.c["deep"]
        if kept == "closure":
            return ctx.pull(g)
        return g * (jnp.cos(ctx.saved_tensors[0]) if kept == "input" else ctx.saved_tensors[0])

    return jaxfn.autograd_function(forward, backward)


def counted_by_hand(runs):
    f = jax.custom_vjp(lambda x: fwd(x)[0])

    def fwd(x):
        runs.forward += 1
        return jnp.sin(x), jnp.cos(x)

    f.defvjp(fwd, lambda c, g: (g * c,))
    return f


FIRST: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.grad(total(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(total(f))),
    "grad of jit": lambda f: jax.grad(total(jax.jit(f))),
    "grad of checkpoint": lambda f: jax.grad(total(jax.checkpoint(f))),
    "grad of scan": lambda f: jax.grad(total(CONTEXTS["scan"](f))),
    "grad of cond": lambda f: jax.grad(lambda x: jax.lax.cond(x[0] > 0, total(lambda x: f(x)), total(lambda x: x), x)),
    "grad of vmap": lambda f: jax.grad(total(jax.vmap(f))),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f))),
    "jit of grad of checkpoint": lambda f: jax.jit(jax.grad(total(jax.checkpoint(f)))),
    "jit of grad of jit": lambda f: jax.jit(jax.grad(total(jax.jit(f)))),
}
KEEPING = ["input", "intermediate", "attribute", "flags", "closure"]


@row("A8")
@pytest.mark.parametrize("kept", [k for k in KEEPING if k != "closure"])
@pytest.mark.parametrize("program", FIRST)
def test_forward_runs_once_in_a_first_derivative_or_again_if_it_reads_its_flags(program, kept):
    """A hand-written custom_vjp traces its primal and its fwd where JAX stages the call before it differentiates."""
    runs = Runs()
    by_hand = counted_by_hand(runs)
    FIRST[program](lambda x: by_hand(x))(X)
    expected = min(runs.counted(), 1)
    if kept == "flags":
        expected = 3 if program == "grad of cond" else 2  # JAX differentiates a branch twice
    f = counted_function(kept, runs)
    for _ in range(3):
        np.testing.assert_allclose(FIRST[program](lambda x: f(x))(X), jnp.cos(X), rtol=1e-5)
        assert runs.counted() <= expected


HISTORIES = {
    "the same": (),
    "eager": ("eager call",),
    "first derivatives": ("grad", "grad of jit"),
    "second derivatives": ("jit of all", "jit of the function"),
}


@row("A8")
@sampled
@pytest.mark.parametrize("kept", KEEPING)
@pytest.mark.parametrize("program", [*FIRST, *SECOND])
def test_how_often_forward_runs_does_not_depend_on_earlier_calls(program, kept):
    every = {**FIRST, **SECOND, "eager call": lambda f: f}

    def count(f, runs, name):
        runs.counted()
        try:
            every[name](lambda x: f(x))(X)
        except (NotImplementedError, jax.errors.UnexpectedTracerError):
            assert kept == "closure"  # which stays behind in another program
        return runs.counted()

    counts = {}
    for history, before in HISTORIES.items():
        runs = Runs()
        f = counted_function(kept, runs)
        for name in before:
            count(f, runs, name)
        counts[history] = [count(f, runs, program) for _ in range(3)]
    assert len({tuple(c) for c in counts.values()}) == 1, counts
    assert len(set(counts["the same"])) == 1, counts


# --- a Ref made inside the differentiated function


@row("B10")
@pytest.mark.parametrize("program", ["eager", "jit", "jit of grad", "checkpoint", "scan"])
@pytest.mark.parametrize("mode", ["backward", "both"])
def test_a_ref_made_inside_the_differentiated_function_is_refused(mode, program):
    class Writes(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, ref):
            ref[...] = ref[...] + x
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g, None

    if mode == "both":
        Writes.jvp = staticmethod(lambda ctx, t, _: 2 * t)

    def loss(x):
        ref = jax.new_ref(x * 1)
        return jnp.sum(Writes.apply(x, ref) + ref[...])

    gradient = jax.jit(jax.grad(loss)) if program == "jit of grad" else jax.grad(CONTEXTS[program](loss))
    with pytest.raises(NotImplementedError, match=r"Writes: input 1 \('ref'\) is a jax.Ref that was made inside"):
        gradient(X)


# --- outputs that nobody uses


@row("E1b")
@pytest.mark.parametrize("mode", ["backward", "both", "generated"])
def test_an_output_that_is_not_used_costs_nothing(mode):
    """In a scan or a checkpoint JAX drops it only if the equation has a rule that says so."""

    class Two(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.sin(x), jnp.tanh(x)

        @staticmethod
        def backward(ctx, g, h):
            return g + h

    if mode == "both":
        Two.jvp = staticmethod(lambda ctx, t: (t, t))
    elif mode == "generated":
        Two.generate_jvp_rule = True
    program = jax.make_jaxpr(Two.apply)(X)
    used, _ = partial_eval.dce_jaxpr(program.jaxpr, [True, False])
    assert "tanh" not in str(used) and "sin" in str(used)
