"""Row H2: operations that a CPU computes in another way than a GPU or TPU, next to torch's."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import cells, row

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("double_precision"), row("H2")]

F = torch.nn.functional

# The torch function, and the shapes of its arguments.
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]

CONVOLUTIONS: dict[str, Case] = {
    "wide padding": (lambda x, w: F.conv1d(x, w, padding=4), ((2, 3, 7), (4, 3, 5))),
    "patches": (lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=(1, 0)), ((2, 3, 7, 8), (4, 3, 2, 3))),
    "groups": (lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=1, groups=2), ((2, 4, 7, 6), (6, 2, 3, 2))),
    "depthwise": (lambda x, w: F.conv2d(x, w, dilation=(1, 2), padding=2, groups=3), ((2, 3, 7, 6), (6, 1, 3, 2))),
    "one element": (lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=(0, 1)), ((2, 3, 5, 4), (4, 3, 1, 1))),
    "one element, many channels": (lambda x, w: F.conv1d(x, w), ((2, 9, 2), (8, 9, 1))),
    "many channels in groups": (lambda x, w: F.conv1d(x, w, padding=1, groups=2), ((2, 14, 5), (6, 7, 3))),
    "depthwise, three axes": (
        lambda x, w: F.conv3d(x, w, stride=(1, 2, 1), dilation=(1, 1, 2), padding=(0, 1, 2), groups=2),
        ((2, 2, 3, 4, 5), (4, 1, 2, 3, 2)),
    ),
    "strided depthwise": (lambda x, w: F.conv2d(x, w, stride=(3, 2), groups=3), ((2, 3, 8, 7), (3, 1, 2, 3))),
    "three axes": (
        lambda x, w: F.conv3d(x, w, stride=(1, 2, 3), padding=(1, 0, 2)),
        ((2, 3, 4, 6, 5), (4, 3, 3, 2, 4)),
    ),
    "grouped, three axes": (
        lambda x, w: F.conv3d(x, w, dilation=(2, 1, 1), padding=1, groups=2),
        ((1, 4, 5, 4, 3), (2, 2, 2, 3, 1)),
    ),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(3, 2), padding=(1, 2), output_padding=(2, 1), dilation=(1, 2)),
        ((2, 3, 4, 5), (3, 4, 2, 3)),
    ),
    "transposed, unread inputs": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=5, output_padding=1),
        ((2, 3, 9), (3, 2, 3)),
    ),
    "transposed, gaps": (lambda x, w: F.conv_transpose1d(x, w, stride=4), ((2, 3, 5), (3, 2, 3))),
    "transposed, groups": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=(0, 1), groups=2),
        ((2, 4, 3, 5), (4, 3, 3, 4)),
    ),
    "transposed, depthwise": (
        lambda x, w: F.conv_transpose2d(
            x, w, stride=(2, 1), padding=(1, 0), output_padding=(2, 1), dilation=(3, 2), groups=3
        ),
        ((2, 3, 4, 3), (3, 2, 3, 2)),
    ),
    "transposed, three axes": (
        lambda x, w: F.conv_transpose3d(x, w, stride=(2, 1, 3), padding=(1, 0, 1)),
        ((1, 2, 3, 4, 3), (2, 3, 3, 2, 4)),
    ),
}
POOLINGS: dict[str, Case] = {
    **{
        f"avg_pool2d, stride {stride}, ceil_mode {ceil}, count_include_pad {count}": (
            lambda x, stride=stride, ceil=ceil, count=count: F.avg_pool2d(
                x, (3, 2), stride, (1, 0), ceil_mode=ceil, count_include_pad=count
            ),
            ((2, 3, 8, 7),),
        )
        for stride, ceil, count in itertools.product([(3, 2), (2, 2), (1, 3)], [False, True], [False, True])
    },
    "adaptive, blocks": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), ((2, 3, 6, 8),)),
    "adaptive, overlaps": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), ((2, 3, 7, 4),)),
    "adaptive, many windows": (lambda x: F.adaptive_avg_pool1d(x, 19), ((2, 3, 21),)),
    "blocks of 17": (lambda x: F.avg_pool1d(x, 17), ((2, 3, 40),)),
    "overlaps of three": (lambda x: F.avg_pool1d(x, 5, 2, 2), ((2, 3, 12),)),
    "divisor_override": (lambda x: F.avg_pool3d(x, 2, (1, 2, 2), divisor_override=3), ((2, 3, 4, 5, 3),)),
}
OTHERS: dict[str, Case] = {
    "windows": (lambda x: x.unfold(1, 5, 2), ((2, 10, 3),)),
    "windows with gaps": (lambda x: x.unfold(-1, 2, 3), ((3, 2, 9),)),
    "windows of one element": (lambda x: x.unfold(1, 1, 1), ((4, 3),)),
    "bicubic": (lambda x: F.interpolate(x, (7, 13), mode="bicubic"), ((2, 3, 5, 6),)),
    "many readers": (lambda x: F.interpolate(x, 40, mode="linear"), ((2, 3, 2),)),
    "repeated": (lambda x: F.interpolate(x, scale_factor=3), ((2, 3, 4),)),
    "smaller": (lambda x: F.interpolate(x, (3, 4), mode="nearest"), ((2, 3, 5, 11),)),
    "reflection": (lambda x: F.pad(x, (2, 1, -1, 3), mode="reflect"), ((2, 3, 5, 4),)),
    "only the left edge": (lambda x: F.pad(x, (4, -5), mode="replicate"), ((2, 3, 3),)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([2, 0, 2])), ((2, 3, 4),)),
    "index": (lambda x: x[:, torch.tensor([2, 0, -1])], ((2, 3, 4),)),
    "unfold": (lambda x: F.unfold(x, (2, 3), (1, 2), (1, 0), (2, 1)), ((2, 3, 5, 7),)),
    "unfold, blocks": (lambda x: F.unfold(x, (2, 3), stride=(2, 3)), ((2, 3, 5, 7),)),
    "max": (lambda x: x.max(1)[0], ((2, 5, 3),)),
    "cumsum": (lambda x: x.cumsum(1), ((2, 5, 3),)),
    "cumprod": (lambda x: x.cumprod(-1), ((2, 5, 3),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), ((2, 5, 3),)),
    "cummax": (lambda x: x.cummax(1)[0], ((2, 5, 3),)),
    "cummin": (lambda x: x.cummin(-1)[0], ((2, 3, 5),)),
    "topk": (lambda x: x.topk(2, 1, largest=False)[0], ((3, 17, 2),)),
}
CASES = CONVOLUTIONS | POOLINGS | OTHERS
# JAX shards no indices over Explicit axes, and the sum of normalized squares hardly has a gradient.
NOT_SHARDED: dict[str, Case] = {
    "adaptive maxima": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), ((2, 3, 7, 5),)),
    "gather": (lambda x: x.gather(2, torch.tensor([[[3, 0], [0, 1]]]).expand(len(x), 2, 2)), ((2, 3, 4),)),
    "fold": (lambda x: F.fold(x, (5, 7), (2, 3), padding=1, stride=2), ((2, 12, 12),)),
    "layer_norm": (lambda x: F.layer_norm(x, (3, 4)), ((5, 3, 4),)),
    "index_add": (lambda x: x.index_add(1, torch.tensor([2, 0, 2]), x.flip(1)), ((2, 3, 4),)),
    "index_copy": (lambda x: x.index_copy(2, torch.tensor([2, 0]), x[..., :2] ** 2), ((2, 3, 4),)),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([2, 0, 3]), x.sum()), ((2, 4, 3),)),
}

# Equal functions, where torch has no second derivative, or a wrong one.
REFERENCES: dict[str, Callable[..., Any]] = {
    "transposed": lambda x, w: F.pad(F.conv_transpose2d(x, w, stride=(3, 2), dilation=(1, 2)), (-2, -1, -1, 1)),
    "transposed, depthwise": lambda x, w: F.pad(
        F.conv_transpose2d(x, w, stride=(2, 1), dilation=(3, 2), groups=3), (0, 1, -1, 1)
    ),
    "transposed, unread inputs": lambda x, w: F.conv_transpose1d(x, w, stride=2)[..., 5:-4],
    "logcumsumexp": lambda x: x.exp().cumsum(1).log(),
}


def arrays_of(shapes: Any) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape) for shape in shapes]


# Of average pooling, each stride, and both ways of ceil_mode and of count_include_pad.
OF_AVERAGES = [
    f"avg_pool2d, stride {stride}, ceil_mode {ceil}, count_include_pad {count}"
    for stride, ceil, count in [((3, 2), False, False), ((2, 2), True, False), ((1, 3), False, True)]
]
EVERY = CASES | NOT_SHARDED


# One of each kind of implementation, which JAX can shard.
QUICK = [
    "patches", "groups", "depthwise", "one element", "many channels in groups", "three axes", "transposed",
    "transposed, groups", OF_AVERAGES[0], "adaptive, overlaps", "overlaps of three", "windows", "bicubic", "smaller",
    "reflection", "index_select", "index", "unfold", "cumsum", "logcumsumexp", "cummax", "topk",
]  # fmt: skip


@cells("name", dict.fromkeys([*OF_AVERAGES, *QUICK, *REFERENCES, *NOT_SHARDED]), EVERY)
def test_values_and_derivatives_of_both_orders_match_torch(name: str) -> None:
    function, shapes = EVERY[name]
    reference = REFERENCES.get(name, function)
    args, directions = arrays_of(shapes), arrays_of(shapes[::-1])[::-1]

    def total(*x: Any) -> Any:
        return (reference(*x) ** 3).sum()

    translated = jaxfn.from_torch(function)
    gradient = jax.grad(lambda x: (translated(*x) ** 3).sum())

    @jax.jit
    def compute(x: Any, t: Any) -> Any:
        batch = jax.tree.map(lambda a, b: jnp.stack([b, a], 1), x, t)
        mapped = jax.vmap(gradient, 1, 1)(batch)
        pushed = jax.jvp(lambda x: translated(*x), (x,), (t,))[1]
        second = jax.jvp(gradient, (x,), (t,))[1]
        reverse_twice = jax.grad(lambda x: sum(map(jnp.vdot, gradient(x), t)))(x)
        return translated(*x), pushed, gradient(x), [g[:, 1] for g in mapped], second, reverse_twice

    tensors = tuple(torch.tensor(x, requires_grad=True) for x in args)
    vectors = tuple(map(torch.tensor, directions))
    first = torch.autograd.grad(total(*tensors), tensors)
    second = torch.autograd.functional.hvp(total, tensors, vectors)[1]
    pushed = torch.autograd.functional.jvp(reference, tensors, vectors)[1]
    expected = reference(*tensors), pushed, first, first, second, second
    for got, wanted in zip(compute(args, directions), expected, strict=True):
        for g, w in zip(jax.tree.leaves(got), [wanted] if torch.is_tensor(wanted) else wanted, strict=True):
            np.testing.assert_allclose(g, w.detach(), rtol=1e-8, atol=1e-8)


ORDERS: dict[str, Case] = {
    "sort": (lambda x: x.sort(1, descending=True)[0], ((2, 17, 3),)),
    "first of many": (lambda x: x.topk(2, 1)[0], ((2, 17, 3),)),
    "median": (lambda x: x.median(1)[0], ((2, 5, 3),)),
    "extreme": (lambda x: x.max(1)[0], ((2, 5, 3),)),
}


# The ends of an axis do not matter here: of each stride of `avg_pool2d` one case.
SHARDED = [name for name in CASES | ORDERS if "ceil_mode True" not in name and "count_include_pad True" not in name]


@cells("name", [*QUICK, "sort", "median"], SHARDED)
def test_gradients_over_devices_are_those_of_one_device(name: str) -> None:
    """Inside `shard_map` over an Auto axis, and over an Explicit axis, where every value has a sharding."""
    function, shapes = (CASES | ORDERS)[name]
    x, *others = (a.astype(np.float32) for a in arrays_of(shapes))
    x = np.concatenate([x, 2 - x])
    translated = jaxfn.from_torch(function)

    def loss(args: Any) -> Any:
        return (translated(*args) ** 2).sum()

    specs = [jax.P("i"), *[jax.P()] * len(others)]

    def over_devices(axis_type: str) -> Any:
        mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType[axis_type],))
        args = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip([x, *others], specs, strict=True)]
        if axis_type == "Explicit":
            with jax.set_mesh(mesh):
                return jax.jit(jax.grad(loss))(args)
        mapped = jax.shard_map(
            lambda args: jax.lax.psum(loss(args), "i"), mesh=mesh, in_specs=(specs,), out_specs=jax.P()
        )
        return jax.jit(jax.grad(mapped))(args)

    on_one = jax.jit(jax.grad(loss))([x, *others])
    for axis_type in ("Auto", "Explicit"):
        for got, expected in zip(over_devices(axis_type), on_one, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3 * abs(expected).max(), err_msg=axis_type)


@pytest.mark.parametrize("name", ["one element", "groups", "depthwise", "three axes", "transposed"])
def test_an_empty_batch_has_empty_results_and_zero_gradients(name: str) -> None:
    function, (shape, weight) = CONVOLUTIONS[name]
    x, w = jnp.zeros((0, *shape[1:])), jnp.ones(weight)
    y, pull = jax.vjp(jaxfn.from_torch(function), x, w)
    assert y.shape == tuple(function(torch.zeros(x.shape), torch.zeros(w.shape)).shape)
    grad_x, grad_w = pull(y)
    assert grad_x.shape == x.shape
    assert not grad_w.any()


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_half_precision_is_rounded_once(name: str) -> None:
    function, shapes = CONVOLUTIONS[name]
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in arrays_of(shapes))
    got = jaxfn.from_torch(function)(x, w)
    exact = function(*(torch.tensor(np.asarray(a, np.float32)) for a in (x, w)))
    np.testing.assert_array_equal(got.astype(np.float32), exact.bfloat16().float())


@pytest.mark.parametrize("name", ["one element", "depthwise", "three axes", "transposed"])
def test_only_the_operands_are_saved(name: str) -> None:
    function, shapes = CONVOLUTIONS[name]
    pull = jax.vjp(jax.jit(jaxfn.from_torch(function)), *map(jnp.asarray, arrays_of(shapes)))[1]
    saved = [x.shape for x in jax.tree.leaves(pull) if x.ndim]
    assert sorted(saved) == sorted(shapes)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["one element", "groups", "depthwise", "three axes", "transposed"])
def test_a_gpu_and_a_tpu_run_one_convolution_and_two_in_reverse_mode(name: str, platform: str) -> None:
    function, shapes = CONVOLUTIONS[name]
    translated = jaxfn.from_torch(function)

    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: (translated(x, w) ** 2).sum(), (0, 1))(x, w)

    args = arrays_of(shapes)
    text = jax.jit(gradient).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    operations = re.findall(r"stablehlo\.(\w+)", text)
    assert operations.count("convolution") == 3
    assert not {"optimization_barrier", "concatenate", "slice"} & set(operations)


@pytest.mark.parametrize(
    "name", ["bicubic", "smaller", "adaptive, overlaps", "adaptive, many windows", "unfold", "index"]
)
def test_numbers_that_are_not_finite_reach_the_results_that_read_them(name: str) -> None:
    function, (shape,) = OTHERS.get(name) or POOLINGS[name]
    x = np.ones(shape)
    x.flat[3], x.flat[-2] = np.inf, np.nan
    y, pull = jax.vjp(jaxfn.from_torch(function), jnp.asarray(x))
    tensor = torch.tensor(x, requires_grad=True)
    expected = function(tensor)
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-12)
    gradient = np.ones(y.shape)
    gradient.flat[3] = np.nan
    (wanted,) = torch.autograd.grad(expected, tensor, torch.tensor(gradient))
    np.testing.assert_allclose(pull(jnp.asarray(gradient))[0], wanted, rtol=1e-12)


INF = float("inf")
# Numbers, and the derivatives of `logcumsumexp`. Torch's are NaN in the columns of the first -inf.
SUMS_OF_INFINITE: list[tuple[list[float], list[list[float]]]] = [
    ([-INF, 0, 0], [[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5]]),
    ([-INF, -INF, 0], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    ([0, -INF, 0], [[1, 0, 0], [1, 0, 0], [0.5, 0, 0.5]]),
    ([0, INF, -INF], [[1, 0, 0], [0, 1, 0], [0, 1, 0]]),
]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_sums_of_exponentials_of_infinite_numbers_have_derivatives(is_sharded: bool) -> None:
    """Checks both modes, and both the form for a CPU and the one for other platforms, which sharded arrays use."""
    x, expected = map(np.array, zip(*SUMS_OF_INFINITE, strict=True))
    sums = jaxfn.from_torch(lambda x: x.logcumsumexp(-1))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh) if is_sharded else contextlib.nullcontext():
        operand = jax.device_put(x, jax.NamedSharding(mesh, jax.P("i"))) if is_sharded else jnp.asarray(x)
        columns = [jax.jvp(sums, (operand,), (jnp.zeros_like(operand).at[:, i].set(1),))[1] for i in range(3)]
        rows = [jax.vjp(sums, operand)[1](jnp.zeros_like(operand).at[:, i].set(1))[0] for i in range(3)]
    np.testing.assert_allclose(np.stack(columns, -1), expected, rtol=1e-12)
    np.testing.assert_allclose(np.stack(rows, -2), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["logaddexp", "logaddexp2"])
def test_sums_of_two_exponentials_have_torchs_derivatives_at_infinity(name: str) -> None:
    pairs = np.array([*itertools.product([INF, -INF, 1.0], repeat=2)])
    function = getattr(torch, name)
    tensors = [torch.tensor(x, requires_grad=True) for x in pairs.T]
    expected = torch.autograd.grad(function(*tensors).sum(), tensors)
    got = jax.grad(lambda x, y: jaxfn.from_torch(function)(x, y).sum(), (0, 1))(*pairs.T)
    np.testing.assert_allclose(got, torch.stack(expected), rtol=1e-12)


VALUES = [0.0, -0.0, 1.0, float("nan"), -1.0, 1.0, float("-inf"), float("inf"), -float("nan"), 1.0, -1.0, 2.0] * 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int16"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_order_of_equal_and_missing_values_is_that_of_torch(dtype: str, descending: bool, is_batched: bool) -> None:
    x = np.asarray(VALUES if "float" in dtype else np.nan_to_num(VALUES, posinf=7, neginf=-7), dtype)
    tensor = torch.from_numpy(np.stack([x, x[::-1].copy()]))
    expected = tensor.sort(dim=1, descending=descending, stable=True)[1]
    extreme = torch.max if descending else torch.min

    def indices(x: Any) -> Any:
        # The first of equal elements is the one that stable sorting puts first.
        best = x.topk(2, -1, descending)[1]
        ranked = [x.kthvalue(k, -1)[1] for k in (1, 11, 24)]
        return x.sort(dim=-1, descending=descending, stable=True)[1], best, extreme(x, -1)[1], *ranked

    translated = jaxfn.from_torch(indices)
    run = jax.vmap(translated) if is_batched else translated
    order, best, first, *ranked = jax.jit(run)(tensor.numpy())
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(best, expected[:, :2])
    np.testing.assert_array_equal(first, extreme(tensor, 1)[1])
    ascending = tensor.sort(dim=1, stable=True)[1]
    np.testing.assert_array_equal(np.stack(ranked, 1), ascending[:, [0, 10, 23]])


@pytest.mark.parametrize("shape", [(3, 1, 2), (2, 6, 3), (2, 5, 1)])
@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_the_median_of_an_axis_and_of_all_elements_is_that_of_torch(name: str, shape: tuple[int, ...]) -> None:
    x = np.resize(np.float32(VALUES[:11]), shape)

    def medians(x: Any) -> Any:
        return [getattr(torch, name)(x, dim, keepdim=True)[0] for dim in (0, 1, -1)], getattr(torch, name)(x)

    got, expected = jax.jit(jaxfn.from_torch(medians))(x), medians(torch.tensor(x))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("arguments", [(5, -1, 1), (7,), (4, 2, 2), (3, 0, 2.5)])
@pytest.mark.parametrize("values", [[-1, -0.6, -0.6, 0.2, 1, 1.5, 2.5], [2, 2], []])
def test_histc_counts_as_torch_does_at_edges_and_out_of_range(values: list[float], arguments: tuple[Any, ...]) -> None:
    x = np.float32(values)
    got = jax.jit(jaxfn.from_torch(lambda x: torch.histc(x, *arguments)))(x)
    np.testing.assert_array_equal(got, torch.histc(torch.tensor(x), *arguments))


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_cumulative_results_of_every_dtype_and_of_short_axes_are_those_of_torch(name: str, dtype: str) -> None:
    if name == "logcumsumexp" and dtype in ("int32", "bool"):
        pytest.skip("torch has no logcumsumexp of integers")

    def both(x: Any) -> Any:
        return [getattr(torch, name)(y, dim) for y in (x, x[:, :1], x[:, :0]) for dim in (1, -1)]

    values = np.asarray(VALUES if "float" in dtype else np.nan_to_num(VALUES, posinf=7, neginf=-7), "float32")
    if name in ("cumprod", "logcumsumexp"):  # of which JAX and torch round differently
        values = np.nan_to_num(values, posinf=2, neginf=-2)
    x = torch.tensor(values.reshape(2, 4, 3)).to(getattr(torch, dtype))
    got = jax.tree.leaves(jax.jit(jaxfn.from_torch(both))(jnp.asarray(x.float().numpy(), dtype)))
    for g, w in zip(got, torch.utils._pytree.tree_leaves(both(x)), strict=True):
        result = torch.tensor(np.asarray(g, "float64"))
        torch.testing.assert_close(result, w.double(), equal_nan=True, rtol=1e-6, atol=1e-6)


def test_sums_are_accumulated_in_double_precision() -> None:
    x = np.float32([[1e8, 1, -1e8]])
    np.testing.assert_array_equal(jax.jit(jaxfn.from_torch(lambda x: x.cumsum(1)))(x), [[1e8, 1e8, 1]])


@pytest.mark.parametrize(
    "function",
    [lambda x: F.layer_norm(x, (13,)), lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")],
    ids=["layer norm", "bicubic"],
)
def test_sums_that_are_computed_by_products_do_not_have_their_precision(function: Callable[..., Any]) -> None:
    x = 100 + np.random.default_rng(0).standard_normal((2, 3, 5, 13), np.float32)
    with jax.default_matmul_precision("BF16_BF16_F32"):
        result = jax.jit(jaxfn.from_torch(function))(x)
    np.testing.assert_allclose(result, function(torch.tensor(x)), rtol=1e-4, atol=1e-4)
