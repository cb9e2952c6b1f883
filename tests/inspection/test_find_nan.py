"""`jaxfn.find_nan`: where a NaN or an infinity begins."""

import inspect
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.marks import row, sampled

OPERATIONS = {"nan": "log", "inf": "exp", "-inf": "log"}
STEP = 3


def poison(number, when):
    """Three numbers: zeros, but for the second at the step `STEP`."""
    is_bad = jnp.array([False, True, False]) & (when == STEP)
    if number == "inf":
        return jnp.exp(jnp.where(is_bad, 1e4, -1e4))
    return jnp.log(jnp.where(is_bad, -1.0 if number == "nan" else 0.0, 1.0))


def layer(name, place, number, style):
    """A Function of (x, when) that has a bad number in one place at one step."""

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
LAYERS, PLACES, STYLES = ["First", "Second", "Third"], ["output", "saved", "gradient"], ["reverse", "both modes"]
PLANTS = list(product(LAYERS, PLACES, ["nan", "inf", "-inf"], STYLES))
TOLD = {"output": "output 0", "saved": "saved saved", "gradient": "gradient of x"}


def loss_of(f):
    return jax.value_and_grad(lambda x, when: f(x, when).sum())


X, WHEN = jnp.array([0.3, 0.5, 0.7]), jnp.int32(STEP)


@row("K4")
@sampled
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("plant", PLANTS, ids=", ".join)
def test_the_culprit_is_named(plant, around, capsys):
    culprit, place, number, style = plant
    found = jaxfn.find_nan(loss_of(AROUND[around](chain(culprit, place, number, style))), X, WHEN)
    assert found is not None
    method = "backward" if place == "gradient" else "forward"
    assert (found.function, found.method, found.value) == (culprit, method, TOLD[place])
    assert (found.number, found.operation) == (number, OPERATIONS[number])
    assert found.index[-1 if around != "vmap over columns" else 0] in (1, 0)
    lines, first = inspect.getsourcelines(poison)
    assert any(f"test_find_nan.py:{first + i}:" in found.line for i in range(len(lines)))
    assert around not in INSIDE or INSIDE[around] in found.inside
    assert capsys.readouterr().out.strip() == str(found)


@row("K4")
@sampled
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_found_where_there_is_nothing(style, around, capsys):
    assert jaxfn.find_nan(loss_of(AROUND[around](chain(None, "output", "nan", style))), X, WHEN) is None
    assert capsys.readouterr().out == ""


@row("K4")
@pytest.mark.parametrize("around", ["nothing", "jit", "scan", "cond", "vmap", "checkpoint"])
def test_the_culprit_of_a_tangent_is_named(around):
    f = AROUND[around](chain("Second", "tangent", "nan", "both modes"))
    found = jaxfn.find_nan(lambda x: jax.jvp(partial(f, when=WHEN), (x,), (x,)), X)
    assert (found.function, found.method, found.value) == ("Second", "jvp", "tangent of output 0")


@row("K4")
def test_in_a_while_loop_it_is_the_first_step_that_counts():
    f = chain("Second", "output", "nan", "reverse")

    def loop(x):
        return jax.lax.while_loop(lambda s: s[1] < 6, lambda s: (f(s[0], s[1]), s[1] + 1), (x, 0))[0]

    found = jaxfn.find_nan(loop, X)
    assert (found.function, found.method, found.operation) == ("Second", "forward", "log")
    assert found.inside == ("while: step 3",)


@row("K4")
def test_in_plain_code_the_operation_and_its_line_are_named():
    def f(x):
        y = x - 1
        z = 1 / y  # the culprit
        return (z * 0).sum()

    found = jaxfn.find_nan(f, jnp.array([[3.0, 2.0], [1.0, 4.0]]))
    assert (found.function, found.number, found.index, found.shape) == (None, "inf", (1, 0), (2, 2))
    lines, first = inspect.getsourcelines(f)
    culprit = next(i for i, line in enumerate(lines) if "culprit" in line)
    assert f"test_find_nan.py:{first + culprit}:" in found.line


@row("K4")
def test_the_first_of_several_is_told():
    f = chain("Second", "output", "inf", "reverse")
    g = chain("First", "saved", "nan", "reverse")
    found = jaxfn.find_nan(lambda x: f(x, WHEN) + g(x, WHEN), X)
    assert (found.function, found.number) == ("Second", "inf")


@row("K4")
def test_an_infinity_that_nothing_comes_of_is_not_told():
    def safe(x):
        return jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1.0, x)).sum() + jnp.where(x == 0, 0.0, 1 / x).sum()

    assert jaxfn.find_nan(safe, jnp.array([0.0, 2.0])) is None
    # Its derivative is the well-known nan, and begins where zero is divided by.
    found = jaxfn.find_nan(jax.grad(lambda x: jnp.where(x == 0, 0.0, 1 / x).sum()), jnp.array([0.0, 2.0]))
    assert found.number in ("inf", "-inf")


@row("K4")
def test_a_mask_of_infinities_is_no_culprit_but_the_nan_that_it_leads_to_is():
    def attention(scores, mask):
        return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))

    scores = jnp.ones((2, 3))
    assert jaxfn.find_nan(attention, scores, jnp.array([[True, False, True], [True, True, True]])) is None
    found = jaxfn.find_nan(attention, scores, jnp.array([[False, False, False], [True, True, True]]))
    assert found.number == "nan"
    assert found.index[0] == 0


@row("K4")
def test_what_is_passed_in_is_told_as_an_argument():
    found = jaxfn.find_nan(lambda p, scale: (p["w"] * scale).sum(), {"b": X, "w": jnp.array([1.0, jnp.nan])}, scale=2.0)
    assert (found.operation, found.value, found.number, found.index) == ("argument", "args[0]['w']", "nan", (1,))


@row("K4")
def test_values_inside_of_a_function_count_though_no_result_shows_them():
    f = chain("First", "saved", "nan", "reverse")
    found = jaxfn.find_nan(lambda x: jnp.sign(f(x, WHEN)), X)  # forward alone
    assert (found.function, found.method, found.value) == ("First", "forward", "saved saved")


@row("K4")
def test_a_function_inside_of_another_is_the_one_that_is_named():
    inner = layer("Inner", "output", "nan", "reverse")

    @jaxfn.function
    def outer(ctx, x):
        return inner(x, WHEN) * 2

    @outer.backward
    def _(ctx, grad_output):
        return grad_output

    found = jaxfn.find_nan(loss_of(lambda x, _: outer(x)), X, WHEN)
    assert (found.function, found.method, found.value) == ("Inner", "forward", "output 0")


@row("K4")
def test_a_batching_rule_is_named():
    class Batched(jaxfn.Function):
        @staticmethod
        def forward(x):
            return jnp.sin(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * jnp.cos(ctx.saved_tensors[0])

        @staticmethod
        def vmap(info, in_dims, x):
            return jnp.log(x - 10), in_dims[0]

    found = jaxfn.find_nan(jax.vmap(Batched.apply), X)
    assert (found.function, found.method, found.operation) == ("Batched", "vmap", "log")


@row("K4")
def test_only_what_is_selected_and_only_a_nan_leads_to_a_nan():
    def selected(x):
        unused = 1 / x
        return jnp.where(x <= 0, jnp.sqrt(x), unused)

    assert jaxfn.find_nan(selected, jnp.array([0.0, -1.0])).operation == "sqrt"
    summed = jaxfn.find_nan(lambda x, y: (jnp.log(y) + jnp.sqrt(x)).sum(), jnp.array([-1.0, 2]), jnp.array([1.0, 0]))
    assert (summed.number, summed.operation) == ("nan", "sqrt")


@row("K4")
def test_a_scope_of_the_user_is_no_function():
    def f(x):
        with jax.named_scope("Net.forward"):
            return jnp.log(x)

    assert jaxfn.find_nan(f, X - 1).function is None

    @jaxfn.function
    def outer(ctx, x):
        return f(x)

    found = jaxfn.find_nan(outer, X - 1)
    assert (found.function, found.method, found.value) == ("outer", "forward", "output 0")


@row("K4")
def test_what_cannot_be_looked_into_is_said():
    with pytest.raises(TypeError, match="find_nan runs the function"):
        jax.jit(lambda x: jaxfn.find_nan(jnp.log, x))(X)

    def writing(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.log(x)
        return ref[...]

    with pytest.raises(NotImplementedError, match=r"jax\.Ref"):
        jaxfn.find_nan(writing, X)


@row("K4")
def test_a_long_way_back():
    def f(x):
        x = jnp.log(x)
        for _ in range(2000):
            x = (x + x) * 0.5
        return x

    assert jaxfn.find_nan(f, jnp.array([1.0, -1.0])).operation == "log"


@row("K4")
def test_complex_numbers_and_bfloat16():
    found = jaxfn.find_nan(lambda x: jnp.log(x * 1j), jnp.array([1.0, 0.0]))
    assert found.index == (1,)
    found = jaxfn.find_nan(lambda x: jnp.exp(x), jnp.array([1.0, 100.0], jnp.bfloat16))
    assert (found.number, found.index) == ("inf", (1,))


@row("K4")
def test_looking_leaves_nothing_in_programs():
    f = jax.jit(loss_of(chain(None, "output", "nan", "reverse")))
    jaxfn.find_nan(f, X, WHEN)
    assert "mark" not in str(jax.make_jaxpr(f)(X, WHEN))


@row("K4")
def test_a_nan_behind_an_infinity_is_seen():
    found = jaxfn.find_nan(lambda x: jnp.exp(-x), jnp.array([jnp.inf, jnp.nan]))
    assert (found.operation, found.value, found.number, found.index) == ("argument", "args[0]", "nan", (1,))


@row("K4")
def test_a_nan_that_is_written_in_the_program():
    found = jaxfn.find_nan(lambda x: x + jnp.array([1, jnp.nan]), jnp.array([jnp.inf, 1.0]))
    assert (found.number, found.value) == ("nan", "a constant of the program")


@row("K4")
def test_a_mask_that_is_saved_is_no_beginning():
    @jaxfn.function
    def logsumexp(ctx, x):
        masked = jnp.where(x > 0, x, -jnp.inf)
        ctx.save_for_backward(masked)
        return jax.nn.logsumexp(masked)

    @logsumexp.backward
    def _(ctx, grad_output):
        return grad_output * jax.nn.softmax(ctx.saved_tensors[0])

    assert jaxfn.find_nan(jax.grad(logsumexp), jnp.array([-1.0, 1.0, 2.0])) is None


@row("K4")
def test_logs_and_forward_mode_are_looked_through():
    @jaxfn.function
    def root(ctx, x):
        ctx.log(x=x)
        y = jnp.sqrt(x)
        ctx.save_for_forward(y)
        return y

    @root.jvp
    def _(ctx, tangent):
        return tangent / (2 * ctx.saved_tensors[0])

    found = jaxfn.find_nan(jaxfn.with_logs(root), jnp.array([4.0, -1.0]))
    assert (found.function, found.method, found.operation) == ("root", "forward", "sqrt")
    found = jaxfn.find_nan(jax.grad(lambda x: root(x).sum()), jnp.array([4.0, 0.0]))
    assert (found.number, found.operation, found.index) == ("inf", "div", (1,))


@row("K4")
@pytest.mark.parametrize("place", ["output", "gradient"])
@pytest.mark.parametrize("around, inside", [("nothing", ()), ("scan", ("scan: step 3 of 5",))])
def test_a_shard_map_is_reported_as_one_operation(around, inside, place):
    f = AROUND[around](over_devices(chain("Second", place, "nan", "reverse")))
    found = jaxfn.find_nan(loss_of(f), X, WHEN)
    assert (found.function, found.method, found.number, found.operation) == (None, None, "nan", "shard_map")
    assert "test_find_nan.py:" in found.line
    assert found.inside == inside
    assert str(found).startswith("nan begins in a shard_map that is called in code outside of any Function\n")
    assert "does not search inside shard_map" in str(found)


@row("K4")
def test_a_shard_map_in_a_function_is_reported_with_the_function():
    @jaxfn.function
    def layer(ctx, x):
        return over_devices(lambda x, when: jnp.log(x))(x, WHEN)

    found = jaxfn.find_nan(layer, -X)
    assert (found.function, found.method, found.value, found.operation) == ("layer", "forward", "output 0", "shard_map")
    assert str(found).startswith("nan begins in a shard_map that is called in layer.forward (output 0)\n")


@row("K4")
def test_what_reaches_no_result_of_a_shard_map_is_not_reported():
    f = over_devices(chain("Second", "saved", "nan", "reverse"))  # whose backward replaces a NaN that it has saved
    assert jaxfn.find_nan(loss_of(f), X, WHEN) is None


@row("K4")
def test_what_comes_into_a_shard_map_begins_before_it():
    found = jaxfn.find_nan(lambda x: over_devices(lambda x, when: x * 2)(jnp.log(x), WHEN).sum(), -X)
    assert (found.number, found.operation) == ("nan", "log")
    assert jaxfn.find_nan(lambda x: over_devices(lambda x, when: x * 2)(x, WHEN).sum(), X) is None


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


@row("K4")
def test_a_step_of_a_solver_is_told():
    """Conjugate gradients divide by the length of what the matrix makes of a vector, here zero."""
    found = jaxfn.find_nan(lambda b: jax.scipy.sparse.linalg.cg(lambda v: 0 * v, b)[0], X)
    assert (found.number, found.operation, found.inside) == ("inf", "div", ("while: step 0",))
    found = jaxfn.find_nan(jnp.linalg.solve, jnp.array([[1.0, 2.0], [2.0, 4.0]]), jnp.ones(2))
    assert (found.function, found.operation) == (None, "triangular_solve")


@row("K4")
def test_a_choice_by_platform_is_looked_into():
    found = jaxfn.find_nan(lambda x: jax.lax.platform_dependent(x, tpu=jnp.sin, cpu=jnp.log), X - 0.4)
    assert (found.number, found.operation) == ("nan", "log")
