"""Rows A5, A9 and D3: what forward and backward close over is right, or refused by name; never a zero."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Holder, stop_gradient
from tests.support.marks import row, sampled

WRAPS: dict[str, Callable] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=2)[0],
    "cond": lambda f: lambda w, x: jax.lax.cond(x > -9, f, lambda w, x: x, w, x),
    "vmap": lambda f: lambda w, x: jax.vmap(f, in_axes=(None, 0))(w, jnp.asarray(x)[None])[0],
}
MODES = ("reverse", "both")


def scaled(w, mode, save):
    """w·sin(x), whose forward closes over w."""

    def forward(ctx, x):
        s = jnp.sin(x)
        if save == "intermediate":
            ctx.save_for_backward(x, s)
        else:
            ctx.save_for_backward(x)
        ctx.w = w
        return w * s

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.w * jnp.cos(ctx.saved_tensors[0]))
    if mode == "both":
        f.jvp(lambda ctx, t: t * ctx.w * jnp.cos(ctx.saved_tensors[0]))
    return f


def ours(mode, save):
    return lambda w, x: scaled(w, mode, save)(x)


def plain(w, x):
    return w * jnp.sin(x)


@row("A9")
@sampled
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["", "in jit"])
@pytest.mark.parametrize("save", ["input", "intermediate"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_value_that_is_not_differentiated(wrap, mode, save, outer):
    """By hand JAX raises in some of these, as the tracer in the closure is of another program."""
    wrapped = WRAPS[wrap]
    for order in (lambda f: jax.grad(f, 1), lambda f: jax.grad(jax.grad(f, 1), 1)):
        got, expected = (outer(order(wrapped(f)))(1.3, 0.7) for f in (ours(mode, save), plain))
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@row("A9")
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["", "in jit"])
@pytest.mark.parametrize("argnums", [0, (0, 1)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_value_that_is_differentiated_is_refused(wrap, mode, argnums, outer):
    with pytest.raises(NotImplementedError, match="forward closes over a value .*argument"):
        outer(jax.grad(WRAPS[wrap](ours(mode, "input")), argnums))(1.3, 0.7)


@row("A9")
@pytest.mark.parametrize("save", ["input", "intermediate"])
@pytest.mark.parametrize("wrap", ["eager", "jit", "checkpoint"])
def test_differentiated_further_out(wrap, save):
    """The gradient by x is a function of w like any other."""

    def mixed(f):
        return jax.grad(WRAPS[wrap](lambda w, x: jax.grad(lambda x: f(w, x))(x) * x), (0, 1))

    np.testing.assert_allclose(mixed(ours("reverse", save))(1.3, 0.7), mixed(plain)(1.3, 0.7), rtol=1e-5)


@row("A9")
def test_a_global_and_an_array_that_is_not_needed():
    """What the outputs do not depend on may be differentiated."""

    def loss(w, x):
        f = jaxfn.autograd_function(lambda ctx, x: (w, 2 * x)[1], lambda ctx, g: 2 * g)
        return f(x) * w

    np.testing.assert_allclose(jax.grad(loss, (0, 1))(3.0, 5.0), (10.0, 6.0))
    np.testing.assert_allclose(jax.grad(jax.jit(loss), (0, 1))(3.0, 5.0), (10.0, 6.0))


def closing_backward(w, x):
    f = jaxfn.autograd_function(lambda ctx, x: jnp.round(x), lambda ctx, g: g * w)
    return f(x)


@row("A9")
def test_backward_closes_over_a_value():
    expected = jax.grad(lambda w, x: w * x + stop_gradient(jnp.round(x) - w * x), 1)(3.0, 0.6)
    assert jax.grad(closing_backward, 1)(3.0, 0.6) == expected
    assert jax.jit(jax.grad(closing_backward, 1))(3.0, 0.6) == expected
    for wrapped in (jax.jit(closing_backward), jax.vmap(closing_backward)):
        gradient = jax.grad(lambda w, x, wrapped=wrapped: wrapped(w, x).sum(), 1)(jnp.full(2, 3.0), jnp.full(2, 0.6))
        np.testing.assert_allclose(gradient, jnp.full(2, expected), rtol=1e-6)


@row("A9")
@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_an_object_that_backward_closes_over_holds_a_value_of_another_program(wrap):
    """Only closures get other values; an object may be anything."""

    def closing(w, x):
        holder = Holder(w)
        return jaxfn.autograd_function(lambda ctx, x: jnp.round(x), lambda ctx, g: g * holder.value)(x)

    with pytest.raises(NotImplementedError, match=r"backward closes over a value .* another program .* argument"):
        jax.grad(lambda w, x: wrap(closing)(w, x).sum(), 1)(jnp.full(2, 3.0), jnp.full(2, 0.6))


def sine_with_scaled_slope(x, w):
    """In plain JAX, as 0.10.0 forgets a custom_jvp in a scan: the sine's value, no derivative by w, w² cos(x) by x."""
    return stop_gradient(jnp.sin(x)) + w * w * (jnp.sin(x) - stop_gradient(jnp.sin(x)))


def sine_closing_over_its_scale(w, form):
    """The same, where the rules alone see the scale: in a closure, a closure's closure, defaults and tuples."""
    square = functools.partial(jnp.square, w)
    held = ((w,),)

    def forward(ctx, x):
        kept = jnp.cos(x) if form == "intermediate" else x if form != "flags" or ctx.needs_input_grad[0] else None
        ctx.save_for_backward(kept)
        ctx.save_for_forward(kept)
        return jnp.sin(x)

    def rule(ctx, moving, scale=w):
        (kept,) = ctx.saved_tensors
        slope = kept if form == "intermediate" else jnp.cos(kept)
        factors = {"defaults": scale * scale, "tuples": held[0][0] ** 2}
        return moving * slope * factors.get(form, square())

    functions = {"backward": staticmethod(rule), "forward": staticmethod(forward)}
    if form == "jvp":
        functions["jvp"] = staticmethod(rule)
    return type("Sine", (jaxfn.Function,), {**functions, "generate_jvp_rule": form == "generated"}).apply


def twice(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


WITHIN = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": twice,
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, f, x),
    "map": lambda f: lambda x: jax.lax.map(f, jnp.stack([x, 2 * x])).sum(0),
    "vmap of jit": lambda f: lambda x: jax.vmap(jax.jit(f), 1)(jnp.stack([x, 2 * x], 1)).sum(0),
    "shard_map": lambda f: jax.shard_map(f, mesh=jax.make_mesh((1,), ("d",)), in_specs=jax.P(), out_specs=jax.P()),
}
AROUND = {
    "jit": jax.jit,
    "grad by the scale": jax.grad,
    "vmap over scales": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, w + 1]), x),
    "scan over scales": lambda f: (
        lambda w, x: jax.lax.scan(lambda c, w: (c + f(w, x), None), 0.0, jnp.stack([w, 2 * w]))[0]
    ),
}
DERIVATIVES = {
    "grad": jax.grad,
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1],
}


@row("A9")
@sampled
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(
    ("form", "derivative"),
    [
        ("reverse", "grad"),
        ("reverse", "grad of grad"),
        ("intermediate", "grad of grad"),
        ("flags", "grad of grad"),
        ("defaults", "grad"),
        ("tuples", "grad"),
        ("generated", "jvp of grad"),
        ("jvp", "jvp"),
        ("jvp", "jvp of grad"),
    ],
)
def test_rules_that_close_over_a_value_of_the_program_around(form, within, around, derivative):
    """By hand JAX raises "No constant handler" in jit, scan and cond, and in others at second order."""

    def program(sine):
        def derived(w, x):
            return DERIVATIVES[derivative](lambda x: WITHIN[within](lambda x: sine(w, x))(x).sum())(x).sum()

        return AROUND[around](derived)

    args = jnp.float32(1.3), jnp.arange(1.0, 4) / 3
    got = program(lambda w, x: sine_closing_over_its_scale(w, form)(x))(*args)
    expected = program(lambda w, x: sine_with_scaled_slope(x, w))(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@row("A9", "D3")
@pytest.mark.parametrize("within", ["eager", "jit", "map", "checkpoint", "vmap of jit"])
def test_a_mapped_value_that_rules_close_over_alone(within):
    """It counts as an input, so that backward gets a gradient for each element."""
    weights = jnp.array([1.0, 3.0])[:, None]

    def loss(sine):
        def mapped(w, x):
            return jax.vmap(lambda w: WITHIN[within](lambda x: sine(w, x))(x))(jnp.stack([w, 2 * w]))

        return jax.grad(lambda x: (mapped(jnp.float32(1.3), x) * weights).sum())

    x = jnp.arange(1.0, 4) / 3
    expected = loss(lambda w, x: sine_with_scaled_slope(x + 0 * w, w))(x)
    got = loss(lambda w, x: sine_closing_over_its_scale(w, "reverse")(x))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@row("A9")
def test_a_list_that_backward_appends_to_is_the_callers():
    seen = []

    @jax.jit
    def gradient(x):
        f = jaxfn.autograd_function(lambda ctx, x: jnp.round(x), lambda ctx, g: seen.append(g) or 2 * g)
        return jax.grad(lambda x: f(f(f(x))))(x)

    assert gradient(0.6) == 8.0
    assert len(seen) == 3


@row("A9")
def test_a_variable_that_backward_changes_is_still_the_functions_own():
    calls = 0

    @jax.jit
    def gradient(w, x):
        def backward(ctx, g):
            nonlocal calls
            calls += 1
            return g * w

        f = jaxfn.autograd_function(lambda ctx, x: jnp.round(x), backward)
        return jax.grad(jax.jit(lambda x: f(x)))(x)

    assert gradient(3.0, 0.6) == 3.0
    assert calls == 1


@row("A9")
def test_what_a_backward_only_keeps_is_no_matter():
    """A list that backward appends to, say, may hold tracers of programs long gone."""
    seen = []
    f = jaxfn.autograd_function(lambda ctx, x: x * 2, lambda ctx, g: seen.append(g) or 2 * g)
    for _ in range(2):
        assert jax.jit(jax.grad(lambda x: f(x)))(1.0) == 2.0


@row("A8", "A9")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_mapped_forward_whose_state_is_traced(wrap):
    """Its second run, for a second derivative, draws another scale."""

    class Keys:
        def __init__(self, key):
            self.key = key

        def __call__(self):
            self.key, key = jax.random.split(self.key)
            return key

    def loss(x):
        keys = Keys(jax.random.key(0))

        def forward(ctx, x):
            scale = jax.random.uniform(keys(), (), x.dtype, 0.5, 1.5)
            ctx.save_for_backward(scale)
            return x * scale

        drop = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.saved_tensors[0])
        return drop(x) ** 2 + drop(x) ** 2

    first = wrap(jax.vmap(jax.value_and_grad(loss)))
    value, gradient = first(jnp.full(3, 2.0))
    np.testing.assert_allclose(gradient, value, rtol=1e-6)  # each of both terms is 4m² at 2, and so is its gradient
    with pytest.raises(NotImplementedError, match=r"forward.forward was run again .* changed between the runs"):
        wrap(jax.vmap(jax.grad(jax.grad(loss))))(jnp.full(3, 2.0))


class Everywhere:
    """What forward finds without a closure, as a framework's current module."""

    weight = None
    hides = False


class Found(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        s = jnp.sin(x)
        ctx.w = Everywhere.weight
        if Everywhere.hides:
            ctx.pull = lambda g: g * jnp.cos(x) * s**0
        else:
            ctx.save_for_backward(x, s)
        return ctx.w * s

    @staticmethod
    def backward(ctx, g):
        return ctx.pull(g * ctx.w) if Everywhere.hides else g * ctx.w * jnp.cos(ctx.saved_tensors[0])


# What is right, by what hides and the program around: derivatives by w, by x, and by both.
FOUND = {
    ("saves", "eager"): ("refused", "right", "refused"),
    ("saves", "jit"): ("refused", "refused", "refused"),
    ("saves", "vmap"): ("refused", "refused", "refused"),
    ("hides", "eager"): ("refused", "refused", "refused"),
    ("hides", "jit"): ("refused", "refused", "refused"),
    ("hides", "vmap"): ("refused", "refused", "refused"),
}


@row("A9")
@pytest.mark.parametrize("is_jitted", [False, True], ids=["", "in jit"])
@pytest.mark.parametrize(("kind", "wrap"), FOUND)
def test_what_no_search_finds_is_never_lost(kind, wrap, is_jitted):
    """In a global, beside a saved or hidden intermediate, at both orders."""

    def total(f):
        def inner(w, x):
            value, gradient = jax.value_and_grad(lambda x: f(w, x))(x)
            return 2 * value + gradient

        return lambda w, x: {"eager": inner, "jit": jax.jit(inner), "vmap": jax.vmap(inner)}[wrap](w, x).sum()

    def found(w, x):
        Everywhere.weight, Everywhere.hides = w, kind == "hides"
        return Found.apply(x)

    args = (jnp.full(2, 1.3), jnp.array([0.7, 0.2])) if wrap == "vmap" else (1.3, 0.7)
    outer = jax.jit if is_jitted else lambda f: f
    # JAX computes with a tracer of a level that is done, and says so itself at the end.
    named = r"Found\.forward (closes over a value|keeps a JAX array inside)"
    for argnums, outcome in zip((0, 1, (0, 1)), FOUND[kind, wrap], strict=True):
        gradient = outer(jax.grad(total(found), argnums))
        if outcome == "right":
            np.testing.assert_allclose(gradient(*args), jax.grad(total(plain), argnums)(*args), rtol=1e-5)
            continue
        by_jax = wrap == "eager" and is_jitted and argnums != 1
        errors = (NotImplementedError, jax.errors.UnexpectedTracerError) if by_jax else NotImplementedError
        with pytest.raises(errors, match=f"{named}|unexpected tracer" if by_jax else named):
            gradient(*args)


@row("A8")
@pytest.mark.parametrize("over", [jax.vmap, jax.jit, lambda f: lambda ws: jax.lax.map(f, ws)])
def test_forward_runs_once_where_only_what_it_closes_over_is_traced(over):
    runs = []

    def program(w):
        @jaxfn.function
        def scaled(ctx, x):
            runs.append("once")
            return x * w

        return scaled(jnp.float32(3))

    weights = jnp.arange(1.0, 5)
    np.testing.assert_array_equal(over(program)(weights), 3 * weights)
    assert len(runs) == 1


@row("A9")
def test_a_rule_that_closes_over_a_value_of_an_outer_derivative_is_refused_by_name():
    """`jax.grad` outside, `jax.jvp` inside: the tangents' rule uses what belongs to the outer one."""

    def scaled_by(c):
        class Scaled(jaxfn.Function):
            @staticmethod
            def forward(ctx, x):
                return x * jnp.sin(c)

            @staticmethod
            def backward(ctx, g):
                return g * jnp.sin(c)

            @staticmethod
            def jvp(ctx, t):
                return t * jnp.sin(c)

        return Scaled.apply

    def tangent(c):
        return jax.jvp(scaled_by(c), (c,), (jnp.cos(c),))[1]

    try:
        np.testing.assert_allclose(jax.grad(tangent)(0.3), jnp.cos(0.6), rtol=1e-6)
    except NotImplementedError as error:
        assert "Scaled.jvp closes over a value" in str(error) or "Scaled.forward closes over a value" in str(error)


@row("A5", "A9")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
@pytest.mark.parametrize("save", [False, True], ids=["saves_nothing", "saves_output"])
def test_closed_over_values_differentiated_further_out(wrap, save):
    """The value of a Function inside a differentiated function depends on what its forward closes over."""

    def loss(w):
        def forward(ctx, x):
            y = jnp.exp(w * x)
            if save:
                ctx.save_for_backward(y)
            return y

        f = jaxfn.autograd_function(forward, lambda ctx, g: g)
        return jax.value_and_grad(f)(jnp.float32(0.7))[0]

    np.testing.assert_allclose(wrap(loss)(0.5), np.exp(0.35), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="forward closes over a value that is being differentiated"):
        jax.grad(wrap(loss))(0.5)


# The derivative of the gradient, by where forward finds what it closes over. A Function's value has none by that.
BESIDE = {"cell": "right", "default": "right", "object": "refused", "static argument": "refused"}


@row("A5", "A9", "D3")
@sampled
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
@pytest.mark.parametrize("kept", BESIDE)
@pytest.mark.parametrize("moves", [False, True], ids=["x fixed", "x moves too"])
def test_closed_over_values_beside_a_saved_intermediate(wrap, kept, moves):
    """What the outputs depend on beside the inputs keeps its derivative in backward, where forward can run again."""

    def ours(c):
        holder = Holder(c)

        def backward(ctx, g):
            x, s = ctx.saved_tensors
            return g * ctx.c * ctx.c * jnp.cos(x * ctx.c) + 0 * s, *[None] * (kept == "static argument")

        def run(ctx, x, c):
            s = jnp.sin(x * c)
            ctx.save_for_backward(x, s)
            ctx.c = c
            return s * c

        forwards = {
            "cell": lambda ctx, x: run(ctx, x, c),
            "default": lambda ctx, x, *, scale=lambda c=c: c: run(ctx, x, scale()),
            "object": lambda ctx, x: run(ctx, x, holder.value),
            "static argument": lambda ctx, x, held: run(ctx, x, held.value),
        }
        f = jaxfn.autograd_function(forwards[kept], backward)
        return (lambda x: f(x, holder)) if kept == "static argument" else f

    def loss(f, with_value=False):
        def total(c, x):
            value, gradient = jax.value_and_grad(f(c))(jnp.sin(c) if moves else x)
            return 2 * value + gradient if with_value else gradient

        return jax.grad(wrap(total), (0, 1))

    if BESIDE[kept] == "right":
        expected = loss(lambda c: lambda x: jnp.sin(x * c) * c)(1.3, 0.7)
        np.testing.assert_allclose(loss(ours)(1.3, 0.7), expected, rtol=1e-5)
    else:
        with pytest.raises(NotImplementedError, match="forward closes over a value that JAX traces in another program"):
            loss(ours)(1.3, 0.7)
    with pytest.raises(NotImplementedError, match="forward closes over a value"):
        loss(ours, with_value=True)(1.3, 0.7)
