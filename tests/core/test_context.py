"""Contract rows B: forward, setup_context and ctx."""

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Linear, Pair, Relu, Swap
from tests.support.marks import ALL_PERTURBED, row, sampled

MODES = {
    "eager": lambda f: f,
    "jit_of_grad": lambda f: f,
    "grad_of_jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda *a: jax.vmap(f)(*(x[None] for x in a))[0],
    "scan": lambda f: lambda *a: jax.lax.scan(lambda c, _: (c + f(*a), None), jnp.float32(0), None, length=1)[0],
    "cond": lambda f: lambda *a: jax.lax.cond(a[0].sum() < 1e9, f, lambda *a: jnp.float32(0), *a),
}


def differentiate(mode, f, args, argnums):
    gradient = jax.grad(MODES[mode](f), argnums=argnums)
    return (jax.jit(gradient) if mode == "jit_of_grad" else gradient)(*args)


@row("B1")
def test_combined_style_gets_ctx_first():
    @jaxfn.function
    def f(ctx, x):
        assert isinstance(ctx, jaxfn.FunctionCtx)
        return x

    assert f(1.0) == 1.0


@row("B2")
def test_setup_context_sees_all_inputs_in_order():
    class Separate(jaxfn.Function):
        seen = None

        @staticmethod
        def forward(x, scale=2.0, *, power=1, offset=0.5):
            return scale * x**power + offset

        @staticmethod
        def setup_context(ctx, inputs, output):
            Separate.seen = inputs[1:]
            ctx.inputs, ctx.output = inputs, output

        @staticmethod
        def backward(ctx, g):
            x, scale, power, _offset = ctx.inputs
            return g * scale * power * x ** (power - 1) + 0 * ctx.output, None, None

    value, grad = jax.value_and_grad(lambda x: Separate.apply(x, power=3))(2.0)
    assert Separate.seen == (2.0, 3, 0.5)
    assert (value, grad) == (16.5, 24.0)


@row("B3")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_outputs(wrap):
    assert isinstance(wrap(Swap.apply)(jnp.ones(2), jnp.ones(2)), Pair)
    received = []

    @jaxfn.function
    def several(ctx, x):
        return x * 2, [x * 3, {"a": x * 4}], "label", None, 7

    @several.backward
    def _(ctx, *grads):
        received.append(jax.tree.structure(grads, is_leaf=lambda x: x is None))
        double, (triple, rest), *_ = grads
        return 2 * double + 3 * triple + 4 * rest["a"]

    def loss(x):
        double, (triple, rest), label, none, seven = several(x)
        assert (label, none, seven) == ("label", None, 7)
        return double + triple + rest["a"]

    assert wrap(jax.grad(loss))(1.0) == 9.0
    expected = (1.0, [1.0, {"a": 1.0}], None, None, None)
    assert received == [jax.tree.structure(expected, is_leaf=lambda x: x is None)]


@row("B3")
def test_a_list_is_one_output():
    f = jaxfn.autograd_function(lambda ctx, x: [x, 2 * x], lambda ctx, grads: grads[0] + 2 * grads[1])
    assert f(1.0) == [1.0, 2.0]
    assert jax.grad(lambda x: f(x)[0] + 10 * f(x)[1])(1.0) == 21.0


@row("B4")
def test_none_entries_and_replacement():
    @jaxfn.function
    def f(ctx, x):
        ctx.save_for_backward(x, x)
        ctx.save_for_backward(None, x, None)
        return x * x

    @f.backward
    def _(ctx, g):
        first, x, last = ctx.saved_tensors
        assert first is None and last is None
        return 2 * x * g

    assert jax.jit(jax.grad(f))(3.0) == 6.0


@row("B4")
@pytest.mark.parametrize("value", [1.5, "text", [1, 2], {"a": 1}, (1,)])
def test_non_arrays_are_refused_by_position(value):
    f = jaxfn.autograd_function(lambda ctx, x: ctx.save_for_backward(x, value) or x)
    with pytest.raises(TypeError, match=f"argument 1 is of type {type(value).__name__}"):
        f(jnp.ones(2))


@row("B4")
def test_saved_non_differentiable_output_has_no_derivative():
    @jaxfn.function
    def f(ctx, x):
        y, kept = x * x, x**3
        ctx.mark_non_differentiable(kept)
        ctx.save_for_backward(kept)
        return y, kept

    f.backward(lambda ctx, g, _: g * ctx.saved_tensors[0])
    # The rule is g * stop_gradient(x^3), so the second derivative of y is zero, and of sin(y) it is -sin(y) * x^6.
    assert jax.grad(jax.grad(lambda x: f(x)[0]))(2.0) == 0.0
    second = jax.grad(jax.grad(lambda x: jnp.sin(f(x)[0])))(2.0)
    np.testing.assert_allclose(second, -np.sin(4.0) * 64, rtol=1e-5)


@row("B4")
def test_saved_output_without_derivative_gets_no_cotangent():
    """A real cotangent reaching the marked output's place gave 8072 for 72 in an early design."""

    @jaxfn.function
    def cube(ctx, x):
        y, aux = x**3, 100 * x
        ctx.mark_non_differentiable(aux)
        ctx.save_for_backward(x, aux)
        return y, aux

    @cube.backward
    def _(ctx, g, g_aux):
        x, aux = ctx.saved_tensors
        return g * 3 * x**2 + 80 * g_aux + 0 * aux

    np.testing.assert_allclose(jax.grad(jax.grad(lambda x: cube(x)[0] ** 2))(2.0), 30 * 2.0**4, rtol=1e-6)


@row("B5")
def test_named_saves_keep_order_and_python_values():
    @jaxfn.function
    def f(ctx, x, w):
        ctx.save_for_backward(x, zeta=w, alpha=None, constant=3, label="name", values=x * w)
        return x * w * 3

    @f.backward
    def _(ctx, g):
        saved = ctx.saved_variables
        assert list(saved) == ["zeta", "alpha", "constant", "label", "values"]
        assert saved.alpha is None and saved.constant == 3 and saved["label"] == "name"
        assert len(ctx.saved_tensors) == 4 and ctx.saved_tensors[2] is None
        with pytest.raises(AttributeError, match="nothing was saved as 'wrong'; saved: zeta, alpha"):
            _ = saved.wrong
        x, zeta, _none, product = ctx.saved_tensors
        return g * saved.zeta * 3, g * saved.values / zeta * 3 + 0 * (product + x)

    np.testing.assert_allclose(jax.jit(jax.grad(f, argnums=(0, 1)))(2.0, 5.0), (15.0, 6.0))


@row("B6")
def test_any_attribute():
    class Plain:
        def __init__(self):
            self.array = np.arange(3.0)

    class Config(NamedTuple):
        array: jax.Array
        name: str

    holder, table = Plain(), {"z": 1, "a": [1, 2]}

    @jaxfn.function
    def f(ctx, x):
        ctx.holder, ctx.table, ctx.list = holder, table, [x, "static", {"deep": x * 2}]
        ctx.config, ctx.function, ctx.count = Config(x * 3, "cfg"), jnp.sin, 4
        return x

    @f.backward
    def _(ctx, g):
        assert ctx.holder is holder and ctx.table is table and list(ctx.table) == ["z", "a"]
        assert ctx.list[1] == "static" and ctx.config.name == "cfg" and ctx.function is jnp.sin
        return g * (ctx.list[0] + ctx.list[2]["deep"] + ctx.config.array) * ctx.count

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        np.testing.assert_allclose(jax.grad(wrap(f))(2.0), 4 * (2 + 4 + 6))
    scanned = jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])
    np.testing.assert_allclose(scanned(1.0), 24.0**2)


@row("B7")
@pytest.mark.parametrize("mode", [pytest.param(m, marks=ALL_PERTURBED if m == "checkpoint" else ()) for m in MODES])
@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_needs_input_grad(mode, argnums):
    seen = {}

    @jaxfn.function
    def f(ctx, x, tree, index=None):
        seen["forward"] = tuple(ctx.needs_input_grad)
        ctx.save_for_backward(x)
        return x * tree["w"]

    @f.setup_context
    def _(ctx, inputs, output):
        seen["setup"] = tuple(ctx.needs_input_grad)
        ctx.inputs = inputs

    f.Function.forward = staticmethod(lambda x, tree, index=None: x * tree["w"] * tree["b"])

    @f.backward
    def _(ctx, g):
        flags = ctx.needs_input_grad
        seen["backward"] = tuple(flags)
        assert flags.x == flags["x"] == flags[0] and flags.tree == flags[1] and flags.index is False
        x, tree, _ = ctx.inputs
        return g * tree["w"] * tree["b"], {"w": g * x * tree["b"], "b": g * x * tree["w"]}, None

    def loss(x, w, b):
        return f(x, {"w": w, "b": b}, np.int32(3)).sum()

    args = (jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0))
    grads = differentiate(mode, loss, args, argnums)
    np.testing.assert_allclose(grads, [(15.0, 10.0, 6.0)[i] for i in argnums])
    expected = (0 in argnums, 1 in argnums or 2 in argnums, False)
    assert seen["setup"] == seen["backward"] == expected


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


@row("B8")
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("mode", ["eager", "jit_of_grad", "grad_of_jit", "checkpoint"])
def test_mark_non_differentiable(materialize, mode):
    received = []

    @jaxfn.function
    def f(ctx, x):
        ctx.set_materialize_grads(materialize)
        y, aux = x * 2, x * 3
        ctx.mark_non_differentiable(aux)
        return y, aux

    @f.backward
    def _(ctx, g, g_aux):
        received.append(g_aux)
        return g * 2

    grads = differentiate(mode, lambda x: sum(map(jnp.sum, f(x))), (jnp.ones(3),), 0)
    np.testing.assert_allclose(grads, [2, 2, 2])
    if materialize:
        assert received[0].shape == (3,) and received[0].dtype == jnp.float32
    else:
        assert received == [None]


@row("B8")
def test_marking_what_is_not_an_output_warns():
    @jaxfn.function
    def f(ctx, x):
        ctx.mark_non_differentiable(x * 1)
        return x * 2

    f.backward(lambda ctx, g: g * 2)
    with pytest.warns(UserWarning, match="f: mark_non_differentiable was given a value that forward did not return"):
        assert jax.grad(f)(1.0) == 2.0
    with pytest.warns(UserWarning, match="f: mark_non_differentiable was given a value that forward did not return"):
        assert f(1.0) == 2.0


def same_array(y):
    return y


def same_dtype(y):
    return y.astype(y.dtype)


@row("B8")
@pytest.mark.parametrize("mode", ["eager", "jit_of_grad", "grad_of_jit", "checkpoint"])
@pytest.mark.parametrize("copied", [jnp.ravel, jnp.real, same_array, same_dtype])
def test_a_marked_array_that_is_another_output_too_never_takes_its_derivative(copied, mode):
    @jaxfn.function
    def sine(ctx, x):
        y = jnp.sin(x)
        same = copied(y)
        ctx.mark_non_differentiable(same)
        ctx.save_for_backward(x)
        return {"y": y}, x, same

    sine.backward(lambda ctx, g, _, g_same: g["y"] * jnp.cos(ctx.saved_tensors[0]))
    x = jnp.arange(3.0)
    try:
        gradient = differentiate(mode, lambda x: (sine(x)[0]["y"] + sine(x)[2]).sum(), (x,), 0)
    except ValueError as error:
        assert "sine: mark_non_differentiable was given an array that forward returns 2 times, as outputs 0, 2" in str(
            error
        )
    else:
        assert copied is not same_array
        np.testing.assert_allclose(gradient, np.cos(np.arange(3)), rtol=1e-6)


def by_scan(f, x, n):
    return jax.lax.scan(lambda carry, _: (f(*carry), None), (x, n), length=3)[0][0]


def by_fori_loop(f, x, n):
    return jax.lax.fori_loop(0, 3, lambda _, carry: f(*carry), (x, n))[0]


def unrolled(f, x, n):
    for _ in range(3):
        x, n = f(x, n)
    return x


@row("B9", "E1")
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("loop", [by_scan, by_fori_loop, unrolled])
@pytest.mark.parametrize("count", [jnp.int32(2), jnp.array([True, False, True]), jax.random.key(3)], ids=str)
def test_the_gradient_of_what_is_no_number_is_a_zero_in_loops_too(count, loop, materialize):
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
@pytest.mark.parametrize("mode", ["eager", "jit_of_grad", "grad_of_jit", "scan"])
def test_materialize_grads(mode):
    received = {}

    def make(materialize):
        @jaxfn.function
        def f(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 2, (x * 3).astype(jnp.float16)[:2]

        @f.backward
        def _(ctx, g, unused):
            received[materialize] = unused
            return g * 2

        return f

    for materialize in (True, False):
        f = make(materialize)
        np.testing.assert_allclose(differentiate(mode, lambda x, f=f: f(x)[0].sum(), (jnp.ones(3),), 0), [2, 2, 2])
    assert received[False] is None
    assert received[True].shape == (2,) and received[True].dtype == jnp.float16


@row("B10")
def test_mark_dirty_returns_the_new_value_and_warns_once():
    @jaxfn.function
    def add_one(ctx, x):
        ctx.mark_dirty(x)
        return x + 1

    add_one.backward(lambda ctx, g: g)
    x = jnp.ones(2)
    with pytest.warns(UserWarning, match="add_one: mark_dirty on a JAX array does not change the caller's array"):
        np.testing.assert_allclose(add_one(x), [2, 2])
    np.testing.assert_allclose(x, [1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(jax.grad(lambda x: add_one(x).sum())(x), [1, 1])


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
    expected = {"eager": 9.0, "jit": 9.0, "second_order": 2.0}.get(mode, 6.0)
    run = {
        "eager": f,
        "jit": jax.jit(f),
        "grad": jax.grad(f),
        "jit_of_grad": jax.jit(jax.grad(f)),
        "grad_of_jit": jax.grad(jax.jit(f)),
        "second_order": jax.grad(jax.grad(f)),
    }[mode]
    assert run(jnp.float32(3)) == expected
    assert ref[...] == 4.0


AROUND_REFS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@row("B10")
@pytest.mark.parametrize("around", AROUND_REFS)
@pytest.mark.parametrize("uses_output", [True, False], ids=["output", "reference alone"])
def test_refs_made_inside_the_differentiated_function_are_refused(around, uses_output):
    write = jaxfn.autograd_function(
        lambda ctx, x, ref: ref.__setitem__(..., 3 * x) or 2 * x, lambda ctx, g: (2 * g, None)
    )

    def loss(x):
        ref = jax.new_ref(x)
        y = write(x, ref)
        return y + ref[...] if uses_output else ref[...]

    x = jnp.float32(1.0)
    assert AROUND_REFS[around](loss)(x) == (5.0 if uses_output else 3.0)
    with pytest.raises(NotImplementedError, match=r"input 1 \('ref'\) is a jax.Ref that was made inside"):
        jax.grad(AROUND_REFS[around](loss))(x)


@row("B10")
@pytest.mark.parametrize("around", AROUND_REFS)
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["", "jit of all"])
def test_a_ref_that_forward_makes_for_itself(outside, around):
    """To JAX, what is read from it has a derivative, where the program is differentiated."""

    @jaxfn.function
    def triple(ctx, x):
        ref = jax.new_ref(x)
        ref[...] = 3 * ref[...]
        return ref[...]

    triple.backward(lambda ctx, g: 5 * g)
    square = AROUND_REFS[around](lambda x: triple(x) ** 2)
    x = jnp.float32(2.0)
    assert outside(jax.grad(square))(x) == 60.0
    assert outside(jax.grad(jax.grad(square)))(x) == 50.0


@row("B10")
def test_intermediates_beside_refs():
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


@row("B12")
def test_counts():
    seen = []

    @jaxfn.function
    def f(ctx, x, scale=2.0, *, offset=0.0):
        seen.append(ctx.num_inputs)
        with pytest.raises(AttributeError, match="once forward has returned"):
            _ = ctx.num_outputs
        return x * scale, x + offset

    @f.backward
    def _(ctx, g, h):
        seen.append((ctx.num_inputs, ctx.num_outputs))
        return 2 * g + h

    assert jax.grad(lambda x: sum(f(x)))(1.0) == 3.0
    assert seen == [3, (3, 2)]


@row("B13")
def test_one_ctx_per_call():
    contexts = []

    @jaxfn.function
    def f(ctx, x, constant):
        assert not vars(ctx) and ctx.saved_tensors == ()
        contexts.append(ctx)
        ctx.constant = constant
        return x * constant

    f.backward(lambda ctx, g: (g * ctx.constant, None))
    assert jax.grad(lambda x: f(f(x, 2), 5))(1.0) == 10.0
    assert len({id(c) for c in contexts}) == len(contexts)


@row("B13")
def test_linear_without_bias_is_torch_example():
    x, w = jnp.ones((4, 3)), jnp.ones((5, 3))
    assert Linear.apply(x, w).shape == (4, 5)
    grads = jax.grad(lambda x, w: Linear.apply(x, w).sum(), argnums=(0, 1))(x, w)
    np.testing.assert_allclose(grads[0], np.full((4, 3), 5.0))
    np.testing.assert_allclose(grads[1], np.full((5, 3), 4.0))


@row("B4")
def test_relu_keeps_its_mask_only():
    _, pullback = jax.vjp(Relu.apply, jnp.ones(1000))
    assert sum(x.nbytes for x in jax.tree.leaves(pullback)) == 1000


class Mul(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None


class MulSavingLess(Mul):
    @staticmethod
    def forward(ctx, x, w):
        need_x, need_w = ctx.needs_input_grad
        ctx.save_for_backward(x if need_w else None, w if need_x else None)
        return x * w


class MulSavingMuchLess(Mul):
    """Saves nothing for one of the patterns."""

    @staticmethod
    def forward(ctx, x, w):
        need_x, need_w = ctx.needs_input_grad
        ctx.both = need_x and need_w
        if ctx.both:
            ctx.save_for_backward(x, w)
        else:
            ctx.kept = w if need_x else x if need_w else None
        return x * w

    @staticmethod
    def backward(ctx, g):
        if ctx.both:
            return Mul.backward(ctx, g)
        return tuple(g * ctx.kept if needed else None for needed in ctx.needs_input_grad)


def other(x, w):
    return x


def scan_body(f, carry, _):
    return (f(*carry), carry[1]), None


@row("B7")
@sampled
@pytest.mark.parametrize("f", [Mul.apply, MulSavingLess.apply, MulSavingMuchLess.apply], ids=["all", "less", "varying"])
@pytest.mark.parametrize("wrap", ["cond", "scan", "jit", "while_in_jit"])
def test_gradients_do_not_depend_on_which_were_taken_before(f, wrap):
    """JAX keeps fwd's trace for each pattern of perturbed inputs, but only the last one's residual tree."""
    body = functools.partial(scan_body, f)
    g = {
        "cond": lambda x, w: jax.lax.cond(x > 0, f, other, x, w),
        "scan": lambda x, w: jax.lax.scan(body, (x, w), None, length=1)[0][0],
        "jit": jax.jit(f),
        "while_in_jit": jax.jit(lambda x, w: jax.lax.cond(x > 0, jax.jit(f), other, x, w)),
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


@row("B6")
def test_dicts_that_jax_cannot_sort():
    meta = {1: "a", "b": 2}

    @jaxfn.function
    def f(ctx, x, table):
        ctx.meta = meta
        assert table == meta
        return x * 2

    @f.backward
    def _(ctx, g):
        assert ctx.meta is meta
        return g * 2, None

    assert jax.grad(lambda x: f(x, meta))(1.0) == 2.0
    assert jax.jit(jax.grad(lambda x: f(x, meta)))(1.0) == 2.0


@row("B3")
@pytest.mark.parametrize(
    "make",
    [lambda: float("nan"), lambda: np.array([object()]), lambda: np.array(["a", "b"]), object, dict],
    ids=range(5),
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_static_outputs_made_anew_by_each_run(make, wrap):
    f = jaxfn.autograd_function(lambda ctx, x: (x * 2, make()), lambda ctx, g, _: g * 2)
    assert jax.grad(wrap(lambda x: f(x)[0]))(1.0) == 2.0


@row("B7")
def test_variadic_parameters_without_items_and_private_names():
    seen = []

    @jaxfn.function
    def f(ctx, _x, *args):
        ctx.save_for_backward(_x=_x)
        return _x * 2

    @f.backward
    def _(ctx, g):
        flags = ctx.needs_input_grad
        seen.append((flags.args, flags["args"], flags._x))
        assert ctx.saved_variables._x is not None
        with pytest.raises(KeyError, match="'typo' is not among the parameters: _x, args"):
            _ = flags["typo"]
        return {"_x": g * 2, "args": ()}

    assert jax.grad(f)(1.0) == 2.0
    assert seen == [((), (), True)]


@row("B6")
def test_names_of_torch_may_be_assigned():
    @jaxfn.function
    def f(ctx, x):
        ctx.num_inputs, ctx.num_outputs, ctx.needs_input_grad = 7, 8, (True,)
        return x * 2

    @f.backward
    def _(ctx, g):
        assert (ctx.num_inputs, ctx.num_outputs, ctx.needs_input_grad) == (7, 8, (True,))
        return g * 2

    assert jax.grad(f)(1.0) == 2.0
