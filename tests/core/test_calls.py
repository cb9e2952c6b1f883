"""Calls that were wrong, or silent, before the core was rebuilt: arguments, outputs, registration, messages."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import KEEPS_TRACES, row

EVERY_PROGRAM = pytest.mark.parametrize("program", CONTEXTS)
X = jnp.array([0.3, -1.2, 0.7], jnp.float32)

# --- gradients of keyword arguments


class Weighted(jaxfn.Function):
    """x * scale + shift, with the gradients of the keywords by position, three times too large."""

    @staticmethod
    def forward(ctx, x, **parameters):
        ctx.save_for_backward(x, parameters["scale"])
        return x * parameters["scale"] + parameters["shift"]

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return 3 * g * scale, 3 * jnp.sum(g * x), 3 * jnp.sum(g)


class WeightedByName(Weighted):
    @staticmethod
    def backward(ctx, g):
        return dict(zip(("x", "scale", "shift"), Weighted.backward(ctx, g), strict=True))


def weighted_loss(function):
    return lambda x, scale, shift: jnp.sum(jnp.sin(function.apply(x, scale=scale, shift=shift)))


def weighted_loss_of_kwargs(transformation):
    """JAX's transformations sort keywords."""
    return lambda function: (
        lambda x, scale, shift: jnp.sum(jnp.sin(transformation(function.apply)(x, scale=scale, shift=shift)))
    )


LOSSES = {
    "in the order of the call": weighted_loss,
    "jit of apply": weighted_loss_of_kwargs(jax.jit),
    "checkpoint of apply": weighted_loss_of_kwargs(jax.checkpoint),
}
ARGS = X, jnp.float32(2.0), jnp.float32(0.4)


@row("C2", "C5")
@EVERY_PROGRAM
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_two_unnamed_keywords_by_position_are_refused(loss, program):
    """Before, `jit` and `checkpoint`, which sort keywords, swapped the two gradients."""
    derivative = jax.grad(CONTEXTS[program](LOSSES[loss](Weighted)), argnums=(0, 1, 2))
    with pytest.raises(RuntimeError, match=r"Weighted\.backward.*dict"):
        derivative(*ARGS)


@row("C5")
@EVERY_PROGRAM
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_two_unnamed_keywords_by_name(loss, program):
    x, scale, shift = ARGS
    slope = 3 * jnp.cos(x * scale + shift)
    got = jax.grad(CONTEXTS[program](LOSSES[loss](WeightedByName)), argnums=(0, 1, 2))(*ARGS)
    for ours, expected in zip(got, (slope * scale, jnp.sum(slope * x), jnp.sum(slope)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


@row("C2")
@EVERY_PROGRAM
def test_the_gradient_of_a_single_unnamed_keyword_by_position(program):
    one = jaxfn.autograd_function(
        lambda ctx, x, **keywords: ctx.save_for_backward(x, keywords["scale"]) or x * keywords["scale"],
        lambda ctx, g: (5 * g * ctx.saved_tensors[1], 7 * jnp.sum(g * ctx.saved_tensors[0])),
    )
    loss = CONTEXTS[program](lambda x, scale: jnp.sum(one(x, scale=scale)))
    of_x, of_scale = jax.grad(loss, argnums=(0, 1))(X, 2.0)
    np.testing.assert_allclose(of_x, [10, 10, 10], rtol=1e-6)
    np.testing.assert_allclose(of_scale, 7 * jnp.sum(X), rtol=1e-5)


@row("C2")
@EVERY_PROGRAM
@pytest.mark.parametrize("transformation", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_gradients_of_keywords_that_the_signature_names_are_by_position(transformation, program):
    """They have an order of their own, which is not that of the alphabet or of the call."""

    class Named(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, *, shift, scale):
            return x * scale + shift

        @staticmethod
        def backward(ctx, g):
            return 2 * g, 5 * jnp.sum(g), 7 * jnp.sum(g)

    apply = transformation(Named.apply)
    loss = CONTEXTS[program](lambda x, scale, shift: jnp.sum(apply(x, scale=scale, shift=shift)))
    _, of_scale, of_shift = jax.grad(loss, argnums=(0, 1, 2))(*ARGS)
    np.testing.assert_allclose([of_scale, of_shift], [21, 15], rtol=1e-6)


# --- outputs that are Python numbers


class FloatOfInput(jaxfn.Function):
    """Its only output is a Python float."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return float(jnp.sum(x * x))

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class ItemOfOutput(FloatOfInput):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sum(x * x).item()


class SecondIsFloat(jaxfn.Function):
    """Returns an array and a Python float that depends on the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x), float(jnp.max(x))

    @staticmethod
    def backward(ctx, g, _):
        return g * jnp.cos(ctx.saved_tensors[0])


class FloatInDict(SecondIsFloat):
    @staticmethod
    def forward(ctx, x):
        return {"y": jnp.sin(x), "max": x.max().item()}, "text"


def first_leaf(outputs):
    return jnp.sum(jax.tree.leaves(outputs)[0])


NUMBERS = {
    "float": (FloatOfInput, ""),
    "item": (ItemOfOutput, ""),
    "next to an array": (SecondIsFloat, "output 1"),
    "in a dict": (FloatInDict, "output 0"),
}
EAGER_DERIVATIVES = {
    "grad": jax.grad,
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
    "value_and_grad": jax.value_and_grad,
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x))),
    "grad of cond outside": lambda f: jax.grad(lambda x: f(x) if x.sum() < 9 else 0.0),
}


@row("B3", "A3")
@pytest.mark.parametrize("derivative", EAGER_DERIVATIVES)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_python_number_made_of_a_differentiated_input_is_refused(number, derivative):
    """Before, its derivative was zero."""
    function, output = NUMBERS[number]
    with pytest.raises((TypeError, RuntimeError), match=rf"{function.__name__}\.forward.*{output}"):
        EAGER_DERIVATIVES[derivative](lambda x: first_leaf(function.apply(x)))(X)


@row("B3", "A3")
def test_a_python_number_made_of_an_input_of_forward_mode_is_refused():
    class Both(FloatOfInput):
        @staticmethod
        def jvp(ctx, t):
            return 2 * jnp.sum(t * ctx.saved_tensors[0])

    with pytest.raises((TypeError, RuntimeError), match=r"Both\.forward"):
        jax.jvp(Both.apply, (X,), (X,))


@row("B3")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_python_number_where_nothing_is_differentiated(number):
    """Another factor of the loss may be differentiated."""
    function, _ = NUMBERS[number]
    assert {type(leaf) for leaf in jax.tree.leaves(function.apply(X))} & {float}
    value, slope = jax.value_and_grad(lambda w: w * first_leaf(function.apply(X)))(2.0)
    np.testing.assert_allclose(value, 2 * slope, rtol=1e-6)
    assert slope != 0


class NumbersOfOtherThings(jaxfn.Function):
    """Shapes, static arguments, constants and text are outputs, too."""

    @staticmethod
    def forward(ctx, x, factor, options):
        ctx.factor = factor
        return factor * x, x.size, 2.5 * factor, 0.125, "text", options["rate"] / 2, None, x.ndim > 0, factor * 1j

    @staticmethod
    def backward(ctx, g, *others):
        assert others == (None,) * 8
        return 10 * g * ctx.factor, None, None


@row("B3")
@EVERY_PROGRAM
def test_other_python_numbers_stay_outputs(program):
    seen = []

    def loss(x):
        outputs = NumbersOfOtherThings.apply(x, 3.0, {"rate": 0.5})
        seen.append(outputs[1:])
        return jnp.sum(outputs[0])

    np.testing.assert_allclose(jax.grad(CONTEXTS[program](loss))(X), [30, 30, 30])
    assert set(seen) == {(3, 7.5, 0.125, "text", 0.25, None, True, 3j)}


# --- methods that are replaced


class Multiplier:
    """A callable that compares equal to every other one of its class."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, ctx, x):
        return self.factor * x

    def __eq__(self, other):
        return isinstance(other, Multiplier)

    def __hash__(self):
        return 1


@row("A4", "B13")
@EVERY_PROGRAM
@pytest.mark.parametrize("method", ["forward", "backward", "jvp"])
def test_a_callable_replaced_by_one_that_compares_equal(method, program):
    class Replaced(jaxfn.Function):
        forward = Multiplier(2.0)
        backward = Multiplier(20.0)
        jvp = Multiplier(200.0)

    takes = {
        "forward": lambda x: Replaced.apply(x)[0],
        "backward": lambda x: jax.grad(lambda x: Replaced.apply(x).sum())(x)[0],
        "jvp": lambda x: jax.jvp(Replaced.apply, (x,), (jnp.ones_like(x),))[1][0],
    }
    one = jnp.ones(2)
    before = CONTEXTS[program](takes[method])(one)
    setattr(Replaced, method, Multiplier(3.0))
    assert before == {"forward": 2, "backward": 20, "jvp": 200}[method]
    assert CONTEXTS[program](takes[method])(one) == 3


# --- what ctx keeps

KEPT = {
    "numbers and text": lambda x: {1: x, "name": [2 * x], None: 3.0},
    "tuples and None": lambda x: {(1, "a"): x, None: 2 * x},
    "nested": lambda x: ["a", {"deep": {2: x, "b": {b"c": 2 * x, 0.5: "text"}}}],
}


@row("B6")
@EVERY_PROGRAM
@pytest.mark.parametrize("kept", KEPT)
def test_a_dict_on_ctx_whose_keys_cannot_be_sorted(kept, program):
    seen = []

    def forward(ctx, x):
        ctx.kept = KEPT[kept](jnp.cos(x))
        ctx.keys = [*KEPT[kept](0)] if kept != "nested" else None
        return jnp.sin(x)

    def backward(ctx, g):
        if ctx.keys is not None:
            seen.append([*ctx.kept] == ctx.keys)
        return g * sum(_arrays_of(ctx.kept))

    f = jaxfn.autograd_function(forward, backward)
    first = jax.grad(CONTEXTS[program](lambda x: f(x).sum()))
    np.testing.assert_allclose(first(X), 3 * jnp.cos(X), rtol=1e-6)
    second = jax.grad(lambda x: jnp.sum(first(x)))
    np.testing.assert_allclose(second(X), -3 * jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(second)(X), -3 * jnp.sin(X), rtol=1e-6)
    assert all(seen)


def _arrays_of(value):
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays_of(item)
    elif isinstance(value, jax.Array):
        yield value


# --- what is forgotten, or misspelled


class ForgetsToReturn(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        x * x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class ForgetsToReturnInSeparateStyle(jaxfn.Function):
    @staticmethod
    def forward(x):
        def inner():
            return x  # of another function

        inner()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


class ReturnsNone(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        return None

    @staticmethod
    def backward(ctx, g):
        return None


class ReturnsSometimes(ReturnsNone):
    @staticmethod
    def forward(ctx, x):
        if x.ndim > 5:
            return x


@row("B3")
@pytest.mark.parametrize("function", [ForgetsToReturn, ForgetsToReturnInSeparateStyle])
@pytest.mark.parametrize("program", ["eager", "jit", "vmap"])
def test_a_forward_without_a_return_statement_is_warned_of_once(function, program):
    class Fresh(function):
        pass

    line = function.forward.__code__.co_firstlineno
    with pytest.warns(UserWarning, match=rf"Fresh\.forward returned nothing.*test_calls\.py:{line}") as caught:
        for _ in range(2):
            assert CONTEXTS[program](Fresh.apply)(X) is None
    assert len(caught) == 1


@row("B3")
@pytest.mark.parametrize("function", [ReturnsNone, ReturnsSometimes])
def test_a_forward_that_returns_None_on_purpose_is_not_warned_of(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function.apply(X) is None


METHODS = ["backward", "jvp", "vmap", "setup_context"]


@row("B1")
@pytest.mark.parametrize("method", METHODS)
def test_a_rule_that_would_replace_the_function_is_refused(method):
    """`@square.backward` on a `def square` makes `square` the rule."""

    @jaxfn.function
    def square(ctx, x):
        return x * x

    with pytest.raises((TypeError, ValueError), match=rf"square.*{method}.*def _\("):

        @getattr(square, method)
        def square(ctx, g):
            return g


@row("B1")
@pytest.mark.parametrize("method", METHODS)
def test_rules_of_other_names_replace_nothing(method):
    """Lambdas have one name, all of them."""

    @jaxfn.function
    def square(ctx, x):
        return x * x

    @getattr(square, method)
    def square_rule(ctx, g):
        return g

    cube = jaxfn.function(lambda ctx, x: x**3)
    getattr(cube, method)(lambda ctx, g: g)
    assert square_rule(None, 4.0) == 4.0


MISSPELLED = ["backwards", "back_ward", "bacward", "Backward", "backword"]


@row("C13")
@pytest.mark.parametrize("name", MISSPELLED)
@pytest.mark.parametrize("program", ["eager", "jit", "scan"])
def test_the_error_of_a_missing_backward_names_a_similar_attribute(name, program):
    misspelled = type("Misspelled", (jaxfn.Function,), {
        "forward": staticmethod(lambda ctx, x: x * x),
        name: staticmethod(lambda ctx, g: g),
    })  # fmt: skip
    with pytest.raises(NotImplementedError, match=rf"Misspelled.*`?{name}`?.*did you mean `?backward`?"):
        jax.grad(CONTEXTS[program](lambda x: misspelled.apply(x).sum()))(X)


@row("D6")
def test_the_error_of_a_missing_jvp_names_a_similar_attribute():
    misspelled = type("Misspelled", (jaxfn.Function,), {
        "forward": staticmethod(lambda ctx, x: x * x),
        "backward": staticmethod(lambda ctx, g: g),
        "jpv": staticmethod(lambda ctx, t: t),
    })  # fmt: skip
    with pytest.raises(TypeError, match=r"Misspelled[\s\S]*jpv[\s\S]*did you mean `?jvp`?"):
        jax.jvp(misspelled.apply, (X,), (X,))


@row("A6")
def test_the_error_of_a_missing_forward_names_a_similar_attribute():
    misspelled = type("Misspelled", (jaxfn.Function,), {"forwards": staticmethod(lambda ctx, x: x * x)})
    with pytest.raises(NotImplementedError, match=r"Misspelled.*forwards.*did you mean `?forward`?"):
        misspelled.apply(X)


@row("A6")
def test_the_error_of_a_forward_without_ctx_names_a_similar_attribute():
    misspelled = type("Misspelled", (jaxfn.Function,), {
        "forward": staticmethod(lambda x, w: x * w),
        "setup_ctx": staticmethod(lambda ctx, inputs, output: None),
    })  # fmt: skip
    with pytest.raises(TypeError, match=r"Misspelled.*setup_ctx.*did you mean `?setup_context`?"):
        misspelled.apply(X, X)


@row("C13")
def test_helpers_are_not_taken_for_misspelled_methods():
    other = type("Other", (jaxfn.Function,), {
        "forward": staticmethod(lambda ctx, x: x * x),
        "helper": staticmethod(lambda x: x),
        "block_size": 128,
    })  # fmt: skip
    with pytest.raises(NotImplementedError, match="Other") as caught:
        jax.grad(lambda x: other.apply(x).sum())(X)
    assert "did you mean" not in str(caught.value)


# --- outputs without a derivative, as backward gets them


def structured(materialize):
    """A Function with outputs of many structures, and the gradients that its backward got."""
    seen: list[Any] = []

    class Structured(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, key):
            ctx.set_materialize_grads(materialize)
            count = jnp.arange(3, dtype=jnp.int32)
            return (
                2 * x,
                {"count": count, "text": "a"},
                {"key": key},
                ["text", 3, None],
                {"flag": x > 0, "both": (key, count)},
                (),
                "text",
                None,
                {"nothing": {}},
                count,
            )

        @staticmethod
        def backward(ctx, *grads):
            seen.append(jax.tree.map(lambda g: (str(g.dtype), g.shape, bool((g == 0).all())), grads[1:]))
            return 7 * grads[0], None

    return Structured.apply, seen


@row("B3", "C11")
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("outside", ["grad", "vjp", "disabled jit"])
def test_outputs_without_a_differentiable_leaf_reach_backward_in_their_structure(outside, materialize):
    apply, seen = structured(materialize)
    key = jax.random.key(0)

    def loss(x):
        return jnp.sum(apply(x, key)[0])

    if outside == "vjp":
        gradient = jax.vjp(loss, X)[1](jnp.float32(1))[0]
    elif outside == "grad":
        gradient = jax.grad(loss)(X)
    else:
        with jax.disable_jit():
            gradient = jax.jit(jax.grad(loss))(X)
    np.testing.assert_allclose(gradient, [7, 7, 7])
    if not materialize:  # None for the whole output, or in its structure
        assert len(seen) == 1 and not jax.tree.leaves(seen)
        return
    count, flag = ("int32", (3,), True), ("bool", (3,), True)
    assert seen == [
        (
            {"count": count, "text": None},
            {"key": None},
            [None, None, None],
            {"flag": flag, "both": (None, count)},
            (),
            None,
            None,
            {"nothing": {}},
            count,
        )
    ]


@row("B3", "C11")
@pytest.mark.parametrize("program", ["jit", "vmap", "checkpoint", "scan"])
def test_their_structure_is_the_same_where_jax_traces(program):
    seen = []

    class Structured(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, {"count": jnp.arange(3), "text": "a"}

        @staticmethod
        def backward(ctx, g, others):
            seen.append((sorted(others), others["text"], others["count"].dtype, others["count"].shape))
            return g

    jax.grad(CONTEXTS[program](lambda x: Structured.apply(x)[0].sum()))(X)
    assert seen[0] == (["count", "text"], None, jnp.int32, (3,))


# --- the hint for NumPy scalars


class ScaledByNumPy(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, scale, size):
        if scale > 0.1:
            return jnp.zeros(size) + x[0] * scale
        return jnp.ones(size) * x[0]

    @staticmethod
    def backward(ctx, g):
        return jnp.sum(g) * jnp.ones(3), None, None


@row("L1")
@pytest.mark.parametrize("program", ["eager", "jit", "scan", "checkpoint"])
@pytest.mark.parametrize(
    ("scale", "size", "hint"),
    [(1 / np.sqrt(16), 4, "float"), (0.25, np.int64(4), "int"), (np.float32(0.25), 4, "float")],
    ids=["branch", "shape", "branch on float32"],
)
def test_a_numpy_scalar_that_jax_traces_gets_a_hint(scale, size, hint, program):
    """`1 / np.sqrt(n)` is an array to JAX; a Python number would be static. Right, or with the hint."""
    gradient = jax.grad(CONTEXTS[program](lambda x: ScaledByNumPy.apply(x, scale, size).sum()))
    try:
        got = gradient(X)
    except Exception as error:
        name = "scale" if hint == "float" else "size"
        assert name in str(error) and f"{hint}(" in str(error) and "ScaledByNumPy" in str(error), str(error)
    else:
        np.testing.assert_allclose(got, [4, 4, 4])


# --- JAX's own errors


class Branching(jaxfn.Function):
    """Looks at the value of an array."""

    @staticmethod
    def forward(ctx, x):
        return x if x[0] > 0 else -x

    @staticmethod
    def backward(ctx, g):
        return g


@row("A7", "L1")
@pytest.mark.parametrize("program", ["jit", "checkpoint", "scan", "cond", "vmap"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_errors_of_jax_name_the_function_and_its_file(differentiated, program):
    """They did before; now that forward is a part of the program around it, JAX alone would name that one only."""
    call = CONTEXTS[program](lambda x: Branching.apply(x).sum())
    line = Branching.forward.__code__.co_firstlineno
    with pytest.raises(jax.errors.TracerBoolConversionError, match="Branching") as caught:
        (jax.grad(call) if differentiated else call)(X)
    assert re.search(rf"test_calls\.py:({line}|{line + 1}|{line + 2})\b", str(caught.value)), str(caught.value)


# --- forward mode that a Function does not have


class OnlyReverse(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, g):
        return g * jnp.cos(ctx.saved_tensors[0])


def _while(f):
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


def _custom_root(f):
    """The tangent of the residual is what the solver needs."""

    def rooted(x):
        return jax.lax.custom_root(
            lambda y: y - 0.5 * f(y) - x, x, lambda g, y: y, lambda g, y: jnp.linalg.solve(jax.jacfwd(g)(y), y)
        )

    return rooted


def _jvp_in(around):
    return lambda f, x: jax.jvp(around(f), (x,), (jnp.ones_like(x),))


FORWARD_MODE = {name: _jvp_in(around) for name, around in CONTEXTS.items()} | {
    "while": _jvp_in(_while),
    "custom_root": _jvp_in(_custom_root),
    "nested jit": _jvp_in(lambda f: jax.jit(lambda x: jax.jit(f)(x) * 2)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jacfwd of jit": lambda f, x: jax.jacfwd(jax.jit(f))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "linearize of jit": lambda f, x: jax.linearize(jax.jit(f), x)[1](x),
    "jvp of grad of square": lambda f, x: jax.jvp(jax.grad(lambda x: (f(x) ** 2).sum()), (x,), (x,)),
    "jvp of jit of grad of square": lambda f, x: jax.jvp(jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())), (x,), (x,)),
    "hessian of square": lambda f, x: jax.hessian(lambda x: (f(x) ** 2).sum())(x),
    "gradient of custom_root": lambda f, x: jax.grad(lambda x: _custom_root(f)(x).sum())(x),
}


@row("D6", "L1")
@pytest.mark.parametrize("where", FORWARD_MODE)
def test_the_error_of_forward_mode_names_the_function_everywhere(where):
    with pytest.raises(TypeError, match=r"OnlyReverse[\s\S]*(jvp|generate_jvp_rule)"):
        FORWARD_MODE[where](OnlyReverse.apply, X)


@row("D6", "L1")
def test_the_error_of_forward_mode_names_the_function_in_optimistix():
    optx = pytest.importorskip("optimistix")
    solver = optx.Newton(rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match=r"OnlyReverse[\s\S]*(jvp|generate_jvp_rule)"):
        optx.root_find(lambda y, _: y - 0.5 * OnlyReverse.apply(y) - X, solver, X)


# --- lifetime


class Token:
    """Something that a Function closes over, whose lifetime can be watched."""


def made_and_dropped(make, use):
    """How many of the objects that a function made inside `use` closes over are alive afterwards."""
    watched = []

    def program(x):
        token = Token()
        watched.append(weakref.ref(token))
        return make(token)(x)

    use(program)
    gc.collect()
    alive = sum(ref() is not None for ref in watched)
    jax.clear_caches()
    gc.collect()
    return alive, sum(ref() is not None for ref in watched)


def function_of(token):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        assert isinstance(token, Token)
        return jnp.sin(x)

    def backward(ctx, g):
        assert isinstance(token, Token)
        return g * jnp.cos(ctx.saved_tensors[0])

    return jaxfn.autograd_function(forward, backward)


def custom_vjp_of(token):
    @jax.custom_vjp
    def f(x):
        assert isinstance(token, Token)
        return jnp.sin(x)

    def bwd(x, g):
        assert isinstance(token, Token)
        return (g * jnp.cos(x),)

    f.defvjp(lambda x: (f(x), x), bwd)
    return f


USES = {
    "eager": lambda f: f(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jit": lambda f: jax.jit(lambda x: f(x))(X),
    "jit grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    "grad jit": lambda f: jax.grad(jax.jit(lambda x: f(x).sum()))(X),
    "grad checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X),
    "grad scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0].sum())(X),
    "jit vmap grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(X),
    "jit grad grad": lambda f: jax.jit(jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()))(X),
    "grad jit grad": lambda f: jax.grad(lambda x: jax.jit(jax.grad(lambda x: f(x).sum()))(x).sum())(X),
}


# By JAX's experimental implementations.
KEPT_UNTIL_CLEARED = {"grad scan"}


@row("B13")
@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=KEEPS_TRACES) if use in KEPT_UNTIL_CLEARED else use for use in USES]
)
def test_a_function_made_inside_a_program_is_freed_with_it(use):
    """As early as what a hand-written custom_vjp closes over, and at the latest when JAX's caches are cleared."""
    ours, ours_cleared = made_and_dropped(function_of, USES[use])
    by_hand, by_hand_cleared = made_and_dropped(custom_vjp_of, USES[use])
    assert by_hand_cleared == 0
    assert ours <= by_hand
    assert ours_cleared == 0
