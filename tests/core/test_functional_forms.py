"""The `function` decorator and `autograd_function`: one implementation, the class's rules and errors."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row


@jaxfn.function
def mul_constant(ctx, tensor, constant):
    """Multiplies."""
    ctx.constant = constant
    return tensor * constant


@mul_constant.backward
def _(ctx, grad_output):
    return grad_output * ctx.constant, None


@jaxfn.function
def separate(x, scale=2.0):
    return x * scale


@separate.setup_context
def _(ctx, inputs, output):
    _, ctx.scale = inputs


@separate.backward
def separate_backward(ctx, grad_output):
    return {"x": grad_output * ctx.scale}


@row("B1")
def test_decorated_function_preserves_its_identity():
    assert mul_constant.__name__ == "mul_constant"
    assert mul_constant.__doc__ == "Multiplies."
    assert str(inspect.signature(mul_constant)) == "(tensor, constant)"
    assert str(inspect.signature(separate.apply)) == str(inspect.signature(separate)) == "(x, scale=2.0)"
    assert pickle.loads(pickle.dumps(mul_constant)) is mul_constant
    assert issubclass(mul_constant.Function, jaxfn.Function)
    assert repr(mul_constant) == "<jaxfn function mul_constant: backward>"
    assert separate_backward(type("Ctx", (), {"scale": 3}), 2) == {"x": 6}  # registering returns the rule unchanged


@row("B1")
def test_decorated_function_is_a_function_anywhere():
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(mul_constant)(x, 2.0), 2 * x)
    np.testing.assert_allclose(jax.jit(mul_constant, static_argnames="constant")(x, constant=2.0), 2 * x)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: mul_constant(x, constant=4)))(x), np.full(3, 4.0))
    np.testing.assert_allclose(jax.grad(separate)(1.0), 2.0)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: separate(x, scale=5.0)))(1.0), 5.0)
    np.testing.assert_allclose(list(map(mul_constant, [1.0, 2.0], [3, 4])), [3.0, 8.0])


@row("B1")
def test_decorated_method():
    class Layer:
        weight = 3.0

        @jaxfn.function
        def scale(ctx, self, x):
            ctx.weight = self.weight
            return x * self.weight

        scale.backward(lambda ctx, g: (None, g * ctx.weight))

    assert Layer().scale(2.0) == 6.0
    assert jax.grad(Layer().scale)(2.0) == 3.0


@row("B2")
def test_setup_context_registered_after_a_call():
    @jaxfn.function
    def f(ctx_or_x):
        return ctx_or_x

    with pytest.raises(TypeError, match=r"f\.apply\(\)"):
        f(1.0)
    f.setup_context(lambda ctx, inputs, output: None)
    f.backward(lambda ctx, g: 7 * g)
    assert f(1.0) == 1.0
    assert jax.grad(f)(1.0) == 7.0


@row("B5")
def test_autograd_function_by_a_name():
    def forward(ctx, x):
        return x * 2

    double = jaxfn.autograd_function(forward=forward, backward=lambda ctx, grad_output: (1, 2), name="double")
    assert double.__name__ == "double" and repr(double) == "<jaxfn function double: backward>"
    with pytest.raises(RuntimeError, match=r"^double\.backward returned"):
        jax.grad(double)(1.0)
