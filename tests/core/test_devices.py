"""Functions on several devices: explicit axes, and collectives and callbacks inside shard_map (rows E2 and E2b)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.marks import lane_cases, row, sampled, slow


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


class ScaleAndSine(jaxfn.Function):
    """A product, and an output that depends on the weight alone; the rule is three times the derivative."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, jnp.sin(w)

    @staticmethod
    def backward(ctx, g, of_sine):
        x, w = ctx.saved_tensors
        return 3 * g * w, 3 * (g * x + of_sine * jnp.cos(w))


class ScaleAndSineInBothModes(ScaleAndSine):
    generate_jvp_rule = True


@row("E1c", "E2")
@pytest.mark.parametrize("function", [ScaleAndSine, ScaleAndSineInBothModes])
@pytest.mark.parametrize("spec", [P(), P("model")], ids=str)
@pytest.mark.parametrize("order", [1, 2])
@sampled
def test_vmap_over_an_explicit_axis_with_a_weight_that_all_elements_share(order, spec, function):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def plain(x, w):
        outputs = x * w, jnp.sin(w)
        return tuple(y + 2 * (y - jax.lax.stop_gradient(y)) for y in outputs)

    def gradient(f):
        def loss(x, w):
            product, sine = jax.vmap(f, (0, None))(x, w)
            return jnp.sum(jnp.sin(product)) + jnp.sum(jnp.cos(sine) * jnp.arange(8.0)[:, None])

        first = jax.grad(loss, (0, 1))
        if order == 1:
            return jax.jit(first)
        return jax.jit(jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in first(*args)), (0, 1)))

    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4) / 10, NamedSharding(mesh, P("data")))
        w = jax.device_put(np.array([0.7, 0.2, -0.4, 1.1], np.float32), NamedSharding(mesh, spec))
        for ours, theirs in zip(gradient(function.apply)(x, w), gradient(plain)(x, w), strict=True):
            assert ours.sharding.spec == theirs.sharding.spec
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


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
@pytest.mark.parametrize("wrap", [jax.jit, pytest.param(same, marks=slow)], ids=["jit", "eager"])
def test_second_derivatives_of_regions(wrap):
    copy, reduce = made(varying, summed), made(*REDUCE)
    ours, plain = twice(mlp(copy, reduce)), twice(mlp(same, same))  # a copy of what was reduced, too
    agree(wrap(second_order(sharded(loss_of(ours))))(X, W1, W2), jax.jit(second_order(loss_of(plain)))(X, W1, W2))


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
    """Copies of a weight that are kept alike, one on each device, with and without a cast of the gradient."""
    weights, x = np.ones((8, 4), np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    for alike in (made(same, lambda g: varying(summed(g))), made(*COPY)):
        split = (P("model"),) * 2
        gradient = sharded(jax.grad(lambda w, x: jnp.sum(alike(w) * x)), specs=split, out_specs=P("model"))
        np.testing.assert_allclose(jax.jit(gradient)(weights, x), np.tile(x.sum(0), (8, 1)), rtol=1e-5)


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
def test_a_clipped_gradient_inside_shard_map():
    """A collective in backward alone, whose result is scaled by what each device has: types say that it is right."""

    def clip(g):
        return g / jnp.sqrt(summed(jnp.sum(g * g)))

    x = rng.normal(size=(8, 4)).astype(np.float32)
    gradient = sharded(jax.grad(lambda x: jnp.sum(made(same, clip)(x) ** 2)), specs=P("model"), out_specs=P("model"))
    np.testing.assert_allclose(jax.jit(gradient)(x), 2 * x / np.sqrt((4 * x * x).sum()), rtol=1e-5)


def loss_of_region(region, place=same):
    """The loss of a region alone, whose input all devices have alike; its output may vary."""

    def loss(x):
        total = jnp.sum(jnp.sin(region(place(x))))
        return summed(total) if jax.typeof(total).manual_axis_type.varying else total

    return sharded(loss, specs=P())


# Backwards of an identity that count what the devices have in common more than once, and how often.
SUMS = {
    "ring": (around_a_ring, 64),
    "jit": (jax.jit(summed), 8),
    "scan": (lambda g: jax.lax.scan(lambda c, _: (c, summed(c)), g, length=2)[1].sum(0), 16),
    "while": (lambda g: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, summed(c[1])), (0, g))[1], 64),
    "cond": (lambda g: jax.lax.cond(g.sum() > 0, summed, lambda g: 2 * g, g), 8),
    "checkpoint": (jax.checkpoint(summed), 8),
    "a Function": (made(*REDUCE), 8),
    "parts": (
        lambda g: spread(jax.lax.psum_scatter(varying(g), "model", scatter_dimension=g.ndim - 1, tiled=True), g),
        8,
    ),
}
EIGHT_TIMES = "a constant factor: 8 times what it should be (mesh axis 'model' has 8 devices)"
SMALL = X[:1], W1, W2
WIDE = np.tile(X[:1], (1, 4))
# A loss, its arguments, and by which factor the gradient of the first one is too large; `None`: by no constant.
WRONG = {
    "copy": lambda: (sharded(loss_of(mlp(made(*COPY), made(*REDUCE)))), SMALL, 8),
    "copy, twice": lambda: (sharded(loss_of(twice(mlp(made(*COPY), made(*REDUCE))))), SMALL, 64),
    "copy of what varies": lambda: (loss_of_region(made(*COPY), varying), (WIDE,), 8),
    "scatter": lambda: (loss_of_region(made(*SCATTER)), (WIDE,), 8),
    "sum of devices' own": lambda: (
        sharded(lambda w: summed(jnp.sum(jnp.sin(made(*COPY)(w)))), specs=P("model")),
        (np.arange(16.0, dtype=np.float32).reshape(8, 2) / 5,),
        None,
    ),
    **{
        f"copy, {around}, {rules}": lambda around=around, rules=rules: (
            sharded(loss_of(AROUND[around](mlp(made(*COPY, **RULES[rules]), made(*REDUCE))))),
            SMALL,
            64 if around == "scan" else 8,
        )
        for around in AROUND
        for rules in RULES
    },
    **{
        f"sum, {where}": lambda backward=backward, factor=factor: (
            loss_of_region(made(same, backward)),
            (WIDE[:, :8],),
            factor,
        )
        for where, (backward, factor) in SUMS.items()
    },
}


def gradchecked(f, args, **options):
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # float32 is checked in double precision
        return jaxfn.gradcheck(f, args, raise_exception=False, return_report=True, **options)


@row("E2b", "G4")
@pytest.mark.parametrize(
    "wrong", lane_cases(WRONG, ["copy", "copy of what varies", "scatter", "sum, ring", "sum, scan"])
)
def test_gradcheck_finds_what_is_counted_more_than_once_and_says_how_often(wrong):
    f, args, factor = WRONG[wrong]()
    report = gradchecked(f, args)
    assert not report
    kind = report.mismatches[0].kind
    if factor:
        assert kind == EIGHT_TIMES.replace(": 8", f": {factor}")


RIGHT = {
    "copy": lambda: (sharded(loss_of(mlp(made(varying, summed), made(*REDUCE)))), SMALL),
    "copy, twice": lambda: (sharded(loss_of(twice(mlp(made(varying, summed), made(*REDUCE))))), SMALL),
    "mean": lambda: (loss_of_region(made(same, lambda g: jax.lax.pmean(g, "model"))), (WIDE,)),
    "sum of parts": lambda: (loss_of_region(made(same, lambda g: summed(g / jax.lax.axis_size("model")))), (WIDE,)),
    "shared work": lambda: (loss_of_region(made(same, lambda g: summed(spread(part(g), g)))), (WIDE,)),
    "cast": lambda: (sharded(loss_of(mlp(made(varying, summed), made(summed, varying)))), SMALL),
    "scatter": lambda: (loss_of_region(made(lambda x: part(varying(x)), lambda g: gathered_into(g))), (WIDE,)),
}


def gathered_into(g):
    """The gradient of a part of an input that all devices have alike: jaxfn adds the devices' parts up."""
    place = jax.lax.axis_index("model") * g.shape[-1]
    whole = varying(jnp.zeros((*g.shape[:-1], g.shape[-1] * jax.lax.axis_size("model")), g.dtype))
    return jax.lax.dynamic_update_slice_in_dim(whole, g, place, axis=-1)


@row("E2b")
@pytest.mark.parametrize("right", lane_cases(RIGHT, ["copy", "mean", "sum of parts", "scatter"]))
def test_gradcheck_passes_collectives_that_count_once(right):
    assert gradchecked(*RIGHT[right]())


@row("E2b")
@pytest.mark.parametrize("wrong", ["copy", "sum, scan", "sum, cond"])
def test_a_call_gives_the_number_of_a_hand_written_custom_vjp(wrong):
    """No call is refused, also where it counts too often."""
    backward = summed if wrong == "copy" else SUMS[wrong.removeprefix("sum, ")][0]
    by_hand = jax.custom_vjp(same)
    by_hand.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    got, expected = (jax.jit(jax.grad(loss_of_region(f)))(WIDE) for f in (made(same, backward), by_hand))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def on_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def loss_on_devices(sine):
    """A loss by a weight that all devices have and by each device's data."""

    def loss(w, x):
        return summed(jnp.sum(sine(w * x)))

    return sharded(loss, specs=(P(), P("model")))


@row("E2b", "E5")
@pytest.mark.parametrize("wrap", [jax.jit, same], ids=["jit", "eager"])
def test_gradcheck_finds_a_callback_whose_result_is_not_cast(wrap):
    """JAX says that it is the same on all devices, and sums its gradient over them."""

    def sine(cast):
        return jaxfn.autograd_function(
            lambda ctx, x: ctx.save_for_backward(x) or cast(on_host(x)),
            lambda ctx, g: g * jnp.cos(ctx.saved_tensors[0]),
        )

    args = jnp.float32(1.3), np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    plain = jax.grad(lambda w, x: jnp.sum(jnp.sin(w * x)), (0, 1))(*args)
    agree(wrap(jax.grad(loss_on_devices(sine(varying)), (0, 1)))(*args), plain)
    options = {"dtype": np.float32, "surrogate": loss_on_devices(jnp.sin)}
    assert gradchecked(loss_on_devices(sine(varying)), args, **options)
    report = gradchecked(loss_on_devices(sine(same)), args, **options)
    assert [mismatch.kind for mismatch in report.mismatches] == [EIGHT_TIMES] * 2


@row("E2b", "E5")
def test_the_example_of_lapack_with_right_sides_that_all_devices_have(monkeypatch):
    """Each device has matrices of its own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "kernels"))
    monkeypatch.delitem(sys.modules, "lapack", raising=False)
    import lapack

    def loss(solve):
        return lambda diagonals, b: jnp.sum(jnp.sin(jax.vmap(solve, (0, 0, 0, None))(*diagonals, b)) * (1 + b))

    lower, upper = (rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2))
    diagonals, b = (lower, 4 + lower**2, upper), rng.normal(size=(4, 2)).astype(np.float32)

    def gradients(f):
        return jax.jit(jax.grad(f, (0, 1)))(diagonals, b)

    ours = loss(lapack.TridiagonalSolve.apply)
    agree(gradients(sharded(lambda *args: summed(ours(*args)), specs=(P("model"), P()))), gradients(loss(lapack.plain)))


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
