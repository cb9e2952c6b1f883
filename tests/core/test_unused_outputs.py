"""Outputs of a Function that are not used: JAX drops them, and what only they need, from traced programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import jaxfn
from tests.support.cases import function_of, hand_written_of
from tests.support.marks import EXPERIMENTAL, cells, row

X = jnp.array([0.3, -1.2, 0.7], jnp.float32)


def left(f: Any, used: list[bool], *args: Any) -> str:
    """Returns the program of a function whose outputs are used in part."""
    jaxpr = jax.make_jaxpr(f)(*args)
    return str(partial_eval.dce_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), used)[0])


def value(x: Any) -> Any:
    return jnp.sin(x), jnp.tanh(x)


def pulled(saved: Any, g: Any, h: Any) -> Any:
    return (3 * g + 5 * h) * sum(saved, jnp.ones_like(g))


# What is saved, of the arguments and the outputs.
SAVED: dict[str, Any] = {
    "nothing": lambda args, outputs: (),
    "input": lambda args, outputs: args,
    "first": lambda args, outputs: outputs[:1],
    "second": lambda args, outputs: outputs[1:],
    "intermediate": lambda args, outputs: (jnp.exp(args[0]),),
}
MODES = ["backward", "both", "generated"]


def two(save: str, mode: str = "backward") -> Any:
    """Returns a Function of (sin x, tanh x) with the gradient 3 g + 5 h, times one plus what is saved."""
    return function_of(mode, value, lambda saved, t: (t, 7 * t), pulled, SAVED[save])


def hand_written(save: str) -> Any:
    return hand_written_of(value, pulled, SAVED[save])


WRAPS = {"f": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint, "vmap": jax.vmap}


@row("E1b")
@cells(
    "wrap, save, mode",
    [
        ("f", "nothing", "backward"), ("f", "second", "both"), ("jit", "second", "backward"),
        ("jit", "intermediate", "generated"), ("checkpoint", "input", "both"), ("checkpoint", "second", "generated"),
        ("vmap", "first", "backward"), ("vmap", "intermediate", "both"),
    ],
    WRAPS,
    SAVED,
    MODES,
)  # fmt: skip
def test_an_output_that_is_not_used_is_dropped(wrap, save, mode):
    """Its operations, and those of what is saved, are neither in the jaxpr nor in the compiled program."""
    f = WRAPS[wrap](two(save, mode))
    text = left(f, [True, False], X)
    if not EXPERIMENTAL:  # JAX_CUSTOM_VJP3 has one call_hi_primitive until it is compiled
        assert [text.count(f"= {name}") for name in ("sin", "tanh", "exp")] == [1, 0, 0]
    compiled = jax.jit(lambda x: f(x)[0]).lower(X).compile().as_text()
    assert [f" {name}(" in compiled for name in ("sine", "tanh", "exponential")] == [True, False, False]
    assert "sin" not in left(f, [False, False], X)


@row("D1", "D2", "D3", "E1b")
@cells(
    "order, used, save",
    [(1, 1, "nothing"), (2, 0, "input"), (2, 1, "first"), (3, 0, "second"), (2, 1, "intermediate")],
    [1, 2, 3],
    [0, 1],
    SAVED,
)
def test_derivatives_of_a_program_without_the_output(order, used, save):
    """JAX drops the other output as the scan is traced, before anything differentiates."""

    def derived(f):
        def loss(x):
            body = jax.jit(lambda c, _: (f(c)[used], None))
            return jnp.sum(jax.lax.scan(body, x, None, length=2)[0] ** 2)

        for _ in range(order):
            loss = (lambda loss: lambda x: jnp.sum(jnp.sin(jax.grad(loss)(x))))(loss)
        x = 0.5 * np.asarray(X, np.float64)
        return jax.jit(loss)(x), jax.jit(jax.vmap(loss, 1))(np.stack([2 * x, x], 1))

    with jax.enable_x64(True):  # in float32 the third derivatives differ by their rounding
        for ours, expected in zip(derived(two(save)), derived(hand_written(save)), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-6)


def replayed(f: Any, used: list[bool], *args: Any) -> Any:
    """A function whose outputs that are not used have been dropped from its jaxpr."""
    closed = jax.make_jaxpr(f)(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return lambda *args: jax.core.eval_jaxpr(jaxpr, closed.consts, *args)


@row("D1", "D2", "E1b")
@cells(
    "save, mode",
    [("nothing", "backward"), ("input", "both"), ("first", "generated"), ("second", "both"), ("second", "generated"),
     ("intermediate", "backward")],
    SAVED,
    MODES,
)  # fmt: skip
def test_derivatives_of_a_jaxpr_without_the_output(save, mode):
    for i in (0, 1):
        used = [i == 0, i == 1]
        ours, expected = replayed(two(save, mode), used, X), hand_written(save)

        def second(f):
            return jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x))))(X)

        np.testing.assert_allclose(second(lambda x: ours(x)[0]), second(lambda x: expected(x)[i]), rtol=1e-5)
        if mode == "both":
            (tangent,) = jax.jvp(ours, (X,), (X,))[1]
            np.testing.assert_allclose(tangent, (1, 7)[i] * X)


@row("B7", "D2")
def test_an_output_that_is_dropped_and_saved_only_under_other_flags():
    """forward saves it where w is differentiated too, and so runs again for the outer derivative."""

    @jaxfn.function
    def f(ctx, x, w):
        y, z = x * w, x * x * w
        if ctx.needs_input_grad.w:
            ctx.save_for_backward(x, w, z)
        else:
            ctx.save_for_backward(x, w)
        return y, z

    @f.backward
    def _(ctx, g, h):
        x, w, *z = ctx.saved_tensors
        return g * w + 2 * h * x * w, g * x + h * (z[0] / w if z else x * x) + 0 * x

    dropped = replayed(f, [True, False], jnp.float32(2), jnp.float32(3))
    inner = jax.grad(lambda x, w: dropped(x, w)[0] ** 2)
    assert jax.grad(inner, 1)(2.0, 3.0) == 24.0
    assert jax.grad(jax.jit(inner), 1)(2.0, 3.0) == 24.0


@row("E1b")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saveable", [True, False])
def test_a_policy_does_not_save_an_output_that_is_not_used(saveable, mode):
    policy = jax.checkpoint_policies.everything_saveable if saveable else jax.checkpoint_policies.nothing_saveable

    def residual_bytes(f):
        _, pull = jax.vjp(jax.checkpoint(lambda x: jnp.sum(f(x)[0] * 2.0), policy=policy), jnp.ones(1000))
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))

    ours = residual_bytes(two("first", mode))
    assert ours == residual_bytes(hand_written("first")) == 4000
