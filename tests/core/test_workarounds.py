"""Defects of JAX that jaxfn works around, each in a few lines: a test here fails once JAX has mended one.

Then the workaround that the test names can go, as soon as the oldest supported JAX has it mended too. And what remains
of jaxfn where JAX's internals, tried once at import, are gone.
"""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import jaxfn
from jaxfn import _intermediates, _jaxpr, _traces

X = np.float32([0.1, 0.2, 0.3])


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_each_pattern_of_perturbed_inputs_has_its_residual_tree():
    """Otherwise the residuals in `_rule` are a flat list, and a shape says to which derivative they belong."""

    @jax.custom_vjp
    def product(x, w):
        return x * w

    def fwd(x, w):
        return x.value * w.value, {"x" if x.perturbed else "w": (x.value, w.value)}

    def bwd(residuals, g):
        ((kind, (x, w)),) = residuals.items()
        return (g * w, None) if kind == "x" else (None, g * x)

    product.defvjp(fwd, bwd, symbolic_zeros=True)
    args = np.float32(2), np.float32(3)
    staged = jax.core.jaxpr_as_fun(jax.make_jaxpr(product)(*args))
    _, by_x = jax.vjp(lambda x: staged(x, args[1])[0], args[0])
    _, by_w = jax.vjp(lambda w: staged(args[0], w)[0], args[1])
    assert by_w(np.float32(1)) == (2,)
    assert by_x(np.float32(1)) == (3,)  # 0, in silence


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_the_cotangent_of_an_output_without_the_batch_is_per_element():
    """Otherwise `_primitives.tie` gives all outputs the batch."""

    @jax.custom_vjp
    def constant(x, c):
        return c * 1.0

    constant.defvjp(lambda x, c: (c * 1.0, None), lambda _, g: (g, None))  # by x, on which the output does not depend
    weights = jnp.arange(1.0, 4.0)
    gradient = jax.grad(lambda x: (jax.vmap(constant, (0, None))(x, 2.0) * weights).sum())(jnp.asarray(X))
    np.testing.assert_allclose(gradient, weights)


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_the_params_of_an_eqn_are_freed_with_it():
    """Otherwise `_compat.new_owner` adds an empty jaxpr to the params, with which JAX drops them."""

    class Param:
        """Hashed by its identity."""

    primitive = Primitive("identity")
    primitive.def_impl(lambda x, param: x)
    primitive.def_abstract_eval(lambda x, param: x)
    param = Param()
    watched = weakref.ref(param)
    jax.make_jaxpr(partial(primitive.bind, param=param))(1.0)
    del param
    gc.collect()
    assert watched() is None


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_an_ordered_effect_in_the_condition_of_a_mapped_loop_leaves_elements_that_have_ended():
    """Otherwise `_observe.log_effects` raises where a Function logs there in order."""

    def halved(x):
        def condition(x):
            jax.debug.callback(lambda _: None, x, ordered=True)
            return x > 1

        return jax.lax.while_loop(condition, lambda x: x / 2, x)

    np.testing.assert_allclose(jax.vmap(halved)(jnp.array([1.0, 3.0, 8.0])), [1.0, 0.75, 1.0])


# --- without internals of JAX


@pytest.fixture
def unreadable_eqns(monkeypatch):
    """A JAX in which no eqn can be read before its jaxpr is finished."""
    for module in (_traces, _intermediates):
        monkeypatch.setattr(module, "CAN_READ_EQNS", False)
    for module in (_traces, _jaxpr):
        monkeypatch.setattr(module, "producer", lambda array: None)
        monkeypatch.setattr(module, "variable", lambda array: None)


def rounded(alias):
    """A rounding with the rule g * y, which saves `alias` of its output y."""

    @jaxfn.function
    def f(ctx, x, w):
        y = jnp.round(x) * w
        ctx.save_for_backward(alias(y))
        return y

    f.backward(lambda ctx, g: (g * ctx.saved_tensors[0], None))
    return f


def second_derivative(f, x):
    return jax.grad(lambda x: jax.grad(lambda x: (f(x, 1.0) - 1) ** 2)(x))(x)


def test_without_readable_eqns_all_outputs_are_tied(unreadable_eqns):
    f, weights = rounded(lambda y: y), jnp.arange(1.0, 4.0)
    assert " tie " in str(jax.make_jaxpr(f)(1.0, 2.0))
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jax.vmap(f, (None, 0))(x, w) * weights)))(2.3, jnp.asarray(X))
    np.testing.assert_allclose(gradient, 2 * np.sum(X * weights), rtol=1e-5)
    second = jax.vmap(partial(second_derivative, f))
    for derivative in (second, jax.jit(second)):
        np.testing.assert_allclose(derivative(jnp.array([2.3, 3.2])), [12, 30])  # y (2 y + 2 (y - 1))


def test_without_readable_eqns_the_derivative_of_a_saved_alias_of_an_output_raises(request):
    """It cannot be distinguished from an intermediate, with whose derivative the result would be 8."""
    f = rounded(jax.lax.stop_gradient)
    derivatives = second_derivative, jax.jit(second_derivative, static_argnums=0)
    assert [derivative(f, 2.3) for derivative in derivatives] == [12, 12]
    request.getfixturevalue("unreadable_eqns")
    for derivative in derivatives:
        jax.clear_caches()
        with pytest.raises(NotImplementedError, match="f saved an array that is neither an input nor an output"):
            derivative(f, 2.3)
    assert jax.grad(f)(2.3, 1.0) == 2
