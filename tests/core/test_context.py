"""Contract rows B: forward, setup_context and ctx."""

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Mul, Pair, Swap
from tests.support.contexts import CONTEXTS
from tests.support.either_library import (
    G,
    Jax,
    X,
    assert_gradients,
    cotangent,
    described,
    function_in,
    in_each_library,
    in_every_context,
)
from tests.support.marks import EXPERIMENTAL, TRACES_ALWAYS, cells, row

EVERY_CONTEXT = pytest.mark.parametrize("context", CONTEXTS)

# ---------------------------------------------------------------------------------------------------------------------
# Styles, inputs and outputs


@row("B2")
@in_each_library
@TRACES_ALWAYS
def test_setup_context_gets_all_inputs_with_their_defaults(lib):
    seen = []

    def setup_context(ctx, inputs, output):
        seen.append((type(inputs), inputs[1:], len(ctx.needs_input_grad), type(output), output[1], len(output)))

    f = function_in(
        lib,
        lambda x, k=3, mode="a", w=None: (x * k, "text", x + 1),
        lambda ctx, first, text, last: (first * 3 + last, None, None, None),
        setup_context=staticmethod(setup_context),
    )
    assert_gradients(lib, f, [X], 3 * G + cotangent(X.shape, 2))
    assert seen == [(tuple, (3, "a", None), 4, tuple, "text", 3)]


@row("B2")
def test_setup_context_gets_keyword_only_parameters_after_the_others():
    seen = []

    def setup_context(ctx, inputs, output):
        seen.append(inputs[1:])
        ctx.inputs, ctx.output = inputs, output

    def backward(ctx, g):
        x, scale, power, _offset = ctx.inputs
        return g * scale * power * x ** (power - 1) + 0 * ctx.output, None, None

    f = jaxfn.autograd_function(
        lambda x, scale=2.0, *, power=1, offset=0.5: scale * x**power + offset, backward, setup_context=setup_context
    )
    value, grad = jax.value_and_grad(lambda x: f(x, power=3))(2.0)
    assert seen[0] == (2.0, 3, 0.5)
    assert (value, grad) == (16.5, 24.0)


@row("B3")
@in_each_library
@pytest.mark.parametrize("make", [lambda x: (x, "text", 3, None), lambda x: (x,)], ids=["several", "one"])
def test_a_tuple_is_several_outputs_and_others_than_arrays_come_back_unchanged(lib, make):
    seen = []

    def backward(ctx, first, *others):
        seen.append(others)
        return 2 * first

    mixed = function_in(lib, lambda ctx, x: make(x * 2), backward)

    outputs = mixed(lib.array(X))
    assert type(outputs) is tuple and outputs[1:] == make(X)[1:]
    assert_gradients(lib, mixed, [X], 2 * G)
    assert seen == [(None,) * (len(outputs) - 1)]


@row("B3", "C1")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_outputs_of_any_structure_of_which_a_list_is_one(wrap):
    assert isinstance(wrap(Swap.apply)(jnp.ones(2), jnp.ones(2)), Pair)
    received = []

    @jaxfn.function
    def several(ctx, x):
        return x * 2, [x * 3, {"a": x * 4}], "label", None

    @several.backward
    def _(ctx, *grads):
        received.append(jax.tree.structure(grads, is_leaf=lambda x: x is None))
        double, (triple, rest), *_ = grads
        return 2 * double + 3 * triple + 4 * rest["a"]

    def loss(x):
        double, (triple, rest), *_ = several(x)
        return double + triple + rest["a"]

    assert wrap(jax.grad(loss))(1.0) == 9.0
    expected = (1.0, [1.0, {"a": 1.0}], None, None)
    assert received == [jax.tree.structure(expected, is_leaf=lambda x: x is None)]


@row("B3")
@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: np.array(["a", object()]), dict], ids=range(3))
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_static_outputs_that_each_run_creates_again(make, wrap):
    f = jaxfn.autograd_function(lambda ctx, x: (x * 2, make()), lambda ctx, g, _: g * 2)
    assert jax.grad(wrap(lambda x: f(x)[0]))(1.0) == 2.0


# ---------------------------------------------------------------------------------------------------------------------
# save_for_backward and attributes


@row("B4")
@in_each_library
def test_none_is_saved_as_none_and_a_second_save_replaces_the_first(lib):
    def forward(ctx, x):
        result = x * x
        ctx.save_for_backward(result, result)
        ctx.save_for_backward(None, x, None)
        return result

    def backward(ctx, grad_output):
        first, x, last = ctx.saved_tensors
        assert type(ctx.saved_tensors) is tuple and first is None and last is None
        return 2 * x * grad_output

    saves = function_in(lib, forward, backward)

    assert_gradients(lib, saves, [X], 2 * X * G)


@row("B4")
@in_each_library
@pytest.mark.parametrize("value", [3, 1.5, "text", [1.0], {"a": 1}, (1,)], ids=str)
def test_saving_what_is_not_an_array_raises(lib, value):
    def forward(ctx, x):
        ctx.save_for_backward(x, value)
        return x

    saves = function_in(lib, forward)

    message = rf"save_for_backward can only save .* argument 1 is of type {type(value).__name__}"
    with pytest.raises(TypeError, match=message):
        lib.outputs(saves, [X])


@row("B4")
def test_a_python_number_may_be_saved_where_it_would_be_an_array_if_it_were_differentiated():
    scaled = jaxfn.autograd_function(lambda ctx, x, c: ctx.save_for_backward(x, c) or x * c, lambda ctx, g: (g, None))
    assert scaled(2.0, 3.0) == 6.0
    assert jax.grad(lambda x: scaled(x, x))(3.0) == 1.0
    with pytest.raises(TypeError, match=r"number 3\.0, .* an array under jax\.jit\. Pass jnp\.float32\(3\.0\), or"):
        jax.grad(lambda x: scaled(x, 3.0))(2.0)
    constant = jaxfn.autograd_function(lambda ctx, x: ctx.save_for_backward(x, 2.5) or x)
    with pytest.raises(TypeError, match="argument 1 is of type float"):
        constant(3.0)


@row("B4", "B8")
@in_each_library
def test_a_saved_output_that_was_marked_has_no_derivative(lib):
    def forward(ctx, x):
        square, triple = x * x, x * 3
        ctx.mark_non_differentiable(triple)
        ctx.save_for_backward(triple, square)
        return square, triple

    def backward(ctx, grad_output, of_triple):
        triple, square = ctx.saved_tensors
        return grad_output * triple * square + 80 * of_triple

    marked = function_in(lib, forward, backward)

    # The rule of the square is 3x³; in its derivative 3x is a constant, and the square follows the rule.
    assert_gradients(lib, marked, [X], 3 * X**3 * G)
    assert_gradients(lib, marked, [X], G * G * 9 * X**4, order=2)


@row("B4", "B8")
@pytest.mark.parametrize("make", [np.full, jnp.full], ids=["numpy", "jax"])
def test_numpy_outputs_are_known_by_identity(make):
    @jaxfn.function
    def marked(ctx, x):
        constant = make((), 2.0, np.float32)
        ctx.mark_non_differentiable(constant)
        return x * 2, constant

    marked.backward(lambda ctx, a, b: a * 2 + b * 100)
    assert jax.grad(lambda x: sum(marked(x)))(1.0) == 2.0

    @jaxfn.function
    def saved(ctx, x):
        constant = make((), 3.0, np.float32)
        ctx.save_for_backward(constant)
        return constant

    saved.backward(lambda ctx, g: g * ctx.saved_tensors[0])
    assert jax.grad(jax.grad(saved))(1.0) == 3.0


@row("B5")
def test_named_saves_preserve_order_and_python_values():
    @jaxfn.function
    def f(ctx, x, w):
        ctx.save_for_backward(x, zeta=w, alpha=None, constant=3, label="name", values=x * w)
        return x * w * 3

    @f.backward
    def _(ctx, g):
        saved = ctx.saved_variables
        assert list(saved.keys()) == ["zeta", "alpha", "constant", "label", "values"]
        assert "label" in saved and "wrong" not in saved
        positional, *named = saved  # as the list of R torch and the tuple of old torch
        assert named[2:4] == [3, "name"] and saved[3] == 3 and positional is saved[0] is ctx.saved_tensors[0]
        assert saved.alpha is None and saved.constant == 3 and saved["label"] == "name"
        assert len(ctx.saved_tensors) == 4 and ctx.saved_tensors[2] is None
        with pytest.raises(AttributeError, match="nothing was saved as 'wrong'; saved: zeta, alpha"):
            _ = saved.wrong
        x, zeta, _none, product = ctx.saved_tensors
        return g * saved.zeta * 3, g * saved.values / zeta * 3 + 0 * (product + x)

    np.testing.assert_allclose(jax.jit(jax.grad(f, argnums=(0, 1)))(2.0, 5.0), (15.0, 6.0))


@row("B6")
@in_each_library
def test_attributes_of_any_kind(lib):
    seen = []

    def forward(ctx, x):
        ctx.settings = {"scale": 2.0, "names": ["a", "b"]}
        ctx.function = lib.m.sin
        ctx.shape = tuple(x.shape)
        return x * 2.0

    def backward(ctx, grad_output):
        seen.append((ctx.settings, ctx.function is lib.m.sin, ctx.shape))
        return grad_output * ctx.settings["scale"]

    assert_gradients(lib, function_in(lib, forward, backward), [X], 2 * G)
    assert seen == [({"scale": 2.0, "names": ["a", "b"]}, True, (3, 2))]


@row("B6")
@EVERY_CONTEXT
def test_arrays_in_pytrees_on_ctx_and_objects_next_to_them(context):
    class Plain:
        def __init__(self):
            self.array = np.arange(3.0)

    class Config(NamedTuple):
        array: jax.Array
        name: str

    holder, table, unsortable = Plain(), {"z": 1, "a": [1, 2]}, {1: "a", "b": 2}

    @jaxfn.function
    def f(ctx, x, meta):
        ctx.holder, ctx.table, ctx.meta, ctx.list = holder, table, meta, [x, "static", {"deep": x * 2}]
        ctx.config, ctx.function, ctx.count = Config(x * 3, "cfg"), jnp.sin, 4
        ctx.num_inputs, ctx.num_outputs, ctx.needs_input_grad = 7, 8, (True,)  # torch's own names
        return x

    @f.backward
    def _(ctx, g):
        assert ctx.holder is holder and ctx.table is table and list(ctx.table) == ["z", "a"]
        assert ctx.list[1] == "static" and ctx.config.name == "cfg" and ctx.function is jnp.sin
        assert ctx.meta == unsortable
        assert (ctx.num_inputs, ctx.num_outputs, ctx.needs_input_grad) == (7, 8, (True,))
        return g * (ctx.list[0] + ctx.list[2]["deep"] + ctx.config.array) * ctx.count, None

    x = jnp.array([2.0, -0.5, 0.3])
    gradient = jax.grad(CONTEXTS[context](lambda x: f(x, unsortable).sum()))(x)
    np.testing.assert_allclose(gradient, 4 * (1 + 2 + 3) * x, rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# needs_input_grad


@row("B7")
@in_every_context
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_needs_input_grad(lib, wanted):
    seen = {}

    class Combined(lib.Function):
        @staticmethod
        def forward(ctx, x, y, scale, labels):
            seen["forward"] = tuple(ctx.needs_input_grad)
            ctx.save_for_backward(x, y)
            return x * y * scale

        @staticmethod
        def backward(ctx, grad_output):
            seen["backward"] = tuple(ctx.needs_input_grad)
            x, y = ctx.saved_tensors
            grad_x = grad_output * y * 3.0 if ctx.needs_input_grad[0] else None
            return grad_x, grad_output * x * 3.0 if ctx.needs_input_grad[1] else None, None, None

    class Separate(Combined):
        @staticmethod
        def forward(x, y, scale, labels):
            return x * y * scale

        @staticmethod
        def setup_context(ctx, inputs, output):
            seen["setup_context"] = tuple(ctx.needs_input_grad)
            ctx.save_for_backward(*inputs[:2])

    y, labels = X[::-1] + 1, np.array([0, 2, 1])
    constants = lib.array(X), lib.array(y), lib.array(labels)

    def product(*args):
        remaining = iter(args)
        x, y = (next(remaining) if want else constant for want, constant in zip(wanted, constants[:2], strict=True))
        return Combined.apply(x, y, 3.0, constants[2]), Separate.apply(x, y, 3.0, constants[2])

    g = G + cotangent(X.shape, 1)
    args = [a for a, want in zip((X, y), wanted, strict=True) if want]
    assert_gradients(lib, product, args, *(3 * other * g for other, want in zip((y, X), wanted, strict=True) if want))
    if not (EXPERIMENTAL and getattr(lib, "around", None) is CONTEXTS["checkpoint"]):  # JAX_REMAT3 perturbs every input
        assert seen == dict.fromkeys(["forward", "setup_context", "backward"], (*wanted, False, False))


@row("B7")
@EVERY_CONTEXT
@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_needs_input_grad_by_name_and_of_a_pytree(argnum, context):
    seen = []

    @jaxfn.function
    def f(ctx, _x, tree, index=None, *args):
        ctx.save_for_backward(_x=_x)
        ctx.inputs = _x, tree
        return _x * tree["w"] * tree["b"]

    @f.backward
    def _(ctx, g):
        flags = ctx.needs_input_grad
        assert flags._x == flags["_x"] == flags[0] and flags.tree == flags[1] and flags.index is False
        assert flags.args == flags["args"] == () and ctx.saved_variables._x is not None
        with pytest.raises(KeyError, match="'typo' is not among the parameters: _x, tree, index, args"):
            _ = flags["typo"]
        seen.append(tuple(flags))
        x, tree = ctx.inputs
        of_tree = {"w": g * x * tree["b"], "b": g * x * tree["w"]}
        return {"_x": g * tree["w"] * tree["b"], "tree": of_tree, "args": ()}

    def loss(x, w, b):
        return f(x, {"w": w, "b": b}, np.int32(3)).sum()

    args = jnp.array([2.0, 0.5]), jnp.array([3.0, 0.7]), jnp.array([5.0, -1.0])
    expected = np.prod([a for i, a in enumerate(args) if i != argnum], axis=0)
    np.testing.assert_allclose(jax.grad(CONTEXTS[context](loss), argnum)(*args), expected, rtol=1e-6)
    if not (EXPERIMENTAL and context == "checkpoint"):  # JAX_REMAT3 perturbs every input
        assert set(seen) == {(argnum == 0, argnum > 0, False)}


@row("B7")
def test_needs_input_grad_in_forward_and_undifferentiated():
    seen = []

    @jaxfn.function
    def f(ctx, x, index, count):
        seen.append(tuple(ctx.needs_input_grad))
        assert ctx.needs_input_grad.index is ctx.needs_input_grad[1]
        assert ctx.needs_input_grad.count is ctx.needs_input_grad[2]
        return x + index + count

    f.backward(lambda ctx, g: (g, g, g))
    f(*map(jnp.float32, (1, 2, 3)))
    jax.jit(f)(1.0, 2.0, 3.0)
    jax.vmap(f)(*[jnp.ones(2)] * 3)
    assert seen == [(False,) * 3] * 3
    jax.grad(f, argnums=(0, 2))(*map(jnp.float32, (1, 2, 3)))
    assert seen[-1] == (True, False, True)
    jax.grad(lambda x: f(x, x, jax.lax.stop_gradient(x)))(1.0)
    assert seen[-1] == (True, True, False)


def mul_saving_less(ctx, x, w):
    """Saves another number of arrays for each pattern, and an attribute for some."""
    need_x, need_w = ctx.needs_input_grad
    ctx.both = need_x and need_w
    if ctx.both:
        ctx.save_for_backward(x, w)
    else:
        ctx.stored = w if need_x else x if need_w else None
    return x * w


def mul_saving_less_backward(ctx, g):
    if ctx.both:
        return Mul.backward(ctx, g)
    return tuple(g * ctx.stored if needed else None for needed in ctx.needs_input_grad)


def scan_body(f, carry, _):
    return (f(*carry), carry[1]), None


@row("B7")
@cells("wrap, saves", [("jit", "all"), ("cond", "less"), ("scan", "less"), ("cond in jit", "less")])
def test_gradients_do_not_depend_on_which_were_taken_before(wrap, saves):
    """JAX caches fwd's trace for each pattern of perturbed inputs, but only the last one's residual tree."""
    f = Mul.apply if saves == "all" else jaxfn.autograd_function(mul_saving_less, mul_saving_less_backward)
    body = functools.partial(scan_body, f)
    g = {
        "jit": jax.jit(f),
        "cond": lambda x, w: jax.lax.cond(x > 0, f, lambda x, w: x, x, w),
        "scan": lambda x, w: jax.lax.scan(body, (x, w), None, length=1)[0][0],
        "cond in jit": jax.jit(lambda x, w: jax.lax.cond(x > 0, jax.jit(f), lambda x, w: x, x, w)),
    }[wrap]
    x, w = jnp.float32(2), jnp.float32(5)
    for argnums in (0, 1, 0, (0, 1), 1, (0, 1), 0):
        np.testing.assert_allclose(jax.grad(g, argnums)(x, w), {0: 5.0, 1: 2.0, (0, 1): (5.0, 2.0)}[argnums])

    @jax.jit
    def several(x, w):
        return [jax.grad(g, i)(x, w) for i in (0, 1, 0)]

    np.testing.assert_allclose(several(x, w), [5, 2, 5])
    mixed = jax.grad(jax.grad(lambda x, w: g(x, w) ** 2, 0), 1)
    np.testing.assert_allclose(mixed(x, w), 4 * 2 * 5)


# ---------------------------------------------------------------------------------------------------------------------
# mark_non_differentiable and set_materialize_grads


@row("B8", "B9")
@in_every_context
@pytest.mark.parametrize(
    ("marked", "materialize"), [((0,), True), ((1,), False), ((0, 2), False), ((0, 2), True)], ids=str
)
def test_marked_outputs_have_no_derivative(lib, marked, materialize):
    seen = []

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        outputs = (x * 2, x * x, x + 1)
        ctx.mark_non_differentiable(*(outputs[i] for i in marked))
        ctx.save_for_backward(x)
        return outputs

    def backward(ctx, *grads):
        seen.append(tuple(described(g) for g in grads))
        (x,) = ctx.saved_tensors
        return sum(f * g for f, g in zip((2, 2 * x, 7), grads, strict=True) if g is not None)

    three = function_in(lib, forward, backward)

    terms = 2 * G, 2 * X * cotangent(X.shape, 1), 7 * cotangent(X.shape, 2)
    assert_gradients(lib, three, [X], sum(t for i, t in enumerate(terms) if i not in marked))
    array = ("float64", (3, 2))
    assert set(seen) == {tuple(array if materialize or i not in marked else None for i in range(3))}


@row("B8")
@pytest.mark.parametrize("transformation", [jax.grad, lambda f: f, lambda f: jax.grad(jax.jit(f))])
def test_marking_what_is_not_an_output_warns_once(transformation):
    @jaxfn.function
    def f(ctx, x):
        ctx.mark_non_differentiable(x * 1)
        return x * 2

    f.backward(lambda ctx, g: g * 2)
    with pytest.warns(UserWarning, match="f: mark_non_differentiable was passed a value that forward did not retu"):
        assert transformation(f)(1.0) == 2.0
    with warnings.catch_warnings(action="error"):
        assert transformation(f)(1.0) == jax.grad(f)(1.0) == 2.0


@row("B8")
@pytest.mark.parametrize("context", ["eager", "jit", "checkpoint"])
@pytest.mark.parametrize(
    ("copy", "is_new"),
    [(lambda y: y, ()), (lambda y: y.astype(y.dtype), ()), (jnp.ravel, ("eager",)), (jnp.real, ("eager",))],
    ids=["the array", "astype", "ravel", "real"],
)
@TRACES_ALWAYS
def test_a_marked_array_that_is_another_output_too_raises(copy, is_new, context):
    """Only the new array has no derivative, if the operation returns one."""

    @jaxfn.function
    def sine(ctx, x):
        y = jnp.sin(x)
        same = copy(y)
        ctx.mark_non_differentiable(same)
        ctx.save_for_backward(x)
        return {"y": y}, x, same

    sine.backward(lambda ctx, g, _, g_same: g["y"] * jnp.cos(ctx.saved_tensors[0]))
    gradient = jax.grad(CONTEXTS[context](lambda x: (sine(x)[0]["y"] + sine(x)[2]).sum()))
    x = jnp.arange(3.0)
    if context in is_new:
        np.testing.assert_allclose(gradient(x), np.cos(np.arange(3)), rtol=1e-6)
    else:
        message = "sine: mark_non_differentiable was passed an array that forward returns 2 times, as outputs 0, 2"
        with pytest.raises(ValueError, match=message):
            gradient(x)


@row("B8")
def test_an_array_that_is_two_outputs_and_marked_for_each_has_no_derivative():
    @jaxfn.function
    def sine(ctx, x):
        y = jnp.sin(x)
        ctx.mark_non_differentiable(y, y)
        return y, y, x * 2

    sine.backward(lambda ctx, a, b, g: a + b + 2 * g)
    assert jax.jit(jax.grad(lambda x: sum(sine(x))))(1.0) == 2.0


@row("B9")
@in_every_context
@pytest.mark.parametrize(("used", "materialize"), [(0, True), (0, False), (1, True)], ids=str)
def test_the_gradient_of_an_unused_output(lib, used, materialize):
    """Zeros of its shape and dtype, or `None`."""
    seen = []

    def forward(ctx, x):
        ctx.set_materialize_grads(materialize)
        return x * 2, lib.as_float32(x[:, None] * 3)

    def backward(ctx, *grads):
        seen.append(described(grads[1 - used]))
        return (grads[0] if used == 0 else grads[1].sum(1)) * (2, 3)[used]

    two = function_in(lib, forward, backward)

    expected = 2 * G if used == 0 else 3 * cotangent((3, 1, 2))[:, 0].astype(np.float32)
    assert_gradients(lib, lambda x: two(x)[used], [X], expected)
    unused = ("float32", (3, 1, 2)) if used == 0 else ("float64", (3, 2))
    assert set(seen) == {unused if materialize else None}


@row("B9")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_of_an_output_of_which_a_part_is_used(around):
    """The unused part is `None`, not the whole."""

    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return {"used": x * 2, "unused": x * 3}

    def backward(ctx, grads):
        assert grads["unused"] is None
        return grads["used"] * 2

    two = jaxfn.autograd_function(forward, backward)
    np.testing.assert_array_equal(around(jax.grad(lambda x: two(x)["used"].sum()))(jnp.asarray(X)), 2 * np.ones_like(X))


@row("B9", "C4")
@in_each_library
def test_none_that_a_later_function_returns_is_none_here(lib):
    seen = []

    drops = function_in(lib, lambda ctx, x, y: x + y, lambda ctx, grad_output: (grad_output, None))

    def two_forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    def two_backward(ctx, *grads):
        seen.append([described(g) for g in grads])
        return grads[0] * 2

    two = function_in(lib, two_forward, two_backward)

    assert_gradients(lib, lambda x: drops(*two(x)), [X], 2 * G)
    assert seen == [[("float64", (3, 2)), None]]


def by_scan(f, x, n):
    return jax.lax.scan(lambda carry, _: (f(*carry), None), (x, n), length=3)[0][0]


def by_fori_loop(f, x, n):
    return jax.lax.fori_loop(0, 3, lambda _, carry: f(*carry), (x, n))[0]


@row("B9", "C11", "E1")
@pytest.mark.parametrize("loop", [by_scan, by_fori_loop])
@pytest.mark.parametrize(
    ("count", "materialize"),
    [(jnp.int32(2), True), (jnp.array([True, False, True]), True), (jnp.int32(2), False), (jax.random.key(3), True)],
    ids=["int", "bools", "int, None", "key"],
)
def test_the_gradient_of_what_is_not_a_number_in_loops(count, materialize, loop):
    received = []

    @jaxfn.function
    def step(ctx, x, n):
        ctx.set_materialize_grads(materialize)
        return 2 * x, n

    @step.backward
    def _(ctx, g, g_count):
        received.append(g_count)
        return (3 if g_count is None else 5) * g, None

    is_key = jnp.issubdtype(count.dtype, jax.dtypes.prng_key)
    factor = 5 if materialize and not is_key else 3
    gradient = jax.grad(lambda x: loop(step, x, count).sum())(jnp.ones((3, 2)))
    np.testing.assert_allclose(gradient, np.full((3, 2), factor**3))
    _, pullback = jax.vjp(lambda x: step(x, count), jnp.ones(2))
    np.testing.assert_allclose(pullback((jnp.ones(2), np.zeros(count.shape, jax.dtypes.float0)))[0], [factor] * 2)
    for zero in received:
        assert zero is None if factor == 3 else (zero.dtype, zero.shape) == (count.dtype, count.shape)


# ---------------------------------------------------------------------------------------------------------------------
# mark_dirty and Refs


@row("B10")
@in_each_library
def test_mark_dirty_means_that_a_new_value_is_returned(lib):
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x * 3 if issubclass(lib, Jax) else x.mul_(3)

    tripled = function_in(lib, forward, lambda ctx, grad_output: grad_output * 5, "Triple")
    triple = lambda x: tripled(x * 1)  # noqa: E731
    if not issubclass(lib, Jax):
        assert_gradients(lib, triple, [X], 5 * G)
        return
    with pytest.warns(UserWarning, match="Triple: mark_dirty on a JAX array does not change the caller's array"):
        assert_gradients(lib, triple, [X], 5 * G)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned of once
        x = jnp.asarray(X)
        np.testing.assert_allclose(tripled(x), 3 * X)
        np.testing.assert_allclose(x, X)


@row("B10")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_mark_dirty_errors(transform):
    no_output = jaxfn.autograd_function(lambda ctx, x: ctx.mark_dirty(x) or x.sum(), lambda ctx, g: g)
    with pytest.raises(ValueError, match=r"no output has that shape and dtype"):
        transform(no_output)(jnp.ones(2))
    not_input = jaxfn.autograd_function(lambda ctx, x: ctx.mark_dirty(x * 1) or x, lambda ctx, g: g)
    with pytest.raises(ValueError, match=r"not an array input of forward \(argument 0"):
        transform(not_input)(jnp.float32(1))


@row("B10")
@pytest.mark.parametrize("mode", ["eager", "jit", "grad", "jit_of_grad", "grad_of_jit", "second_order"])
def test_refs_are_written_in_place(mode):
    @jaxfn.function
    def accumulate(ctx, ref, x):
        ctx.mark_dirty(ref)
        ref[...] = ref[...] + x
        ctx.save_for_backward(x)
        return x * x

    accumulate.backward(lambda ctx, g: (None, 2 * ctx.saved_tensors[0] * g))
    ref = jax.new_ref(jnp.float32(1.0))
    f = lambda x: accumulate(ref, x)  # noqa: E731
    run, expected = {
        "eager": (f, 9.0),
        "jit": (jax.jit(f), 9.0),
        "grad": (jax.grad(f), 6.0),
        "jit_of_grad": (jax.jit(jax.grad(f)), 6.0),
        "grad_of_jit": (jax.grad(jax.jit(f)), 6.0),
        "second_order": (jax.grad(jax.grad(f)), 2.0),
    }[mode]
    assert run(jnp.float32(3)) == expected
    assert ref[...] == 4.0


@row("B10")
@EVERY_CONTEXT
@pytest.mark.parametrize("uses_output", [True, False], ids=["output", "reference alone"])
def test_refs_created_inside_the_differentiated_function_raise(context, uses_output):
    write = jaxfn.autograd_function(
        lambda ctx, x, ref: ref.__setitem__(..., 3 * x) or 2 * x, lambda ctx, g: (2 * g, None)
    )

    def loss(x):
        ref = jax.new_ref(x)
        y = write(x, ref)
        return y + ref[...] if uses_output else ref[...]

    x = jnp.float32(1.0)
    assert CONTEXTS[context](loss)(x) == (5.0 if uses_output else 3.0)
    with pytest.raises(NotImplementedError, match=r"input 1 \('ref'\) is a jax.Ref that was created inside"):
        jax.grad(CONTEXTS[context](loss))(x)


@row("B10")
@EVERY_CONTEXT
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["", "jit of all"])
def test_a_ref_that_forward_makes_for_itself(outside, context):
    """JAX gives a derivative to values read from it if the traced function is differentiated."""

    @jaxfn.function
    def triple(ctx, x):
        ref = jax.new_ref(x)
        ref[...] = 3 * ref[...]
        return ref[...]

    triple.backward(lambda ctx, g: 5 * g)
    square = CONTEXTS[context](lambda x: triple(x) ** 2)
    x = jnp.float32(2.0)
    assert outside(jax.grad(square))(x) == 60.0
    assert outside(jax.grad(jax.grad(square)))(x) == 50.0


@row("B10")
def test_intermediates_next_to_refs():
    @jaxfn.function
    def f(ctx, ref, x):
        ref[...] = x
        ctx.save_for_backward(jnp.cos(x))
        return jnp.sin(x)

    f.backward(lambda ctx, g: (None, ctx.saved_tensors[0] * g))
    ref = jax.new_ref(jnp.float32(0))
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(ref, x)))(0.5), np.cos(0.5), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        jax.grad(jax.grad(lambda x: f(ref, x)))(0.5)


# ---------------------------------------------------------------------------------------------------------------------
# Counts, and one ctx for each call


@row("B12")
def test_counts():
    """torch has no such attributes; its numbers are those of `needs_input_grad` and of the gradients."""
    seen = []

    @jaxfn.function
    def f(ctx, x, scale=2.0, *, offset=0.0):
        assert isinstance(ctx, jaxfn.FunctionCtx)
        seen.append(ctx.num_inputs)
        with pytest.raises(AttributeError, match="once forward has returned"):
            _ = ctx.num_outputs
        return x * scale, "text", x + offset

    @f.backward
    def _(ctx, *grads):
        seen.append((ctx.num_inputs, ctx.num_outputs, len(ctx.needs_input_grad), len(grads)))
        return 2 * grads[0] + grads[2]

    assert jax.grad(lambda x: f(x)[0] + f(x)[2])(1.0) == 3.0
    assert set(seen) == {3, (3, 3, 3, 3)}


@row("B13")
@in_each_library
@TRACES_ALWAYS
def test_each_call_has_a_separate_ctx(lib):
    contexts = []

    def forward(ctx, x, factor):
        assert not hasattr(ctx, "factor") and ctx.saved_tensors == ()
        contexts.append(ctx)
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * x * factor

    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * x * ctx.factor * grad_output, None

    scale = function_in(lib, forward, backward)

    # 3 (2 x²)² + 5 x²
    nested = lambda x: scale(scale(x, 2.0), 3.0) + scale(x, 5.0)  # noqa: E731
    assert_gradients(lib, nested, [X], (48 * X**3 + 10 * X) * G)
    assert len({id(c) for c in contexts}) == len(contexts) == 3


@row("B12")
def test_methods_run_alone_on_a_ctx_without_a_call():
    x, w = jnp.array([0.5, -2.0]), jnp.array([3.0, 0.25])
    ctx = jaxfn.FunctionCtx()
    np.testing.assert_array_equal(Mul.forward(ctx, x, w), x * w)
    ctx.needs_input_grad = (True, False)
    grad_x, grad_w = jax.jit(lambda g: Mul.backward(ctx, g))(2 * x)
    np.testing.assert_array_equal(grad_x, 2 * x * w)
    assert grad_w is None


@row("B12")
def test_a_ctx_without_a_call_knows_what_is_assigned_to_it():
    ctx = jaxfn.FunctionCtx()
    ctx.save_for_backward(None, n=3)
    ctx.set_materialize_grads(False)
    ctx.log(x=1.0)
    assert ctx.saved_tensors == (None,) and ctx.saved_variables.n == 3 and vars(ctx) == {}
    for name in ("needs_input_grad", "num_inputs", "num_outputs"):
        with pytest.raises(AttributeError, match=rf"^ctx\.{name} is known .*; assign it to a FunctionCtx"):
            getattr(ctx, name)
        setattr(ctx, name, (False,))
        assert getattr(ctx, name) == (False,)
    with pytest.raises(AttributeError, match="ctx has no attribute 'scale'"):
        print(ctx.scale)
