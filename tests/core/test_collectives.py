"""Axis names of `jax.vmap`, outputs without a batch, and collectives in `jax.shard_map` over eight devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import stop_gradient
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import lane_cases, row, sampled

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


# --- shard_map


def summed(x):
    return lax.psum(x, "model")


def averaged(x):
    return lax.pmean(x, "model")


def divided_and_summed(x):
    return lax.psum(x / lax.axis_size("model"), "model")


def varying(x):
    return lax.pcast(x, "model", to="varying")


def same(x):
    return x


def region(forward, backward, rules="backward"):
    """A Function of one array that saves nothing; its jvp is linear in the way of forward."""
    methods = {"forward": staticmethod(lambda ctx, x: forward(x)), "backward": staticmethod(lambda ctx, g: backward(g))}
    if rules == "both":
        methods["jvp"] = staticmethod(lambda ctx, t: forward(t))
    return type("Region", (jaxfn.Function,), methods | {"generate_jvp_rule": rules == "generated"}).apply


def region_by_hand(forward, backward, rules="backward"):
    f = jax.custom_vjp(forward)
    f.defvjp(lambda x: (f(x), None), lambda _, g: (backward(g),))
    return f


# Forward and backward of the two regions of Megatron-LM, and by how much the gradients are too large: of the copy that
# of x alone, of the reduction all of them.
COPIES = {
    "typed": ((varying, summed), 1),
    "pmean": ((same, averaged), 1),
    "psum of a part": ((same, divided_and_summed), 1),
    "as it is": ((same, same), 1),
    "as in torch": ((same, summed), None),
}
REDUCTIONS = {
    "as in torch": ((summed, same), 1),
    "pcast": ((summed, varying), 1),
    "pmean": ((summed, averaged), 1),
    "psum of a part": ((summed, divided_and_summed), 1),
    "psum": ((summed, summed), None),
}
X, W1, W2 = (rng.normal(size=size).astype(np.float32) for size in [(4, 4), (4, 16), (16, 4)])
MESHES = {"8": ((8,), ("model",)), "4 by 2": ((4, 2), ("data", "model"))}


def perceptron(copy, reduce):
    """A tensor-parallel perceptron, with a part of x on each row of devices."""
    return lambda x, w1, w2: reduce(jnp.tanh(copy(x) @ w1) @ w2)


def sharded(f, mesh, out="loss", eager=False):
    """The loss of `f` over all devices, or its gradients inside of shard_map."""
    shape, names = MESHES[mesh]
    data = "data" if "data" in names else None
    specs = (P(data), P(None, "model"), P("model"))
    devices = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))

    def loss(*args):
        value = jnp.sum(jnp.cos(f(*args)))
        return lax.psum(value, "data") if data else value

    if out == "loss":
        return jax.shard_map(loss, mesh=devices, in_specs=specs, out_specs=P())
    return jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=devices, in_specs=specs, out_specs=specs)


PLACES = {
    "grad of shard_map": lambda f, mesh: jax.jit(jax.grad(sharded(f, mesh), (0, 1, 2))),
    "shard_map of grad": lambda f, mesh: jax.jit(sharded(f, mesh, "gradients")),
    "eager grad of shard_map": lambda f, mesh: jax.grad(sharded(f, mesh), (0, 1, 2)),
    "eager shard_map of grad": lambda f, mesh: sharded(f, mesh, "gradients"),
}
WITHIN: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda _, x: (None, f(x)), None, x[None])[1][0],
    "vmap": lambda f: lambda x: jax.vmap(f, 1, 1)(x),
}
PLAIN_LOSS = lambda *args: jnp.sum(jnp.cos(perceptron(same, same)(*args)))  # noqa: E731


def expected_gradients(of_x=1.0, of_weights=1.0):
    got = jax.grad(PLAIN_LOSS, (0, 1, 2))(X, W1, W2)
    return [factor * g for factor, g in zip((of_x, of_weights, of_weights), got, strict=True)]


def close(got, expected):
    for ours, plain in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-3, atol=2e-4)


@row("E2b")
@sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("copy", [name for name, (_, factor) in COPIES.items() if factor])
@pytest.mark.parametrize("reduction", [name for name, (_, factor) in REDUCTIONS.items() if factor])
@pytest.mark.parametrize("place", PLACES)
def test_collectives_in_a_backward_that_are_right_are_accepted(place, reduction, copy, mesh):
    """`pmean` and the sum of parts of what devices have in common, and `pcast`."""
    f = perceptron(region(*COPIES[copy][0]), region(*REDUCTIONS[reduction][0]))
    close(PLACES[place](f, mesh)(X, W1, W2), expected_gradients())


@row("E2b")
@pytest.mark.parametrize("rules", ["backward", "both", "generated"])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("copy", lane_cases(["pmean", "psum of a part", "typed"], ["pmean"]))
def test_collectives_in_a_backward_that_are_right_in_every_program(copy, within, rules):
    around = WITHIN[within]
    f = perceptron(around(region(*COPIES[copy][0], rules)), around(region(summed, varying)))
    for place in ("grad of shard_map", "shard_map of grad"):
        close(PLACES[place](f, "4 by 2")(X, W1, W2), expected_gradients())


@row("E2b")
@pytest.mark.parametrize("copy", ["pmean", "psum of a part", "typed"])
@pytest.mark.parametrize("mesh", MESHES)
def test_second_derivatives_through_collectives_in_a_backward(mesh, copy):
    f = perceptron(region(*COPIES[copy][0]), region(summed, varying))

    def second(gradient):
        return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in gradient(*args)), (0, 1, 2))

    got = jax.jit(second(jax.grad(sharded(f, mesh), (0, 1, 2))))(X, W1, W2)
    close(got, second(jax.grad(PLAIN_LOSS, (0, 1, 2)))(X, W1, W2))


WRONG = {
    "copy": ((COPIES["as in torch"][0], REDUCTIONS["pcast"][0]), (True, False)),
    "reduction": ((COPIES["typed"][0], REDUCTIONS["psum"][0]), (True, True)),
}
SIZES = {"8": 8, "4 by 2": 2}


@row("E2b")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_counts_more_than_once_is_not_refused_by_a_call(place, wrong, mesh):
    """It gives the number of a hand-written custom_vjp, where JAX accepts one."""
    regions, too_large = WRONG[wrong]
    got = PLACES[place](perceptron(*(region(*r) for r in regions)), mesh)(X, W1, W2)
    size = SIZES[mesh]
    close(got, expected_gradients(*(size if flag else 1 for flag in too_large)))
    if wrong == "copy" and not place.startswith("eager"):
        by_hand = perceptron(*(region_by_hand(*r) for r in regions))
        close(got, PLACES[place](by_hand, mesh)(X, W1, W2))


@row("E2b", "G4")
@pytest.mark.filterwarnings("ignore:input .* is float32")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("wrong", WRONG)
def test_gradcheck_inside_of_shard_map_finds_it_and_says_by_which_factor(wrong, mesh):
    regions, _ = WRONG[wrong]
    f = sharded(perceptron(*(region(*r) for r in regions)), mesh)
    with pytest.raises(jaxfn.GradcheckError, match=rf"a constant factor: {SIZES[mesh]} times") as caught:
        jaxfn.gradcheck(f, (X, W1, W2))
    assert "input 0" in str(caught.value)


@row("E2b")
@pytest.mark.filterwarnings("ignore:input .* is float32")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("copy", [name for name, (_, factor) in COPIES.items() if factor])
def test_gradcheck_inside_of_shard_map_passes_what_is_right(copy, mesh):
    f = sharded(perceptron(region(*COPIES[copy][0]), region(summed, varying)), mesh)
    assert jaxfn.gradcheck(f, (X, W1, W2))


# --- host callbacks in shard_map


def on_host(fn, x):
    return jax.pure_callback(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def host_sine(cast):
    """sin by a callback, whose result JAX says does not vary over the mesh, cast to what varies, or not."""

    def forward(x):
        y = on_host(np.sin, x)
        return varying(y) if cast else y

    f = jaxfn.autograd_function(
        lambda ctx, x: ctx.save_for_backward(x) or forward(x),
        lambda ctx, g: g * jnp.cos(ctx.saved_tensors[0]),
        name="HostSine",
    )
    by_hand = jax.custom_vjp(forward)
    by_hand.defvjp(lambda x: (by_hand(x), x), lambda x, g: (g * jnp.cos(x),))
    return f, by_hand


def host_loss(f):
    devices = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        return summed(jnp.sum(f(w * x) * (1 + x)))

    return jax.shard_map(loss, mesh=devices, in_specs=(P(), P("model")), out_specs=P())


HOST_ARGS = np.float32(1.3), rng.normal(size=(8, 3)).astype(np.float32)


@row("E2b", "E5")
@pytest.mark.parametrize("cast", [False, True])
def test_a_host_callback_in_shard_map_is_as_by_hand(cast):
    """Right where its result is cast to the axes of its input, as JAX types it as not varying; wrong otherwise."""
    f, by_hand = host_sine(cast)
    got, theirs = (jax.jit(jax.grad(host_loss(g), (0, 1)))(*HOST_ARGS) for g in (f, by_hand))
    close(got, theirs)
    plain = jax.grad(lambda w, x: jnp.sum(jnp.sin(w * x) * (1 + x)), (0, 1))(*HOST_ARGS)
    assert np.allclose(got[0], plain[0], rtol=1e-4) == cast


@row("E2b", "G4")
@pytest.mark.parametrize("cast", [False, True])
def test_gradcheck_inside_of_shard_map_finds_a_callback_that_is_not_cast(cast):
    f, _ = host_sine(cast)
    options = {"dtype": jnp.float32, "surrogate": host_loss(jnp.sin)}
    if cast:
        assert jaxfn.gradcheck(host_loss(f), HOST_ARGS, **options)
    else:
        with pytest.raises(jaxfn.GradcheckError, match="wrong backward of output 0"):
            jaxfn.gradcheck(host_loss(f), HOST_ARGS, **options)


@row("E2b", "E5")
def test_the_example_of_a_host_routine_is_right_in_shard_map(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "kernels"))
    monkeypatch.delitem(sys.modules, "host_routine", raising=False)
    import host_routine

    def loss(sigma, x):
        return jnp.sum(host_routine.voigt(x, sigma, 0.4) * (1 + x))

    devices = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda sigma, x: summed(loss(sigma, x)), mesh=devices, in_specs=(P(), P("model")), out_specs=P()
    )
    args = jnp.float32(0.8), jnp.linspace(-3, 3, 32)
    np.testing.assert_allclose(jax.jit(jax.grad(mapped))(*args), jax.grad(loss)(*args), rtol=1e-4)


@row("E2b", "E5")
def test_the_example_of_lapack_is_right_in_shard_map(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "kernels"))
    monkeypatch.delitem(sys.modules, "lapack", raising=False)
    import lapack

    def loss(solve):
        def of_parts(w, lower, diagonal, upper, b):
            return jnp.sum(jnp.sin(jax.vmap(solve)(lower, w * diagonal, upper, w * b)) * (1 + b))

        return of_parts

    lower, upper = (rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2))
    diagonal, b = 4 + lower**2, rng.normal(size=(8, 4, 2)).astype(np.float32)
    devices = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    split = P("model")
    mapped = jax.shard_map(
        lambda *args: summed(loss(lapack.TridiagonalSolve.apply)(*args)),
        mesh=devices,
        in_specs=(P(), split, split, split, split),
        out_specs=P(),
    )
    args = jnp.float32(1.3), lower, diagonal, upper, b
    got, expected = jax.jit(jax.grad(mapped, (0, 4)))(*args), jax.grad(loss(lapack.plain), (0, 4))(*args)
    compare(got, expected, 1e-3)
