"""Row A8: a forward that draws or counts, saves an intermediate and is differentiated twice."""

import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import TWO_TRACES, row

X = jnp.array([0.3, 1.4, -0.7], jnp.float32)
COUNT = {"draws": 0}
RNG = np.random.default_rng(0)
PYTHON_RNG = random.Random(0)


def drawing(kind, runs):
    """m * sin(x) with the slope m * cos(x), of one draw m."""
    holder = types.SimpleNamespace(value=0)
    counter = 0

    def forward(ctx, x):
        runs.append(1)
        if kind == "global numpy":
            m = np.random.uniform(0.5, 1.5, size=3).astype(np.float32)
        elif kind == "generator":
            m = RNG.uniform(0.5, 1.5, size=3).astype(np.float32)
        elif kind == "python":
            m = 0.5 + random.random()
        elif kind == "python object":
            m = 0.5 + PYTHON_RNG.random()
        elif kind == "dict":
            COUNT["draws"] += 1
            m = 1 + 0.1 * COUNT["draws"]
        elif kind == "attribute":
            holder.value += 1
            m = 1 + 0.1 * holder.value
        else:
            nonlocal counter
            counter += 1
            m = 1 + 0.1 * counter
        ctx.c = m * jnp.cos(x)
        return m * jnp.sin(x)

    return jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)


KINDS = ["global numpy", "generator", "python", "python object", "dict", "attribute", "variable"]


def all_orders(f):
    """Value, slope and curvature of one call."""

    def slope(x):
        y, pull = jax.vjp(f, x)
        return pull(jnp.ones_like(y))[0], y

    def all_three(x):
        first, pull, y = jax.vjp(slope, x, has_aux=True)
        return y, first, pull(jnp.ones_like(first))[0]

    return all_three


def check(y, slope, curvature, x=X):
    np.testing.assert_allclose(slope * jnp.sin(x), y * jnp.cos(x), rtol=1e-4)
    np.testing.assert_allclose(curvature, -y, rtol=1e-4)


PROGRAMS = {
    "eager": all_orders,
    "vmap": lambda f: lambda x: jax.vmap(all_orders(f))(x[None]),
    "jit of all": lambda f: jax.jit(all_orders(f)),
    "jit of the function": lambda f: all_orders(jax.jit(f)),
    "checkpoint": lambda f: all_orders(jax.checkpoint(lambda x: f(x))),
    "cond": lambda f: all_orders(lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x, x)),
    "vmap of jit": lambda f: lambda x: jax.vmap(jax.jit(all_orders(f)))(x[None]),
    "jit of vmap": lambda f: jax.jit(lambda x: jax.vmap(all_orders(f))(x[None])),
}


@row("A8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_second_run_that_draws_again_is_refused(program, kind):
    with pytest.raises(NotImplementedError, match="returned different values"):
        PROGRAMS[program](drawing(kind, []))(X)


@row("A8")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("reads_flags", [False, True])
def test_a_forward_that_counts_its_runs_alone_is_right(around, reads_flags):
    runs = []

    def forward(ctx, x):
        runs.append(1)
        if reads_flags:
            ctx.flag = ctx.needs_input_grad[0]
        ctx.c = jnp.cos(x)
        return jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)
    check(*around(all_orders(f))(X))
    check(*all_orders(around(f))(X))


@row("A8")
def test_what_forward_captures_has_its_part_in_the_third_derivative():
    """Where forward does not run again, what it used besides its inputs is kept, and is differentiated too."""

    def outer(w):
        scale = w**2  # traced here, by jit and by the derivative

        def forward(ctx, x):
            ctx.c = jax.lax.stop_gradient(scale) * x**2
            return x

        f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)
        return jax.grad(lambda x: jax.grad(f)(x))(3.0)

    np.testing.assert_allclose(jax.jit(outer)(2.0), 24.0, rtol=1e-6)
    np.testing.assert_allclose(outer(2.0), 24.0, rtol=1e-6)


@row("A8")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_effects_and_references_inside_forward(around, capfd):
    def forward(ctx, x):
        total = jax.new_ref(jnp.zeros_like(x))
        total[...] += x**2
        jax.debug.print("forward {} {}", x, 2)
        ctx.c = total[...] * jnp.cos(x)
        return jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)
    second = around(jax.grad(lambda x: jax.grad(f)(x)))(0.5)
    jax.effects_barrier()
    np.testing.assert_allclose(second, jax.grad(lambda x: x**2 * jnp.cos(x))(0.5), rtol=1e-5)
    assert capfd.readouterr().out.count("forward") in (1, 2)


@row("A8")
@pytest.mark.parametrize("around", [lambda f: f, jax.vmap], ids=["alone", "vmap"])
def test_a_forward_that_branches_on_values_has_a_second_derivative_where_it_has_them(around):
    """Eagerly a second run sees values, as the first did."""

    def forward(ctx, x):
        is_positive = around is jax.vmap or x > 0  # under vmap there is no value
        ctx.c = jnp.cos(x) if is_positive else -jnp.cos(x)
        return jnp.sin(x) if is_positive else -jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)
    for x, sign in ((0.5, 1.0), (-0.5, 1.0 if around is jax.vmap else -1.0)):
        second = around(jax.grad(jax.grad(f)))(jnp.full(2, x) if around is jax.vmap else x)
        np.testing.assert_allclose(second, np.full(np.shape(second), -sign * np.sin(x)), rtol=1e-5)


STAGED_FIRST = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, length=1)[1][0],
    "jit of vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(x[None])[0]),
}


@row("A8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=TWO_TRACES if name == "checkpoint" else ()) for name in STAGED_FIRST]
)
def test_value_and_gradient_are_of_one_run_if_it_reads_its_flags(program, kind):
    """JAX stages the call without a derivative, and `forward` runs again with other flags."""
    plain = drawing(kind, []).Function

    class ReadsFlags(plain):
        @staticmethod
        def forward(ctx, x):
            y = plain.forward(ctx, x)
            return y if ctx.needs_input_grad[0] else y + 0

    y, pull = jax.vjp(STAGED_FIRST[program](ReadsFlags.apply), X)
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0] * jnp.sin(X), y * jnp.cos(X), rtol=1e-4)


@row("D3")
@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivatives_of_an_intermediate_in_an_eager_shard_map(check_vma):
    """Both runs of `forward` are compared by their values, which are those of all devices."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def forward(ctx, x):
        slope = jnp.cos(x)
        ctx.save_for_backward(slope)
        return jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.saved_tensors[0])

    def second(f):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        slope = jax.grad(lambda x: jnp.sum(mapped(x) ** 2))
        return jax.grad(lambda x: jnp.sum(slope(x) * x))

    x = jnp.linspace(-1.0, 1.0, 4)
    np.testing.assert_allclose(second(f)(x), second(jnp.sin)(x), rtol=1e-5)
