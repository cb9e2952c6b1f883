"""The kernels of `examples/kernels` compared with plain JAX in double precision, under every transformation."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import subjaxprs
from jax.sharding import AxisType

from tests.support.kernel_examples import (
    ATTENTION,
    CAUSAL,
    CROSS_ENTROPY,
    KERNELS,
    LAYER_NORM,
    Kernel,
    expected,
    small,
    value_and_gradients,
)
from tests.support.marks import EXPERIMENTAL, cells, row, slow

CLOSED = pytest.mark.xfail(EXPERIMENTAL, reason="JAX_CUSTOM_VJP3 closes custom derivatives in jaxprs", strict=False)

# (rows, columns, width); blocks have 16 of each.
SIZES = [(1, 1, 1), (15, 17, 3), (16, 32, 16), (33, 31, 5), (50, 20, 17)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}
QUICKLY_BATCHED = [(LAYER_NORM, (2, 1, None)), (CROSS_ENTROPY, (1, None, 0))]


@pytest.fixture(
    params=[LAYER_NORM, CROSS_ENTROPY, *(pytest.param(k, marks=slow) for k in (ATTENTION, CAUSAL))], ids=str
)
def kernel(request) -> Kernel:
    return request.param


@pytest.fixture
def module(kernel):
    return small(kernel.module)


def check(function, plain, args, dtype="float32", transform=jax.jit):
    got = transform(lambda *args: value_and_gradients(function, args))(*args)
    for ours, exact in zip(got, expected(plain, args), strict=True):
        largest = max(np.abs(exact).max(), 1e-2)  # a gradient of zero is a difference of numbers of about 1
        assert ours.shape == exact.shape
        np.testing.assert_allclose(ours.astype(np.float32), exact, atol=TOLERANCE[dtype] * largest, rtol=0)
    return got


@row("E5")
@cells("sizes, dtype", [((33, 31, 5), "float32"), ((50, 20, 17), "bfloat16")], SIZES, TOLERANCE, ids=str)
def test_values_and_gradients_are_those_of_plain_JAX(kernel, module, sizes, dtype):
    if dtype == "bfloat16" and sizes == (1, 1, 1) and kernel is LAYER_NORM:
        pytest.skip("x - mean(x) is rounding errors alone")
    args = kernel.args(*sizes, jnp.dtype(dtype))
    value, *_ = check(kernel.of(module), kernel.plain(module), args, dtype)
    assert value.dtype == ("float32" if kernel is CROSS_ENTROPY else dtype)


@row("E3", "E5")
@pytest.mark.parametrize(
    "kernel, axes",
    [pytest.param(k, axes, marks=() if (k, axes) in QUICKLY_BATCHED else slow) for k in KERNELS for axes in k.mapped],
    ids=str,
)
def test_a_batch_by_any_axis_and_next_to_unbatched_arguments(kernel, module, axes):
    many = [kernel.args(17, 19, 5, seed=seed) for seed in range(3)]
    by_argument = zip(*many, strict=True)
    args = [xs[0] if axis is None else np.stack(xs, axis) for axis, xs in zip(axes, by_argument, strict=True)]
    check(jax.vmap(kernel.of(module), axes), jax.vmap(kernel.plain(module), axes), args)


@row("E3")
def test_a_batching_rule_by_axes_other_than_the_first():
    """Tests the Function itself: the functions around it move the batch to the first axis first."""
    module = small("layer_norm")
    x, weight, bias = (np.stack([a, a + 1]) for a in LAYER_NORM.args(17, 19, 5))
    rows, weights = np.moveaxis(x[:, None], 0, 2), np.moveaxis(weight[:, None, None], 0, 3)
    y, mean, rstd = jax.vmap(module.LayerNorm.apply, (2, 3, None, None))(rows, weights, bias[:1, None], 1e-6)
    assert (y.shape, mean.shape, rstd.shape) == ((2, 1, 17, 19), (2, 1, 17, 1), (2, 1, 17, 1))
    np.testing.assert_allclose(y[:, 0], jax.vmap(module.plain, (0, 0, None))(x, weight, bias[0]), atol=1e-5)


@row("E3", "E5")
@cells("kernel", [CROSS_ENTROPY], KERNELS, ids=str)
def test_gradients_of_each_example_and_batches_of_batches(kernel, module):
    """A weight that all examples share has a gradient for each."""
    args = kernel.args(17, 19, 5)
    batches = np.stack([np.stack([args[0], args[0][::-1]], 1), np.stack([args[0] + 1, args[0] / 2], 1)], 1)
    axes = (1, *[None] * (len(args) - 1))

    def gradients(function):
        def of(*args):
            return value_and_gradients(function, args)

        return jax.jit(jax.vmap(jax.vmap(of, axes), axes))

    got = gradients(kernel.of(module))(batches, *args[1:])
    wanted = gradients(kernel.plain(module))(batches, *args[1:])
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape[:2] == (2, 2)
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), rtol=0)


def pallas_grids(jaxpr) -> list[tuple[int, ...]]:
    found = [e.params["grid_mapping"].grid for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    return found + [grid for inner in subjaxprs(jaxpr) for grid in pallas_grids(inner)]


@row("E3")
@CLOSED
def test_a_batch_becomes_an_axis_of_the_grid(kernel, module):
    """Each kernel is still one call with the batching rule, without a loop around it."""
    args = kernel.args(17, 19, 5)

    def step(*args):
        return value_and_gradients(kernel.of(module), args)

    alone = pallas_grids(jax.make_jaxpr(step)(*args).jaxpr)
    batch = np.stack([args[0]] * 3)
    batched = pallas_grids(jax.make_jaxpr(jax.vmap(step, (0, *[None] * (len(args) - 1))))(batch, *args[1:]).jaxpr)
    assert batched == [(3 * grid[0], *grid[1:]) for grid in alone]
    assert len(alone) == (2 if kernel is LAYER_NORM else 3)


@row("E2", "E5")
@cells("kernel", [CROSS_ENTROPY], KERNELS, ids=str)
def test_eight_devices(kernel, module):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    in_specs, out_specs = kernel.split
    # JAX cannot interpret a Pallas kernel under check_vma=True.
    sharded = jax.shard_map(kernel.of(module), mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    check(sharded, kernel.plain(module), kernel.args(24, 19, 5))


def twice(function):
    """Two uses, whose gradients are added, one of them in the body of a scan."""

    def run(*args):
        def body(carry, scale):
            return carry + function(args[0] * scale.astype(args[0].dtype), *args[1:]), None

        return jax.lax.scan(body, function(*args), jnp.array([0.5, 2.0], args[0].dtype))[0]

    return run


@row("E5")
@slow
@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint, twice], ids=["eager", "checkpoint", "scan"])
def test_other_transformations(kernel, module, transform):
    around = jax.jit if transform is twice else lambda f: f
    args = kernel.args(17, 19, 5)
    check(transform(kernel.of(module)), transform(kernel.plain(module)), args, transform=around)


@row("B7")
@CLOSED
@pytest.mark.parametrize(
    ("kernel", "argnums"), [(CROSS_ENTROPY, 0), (CROSS_ENTROPY, 1), (ATTENTION, 0), (CAUSAL, 2)], ids=str
)
def test_a_kernel_whose_gradient_is_not_used_does_not_run(kernel, argnums):
    function = kernel.of(small(kernel.module))
    program = jax.make_jaxpr(jax.grad(lambda *args: function(*args).sum(), argnums))(*kernel.args(17, 19, 5))
    assert len(pallas_grids(program.jaxpr)) == 2


@row("C14")
def test_second_derivatives_raise(kernel, module):
    x, *others = map(jnp.asarray, kernel.args(3, 4, 5))

    def gradient(x):
        return jax.grad(lambda x: kernel.of(module)(x, *others).sum())(x).sum()

    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        jax.eval_shape(jax.grad(gradient), x)


@row("E5")
def test_what_a_kernel_saves(kernel, module):
    """The inputs that it needs, its output where it needs it, and one or two numbers for each row."""
    args = kernel.args(40, 50, 6)
    pullback = jax.eval_shape(lambda *args: jax.vjp(kernel.of(module), *args)[1], *args)
    saved_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))
    input_bytes = sum(x.nbytes for x in args)
    own = {"layer_norm": 2 * 4 * 40 - args[-1].nbytes, "cross_entropy": 4 * 40, "flash_attention": 8 * 40 * (8 + 1) * 4}
    assert saved_bytes == input_bytes + own[kernel.module]


@row("E5")
def test_labels_that_are_ignored_and_labels_that_are_wrong():
    module = small("cross_entropy")
    hidden, weight, labels = CROSS_ENTROPY.args(20, 19, 5)
    labels[:3] = 19, -1, 18

    def run(hidden):
        return module.cross_entropy(hidden, weight, labels)

    loss, gradient = run(hidden), jax.grad(lambda hidden: run(hidden).sum())(hidden)
    np.testing.assert_array_equal(np.isnan(loss), np.isin(np.arange(20), [0, 1]))
    np.testing.assert_array_equal(np.isnan(gradient).all(1), np.isin(np.arange(20), [0, 1]))
    assert not loss[6] and not gradient[6].any()
    other = module.cross_entropy(hidden, weight, np.where(labels == -100, 7, labels), ignored=7)
    assert not other[labels == 7].any() and not other[labels == -100].any()


@row("E5")
def test_arguments_that_do_not_go_together_raise():
    x = jnp.ones((2, 6, 5))
    norm, entropy, attention = (small(name) for name in ("layer_norm", "cross_entropy", "flash_attention"))
    with pytest.raises(ValueError, match="expected a weight and a bias"):
        norm.layer_norm(x, jnp.ones(6), jnp.ones(5))
    with pytest.raises(ValueError, match="do not go together"):
        entropy.cross_entropy(x[0], jnp.ones((3, 4)), jnp.zeros(6, int))
    with pytest.raises(ValueError, match="do not go together"):
        entropy.cross_entropy(x[0], jnp.ones((3, 5)), jnp.zeros(5, int))
    with pytest.raises(ValueError, match="do not go together"):
        attention.flash_attention(x, x, x[:, :3])
    with pytest.raises(ValueError, match="batches of 4"):
        attention.flash_attention(jnp.ones((4, 6, 5)), x, x)


def device(platform):
    """JAX 0.12 asks which GPU it lowers for."""
    if platform != "cuda" or not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    try:
        gpu = jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu")
    except TypeError:  # in 0.10 nothing is asked
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu))


TARGETS = {"gpu": ("cuda", "triton"), "tpu": ("tpu", "tpu_custom_call")}  # the platform, and the call in the text


@row("E5")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # 0.12.0
@cells(
    "platform, sizes, dtype",
    [("gpu", (50, 20, 17), "float32"), ("tpu", (130, 515, 128), "bfloat16")],
    TARGETS,
    [(1, 1, 1), (50, 20, 17), (130, 515, 128)],
    TOLERANCE,
    ids=str,
)
def test_kernels_lower_for_accelerators(kernel, module, monkeypatch, platform, sizes, dtype):
    """Lowering checks that sizes of blocks are right for the accelerator; only the accelerator can run them."""
    target, name = TARGETS[platform]
    monkeypatch.setattr(module.blocks, "platform", lambda: platform)
    args = kernel.args(*sizes, jnp.dtype(dtype))

    def step(*args):
        return value_and_gradients(kernel.of(module), args)

    batched = jax.vmap(step, (0, *[None] * (len(args) - 1)))
    with device(target):
        text = jax.jit(batched).trace(np.stack([args[0]] * 3), *args[1:]).lower(lowering_platforms=(target,)).as_text()
    assert text.count(name) >= (2 if kernel is LAYER_NORM else 3)


@row("E2")
def test_kernels_are_traced_under_check_vma(kernel, module, monkeypatch):
    """Kernels are traced only: JAX cannot interpret them without an accelerator."""
    monkeypatch.setattr(module.blocks, "platform", lambda: "tpu")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    in_specs, _ = kernel.split
    args = kernel.args(24, 19, 5)
    floats = [i for i, x in enumerate(args) if x.dtype == np.float32]

    def local(*args):
        return jax.grad(lambda *args: kernel.of(module)(*args).sum(), floats)(*args)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=tuple(in_specs[i] for i in floats))
    assert [x.shape for x in jax.eval_shape(sharded, *args)] == [args[i].shape for i in floats]
