"""Contract rows C: what backward gets, what it may return, and one test per error."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row


def returning(value, forward=None, **attributes):
    """A Function of (x, w) whose backward returns `value(grad_output)`."""

    class Example(jaxfn.Function):
        @staticmethod
        def backward(ctx, grad_output):
            return value(grad_output)

    Example.forward = staticmethod(forward or (lambda ctx, x, w=None: x * 1.0))
    for name, attribute in attributes.items():
        setattr(Example, name, attribute)
    return Example.apply


def gradient(f, *args, argnums=0):
    return jax.grad(lambda *a: jnp.sum(f(*a)), argnums=argnums)(*args)


X = jnp.arange(6.0).reshape(3, 2)
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@row("C1")
def test_vjp_is_another_name_and_both_are_an_error():
    class Vjp(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def vjp(ctx, g):
            return g * 2

    assert jax.grad(Vjp.apply)(1.0) == 2.0

    class Both(Vjp):
        @staticmethod
        def backward(ctx, g):
            return g * 2

    assert Both.apply(1.0) == 2.0
    with pytest.raises(RuntimeError, match="Both: implementing both 'backward' and 'vjp' for a custom Function"):
        jax.grad(Both.apply)(1.0)


@row("C2")
@pytest.mark.parametrize("value", [lambda g: g, lambda g: (g,), lambda g: (g, None), lambda g: (g, None, None, None)])
@WRAPS
def test_one_value_a_tuple_or_extra_nones(value, wrap):
    np.testing.assert_allclose(wrap(lambda x: gradient(returning(value), x))(X), np.ones((3, 2)))


@row("C3")
@pytest.mark.parametrize(
    ("value", "args", "expected", "got"),
    [
        (lambda g: g, (X, X), "2", 1),
        (lambda g: (g,), (X, 1.0), "2", 1),
        (lambda g: (), (X,), "1 to 2", 0),
        (lambda g: (g, None, g), (X, X), "2", 3),
        (lambda g: (g, g, g), (X,), "1 to 2", 3),
        (lambda g: {"wrong": g, "also": g}, (X, X), "2", 1),
    ],
)
@WRAPS
def test_wrong_number(value, args, expected, got, wrap):
    message = rf"Example\.backward returned an incorrect number of gradients: expected {expected} \(x, w\), got {got}"
    with pytest.raises(RuntimeError, match=message):
        wrap(lambda x: gradient(returning(value), x, *args[1:]))(args[0])


@row("C4")
@WRAPS
def test_none_is_a_symbolic_zero(wrap):
    called = []
    inner = jaxfn.autograd_function(lambda ctx, x: x * 5, lambda ctx, g: called.append(1) or g * 5)
    stop = returning(lambda g: None)
    np.testing.assert_allclose(wrap(lambda x: gradient(lambda x: stop(inner(x)) + 0 * x, x))(X), np.zeros((3, 2)))
    assert not called


@row("C5")
@WRAPS
def test_named_return(wrap):
    f = returning(lambda g: {"w": g * 2}, lambda ctx, x, w: x * w)
    grads = wrap(lambda *a: gradient(f, *a, argnums=(0, 1)))(X, X)
    np.testing.assert_allclose(grads, [np.zeros((3, 2)), np.full((3, 2), 2.0)])
    with pytest.raises(RuntimeError, match=r"gradients for 'wrong', which is not among its parameters.*are x, w\."):
        wrap(lambda x: gradient(returning(lambda g: {"x": g, "wrong": g}), x))(X)


@row("C5")
@WRAPS
def test_a_dict_input_gets_a_dict_gradient(wrap):
    f = jaxfn.autograd_function(
        lambda ctx, params: params["w"] * 2 + params["b"], lambda ctx, g: {"w": g * 2, "b": g.sum(0)}
    )
    grads = wrap(lambda p: gradient(f, p))({"w": X, "b": jnp.ones(2)})
    np.testing.assert_allclose(grads["w"], np.full((3, 2), 2.0))
    np.testing.assert_allclose(grads["b"], [3.0, 3.0])


@row("C5")
def test_named_groups():
    f = jaxfn.autograd_function(lambda ctx, *parts: sum(parts), lambda ctx, g: {"parts": (g, 2 * g)})
    np.testing.assert_allclose(gradient(f, 1.0, 1.0, argnums=(0, 1)), (1, 2))
    with pytest.raises(RuntimeError, match="2 gradients were returned for 3 arguments"):
        gradient(f, 1.0, 1.0, 1.0)


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


TREE = {"a": [X, (X, 3)], "n": Params(X, jnp.ones(2))}


@row("C6")
@pytest.mark.parametrize(
    "value",
    [
        lambda g: {"a": [g, (2 * g, None)], "n": Params(3 * g, g.sum(0))},
        lambda g: {"a": [g, None], "n": None},
        lambda g: {"a": [None, (2 * g, None)], "n": Params(None, g.sum(0))},
        lambda g: {"a": None, "n": Params(3 * g, None)},
        lambda g: None,
    ],
)
def test_pytree_gradients(value):
    f = jaxfn.autograd_function(lambda ctx, tree, x: x * 1.0, lambda ctx, g: (value(g), g))
    leaves = jax.grad(lambda a, b, c, d: f({"a": [a, (b, 3)], "n": Params(c, d)}, a).sum(), argnums=(0, 1, 2, 3))
    got = leaves(X, X, X, jnp.ones(2))
    wanted = value(np.ones((3, 2)))
    parts = [[], []] if wanted is None else [wanted["a"], wanted["n"]]
    a, b = (parts[0][0], (parts[0][1] or (None,))[0]) if parts[0] else (None, None)
    c, d = parts[1] or (None, None)
    a = 1.0 + (0 if a is None else a)
    for ours, expected, shape in zip(got, (a, b, c, d), [(3, 2)] * 3 + [(2,)], strict=True):
        np.testing.assert_allclose(ours, np.broadcast_to(0 if expected is None else expected, shape))


@row("C6")
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda g: {"a": [g, (g, None)]}, "nothing was returned for ['n'].w"),
        (lambda g: {"a": [g], "n": None}, "nothing was returned for ['a'][1][0]"),
        (lambda g: {"a": g, "n": None}, "one value was returned at ['a'], where several leaves belong"),
        (lambda g: {"a": None, "n": None, "more": g}, "there is nothing at ['more']"),
        (lambda g: [g], "nothing was returned for ['a'][0]"),
    ],
)
@WRAPS
def test_wrong_structure(value, problem, wrap):
    f = jaxfn.autograd_function(lambda ctx, tree, x: tree["a"][0] * 1.0, lambda ctx, g: (value(g), None))
    with pytest.raises(RuntimeError, match="input 0 \\('tree'\\) that does not have that input's structure") as error:
        wrap(lambda x: gradient(lambda x: f(TREE | {"a": [x, (x, 3)]}, 1.0), x))(X)
    assert problem in str(error.value)


@row("C6")
def test_a_single_namedtuple_input():
    f = jaxfn.autograd_function(lambda ctx, p: p.w * p.b, lambda ctx, g: Params(g * 2, g.sum(0)))
    grads = gradient(f, Params(X, jnp.ones(2)))
    np.testing.assert_allclose(grads.b, [3, 3])
    per_input = jaxfn.autograd_function(lambda ctx, w, b: w * b, lambda ctx, g: Params(g * 2, g.sum(0)))
    np.testing.assert_allclose(gradient(per_input, X, jnp.ones(2)), np.full((3, 2), 2.0))


@row("C7")
@pytest.mark.parametrize(("grad_shape", "shape"), [((3, 2), (2,)), ((3, 2), (1, 2)), ((4, 3, 2), (3, 1)), ((3, 2), ())])
@WRAPS
def test_broadcast_gradients_are_summed(grad_shape, shape, wrap):
    values = np.arange(np.prod(grad_shape), dtype=np.float32).reshape(grad_shape)
    f = returning(lambda g: values)
    got = wrap(lambda x: gradient(f, x))(jnp.ones(shape))
    axes = tuple(range(len(grad_shape) - len(shape)))
    expected = values.sum(axes)
    for axis, size in enumerate(shape):
        if size == 1:
            expected = expected.sum(axis, keepdims=True)
    np.testing.assert_allclose(got, expected)


@row("C7")
@pytest.mark.parametrize("shape", [(2, 3), (2,), (), (3, 1), (3,), (6,)])
@WRAPS
def test_other_shapes_are_an_error(shape, wrap):
    message = rf"invalid gradient for input 0 \('x'\): got shape \({', '.join(map(str, shape))},?\).*\(3, 2\)"
    with pytest.raises(RuntimeError, match=message):
        wrap(lambda x: gradient(returning(lambda g: jnp.ones(shape)), x))(X)


@row("C7")
def test_zero_size():
    f = returning(lambda g: g * 2)
    assert gradient(f, jnp.ones((0, 3))).shape == (0, 3)
    np.testing.assert_allclose(gradient(returning(lambda g: jnp.ones((0, 3))), jnp.ones(3)), np.zeros(3))


@row("C8")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("grad_dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32])
@WRAPS
def test_gradients_are_cast(dtype, grad_dtype, wrap):
    got = wrap(lambda x: gradient(returning(lambda g: jnp.full((2,), 3, grad_dtype)), x))(jnp.ones(2, dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float32), [3, 3])


@row("C8")
@WRAPS
def test_complex_for_real_is_an_error(wrap):
    with pytest.raises(TypeError, match=r"complex gradient \(complex64\) for input 0 \('x'\).*Return its \.real"):
        wrap(lambda x: gradient(returning(lambda g: g * 1j), x))(X)


@row("C9")
@pytest.mark.parametrize("value", [1.0, 0, [X], (X,), "text"], ids=repr)
@WRAPS
def test_python_values_are_an_error(value, wrap):
    with pytest.raises(
        TypeError, match=rf"returned a Python {type(value).__name__} as the gradient of input 0 \('x'\)"
    ):
        wrap(lambda x: gradient(returning(lambda g: (value,)), x))(X)


@row("C10")
@WRAPS
def test_gradient_for_a_static_input(wrap):
    f = returning(lambda g: (g, g), lambda ctx, x, w: x * w)
    with pytest.raises(
        RuntimeError, match=r"different than None for input 1 \('w'\), but that input is the Python value 2"
    ):
        wrap(lambda x: gradient(f, x, 2))(X)


@row("C10")
@WRAPS
def test_gradient_for_an_integer_array_is_ignored(wrap):
    f = returning(lambda g: (g, g), lambda ctx, x, w: x * w)
    for index in (np.full((3, 2), 2), np.ones((3, 2), bool)):
        np.testing.assert_allclose(wrap(lambda x, index=index: gradient(f, x, index))(X), np.ones((3, 2)))


@row("C11")
@pytest.mark.parametrize("materialize", [True, False])
@WRAPS
def test_integer_outputs(materialize, wrap):
    received = []

    @jaxfn.function
    def f(ctx, x):
        ctx.set_materialize_grads(materialize)
        return x * 2, jnp.argmax(x), x > 0, jax.random.key(0)

    @f.backward
    def _(ctx, g, *others):
        received.append(others)
        return g * 2

    np.testing.assert_allclose(wrap(lambda x: gradient(lambda x: f(x)[0], x))(X), np.full((3, 2), 2.0))
    argmax, positive, key = received[0]
    assert key is None
    if materialize:
        assert argmax.dtype == jnp.argmax(X).dtype and argmax.shape == ()
        assert positive.dtype == bool and positive.shape == (3, 2)
    else:
        assert argmax is None and positive is None


@row("C12")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_not_called_for_symbolic_zeros(wrap):
    called = []
    f = jaxfn.autograd_function(lambda ctx, x: (x * 2, x * 3), lambda ctx, *g: called.append(1) or g[0])
    gradient(wrap(lambda x: jax.lax.stop_gradient(f(x)[0]) + x), X)
    jax.grad(lambda x: wrap(f)(x)[0].astype(int).sum().astype(float) + x.sum())(X)
    assert not called


@row("C13")
def test_no_backward():
    class OnlyForward(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    assert OnlyForward.apply(1.0) == jax.jit(OnlyForward.apply)(1.0) == 2.0
    with pytest.raises(NotImplementedError, match="OnlyForward cannot be differentiated"):
        jax.grad(OnlyForward.apply)(1.0)


def once(backward, forward=None):
    class Once(jaxfn.Function):
        @staticmethod
        @jaxfn.once_differentiable
        def backward(ctx, g):
            return backward(ctx, g)

    def default_forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    Once.forward = staticmethod(forward or default_forward)
    return Once.apply


MESSAGE = r"Once\.backward: trying to differentiate twice a function that was marked with @once_differentiable"
TWICE = {
    "grad_grad": lambda f: jax.grad(jax.grad(f)),
    "jit": lambda f: jax.jit(jax.grad(jax.grad(f))),
    "grad_of_jit": lambda f: jax.grad(jax.jit(jax.grad(f))),
    "checkpoint": lambda f: jax.grad(jax.grad(jax.checkpoint(f))),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(jax.grad(f)))(x[None]),
    "scan": lambda f: jax.grad(jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])),
}


@row("C14")
@pytest.mark.parametrize("twice", TWICE)
def test_differentiating_twice_raises(twice):
    x = jnp.float32(2.0)
    by_saved = once(lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)
    by_cotangent = once(lambda ctx, g: 2 * g, lambda ctx, x: 2 * x)
    ignores_all = once(lambda ctx, g: jnp.float32(5.0))
    by_attribute = once(lambda ctx, g: g, lambda ctx, x: setattr(ctx, "kept", [x]) or 2 * x)
    for f in (by_saved, lambda x: by_cotangent(x) ** 2, ignores_all, by_attribute):
        assert jnp.isfinite(jax.jit(jax.grad(f))(x))
        with pytest.raises(RuntimeError, match=MESSAGE):
            TWICE[twice](f)(x)


@row("C14")
def test_does_not_raise_where_nothing_is_differentiated_twice():
    f = once(lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)

    def mixed(x, w):  # differentiated once with respect to x, and by w around it
        return jax.grad(f)(x) * w

    assert jax.grad(mixed, argnums=1)(2.0, 1.0) == 12.0
    linear = once(lambda ctx, g: 2 * g, lambda ctx, x: 2 * x)
    assert jax.grad(jax.grad(linear))(3.0) == 0.0  # g is the constant 1 and nothing was saved


@row("C14")
def test_a_derivative_once_keeps_no_tracers():
    f = once(lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(f)))(jnp.arange(3.0)), [0, 3, 12])


@row("C15")
def test_boxed_grads_call():
    class Boxed(jaxfn.Function):
        boxed_grads_call = True
        clear_saved_tensors_on_access = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x, x * 3

        @staticmethod
        def backward(ctx, grads):
            assert isinstance(grads, list) and len(grads) == 2
            assert ctx.saved_tensors[0] is not None and ctx.saved_tensors[0] is not None
            return 2 * ctx.saved_tensors[0] * grads.pop(0) + 3 * grads.pop(0)

    assert jax.jit(jax.grad(lambda x: sum(Boxed.apply(x))))(5.0) == 13.0


class ComplexSquare(jaxfn.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return 2 * grad_output * jnp.conj(z)


class RealPart(jaxfn.Function):
    @staticmethod
    def forward(ctx, z, scale):
        ctx.save_for_backward(z, scale)
        return (z * scale).real, (z * scale).imag

    @staticmethod
    def backward(ctx, grad_real, grad_imag):
        z, scale = ctx.saved_tensors
        whole = grad_real + 1j * grad_imag
        return whole * scale, (whole * jnp.conj(z)).real


@row("C16")
@WRAPS
@pytest.mark.parametrize("order", [1, 2])
def test_complex(wrap, order):
    z = jnp.array([1 + 2j, -0.5 + 0.3j, 2 - 1j])

    def loss(square, parts):
        def first(z):
            w = square(z)
            re, im = parts(w, jnp.array([1.0, 2.0, 3.0]))
            return (re**2 * im + jnp.abs(w) ** 2).sum()

        if order == 1:
            return first
        return lambda z: (jnp.abs(jax.grad(first)(z)) ** 2).sum()

    ours = wrap(jax.grad(loss(ComplexSquare.apply, RealPart.apply)))(z)
    plain = wrap(jax.grad(loss(lambda z: z * z, lambda z, s: ((z * s).real, (z * s).imag))))(z)
    np.testing.assert_allclose(ours, plain, rtol=1e-4)


@row("C16")
def test_real_gradient_for_a_complex_input():
    f = returning(lambda g: jnp.ones((3, 2)), lambda ctx, x: x.real)
    got = gradient(f, X + 0j)
    assert got.dtype == jnp.complex64
    np.testing.assert_allclose(got, np.ones((3, 2)))


@row("C14")
def test_a_closure_on_ctx():
    f = once(lambda ctx, g: ctx.f(g), lambda ctx, x: setattr(ctx, "f", lambda g: 2 * x * g) or x * x)
    assert jax.grad(f)(3.0) == 6.0
    # What a closure on ctx holds has no derivative either, which is found first.
    with pytest.raises(NotImplementedError, match="inside a closure or an object on ctx"):
        jax.grad(jax.grad(f))(3.0)


@row("C14")
def test_boxed_gradients_that_backward_clears():
    class Once(jaxfn.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @jaxfn.once_differentiable
        def backward(ctx, grads):
            grads.clear()
            return jnp.float32(2)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        jax.grad(lambda c: jax.grad(lambda x: Once.apply(x) * c)(1.0))(2.0)


class Validating:
    def __init__(self, x):
        assert x.ndim == 1
        self.x = x


jax.tree_util.register_pytree_with_keys(
    Validating, lambda v: (((jax.tree_util.GetAttrKey("x"), v.x),), None), lambda _, children: Validating(*children)
)


@row("C6")
def test_pytree_classes_that_check_their_leaves():
    f = jaxfn.autograd_function(lambda ctx, v: v.x * 2, lambda ctx, g: Validating(2 * g))
    np.testing.assert_allclose(jax.grad(lambda x: f(Validating(x)).sum())(jnp.ones(3)), np.full(3, 2.0))


@row("C9")
def test_a_random_key_is_no_gradient():
    f = jaxfn.autograd_function(lambda ctx, x: x * 2, lambda ctx, g: jax.random.key(0))
    with pytest.raises(TypeError, match="returned a random key as the gradient of input 0"):
        jax.grad(f)(1.0)


@row("C3")
def test_a_list_is_said_to_count_as_one():
    f = jaxfn.autograd_function(lambda ctx, x, t: x * t, lambda ctx, g: [g, None])
    with pytest.raises(RuntimeError, match="got a list, which counts as one gradient"):
        jax.grad(f)(1.0, 2.0)


@row("C10")
def test_names_the_value_inside_a_pytree():
    f = jaxfn.autograd_function(lambda ctx, t: t["x"] * 2, lambda ctx, g: {"x": g * 2, "k": g})
    with pytest.raises(RuntimeError, match=r"input 0 \('t'\)\['k'\], but that input is the Python value 7"):
        jax.grad(lambda x: f({"x": x, "k": 7}))(1.0)
