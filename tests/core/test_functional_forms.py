"""Functions without a class, in every spelling: one implementation, the class's rules and errors."""

import functools
import inspect
import pickle
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Square
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


def sine(ctx, x):
    ctx.save_for_backward(x)
    return jnp.sin(x)


def slope(ctx, g):
    return 3 * g * jnp.cos(ctx.saved_tensors[0])  # 3 tells the rule from JAX's derivative


def by_attributes(forward, backward):
    f = jaxfn.function(forward)
    f.backward, f.generate_jvp_rule = backward, True
    return f


def by_decorator(forward, backward):
    f = jaxfn.function(generate_jvp_rule=True)(forward)
    assert f.backward(backward) is backward
    return f


SPELLINGS = {
    "call": lambda *rules: jaxfn.function(*rules, generate_jvp_rule=True),
    "keywords": lambda f, b: jaxfn.autograd_function(forward=f, backward=b, generate_jvp_rule=True),
    "jvp": lambda f, b: jaxfn.function(f, jvp=b),
    "decorator": by_decorator,
    "partial": lambda f, b: functools.partial(jaxfn.function, generate_jvp_rule=True)(f, b),
    "assignment": by_attributes,
}


@row("B1")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rules_and_options_in_every_spelling(spelling):
    f = SPELLINGS[spelling](sine, slope)
    x = jnp.array([0.3, 1.2])
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), 3 * jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(x), 3 * x * jnp.cos(x), rtol=1e-6)
    assert f.generate_jvp_rule is (spelling != "jvp") and f.forward is sine and f.__name__ == "sine"


@row("B1")
def test_separate_style_with_every_rule_in_one_call():
    batched = []

    def vmap(info, in_dims, x):
        batched.append(info.batch_size)
        return 2 * x, in_dims[0]

    def backward(ctx, gradients):
        assert isinstance(gradients, list)
        return ctx.factor * gradients[0]

    f = jaxfn.function(
        lambda x: 2 * x,
        backward,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", 2),
        vmap=vmap,
        boxed_grads_call=True,
        clear_saved_tensors_on_access=True,
        name="double",
    )
    assert jax.vmap(f)(jnp.ones(3)).sum() == 6 and batched == [3] and jax.grad(f)(1.0) == 2
    assert f.boxed_grads_call and f.clear_saved_tensors_on_access and not f.generate_vmap_rule
    assert repr(f) == "<jaxfn function double: backward, vmap>"


MISTAKES = {
    "a number": (lambda f: jaxfn.function(3), TypeError, "a function forward.ctx, .args., got 3"),
    "an array": (lambda f: jaxfn.function(jnp.ones(2)), TypeError, "forward.ctx, .args., got Array"),
    "a Function": (
        lambda f: jaxfn.function(Square),
        TypeError,
        "got Square. A Function is called as it is: F.apply",
    ),
    "its apply": (lambda f: jaxfn.function(Square.apply), TypeError, "got Square.apply. A Function"),
    "a class": (lambda f: jaxfn.function(dict), TypeError, "got dict.*from_torch"),
    "a function": (lambda f: jaxfn.function(f), TypeError, "got sine.*called as it is: F.apply.x., f.x."),
    "R's name": (lambda f: jaxfn.autograd_function(3), TypeError, "got 3"),
    "a rule": (lambda f: jaxfn.function(sine, 3), TypeError, r"sine\.backward is of type int; expected a function"),
    "a keyword": (
        lambda f: jaxfn.function(sine, vmap=3),
        TypeError,
        r"sine\.vmap is of type int; expected a function",
    ),
    "an option": (lambda f: jaxfn.function(sine, generate_jvp=True), TypeError, "generate_jvp"),
    "a registered rule": (lambda f: f.jvp(3), TypeError, r"sine\.jvp is of type int"),
    "no rule": (lambda f: f.backward(None), TypeError, r"sine\.backward is of type NoneType"),
    "an assigned rule": (lambda f: setattr(f, "backward", 3), TypeError, r"sine\.backward is of type int"),
    "a misspelled rule": (lambda f: setattr(f, "backwrad", slope), AttributeError, "no rule or option 'backwrad'"),
    "the class": (lambda f: setattr(f, "Function", Square), AttributeError, "no rule or option 'Function'"),
    "its call": (lambda f: setattr(f, "apply", slope), AttributeError, "no rule or option 'apply'"),
    "defvjp": (lambda f: f.defvjp(sine, slope), AttributeError, "no rule or option 'defvjp'. @sine.backward, .setup"),
}


@row("B1")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_not_accepted_in_silence(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run(jaxfn.function(sine))


@row("B1", "L3")
def test_the_class_and_its_objects_show_what_they_are():
    assert jaxfn.autograd_function is jaxfn.function and isinstance(mul_constant, jaxfn.function)
    names = list(inspect.signature(jaxfn.function).parameters)
    assert names[:6] == ["forward", "backward", "setup_context", "jvp", "vmap", "name"]
    flags = {name for name, value in vars(jaxfn.Function).items() if value is False} - {"_jaxfn_takes_torch_tensors"}
    assert set(names[6:]) == {*flags, "sharding_rule"}
    assert "mul_constant(tensor, constant)" in pydoc.plain(pydoc.render_doc(mul_constant))
    assert "generate_jvp_rule" in pydoc.render_doc(jaxfn.function)
    assert "def mul_constant(ctx, tensor, constant)" in inspect.getsource(mul_constant)
    mul_constant.__doc__ += ""  # as of a function


@row("B5")
def test_autograd_function_by_a_name():
    def forward(ctx, x):
        return x * 2

    double = jaxfn.autograd_function(forward=forward, backward=lambda ctx, grad_output: (1, 2), name="double")
    assert double.__name__ == "double" and repr(double) == "<jaxfn function double: backward>"
    with pytest.raises(RuntimeError, match=r"^double\.backward returned"):
        jax.grad(double)(1.0)


@jax.custom_vjp
def hand_written(x, w):
    return {"product": x * w, "sum": (x + 1j * w, x)}


hand_written.defvjp(
    lambda x, w: (hand_written(x, w), (x, w)),
    lambda saved, g: (
        g["product"] * saved[1] + g["sum"][0] + g["sum"][1],
        g["product"] * saved[0] + 1j * g["sum"][0],
    ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(function, x, times):
    return function(x) * times, x


applied.defvjp(
    lambda function, x, times: (applied(function, x, times), x),
    lambda function, times, x, g: (g[0] * times * jnp.cos(x) + g[1],),
)


@row("B1b")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_function_of_a_custom_vjp_has_its_rule(wrap):
    x, w = jnp.linspace(-1, 1, 3) * (1 + 2j), jnp.array([1j, 2, 3 - 1j])
    losses = [
        lambda f: lambda x, w: sum(jnp.abs(y * (2 - 1j) + y**2).sum() for y in jax.tree.leaves(f(x, w))),
        lambda f: lambda x, w: jnp.abs(jax.vmap(f, (0, None))(x, w[0])["product"] * (2 + 1j)).sum(),
    ]
    for loss in losses:
        ours, theirs = (
            wrap(jax.grad(loss(f), (0, 1)))(x, w) for f in (jaxfn.from_custom_vjp(hand_written), hand_written)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
    f = jaxfn.from_custom_vjp(applied)
    assert jaxfn.check(lambda x: f(jnp.sin, x, 3), np.linspace(-1, 1, 3))
    first = wrap(jax.grad(lambda x: f(jnp.sin, x, 3)[0]))
    np.testing.assert_allclose([first(0.5), jax.grad(first)(0.5)], [3 * np.cos(0.5), -3 * np.sin(0.5)], rtol=1e-6)


@row("B1b")
def test_a_function_of_fwd_and_bwd():
    calls = []
    take = jaxfn.from_custom_vjp(
        lambda x, i: calls.append("f") or x[i],
        lambda x, i: (calls.append("fwd") or x[i], (x.shape, i)),
        lambda saved, g: (jnp.zeros(saved[0]).at[saved[1]].set(g), np.zeros((), jax.dtypes.float0)),
    )
    x = jnp.arange(3.0)
    for i in (1, jnp.int32(1)):
        np.testing.assert_array_equal(jax.grad(take)(x, i), [0, 1, 0])
    assert "f" not in calls and take(x, i=1) == 1 and calls[-1] == "f"
    rounded = jax.custom_vjp(jnp.round)
    with pytest.raises(TypeError, match="takes f, fwd and bwd, or a jax.custom_vjp with both"):
        jaxfn.from_custom_vjp(rounded)
    rounded.defvjp(lambda x: (jnp.round(x.value), None), lambda _, g: (g,), symbolic_zeros=True)
    with pytest.raises(NotImplementedError, match="takes symbolic zeros"):
        jaxfn.from_custom_vjp(rounded)
    number = jaxfn.from_custom_vjp(lambda x: 2 * x["a"], lambda x: (2 * x["a"], None), lambda _, g: ({"a": 2.0},))
    assert float(jax.grad(number)({"a": x[1]})["a"]) == 2
    short = jaxfn.from_custom_vjp(lambda x, w: x * w, lambda x, w: (x * w, w), lambda w, g: (g * w,))
    with pytest.raises(RuntimeError, match=r"expected 2 .*, got 1.*\n.* is at .*test_functional_forms.py"):
        jax.grad(short)(x[0], x[1])
