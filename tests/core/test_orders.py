"""Contract rows D: derivatives of every order, against the numbers that mathematics and torch give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import StraightThrough, on_host
from tests.support.contexts import CONTEXTS, program
from tests.support.marks import EXPERIMENTAL, cells, row


def nth(f, n):
    return program(" of ".join(["grad"] * n))(f)


def saving(forward, saved, slope=lambda g, residual: g * residual):
    """A function of x that saves what `saved` makes of x and y."""

    def saving_forward(ctx, x):
        y = forward(x)
        ctx.save_for_backward(saved(x, y))
        return y

    return jaxfn.autograd_function(saving_forward, lambda ctx, g: slope(g, ctx.saved_tensors[0]))


rounded = saving(jnp.round, lambda x, y: y)
# The rule x² for the function x.
wrong = saving(lambda x: x * 1.0, lambda x, y: x, lambda g, x: g * x**2)


@jaxfn.function
def sine_by_name(ctx, x):
    ctx.save_for_backward(c=jnp.cos(x))
    return jnp.sin(x)


sine_by_name.backward(lambda ctx, g: g * ctx.saved_variables.c)


OF_SINE = [np.cos(0.4), -np.sin(0.4), -np.cos(0.4), np.sin(0.4)]
# A function, where it is differentiated, and its first derivatives there.
DERIVATIVES = {
    "straight through": (lambda x: (StraightThrough.apply(x) - 1) ** 2, 2.3, [2.0, 2.0, 0.0]),
    "saved output": (lambda x: (rounded(x) - 1) ** 2, 2.3, [4.0, 12.0, 28.0]),
    "saved input of a wrong rule": (wrong, 3.0, [9.0, 6.0, 2.0]),
    "saved intermediate": (saving(jnp.sin, lambda x, y: jnp.cos(x)), 0.4, OF_SINE),
    "saved by name": (sine_by_name, 0.4, OF_SINE),
}


@row("D1", "D2", "D3")
@cells(
    "function,around,inside",
    [
        ("straight through", "eager", "eager"),
        ("straight through", "eager", "jit"),
        ("straight through", "vmap", "eager"),
        ("saved output", "eager", "eager"),
        ("saved output", "jit", "eager"),
        ("saved output", "eager", "checkpoint"),
        ("saved output", "eager", "scan"),
        ("saved input of a wrong rule", "eager", "eager"),
        ("saved input of a wrong rule", "eager", "checkpoint"),
        ("saved intermediate", "eager", "jit"),
        ("saved intermediate", "eager", "scan"),
        ("saved intermediate", "vmap", "eager"),
        ("saved by name", "jit", "eager"),
    ],
)
def test_derivatives_of_every_order(function, around, inside):
    f, x, expected = DERIVATIVES[function]
    names = [" of ".join([around, *["grad"] * n, inside]) for n in range(1, len(expected) + 1)]
    np.testing.assert_allclose([program(name)(f)(x) for name in names], expected, rtol=2e-5)


@row("D1")
def test_a_plain_custom_vjp_is_wrong():
    plain = jax.custom_vjp(lambda x: jnp.round(x))
    plain.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    assert jax.grad(jax.grad(lambda x: (plain(x) - 1) ** 2))(2.3) == 0.0


@row("D2")
@pytest.mark.parametrize("same", [False, True])
def test_inputs_that_are_one_object(same):
    """Two inputs that hold one array must not be taken for each other when only one is differentiated."""
    f = jaxfn.autograd_function(
        lambda ctx, x, w: ctx.save_for_backward(x) or x * w, lambda ctx, g: (None, g * ctx.saved_tensors[0] ** 2)
    )
    v = jnp.float32(3.0)
    w = v if same else jnp.float32(3.0)
    inner = jax.grad(f, argnums=1)
    assert jax.grad(inner, argnums=0)(v, w) == 6.0
    assert jax.grad(inner, argnums=1)(v, w) == 0.0


@row("D8")
@cells(
    "context, save",
    [("eager", "needed"), ("eager", "intermediates"), ("jit", "intermediates"), ("checkpoint", "all")],
    ["eager", "jit", "checkpoint"],
    ["all", "needed", "intermediates"],
)
def test_mixed_partials_with_a_guarded_backward(context, save):
    @jaxfn.function
    def multiply(ctx, x, w):
        need_x, need_w = ctx.needs_input_grad if save != "all" else (True, True)
        if save == "intermediates":
            ctx.save_for_backward(x * 1.0 if need_w else None, w * 1.0 if need_x else None)
        else:
            ctx.save_for_backward(x if need_w else None, w if need_x else None)
        return x * w

    @multiply.backward
    def _(ctx, g):
        x, w = ctx.saved_tensors
        return g * w if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None

    loss = CONTEXTS[context](lambda x, w: multiply(x, w) ** 2)
    args = jnp.float32(2.0), jnp.float32(3.0)
    assert jax.grad(jax.grad(loss, 0), 1)(*args) == 24.0
    assert jax.grad(jax.grad(loss, 1), 0)(*args) == 24.0
    assert jax.grad(jax.grad(jax.grad(loss, 0), 1), 1)(*args) == 8.0
    assert jax.grad(jax.grad(jax.grad(loss, 0), 0), 1)(*args) == 12.0
    np.testing.assert_allclose(jax.jacrev(jax.jacrev(loss, (0, 1)), (0, 1))(*args), [[18.0, 24.0], [24.0, 8.0]])


@row("D8")
def test_outputs_that_depend_on_the_flags_raise():
    @jaxfn.function
    def f(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w, x) if ctx.needs_input_grad.w else (x * w,)

    f.backward(lambda ctx, g, *_: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]))
    inner = jax.grad(lambda x, w: f(x, w)[0] ** 2, 0)
    if not EXPERIMENTAL:  # which runs the primal too
        # Eagerly forward receives the flags of both derivatives, so that it returns equal outputs.
        assert jax.grad(inner, 1)(2.0, 3.0) == 24.0
    with pytest.raises(RuntimeError, match="must not depend on ctx.needs_input_grad"):
        jax.grad(jax.jit(inner), 1)(2.0, 3.0)


@row("D9")
@pytest.mark.parametrize(
    ("backward", "second"),
    [
        # d/dx of (2y + 1) with dy/dx by the affine rule: its cotangent is 2.
        (lambda g, y: g + 1 + 0 * y, 3.0),
        # Of (2y * y + 1), which reaches y through the cotangent and through the saved output: its cotangent is 4y.
        (lambda g, y: g * y + 1, 17.0),
    ],
)
def test_backward_runs_once_for_an_output_that_is_used_and_saved(backward, second):
    """The rule is affine, not linear: two calls would add two ones."""
    calls = []

    @jaxfn.function
    def f(ctx, x):
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @f.backward
    def _(ctx, g):
        calls.append(1)
        return backward(g, ctx.saved_tensors[0])

    def square(x):
        y = f(x)
        return y * y

    for order, expected in [(1, backward(4.0, 2.0)), (2, second)]:
        calls.clear()
        assert nth(square, order)(1.0) == expected
        assert len(calls) == order  # one for the inner derivative, one for the outer


@row("E1", "E5")
def test_nothing_differentiates_a_forward_that_cannot_be():
    """Not at second order either: torch's double-backward idiom with an opaque forward."""

    @jaxfn.function
    def opaque(ctx, x):
        ctx.save_for_backward(x)
        return on_host(np.sin, x, x)

    opaque.backward(lambda ctx, g: g * jnp.cos(ctx.saved_tensors[0]))
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        got = [wrap(nth(opaque, n))(jnp.float32(0.3)) for n in (1, 2, 3)]
        np.testing.assert_allclose(got, [np.cos(0.3), -np.sin(0.3), -np.cos(0.3)], rtol=1e-5)
        np.testing.assert_allclose(nth(wrap(opaque), 2)(jnp.float32(0.3)), -np.sin(0.3), rtol=1e-5)
        np.testing.assert_allclose(
            jax.vmap(nth(wrap(opaque), 2))(jnp.full(3, 0.3)), np.full(3, -np.sin(0.3)), rtol=1e-5
        )


@jax.jit
def _sine_that_calls_back(x):
    jax.debug.callback(lambda value: None, x)
    return jnp.sin(x)


def _sine_by_reference(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jnp.sin(x)
    return ref[...]


def _saving(intermediate):
    """cos(x), whose rule is by an intermediate that operations with effects computed."""
    return saving(jnp.cos, lambda x, y: intermediate(x))


@row("D3")
@pytest.mark.parametrize(
    "intermediate",
    [
        _sine_that_calls_back,
        pytest.param(
            _sine_by_reference,
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11),
                reason="JAX 0.10 cannot transpose a write to a reference by a value that has no derivative",
            ),
        ),
    ],
    ids=["callback", "reference"],
)
def test_an_intermediate_with_effects_on_its_way(intermediate):
    twice = jax.grad(jax.grad(_saving(intermediate)))
    np.testing.assert_allclose(twice(0.7), np.cos(0.7), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(twice)(0.7), np.cos(0.7), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(twice)(jnp.full(2, 0.7)), np.full(2, np.cos(0.7)), rtol=1e-5)


@row("D2")
def test_a_closed_over_constant_is_not_the_input():
    anchor = jnp.float32(3)
    f = jaxfn.autograd_function(
        lambda ctx, x: ctx.save_for_backward(anchor) or anchor * x, lambda ctx, g: g * ctx.saved_tensors[0]
    )
    assert jax.grad(f)(anchor) == 3.0
    assert jax.grad(jax.grad(f))(anchor) == 0.0
