"""Contract rows E1 and E1c: collectives over the axis names of `jax.vmap`, and which outputs have the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import stop_gradient

import jaxfn
from tests.support import cases
from tests.support.contexts import CONTEXTS, eager
from tests.support.derivatives import check, derivative
from tests.support.marks import HIGH_PRIMITIVES, cells, row, slow

# --- collectives over a vmapped axis name, in forward, jvp and backward

N = 3
SHIFT = [(i, (i + 1) % N) for i in range(N)]
BACK = [(b, a) for a, b in SHIFT]


class Collective(NamedTuple):
    """A function of x and of a weight that all elements share, with its hand-written derivative.

    Attributes:
      value: of (x, w).
      push: the tangent, of (x, w, tangent of x, tangent of w).
      pull: the cotangents of x and w, of (x, w, g).
    """

    value: Any
    push: Any
    pull: Any


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


def pulled(collective):
    return lambda xw, g: tuple(THRICE * v for v in collective.pull(*xw, g))


def function_of(collective, rules):
    """A Function whose jvp is twice and whose backward is three times the derivative."""
    push = lambda xw, t, u: TWICE * collective.push(*xw, t, u)  # noqa: E731
    return cases.function_of(rules, collective.value, push, pulled(collective))


def hand_written(collective, rules):
    """The custom_jvp or custom_vjp of such rules."""
    if rules != "jvp":
        return cases.hand_written_of(collective.value, pulled(collective))
    f = jax.custom_jvp(collective.value)
    f.defjvp(lambda p, t: (f(*p), TWICE * collective.push(*p, *t)))
    return f


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


def over(f):
    return jax.vmap(f, in_axes=(-1, None, -1), out_axes=-1, axis_name="i")


def derived(name, f, vmap=over):
    """A derivative of the function times weights, which differs if elements are exchanged."""
    return derivative(name, lambda x, w, weight: f(x, w) * weight, vmap=vmap)


REVERSE = ("grad of vmap", "vmap of grad", "grad of grad of vmap", "grad of vmap of grad")
FORWARD = ("jvp of vmap", "vmap of jvp", "jvp of jvp of vmap")
ARGS = XS, W, WEIGHTS


def compare(got, expected, rtol=2e-4):
    check(got, expected, rtol, rtol * max(float(np.abs(y).max(initial=1)) for y in jax.tree.leaves(expected)))


def compare_or_both_raise(rules, ours, theirs, expected):
    """Compares results; with `backward` alone JAX may not know the axis where it calls the rule."""
    try:
        got = ours()
    except NameError as error:
        assert rules == "backward" and "unbound axis name" in str(error)
        with pytest.raises((NameError, ValueError)):  # 0.12 raises ValueError for a psum
            theirs()
        return
    compare(got, expected())


@row("E1", "E1c", "D4")
@cells(
    "collective, rules, name, context",
    [
        ("psum", "backward", "vmap", "jit"),
        ("psum", "generated", "grad of vmap", "checkpoint"),
        ("psum", "jvp", "jvp of jvp of vmap", "scan"),
        ("pmean", "both", "jvp of vmap", "eager"),  # once gave the first element's tangent for all
        ("pmean", "backward", "grad of grad of vmap", "jit"),
        ("ppermute", "jvp", "vmap of grad", "scan"),
        ("ppermute", "generated", "vmap of jvp", "cond"),
        ("axis_index", "backward", "grad of vmap of grad", "vmap"),
        ("axis_index", "both", "vmap", "cond"),
        ("all_gather", "both", "grad of grad of vmap", "checkpoint"),
        ("all_gather", "jvp", "jvp of vmap", "vmap"),
        ("psum of a part", "generated", "grad of vmap of grad", "eager"),
        ("psum of a part", "backward", "grad of vmap", "scan"),
        *[
            pytest.param(collective, "generated", name, "scan", marks=slow)
            for collective in COLLECTIVES
            for name in REVERSE + FORWARD
        ],
    ],
)
def test_collectives_over_a_vmapped_axis(collective, rules, name, context):
    """A scan runs two steps, and a vmap inside has no name."""
    c, (reverse, forward) = COLLECTIVES[collective], FACTORS[rules]
    factor = forward if name in FORWARD else reverse
    compare_or_both_raise(
        rules,
        lambda: jax.jit(derived(name, CONTEXTS[context](function_of(c, rules))))(*ARGS),
        lambda: jax.jit(derived(name, CONTEXTS[context](hand_written(c, rules))))(*ARGS),
        lambda: jax.jit(derived(name, reference(c, factor)))(*ARGS),
    )


@row("E1", "E1c", "D4")
@cells(
    "collective, rules, name",
    [
        ("psum", "jvp", "jvp of vmap"),
        ("pmean", "jvp", "grad of vmap"),
        ("ppermute", "backward", "vmap of grad"),
        ("axis_index", "backward", "vmap of grad"),
        ("all_gather", "jvp", "grad of vmap of grad"),
        ("psum of a part", "jvp", "vmap of jvp"),
    ],
    ids=str,
)
def test_collectives_without_jit_as_in_a_hand_written_rule(collective, rules, name):
    """Rules equal a custom_jvp in both modes, and a custom_vjp in vmap(grad): grad(vmap) raises "unbound axis name"."""
    c = COLLECTIVES[collective]
    got, expected = (derived(name, f(c, rules))(*ARGS) for f in (function_of, hand_written))
    compare(got, expected)


@row("E1", "E1c")
@cells(
    "position, rules, collective",
    [
        ("inside", "backward", "psum of a part"),
        ("inside", "jvp", "all_gather"),
        ("outside", "both", "pmean"),
        ("outside", "generated", "ppermute"),
    ],
    ["inside", "outside"],
    FACTORS,
    COLLECTIVES,
)
def test_collectives_under_another_vmap(position, rules, collective):
    """Whose axis has no name, and lies inside or outside the one that has."""
    c, (factor, _) = COLLECTIVES[collective], FACTORS[rules]
    xs = np.stack([XS, XS - 1, 2 * XS, XS**2], 1)

    def vmap(f):
        if position == "outside":
            return jax.vmap(over(f), (1, None, None), 1)
        return over(jax.vmap(f, (1, None, None), 1))

    def gradients(f):
        return jax.jit(derived("grad of vmap", f, vmap))(xs, W, WEIGHTS)

    compare_or_both_raise(
        rules,
        lambda: gradients(function_of(c, rules)),
        lambda: gradients(hand_written(c, rules)),
        lambda: gradients(reference(c, factor)),
    )


@row("E1", "E1c")
@cells("rules, wrap", [("backward", jax.jit), ("both", jax.jit), ("jvp", eager)], FACTORS, [jax.jit, eager])
def test_collectives_over_two_named_axes(rules, wrap):
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

    def vmap(f):
        inner = jax.vmap(f, (0, None, None), axis_name="i")
        return jax.vmap(inner, (-1, None, 0), -1, axis_name="j")

    def gradients(f):
        return derived("grad of vmap", f, vmap)(xs, W, 1 + np.arange(4, dtype=np.float32))

    compare_or_both_raise(
        rules,
        wrap(lambda: gradients(function_of(c, rules))),
        wrap(lambda: gradients(hand_written(c, rules))),
        lambda: gradients(reference(c, factor)),
    )


@row("E1", "E1c")
@cells(
    "collective, rules",
    [("pmean", "backward"), ("ppermute", "generated"), ("psum", "both"), ("pmean", "jvp")],
    ["pmean", "psum", "ppermute"],
    FACTORS,
)
def test_collectives_in_backward_alone(collective, rules):
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

    for name in ("grad of vmap", "vmap of grad", *["jvp of vmap"] * bool(forward)):
        expected = linear(forward if name in FORWARD else factor)
        compare_or_both_raise(
            rules,
            lambda name=name: jax.jit(derived(name, function_of(c, rules)))(*ARGS),
            lambda name=name: jax.jit(derived(name, hand_written(c, rules)))(*ARGS),
            lambda name=name, expected=expected: derived(name, expected)(*ARGS),
        )


@row("D3", "E1c")
@HIGH_PRIMITIVES
def test_a_saved_intermediate_of_a_collective():
    """A second derivative runs forward again, where JAX does not know the axis; right inside the vmap."""

    @jaxfn.function
    def f(ctx, x, w):
        mean = lax.pmean(x, "i")
        ctx.save_for_backward(mean, w)
        return mean * w

    f.backward(lambda ctx, g: (lax.psum(g, "i") * ctx.saved_tensors[1], ctx.saved_tensors[0] * g))
    with pytest.raises(NameError, match="unbound axis name"):
        derived("grad of grad of vmap", f)(*ARGS)


# --- every output has the batch if any input has it


def parts(rules):
    """A product, and outputs that do not depend on x at all: of w, an integer, a mask, a key, and w marked."""

    def forward(ctx, x, w, key):
        marked = jnp.exp(w)
        ctx.mark_non_differentiable(marked)
        return x * w, jnp.sin(w), jnp.int32(w.size), w > 0, jax.random.split(key)[0], marked

    return cases.with_rules(rules, forward, None, None)


KEY = jax.random.key(3)


@row("E1c")
@cells("rules, context", [("backward", "eager"), ("backward", "jit"), ("generated", "checkpoint")])
def test_an_output_without_a_batch_has_it_where_an_input_has(rules, context):
    """`out_axes=None` for it is JAX's own error; integers, masks, keys and marked outputs are left alone."""
    f = CONTEXTS[context](lambda x, w: parts(rules)(x, w, KEY))
    product, sine, count, mask, key, marked = jax.vmap(f, (1, None), (1, 0, None, None, None, None))(XS, W)
    compare(product, XS * W[:, None], 1e-6)
    compare(sine, np.broadcast_to(np.sin(W), (N, 5)), 1e-6)
    assert count == 5 and mask.shape == marked.shape == (5,) and key.shape == ()
    with pytest.raises(ValueError, match="out_axes is None|got axis spec None but output was batched"):
        jax.vmap(f, (1, None), (1, None, None, None, None, None))(XS, W)


@row("A9", "E1c")
@cells(
    "context, wrap",
    [("eager", eager), ("checkpoint", jax.jit), ("scan", eager)],
    ["eager", "jit", "checkpoint", "scan"],
    [eager, jax.jit],
)
def test_what_backward_alone_closes_over_has_a_batch_too(context, wrap):
    """It counts as an input, so that the gradient of each element is its own."""

    def loss(x, scales):
        def one(scale):
            f = jaxfn.autograd_function(
                lambda ctx, x: ctx.save_for_backward(x) or jnp.sin(x),
                lambda ctx, g: g * scale * jnp.cos(ctx.saved_tensors[0]),
            )
            return CONTEXTS[context](lambda x: f(x))(x)

        return jnp.sum(jax.vmap(one)(scales) * WEIGHTS.T)

    scales = jnp.array([1.0, 3.0, -2.0])
    got = wrap(jax.grad(loss))(XS[:, 0], scales)
    expected = np.cos(XS[:, 0]) * (WEIGHTS @ np.asarray(scales))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
