"""Defects of JAX that jaxfn works around, each in a few lines: a test here fails once JAX has mended one.

Then the workaround that the test names can go, as soon as the oldest supported JAX has it mended too.
"""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad

X = np.float32([0.1, 0.2, 0.3])


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x.value, None), lambda _, g: (2 * g,), symbolic_zeros=True)


@custom_vmap
def sine(x):
    return jnp.sin(x)


@sine.def_vmap
def _(axis_size, in_batched, x):
    return jnp.sin(x), True


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_a_batched_custom_vmap_has_a_second_derivative():
    """Otherwise `_vmap_method._OperationsRule` gives it one."""
    second = jax.vmap(jax.grad(jax.grad(sine)))(X)
    np.testing.assert_allclose(second, -np.sin(X), rtol=1e-5)


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_the_tangents_of_a_custom_vjp_may_be_batched():
    """Otherwise reverse mode goes by `linear_map` where a program is batched before it is differentiated."""
    _, pushed = jax.linearize(doubled, 1.0)
    jax.make_jaxpr(jax.vmap(pushed))(X)


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_a_primitive_may_have_a_separate_linearization():
    """Otherwise `_compat._OwningPrimitive.bind` linearizes, where JAX would trace the JVP rule to a jaxpr first."""
    assert hasattr(ad, "primitive_linearizations")


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_the_cotangent_of_an_output_without_the_batch_is_per_element():
    """Otherwise `_primitives._batch_attach` gives all outputs the batch."""

    @jax.custom_vjp
    def constant(x, c):
        return c * 1.0

    constant.defvjp(lambda x, c: (c * 1.0, None), lambda _, g: (g, None))  # by x, on which the output does not depend
    weights = jnp.arange(1.0, 4.0)
    gradient = jax.grad(lambda x: (jax.vmap(constant, (0, None))(x, 2.0) * weights).sum())(jnp.asarray(X))
    np.testing.assert_allclose(gradient, weights)


@pytest.mark.xfail(strict=True, reason="JAX 0.10.0 to 0.12.0")
def test_the_params_of_an_eqn_are_freed_with_it():
    """Otherwise `_compat._OwningPrimitive` adds an empty jaxpr to the params, with which JAX drops them."""

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
