"""The compiled program and the saved residuals equal those of a hand-written custom_vjp."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxfn
from tests.support.cases import CASES, loss_of, make_args, residual_bytes, with_attributes
from tests.support.marks import HIGH_PRIMITIVES, cells, row, slow
from tests.support.transformations import BATCH, POLICIES, over_batch, over_steps

BY_NAME = {case.name: case for case in CASES}


def normalized(hlo: str) -> list[str]:
    """HLO text without metadata, and with every name replaced by its order of appearance."""
    hlo = re.sub(r",? ?(metadata|frontend_attributes)=\{[^}]*\}", "", hlo)
    # The module's name and its tables of source files, functions and stack frames.
    hlo = re.sub(r"(?m)^(HloModule .*|FileNames|FunctionNames|FileLocations|StackFrames|\d+ [\"{].*)$", "", hlo)
    order: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda m: order.setdefault(m[0], f"%{len(order)}"), hlo).split()


def train_step(f, num_args):
    def step(args):
        loss, grads = jax.value_and_grad(loss_of(f), argnums=tuple(range(num_args)))(*args)
        return loss, jax.tree.map(lambda x, g: x - 0.1 * g, args, grads)

    return jax.jit(step)


FORWARD_MODE = {
    "with jvp": {"jvp": staticmethod(lambda ctx, *tangents: None)},
    "with generate_jvp_rule": {"generate_jvp_rule": True},
}


@row("D4")
@cells(
    "name, how",
    [
        *((name, "plain") for name in BY_NAME),
        ("dense", "vmap"),
        ("quantize", "vmap"),
        ("linear", "with jvp"),
        ("rotate", "with jvp"),
        ("exp", "with generate_jvp_rule"),
        ("swish", "with generate_jvp_rule"),
    ],
    BY_NAME,
    ["plain", "vmap", *FORWARD_MODE],
)
def test_same_optimized_hlo_as_custom_vjp(name, how):
    """Compares the HLO of a training step. A rule for forward mode adds nothing to reverse mode."""
    case = BY_NAME[name]
    args = make_args(case, BATCH if how == "vmap" else None)
    f, g = with_attributes(case, FORWARD_MODE[how]) if how in FORWARD_MODE else case.apply, case.hand_written
    if how == "vmap":
        f, g = over_batch(case, f), over_batch(case, g)
    ours, hand_written = (train_step(h, len(args)).lower(args).compile().as_text() for h in (f, g))
    assert normalized(ours) == normalized(hand_written)


def test_same_optimized_hlo_for_a_deep_network():
    linear, relu = BY_NAME["linear"], BY_NAME["relu"]

    def network(f, activation):
        def forward(x, layers):
            for w, b in layers:
                x = activation(f(x, w, b))
            return x

        return forward

    layers = [(jnp.full((16, 16), 0.1), jnp.full(16, 0.1))] * 8
    args = (jnp.ones((4, 16)), layers)
    ours = train_step(network(linear.apply, relu.apply), 2).lower(args).compile().as_text()
    hand_written = train_step(network(linear.hand_written, relu.hand_written), 2).lower(args).compile().as_text()
    assert normalized(ours) == normalized(hand_written)


@row("B4", "E1b")
@cells(
    "name, policy, transform",
    [
        ("square", "nothing", "plain"),
        ("exp", None, "scan"),
        ("straight_through", "everything", "jit"),
        ("relu", None, "vmap"),
        ("gated", "by_name", "plain"),
        ("swish", "nothing", "vmap"),
        ("linear", None, "jit"),
        ("linear_no_bias", "everything", "scan"),
        ("mul_constant", "by_name", "scan"),
        ("rotate", "everything", "vmap"),
        ("dense", "by_name", "jit"),
        ("cross_entropy", None, "plain"),
        ("spike", "nothing", "scan"),
        ("quantize", "by_name", "vmap"),
        ("normalize", "nothing", "jit"),
        ("swap", "everything", "plain"),
        *[
            pytest.param(name, policy, transform, marks=slow)
            for name in ("exp", "swish", "quantize")
            for policy in POLICIES
            for transform in ("plain", "jit", "scan")
        ],
    ],
)
def test_saved_bytes_equal_the_custom_vjp(name, policy, transform):
    case = BY_NAME[name]
    args = make_args(case, BATCH if transform in ("vmap", "scan") else None)

    def wrapped(f):
        if policy is not None:
            f = jax.checkpoint(f, policy=POLICIES[policy])
        return {
            "plain": lambda: loss_of(f),
            "jit": lambda: jax.jit(loss_of(f)),
            "vmap": lambda: over_batch(case, loss_of(f)),
            "scan": lambda: over_steps(case, f),
        }[transform]()

    assert residual_bytes(wrapped(case.apply), args) == residual_bytes(wrapped(case.hand_written), args)


def _named(saves):
    """A function with names inside, as a Function and hand-written; `saves` is what is saved for backward."""

    def compute(x):
        inner = checkpoint_name(jnp.tanh(x), "inner")
        return inner, checkpoint_name(jnp.exp(inner), "outer")

    def residual_of(x, inner, outer):
        return {"input": x, "intermediate": inner, "output": outer}[saves]

    def derivative(residual, g):
        inner = {"input": jnp.tanh, "intermediate": lambda v: v, "output": jnp.log}[saves](residual)
        return g * jnp.exp(inner) * (1 - inner * inner)

    @jaxfn.function
    def named(ctx, x):
        inner, outer = compute(x)
        ctx.save_for_backward(residual_of(x, inner, outer))
        return outer

    named.backward(lambda ctx, grad_output: derivative(ctx.saved_tensors[0], grad_output))

    hand_written = jax.custom_vjp(lambda x: compute(x)[1])

    def fwd(x):
        inner, outer = compute(x)
        return outer, residual_of(x, inner, outer)

    hand_written.defvjp(fwd, lambda residual, g: (derivative(residual, g),))
    return named, hand_written


@row("E1b")
@cells(
    "saves, name, after",
    [("input", "inner", jnp.sin), ("intermediate", "outer", jnp.sum), ("output", "outer", jnp.exp)],
    ["input", "intermediate", "output"],
    ["inner", "outer"],
    [jnp.sum, jnp.sin, jnp.exp],
)
@HIGH_PRIMITIVES
def test_a_policy_finds_the_names_of_results_and_none_inside_a_call(saves, name, after):
    """Compares with hand-written rules, whose `fwd` is seen by a policy."""
    ours, hand_written = _named(saves)
    x = jnp.linspace(-1.0, 1.0, 1000)

    def loss(f, *names):  # the input of f is not an argument of the checkpointed function, so saving it would show
        def call(x):
            return after(checkpoint_name(f(checkpoint_name(jnp.sin(x) * 2, "before")), "after")).sum()

        return jax.checkpoint(call, policy=jax.checkpoint_policies.save_only_these_names(*names))

    for names in [(), (name,), ("before",), ("after",), (name, "before", "after")]:
        seen = [n for n in names if n != "inner" or saves == "intermediate"]
        assert residual_bytes(loss(ours, *names), (x,)) == residual_bytes(loss(hand_written, *seen), (x,))
        expected = jax.grad(loss(hand_written, *names))(x)
        np.testing.assert_allclose(jax.grad(loss(ours, *names))(x), expected, rtol=1e-5)


@row("B4")
@pytest.mark.parametrize(("name", "size"), [("relu", 1000), ("straight_through", 0), ("exp", 4000), ("square", 4000)])
def test_only_what_was_saved_is_a_residual(name, size):
    assert residual_bytes(lambda x: BY_NAME[name].apply(x).sum(), (jnp.ones(1000),)) == size
