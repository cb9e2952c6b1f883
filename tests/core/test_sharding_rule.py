"""Functions that partition themselves: numbers, and the collectives of a hand-written `shard_map` (section M)."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.derivatives import derivative
from tests.support.marks import cells, row
from tests.support.sharded_kernels import KERNELS

MESHES = {"data": ((8,), ("data",)), "model": ((8,), ("model",)), "both": ((4, 2), ("data", "model"))}


def mesh_of(name, kind):
    shape, axes = MESHES[name]
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def at_order(f, order, indices):
    """The function, its gradient, and the gradient of a function of its gradient."""
    if order == 0:
        return f
    inner = at_order(f, order - 1, indices)
    return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(inner(*args))), indices)


_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(", re.MULTILINE
)


def collectives(f, args):
    """Returns for each kind of collective in a compiled program the number of arrays, and their bytes."""
    found = {}
    for types, kind in _COLLECTIVE.findall(jax.jit(f).lower(*args).compile().as_text()):
        sizes = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types)
        moved = sum(int(bits) // 8 * math.prod(map(int, filter(None, shape.split(",")))) for bits, shape in sizes)
        count, total = found.get(kind, (0, 0))
        found[kind] = count + len(sizes), total + moved
    return found


@row("M1", "M2", "M3")
@cells(
    "name, where, kind",
    [
        ("MatMul", "both", "Explicit"),
        ("MatMul", "model", "Auto"),
        ("CrossEntropy", "both", "Auto"),
        ("CrossEntropy", "model", "Explicit"),
        ("RMSNorm", "data", "Auto"),
        ("Attention", "both", "Auto"),
    ],
    KERNELS,
    MESHES,
    ["Explicit", "Auto"],
)
def test_numbers_and_collectives_are_those_of_a_hand_written_shard_map(name, where, kind):
    kernel = KERNELS[name]
    split, args = kernel.splits[where], kernel.arguments()
    floating = tuple(i for i in range(len(args)) if i not in kernel.integers)
    mesh = mesh_of(where, AxisType[kind])
    with jax.set_mesh(mesh):
        specs = kernel.specs(split, kernel.inputs)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        for order in range(3):
            ours = at_order(kernel.function.apply, order, floating)
            got = jax.tree.leaves(jax.jit(ours)(*placed))
            expected = jax.tree.leaves(jax.jit(at_order(kernel.plain, order, floating))(*args))
            for x, y in zip(got, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(np.abs(y).max() + 1))
            for x, group in zip(
                got, kernel.outputs if order == 0 else [kernel.inputs[i] for i in floating], strict=True
            ):
                named = (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]
                assert named == tuple(split.get(f) for f in group.split())  # nothing is replicated that may be split
            hand_written = at_order(kernel.hand_written(mesh, split), order, floating)
            mine, theirs = collectives(ours, placed), collectives(hand_written, placed)
            # Of these JAX's derivative of the hand-written gradient communicates one array more.
            is_less = name in ("MatMul", "Distance") and where != "data" and order == 2
            assert mine.keys() == theirs.keys()
            assert all(mine[k] < theirs[k] if is_less else mine[k] == theirs[k] for k in mine), (order, mine, theirs)


def grid(kind="Explicit"):
    return mesh_of("both", AxisType[kind])


def assert_like_plain(f, plain, args, specs, kind, jit=True):
    mesh = grid(kind)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        got = (jax.jit(f) if jit else f)(*placed)
    expected = jax.tree.leaves(jax.jit(plain)(*args))
    for x, y in zip(jax.tree.leaves(got), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(np.abs(y).max(initial=1)))


def arrays(*shapes):
    generator = np.random.default_rng(1)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


MatMul = KERNELS["MatMul"].function


def inner_product(ctx, x, w):
    ctx.save_for_backward(x, w)
    return jax.lax.psum(x @ w, ctx.mesh_axes("d"))


def inner_product_jvp(ctx, tangent_x, tangent_w):
    x, w = ctx.saved_tensors
    return jax.lax.psum(tangent_x @ w + x @ tangent_w, ctx.mesh_axes("d"))


# Without a backward: reverse mode transposes `jvp`. Its inner dimension is summed by the code itself.
MatMulByJvp = jaxfn.function(
    inner_product,
    jvp=inner_product_jvp,
    sharding_rule=jaxfn.ShardingRule("b d, d h -> b h", manual_factors=("d",)),
    name="MatMulByJvp",
)


class MatMulInBothModes(MatMul):
    @staticmethod
    def jvp(ctx, tangent_x, tangent_w):
        x, w = ctx.saved_tensors
        return tangent_x @ w + x @ tangent_w


class MatMulTransposed(MatMul):
    generate_jvp_rule = True


@row("M2")
@cells(
    "function, way, kind",
    [
        (MatMulByJvp, "grad of grad", "Explicit"),
        (MatMulByJvp, "jvp of grad", "Auto"),
        (MatMulInBothModes, "grad of jvp", "Auto"),
        (MatMulTransposed, "jvp", "Explicit"),
    ],
    [MatMulByJvp, MatMulInBothModes, MatMulTransposed],
    ["jvp", "grad of grad", "jvp of grad", "grad of jvp"],
    ["Explicit", "Auto"],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_forward_mode_and_mixed_orders(function, way, kind):
    ways = (derivative(way, f) for f in (function.apply, jnp.matmul))
    assert_like_plain(*ways, arrays((8, 6), (6, 4)), [P("data", "model"), P("model")], kind)


@row("M2")
@cells(
    "axis, spec, way, kind, jit",
    [
        (0, P(None, "data", "model"), "vmap", "Explicit", True),
        (1, P("data", None, "model"), "grad of vmap", "Auto", True),
        (0, P("data", None, "model"), "grad of vmap", "Explicit", True),
        (0, P("data", None, "model"), "vmap of grad", "Auto", False),
    ],
    [0, 1],
    [P(None, "data", "model"), P("data", None, "model")],
    ["vmap", "vmap of grad", "grad of vmap"],
    ["Explicit", "Auto"],
    [True, False],
)
def test_a_batch_is_one_more_factor(axis, spec, way, kind, jit):
    def mapped(f):
        inner = at_order(f, 1, (0, 1)) if way == "vmap of grad" else f
        batched = jax.vmap(inner, (axis, None))
        return at_order(batched, 2, (0, 1)) if way == "grad of vmap" else batched

    args = arrays((8, 4, 6), (6, 4))
    assert_like_plain(mapped(MatMul.apply), mapped(jnp.matmul), args, [spec, P("model")], kind, jit)


@jaxfn.function(sharding_rule=jaxfn.ShardingRule("... d, , -> ... d, ...", reduction_factors=("d",)))
def two_outputs(ctx, x, scale, power):
    """A scalar input, an ellipsis, a static argument, two outputs; it saves arrays of several kinds."""
    ctx.rows, ctx.power = x.shape[0], power
    inner = jnp.tanh(x * scale)
    ctx.save_for_backward(x, scale, inner)
    return inner**power, jnp.sum(inner, -1)


@two_outputs.backward
def _(ctx, grad, grad_sum):
    x, scale, inner = ctx.saved_tensors
    assert x.shape[0] == ctx.rows  # what forward found is that of the part
    outer = (grad * ctx.power * inner ** (ctx.power - 1) + grad_sum[..., None]) * (1 - inner**2)
    return outer * scale, jnp.sum(outer * x), None


@row("M1", "M2")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_scalar_input_and_two_outputs(kind, order):
    def plain(x, scale):
        inner = jnp.tanh(x * scale)
        return inner**3, jnp.sum(inner, -1)

    ways = [at_order(f, order, (0, 1)) for f in (lambda x, scale: two_outputs(x, scale, 3), plain)]
    args = [*arrays((8, 3, 4)), np.float32(0.7)]
    assert_like_plain(*ways, args, [P("data", None, "model"), P()], kind)


# Its split input is gathered; its gradient is split again.
cumulative_sum = jaxfn.function(
    lambda ctx, x: ctx.save_for_backward(x) or jnp.cumsum(x * x, 1),
    lambda ctx, g: 2 * ctx.saved_tensors[0] * jnp.cumsum(g[:, ::-1], 1)[:, ::-1],
    sharding_rule=jaxfn.ShardingRule("b d -> b d", need_replication_factors=("d",)),
)
# It saves nothing, so that only the type of the input says how its gradient is split.
total = jaxfn.function(
    lambda ctx, x: setattr(ctx, "shape", x.shape) or jnp.sum(x),
    lambda ctx, g: jnp.broadcast_to(g, ctx.shape),
    sharding_rule=jaxfn.ShardingRule("b d -> ", reduction_factors=("b", "d")),
)


@row("M1", "M2")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("function, plain", [(cumulative_sum, lambda x: jnp.cumsum(x * x, 1)), (total, jnp.sum)])
def test_gradients_are_split_as_their_inputs_are(function, plain, kind):
    for order in range(3):
        ways = (at_order(f, order, 0) for f in (function, plain))
        assert_like_plain(*ways, arrays((8, 4)), [P("data", "model")], kind)


@row("M2")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_scan_checkpoint_hooks_and_eager_calls(kind):
    def repeated(f):
        step = jax.checkpoint(f)
        return at_order(lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, None, length=2)[0], 2, (0, 1))

    args, specs = arrays((8, 4), (4, 4)), [P("data"), P()]
    assert_like_plain(repeated(MatMul.apply), repeated(jnp.matmul), args, specs, kind)
    assert_like_plain(at_order(MatMul.apply, 1, (0, 1)), at_order(jnp.matmul, 1, (0, 1)), args, specs, kind, jit=False)
    with jaxfn.saved_tensors_hooks(lambda x: (x, 1), lambda packed: packed[0] * packed[1]):
        gradients = at_order(MatMul.apply, 1, (0, 1)), at_order(jnp.matmul, 1, (0, 1))
        assert_like_plain(*gradients, args, specs, kind)


@row("M1")
@pytest.mark.parametrize("form", ["argument", "assigned", "autograd_function"])
def test_a_function_without_a_class_takes_a_rule(form):
    methods = MatMul.forward, MatMul.backward
    if form == "assigned":
        f = jaxfn.function(*methods)
        f.sharding_rule = MatMul.sharding_rule
    else:
        f = (jaxfn.function if form == "argument" else jaxfn.autograd_function)(
            *methods, sharding_rule=MatMul.sharding_rule
        )
    ways = at_order(f, 1, (0, 1)), at_order(jnp.matmul, 1, (0, 1))
    assert_like_plain(*ways, arrays((8, 6), (6, 4)), [P("data", "model"), P("model")], "Explicit")
    with pytest.raises(ValueError, match="forward: sharding_rule .*output 0 lacks factor 'd'"):
        f.sharding_rule = "b d, d h -> b h"
    with pytest.raises(ValueError, match="forward: sharding_rule .*output 0 lacks factor 'd'"):
        jaxfn.function(*methods, sharding_rule="b d, d h -> b h")


def without_rule(function):
    return type(function.__name__, (function,), {"sharding_rule": None})


@row("M3")
def test_inside_shard_map_and_on_one_device_nothing_changes(monkeypatch):
    args = arrays((8, 6), (6, 4))

    def program(function, spread):
        f = at_order(function.apply, 1, (0, 1))
        if spread:
            mesh = mesh_of("data", AxisType.Auto)
            f = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()), check_vma=False)
        return jax.jit(f).lower(*args).as_text()

    assert program(MatMul, True) == program(without_rule(MatMul), True)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert program(MatMul, False) == program(without_rule(MatMul), False)


@row("M4")
@pytest.mark.parametrize(
    "text, kinds, message",
    [
        ("b d, d h -> b h", {}, "output 0 lacks factor 'd'.*reduction_factors=.'d',..*need_replication.*manual"),
        ("b d", {}, "expected one '->'"),
        ("b (d e) -> b", {}, r"'b \(d e\)' is not one different name for each dimension"),
        ("b b -> b", {}, "'b b' is not one different name for each dimension"),
        ("b d -> b", {"manual_factors": ("d", "e")}, "factor 'e' has to be in the rule"),
        ("b d -> b", {"manual_factors": "d", "reduction_factors": "d"}, "factor 'd' has to be .* in one kind"),
    ],
)
def test_a_rule_that_says_too_little_raises_at_once(text, kinds, message):
    with pytest.raises(ValueError, match=message):
        type("F", (jaxfn.Function,), {"sharding_rule": jaxfn.ShardingRule(text, **kinds)})
    if not kinds:
        with pytest.raises(ValueError, match=f"F: sharding_rule.*{message}"):
            type("F", (jaxfn.Function,), {"sharding_rule": text})


def with_rule(rule, saved=lambda x: x, **of_save):
    return jaxfn.function(
        lambda ctx, x, y: ctx.save_for_backward(saved(x), **of_save) or x * y,
        lambda ctx, g: (g, g),
        sharding_rule=rule,
        name="F",
    )


@row("M4")
@pytest.mark.parametrize(
    "rule, shapes, specs, message",
    [
        ("b d -> b d", [(8, 4), (8, 4)], [P("data"), P()], "has factors for 1 inputs, and the call has 2 arrays"),
        ("b, b d -> b d", [(8, 4), (8, 4)], [P("data"), P()], r"'b' for input 0 \('x'\), which has shape \(8, 4\)"),
        ("b d, b d -> b d", [(8, 4), (8, 1)], [P("data"), P()], "factor 'd' has size 4 in input 0 .* 1 in input 1"),
        (
            "b d, b d -> b d",
            [(8, 8), (8, 8)],
            [P("data"), P(None, "data")],
            "'data' splits factor 'd' of input 1.*'data' factor 'b' of input 0",
        ),
        (
            "b d, b d -> b d",
            [(8, 8), (8, 8)],
            [P("data"), P("model")],
            "'model' splits factor 'b' of input 1 .*'data' factor 'b' of input 0",
        ),
    ],
)
def test_errors_of_a_call_name_the_function_the_factor_and_the_argument(rule, shapes, specs, message):
    mesh, function = grid(), with_rule(rule)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"F.*{message}"):
        function(*(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays(*shapes), specs, strict=True)))


@row("M4")
def test_an_axis_that_does_not_divide_a_dimension_raises():
    mesh = grid("Auto")

    def f(x):
        x = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("data")))
        return with_rule("b d, b d -> b d")(x, x)

    with pytest.raises(Exception, match="mesh axis 'data' of size 4 does not divide factor 'b' of input 0.*size 6"):
        jax.jit(f)(*arrays((6, 4)))


@row("M2", "M4")
def test_saved_arrays_are_split_as_their_sizes_follow_or_as_they_say():
    mesh = grid()
    specs = [P("data"), P("data")]

    def gradient(function, *shapes):
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays(*shapes), specs, strict=True)]
            return jax.jit(jax.grad(lambda *args: jnp.sum(function(*args))))(*placed)

    rule = "b d, b d -> b d"
    gradient(with_rule(rule, lambda x: jnp.stack([x, x], 1).T), (8, 4), (8, 4))
    gradient(with_rule(rule, lambda x: jnp.arange(3.0)), (8, 4), (8, 4))  # it depends on no factor
    gradient(with_rule(rule, lambda x: x.T * 2, factors=["d b"]), (8, 8), (8, 8))
    with pytest.raises(ValueError, match=r"F.forward saves an array, saved_tensors\[0\], .*depends on factor 'b'"):
        gradient(with_rule(rule, lambda x: x.max(0)), (8, 4), (8, 4))
    with pytest.raises(ValueError, match=r"F: ctx.save_for_backward has factors='b b' for saved_tensors\[0\]"):
        gradient(with_rule(rule, lambda x: x.T * 2, factors=["b b"]), (8, 4), (8, 4))


@row("M2")
def test_mesh_axes_are_those_of_a_part_and_a_factor_must_be_known():
    seen = []

    @jaxfn.function(sharding_rule="b d -> b d")
    def f(ctx, x):
        seen.append((x.shape, ctx.mesh_axes("b"), ctx.mesh_axes("d")))
        return x

    f.backward(lambda ctx, g: ctx.mesh_axes("e"))
    mesh = grid()
    (x,) = arrays((8, 4))
    f(x)
    with jax.set_mesh(mesh):
        f(jax.device_put(x, NamedSharding(mesh, P(("data", "model")))))
        with pytest.raises(ValueError, match=r"ctx.mesh_axes\('e'\): .* has no such factor. It has: b, d"):
            jax.grad(lambda x: jnp.sum(f(x)))(x)
    assert seen[0] == ((8, 4), (), ()) and ((1, 4), ("data", "model"), ()) in seen


def of_two(text, forward, backward, **kinds):
    """A Function of x and w, which are saved before what `forward` returns, and the gradients by these."""

    def saving(ctx, x, w):
        output = forward(ctx, x, w)
        ctx.save_for_backward(x, w, output)
        return output

    def gradients(ctx, g):
        return backward(ctx, g, *ctx.saved_tensors)

    return jaxfn.function(saving, gradients, sharding_rule=jaxfn.ShardingRule(text, **kinds), name="F")


def exchanged(ctx, x, y):
    ctx.save_for_backward(x, y, z := (x * y).T, factors=(None, None, "b d"))
    return z.T**2


def exchanged_backward(ctx, g):
    x, y, z = ctx.saved_tensors
    return 2 * g * z.T * y, 2 * g * z.T * x


def next_to_large_numbers(ctx, x, w, which):
    ctx.save_for_backward(x, w, factor := jnp.where(which > 0, 1e9, jnp.exp(x @ w)))
    return jnp.where(which > 0, factor * (x @ w), factor)


def next_to_large_numbers_backward(ctx, g):
    x, w, y = ctx.saved_tensors
    return (g * y)[:, None] * w, (g * y) @ x, None


def sum_over(ctx, y):
    return jax.lax.psum(y, ctx.mesh_axes("d"))


class SplitSoftmax(KERNELS["Softmax"].function):
    sharding_rule = "b t d -> b t d"


# Functions with a wrong rule, the shapes of their arguments, and the error.
WRONG = {
    "a sum of exponents": (
        of_two(
            "b d, d -> b",
            lambda ctx, x, w: jnp.exp(x @ w),
            lambda ctx, g, x, w, y: ((g * y)[:, None] * w, (g * y) @ x),
            reduction_factors=("d",),
        ),
        [(4, 6), (6,)],
        "F: factor 'd' .*output 0 .* of the parts, added up, is not that of the whole",
    ),
    "next to large numbers": (
        jaxfn.function(
            next_to_large_numbers,
            next_to_large_numbers_backward,
            sharding_rule=jaxfn.ShardingRule("b d, d, b -> b", reduction_factors=("d",)),
        ),
        [(4, 6), (6,), (4,)],
        "factor 'd' .*output 0 .* of the parts, added up",
    ),
    "a sum that is missing": (
        of_two(
            "b d, d -> b",
            lambda ctx, x, w: x @ w,
            lambda ctx, g, x, w, _: (g[:, None] * w, g @ x),
            manual_factors=("d",),
        ),
        [(4, 6), (6,)],
        "F: factor 'd' .*output 0 .* is not the same on all parts",
    ),
    "concatenated": (
        SplitSoftmax,
        [(2, 3, 4)],
        "factor 'd' .*output 0 .* concatenated.*need_replication_factors=.'d',",
    ),
    "a saved array with exchanged factors": (
        jaxfn.function(exchanged, exchanged_backward, sharding_rule="b d, b d -> b d"),
        [(4, 4), (4, 4)],
        r"factor 'b' .*saved array saved_tensors\[2\] .*or the right factors=.* of ctx",
    ),
    "a gradient that it sums itself": (
        of_two(
            "b d, -> b",
            lambda ctx, x, w: sum_over(ctx, jnp.sum(x * w, 1)),
            lambda ctx, g, x, w, _: (g[:, None] * w * jnp.ones_like(x), sum_over(ctx, jnp.sum(g[:, None] * x))),
            manual_factors=("d",),
        ),
        [(4, 6), ()],
        r"backward: factor 'd' .*gradient of input 1 \('w'\).*return the contribution",
    ),
}


@row("M5")
@pytest.mark.parametrize("wrong", WRONG)
def test_gradcheck_finds_a_wrong_rule_and_names_the_factor(wrong):
    function, shapes, message = WRONG[wrong]
    args = [x.astype(np.float64) for x in arrays(*shapes)]
    with pytest.raises(jaxfn.GradcheckError, match=message):
        jaxfn.gradcheck(lambda *args: function.apply(*args), args)


@row("M5")
def test_right_rules_pass():
    for name in ("CrossEntropy", "RMSNorm"):
        kernel = KERNELS[name]
        inputs = [x.astype(np.float64) if i not in kernel.integers else x for i, x in enumerate(kernel.arguments())]
        assert jaxfn.gradcheck(kernel.function.apply, inputs)
    summed_by_jaxfn = of_two(  # its backward returns the gradients of the part
        "b d, d -> b",
        lambda ctx, x, w: sum_over(ctx, x @ w),
        lambda ctx, g, x, w, _: (g[:, None] * w, g @ x),
        manual_factors=("d",),
    )
    assert jaxfn.gradcheck(summed_by_jaxfn, [x.astype(np.float64) for x in arrays((4, 6), (6,))])
    assert jaxfn.gradcheck(MatMulByJvp.apply, [x.astype(np.float64) for x in arrays((4, 6), (6, 2))])


@row("M1", "M2")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_random_keys_constants_and_functions_inside(kind):
    table, key = jnp.arange(1.0, 5), jax.random.key(0)

    rule = jaxfn.ShardingRule("b d, -> b d", need_replication_factors="d")

    @jaxfn.function(sharding_rule=rule)
    def inner(ctx, x, key):
        ctx.table = table * jax.random.uniform(key)
        return x * ctx.table

    inner.backward(lambda ctx, g: (3 * g * ctx.table, None))

    @jaxfn.function(sharding_rule=rule)
    def outer(ctx, x, key):
        ctx.save_for_backward(x, key)
        return inner(x, key)

    @outer.backward
    def _(ctx, g):
        x, key = ctx.saved_tensors
        return jax.vjp(lambda x: inner(x, key), x)[1](g)[0], None

    scale = table * jax.random.uniform(key)
    gradients = [
        lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(outer(x, key))))(x),
        lambda x: 3 * scale * jnp.cos(scale * x),
    ]
    assert_like_plain(*gradients, arrays((8, 4)), [P("data")], kind)


@row("M2")
def test_residuals_say_how_each_is_split(monkeypatch):
    for count in (8, 1):
        monkeypatch.setattr(jax, "device_count", lambda count=count: count)
        table = jaxfn.residuals(KERNELS["RMSNorm"].function.apply, *arrays((8, 4), (4,)))
        assert [row.factors for row in table] == [("b", ""), ("",), ("b", "")]
        assert [row.function for row in table] == ["RMSNorm"] * 3
        assert "split by b _" in str(table)
    assert jaxfn.residuals(jnp.sin, *arrays((3,)))[0].factors is None


@row("M5")
def test_kernelcheck_with_shard_checks_the_rule():
    def plain(x):
        return jax.nn.softmax(x)

    options = {"dtypes": ["float32"], "shard": lambda f: f, "raise_exception": False}
    report = jaxfn.kernelcheck(SplitSoftmax.apply, plain, jax.ShapeDtypeStruct((2, 4, 8), "float32"), **options)
    (failure,) = report.failures
    assert failure.check == "shard" and "factor 'd' of the sharding rule" in failure.message
