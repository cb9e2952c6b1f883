"""`ctx.log` and `jaxfn.logged`."""

import functools
import gc
import itertools
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.marks import LOGS_AGAIN, row


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
    ctx.save_for_backward(x)
    return jnp.sin(x)


@silent.backward
def _(ctx, grad_output):
    (x,) = ctx.saved_tensors
    return grad_output * jnp.cos(x)


X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)
STEPS = 3


def equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def all_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        equal(one, other)


def lengths(logs):
    return {name: len(values) for name, values in logs.items()}


def over_devices(f):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


def repeated(f):
    return lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=1)[0]


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "platform": lambda f: lambda x: jax.lax.platform_dependent(x, cpu=f, default=jnp.cos),
    "scan": repeated,
    "checkpoint of scan": lambda f: jax.checkpoint(repeated(f)),
    "vmap": jax.vmap,
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f)),
    "vmap over columns": lambda f: jax.vmap(f, in_axes=1, out_axes=1),
    "vmap of cond": lambda f: jax.vmap(lambda x: jax.lax.cond(x.sum() > -9, f, lambda x: x, x)),
}


def marked(around):
    return pytest.param(around, marks=LOGS_AGAIN) if "checkpoint" in around else around


@row("K5")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("around", [*map(marked, AROUND)])
@pytest.mark.parametrize("function, plain", [(wave, jnp.sin), (Swish.apply, jax.nn.swish)], ids=["reverse", "both"])
def test_values_come_out_of_programs_in_their_order(function, plain, around, compiled):
    step = jax.value_and_grad(lambda x: (AROUND[around](lambda x: function(function(x)))(x) * X).sum())
    with jaxfn.logged() as logs:
        value, gradient = (jax.jit(step) if compiled else step)(X + 2)
    expected = jax.value_and_grad(lambda x: (plain(plain(x)) * X).sum())(X + 2)
    equal(value, expected[0])
    equal(gradient, expected[1])

    def as_mapped(x):
        return x.T if around == "vmap over columns" else x

    inner = plain(X + 2)
    all_equal(logs["x"], [as_mapped(X + 2), as_mapped(inner)])
    of_inner = jax.grad(lambda y: (plain(y) * X).sum())(inner)
    all_equal(logs["cotangent"], [as_mapped(X), as_mapped(of_inner)])


@row("K5")
@pytest.mark.parametrize("around", [*map(marked, ["nothing", "checkpoint", "jit", "vmap"])])
def test_each_step_of_a_scan_is_an_entry(around):
    def f(x):
        return jax.lax.scan(lambda x, _: (AROUND[around](wave)(x), None), x, None, length=STEPS)[0].sum()

    def plain(x):
        return functools.reduce(lambda x, _: jnp.sin(x), range(STEPS), x).sum()

    with jaxfn.logged() as logs:
        gradient = jax.jit(jax.grad(f))(X)
    equal(gradient, jax.grad(plain)(X))
    given = list(itertools.accumulate(range(STEPS - 1), lambda x, _: jnp.sin(x), initial=X))
    all_equal(logs["x"], given)
    cotangents = [jnp.ones_like(X)]
    for x in reversed(given[1:]):
        cotangents.append(cotangents[-1] * jnp.cos(x))
    all_equal(logs["cotangent"], cotangents)


@row("K5")
@pytest.mark.parametrize("compiled", [False, True])
def test_while_loops_log_each_step_and_branches_only_where_taken(compiled):
    def loop(x):
        return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (wave(s[0]), s[1] + 1), (x, 0))[0]

    def branch(x):
        return jax.lax.cond(x.sum() < 0, wave, silent, x)

    transform = jax.jit if compiled else lambda f: f
    with jaxfn.logged() as logs:
        transform(loop)(X)
    all_equal(logs["x"], [X, jnp.sin(X), jnp.sin(jnp.sin(X))])
    with jaxfn.logged() as logs:
        transform(branch)(X + 1)
        transform(branch)(X - 1)
    all_equal(logs["x"], [X - 1])


@row("K5")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_forward_mode_logs_too(around):
    with jaxfn.logged() as logs:
        _, tangent = around(lambda x: jax.jvp(Swish.apply, (x,), (2 * x,)))(X)
    equal(tangent, jax.jvp(jax.nn.swish, (X,), (2 * X,))[1])
    all_equal(logs["tangent"], [2 * X])


@row("K5")
def test_a_jvp_that_reverse_mode_transposes_logs_what_has_a_value():
    @jaxfn.function
    def sine(ctx, x):
        ctx.save_for_forward(x)
        return jnp.sin(x)

    @sine.jvp
    def _(ctx, tangent):
        (x,) = ctx.saved_tensors
        ctx.log(x=x, tangent=tangent)
        return tangent * jnp.cos(x)

    with jaxfn.logged() as logs:
        gradient = jax.jit(jax.grad(lambda x: sine(x).sum()))(X)
    equal(gradient, jnp.cos(X))
    all_equal(logs["x"], [X])
    assert "tangent" not in logs


@row("K5")
def test_second_derivatives_log():
    with jaxfn.logged() as logs:
        second = jax.jit(jax.grad(lambda x: jax.grad(lambda x: wave(x).sum())(x).sum()))(X)
    equal(second, -jnp.sin(X))
    equal(logs["x"][0], X)
    equal(logs["cotangent"][0], jnp.ones_like(X))


# When programs are compiled


@row("K5")
def test_programs_have_callbacks_inside_a_block_alone():
    def lowered(f):
        return jax.jit(jax.value_and_grad(lambda x: f(x).sum())).lower(X).as_text()

    with jaxfn.logged():
        assert "callback" in lowered(wave)
        assert "callback" not in lowered(silent)
        wave(X)
    assert lowered(wave) == lowered(silent)


@row("K5")
def test_a_function_that_was_compiled_before_logs_and_is_compiled_again_once_for_all_blocks():
    traces = []

    @jax.jit
    def step(x):
        traces.append(x)
        return jax.grad(lambda x: wave(x).sum())(x)

    step(X)
    kept = []
    for i in range(3):
        with jaxfn.logged() as logs:
            equal(step(X + i), jnp.cos(X + i))
        all_equal(logs["x"], [X + i])
        all_equal(logs["cotangent"], [jnp.ones_like(X)])
        kept.append(weakref.ref(logs["x"][0]))
        step(X)
    assert len(traces) == 2
    del logs
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


@row("K5")
@pytest.mark.parametrize("around", ["nothing", "jit", "scan", "checkpoint"])
@pytest.mark.parametrize("function", [wave, Swish.apply], ids=["reverse", "both"])
def test_each_pass_logs_if_it_runs_inside(function, around):
    y, pullback = jax.vjp(AROUND[around](function), X)
    with jaxfn.logged() as logs:
        pullback(y)
    assert lengths(logs) == {"cotangent": 1}
    with jaxfn.logged() as logs:
        y, pullback = jax.vjp(AROUND[around](function), X)
    pullback(y)
    assert "cotangent" not in logs and len(logs["x"]) == 1


@row("K5")
def test_a_block_inside_another_takes_what_is_logged_inside():
    step = jax.jit(wave)
    with jaxfn.logged() as outer:
        step(X)
        with jaxfn.logged() as inner:
            step(2 * X)
            wave(3 * X)
        step(4 * X)
    all_equal(inner["x"], [2 * X, 3 * X])
    all_equal(outer["x"], [X, 4 * X])


@row("K5")
def test_each_thread_has_its_own_log():
    step = jax.jit(jax.grad(lambda x: wave(x).sum()))
    logs = {}

    def work(i):
        with jaxfn.logged() as logs[i]:
            for _ in range(4):
                step(X + i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        all_equal(logs[i]["x"], [X + i] * 4)


@row("K5")
def test_eager_values_come_after_those_of_a_program_that_still_runs():
    @jax.jit
    def slow(x):
        for _ in range(20):
            x = jnp.sin(x @ x)
        return wave(x[:3, :2])

    with jaxfn.logged() as logs:
        slow(jnp.ones((300, 300)))
        wave(2 * X)
    equal(logs["x"][1], 2 * X)


@row("K5")
def test_nothing_logged_warns():
    compiled = jax.jit(wave).lower(X).compile()
    for run in (lambda: compiled(X), lambda: silent(X)):
        with pytest.warns(UserWarning, match=r"nothing was logged.*ahead of time"), jaxfn.logged() as logs:
            run()
        assert logs == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), jaxfn.logged():
            raise KeyError("mine")
        with jaxfn.logged():
            compiled = jax.jit(wave).lower(X).compile()
            compiled(X)
        compiled(X)
        with jaxfn.logged() as logs:
            wave(2 * X)
    all_equal(logs["x"], [2 * X])


# Devices


@row("K5")
@pytest.mark.parametrize("compiled", [False, True])
def test_programs_on_several_devices_log_without_an_order(compiled):
    f = over_devices(Swish.apply)
    step = jax.grad(lambda x: f(x).sum())
    step = jax.jit(step) if compiled else step
    with pytest.raises(ValueError, match=r"jaxfn\.logged\(ordered=False\)"), jaxfn.logged():
        step(X)
    with jaxfn.logged(ordered=False) as logs:
        gradient = step(X)
    equal(gradient, jax.grad(lambda x: jax.nn.swish(x).sum())(X))
    equal(sorted(float(x[0, 0]) for x in logs["x"]), X[:, 0])
    assert lengths(logs) == {"x": 3, "output": 3, "cotangent": 3}


@row("K5")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_array_is_one_entry(kind):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(kind,), devices=jax.devices()[:3])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        with jaxfn.logged(ordered=False) as logs:
            y = jax.jit(wave)(x)
            jax.jit(jax.vmap(wave))(2 * x)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    all_equal(logs["x"], [X, 2 * X])


# Where nothing can be logged in order


@row("K5")
@pytest.mark.parametrize("around", ["nothing", "jit", "vmap"])
def test_the_condition_of_a_while_loop_logs_without_an_order(around):
    def loop(x):
        return jax.lax.while_loop(lambda x: AROUND[around](wave)(x).sum() > 0.5, lambda x: x / 2, x)

    expected = jax.vmap(loop)(X + 1.5)
    with jaxfn.logged(ordered=False) as logs:
        equal(jax.vmap(loop)(X + 1.5), expected)
    equal(logs["x"][0], X + 1.5)
    with pytest.raises(NotImplementedError, match=r"condition of a while loop.*ordered=False"), jaxfn.logged():
        jax.vmap(loop)(X + 1.5)


# Values


@row("K5")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))])
def test_numbers_arrays_of_numpy_and_keys_are_collected_as_they_were(around):
    class Double(jaxfn.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            buffer = np.zeros(2, np.float32)
            ctx.log(number=3, is_long=True, buffer=buffer, key=jax.random.key(3))
            buffer[:] = 1

        @staticmethod
        def backward(ctx, grad_output):
            ctx.log(norm=grad_output)
            return None

        @staticmethod
        def jvp(ctx, tangent):
            return 2 * tangent

    with jaxfn.logged() as logs:
        jax.grad(lambda x: around(Double.apply)(x).sum())(X)
    assert int(logs["number"][0]) == 3 and bool(logs["is_long"][0])
    equal(logs["buffer"][0], np.zeros(2))
    assert logs["key"][0] == jax.random.key(3)
    all_equal(logs["norm"], [jnp.ones_like(X)])


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
def test_what_is_logged_inside_a_solver_comes_out():
    """Conjugate gradients of twice the identity begin at zero, and find the solution in the direction of `b`."""

    def solved(b):
        return jax.scipy.sparse.linalg.cg(lambda v: 2 * v + 0 * wave(v), b)[0]

    b = X[:, 0]
    with jaxfn.logged() as logs:
        equal(jax.jit(solved)(b), b / 2)
    all_equal(logs["x"], [jnp.zeros(3), b])
