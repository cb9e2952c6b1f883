"""`jaxfn.find_nan`: where a NaN or an infinity begins."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.marks import row

OPERATIONS = {"nan": "log", "inf": "exp", "-inf": "log"}
STEP = 3


def poison(number, when):
    """Three numbers: zeros, but for the second at the step `STEP`."""
    is_bad = jnp.array([False, True, False]) & (when == STEP)
    if number == "inf":
        return jnp.exp(jnp.where(is_bad, 1e4, -1e4))
    return jnp.log(jnp.where(is_bad, -1.0 if number == "nan" else 0.0, 1.0))


def layer(name, place, number, style):
    """A Function of (x, when) that has a bad number in one line at one step."""

    def bad(here, x, when):
        return x + poison(number, when) if place == here else x

    class Layer(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, when):
            saved = bad("saved", jnp.cos(x), when)
            ctx.save_for_backward(saved=saved)
            ctx.when = when
            return bad("output", jnp.sin(x), when)

        @staticmethod
        def backward(ctx, grad_output):
            saved = ctx.saved_variables.saved
            return bad("gradient", grad_output * jnp.where(jnp.isfinite(saved), saved, 1.0), ctx.when), None

    if style == "both modes":
        Layer.jvp = staticmethod(lambda ctx, t, _: bad("tangent", t * ctx.saved_tensors[0], ctx.when))
    Layer.__name__ = name
    return Layer.apply


def chain(culprit, place, number, style):
    """Three layers and plain operations between them; one layer is bad."""
    layers = [layer(n, place if n == culprit else None, number, style) for n in ("First", "Second", "Third")]

    def f(x, when):
        for apply in layers:
            x = jnp.tanh(apply(x, when)) * 2
        return x

    return f


def in_scan(f):
    return lambda x, when: jax.lax.scan(lambda x, i: (f(x, i + when - STEP), None), x, jnp.arange(5))[0]


def backwards(f):
    return lambda x, when: jax.lax.scan(lambda x, i: (f(x, i + when - STEP), x), x, jnp.arange(5), reverse=True)[0]


def in_cond(f):
    return lambda x, when: jax.lax.cond(when > 0, f, lambda x, when: x, x, when)


def over_devices(f):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def run(x, when):
        one_bad = jnp.array([0, when])
        return jax.shard_map(
            lambda x, when: f(x[0], when[0])[None], mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )(jnp.stack([x, x]), one_bad)[1]

    return run


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "scan backwards": backwards,
    "checkpoint in scan": lambda f: in_scan(jax.checkpoint(f)),
    "jit of scan of cond": lambda f: jax.jit(in_scan(in_cond(f))),
    "cond": in_cond,
    "vmap": lambda f: lambda x, when: jax.vmap(f)(jnp.stack([x, x, x]), when * jnp.array([0, 1, 0])),
    "vmap over columns": lambda f: (
        lambda x, when: jax.vmap(f, in_axes=(1, None), out_axes=1)(jnp.stack([x, x], 1), when)
    ),
}
INSIDE = {
    "scan": "scan: step 3 of 5",
    "scan backwards": "scan: step 3 of 5",
    "checkpoint in scan": "scan: step 3 of 5",
    "jit of scan of cond": "scan: step 3 of 5",
    "cond": "cond: branch 1",
}
TOLD = {"output": "output 0", "saved": "saved saved", "gradient": "gradient of x"}


def loss_of(f):
    return jax.value_and_grad(lambda x, when: f(x, when).sum())


X, WHEN = jnp.array([0.3, 0.5, 0.7]), jnp.int32(STEP)


@row("K4")
@pytest.mark.parametrize(
    "culprit, place, number, style, around",
    [
        ("First", "output", "nan", "reverse", "nothing"),
        ("Second", "saved", "inf", "both modes", "jit"),
        ("Third", "gradient", "-inf", "reverse", "checkpoint"),
        ("First", "gradient", "nan", "both modes", "scan"),
        ("Second", "output", "-inf", "reverse", "scan backwards"),
        ("Third", "saved", "nan", "reverse", "checkpoint in scan"),
        ("First", "saved", "inf", "both modes", "jit of scan of cond"),
        ("Second", "gradient", "inf", "reverse", "cond"),
        ("Third", "output", "nan", "both modes", "vmap"),
        ("First", "saved", "-inf", "reverse", "vmap over columns"),
        ("Second", "gradient", "nan", "both modes", "vmap over columns"),
    ],
)
def test_the_culprit_is_named(culprit, place, number, style, around, capsys):
    found = jaxfn.find_nan(loss_of(AROUND[around](chain(culprit, place, number, style))), X, WHEN)
    assert found is not None
    method = "backward" if place == "gradient" else "forward"
    assert (found.function, found.method, found.array) == (culprit, method, TOLD[place])
    assert (found.number, found.operation) == (number, OPERATIONS[number])
    assert found.index[-1 if around != "vmap over columns" else 0] in (1, 0)
    lines, first = inspect.getsourcelines(poison)
    assert any(f"test_find_nan.py:{first + i}:" in found.line for i in range(len(lines)))
    assert around not in INSIDE or INSIDE[around] in found.enclosing
    assert capsys.readouterr().out == ""
    assert str(found).startswith(f"{number} first appears in {culprit}.{method}")


@row("K4")
@pytest.mark.parametrize(
    "style, around", [("reverse", "checkpoint in scan"), ("both modes", "jit of scan of cond"), ("both modes", "vmap")]
)
def test_nothing_is_found_where_there_is_nothing(style, around, capsys):
    assert jaxfn.find_nan(loss_of(AROUND[around](chain(None, "output", "nan", style))), X, WHEN) is None
    assert capsys.readouterr().out == ""


@row("K4")
@pytest.mark.parametrize("around", ["nothing", "jit", "scan", "vmap"])
def test_the_culprit_of_a_tangent_is_named(around):
    f = AROUND[around](chain("Second", "tangent", "nan", "both modes"))
    found = jaxfn.find_nan(lambda x: jax.jvp(partial(f, when=WHEN), (x,), (x,)), X)
    assert (found.function, found.method, found.array) == ("Second", "jvp", "tangent of output 0")


def while_steps(x):
    f = chain("Second", "output", "nan", "reverse")
    return jax.lax.while_loop(lambda s: s[1] < 6, lambda s: (f(s[0], s[1]), s[1] + 1), (x, 0))[0]


def selected(x):
    unused = 1 / x
    return jnp.where(x <= 0, jnp.sqrt(x), unused)


def attention(scores, mask):
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))


def safe_reciprocal(x):
    return jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1.0, x)).sum() + jnp.where(x == 0, 0.0, 1 / x).sum()


def halved_2000_times(x):
    x = jnp.log(x)
    for _ in range(2000):
        x = (x + x) * 0.5
    return x


def in_user_scope(x):
    with jax.named_scope("Net.forward"):
        return jnp.log(x)


@jaxfn.function
def outer(ctx, x):
    return in_user_scope(x)


@jaxfn.function
def calls_layer(ctx, x):
    return layer("Inner", "output", "nan", "reverse")(x, WHEN) * 2


@calls_layer.backward
def _(ctx, grad_output):
    return grad_output


@jaxfn.function
def logsumexp(ctx, x):
    masked = jnp.where(x > 0, x, -jnp.inf)
    ctx.save_for_backward(masked)
    return jax.nn.logsumexp(masked)


@logsumexp.backward
def _(ctx, grad_output):
    return grad_output * jax.nn.softmax(ctx.saved_tensors[0])


@jaxfn.function
def root(ctx, x):
    y = jnp.sqrt(x)
    ctx.save_for_forward(y)
    return y


@root.jvp
def _(ctx, tangent):
    return tangent / (2 * ctx.saved_tensors[0])


@jaxfn.function
def over_devices_inside(ctx, x):
    return over_devices(lambda x, when: jnp.log(x))(x, WHEN)


class Batched(jaxfn.Function):
    @staticmethod
    def forward(x):
        return jnp.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def vmap(info, in_dims, x):
        return jnp.log(x - 10), in_dims[0]


INF_THEN_NAN, SAVED_NAN = chain("Second", "output", "inf", "reverse"), chain("First", "saved", "nan", "reverse")
NAN_WEIGHT = jnp.array([1.0, jnp.nan])
TWO_ROWS = jnp.array([[True, False, True], [True, True, True]])
# A function, its arguments, and what is found.
FOUND = {
    "step of a while loop": (
        while_steps,
        [X],
        {"function": "Second", "method": "forward", "operation": "log", "enclosing": ("while: step 3",)},
    ),
    "the first of several": (
        lambda x: INF_THEN_NAN(x, WHEN) + SAVED_NAN(x, WHEN), [X], {"function": "Second", "number": "inf"},
    ),
    "a Python number": (lambda x: root(x - 5.0), [2], {"function": "root", "method": "forward", "operation": "sqrt"}),
    "a Python number that is a static argument": (
        lambda x, n: root(sum([x] * n)), [-1.0, 2], {"function": None, "operation": "sqrt"},
    ),
    "an infinity that nothing comes of": (safe_reciprocal, [jnp.array([0.0, 2.0])], None),
    "and the NaN of its derivative": (  # which begins where zero is divided by
        jax.grad(lambda x: jnp.where(x == 0, 0.0, 1 / x).sum()), [jnp.array([0.0, 2.0])], {"number": "inf"},
    ),
    "a mask of infinities": (attention, [jnp.ones((2, 3)), TWO_ROWS], None),
    "a literal infinity in a result": (
        lambda x: jnp.where(x > 0, x, -jnp.inf), [jnp.array([1.0, -1.0])], None,
    ),
    "an infinity that was passed in": (lambda x: 2 * x, [jnp.array([1.0, jnp.inf])], None),
    "a NaN in one result, after an infinity in another": (
        lambda x: (jnp.log(0 * x), jnp.sqrt(-x)), [jnp.ones(2)], {"number": "nan", "operation": "sqrt"},
    ),
    "a captured NaN": (
        lambda x: x + NAN_WEIGHT, [jnp.ones(2)],
        {"number": "nan", "array": "a constant of the program", "shape": (2,), "index": (1,)},
    ),
    "a mask that leaves nothing": (
        attention, [jnp.ones((2, 3)), TWO_ROWS.at[0].set(False)], {"number": "nan", "index": (0, 0)},
    ),
    "an argument": (
        lambda p: (p["w"] * 2).sum(), [{"b": X, "w": jnp.array([1.0, jnp.nan])}],
        {"operation": "argument", "array": "args[0]['w']", "number": "nan", "index": (1,)},
    ),
    "an argument with an infinity before": (
        lambda x: jnp.exp(-x), [jnp.array([jnp.inf, jnp.nan])],
        {"operation": "argument", "array": "args[0]", "number": "nan", "index": (1,)},
    ),
    "a constant": (
        lambda x: x + jnp.array([1, jnp.nan]), [jnp.array([jnp.inf, 1.0])],
        {"number": "nan", "array": "a constant of the program"},
    ),
    "a value inside that no result shows": (  # of forward alone
        lambda x: jnp.sign(SAVED_NAN(x, WHEN)), [X],
        {"function": "First", "method": "forward", "array": "saved saved"},
    ),
    "a Function inside another": (
        jax.grad(lambda x: calls_layer(x).sum()), [X], {"function": "Inner", "method": "forward", "array": "output 0"},
    ),
    "a batching rule": (jax.vmap(Batched.apply), [X], {"function": "Batched", "method": "vmap", "operation": "log"}),
    "what is selected": (selected, [jnp.array([0.0, -1.0])], {"operation": "sqrt"}),
    "a NaN, which an infinity does not lead to": (
        lambda x, y: (jnp.log(y) + jnp.sqrt(x)).sum(), [jnp.array([-1.0, 2]), jnp.array([1.0, 0])],
        {"number": "nan", "operation": "sqrt"},
    ),
    "a scope of the user": (in_user_scope, [X - 1], {"function": None}),
    "a scope of the user in a Function": (
        outer, [X - 1], {"function": "outer", "method": "forward", "array": "output 0"},
    ),
    "2000 operations before the end": (halved_2000_times, [jnp.array([1.0, -1.0])], {"operation": "log"}),
    "complex": (lambda x: jnp.log(x * 1j), [jnp.array([1.0, 0.0])], {"index": (1,)}),
    "bfloat16": (jnp.exp, [jnp.array([1.0, 100.0], jnp.bfloat16)], {"number": "inf", "index": (1,)}),
    "a mask that is saved": (jax.grad(logsumexp), [jnp.array([-1.0, 1.0, 2.0])], None),
    "a jvp that is transposed": (
        jax.grad(lambda x: root(x).sum()), [jnp.array([4.0, 0.0])],
        {"number": "inf", "operation": "div", "index": (1,)},
    ),
    "no result of a shard_map": (  # its backward replaces a NaN that it has saved
        lambda x: loss_of(over_devices(SAVED_NAN))(x, WHEN), [X], None,
    ),
    "before a shard_map": (
        lambda x: over_devices(lambda x, when: x * 2)(jnp.log(x), WHEN).sum(), [-X],
        {"number": "nan", "operation": "log"},
    ),
    "a step of a solver": (  # which divides by the length of what the matrix makes of a vector, here zero
        lambda b: jax.scipy.sparse.linalg.cg(lambda v: 0 * v, b)[0], [X],
        {"number": "inf", "operation": "div", "enclosing": ("while: step 0",)},
    ),
    "a singular matrix": (
        jnp.linalg.solve, [jnp.array([[1.0, 2.0], [2.0, 4.0]]), jnp.ones(2)],
        {"function": None, "operation": "triangular_solve"},
    ),
    "a choice by platform": (
        lambda x: jax.lax.platform_dependent(x, tpu=jnp.sin, cpu=jnp.log), [X - 0.4],
        {"number": "nan", "operation": "log"},
    ),
}  # fmt: skip


@row("K4")
@pytest.mark.parametrize("what", FOUND)
def test_where_a_number_begins(what):
    f, args, expected = FOUND[what]
    found = jaxfn.find_nan(f, *args)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert {name: getattr(found, name) for name in expected} == expected


@row("K4")
def test_in_plain_code_the_operation_and_its_line_are_named():
    def f(x):
        y = x - 1
        z = 1 / y  # the culprit
        return (z * 0).sum()

    found = jaxfn.find_nan(f, x=jnp.array([[3.0, 2.0], [1.0, 4.0]]))
    assert (found.function, found.number, found.index, found.shape) == (None, "inf", (1, 0), (2, 2))
    lines, first = inspect.getsourcelines(f)
    culprit = next(i for i, line in enumerate(lines) if "culprit" in line)
    assert f"test_find_nan.py:{first + culprit}:" in found.line


@row("K4")
def test_what_cannot_be_looked_into_is_said():
    with pytest.raises(TypeError, match="find_nan evaluates the function"):
        jax.jit(lambda x: jaxfn.find_nan(jnp.log, x))(X)

    def writing(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.log(x)
        return ref[...]

    with pytest.raises(NotImplementedError, match=r"jax\.Ref"):
        jaxfn.find_nan(writing, X)


@row("K4")
@pytest.mark.parametrize(
    "place, around, inside", [("output", "nothing", ()), ("gradient", "scan", ("scan: step 3 of 5",))]
)
def test_a_shard_map_is_reported_as_one_operation(around, inside, place):
    f = AROUND[around](over_devices(chain("Second", place, "nan", "reverse")))
    found = jaxfn.find_nan(loss_of(f), X, WHEN)
    assert (found.function, found.method, found.number, found.operation) == (None, None, "nan", "shard_map")
    assert "test_find_nan.py:" in found.line
    assert found.enclosing == inside
    assert str(found).startswith("nan first appears in a shard_map that is called in code outside any Function\n")
    assert "does not search inside shard_map" in str(found)


@row("K4")
def test_a_shard_map_in_a_function_is_reported_with_the_function():
    found = jaxfn.find_nan(over_devices_inside, -X)
    assert (found.function, found.method, found.operation) == ("over_devices_inside", "forward", "shard_map")
    assert str(found).startswith(
        "nan first appears in a shard_map that is called in over_devices_inside.forward (output 0)\n"
    )


@row("K4")
def test_a_linear_solver_is_looked_into():
    def solved(b, matrix):
        def solve(matvec, b):
            return jnp.log(b) / matrix

        return jax.lax.custom_linear_solve(lambda x: x * matrix, b, solve, lambda vecmat, b: jnp.sqrt(b) / matrix)

    def line_with(text):
        lines, first = inspect.getsourcelines(solved)
        return f"test_find_nan.py:{first + next(i for i, line in enumerate(lines) if text in line)}:"

    b = jnp.array([1.0, -2.0, 3.0])
    found = jaxfn.find_nan(jax.jit(solved), b, X)
    assert (found.number, found.operation, found.index) == ("nan", "log", (1,))
    assert line_with("log") in found.line
    found = jaxfn.find_nan(jax.vmap(solved, in_axes=(0, None)), jnp.stack([b * b, b]), X)
    assert (found.operation, found.index) == ("log", (1, 1))
    found = jaxfn.find_nan(jax.grad(lambda b: (solved(b, X) * jnp.array([1.0, 1.0, -1.0])).sum()), b * b)
    assert (found.operation, found.index) == ("sqrt", (2,))
    assert line_with("sqrt") in found.line
