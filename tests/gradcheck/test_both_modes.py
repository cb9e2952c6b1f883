"""G1, G6 with D4, D5 and H1: gradcheck of Functions with forward mode, and of torch's own."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.libraries import Jax, make_function
from tests.support.marks import cells, row

Product = make_function(
    Jax,
    lambda x, y: x * jnp.sin(y),
    lambda g, x, y: (g * jnp.sin(y), g * x * jnp.cos(y)),
    jvp=lambda x_t, y_t, x, y: x_t * jnp.sin(y) + y_t * x * jnp.cos(y),
)


class WrongJvp(Product):
    @staticmethod
    def jvp(ctx, x_t, y_t):
        return Product.jvp(ctx, x_t, -y_t)


class Generated(Product):
    generate_jvp_rule = True
    jvp = jaxfn.Function.jvp


class WrongSecond(Product):
    @staticmethod
    def backward(ctx, grad_output):
        x, y = ctx.saved_tensors
        return grad_output * jnp.sin(y), grad_output * x * jnp.cos(jnp.round(y * 1e6) / 1e6)


INPUTS = np.array([0.5, -1.0, 2.0]), np.array([0.3, 1.0, -0.7])


@row("G1", "D4", "D5", "G6")
@cells("function", [Product], [Product, Generated])
def test_forward_mode_of_a_right_function(function):
    options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert jaxfn.gradcheck(function.apply, INPUTS, **options)
    assert jaxfn.gradgradcheck(function.apply, INPUTS, check_fwd_over_rev=True)


@row("G1", "D4")
def test_a_wrong_jvp_is_found_in_forward_mode_only():
    assert jaxfn.gradcheck(WrongJvp.apply, INPUTS)
    with pytest.raises(jaxfn.GradcheckError, match="forward-mode derivative"):
        jaxfn.gradcheck(WrongJvp.apply, INPUTS, check_forward_ad=True)


@row("G6", "D7")
def test_a_wrong_second_derivative_is_found_in_both_modes():
    assert jaxfn.gradcheck(WrongSecond.apply, INPUTS, atol=1e-4)
    for options in ({}, {"check_fwd_over_rev": True, "check_rev_over_rev": False}):
        assert not jaxfn.gradgradcheck(WrongSecond.apply, INPUTS, raise_exception=False, **options)


@row("H1", "G1")
def test_the_functions_of_torchs_notes():
    pytest.importorskip("torch")
    from tests.support.torch_functions import CASES

    inputs = [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(4, 3), (2, 3), 2])]
    linear = jaxfn.from_torch(CASES["LinearFunction"].function)
    assert jaxfn.gradcheck(linear.apply, inputs)
    assert jaxfn.gradcheck(linear.apply, (*inputs[:2], None))
    assert jaxfn.gradgradcheck(linear.apply, inputs)
    assert jaxfn.gradcheck(jaxfn.from_torch(CASES["mul_constant"].function).apply, (inputs[0], 2.5))
