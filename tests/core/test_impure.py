"""Row A8: a forward that draws or counts, and runs again because of its flags or for a second derivative."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.contexts import CONTEXTS, eager, jit, program
from tests.support.marks import TRACES_ALWAYS, TWO_TRACES, cells, row

X = jnp.array([0.3, 1.4, -0.7], jnp.float32)
LARGE = 1e8
COUNT = {"draws": 0}
RNG = np.random.default_rng(0)


def counting() -> Callable[[], Any]:
    count = 0

    def draw():
        nonlocal count
        count += 1
        return 1 + 0.1 * count

    return draw


def counting_in_a_global() -> Any:
    COUNT["draws"] += 1
    return 1 + 0.1 * COUNT["draws"]


# Sources of a factor, another one each time.
SOURCES: dict[str, Callable[[], Callable[[], Any]]] = {
    "global numpy": lambda: lambda: np.random.uniform(0.5, 1.5, size=3).astype(np.float32),
    "generator": lambda: lambda: RNG.uniform(0.5, 1.5, size=3).astype(np.float32),
    "python": lambda: lambda: 0.5 + random.random(),
    "global": lambda: counting_in_a_global,
    "variable": counting,
}


def drawing(source, how="plain", flags="not read"):
    """m * sin(x * w), of one draw m. Its slopes are saved, those that the flags ask for."""
    draw = SOURCES[source]()

    def forward(ctx, x, w=1.0):
        of_x, of_w = (True, True) if flags == "not read" else ctx.needs_input_grad
        m = draw()

        def sine(x, w):
            y, c = m * jnp.sin(x * w), m * jnp.cos(x * w)
            # A large entry hides a difference of the others, where differences are measured by the largest.
            return jnp.append(y, LARGE) if how == "large" else y, w * c, x * c

        # In an inner jit, arrays are constants of another jaxpr.
        y, x_slope, w_slope = (jax.jit(sine) if how == "inner jit" else sine)(x, w)
        ctx.save_for_backward(x_slope if of_x or flags == "read" else None, w_slope if of_w else None)
        return y

    def backward(ctx, g):
        x_slope, w_slope = ctx.saved_tensors
        by_w = ctx.needs_input_grad.w and w_slope is not None
        return None if x_slope is None else g[:3] * x_slope, g[:3] * w_slope if by_w else None

    f = jaxfn.autograd_function(forward, backward, name="Drawing")
    return lambda *args: f(*args)[:3]


def all_orders(f, inside=eager):
    """A function that returns value, slope and curvature of one call."""

    def slope(x):
        y, pull = jax.vjp(f, x)
        return pull(jnp.ones_like(y))[0], y

    def all_three(x):
        first, pull, y = jax.vjp(inside(slope), x, has_aux=True)
        return y, first, pull(jnp.ones_like(first))[0]

    return all_three


STEPS = {"orders": all_orders, "orders, by jit": lambda f: all_orders(f, inside=jit)}
SECOND_RUN = r"^Drawing[\s\S]*returned different values"


@row("A8")
@cells(
    "source,name",
    [
        ("global numpy", "orders"),
        ("generator", "jit of orders"),
        ("python", "orders, by jit"),
        ("python", "orders of jit"),
        ("global", "jit of orders of jit"),
        ("variable", "orders of checkpoint"),
        ("variable", "orders of cond"),
        ("global numpy", "orders of scan"),
        ("generator", "scan of orders"),
        ("python", "vmap of orders"),
        ("global", "vmap of jit of orders"),
        ("variable", "jit of vmap of orders"),
        ("variable", "orders"),
    ],
)
def test_a_second_run_that_draws_again_raises(name, source):
    """A second derivative runs forward again, which draws other numbers: that is detected."""
    with pytest.raises(NotImplementedError, match=SECOND_RUN):
        program(name, **STEPS)(drawing(source))(X)


@row("A8")
@cells(
    "source,name,how,reads_flags",
    [
        ("generator", "orders", "large", False),
        ("variable", "orders", "plain", True),
        ("generator", "jit of orders", "inner jit", True),
        ("variable", "orders, by jit", "large", True),
        ("global numpy", "orders of jit", "inner jit", False),
        ("variable", "orders of checkpoint", "inner jit", False),
        ("generator", "orders of scan", "plain", True),
        ("global numpy", "vmap of orders", "large", False),
        ("generator", "vmap of jit of orders", "inner jit", True),
    ],
)
def test_a_second_run_is_compared_entry_by_entry_and_in_inner_programs(name, source, how, reads_flags):
    f = drawing(source, how, "read" if reads_flags else "not read")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="^Drawing"):
            program(name, **STEPS)(f)(X)


@row("A8")
def test_a_second_run_that_saves_something_else_raises():
    runs = 0

    def forward(ctx, x):
        nonlocal runs
        runs += 1
        ctx.save_for_backward(*((jnp.sin(x), x) if runs == 1 else (jnp.cos(x), jnp.sin(x))))
        return -jnp.cos(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.saved_tensors[0])
    with pytest.raises(NotImplementedError, match="forward was run again"):
        jax.grad(jax.grad(f))(0.7)
    assert runs > 1


@row("A8", "D8")
@cells(
    "source,how,context,outside",
    [
        ("generator", "plain", "eager", "eager"),
        ("variable", "large", "eager", "vmap"),
        ("generator", "inner jit", "jit", "jit"),
        ("variable", "plain", "checkpoint", "jit of vmap"),
        ("generator", "large", "scan", "eager"),
        ("variable", "inner jit", "cond", "vmap"),
        ("generator", "plain", "vmap", "vmap"),
    ],
)
def test_a_second_run_for_a_mixed_derivative_that_draws_again_raises(context, source, how, outside):
    """The flags of the mixed derivative are wider, so that forward runs again."""
    f = drawing(source, how, "saved by")

    def mixed(x, w):
        slope = jax.grad(lambda x, w: jnp.sum(CONTEXTS[context](f)(x, w)))
        return jax.grad(lambda w: jnp.sum(slope(x, w)))(w)

    with pytest.raises(NotImplementedError, match="^Drawing"):
        program(outside)(mixed)(X, jnp.full(3, 1.5))


def check_first(y, slope):
    """Value and slope are of one draw."""
    np.testing.assert_allclose(slope * jnp.sin(X), y * jnp.cos(X), rtol=1e-4)


@row("A8")
@pytest.mark.parametrize("around", ["eager", "jit"])
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
    around = CONTEXTS[around]
    for orders in (around(all_orders(f)), all_orders(around(f))):
        for got, expected in zip(orders(X), (jnp.sin(X), jnp.cos(X), -jnp.sin(X)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


@row("A8")
@cells(
    "source,name",
    [
        ("global numpy", "jit"),
        ("python", "jit"),
        pytest.param("generator", "checkpoint", marks=TWO_TRACES),
        pytest.param("global", "checkpoint", marks=TWO_TRACES),
        ("variable", "scan"),
        ("python", "scan"),
        ("variable", "jit of vmap"),
        ("generator", "jit of vmap"),
    ],
)
def test_value_and_gradient_are_of_one_run_if_it_reads_its_flags(name, source):
    """JAX stages the call without a derivative, and `forward` runs again with other flags."""
    y, pull = jax.vjp(program(name)(drawing(source, flags="read")), X)
    check_first(y, pull(jnp.ones_like(y))[0])


@row("A8")
def test_what_forward_captures_has_its_part_in_the_third_derivative():
    """Captured values are saved, and differentiated too, if forward does not run again."""

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
@pytest.mark.parametrize("around", ["eager", "jit"])
def test_effects_and_references_inside_forward(around, capfd):
    def forward(ctx, x):
        total = jax.new_ref(jnp.zeros_like(x))
        total[...] += x**2
        jax.debug.print("forward {} {}", x, 2)
        ctx.c = total[...] * jnp.cos(x)
        return jnp.sin(x)

    f = jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)
    second = CONTEXTS[around](jax.grad(lambda x: jax.grad(f)(x)))(0.5)
    jax.effects_barrier()
    np.testing.assert_allclose(second, jax.grad(lambda x: x**2 * jnp.cos(x))(0.5), rtol=1e-5)
    assert capfd.readouterr().out.count("forward") in (1, 2)


@row("A8")
@pytest.mark.parametrize("is_mapped", [False, True], ids=["alone", "vmap"])
@TRACES_ALWAYS
def test_a_forward_that_branches_on_values_has_a_second_derivative_where_it_has_them(is_mapped):
    """Eagerly a second run sees values, as the first did."""

    def forward(ctx, x):
        is_positive = is_mapped or x > 0  # under vmap there is no value
        ctx.c = jnp.cos(x) if is_positive else -jnp.cos(x)
        return jnp.sin(x) if is_positive else -jnp.sin(x)

    second = jax.grad(jax.grad(jaxfn.autograd_function(forward, lambda ctx, g: g * ctx.c)))
    if is_mapped:
        np.testing.assert_allclose(jax.vmap(second)(jnp.array([0.5, -0.5])), -np.sin([0.5, -0.5]), rtol=1e-5)
    else:
        np.testing.assert_allclose([second(0.5), second(-0.5)], [-np.sin(0.5), np.sin(-0.5)], rtol=1e-5)


@row("D3")
@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivatives_of_an_intermediate_in_an_eager_shard_map(check_vma):
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
