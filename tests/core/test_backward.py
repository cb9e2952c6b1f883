"""Contract rows C: what backward gets, what it may return, and one test for each error."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import ComplexSquare, in_library
from tests.support.contexts import CONTEXTS
from tests.support.either_library import (
    G,
    Torch,
    X,
    assert_gradients,
    cotangent,
    described,
    function_in,
    gradients,
    in_each_library,
    raises,
)
from tests.support.marks import cells, row

EITHER = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
ARRAY, ZEROS = jnp.arange(6.0).reshape(3, 2), np.zeros_like(X)


def returning(lib, value):
    """A Function of (x, w) whose backward returns `value(grad_output)`."""
    return function_in(lib, lambda ctx, x, w=None: x * 2, lambda ctx, grad_output: value(grad_output))


def gradient(f, *args, argnums=0):
    return jax.grad(lambda *a: jnp.sum(f(*a)), argnums=argnums)(*args)


# ---------------------------------------------------------------------------------------------------------------------
# How many gradients, and of which inputs


@row("C1")
@in_each_library
@pytest.mark.parametrize("value", [lambda g: 3 * g, lambda g: (3 * g,)], ids=["value", "tuple"])
def test_vjp_is_another_name_and_both_are_an_error(lib, value):
    def forward(ctx, x):
        return lib.m.round(x)

    def rule(ctx, g):
        return value(g)

    assert_gradients(lib, function_in(lib, forward, vjp=staticmethod(rule)), [X], 3 * G)
    both = function_in(lib, forward, rule, "Both", vjp=staticmethod(rule))
    lib.outputs(both, [X])
    with raises(lib, RuntimeError, r"(?i)implementing both 'backward' and 'vjp' for a custom Function", "Both: "):
        gradients(lib, both, X)


@row("C2", "C4")
@in_each_library
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda g: 3 * g, [3 * G, ZEROS]),
        (lambda g: (3 * g,), [3 * G, ZEROS]),
        (lambda g: (3 * g, None), [3 * G, ZEROS]),
        (lambda g: (3 * g, None, None, None), [3 * G, ZEROS]),
        (lambda g: (None, 3 * g), [ZEROS, 3 * G]),
        (lambda g: (5 * g, 3 * g, None), [5 * G, 3 * G]),
        (lambda g: None, [ZEROS, ZEROS]),
    ],
    ids=["value", "tuple", "and None", "Nones too many", "None first", "both", "None alone"],
)
def test_what_backward_may_return(lib, value, expected):
    apply = returning(lib, value)
    used = 1 if expected[1] is ZEROS else 2
    assert_gradients(lib, apply, [X] * used, *expected[:used])
    if used == 2:  # each of the two where the other one is not differentiated
        constant = lib.array(X)
        assert_gradients(lib, lambda x: apply(x, constant), [X], expected[0])
        assert_gradients(lib, lambda w: apply(constant, w), [X], expected[1])


@row("C3", "C10")
@in_each_library
@pytest.mark.parametrize(
    ("returned", "num_inputs"),
    [(0, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 2), (0, 3), (2, 3), (3, 3), (4, 3)],
)
def test_as_many_gradients_as_inputs_that_were_passed(lib, returned, num_inputs):
    def backward(ctx, grad_output):
        return tuple((i + 2) * grad_output for i in range(returned))

    counted = function_in(lib, lambda ctx, x, y=None, z=None: x * 2, backward)

    args = [X, X + 1, X + 2][:num_inputs]
    if returned == num_inputs:
        assert_gradients(lib, counted, args, *((i + 2) * G for i in range(num_inputs)))
    else:
        with raises(lib, RuntimeError, "returned an incorrect number of gradients|gradient different than None"):
            gradients(lib, counted, *args)


@row("C3")
def test_separate_style_needs_no_gradients_of_defaults_either():
    """torch asks for them."""
    f = jaxfn.autograd_function(
        lambda x, y=None, z=None: x * 2, lambda ctx, g: (3 * g, 5 * g), setup_context=lambda ctx, inputs, output: None
    )
    assert jax.grad(f, argnums=(0, 1))(1.0, 2.0) == (3.0, 5.0)
    with pytest.raises(RuntimeError, match="got 2|different than None"):
        jax.grad(f)(1.0)


@row("C3", "C5")
@pytest.mark.parametrize(
    ("value", "args", "expected", "got"),
    [
        (lambda g: g, (ARRAY, ARRAY), "2", "1"),
        (lambda g: (g,), (ARRAY, 1.0), "2", "1"),
        (lambda g: (), (ARRAY,), "1 to 2", "0"),
        (lambda g: (g, None, g), (ARRAY, ARRAY), "2", "3"),
        (lambda g: (g, g, g), (ARRAY,), "1 to 2", "3"),
        (lambda g: [g, None], (ARRAY, ARRAY), "2", "a list, which counts as one gradient"),
    ],
)
@EITHER
def test_an_incorrect_number_is_said_with_the_parameters(value, args, expected, got, wrap):
    apply = returning(jaxfn, value)
    message = rf"Example\.backward returned an incorrect number of gradients: expected {expected} \(x, w\), got {got}"
    with pytest.raises(RuntimeError, match=message):
        wrap(lambda x: gradient(apply, x, *args[1:]))(args[0])


@row("C4", "C12")
@in_each_library
@pytest.mark.parametrize("materialize", [True, False])
def test_what_precedes_none_gets_zeros(lib, materialize):
    """Or `None` without materializing."""
    received = []

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        return x * 5

    def backward(ctx, g):
        received.append(g is None)
        return g if g is None else g + 1

    inner = function_in(lib, forward, backward)

    stop = returning(lib, lambda g: None)
    assert_gradients(lib, lambda x: stop(inner(x)) + 0 * x, [X], np.ones_like(X) if materialize else ZEROS)
    assert received and set(received) == {not materialize}


@row("C12")
@in_each_library
def test_backward_is_not_called_for_a_result_that_is_not_used(lib):
    def fails(g):
        raise AssertionError("called")

    apply = returning(lib, fails)
    assert_gradients(lib, lambda x: (apply(x), x * 2)[1], [X], 2 * G)


@row("C12")
@pytest.mark.parametrize("context", CONTEXTS)
def test_backward_is_not_called_without_a_path_of_gradients(context):
    called = []
    f = CONTEXTS[context](
        jaxfn.autograd_function(lambda ctx, x: (x * 2, x * 3), lambda ctx, *g: called.append(1) or g[0])
    )
    gradient(lambda x: jax.lax.stop_gradient(f(x)[0]) + x, ARRAY)
    jax.grad(lambda x: f(x)[0].astype(int).sum().astype(float) + x.sum())(ARRAY)
    assert not called


# ---------------------------------------------------------------------------------------------------------------------
# Gradients by name, and of pytrees


@row("C5")
@EITHER
def test_gradients_by_name(wrap):
    f = jaxfn.autograd_function(lambda ctx, x, w: x * w, lambda ctx, g: {"w": g * 2})
    grads = wrap(lambda *a: gradient(f, *a, argnums=(0, 1)))(ARRAY, ARRAY)
    np.testing.assert_allclose(grads, [ZEROS, np.full((3, 2), 2.0)])
    for returned, close in ({"x": 1, "wrong": 2}, ""), ({"wrong": 1}, ""), ({"wieght": 1}, " Did you mean 'weight'?"):
        wrong = jaxfn.function(lambda ctx, x, weight: x * weight, lambda ctx, g, returned=returned: returned)
        name = list(returned)[-1]
        text = f"gradients for '{name}', which is not among its parameters.{close} The parameters are x, weight."
        with pytest.raises(RuntimeError, match=re.escape(text)):
            wrap(lambda x, wrong=wrong: gradient(wrong, x, x))(ARRAY)
    only = jaxfn.function(lambda ctx, x: 2 * x, lambda ctx, g: {"z": g})
    with pytest.raises(RuntimeError, match="gradients for 'z', which is not among its parameters"):
        wrap(lambda x: gradient(only, x))(ARRAY)


@row("C5")
def test_gradients_of_variadic_parameters_by_name():
    f = jaxfn.autograd_function(lambda ctx, *parts: sum(parts), lambda ctx, g: {"parts": (g, 2 * g)})
    np.testing.assert_allclose(gradient(f, 1.0, 1.0, argnums=(0, 1)), (1, 2))
    with pytest.raises(RuntimeError, match="2 gradients were returned for 3 arguments"):
        gradient(f, 1.0, 1.0, 1.0)


@row("C5")
@EITHER
def test_a_dict_input_gets_a_dict_gradient(wrap):
    f = jaxfn.autograd_function(
        lambda ctx, params: params["w"] * 2 + params["b"], lambda ctx, g: {"w": g * 2, "b": g.sum(0)}
    )
    grads = wrap(lambda p: gradient(f, p))({"w": ARRAY, "b": jnp.ones(2)})
    np.testing.assert_allclose(grads["w"], np.full((3, 2), 2.0))
    np.testing.assert_allclose(grads["b"], [3.0, 3.0])


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


ONES, NOTHING = np.ones((3, 2)), np.zeros((3, 2))


@row("C6")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda g: {"a": [g, (2 * g, None)], "n": Params(3 * g, g.sum(0))}, (ONES, 2 * ONES, 3 * ONES, [3, 3])),
        (lambda g: {"a": [g, None], "n": None}, (ONES, NOTHING, NOTHING, [0, 0])),
        (lambda g: {"a": [None, (2 * g, None)], "n": Params(None, g.sum(0))}, (NOTHING, 2 * ONES, NOTHING, [3, 3])),
        (lambda g: {"a": None, "n": Params(3 * g, None)}, (NOTHING, NOTHING, 3 * ONES, [0, 0])),
        (lambda g: None, (NOTHING, NOTHING, NOTHING, [0, 0])),
    ],
)
def test_none_may_replace_any_subtree(value, expected):
    f = jaxfn.autograd_function(lambda ctx, tree: tree["a"][0] * 1.0, lambda ctx, g: (value(g),))
    of_leaves = jax.grad(lambda a, b, c, d: f({"a": [a, (b, 3)], "n": Params(c, d)}).sum(), argnums=(0, 1, 2, 3))
    for got, want in zip(of_leaves(ARRAY, ARRAY, ARRAY, jnp.ones(2)), expected, strict=True):
        np.testing.assert_allclose(got, want)


TREE = {"a": [ARRAY, (ARRAY, 3)], "n": Params(ARRAY, jnp.ones(2))}


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
@EITHER
def test_wrong_structure(value, problem, wrap):
    f = jaxfn.autograd_function(lambda ctx, tree, x: tree["a"][0] * 1.0, lambda ctx, g: (value(g), None))
    with pytest.raises(RuntimeError, match="input 0 \\('tree'\\) that does not have that input's structure") as error:
        wrap(lambda x: gradient(lambda x: f(TREE | {"a": [x, (x, 3)]}, 1.0), x))(ARRAY)
    assert problem in str(error.value)


@row("C6")
def test_a_namedtuple_is_the_gradient_of_one_input_or_of_several():
    f = jaxfn.autograd_function(lambda ctx, p: p.w * p.b, lambda ctx, g: Params(g * 2, g.sum(0)))
    grads = gradient(f, Params(ARRAY, jnp.ones(2)))
    np.testing.assert_allclose(grads.b, [3, 3])
    per_input = jaxfn.autograd_function(lambda ctx, w, b: w * b, lambda ctx, g: Params(g * 2, g.sum(0)))
    np.testing.assert_allclose(gradient(per_input, ARRAY, jnp.ones(2)), np.full((3, 2), 2.0))


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


# ---------------------------------------------------------------------------------------------------------------------
# Shapes, dtypes, and what is not a gradient

SHAPES = [(), (1,), (2,), (1, 2), (2, 1), (3, 2), (4, 3, 2), (0,), (2, 0)]


def summed(values, shape):
    """The array summed to a shape that broadcasts to its own."""
    values = values.sum(tuple(range(values.ndim - len(shape))))
    return values.sum(tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True).reshape(shape)


def broadcasts(shape, to):
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


@row("C7")
@in_each_library
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_is_summed_to_the_shape_that_broadcasts_to_its_own_or_raises(lib, shape):
    for got in SHAPES:
        values = np.cos(np.arange(float(np.prod(got)))).reshape(got)
        apply = returning(lib, lambda g, values=values: lib.array(values))
        if broadcasts(shape, got):
            assert_gradients(lib, apply, [np.ones(shape)], summed(values, shape))
        else:
            with raises(lib, RuntimeError, "returned an invalid gradient", f"input 0 ('x'): got shape {got}"):
                gradients(lib, apply, np.ones(shape))


@row("C7")
@in_each_library
@pytest.mark.parametrize("shape", [(2,), (3, 1), ()], ids=str)
def test_the_derivative_of_a_gradient_that_was_summed(lib, shape):
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    def backward(ctx, grad_output):
        x, gain = ctx.saved_tensors
        return grad_output * gain, grad_output * x

    scale = function_in(lib, forward, backward)

    gain = 0.5 + np.arange(float(np.prod(shape))).reshape(shape)
    assert_gradients(lib, scale, [X, gain], G * gain, summed(G * X, shape))
    of_gain = cotangent(shape, 1)  # the gradients of the two gradients are G and this
    assert_gradients(lib, scale, [X, gain], G * of_gain, summed(G * G, shape), order=2)


INEXACT = ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = [*INEXACT, "bfloat16", "int32", "int8", "bool"]


@row("C8")
@in_each_library
@cells(
    "dtype, gradient_dtype",
    [
        ("float16", "float64"), ("float32", "bfloat16"), ("float64", "float32"),
        ("float32", "int32"), ("float16", "int8"), ("complex64", "bool"), ("complex64", "complex128"),
        ("complex128", "float32"), ("float32", "complex64"), ("float64", "complex128"), ("float16", "complex64"),
    ],
    INEXACT,
    DTYPES,
)  # fmt: skip
def test_a_gradient_is_cast_but_not_from_complex_to_real(lib, dtype, gradient_dtype):
    is_complex, of_complex = dtype.startswith("complex"), gradient_dtype.startswith("complex")
    if lib is Torch and is_complex and gradient_dtype in ("int32", "int8", "bool"):
        return  # an assertion of torch's own fails
    values = lib.m.asarray(lib.array(X > 0), dtype=getattr(lib.m, gradient_dtype))
    apply, x = returning(lib, lambda g: values), X.astype(jnp.dtype(dtype))
    if of_complex and not is_complex:
        with raises(lib, TypeError, "complex", f"complex gradient ({gradient_dtype}) for input 0 ('x')"):
            gradients(lib, apply, x)
    else:
        (got,) = lib.gradients(apply, [x])
        assert got.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(got.astype(complex), X > 0)


@row("C8")
@EITHER
def test_a_gradient_is_cast_to_bfloat16(wrap):
    apply = returning(jaxfn, lambda g: jnp.full((2,), 3.0))
    got = wrap(lambda x: gradient(apply, x))(jnp.ones(2, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), [3, 3])


@row("C9")
@in_each_library
@pytest.mark.parametrize("value", [1.0, 2, True, [1.0, 2.0], "text", 1j], ids=repr)
def test_python_values_are_not_gradients(lib, value):
    named = f"returned a Python {type(value).__name__} as the gradient of input 0 ('x')"
    with raises(lib, TypeError, r"expected (Variable|an array).* or None", named):
        gradients(lib, returning(lib, lambda g: (value,)), np.array(2.0))


@row("C9")
@pytest.mark.parametrize(
    ("value", "kind"),
    [([ARRAY], "Python list"), ((ARRAY,), "Python tuple"), (jax.random.key(0), "random key")],
    ids=str,
)
@EITHER
def test_containers_and_random_keys_are_not_gradients(value, kind, wrap):
    apply = returning(jaxfn, lambda g: (value,))
    with pytest.raises(TypeError, match=rf"returned a {kind} as the gradient of input 0 \('x'\)"):
        wrap(lambda x: gradient(apply, x))(ARRAY)


@row("C10", "A3")
@in_each_library
def test_a_gradient_for_a_static_input_is_an_error(lib):
    f = returning(lib, lambda g: (g, g))
    words, more = "returned a gradient different than None", "input 1 ('w'), but that input is the Python value 2.0"
    with raises(lib, RuntimeError, words, more):
        gradients(lib, lambda x: f(x, 2.0), X)


@row("C10")
def test_the_error_names_the_static_leaf_of_a_pytree():
    f = jaxfn.autograd_function(lambda ctx, t: t["x"] * 2, lambda ctx, g: {"x": g * 2, "k": g})
    with pytest.raises(RuntimeError, match=r"input 0 \('t'\)\['k'\], but that input is the Python value 7"):
        jax.grad(lambda x: f({"x": x, "k": 7}))(1.0)


@row("C10")
@in_each_library
@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_])
def test_a_gradient_for_an_integer_array_is_ignored(lib, dtype):
    """It may have any shape."""
    for ignored in (lambda g: g, lambda g: g[:2]):
        f = returning(lib, lambda g, ignored=ignored: (3 * g, ignored(g)))
        assert_gradients(lib, f, [X, np.ones((3, 2), dtype)], 3 * G)


@row("C11")
@in_each_library
@pytest.mark.parametrize("materialize", [True, False])
def test_the_gradients_of_integer_outputs(lib, materialize):
    seen = []
    dtypes = ["int64", "int32", "int8", "uint8", "bool"]

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        return x * 2, *(lib.m.asarray(x[0] > 0, dtype=getattr(lib.m, dtype)) for dtype in dtypes)

    def backward(ctx, grad_output, *others):
        seen.append([described(g) for g in others])
        return grad_output * 2 + sum(100 * g for g in others if g is not None)

    assert_gradients(lib, function_in(lib, forward, backward), [X], 2 * G)
    assert seen == [[(dtype, (2,)) if materialize else None for dtype in dtypes]]


@row("C11")
def test_a_random_key_as_an_output_has_no_gradient():
    received = []
    f = jaxfn.autograd_function(
        lambda ctx, x: (x * 2, jax.random.key(0)), lambda ctx, g, of_key: received.append(of_key) or g * 2
    )
    np.testing.assert_allclose(gradient(lambda x: f(x)[0], ARRAY), np.full((3, 2), 2.0))
    assert received == [None]


@row("C13")
@in_each_library
def test_no_backward(lib):
    bare = function_in(lib, lambda ctx, x: x * 2, name="Bare")
    np.testing.assert_allclose(lib.numpy(lib.outputs(bare, [X])), 2 * X)
    with raises(lib, NotImplementedError, "backward", "Bare cannot be differentiated"):
        gradients(lib, bare, X)


# ---------------------------------------------------------------------------------------------------------------------
# once_differentiable


def once(lib, backward):
    """x³ with this backward, of ctx and the gradient."""

    class Once(lib.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.stored = [x]
            return x**3

        @staticmethod
        @lib.once_differentiable
        def backward(ctx, grad_output):
            return backward(ctx, grad_output)

    return Once.apply


ONCE = {
    "by the gradient": (lambda ctx, g: 2 * g, 2 * G),
    "by what was saved": (lambda ctx, g: 2 * ctx.saved_tensors[0], 2 * X),
    "by an attribute": (lambda ctx, g: 2 * ctx.stored[0], 2 * X),
    "by both": (lambda ctx, g: 2 * ctx.saved_tensors[0] * g, 2 * X * G),
    "by neither": (lambda ctx, g: 0 * ctx.saved_tensors[0] + 5, 5 + 0 * X),
}
TWICE = "trying to differentiate twice a function that was marked with @once_differentiable"


@row("C14")
@in_each_library
@pytest.mark.parametrize("way", ONCE)
def test_once_differentiable(lib, way):
    backward, first = ONCE[way]
    f = once(lib, backward)
    assert_gradients(lib, f, [X], first)
    with raises(lib, RuntimeError, TWICE, "Once.backward: "):
        gradients(lib, lambda x: f(x) ** 2, X, order=2)
    if lib is not Torch and way != "by the gradient":  # torch does not see that the saved array is differentiated
        with raises(lib, RuntimeError, TWICE):
            gradients(lib, f, X, order=2)


@row("C14")
def test_does_not_raise_where_nothing_is_differentiated_twice():
    f = once(jaxfn, lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)

    def mixed(x, w):  # differentiated once with respect to x, and by w around it
        return jax.grad(f)(x) * w

    assert jax.grad(mixed, argnums=1)(2.0, 1.0) == 12.0
    linear = jaxfn.autograd_function(lambda ctx, x: 2 * x, jaxfn.once_differentiable(lambda ctx, g: 2 * g))
    assert jax.grad(jax.grad(linear))(3.0) == 0.0  # g is the constant 1 and nothing was saved


@row("C14")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_gradient_under_stop_gradient_may_be_differentiated_around(context):
    cube = once(jaxfn, lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)
    around = CONTEXTS[context]
    stopped = around(lambda x: jax.lax.stop_gradient(jax.grad(cube)(x)) * x)
    used = around(lambda x: jax.grad(cube)(x) * x)
    assert jax.grad(stopped)(2.0) == jax.jit(jax.grad(stopped))(2.0) == 12.0
    for derivative in (jax.grad(used), jax.jit(jax.grad(used))):
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            derivative(2.0)


@row("C14")
def test_once_differentiable_leaks_no_tracers():
    f = once(jaxfn, lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(f)))(jnp.arange(3.0)), [0, 3, 12])


# ---------------------------------------------------------------------------------------------------------------------
# Boxed gradients


@row("C15")
@in_each_library
def test_boxed_grads_call(lib):
    seen = []

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x, x * 3

    def backward(ctx, grads):
        (x,) = ctx.saved_tensors
        seen.append((type(grads), len(grads)))
        return 2 * x * grads.pop(0) + 3 * grads.pop(0)

    boxed = function_in(lib, forward, backward, boxed_grads_call=True, clear_saved_tensors_on_access=True)
    assert_gradients(lib, boxed, [X], 2 * X * G + 3 * cotangent(X.shape, 1))
    assert seen == [(list, 2)]


@row("C14", "C15")
def test_boxed_gradients_that_backward_clears():
    @jaxfn.once_differentiable
    def backward(ctx, grads):
        assert ctx.saved_tensors[0] is not None and ctx.saved_tensors[0] is not None  # JAX clears nothing
        grads.clear()
        return jnp.float32(2)

    double = jaxfn.autograd_function(
        lambda ctx, x: ctx.save_for_backward(x) or 2 * x,
        backward,
        boxed_grads_call=True,
        clear_saved_tensors_on_access=True,
    )
    with pytest.raises(RuntimeError, match="differentiate twice"):
        jax.grad(lambda c: jax.grad(lambda x: double(x) * c)(1.0))(2.0)


# ---------------------------------------------------------------------------------------------------------------------
# Complex numbers

Z = np.array([0.3 + 1.1j, -0.7 + 0.2j, 1.5 - 0.4j])
# Real functions of a complex y, and their gradients in torch's convention.
LOSSES = {
    "real": (lambda m, y: m.real(y).sum(), lambda y: 0 * y + 1),
    "imaginary": (lambda m, y: m.imag(y).sum(), lambda y: 0 * y + 1j),
    "modulus": (lambda m, y: m.real(y * m.conj(y)).sum(), lambda y: 2 * y),
    "mixed": (lambda m, y: (m.real(y) * m.imag(y) ** 2).sum(), lambda y: y.imag**2 + 2j * y.real * y.imag),
}


@row("C16")
@in_each_library
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_backward_sees_torch_s_gradients_and_jax_grad_gives_the_conjugate(lib, kind, is_alone):
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z, 3 * z

    def backward(ctx, g, h):
        return 2 * g * lib.m.conj(ctx.saved_tensors[0]) + 3 * h

    two = function_in(lib, forward, backward)
    square = in_library(ComplexSquare, lib).apply if is_alone else lambda z: two(z)[0]
    loss, of_square = LOSSES[kind]
    expected = 2 * of_square(Z * Z) * Z.conj()
    if lib is Torch:
        z = lib.m.tensor(Z, requires_grad=True)
        got = lib.numpy(lib.m.autograd.grad(loss(lib.m, square(z)), z)[0])
    else:
        got = np.conj(lib.wrap(jax.grad(lambda z: loss(jnp, square(z))))(jnp.asarray(Z)))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@row("C16")
@in_each_library
def test_a_complex_gradient_s_real_part_for_a_real_input(lib):
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x * lib.array(Z) * w
        return lib.m.real(y), lib.m.imag(y)

    def backward(ctx, grad_real, grad_imag):
        x, w = ctx.saved_tensors
        turned = lib.m.real((grad_real + 1j * grad_imag) * lib.m.conj(lib.array(Z)))
        return turned * w, turned * x

    rotate = function_in(lib, forward, backward)

    x, w, g, h = np.array([0.5, -1.5, 2.0]), np.array([1.0, 2.0, 3.0]), cotangent((3,)), cotangent((3,), 1)
    turned = g * Z.real + h * Z.imag
    assert_gradients(lib, rotate, [x, w], turned * w, turned * x)
    assert_gradients(lib, rotate, [x, w], turned * h, turned * g, order=2)
