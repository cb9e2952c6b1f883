"""`ctx.log`, `jaxfn.logged` and `jaxfn.with_logs`."""

import functools
import gc
import itertools
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.marks import row


@jaxfn.function
def wave(ctx, x):
    ctx.save_for_backward(x)
    ctx.log(largest=x.max(), x=x)
    return jnp.sin(x)


@wave.backward
def _(ctx, grad_output):
    (x,) = ctx.saved_tensors
    ctx.log(cotangent=grad_output)
    return grad_output * jnp.cos(x)


class Swish(jaxfn.Function):
    """A Function with both modes, in separate style."""

    @staticmethod
    def forward(x):
        return x * jax.nn.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.log(x=x, output=output)

    @staticmethod
    def backward(ctx, grad_output):
        ctx.log(cotangent=grad_output)
        s = jax.nn.sigmoid(ctx.saved_tensors[0])
        return grad_output * (s + ctx.saved_tensors[0] * s * (1 - s))

    @staticmethod
    def jvp(ctx, tangent):
        ctx.log(tangent=tangent)
        s = jax.nn.sigmoid(ctx.saved_tensors[0])
        return tangent * (s + ctx.saved_tensors[0] * s * (1 - s))


@jaxfn.function
def silent(ctx, x):
    """The function `wave` without logs."""
    ctx.save_for_backward(x)
    return jnp.sin(x)


@silent.backward
def _(ctx, grad_output):
    return grad_output * jnp.cos(ctx.saved_tensors[0])


X = jnp.linspace(0.1, 0.9, 6).reshape(3, 2)
STEPS = 4


def equal(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def inputs_of(f, x, steps):
    """Returns the input of `f` in each step, and the cotangent of each step's output for a sum, by plain JAX."""
    given = list(itertools.accumulate(range(steps - 1), lambda x, _: f(x), initial=x))
    cotangents = []
    for step in range(steps):
        rest = functools.partial(functools.reduce, lambda x, _: f(x), range(steps - step - 1))
        cotangents.append(jax.grad(lambda y, rest=rest: rest(y).sum())(f(given[step])))
    return given, cotangents


@row("K5")
def test_eager_values_are_collected_in_the_order_of_the_calls():
    with jaxfn.logged() as log:
        y = wave(wave(X))
        jax.grad(lambda x: wave(x).sum())(X)
    equal(y, jnp.sin(jnp.sin(X)))
    assert set(log) == {"largest", "x", "cotangent"}
    for value, expected in zip(log["x"], [X, jnp.sin(X), X], strict=True):
        equal(value, expected)
    (cotangent,) = log["cotangent"]
    equal(cotangent, jnp.ones_like(X))


@row("K5")
@pytest.mark.parametrize("around", [jax.jit, jax.vmap, lambda f: lambda x: jax.lax.map(f, x)])
def test_a_traced_value_raises_in_the_eager_form(around):
    with jaxfn.logged(), pytest.raises(RuntimeError, match=r"wave\.forward logs 'largest'.*with_logs"):
        around(wave)(X)


@row("K5")
def test_nothing_is_left_where_nothing_collects_logs():
    def lowered(f):
        return jax.jit(jax.value_and_grad(lambda x: f(x).sum())).lower(X).as_text()

    jaxfn.with_logs(wave)(X)
    assert lowered(wave) == lowered(silent)
    wave(X)
    with jaxfn.logged() as log:
        silent(X)
    assert log == {}


def over_devices(f):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "vmap": jax.vmap,
    "vmap over columns": lambda f: jax.vmap(f, in_axes=1, out_axes=1),
    "shard_map": over_devices,
}


@row("K5")
@pytest.mark.parametrize(
    "modes, around, compiled",
    [
        ("reverse", "nothing", False),
        ("both", "jit", False),
        ("reverse", "checkpoint", True),
        ("both", "cond", True),
        ("both", "vmap", False),
        ("reverse", "vmap over columns", True),
        ("reverse", "shard_map", False),
        ("both", "shard_map", True),
    ],
)
def test_values_come_out_of_programs(modes, around, compiled):
    function, plain = {"reverse": (wave, jnp.sin), "both": (Swish.apply, jax.nn.swish)}[modes]
    f = AROUND[around](function)
    step = jaxfn.with_logs(jax.value_and_grad(lambda x: (f(f(x)) * X).sum()))
    (value, gradient), logs = (jax.jit(step) if compiled else step)(X)
    expected = jax.value_and_grad(lambda x: (plain(plain(x)) * X).sum())(X)
    equal(value, expected[0])
    equal(gradient, expected[1])

    def as_mapped(x):
        return x.T if around == "vmap over columns" else x[:, None] if around == "shard_map" else x

    inputs = [as_mapped(X), as_mapped(plain(X))]
    last = X
    first = jax.grad(lambda y: (plain(y) * X).sum())(plain(X))
    for value, expected in zip(logs["x"], inputs, strict=True):
        equal(value, expected)
    for value, expected in zip(logs["cotangent"], [as_mapped(last), as_mapped(first)], strict=True):
        equal(value, expected)


@row("K5")
@pytest.mark.parametrize("around", ["checkpoint", "jit"])
def test_values_of_a_scan_are_stacked(around):
    def f(x):
        return jax.lax.scan(lambda x, _: (AROUND[around](wave)(x), None), x, None, length=STEPS)[0].sum()

    gradient, logs = jax.jit(jaxfn.with_logs(jax.grad(f)))(X)
    given, cotangents = inputs_of(jnp.sin, X, STEPS)
    equal(gradient, jax.grad(lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(STEPS), x).sum())(X))
    (x,), (largest,), (cotangent,) = logs["x"], logs["largest"], logs["cotangent"]
    equal(x, jnp.stack(given))
    equal(largest, jnp.stack(given).max((1, 2)))
    equal(cotangent, jnp.stack(cotangents))


@row("K5")
def test_nested_loops_have_an_axis_each():
    def f(x):
        def outer(x, scale):
            return jax.lax.scan(lambda x, _: (wave(x) * scale, None), x, None, length=2)[0], None

        return jax.lax.scan(outer, x, jnp.array([1.0, 2.0, 3.0]))[0]

    _, logs = jaxfn.with_logs(f)(X)
    (x,) = logs["x"]
    assert x.shape == (3, 2, *X.shape)
    equal(x[1, 0], jnp.sin(jnp.sin(X)))
    equal(x[1, 1], 2 * jnp.sin(jnp.sin(jnp.sin(X))))


@row("K5")
def test_a_while_loop_gives_its_last_step_and_a_branch_not_taken_nan():
    def loop(x):
        return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (wave(s[0]), s[1] + 1), (x, 0))[0]

    _, logs = jax.jit(jaxfn.with_logs(loop))(X)
    equal(logs["x"][0], jnp.sin(jnp.sin(X)))
    _, logs = jaxfn.with_logs(lambda x: jax.lax.cond(x.sum() < 0, wave, lambda x: x, x))(X)
    assert np.isnan(logs["x"][0]).all()


@row("K5")
def test_forward_mode_logs_too():
    (_, tangent), logs = jaxfn.with_logs(lambda x: jax.jvp(Swish.apply, (x,), (2 * x,)))(X)
    equal(tangent, jax.jvp(jax.nn.swish, (X,), (2 * X,))[1])
    equal(logs["tangent"][0], 2 * X)


@row("K5")
def test_a_function_that_logs_can_be_differentiated_with_logs_around_it():
    def loss(x):
        y, logs = jaxfn.with_logs(lambda x: jax.jit(wave)(Swish.apply(x)))(x)
        return y.sum(), logs

    (_, logs), gradient = jax.value_and_grad(loss, has_aux=True)(X)
    equal(gradient, jax.grad(lambda x: jnp.sin(jax.nn.swish(x)).sum())(X))
    equal(logs["x"][1], jax.nn.swish(X))


@row("K5")
def test_a_function_with_effects_is_run_once():
    printed = []

    @jaxfn.function
    def noisy(ctx, x):
        jax.debug.callback(lambda: printed.append(1))
        ctx.log(x=x)
        return x * 2

    @noisy.backward
    def _(ctx, grad_output):
        return grad_output * 2

    y, logs = jax.jit(jaxfn.with_logs(noisy))(X)
    jax.effects_barrier()
    equal(y, 2 * X)
    equal(logs["x"][0], X)
    assert len(printed) == 1


@row("K5")
def test_a_text_raises_and_the_name_log_may_be_used():
    @jaxfn.function
    def wrong(ctx, x):
        ctx.log(label="text")
        return x

    with pytest.raises(TypeError, match=r"'label' is of type str; expected an array or a Python number"):
        wrong(X)

    @jaxfn.function
    def own_attribute(ctx, x):
        ctx.log = x  # the user's own name for what is saved
        return x * x

    @own_attribute.backward
    def _(ctx, grad_output):
        return 2 * ctx.log * grad_output

    equal(jax.grad(lambda x: own_attribute(x).sum())(X), 2 * X)


@row("K5")
def test_static_arguments_and_pytrees_pass_through():
    def f(tree, flag, *, scale):
        return {"y": wave(tree["x"]) * scale if flag else tree["x"]}

    result, logs = jaxfn.with_logs(f)({"x": X}, True, scale=2.0)
    equal(result["y"], 2 * jnp.sin(X))
    equal(logs["x"][0], X)


@row("K5")
def test_eager_collection_compiles_and_stores_nothing():
    traces = []

    @jax.jit
    def plain(x):
        traces.append(x)
        return 2 * x

    kept = []
    for _ in range(3):
        with jaxfn.logged() as log:
            plain(wave(X * 1))
        kept.append(weakref.ref(log["x"][0]))
    assert len(traces) == 1
    del log
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


@row("K5")
@pytest.mark.parametrize("kind, around", [("auto", "while"), ("explicit", "cond"), ("shard_map", "while")])
def test_zeros_instead_of_absent_values_have_their_sharding(kind, around):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])

    def in_cond(x):
        return jax.lax.cond(x.sum() > 0, wave, jnp.cos, x)

    def in_while(x):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: wave(x) - 2, x)

    f = plain = in_cond if around == "cond" else in_while
    if kind == "shard_map":
        f = jax.shard_map(plain, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jnp.array([0.5, 0.25, -0.5, -0.25])
    with jax.set_mesh(mesh):
        y, logs = jax.jit(jaxfn.with_logs(f))(jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    parts = jnp.split(x, 2) if kind == "shard_map" else [x]
    equal(y, jnp.concatenate([plain(part) for part in parts]))
    expected = [part if part.sum() > 0 else jnp.full_like(part, jnp.nan) for part in parts]
    equal(logs["x"][0], jnp.stack(expected) if kind == "shard_map" else jnp.full_like(x, jnp.nan))


@row("K5")
def test_a_jvp_that_reverse_mode_transposes_can_log():
    @jaxfn.function
    def sine(ctx, x):
        ctx.save_for_forward(x)
        return jnp.sin(x)

    @sine.jvp
    def _(ctx, tangent):
        (x,) = ctx.saved_tensors
        ctx.log(x=x, tangent=tangent)
        return tangent * jnp.cos(x)

    gradient, logs = jaxfn.with_logs(jax.grad(lambda x: sine(x).sum()))(X)
    equal(gradient, jnp.cos(X))
    assert "tangent" not in logs  # which has no value in reverse mode


@row("K5")
def test_numbers_and_numpy_arrays_are_collected_as_they_were():
    class Double(jaxfn.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            buffer = np.zeros(2, np.float32)
            ctx.log(number=3, is_long=True, buffer=buffer)
            buffer[:] = 1

        @staticmethod
        def backward(ctx, grad_output):
            return 2 * grad_output

        @staticmethod
        def jvp(ctx, tangent):
            return 2 * tangent

    with jaxfn.logged() as log:
        jax.grad(lambda x: Double.apply(x).sum())(X)
    assert int(log["number"][0]) == 3 and bool(log["is_long"][0])
    equal(log["buffer"][0], np.zeros(2))


@row("K5")
def test_logs_that_cannot_be_returned_raise():
    with pytest.raises(NotImplementedError, match="condition of a while loop"):
        jaxfn.with_logs(lambda x: jax.lax.while_loop(lambda x: wave(x).sum() > 1, lambda x: x / 2, x))(X)

    @jaxfn.function
    def stopped(ctx, x):
        return x * 1

    @stopped.backward
    def _(ctx, grad_output):
        ctx.log(norm=grad_output)
        return None

    with pytest.raises(NotImplementedError, match=r"stopped\.backward logs 'norm' and returns no array"):
        jaxfn.with_logs(jax.grad(lambda x: stopped(x).sum()))(X)

    def folded(x):
        return jax.lax.map(lambda own: jax.lax.reduce(own, 0.0, lambda a, b: wave(a + b), (0,)), x)

    with pytest.raises(NotImplementedError, match="logs inside reduce"):
        jaxfn.with_logs(folded)(X)


@row("K5")
@pytest.mark.parametrize("around", ["jit", "map"])
def test_what_is_logged_inside_a_solver_comes_out(around):
    """Conjugate gradients of twice the identity begin at zero, and find the solution in the direction of `b`."""

    def solved(b):
        return jax.scipy.sparse.linalg.cg(lambda v: 2 * v + 0 * wave(v), b)[0]

    f = {"jit": jax.jit(solved), "map": lambda b: jax.lax.map(solved, b[None])[0]}[around]
    y, logs = jaxfn.with_logs(f)(X[:, 0])
    equal(y, X[:, 0] / 2)
    first, last = (x.reshape(3) for x in logs["x"])
    equal(first, jnp.zeros(3))
    equal(last, X[:, 0])


@row("K5")
def test_a_choice_by_platform_stays_one():
    def f(x):
        return jax.lax.platform_dependent(x, tpu=jnp.tanh, cpu=wave, default=jnp.cos)

    y, logs = jax.jit(jaxfn.with_logs(f))(X)
    equal(y, jnp.sin(X))
    equal(logs["x"][0], X)
    gradient, logs = jaxfn.with_logs(jax.grad(lambda x: f(x).sum()))(X)
    equal(gradient, jnp.cos(X))
    equal(logs["cotangent"][0], jnp.ones_like(X))
    operations = {"tpu": "tanh", "cpu": "sine", "cuda": "cosine"}
    for platform in operations:
        text = jax.jit(jaxfn.with_logs(f)).trace(X).lower(lowering_platforms=(platform,)).as_text()
        assert [f"stablehlo.{name} " in text for name in operations.values()] == [p == platform for p in operations]


@row("K5")
def test_options_of_jit_stay():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, P(None, "data"))

    def doubled(x):
        return wave(x) * 2

    placed = jax.jit(doubled, in_shardings=sharding, out_shardings=sharding)
    for step in (jaxfn.with_logs(placed), jax.jit(jaxfn.with_logs(placed))):
        y, logs = step(X)
        assert y.sharding == placed(X).sharding == sharding
        equal(y, 2 * jnp.sin(X))
        equal(logs["x"][0], X)
    names = jax.jit(jaxfn.with_logs(lambda x: placed(x))).lower(X).as_text(debug_info=True)
    assert "jit(doubled)" in names


@row("K5")
def test_a_random_key_of_a_branch_that_is_not_taken_has_zeros():
    @jaxfn.function
    def noisy(ctx, x, key):
        ctx.log(key=key)
        return x + jax.random.normal(key, x.shape)

    def f(x, key):
        return jax.lax.cond(x.sum() > 0, noisy, lambda x, _: x, x, key)

    key = jax.random.key(3)
    for sign, expected in ((1, jax.random.key_data(key)), (-1, jnp.zeros(2, jnp.uint32))):
        _, logs = jax.jit(jaxfn.with_logs(f))(sign * X, key)
        np.testing.assert_array_equal(jax.random.key_data(logs["key"][0]), expected)


@row("K5")
@pytest.mark.parametrize("around", ["nothing", "jit"])
def test_an_inner_with_logs_takes_what_is_logged_inside(around):
    around = AROUND[around]

    def outer(x):
        y, inner_logs = around(jaxfn.with_logs(jax.value_and_grad(lambda x: wave(x).sum())))(x)
        return y, inner_logs, around(wave)(3 * x)

    (((y, gradient), inner_logs, z), logs) = around(jaxfn.with_logs(outer))(X)
    equal(y, jnp.sin(X).sum())
    equal(gradient, jnp.cos(X))
    equal(z, jnp.sin(3 * X))
    assert {name: len(values) for name, values in inner_logs.items()} == {"largest": 1, "x": 1, "cotangent": 1}
    assert {name: len(values) for name, values in logs.items()} == {"largest": 1, "x": 1}
    equal(inner_logs["x"][0], X)
    equal(logs["x"][0], 3 * X)
    _, logs = jaxfn.with_logs(jaxfn.with_logs(wave))(X)
    assert logs == {}


@row("K5")
def test_what_is_donated_inside_can_be_read_again():
    def loss(x):
        return jax.jit(wave, donate_argnums=0)(x * 1).sum()

    gradient, logs = jaxfn.with_logs(jax.grad(loss))(X)
    equal(gradient, jnp.cos(X))
    equal(logs["x"][0], X)
    given = X + 0
    jax.jit(jaxfn.with_logs(jax.jit(wave, donate_argnums=0)), donate_argnums=0)(given)
    assert given.is_deleted()


@row("K5")
def test_devices_are_used_outside_jit_too():
    y, logs = jaxfn.with_logs(lambda x: over_devices(wave)(x) + over_devices(silent)(x))(X)
    equal(y, 2 * jnp.sin(X))
    equal(logs["x"][0], X[:, None])


@row("K5")
def test_nested_branches_are_traced_a_few_times_each():
    traced = []

    def branch(depth):
        def run(x):
            traced.append(depth)
            return halved(x) if depth == 0 else jax.lax.cond(x.sum() > depth, branch(depth - 1), halved, x)

        return run

    @jaxfn.function
    def halved(ctx, x):
        ctx.log(sum=x.sum())
        traced.append("forward")
        return x / 2

    start = time.process_time()
    _, logs = jaxfn.with_logs(branch(8))(jnp.ones(3))
    assert len(logs["sum"]) == 9
    assert time.process_time() - start < 5  # it was 12 s
