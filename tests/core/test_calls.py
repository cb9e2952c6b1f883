"""Keywords, outputs that are Python numbers, methods that are replaced or misspelled, messages, lifetime."""

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
from tests.support.cases import function_of, hand_written_of
from tests.support.contexts import CONTEXTS, program
from tests.support.marks import CACHES_TRACES, TRACES_ALWAYS, cells, row

EVERY_CONTEXT = pytest.mark.parametrize("context", CONTEXTS)
X = jnp.array([0.3, -1.2, 0.7], jnp.float32)

# ---------------------------------------------------------------------------------------------------------------------
# Gradients of keyword arguments


IN_ORDER = "in the order of the signature"


def weighted(gradients):
    """x * scale + shift, whose gradients are three times too large, and returned in this way."""

    def forward(ctx, x, **parameters):
        ctx.save_for_backward(x, parameters["scale"])
        return x * parameters["scale"] + parameters["shift"]

    def named(ctx, x, *, shift, scale):
        """The keywords have their own order, which is not alphabetical and not that of the call."""
        return forward(ctx, x, scale=scale, shift=shift)

    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        of_x, of_scale, of_shift = 3 * g * scale, 3 * jnp.sum(g * x), 3 * jnp.sum(g)
        if gradients == "by name":
            return {"x": of_x, "scale": of_scale, "shift": of_shift}
        return (of_x, of_shift, of_scale) if gradients == IN_ORDER else (of_x, of_scale, of_shift)

    return jaxfn.function(named if gradients == IN_ORDER else forward, backward, name="Weighted")


ARGS = X, jnp.float32(2.0), jnp.float32(0.4)
# JAX's transformations sort keywords.
AROUND_APPLY = {"apply": lambda f: f, "jit of apply": jax.jit, "checkpoint of apply": jax.checkpoint}
APPLIED = cells(
    "context, transformation",
    [
        ("eager", "apply"), ("jit", "jit of apply"), ("checkpoint", "checkpoint of apply"),
        ("vmap", "jit of apply"), ("scan", "apply"), ("cond", "checkpoint of apply"),
    ],
    CONTEXTS,
    AROUND_APPLY,
)  # fmt: skip


def gradients_of_weighted(gradients, context, transformation):
    apply = AROUND_APPLY[transformation](weighted(gradients).apply)

    def loss(x, scale, shift):
        return jnp.sum(jnp.sin(apply(x, scale=scale, shift=shift)))

    return jax.grad(CONTEXTS[context](loss), argnums=(0, 1, 2))(*ARGS)


@row("C2", "C5")
@APPLIED
def test_gradients_of_two_unnamed_keywords_by_position_raise(context, transformation):
    with pytest.raises(RuntimeError, match=r"Weighted\.backward.*dict"):
        gradients_of_weighted("by position", context, transformation)


@row("C2", "C5")
@APPLIED
@pytest.mark.parametrize("gradients", ["by name", IN_ORDER])
def test_gradients_of_keywords(context, transformation, gradients):
    x, scale, shift = ARGS
    slope = 3 * jnp.cos(x * scale + shift)
    got = gradients_of_weighted(gradients, context, transformation)
    for ours, expected in zip(got, (slope * scale, jnp.sum(slope * x), jnp.sum(slope)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


@row("C2")
@EVERY_CONTEXT
def test_the_gradient_of_a_single_unnamed_keyword_by_position(context):
    one = jaxfn.autograd_function(
        lambda ctx, x, **keywords: ctx.save_for_backward(x, keywords["scale"]) or x * keywords["scale"],
        lambda ctx, g: (5 * g * ctx.saved_tensors[1], 7 * jnp.sum(g * ctx.saved_tensors[0])),
    )
    loss = CONTEXTS[context](lambda x, scale: jnp.sum(one(x, scale=scale)))
    of_x, of_scale = jax.grad(loss, argnums=(0, 1))(X, 2.0)
    np.testing.assert_allclose(of_x, [10, 10, 10], rtol=1e-6)
    np.testing.assert_allclose(of_scale, 7 * jnp.sum(X), rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs that are Python numbers

# forward, and what the error names of its output.
NUMBERS = {
    "float": (lambda ctx, x: float(jnp.sum(x * x)), ""),
    "item": (lambda ctx, x: jnp.sum(x * x).item(), ""),
    "next to an array": (lambda ctx, x: (jnp.sin(x), float(jnp.max(x))), "output 1"),
    "in a dict": (lambda ctx, x: ({"y": jnp.sin(x), "max": x.max().item()}, "text"), "output 0"),
}
EAGER_DERIVATIVES = {
    "grad": jax.grad,
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x))),
    "grad of cond outside": lambda f: jax.grad(lambda x: f(x) if x.sum() < 9 else 0.0),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
}


def number_loss(number):
    """The first leaf of a Function's outputs, summed."""
    f = jaxfn.autograd_function(NUMBERS[number][0], lambda ctx, g, *_: g * X, name="Number")
    f.jvp(lambda ctx, t: jax.tree.map(lambda _: t, NUMBERS[number][0](ctx, X)))
    return lambda x: jnp.sum(jax.tree.leaves(f(x))[0])


@row("B3", "A3")
@cells(
    "number, derivative",
    [
        ("float", "grad"), ("float", "jvp"), ("item", "vjp"), ("item", "grad of cond outside"),
        ("next to an array", "grad of grad"), ("next to an array", "grad"), ("in a dict", "vjp"),
    ],
    NUMBERS,
    EAGER_DERIVATIVES,
)  # fmt: skip
@TRACES_ALWAYS
def test_a_python_number_computed_from_a_differentiated_input_raises(number, derivative):
    """Its derivative would be zero."""
    with pytest.raises((TypeError, RuntimeError), match=rf"Number\.forward.*{NUMBERS[number][1]}"):
        EAGER_DERIVATIVES[derivative](number_loss(number))(X)


@row("B3")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_python_number_where_nothing_is_differentiated(number):
    """Another factor of the loss may be differentiated."""
    loss = number_loss(number)
    value, slope = jax.value_and_grad(lambda w: w * loss(X))(2.0)
    np.testing.assert_allclose(value, 2 * slope, rtol=1e-6)
    assert slope != 0


@jaxfn.function
def numbers_of_other_things(ctx, x, factor, options):
    """Shapes, static arguments, constants and text are outputs, too."""
    ctx.factor = factor
    return factor * x, x.size, 2.5 * factor, 0.125, "text", options["rate"] / 2, None, x.ndim > 0, factor * 1j


@numbers_of_other_things.backward
def _(ctx, g, *others):
    assert others == (None,) * 8
    return 10 * g * ctx.factor, None, None


@row("B3")
@EVERY_CONTEXT
def test_other_python_numbers_stay_outputs(context):
    seen = []

    def loss(x):
        outputs = numbers_of_other_things(x, 3.0, {"rate": 0.5})
        seen.append(outputs[1:])
        return jnp.sum(outputs[0])

    np.testing.assert_allclose(jax.grad(CONTEXTS[context](loss))(X), [30, 30, 30])
    assert set(seen) == {(3, 7.5, 0.125, "text", 0.25, None, True, 3j)}


# ---------------------------------------------------------------------------------------------------------------------
# Methods that are replaced


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
@EVERY_CONTEXT
@pytest.mark.parametrize("method", ["forward", "backward", "jvp"])
def test_a_callable_replaced_by_one_that_compares_equal(method, context):
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
    before = CONTEXTS[context](takes[method])(one)
    setattr(Replaced, method, Multiplier(3.0))
    assert before == {"forward": 2, "backward": 20, "jvp": 200}[method]
    assert CONTEXTS[context](takes[method])(one) == 3


# ---------------------------------------------------------------------------------------------------------------------
# What ctx stores

STORED = {
    "numbers and text": lambda x: {1: x, "name": [2 * x], None: 3.0},
    "tuples and None": lambda x: {(1, "a"): x, None: 2 * x},
    "nested": lambda x: ["a", {"deep": {2: x, "b": {b"c": 2 * x, 0.5: "text"}}}],
}


@row("B6")
@cells(
    "context, stored",
    [
        ("eager", "nested"), ("jit", "numbers and text"), ("checkpoint", "tuples and None"), ("vmap", "nested"),
        ("scan", "numbers and text"), ("cond", "nested"),
    ],
    CONTEXTS,
    STORED,
)  # fmt: skip
def test_a_dict_on_ctx_whose_keys_cannot_be_sorted(context, stored):
    seen = []

    def forward(ctx, x):
        ctx.stored = STORED[stored](jnp.cos(x))
        ctx.keys = [*STORED[stored](0)] if stored != "nested" else None
        return jnp.sin(x)

    def backward(ctx, g):
        if ctx.keys is not None:
            seen.append([*ctx.stored] == ctx.keys)
        return g * sum(_arrays_of(ctx.stored))

    f = jaxfn.autograd_function(forward, backward)
    first = jax.grad(CONTEXTS[context](lambda x: f(x).sum()))
    np.testing.assert_allclose(first(X), 3 * jnp.cos(X), rtol=1e-6)
    second = jax.grad(lambda x: jnp.sum(first(x)))
    np.testing.assert_allclose(jax.jit(second)(X), -3 * jnp.sin(X), rtol=1e-6)
    assert all(seen)


def _arrays_of(value):
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays_of(item)
    elif isinstance(value, jax.Array):
        yield value


# ---------------------------------------------------------------------------------------------------------------------
# What is forgotten, or misspelled


def forgets(ctx, x):
    x * x


def forgets_in_separate_style(x):
    def inner():
        return x  # of another function

    inner()


def returns_none(ctx, x):
    return None


def returns_sometimes(ctx, x):
    if x.ndim > 5:
        return x


def without_return(method, function):
    """A Function whose method this is."""
    methods = {"forward": lambda ctx, x: x * 2, "backward": lambda ctx, g: g, method: function}
    if function is forgets_in_separate_style:
        methods["setup_context"] = lambda ctx, inputs, output: None
    apply = type("Forgets", (jaxfn.Function,), {name: staticmethod(m) for name, m in methods.items()}).apply
    return apply if method == "forward" else lambda x: jax.grad(lambda x: apply(x).sum())(x)


@row("B3", "C2")
@pytest.mark.parametrize(
    ("method", "function"), [("forward", forgets), ("forward", forgets_in_separate_style), ("backward", forgets)]
)
@pytest.mark.parametrize("context", ["eager", "jit", "vmap"])
def test_a_method_without_a_return_statement_is_warned_of_once(method, function, context):
    call = without_return(method, function)
    location = rf"test_calls\.py:{function.__code__.co_firstlineno}"
    with pytest.warns(UserWarning, match=rf"Forgets\.{method} returned None.*{location}") as caught:
        for _ in range(2):
            result = CONTEXTS[context](call)(X)
    assert len(caught) == 1
    assert result is None if method == "forward" else not result.any()


@row("B3", "C2")
@pytest.mark.parametrize("method", ["forward", "backward"])
@pytest.mark.parametrize("function", [returns_none, returns_sometimes])
def test_a_method_that_returns_None_on_purpose_is_not_warned_of(method, function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = without_return(method, function)(X)
    assert result is None if method == "forward" else not result.any()


METHODS = ["backward", "jvp", "vmap", "setup_context"]


@row("B1")
@pytest.mark.parametrize("method", METHODS)
def test_a_rule_that_would_replace_the_function_raises(method):
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


def same(ctx, *args):
    return args[0]


def gradient_of(function):
    return jax.grad(lambda x: function.apply(x).sum())(X)


# The attributes of a Function, what is done with it, and the error.
MISSPELLED = {
    **{
        name: ({"forward": same, name: same}, gradient_of, "backward")
        for name in ("backwards", "back_ward", "bacward", "Backward", "backword")
    },
    "jpv": (
        {"forward": same, "backward": same, "jpv": same},
        lambda function: jax.jvp(function.apply, (X,), (X,)),
        "jvp",
    ),
    "forwards": ({"forwards": same}, lambda function: function.apply(X), "forward"),
    "setup_ctx": (
        {"forward": lambda x, w: x * w, "setup_ctx": same},
        lambda function: function.apply(X, X),
        "setup_context",
    ),
}


@row("A6", "C13", "D6")
@pytest.mark.parametrize("name", MISSPELLED)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_error_of_a_missing_method_names_a_similar_attribute(name, wrap):
    methods, use, meant = MISSPELLED[name]
    misspelled = type("Misspelled", (jaxfn.Function,), {n: staticmethod(m) for n, m in methods.items()})
    applied = type("Applied", (), {"apply": staticmethod(wrap(misspelled.apply))})
    message = rf"Misspelled[\s\S]*{name}[\s\S]*did you mean `?{meant}`?"
    if name == "jpv" and wrap is jax.jit:  # it is staged before it is differentiated
        message = "forward-mode autodiff"
    with pytest.raises((NotImplementedError, TypeError), match=message):
        use(applied)


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


# ---------------------------------------------------------------------------------------------------------------------
# Outputs without a derivative, as backward gets them


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
            seen.append(jax.tree.map(lambda g: (str(g.dtype), g.shape), grads[1:]))
            zeros = sum(jnp.sum(g) for g in jax.tree.leaves(grads[1:]))
            return 7 * grads[0] + 100 * zeros, None

    return Structured.apply, seen


@row("B3", "C11")
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("context", [*CONTEXTS, "disabled jit"])
def test_outputs_without_a_differentiable_leaf_reach_backward_in_their_structure(context, materialize):
    apply, seen = structured(materialize)
    key = jax.random.key(0)
    with jax.disable_jit(context == "disabled jit"):
        around = CONTEXTS.get(context, jax.jit)
        np.testing.assert_allclose(jax.grad(around(lambda x: jnp.sum(apply(x, key)[0])))(X), [7, 7, 7])
    if not materialize:  # None for the whole output, or in its structure
        assert seen and not jax.tree.leaves(seen)
        return
    count, flag = ("int32", (3,)), ("bool", (3,))
    expected = (
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
    assert seen and all(grads == expected for grads in seen)


# ---------------------------------------------------------------------------------------------------------------------
# Messages


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
@pytest.mark.parametrize("context", ["eager", "jit", "scan", "checkpoint"])
@pytest.mark.parametrize(
    ("scale", "size", "hint"),
    [(1 / np.sqrt(16), 4, "float"), (0.25, np.int64(4), "int"), (np.float32(0.25), 4, "float")],
    ids=["branch", "shape", "branch on float32"],
)
@TRACES_ALWAYS
def test_a_numpy_scalar_that_jax_traces_gets_a_hint(scale, size, hint, context):
    """`1 / np.sqrt(n)` is an array to JAX; a Python number would be static."""
    gradient = jax.grad(CONTEXTS[context](lambda x: ScaledByNumPy.apply(x, scale, size).sum()))
    if context == "eager":  # forward sees its value
        np.testing.assert_allclose(gradient(X), [4, 4, 4])
        return
    name = "scale" if hint == "float" else "size"
    with pytest.raises(
        (TypeError, jax.errors.JAXTypeError), match=rf"In ScaledByNumPy\.forward: [\s\S]*{name}"
    ) as caught:
        gradient(X)
    assert f"{hint}(" in str(caught.value)


class Branching(jaxfn.Function):
    """Looks at the value of an array."""

    @staticmethod
    def forward(ctx, x, threshold):
        return x if x[0] > threshold else -x

    @staticmethod
    def backward(ctx, g):
        return g, None


@row("A7", "L1")
@pytest.mark.parametrize("context", ["jit", "checkpoint", "scan", "cond", "vmap"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_errors_of_jax_name_the_function_and_its_file(differentiated, context):
    """JAX alone would name only the outer function if forward is staged into its jaxpr."""
    call = CONTEXTS[context](lambda x: Branching.apply(x, 0.5).sum())
    line = Branching.forward.__code__.co_firstlineno
    where = rf"{re.escape(__file__)}:({line}|{line + 1}|{line + 2})\b"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"In Branching\.forward: ") as caught:
        (jax.grad(call) if differentiated else call)(X)
    assert re.search(rf"In Branching\.forward: .* \(forward is at {where}\)", str(caught.value))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=rf"function Branching at {where}"):
        jax.jit(Branching.apply)(X, 0.5)


def _while(f):
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


FORWARD_MODE = {
    "jacfwd": jax.jacfwd,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "while": _while,
    "square": lambda f: lambda x: f(x) ** 2,
}


@row("D6", "L1")
@pytest.mark.parametrize(
    "name",
    [
        *(
            f"jvp of {context}"
            for context in (*CONTEXTS, "while", "jit of jit", "grad of square", "jit of grad of square")
        ),
        "jit of jvp",
        "jacfwd",
        "jacfwd of jit",
        "linearize",
        "linearize of jit",
        "hessian of square",
    ],
)
def test_forward_mode_raises_and_names_the_function_where_jax_raises_at_the_call(name):
    """JAX's own error is about custom_vjp where JAX has staged the call."""
    only_reverse = function_of("backward", jnp.sin, None, lambda saved, g: g * jnp.cos(saved[0]), name="OnlyReverse")
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp function") as caught:
        program(name, **FORWARD_MODE)(only_reverse)(X)
    if name in ("jvp of eager", "jvp of vmap", "jacfwd", "jvp of grad of square", "hessian of square"):
        assert str(caught.value).count("OnlyReverse has backward alone, and so no forward mode") == 1
        assert "Define jvp(ctx, *tangents)" in str(caught.value) and "generate_jvp_rule = True" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Lifetime


class Token:
    """Something that a Function closes over, whose lifetime can be watched."""


def sine_of(make):
    """The sine that `make` makes of its value and its pullback, which close over a token."""

    def of(token):
        def value(x):
            assert isinstance(token, Token)
            return jnp.sin(x)

        def pull(saved, g):
            assert isinstance(token, Token)
            return g * jnp.cos(saved[0])

        return make(value, pull)

    return of


USES = [
    "eager",
    "grad",
    "jit",
    "jit of grad",
    "grad of jit",
    "grad of checkpoint",
    "jit of vmap of grad",
    "jit of grad of grad",
    "grad of jit of grad",
]


def alive_after(uses, make):
    """Counts, for each use, the live objects that functions defined inside `uses` closed over.

    Returns:
      The numbers before JAX's caches are cleared, and their sum afterwards.
    """
    watched: dict[str, list[Any]] = {use: [] for use in uses}
    for use, references in watched.items():

        def function(x, references=references):
            token = Token()
            references.append(weakref.ref(token))
            return make(token)(x)

        program(use)(function)(X)
    gc.collect()
    alive = {use: sum(ref() is not None for ref in references) for use, references in watched.items()}
    jax.clear_caches()
    gc.collect()
    return alive, sum(ref() is not None for references in watched.values() for ref in references)


@row("B13")
@pytest.mark.parametrize(
    "uses",
    [USES, pytest.param(["grad of scan"], marks=CACHES_TRACES)],
    ids=["all others", "grad of scan"],
)
@pytest.mark.usefixtures("few_objects")
@CACHES_TRACES
def test_a_function_defined_inside_a_traced_function_is_freed_with_it(uses):
    """Freed as early as what a hand-written custom_vjp closes over, and at the latest when JAX's caches are cleared."""
    ours, ours_cleared = alive_after(uses, sine_of(lambda value, pull: function_of("backward", value, None, pull)))
    hand_written, hand_written_cleared = alive_after(uses, sine_of(hand_written_of))
    assert hand_written_cleared == ours_cleared == 0
    assert all(ours[use] <= hand_written[use] for use in uses), (ours, hand_written)
