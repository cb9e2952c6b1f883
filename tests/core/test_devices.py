"""Functions on several devices: explicit axes, and collectives in backward inside of shard_map (rows E2 and E2b)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.marks import lane_cases, row, sampled, thorough


class AddBias(jaxfn.Function):
    """Its backward returns the gradient as it came, which is summed to the bias's shape."""

    @staticmethod
    def forward(ctx, x, b):
        return x + b

    @staticmethod
    def backward(ctx, g):
        return g, g


class AddBiasByTransposing(AddBias):
    generate_jvp_rule = True


class AddBiasInBothModes(AddBias):
    @staticmethod
    def jvp(ctx, x, b):
        return x + b


@row("E2")
@pytest.mark.parametrize("function", [AddBias, AddBiasByTransposing, AddBiasInBothModes])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (8, 1, 1), (1, 4, 1)], ids=str)
@sampled
def test_a_gradient_that_is_summed_to_a_replicated_bias_under_explicit_axes(function, shape):
    """The gradient lies on the mesh as the output does; the bias, or the other input, lies there otherwise."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, b = np.arange(256.0, dtype=np.float32).reshape(8, 4, 8) / 50, np.ones(shape, np.float32)

    def gradient(f):
        return jax.jit(jax.grad(lambda x, b: jnp.sum(jnp.sin(f(x, b))), argnums=(0, 1)))

    expected = gradient(jnp.add)(x, b)
    specs = [P(), P(*[None] * (len(shape) - 1), "model" if shape[-1] == 8 else None)]
    with jax.set_mesh(mesh):
        for spec in specs:
            args = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(b, NamedSharding(mesh, spec))
            got, plain = gradient(function.apply)(*args), gradient(jnp.add)(*args)
            for ours, theirs, alone in zip(got, plain, expected, strict=True):
                assert ours.sharding.spec == theirs.sharding.spec
                np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-5)
            if function is not AddBias:
                tangent = jax.jit(lambda x, b: jax.jvp(function.apply, (x, b), (2 * x, 3 * b))[1])(*args)
                np.testing.assert_allclose(tangent, 2 * x + 3 * b, rtol=1e-6)


def summed(x):
    return jax.lax.psum(x, "model")


def varying(x):
    return jax.lax.pcast(x, "model", to="varying")


def part(x):
    """Each device's own columns."""
    size = x.shape[-1] // jax.lax.axis_size("model")
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("model") * size, size, axis=-1)


def gathered(x):
    return jax.lax.all_gather(x, "model", axis=x.ndim - 1, tiled=True)


def made(forward, backward, **rules):
    """A Function of one array that saves nothing."""
    methods = {"forward": staticmethod(lambda ctx, x: forward(x)), "backward": staticmethod(lambda ctx, g: backward(g))}
    return type("Region", (jaxfn.Function,), methods | rules).apply


def same(x):
    return x


RULES = {
    "backward": {},
    "jvp beside it": {"jvp": staticmethod(lambda ctx, t: t)},
    "generate_jvp_rule": {"generate_jvp_rule": True},
}
COPY, REDUCE, SCATTER = (same, summed), (summed, same), (part, gathered)


def mlp(copy, reduce):
    """A tensor-parallel perceptron: w1 is split by columns, w2 by rows."""
    return lambda x, w1, w2: reduce(jnp.tanh(copy(x) @ w1) @ w2)


def attention(copy, reduce):
    """Tensor-parallel attention: each device has heads of its own, of 2 columns each."""

    def f(x, w1, w2):
        q = jnp.stack(jnp.split(copy(x) @ w1, w1.shape[1] // 2, axis=1))
        weights = jax.nn.softmax(q @ q.transpose(0, 2, 1), axis=-1)
        return reduce(jnp.concatenate(list(weights @ q), axis=1) @ w2)

    return f


def twice(f):
    return lambda x, w1, w2: f(jnp.sin(f(x, w1, w2)), w1, w2)


rng = np.random.default_rng(0)
X, W1, W2 = (rng.normal(size=size).astype(np.float32) for size in [(3, 4), (4, 16), (16, 4)])
WHOLE = P()
SPECS = (WHOLE, P(None, "model"), P("model"))


def sharded(f, check_vma=True, specs=SPECS, out_specs=WHOLE):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)


def loss_of(f):
    return lambda *args: jnp.sum(jnp.cos(f(*args)))


def agree(got, expected):
    for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-3, atol=2e-4)


def second_order(loss):
    return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*args)), (0, 1, 2))


AROUND = {
    "jit": lambda f: f,
    "scan": lambda f: lambda x, w1, w2: jax.lax.scan(lambda x, _: (f(x, w1, w2), None), x, length=2)[0],
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x, w1, w2: jax.vmap(f, (0, None, None))(jnp.stack([x, 2 * x]), w1, w2),
}


@row("E2b")
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("model", lane_cases([mlp, attention], [mlp]))
@pytest.mark.parametrize("around", AROUND)
@sampled
def test_megatrons_regions_with_types_that_say_what_varies_are_right(rules, model, around):
    """A copy whose output varies; Megatron's reduce is right as it is written in torch."""
    rules = dict(RULES[rules])
    copy = made(varying, summed, **({"jvp": staticmethod(lambda ctx, t: varying(t))} if "jvp" in rules else rules))
    reduce = made(*REDUCE, **({"jvp": staticmethod(lambda ctx, t: summed(t))} if "jvp" in rules else rules))
    ours, plain = (AROUND[around](model(*regions)) for regions in ((copy, reduce), (same, same)))
    expected = jax.grad(loss_of(plain), (0, 1, 2))(X, W1, W2)
    agree(jax.jit(jax.grad(sharded(loss_of(ours)), (0, 1, 2)))(X, W1, W2), expected)
    inside = sharded(jax.grad(loss_of(ours), (0, 1, 2)), out_specs=SPECS)
    agree(jax.jit(inside)(X, W1, W2), expected)


@row("E2b")
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("model", [mlp, attention])
@pytest.mark.parametrize("around", AROUND)
@sampled
def test_megatrons_copy_as_it_is_written_in_torch_is_refused(rules, model, around):
    copy, reduce = made(*COPY, **RULES[rules]), made(*REDUCE)
    loss = loss_of(AROUND[around](model(copy, reduce)))
    with pytest.raises(RuntimeError, match=r"Region.backward sums over the mesh axis 'model' .*counts 8 times"):
        jax.jit(jax.grad(sharded(loss), (0, 1, 2)))(X, W1, W2)
    with pytest.raises(RuntimeError, match=r"Region.backward sums over .* without jax.lax.psum"):
        jax.jit(sharded(jax.grad(loss, (0, 1, 2)), out_specs=SPECS))(X, W1, W2)


@row("E2b")
@pytest.mark.parametrize(
    "copy, place, message",
    [(COPY, varying, "Region.backward returned the same on all devices"), (SCATTER, same, "what each device adds")],
    ids=["copy of varying", "scatter"],
)
def test_other_gradients_that_would_count_eight_times_are_refused(copy, place, message):
    """By hand JAX refuses both, as the gradient does not vary where its input does, or the other way."""
    x, ours, by_hand = np.tile(X, (1, 4)), made(*copy), jax.custom_vjp(copy[0])
    by_hand.defvjp(lambda x: (copy[0](x), None), lambda _, g: (copy[1](g),))

    def gradient(region):
        return jax.grad(sharded(lambda x: summed(jnp.sum(jnp.sin(region(place(x))))), specs=P()))

    with pytest.raises(ValueError, match="bwd rule"):
        jax.jit(gradient(by_hand))(x)
    for wrap in (jax.jit, same):
        with pytest.raises(RuntimeError, match=message):
            wrap(gradient(ours))(x)


@row("E2b")
@pytest.mark.parametrize("wrap", [jax.jit, pytest.param(same, marks=thorough)], ids=["jit", "eager"])
def test_second_derivatives_and_both_orders_of_regions(wrap):
    copy, reduce = made(varying, summed), made(*REDUCE)
    ours, plain = twice(mlp(copy, reduce)), twice(mlp(same, same))  # a copy of what was reduced, too
    agree(wrap(second_order(sharded(loss_of(ours))))(X, W1, W2), jax.jit(second_order(loss_of(plain)))(X, W1, W2))
    with pytest.raises(RuntimeError, match="counts 8 times"):
        wrap(second_order(sharded(loss_of(twice(mlp(made(*COPY), reduce))))))(X, W1, W2)


@row("E2b")
@pytest.mark.parametrize("model", [mlp, attention])
def test_without_check_vma_regions_are_as_in_torch(model):
    """Each device has its own gradient there, and nothing is summed but by the user."""
    gradient = sharded(jax.grad(loss_of(model(made(*COPY), made(*REDUCE))), (0, 1, 2)), False, out_specs=SPECS)
    agree(jax.jit(gradient)(X, W1, W2), jax.grad(loss_of(model(same, same)), (0, 1, 2))(X, W1, W2))


@row("E2b")
@pytest.mark.parametrize("place", [same, varying], ids=["unvarying", "varying"])
def test_collectives_that_forward_has_too_are_left_alone(place):
    """Centred over all devices: what both directions sum may not vary, and counts as often in both."""

    @jaxfn.function
    def centred(ctx, x):
        return x - summed(x) / jax.lax.axis_size("model")

    @centred.backward
    def _(ctx, g):
        return g - summed(g) / jax.lax.axis_size("model")

    def gradient(f):
        return jax.jit(sharded(jax.grad(lambda x: jnp.sum(jnp.sin(3 * f(place(x)) + place(x)))), specs=P()))

    agree(gradient(centred)(X), gradient(lambda x: x - jax.lax.pmean(x, "model"))(X))


@row("E2b")
def test_a_sum_may_be_the_gradient_of_each_devices_own_input():
    """Copies of a weight that are kept alike, one on each device: the gradient says that it varies."""
    alike = made(same, lambda g: varying(summed(g)))
    weights, x = np.ones((8, 4), np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    gradient = sharded(jax.grad(lambda w, x: jnp.sum(alike(w) * x)), specs=(P("model"),) * 2, out_specs=P("model"))
    np.testing.assert_allclose(jax.jit(gradient)(weights, x), np.tile(x.sum(0), (8, 1)), rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"gradient of input 0 \('x'\), which varies over 'model'.*to='varying'"):
        lost = made(*COPY)
        jax.jit(sharded(jax.grad(lambda w, x: jnp.sum(lost(w) * x)), specs=(P("model"),) * 2, out_specs=P("model")))(
            weights, x
        )


def spread(part, whole):
    """Each device's own columns among zeros."""
    place = jax.lax.axis_index("model") * part.shape[-1]
    return jax.lax.dynamic_update_slice_in_dim(varying(jnp.zeros_like(whole)), part, place, axis=-1)


def around_a_ring(g):
    """The same sum, by eight devices that hand on what they got."""
    total = handed_on = varying(g)
    for _ in range(7):
        handed_on = jax.lax.ppermute(handed_on, "model", [(i, (i + 1) % 8) for i in range(8)])
        total = total + handed_on
    return total


INSIDE = {
    "ring": around_a_ring,
    "jit": jax.jit(summed),
    "scan": lambda g: jax.lax.scan(lambda c, _: (c, summed(c)), g, length=2)[1].sum(0),
    "while": lambda g: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, summed(c[1])), (0, g))[1],
    "cond": lambda g: jax.lax.cond(g.sum() > 0, summed, lambda g: 2 * g, g),
    "checkpoint": jax.checkpoint(summed),
    "a Function": made(*REDUCE),
    "parts": lambda g: spread(jax.lax.psum_scatter(varying(g), "model", scatter_dimension=g.ndim - 1, tiled=True), g),
}


@row("E2b")
@pytest.mark.parametrize("inside", INSIDE)
def test_such_a_sum_is_found_wherever_backward_has_it(inside):
    region = made(same, INSIDE[inside])
    with pytest.raises(RuntimeError, match="counts 8 times"):
        jax.jit(jax.grad(sharded(lambda x: jnp.sum(jnp.sin(region(x))), specs=P()))).lower(np.tile(X, (1, 2)))


@row("E2b")
def test_work_that_devices_share_is_summed_once():
    """What all devices have the same is multiplied in parts, one on each; the parts are summed, by hand and by JAX."""
    x = np.tile(X, (1, 2))
    for backward in (lambda g: summed(spread(3 * part(g), g)), lambda g: spread(3 * part(g), g)):
        loss = sharded(lambda x: jnp.sum(jnp.sin(made(same, backward)(x))), specs=P())
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), 3 * np.cos(x), rtol=1e-5)


@row("E2b")
def test_parts_are_summed_as_in_torch_without_check_vma():
    """Sequence-parallel regions: gathered forward, summed and scattered backward, and each device has its own loss."""
    region = made(same, lambda g: spread(jax.lax.psum_scatter(g, "model", scatter_dimension=1, tiled=True), g))
    x = rng.normal(size=(8, 8)).astype(np.float32)

    def loss(x):
        return jnp.sum(jnp.sin(region(x)) * (1 + jax.lax.axis_index("model")))

    got = jax.jit(sharded(jax.grad(loss), False, specs=(P(),), out_specs=P(None, "model")))(x)
    own = np.stack([got[:, i * 8 : i * 8 + 8] for i in range(8)])
    wanted = np.zeros_like(own)
    for i in range(8):
        wanted[i, :, i] = 36 * np.cos(x[:, i])
    np.testing.assert_allclose(own, wanted, rtol=1e-5)


@row("E2b")
def test_a_clipped_gradient_inside_of_shard_map():
    """A collective in backward alone, whose result is scaled by what each device has: types say that it is right."""

    def clip(g):
        return g / jnp.sqrt(summed(jnp.sum(g * g)))

    x = rng.normal(size=(8, 4)).astype(np.float32)
    gradient = sharded(jax.grad(lambda x: jnp.sum(made(same, clip)(x) ** 2)), specs=P("model"), out_specs=P("model"))
    np.testing.assert_allclose(jax.jit(gradient)(x), 2 * x / np.sqrt((4 * x * x).sum()), rtol=1e-5)


@row("E2")
@thorough
def test_two_processes_train_together():
    """Each has two of the four devices; both come to the losses of one device, in all ways of the example."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = """
        import sys
        import jax
        from jax.sharding import AxisType

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
        import sharded_training as example

        assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
        alone = example.train(example.loss_of(example.FUNCTIONS), None, 4)
        print("losses", *alone.losses)
        for axis_type in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
            print("losses", *example.train(example.loss_of(example.FUNCTIONS), mesh, 4).losses)
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        print("losses", *example.train(example.in_shard_map(example.REGIONS, mesh), mesh, 4).losses)
        print("parts", example.train(example.in_shard_map(example.REGIONS, mesh), mesh, 1).collectives)
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'examples'}"}
    command = [sys.executable, "-c", textwrap.dedent(program), str(port)]
    processes = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for i in range(2)
    ]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (printed, problem) in zip(processes, done, strict=True):
        assert process.returncode == 0, problem
        alone, *together = (line.split()[1:] for line in printed.splitlines() if line.startswith("losses"))
        assert len(together) == 3 and float(alone[-1]) < float(alone[0]) / 1.5
        for losses in together:
            np.testing.assert_allclose(np.float32(losses), np.float32(alone), rtol=1e-5)
        assert "all-reduce" in printed.splitlines()[-1]
