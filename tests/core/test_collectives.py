"""Axis names of `jax.vmap`, outputs without a batch, and collectives in `jax.shard_map` over eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import stop_gradient

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import row, sampled

# --- collectives over a vmapped axis name, in forward, jvp and backward

N = 3
SHIFT = [(i, (i + 1) % N) for i in range(N)]
BACK = [(b, a) for a, b in SHIFT]


class Collective:
    """A function of x and of a weight that all elements share, with its derivative written down.

    Attributes:
      value: of (x, w).
      push: the tangent, of (x, w, tangent of x, tangent of w).
      pull: the cotangents of x and w, of (x, w, g).
    """

    def __init__(self, value: Any, push: Any, pull: Any) -> None:
        self.value, self.push, self.pull = value, push, pull


def _of_square(collective, transposed):
    return Collective(
        lambda x, w: collective(w * x**2),
        lambda x, w, t, u: collective(2 * w * x * t + u * x**2),
        lambda x, w, g: (2 * w * x * transposed(g), x**2 * transposed(g)),
    )


COLLECTIVES = {
    "psum": _of_square(lambda y: lax.psum(y, "i"), lambda g: lax.psum(g, "i")),
    "pmean": _of_square(lambda y: lax.pmean(y, "i"), lambda g: lax.pmean(g, "i")),
    "ppermute": _of_square(lambda y: lax.ppermute(y, "i", SHIFT), lambda g: lax.ppermute(g, "i", BACK)),
    "axis_index": _of_square(
        lambda y: y * (1 + lax.axis_index("i")) / lax.axis_size("i"),
        lambda g: g * (1 + lax.axis_index("i")) / lax.axis_size("i"),
    ),
    "all_gather": _of_square(
        lambda y: lax.all_gather(y, "i", axis=1).sum(1) + y, lambda g: lax.all_gather(g, "i").sum(0) + g
    ),
    "psum of a part": Collective(
        lambda x, w: x - lax.pmean(x, "i") * w,
        lambda x, w, t, u: t - lax.pmean(t, "i") * w - lax.pmean(x, "i") * u,
        lambda x, w, g: (g - lax.pmean(g * w, "i"), -lax.pmean(x, "i") * g),
    ),
}
TWICE, THRICE = 2.0, 3.0


def function_of(collective, rules):
    """A Function whose jvp is twice and whose backward is three times the derivative."""

    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return collective.value(x, w)

    methods: dict[str, Any] = {"forward": staticmethod(forward)}
    if rules != "jvp":
        methods["backward"] = staticmethod(
            lambda ctx, g: tuple(THRICE * v for v in collective.pull(*ctx.saved_tensors, g))
        )
    if rules in ("both", "jvp"):
        methods["jvp"] = staticmethod(lambda ctx, t, u: TWICE * collective.push(*ctx.saved_tensors, t, u))
    if rules == "generated":
        methods["generate_jvp_rule"] = True
    return type("Collected", (jaxfn.Function,), methods).apply


def reference(collective, factor):
    """Plain JAX, with that many times the derivative at every order."""

    def f(x, w):
        y = collective.value(x, w)
        return y + (factor - 1) * (y - stop_gradient(y))

    return f


# The factor of reverse and of forward mode.
FACTORS = {"backward": (THRICE, None), "both": (THRICE, TWICE), "generated": (THRICE, THRICE), "jvp": (TWICE, TWICE)}
rng = np.random.default_rng(0)
XS = rng.normal(size=(5, N)).astype(np.float32)  # mapped over its last axis
W = rng.normal(size=(5,)).astype(np.float32)  # of all elements
WEIGHTS = rng.normal(size=(5, N)).astype(np.float32)
TANGENT = rng.normal(size=(5, N)).astype(np.float32)


def over(f, **options):
    return jax.vmap(f, in_axes=(-1, None), out_axes=-1, axis_name="i", **options)


def weighed(f):
    """A number that tells the elements from each other."""
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)) * WEIGHTS)


def inside(f):
    """The gradient of each element alone, under vmap."""

    def gradient(x, w, weight):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w)) * weight), (0, 1))(x, w)

    return lambda x, w: jax.vmap(gradient, (-1, None, -1), -1, axis_name="i")(x, w, WEIGHTS)


def total_of(f):
    return lambda *args: sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(f(*args)))


def gradients(f):
    return jax.grad(f, (0, 1))


REVERSE = {
    "grad of vmap": lambda f: gradients(weighed(over(f))),
    "vmap of grad": inside,
    "grad of grad of vmap": lambda f: gradients(total_of(gradients(weighed(over(f))))),
    "grad of vmap of grad": lambda f: gradients(total_of(inside(f))),
}
FORWARD = {
    "jvp of vmap": lambda f: lambda x, w: jax.jvp(over(f), (x, w), (TANGENT, 2 * w))[1],
    "vmap of jvp": lambda f: (
        lambda x, w: jax.vmap(lambda x, w, t: jax.jvp(f, (x, w), (t, 2 * w))[1], (-1, None, -1), -1, axis_name="i")(
            x, w, TANGENT
        )
    ),
    "jvp of jvp of vmap": lambda f: (
        lambda x, w: jax.jvp(lambda x, w: jax.jvp(over(f), (x, w), (TANGENT, 2 * w))[1], (x, w), (TANGENT, w))[1]
    ),
}


def compare(got, expected, rtol=2e-4):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * max(1.0, float(np.abs(theirs).max(initial=0))))


EVERY_COLLECTIVE = pytest.mark.parametrize("collective", COLLECTIVES)
EVERY_RULES = pytest.mark.parametrize("rules", FACTORS)
JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])


@row("E1", "E1c")
@sampled
@EVERY_COLLECTIVE
@EVERY_RULES
@pytest.mark.parametrize("program", CONTEXTS)
@JIT
def test_values_of_collectives_over_a_vmapped_axis(wrap, program, rules, collective):
    c = COLLECTIVES[collective]
    got = wrap(over(CONTEXTS[program](function_of(c, rules))))(XS, W)
    compare(got, over(c.value)(XS, W), 1e-5)


@row("E1", "E1c")
@sampled
@EVERY_COLLECTIVE
@EVERY_RULES
@pytest.mark.parametrize("derivative", REVERSE)
@pytest.mark.parametrize("program", CONTEXTS)
@JIT
def test_reverse_mode_of_collectives_over_a_vmapped_axis(wrap, program, derivative, rules, collective):
    c, (factor, _) = COLLECTIVES[collective], FACTORS[rules]
    ours = REVERSE[derivative](CONTEXTS[program](function_of(c, rules)))
    compare(wrap(ours)(XS, W), jax.jit(REVERSE[derivative](reference(c, factor)))(XS, W))


@row("E1", "E1c", "D4")
@sampled
@EVERY_COLLECTIVE
@pytest.mark.parametrize("rules", [r for r, (_, forward) in FACTORS.items() if forward])
@pytest.mark.parametrize("derivative", FORWARD)
@pytest.mark.parametrize("program", CONTEXTS)
@JIT
def test_forward_mode_of_collectives_over_a_vmapped_axis(wrap, program, derivative, rules, collective):
    """Before, `pmean` gave the first element's tangent for all."""
    c, (_, factor) = COLLECTIVES[collective], FACTORS[rules]
    ours = FORWARD[derivative](CONTEXTS[program](function_of(c, rules)))
    compare(wrap(ours)(XS, W), jax.jit(FORWARD[derivative](reference(c, factor)))(XS, W))


@row("E1", "E1c", "D4")
@EVERY_COLLECTIVE
@JIT
def test_collectives_beside_a_hand_written_custom_jvp(wrap, collective):
    """Forward mode, and the transposed rule in reverse mode."""
    c = COLLECTIVES[collective]
    by_hand = jax.custom_jvp(c.value)
    by_hand.defjvp(lambda p, t: (by_hand(*p), TWICE * c.push(*p, *t)))
    f = function_of(c, "jvp")
    for derivative in (*FORWARD.values(), *REVERSE.values()):
        compare(wrap(derivative(f))(XS, W), derivative(by_hand)(XS, W))


@row("E1", "E1c")
@EVERY_COLLECTIVE
@JIT
def test_collectives_beside_a_hand_written_custom_vjp(wrap, collective):
    """In `vmap(grad)`; `grad(vmap)` of it ends in "unbound axis name"."""
    c = COLLECTIVES[collective]
    by_hand = jax.custom_vjp(c.value)
    by_hand.defvjp(lambda x, w: (by_hand(x, w), (x, w)), lambda kept, g: tuple(THRICE * v for v in c.pull(*kept, g)))
    compare(wrap(inside(function_of(c, "backward")))(XS, W), inside(by_hand)(XS, W))


@row("E1", "E1c")
@EVERY_COLLECTIVE
@EVERY_RULES
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_collectives_under_another_vmap(place, rules, collective):
    """Whose axis has no name, and lies inside or outside of the one that has."""
    c, (factor, _) = COLLECTIVES[collective], FACTORS[rules]
    xs = np.stack([XS, XS - 1, 2 * XS, XS**2], 1)

    def derived(f):
        if place == "outside":
            one = jax.vmap(lambda x: over(f)(x, W), 1, 1)
        else:
            one = over(jax.vmap(f, (1, None), 1))
            return gradients(lambda x, w: jnp.sum(jnp.sin(one(x, w)) * WEIGHTS[:, None]))(xs, W)
        return jax.grad(lambda x: jnp.sum(jnp.sin(one(x)) * WEIGHTS[:, None]))(xs)

    compare(derived(function_of(c, rules)), derived(reference(c, factor)))


@row("E1", "E1c")
@EVERY_RULES
@JIT
def test_collectives_over_two_named_axes(wrap, rules):
    """Over one of them, over the other, and over both."""

    def value(x, w):
        return lax.psum(w * x**2, "i") + lax.pmean(w * x, "j") * lax.axis_index("j") + lax.pmean(x**3, ("i", "j"))

    def push(x, w, t, u):
        return jax.jvp(value, (x, w), (t, u))[1]

    def pull(x, w, g):
        of_x = 2 * w * x * lax.psum(g, "i") + w * lax.pmean(g * lax.axis_index("j"), "j")
        of_w = x**2 * lax.psum(g, "i") + x * lax.pmean(g * lax.axis_index("j"), "j")
        return of_x + 3 * x**2 * lax.pmean(g, ("i", "j")), of_w

    c, (factor, _) = Collective(value, push, pull), FACTORS[rules]
    xs = rng.normal(size=(N, 5, 4)).astype(np.float32)

    def derived(f):
        mapped = jax.vmap(jax.vmap(f, (0, None), axis_name="i"), (-1, None), -1, axis_name="j")
        return gradients(lambda x, w: jnp.sum(jnp.sin(mapped(x, w)) * (1 + jnp.arange(4.0))))(xs, W)

    compare(wrap(lambda: derived(function_of(c, rules)))(), derived(reference(c, factor)))


@row("E1", "E1c")
@pytest.mark.parametrize("collective", ["pmean", "psum", "ppermute"])
@EVERY_RULES
@JIT
def test_collectives_in_backward_alone(wrap, rules, collective):
    """A gradient that is averaged over the elements, for a forward that knows nothing of them."""
    transposed = {
        "pmean": lambda g: lax.pmean(g, "i"),
        "psum": lambda g: lax.psum(g, "i"),
        "ppermute": lambda g: lax.ppermute(g, "i", BACK),
    }[collective]
    pushed = (lambda t: lax.ppermute(t, "i", SHIFT)) if collective == "ppermute" else transposed
    c = Collective(
        lambda x, w: jnp.round(x), lambda x, w, t, u: pushed(t), lambda x, w, g: (transposed(g), jnp.zeros_like(w))
    )
    factor, forward = FACTORS[rules]

    def linear(factor):
        def f(x, w):
            y = factor * pushed(x)
            return jnp.round(x) + y - stop_gradient(y)

        return f

    for derivative in ("grad of vmap", "vmap of grad"):
        ours = wrap(REVERSE[derivative](function_of(c, rules)))(XS, W)
        compare(ours, REVERSE[derivative](linear(factor))(XS, W))
    if forward:
        for derivative in FORWARD:
            ours = wrap(FORWARD[derivative](function_of(c, rules)))(XS, W)
            compare(ours, FORWARD[derivative](linear(forward))(XS, W))


# --- every output has the batch if any input has it


class Parts(jaxfn.Function):
    """A product, and outputs that do not depend on x at all: of w, an integer, a mask, a key, and w marked."""

    @staticmethod
    def forward(ctx, x, w, key):
        ctx.save_for_backward(x, w)
        marked = jnp.exp(w)
        ctx.mark_non_differentiable(marked)
        return x * w, jnp.sin(w), jnp.int32(w.size), w > 0, jax.random.split(key)[0], marked

    @staticmethod
    def backward(ctx, g, of_sine, *_):
        x, w = ctx.saved_tensors
        return 3 * g * w, 3 * (g * x + of_sine * jnp.cos(w)), None


class PartsInBothModes(Parts):
    @staticmethod
    def jvp(ctx, t, u, _):
        x, w = ctx.saved_tensors
        return 2 * (t * w + u * x), 2 * u * jnp.cos(w), None, None, None, None


class PartsGenerated(Parts):
    generate_jvp_rule = True


PARTS = pytest.mark.parametrize("function", [Parts, PartsInBothModes, PartsGenerated])
AROUND = {"eager": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}
AROUND_PARTS = pytest.mark.parametrize("program", AROUND)
KEY = jax.random.key(3)


@row("E1c")
@PARTS
@AROUND_PARTS
@JIT
def test_an_output_without_a_batch_has_it_where_an_input_has(wrap, program, function):
    """`out_axes=None` for it is JAX's own error; integers, masks, keys and marked outputs are left alone."""
    f = AROUND[program](lambda x, w: function.apply(x, w, KEY))
    outputs = wrap(jax.vmap(f, (1, None), (1, 0, None, None, None, None)))(XS, W)
    product, sine, count, mask, key, marked = outputs
    compare(product, XS * W[:, None], 1e-6)
    compare(sine, np.broadcast_to(np.sin(W), (N, 5)), 1e-6)
    assert count == 5 and mask.shape == marked.shape == (5,) and key.shape == ()
    with pytest.raises(ValueError, match="out_axes is None|got axis spec None but output was batched"):
        wrap(jax.vmap(f, (1, None), (1, None, None, None, None, None)))(XS, W)


@row("E1c")
@PARTS
@AROUND_PARTS
@pytest.mark.parametrize("order", [1, 2])
@JIT
def test_derivatives_of_an_output_that_does_not_depend_on_the_batch(wrap, order, program, function):
    around = AROUND[program]

    def ours(x, w):
        return function.apply(x, w, KEY)[:2]

    def plain(x, w):
        value = x * w, jnp.sin(w)
        return tuple(y + 2 * (y - stop_gradient(y)) for y in value)  # three times the derivative

    def derived(f):
        mapped = jax.vmap(around(f), (1, None), (1, 0))

        def loss(x, w):
            product, sine = mapped(x, w)
            return jnp.sum(jnp.sin(product) * WEIGHTS) + jnp.sum(jnp.sin(sine) * WEIGHTS.T)

        return wrap(gradients(loss) if order == 1 else gradients(total_of(gradients(loss))))(XS, W)

    compare(derived(ours), derived(plain))


class UsesAnotherInput(jaxfn.Function):
    """An output of w alone, whose cotangent the rule gives to x."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return w**2

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 5 * g * x, 7 * g * w


@jax.custom_vjp
def uses_another_input_by_hand(x, w):
    return w**2


uses_another_input_by_hand.defvjp(
    lambda x, w: (uses_another_input_by_hand(x, w), (x, w)), lambda kept, g: (5 * g * kept[0], 7 * g * kept[1])
)


@row("E1c")
@AROUND_PARTS
@JIT
def test_a_rule_that_gives_a_mapped_input_the_gradient_of_an_output_without_it(wrap, program):
    """Of each element alone; a hand-written custom_vjp of a mapped output is the reference, mapped by hand."""
    around = AROUND[program]
    mapped = jax.vmap(around(UsesAnotherInput.apply), (1, None), 1)

    def by_hand(x, w):
        return jnp.stack([uses_another_input_by_hand(x[:, i], w) for i in range(N)], 1)

    for derivative in (lambda f: gradients(weighed(f)), lambda f: gradients(total_of(gradients(weighed(f))))):
        compare(wrap(derivative(mapped))(XS, W), derivative(by_hand)(XS, W))


@row("A9", "E1c")
@pytest.mark.parametrize("program", ["eager", "jit", "checkpoint", "scan"])
@JIT
def test_what_backward_alone_closes_over_has_a_batch_too(wrap, program):
    """It counts as an input, so that the gradient of each element is its own."""

    def loss(x, scales):
        def one(scale):
            f = jaxfn.autograd_function(
                lambda ctx, x: ctx.save_for_backward(x) or jnp.sin(x),
                lambda ctx, g: g * scale * jnp.cos(ctx.saved_tensors[0]),
            )
            return CONTEXTS[program](lambda x: f(x))(x)

        return jnp.sum(jax.vmap(one)(scales) * WEIGHTS.T)

    scales = jnp.array([1.0, 3.0, -2.0])
    got = wrap(jax.grad(loss))(XS[:, 0], scales)
    expected = np.cos(XS[:, 0]) * (WEIGHTS @ np.asarray(scales))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
