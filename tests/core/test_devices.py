"""Functions on several devices: explicit axes, and collectives and callbacks inside shard_map (rows E2 and E2b)."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.cases import function_of, hand_written_of, with_rules
from tests.support.contexts import CONTEXTS
from tests.support.derivatives import check, derivative
from tests.support.marks import cells, row, slow


def add_bias(rules):
    """Its backward returns the gradient as it came, which is summed to the bias's shape."""
    return with_rules(rules, lambda ctx, x, b: x + b, lambda ctx, g: (g, g), lambda ctx, x, b: x + b)


@row("E2")
@cells(
    "rules, shape",
    [("backward", (8,)), ("backward", (8, 1, 1)), ("generated", (1, 8)), ("both", (1, 4, 1))],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
def test_a_gradient_that_is_summed_to_a_replicated_bias_under_explicit_axes(rules, shape):
    """The gradient lies on the mesh as the output does; the bias, or the other input, lies there otherwise."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    f = add_bias(rules)
    x, b = np.arange(256.0, dtype=np.float32).reshape(8, 4, 8) / 50, np.ones(shape, np.float32)

    def gradient(f):
        return jax.jit(jax.grad(lambda x, b: jnp.sum(jnp.sin(f(x, b))), argnums=(0, 1)))

    expected = gradient(jnp.add)(x, b)
    specs = [P(), P(*[None] * (len(shape) - 1), "model" if shape[-1] == 8 else None)]
    with jax.set_mesh(mesh):
        for spec in specs:
            args = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(b, NamedSharding(mesh, spec))
            got, plain = gradient(f)(*args), gradient(jnp.add)(*args)
            for ours, theirs, alone in zip(got, plain, expected, strict=True):
                assert ours.sharding.spec == theirs.sharding.spec
                np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-5)
            if rules != "backward":
                tangent = jax.jit(lambda x, b: jax.jvp(f, (x, b), (2 * x, 3 * b))[1])(*args)
                np.testing.assert_allclose(tangent, 2 * x + 3 * b, rtol=1e-6)


@row("E1c", "E2")
@cells(
    "rules, axis_of_w, order",
    [("backward", "model", 1), ("generated", None, 2)],
    ["backward", "generated"],
    [None, "model"],
    [1, 2],
)
def test_vmap_over_an_explicit_axis_with_a_weight_that_all_elements_share(rules, axis_of_w, order):
    """Maps a product, and an output of the weight alone; the rule is three times the derivative."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    f = function_of(
        rules,
        lambda x, w: (x * w, jnp.sin(w)),
        None,
        lambda saved, g, of_sine: (3 * g * saved[1], 3 * (g * saved[0] + of_sine * jnp.cos(saved[1]))),
    )

    def plain(x, w):
        return tuple(y + 2 * (y - jax.lax.stop_gradient(y)) for y in (x * w, jnp.sin(w)))

    def gradient(f):
        def outputs(x, w):
            product, sine = jax.vmap(f, (0, None))(x, w)
            return product, sine * jnp.arange(8.0)[:, None]

        return jax.jit(derivative("grad" if order == 1 else "grad of grad", outputs))

    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4) / 10, NamedSharding(mesh, P("data")))
        w = jax.device_put(np.array([0.7, 0.2, -0.4, 1.1], np.float32), NamedSharding(mesh, P(axis_of_w)))
        got, expected = gradient(f)(x, w), gradient(plain)(x, w)
    assert [g.sharding.spec for g in got] == [g.sharding.spec for g in expected]
    check(got, expected, 1e-4, 1e-3)


def same(x):
    return x


def summed(x):
    return jax.lax.psum(x, "model")


def averaged(x):
    return jax.lax.pmean(x, "model")


def divided_and_summed(x):
    return jax.lax.psum(x / jax.lax.axis_size("model"), "model")


def varying(x):
    return jax.lax.pcast(x, "model", to="varying")


def part(x):
    """Each device's own columns."""
    size = x.shape[-1] // jax.lax.axis_size("model")
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("model") * size, size, axis=-1)


def gathered(x):
    return jax.lax.all_gather(x, "model", axis=x.ndim - 1, tiled=True)


def spread(part, whole):
    """Each device's own columns among zeros."""
    start = jax.lax.axis_index("model") * part.shape[-1]
    return jax.lax.dynamic_update_slice_in_dim(varying(jnp.zeros_like(whole)), part, start, axis=-1)


def nothing(args, outputs):
    return ()


def region(forward, backward, rules="backward"):
    """A Function of one array that saves nothing; its jvp is linear in the way of forward."""
    return function_of(rules, forward, lambda _, t: forward(t), lambda _, g: backward(g), nothing, "Region")


def hand_written_region(forward, backward):
    return hand_written_of(forward, lambda _, g: backward(g), nothing)


# Forward and backward of the two regions of Megatron-LM. Those of torch that are wrong here count what all devices have
# in common once for each device: the copy in the gradient of x alone, the reduction in all gradients.
COPIES = {
    "typed": (varying, summed),
    "mean": (same, averaged),
    "sum of parts": (same, divided_and_summed),
    "unchanged": (same, same),
    "as in torch": (same, summed),
}
REDUCTIONS = {
    "as in torch": (summed, same),
    "cast": (summed, varying),
    "mean": (summed, averaged),
    "sum of parts": (summed, divided_and_summed),
    "sum in backward": (summed, summed),
}
SCATTER = (part, gathered)


def mlp(copy, reduce):
    """A tensor-parallel perceptron: w1 is split by columns, w2 by rows."""
    return lambda x, w1, w2: reduce(jnp.tanh(copy(x) @ w1) @ w2)


def twice(f):
    return lambda x, w1, w2: f(jnp.sin(f(x, w1, w2)), w1, w2)


rng = np.random.default_rng(0)
X, W1, W2 = (rng.normal(size=size).astype(np.float32) for size in [(4, 4), (4, 16), (16, 4)])
MESHES = {"8": ((8,), ("model",)), "4 by 2": ((4, 2), ("data", "model"))}
SIZES = {"8": 8, "4 by 2": 2}  # of the axis "model"
WHOLE = P()
SPECS = (WHOLE, P(None, "model"), P("model"))


def sharded(f, check_vma=True, specs=SPECS, out_specs=WHOLE, mesh="8"):
    shape, names = MESHES[mesh]
    devices = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return jax.shard_map(f, mesh=devices, in_specs=specs, out_specs=out_specs, check_vma=check_vma)


def loss_of(f):
    return lambda *args: jnp.sum(jnp.cos(f(*args)))


def on_devices(f, mesh="8", inside=False):
    """The loss of `f`, or its gradients inside shard_map; each row of devices has a part of x, if there are rows."""
    rows = "data" if mesh == "4 by 2" else None
    specs = (P(rows), *SPECS[1:])

    def loss(*args):
        value = loss_of(f)(*args)
        return jax.lax.psum(value, rows) if rows else value

    if inside:
        return sharded(jax.grad(loss, (0, 1, 2)), specs=specs, out_specs=specs, mesh=mesh)
    return sharded(loss, specs=specs, mesh=mesh)


TRANSFORMS = {
    "grad of shard_map": lambda f, mesh: jax.jit(jax.grad(on_devices(f, mesh), (0, 1, 2))),
    "shard_map of grad": lambda f, mesh: jax.jit(on_devices(f, mesh, inside=True)),
    "eager grad of shard_map": lambda f, mesh: jax.grad(on_devices(f, mesh), (0, 1, 2)),
    "eager shard_map of grad": lambda f, mesh: on_devices(f, mesh, inside=True),
}
# The vmap batches x alone, along its axis 1, and the scan applies the function to its own result.
AROUND = {
    "nothing": same,
    "jit": CONTEXTS["jit"],
    "checkpoint": CONTEXTS["checkpoint"],
    "scan": lambda f: lambda x, w1, w2: jax.lax.scan(lambda x, _: (f(x, w1, w2), None), x, length=2)[0],
    "vmap": lambda f: lambda x, w1, w2: jax.vmap(f, (1, None, None), 1)(jnp.stack([x, 2 * x], 1), w1, w2),
}


agree = partial(check, rtol=2e-3, atol=2e-4)


@row("E2b")
@cells(
    "copy, reduction, rules, around, transform, mesh",
    [
        ("typed", "as in torch", "backward", "nothing", "grad of shard_map", "8"),
        ("typed", "as in torch", "generated", "vmap", "grad of shard_map", "4 by 2"),
        ("mean", "cast", "both", "scan", "shard_map of grad", "8"),
        ("mean", "sum of parts", "backward", "nothing", "grad of shard_map", "8"),
        ("sum of parts", "cast", "generated", "checkpoint", "shard_map of grad", "4 by 2"),
        ("sum of parts", "mean", "backward", "nothing", "eager grad of shard_map", "8"),
        ("unchanged", "cast", "both", "jit", "grad of shard_map", "8"),
        ("mean", "mean", "backward", "nothing", "eager shard_map of grad", "4 by 2"),
    ],
)
def test_collectives_in_a_backward_that_are_right_are_accepted(copy, reduction, rules, around, transform, mesh):
    """`pmean` and the sum of parts of what devices have in common, `pcast`, and what their types say that varies."""
    regions = region(*COPIES[copy], rules), region(*REDUCTIONS[reduction], rules)
    ours, plain = (AROUND[around](mlp(*functions)) for functions in (regions, (same, same)))
    agree(TRANSFORMS[transform](ours, mesh)(X, W1, W2), jax.grad(loss_of(plain), (0, 1, 2))(X, W1, W2))


@row("E2b")
@cells(
    "copy, reduction, mesh", [("typed", "as in torch", "8"), ("mean", "cast", "4 by 2"), ("sum of parts", "cast", "8")]
)
def test_second_derivatives_of_regions(copy, reduction, mesh):
    """Second derivatives of a copy of a reduced array are right too."""

    def second_order(loss):
        return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*args)), (0, 1, 2))

    ours, plain = twice(mlp(region(*COPIES[copy]), region(*REDUCTIONS[reduction]))), twice(mlp(same, same))
    got, expected = jax.jit(second_order(on_devices(ours, mesh))), jax.jit(second_order(loss_of(plain)))
    agree(got(X, W1, W2), expected(X, W1, W2))


@row("E2b")
def test_without_check_vma_regions_are_as_in_torch():
    """Each device has its own gradient there, and nothing is summed but by the user."""
    regions = region(*COPIES["as in torch"]), region(*REDUCTIONS["as in torch"])
    gradient = sharded(jax.grad(loss_of(mlp(*regions)), (0, 1, 2)), False, out_specs=SPECS)
    agree(jax.jit(gradient)(X, W1, W2), jax.grad(loss_of(mlp(same, same)), (0, 1, 2))(X, W1, W2))


@row("E2b")
@pytest.mark.parametrize("cast", [same, varying], ids=["unvarying", "varying"])
def test_collectives_that_forward_has_too_are_left_alone(cast):
    """Centred over all devices: what both directions sum may not vary, and counts as often in both."""

    def centred(x):
        return x - summed(x) / jax.lax.axis_size("model")

    def gradient(f):
        return jax.jit(sharded(jax.grad(lambda x: jnp.sum(jnp.sin(3 * f(cast(x)) + cast(x)))), specs=P()))

    agree(gradient(region(centred, centred))(X), gradient(lambda x: x - averaged(x))(X))


@row("E2b")
def test_a_sum_may_be_the_gradient_of_each_devices_own_input():
    """Copies of a weight that stay equal, one on each device, with and without a cast of the gradient."""
    weights, x = np.ones((8, 4), np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    for alike in (region(same, lambda g: varying(summed(g))), region(*COPIES["as in torch"])):
        split = (P("model"),) * 2
        gradient = sharded(jax.grad(lambda w, x: jnp.sum(alike(w) * x)), specs=split, out_specs=P("model"))
        np.testing.assert_allclose(jax.jit(gradient)(weights, x), np.tile(x.sum(0), (8, 1)), rtol=1e-5)


def around_a_ring(g):
    """A sum by eight devices in a ring, each of which passes on what it received."""
    total = handed_on = varying(g)
    for _ in range(7):
        handed_on = jax.lax.ppermute(handed_on, "model", [(i, (i + 1) % 8) for i in range(8)])
        total = total + handed_on
    return total


@row("E2b")
def test_work_that_devices_share_is_summed_once():
    """A product of replicated arrays is split over devices; the parts are summed as by a hand-written rule and JAX."""
    x = np.tile(X, (1, 2))
    for backward in (lambda g: summed(spread(3 * part(g), g)), lambda g: spread(3 * part(g), g)):
        loss = sharded(lambda x: jnp.sum(jnp.sin(region(same, backward)(x))), specs=P())
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), 3 * np.cos(x), rtol=1e-5)


@row("E2b")
def test_parts_are_summed_as_in_torch_without_check_vma():
    """Sequence-parallel regions: gathered forward, summed and scattered backward, and each device has its own loss."""
    alike = region(same, lambda g: spread(jax.lax.psum_scatter(g, "model", scatter_dimension=1, tiled=True), g))
    x = rng.normal(size=(8, 8)).astype(np.float32)

    def loss(x):
        return jnp.sum(jnp.sin(alike(x)) * (1 + jax.lax.axis_index("model")))

    got = jax.jit(sharded(jax.grad(loss), False, specs=(P(),), out_specs=P(None, "model")))(x)
    own = np.stack([got[:, i * 8 : i * 8 + 8] for i in range(8)])
    wanted = np.zeros_like(own)
    for i in range(8):
        wanted[i, :, i] = 36 * np.cos(x[:, i])
    np.testing.assert_allclose(own, wanted, rtol=1e-5)


@row("E2b")
def test_a_clipped_gradient_inside_shard_map():
    """A collective in backward alone, whose result is scaled by what each device has: types say that it is right."""

    def clip(g):
        return g / jnp.sqrt(summed(jnp.sum(g * g)))

    x = rng.normal(size=(8, 4)).astype(np.float32)
    gradient = sharded(jax.grad(lambda x: jnp.sum(region(same, clip)(x) ** 2)), specs=P("model"), out_specs=P("model"))
    np.testing.assert_allclose(jax.jit(gradient)(x), 2 * x / np.sqrt((4 * x * x).sum()), rtol=1e-5)


def loss_of_region(region, cast=same):
    """The loss of a region alone, whose input all devices have alike; its output may vary."""

    def loss(x):
        total = jnp.sum(jnp.sin(region(cast(x))))
        return summed(total) if jax.typeof(total).manual_axis_type.varying else total

    return sharded(loss, specs=P())


# Backwards of an identity that count what the devices have in common more than once, and how often.
SUMS = {
    "ring": (around_a_ring, 64),
    "scan": (lambda g: jax.lax.scan(lambda c, _: (c, summed(c)), g, length=2)[1].sum(0), 16),
    "cond": (lambda g: jax.lax.cond(g.sum() > 0, summed, lambda g: 2 * g, g), 8),
}
WIDE = np.tile(X[:1], (1, 4))


# A loss, its arguments, and by which factor the gradient of the first one is too large.
WRONG = {
    "copy on 4 by 2 devices": lambda: (
        on_devices(mlp(region(*COPIES["as in torch"]), region(*REDUCTIONS["as in torch"])), "4 by 2"),
        (X, W1, W2),
        2,
    ),
    "copy of what varies": lambda: (loss_of_region(region(*COPIES["as in torch"]), varying), (WIDE,), 8),
    "scatter": lambda: (loss_of_region(region(*SCATTER)), (WIDE,), 8),
    "sum, ring": lambda: (loss_of_region(region(same, SUMS["ring"][0])), (WIDE[:, :8],), SUMS["ring"][1]),
    "sum, scan": lambda: (loss_of_region(region(same, SUMS["scan"][0])), (WIDE[:, :8],), SUMS["scan"][1]),
}


def gradchecked(f, args, **options):
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # float32 is checked in double precision
        return jaxfn.gradcheck(f, args, raise_exception=False, **options)


def times(factor, size=8):
    return f"a constant factor: {factor} times what it should be (mesh axis 'model' has {size} devices)"


@row("E2b", "G4")
@pytest.mark.parametrize("wrong", WRONG)
def test_gradcheck_finds_what_is_counted_more_than_once_and_says_how_often(wrong):
    f, args, factor = WRONG[wrong]()
    report = gradchecked(f, args)
    assert not report and report.mismatches[0].input.startswith("input 0")
    assert report.mismatches[0].mistake == times(factor, 2 if factor == 2 else 8)


# Losses with collectives that count once, and their arguments.
RIGHT = {
    "cast on 4 by 2 devices": lambda: (
        on_devices(mlp(region(same, averaged), region(summed, varying)), "4 by 2"),
        (X, W1, W2),
    ),
    "sum of parts": lambda: (loss_of_region(region(same, divided_and_summed)), (WIDE,)),
    "scatter": lambda: (loss_of_region(region(lambda x: part(varying(x)), gathered_into)), (WIDE,)),
}


def gathered_into(g):
    """The gradient of a part of an input that all devices have alike: jaxfn adds the devices' parts up."""
    return spread(g, jnp.zeros((*g.shape[:-1], g.shape[-1] * jax.lax.axis_size("model")), g.dtype))


@row("E2b")
@pytest.mark.parametrize("right", RIGHT)
def test_gradcheck_passes_collectives_that_count_once(right):
    assert gradchecked(*RIGHT[right]())


@row("E2b")
@cells(
    "wrong, transform, mesh",
    [
        ("copy", "grad of shard_map", "8"),
        ("copy", "shard_map of grad", "4 by 2"),
        ("reduction", "eager grad of shard_map", "4 by 2"),
        ("reduction", "eager shard_map of grad", "8"),
    ],
)
def test_a_call_accepts_what_counts_more_than_once(wrong, transform, mesh):
    size = SIZES[mesh]
    factors, (copy, reduction) = {
        "copy": ((size, 1, 1), (COPIES["as in torch"], REDUCTIONS["cast"])),
        "reduction": ((size, size, size), (COPIES["typed"], REDUCTIONS["sum in backward"])),
    }[wrong]
    got = TRANSFORMS[transform](mlp(region(*copy), region(*reduction)), mesh)(X, W1, W2)
    plain = jax.grad(loss_of(mlp(same, same)), (0, 1, 2))(X, W1, W2)
    agree(got, tuple(factor * g for factor, g in zip(factors, plain, strict=True)))
    if wrong == "copy":  # JAX rejects a hand-written reduction like this
        by_jax = mlp(hand_written_region(*copy), hand_written_region(*reduction))
        agree(got, TRANSFORMS[transform](by_jax, mesh)(X, W1, W2))


@row("E2b")
@pytest.mark.parametrize("where", ["scan", "cond"])
def test_a_call_gives_the_number_of_a_hand_written_custom_vjp(where):
    backward, _ = SUMS[where]
    got, expected = (
        jax.jit(jax.grad(loss_of_region(f)))(WIDE)
        for f in (region(same, backward), hand_written_region(same, backward))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def on_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def loss_on_devices(sine):
    """A loss by a weight that all devices have and by each device's data."""
    return sharded(lambda w, x: summed(jnp.sum(sine(w * x))), specs=(P(), P("model")))


@pytest.fixture
def x64_on_every_thread():
    """Callbacks run on threads of JAX, where a context manager of this thread does nothing."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@row("E2b", "E5")
@pytest.mark.usefixtures("x64_on_every_thread")
@pytest.mark.parametrize("wrap", [jax.jit, same], ids=["jit", "eager"])
@pytest.mark.parametrize("cast", [varying, same], ids=["cast", "not cast"])
def test_a_callback_in_shard_map_is_right_where_its_result_is_cast(cast, wrap):
    """JAX says that the result is equal on all devices, and sums its gradient over them; gradcheck finds that."""
    sine = jaxfn.autograd_function(
        lambda ctx, x: ctx.save_for_backward(x) or cast(on_host(x)),
        lambda ctx, g: g * jnp.cos(ctx.saved_tensors[0]),
    )
    hand_written = jax.custom_vjp(lambda x: cast(on_host(x)))
    hand_written.defvjp(lambda x: (hand_written(x), x), lambda x, g: (g * jnp.cos(x),))
    args = np.float32(1.3), np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    got = wrap(jax.grad(loss_on_devices(sine), (0, 1)))(*args)
    agree(got, jax.jit(jax.grad(loss_on_devices(hand_written), (0, 1)))(*args))
    report = gradchecked(loss_on_devices(sine), args, surrogate=loss_on_devices(jnp.sin))
    if cast is varying:
        agree(got, jax.grad(lambda w, x: jnp.sum(jnp.sin(w * x)), (0, 1))(*args))
        assert report
    else:
        assert [mismatch.mistake for mismatch in report.mismatches] == [times(8)] * 2


@row("E2b", "E5")
def test_the_example_of_a_host_routine_is_right_in_shard_map(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "kernels"))
    host_routine = importlib.import_module("host_routine")

    def loss(sigma, x):
        return jnp.sum(host_routine.voigt(x, sigma, 0.4) * (1 + x))

    mapped = sharded(lambda sigma, x: summed(loss(sigma, x)), specs=(P(), P("model")))
    args = jnp.float32(0.8), jnp.linspace(-3, 3, 32)
    np.testing.assert_allclose(jax.jit(jax.grad(mapped))(*args), jax.grad(loss)(*args), rtol=1e-4)


@row("E2")
@slow
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
