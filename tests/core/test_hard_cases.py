"""What went wrong, or nearly, once: each test is a defect that an independent review found."""

import collections
import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.conftest import COMING
from tests.core.test_backward import MESSAGE, once


def other(x, w):
    return x


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


def scan_body(f, carry, _):
    return (f(*carry), carry[1]), None


@pytest.mark.parametrize("f", [Mul.apply, MulSavingLess.apply, MulSavingMuchLess.apply], ids=["all", "less", "varying"])
@pytest.mark.parametrize("wrap", ["cond", "scan", "jit", "while_in_jit"])
def test_B7_gradients_do_not_depend_on_which_were_taken_before(f, wrap):
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


class Holder:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("me", "value")

    def __init__(self, value):
        self.value = {"deep": [value]}
        self.me = self  # a cycle


HIDING = {
    "slots": Slotted,
    "closure": lambda x: lambda g: 2 * x * g,
    "partial": lambda x: functools.partial(jnp.multiply, 2 * x),
    "object": lambda x: Holder([x]),
    "deque": lambda x: collections.deque([x]),
}


def backward_of(kind, hidden, g):
    if kind in ("closure", "partial"):
        return hidden(g)
    if kind == "slots":
        return 2 * g * hidden.value["deep"][0]
    return 2 * g * (hidden.value[0] if kind == "object" else hidden[0])


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_B6_arrays_hidden_in_closures_and_objects_keep_their_derivative(kind, wrap):
    def forward(ctx, x):
        ctx.hidden = HIDING[kind](x)
        return x * x

    f = jaxfn.autograd_function(forward, lambda ctx, g: backward_of(kind, ctx.hidden, g))
    assert wrap(jax.grad(f))(3.0) == 6.0
    assert wrap(jax.grad(jax.grad(f)))(3.0) == 2.0


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("inner", [jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x[None])[0]])
def test_B6_arrays_hidden_from_another_trace_are_refused(kind, inner):
    """JAX loses them on the way to backward, and a second derivative through them was zero in silence."""

    def forward(ctx, x):
        ctx.hidden = HIDING[kind](x * 1)
        return x * x

    f = jaxfn.autograd_function(forward, lambda ctx, g: backward_of(kind, ctx.hidden, g))
    twice = jax.jit(jax.grad(jax.jit(jax.grad(inner(f)))))
    refused = pytest.raises(NotImplementedError, match="keeps a JAX array inside a closure or an object on ctx")
    noticed = pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer")  # by JAX itself
    with refused:
        jax.grad(inner(f))(3.0)
    with noticed if COMING and inner is jax.checkpoint else refused:
        twice(3.0)


def test_B6_an_object_from_outside_may_hold_traced_arrays():
    """As a module that is handed to the Function, with parameters of an outer trace."""

    def forward(ctx, x, module):
        ctx.module = module
        return x * module.value

    f = jaxfn.autograd_function(forward, lambda ctx, g: (g * ctx.module.value, None))

    @jax.jit
    def gradient(x, w):
        module = Holder(w)
        return jax.grad(lambda x: jax.vmap(lambda c: f(c, module))(x).sum())(x)

    np.testing.assert_allclose(gradient(jnp.ones(2), 3.0), [3.0, 3.0])


def test_C14_a_closure_on_ctx():
    f = once(lambda ctx, g: ctx.f(g), lambda ctx, x: setattr(ctx, "f", lambda g: 2 * x * g) or x * x)
    assert jax.grad(f)(3.0) == 6.0
    with pytest.raises(RuntimeError, match=MESSAGE):
        jax.grad(jax.grad(f))(3.0)


def test_C14_boxed_gradients_that_backward_clears():
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


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
@pytest.mark.parametrize("save", [False, True], ids=["saves_nothing", "saves_output"])
def test_A5_closed_over_values_differentiated_further_out(wrap, save):
    """The value of a Function inside a differentiated function depends on what its forward closes over."""

    def loss(f):
        return wrap(lambda w: jax.value_and_grad(f(w))(jnp.float32(0.7))[0])

    def ours(w):
        def forward(ctx, x):
            y = jnp.exp(w * x)
            if save:
                ctx.save_for_backward(y)
            return y

        return jaxfn.autograd_function(forward, lambda ctx, g: g)

    expected = jax.grad(loss(lambda w: lambda x: jnp.exp(w * x)))(0.5)
    np.testing.assert_allclose(jax.grad(loss(ours))(0.5), expected, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
@pytest.mark.parametrize("kept", ["cell", "default", "object", "static argument"])
@pytest.mark.parametrize("moves", [False, True], ids=["x fixed", "x moves too"])
def test_A5_D3_closed_over_values_beside_a_saved_intermediate(wrap, kept, moves):
    """What the outputs depend on beside the inputs keeps its derivative where the inputs are differentiated too."""

    def ours(c):
        holder = Holder(c)

        def backward(ctx, g):
            x, s = ctx.saved_tensors
            return g * ctx.c * ctx.c * jnp.cos(x * ctx.c) + 0 * s, *[None] * (kept == "static argument")

        def run(ctx, x, c):
            s = jnp.sin(x * c)
            ctx.save_for_backward(x, s)
            ctx.c = c
            return s * c

        forwards = {
            "cell": lambda ctx, x: run(ctx, x, c),
            "default": lambda ctx, x, *, scale=lambda c=c: c: run(ctx, x, scale()),
            "object": lambda ctx, x: run(ctx, x, holder.value),
            "static argument": lambda ctx, x, held: run(ctx, x, held.value),
        }
        f = jaxfn.autograd_function(forwards[kept], backward)
        return (lambda x: f(x, holder)) if kept == "static argument" else f

    def loss(f):
        def total(c, x):
            value, gradient = jax.value_and_grad(f(c))(jnp.sin(c) if moves else x)
            return 2 * value + gradient

        return jax.grad(wrap(total), (0, 1))

    expected = loss(lambda c: lambda x: jnp.sin(x * c) * c)(1.3, 0.7)
    np.testing.assert_allclose(loss(ours)(1.3, 0.7), expected, rtol=1e-5)


@pytest.mark.parametrize("make", [np.full, jnp.full], ids=["numpy", "jax"])
def test_B4_B8_numpy_outputs_are_known_by_identity(make):
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["k"])
@dataclass
class WithMeta:
    x: jax.Array
    k: float = field(metadata={"static": True})


def test_A2_static_parts_of_pytrees_are_told_apart():
    f = jaxfn.autograd_function(
        lambda ctx, m: setattr(ctx, "k", m.k) or m.x * 1.0,
        lambda ctx, g: WithMeta(g * (np.copysign(1, ctx.k) + isinstance(ctx.k, bool)), ctx.k),
    )
    got = [float(jax.grad(lambda x, k=k: f(WithMeta(x, k)))(1.0)) for k in (0.0, -0.0, 1, True, 1.0)]
    assert got == [1.0, -1.0, 1.0, 2.0, 1.0]


def test_D2_a_closed_over_constant_is_not_the_input():
    anchor = jnp.float32(3)
    f = jaxfn.autograd_function(
        lambda ctx, x: ctx.save_for_backward(anchor) or anchor * x, lambda ctx, g: g * ctx.saved_tensors[0]
    )
    assert jax.grad(f)(anchor) == 3.0
    assert jax.grad(jax.grad(f))(anchor) == 0.0


def test_A1_one_name_for_two_inputs_is_refused():
    f = jaxfn.autograd_function(lambda ctx, x, /, **kw: x * kw["x"], lambda ctx, g: {"x": g})
    with pytest.raises(TypeError, match="'x' names two inputs"):
        f(1.0, x=2.0)


def test_B6_dicts_that_jax_cannot_sort():
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


@pytest.mark.parametrize(
    "make",
    [lambda: float("nan"), lambda: np.array([object()]), lambda: np.array(["a", "b"]), object, dict],
    ids=range(5),
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_B3_static_outputs_made_anew_by_each_run(make, wrap):
    f = jaxfn.autograd_function(lambda ctx, x: (x * 2, make()), lambda ctx, g, _: g * 2)
    assert jax.grad(wrap(lambda x: f(x)[0]))(1.0) == 2.0


class Validating:
    def __init__(self, x):
        assert x.ndim == 1
        self.x = x


jax.tree_util.register_pytree_with_keys(
    Validating, lambda v: (((jax.tree_util.GetAttrKey("x"), v.x),), None), lambda _, children: Validating(*children)
)


def test_C6_pytree_classes_that_check_their_leaves():
    f = jaxfn.autograd_function(lambda ctx, v: v.x * 2, lambda ctx, g: Validating(2 * g))
    np.testing.assert_allclose(jax.grad(lambda x: f(Validating(x)).sum())(jnp.ones(3)), np.full(3, 2.0))


def test_B7_variadic_parameters_without_items_and_private_names():
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


def test_C9_a_random_key_is_no_gradient():
    f = jaxfn.autograd_function(lambda ctx, x: x * 2, lambda ctx, g: jax.random.key(0))
    with pytest.raises(TypeError, match="returned a random key as the gradient of input 0"):
        jax.grad(f)(1.0)


def test_C3_a_list_is_said_to_count_as_one():
    f = jaxfn.autograd_function(lambda ctx, x, t: x * t, lambda ctx, g: [g, None])
    with pytest.raises(RuntimeError, match="got a list, which counts as one gradient"):
        jax.grad(f)(1.0, 2.0)


def test_C10_names_the_value_inside_a_pytree():
    f = jaxfn.autograd_function(lambda ctx, t: t["x"] * 2, lambda ctx, g: {"x": g * 2, "k": g})
    with pytest.raises(RuntimeError, match=r"input 0 \('t'\)\['k'\], but that input is the Python value 7"):
        jax.grad(lambda x: f({"x": x, "k": 7}))(1.0)


def test_A4_apply_may_be_overridden():
    class WithDefault(Mul):
        @classmethod
        def apply(cls, x):
            return super().apply(x, jnp.float32(2))

    assert WithDefault.apply(jnp.float32(3)) == 6.0
    assert jax.grad(WithDefault.apply)(3.0) == 2.0


def test_B6_names_of_torch_may_be_assigned():
    @jaxfn.function
    def f(ctx, x):
        ctx.num_inputs, ctx.num_outputs, ctx.needs_input_grad = 7, 8, (True,)
        return x * 2

    @f.backward
    def _(ctx, g):
        assert (ctx.num_inputs, ctx.num_outputs, ctx.needs_input_grad) == (7, 8, (True,))
        return g * 2

    assert jax.grad(f)(1.0) == 2.0


class _WritesAndHides(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, ref):
        slope = jnp.cos(x)
        ref[...] = slope
        ctx.pull = lambda g: g * slope
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.pull(grad_output), None


def test_D3_an_array_hidden_beside_a_ref_is_refused_where_it_could_be_differentiated_again():
    ref = jax.new_ref(jnp.zeros(()))
    np.testing.assert_allclose(jax.grad(_WritesAndHides.apply)(0.5, ref), np.cos(0.5), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="_WritesAndHides takes a jax.Ref and keeps a JAX array inside"):
        jax.grad(jax.grad(_WritesAndHides.apply))(0.5, ref)
