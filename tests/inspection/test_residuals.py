"""`jaxfn.residuals`: the arrays that are saved for the backward pass, and the Function that saved each."""

import functools
import json
import math
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.cases import function_of, host_memory_is_apart
from tests.support.marks import EXPERIMENTAL, row
from tests.support.runs import number_of_calls


@jaxfn.function
def square(ctx, x):
    ctx.save_for_backward(x=x)
    return x * x


@square.backward
def _(ctx, grad_output):
    return 2 * ctx.saved_variables.x * grad_output


@jaxfn.function
def modulated(ctx, x, w, phase):
    wave = jnp.sin(x + phase)
    ctx.save_for_backward(x, wave)
    ctx.weights = {"w": w}
    return wave * w


@modulated.backward
def _(ctx, grad_output):
    x, wave = ctx.saved_tensors
    w = ctx.weights["w"]
    return grad_output * w * jnp.cos(x), grad_output * wave, None


def times_saved(saved, moved):
    return saved[0] * moved


# A Function with both modes that saves its output.
exp = function_of("both", jnp.exp, times_saved, times_saved, lambda args, y: (y,), "Exp")


def network(x, w):
    return square(modulated(jnp.tanh(x), w, 1.0)) + exp(-x)


def over_devices(f):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    return jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))


def in_scan(f):
    return lambda x, w: jax.lax.scan(lambda carry, w: (f(carry, w), carry.sum()), x, jnp.stack([w, 2 * w, 3 * w]))


def in_cond(f):
    return lambda x, w: jax.lax.cond(x.sum() > 0, f, lambda x, w: square(x) * w, x, w)


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "checkpoint, everything": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable),
    "checkpoint, dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "scan": in_scan,
    "scan of checkpoint": lambda f: in_scan(jax.checkpoint(f)),
    "scan of scan": lambda f: in_scan(lambda x, w: in_scan(f)(x, w)[0]),
    "checkpoint of scan": lambda f: jax.checkpoint(in_scan(f)),
    "cond": in_cond,
    "vmap": jax.vmap,
    "vmap over columns": lambda f: jax.vmap(f, in_axes=1, out_axes=1),
    "vmap over one": lambda f: jax.vmap(f, in_axes=(0, None)),
    "shard_map": over_devices,
    "jit of scan of cond": lambda f: jax.jit(in_scan(in_cond(f))),
    "grad": lambda f: jax.grad(lambda x, w: (f(x, w) * w).sum()),
}


def saved_by_jax(f, *args):
    """The arrays in the pullback, by JAX alone."""
    return [x for x in jax.tree_util.tree_leaves(jax.vjp(f, *args)[1]) if x.size]


@row("K2")
@pytest.mark.parametrize("around", AROUND)
def test_the_rows_are_the_arrays_of_the_pullback(around):
    f, x, w = AROUND[around](network), jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.ones((4, 3))
    # Types of arrays are enough.
    args = [jax.typeof(a) for a in (x, w)] if around in ("jit", "scan of checkpoint") else (x, w)
    ledger, kept = jaxfn.residuals(f, *args), saved_by_jax(f, x, w)
    rows = [(r.shape, r.dtype) for r in ledger if not r.is_duplicate]
    if around == "vmap over columns":  # the batch may be at another axis where JAX stages the program
        assert [(sorted(s), d) for s, d in rows] == [(sorted(k.shape), str(k.dtype)) for k in kept]
    else:
        assert rows == [(k.shape, str(k.dtype)) for k in kept]
    assert ledger.total_bytes == sum(k.nbytes for k in kept) == sum(ledger.bytes_by_function.values())


@row("K2")
@pytest.mark.parametrize("around", ["jit", "scan", "checkpoint, everything", "shard_map"])
def test_each_residual_is_said_to_be_what_was_saved(around):
    ledger = jaxfn.residuals(AROUND[around](network), jnp.ones((4, 3)), jnp.ones((4, 3)))
    saved = {(r.function, r.name, r.role) for r in ledger if r.function != "JAX"}
    assert saved == {
        ("square", "x", "input"),
        ("modulated", "saved_tensors[0]", "input"),
        ("modulated", "saved_tensors[1]", "intermediate"),
        ("modulated", "ctx.weights['w']", "input"),
        ("Exp", "saved_tensors[0]", "output"),
    }
    inside = {"scan": "scan of 3", "checkpoint, everything": "checkpoint", "shard_map": "shard_map"}.get(around)
    if inside != "checkpoint":  # which JAX_REMAT3 leaves none of
        assert all(r.enclosing == ((inside,) if inside else ()) for r in ledger if r.function != "JAX")


@row("K2")
def test_arguments_of_the_program_are_named():
    def f(parameters, x):
        return square(parameters["w"]) * x

    ledger = jaxfn.residuals(f, {"w": jnp.ones(3), "b": jnp.ones(2)}, jnp.ones(3))
    assert [(r.function, r.name, r.argument) for r in ledger] == [
        ("square", "x", "args[0]['w']"),
        ("JAX", "args[1]", "args[1]"),
        ("JAX", "mul", ""),  # the output of square
    ]


POLICIES = jax.checkpoint_policies
LOSES_NAMES = pytest.mark.xfail(EXPERIMENTAL, reason="JAX_CUSTOM_VJP3 stages checkpoint_name without its name")


@row("K2")
@LOSES_NAMES
def test_residuals_of_jax_are_named_by_the_operation_or_by_checkpoint_name():
    def layer(x, w):
        return checkpoint_name(jnp.sin(x @ w), "wave")

    def names(f):
        return {r.name for r in jaxfn.residuals(f, jnp.ones((4, 3)), jnp.ones((3, 3))) if not r.argument}

    assert names(layer) == names(jax.jit(layer)) == {"cos"}
    assert names(lambda x, w: layer(x, w)[None] * jnp.exp(x)) == {"cos", "wave", "exp"}
    dots = functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable)
    assert names(dots(layer)) == {"dot_general"}
    offloaded = jax.checkpoint(layer, policy=POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"))
    assert names(offloaded) == {"dot_general"}
    # Of a scan over steps: the operation in the step, or the carry that the step reads.
    assert names(lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=5)) == {"cos", "carry"}


@row("K2")
def test_an_array_that_two_functions_save_is_counted_once():
    ledger = jaxfn.residuals(lambda x: square(x) + exp(x) + square(x), jnp.ones(5))
    of_square = [r for r in ledger if r.function == "square"]
    assert [r.is_duplicate for r in of_square] == [False, True]
    assert ledger.total_bytes == 40
    assert ledger.bytes_by_function == {"square": 20, "Exp": 20}


@row("K2", "F1")
def test_packed_residuals_are_said_to_be_packed():
    def pack(x):
        return x.astype(jnp.bfloat16), jnp.ones(2)

    def unpack(packed):
        return packed[0].astype(jnp.float32)

    with jaxfn.saved_tensors_hooks(pack, unpack):
        ledger = jaxfn.residuals(network, jnp.ones((4, 3)), jnp.ones((4, 3)))
    packed = [r for r in ledger if r.is_packed]
    assert {(r.function, r.name) for r in packed} == {
        ("square", "x"),
        ("modulated", "saved_tensors[0]"),
        ("modulated", "saved_tensors[1]"),
        ("Exp", "saved_tensors[0]"),
    }
    assert {(r.shape, r.dtype) for r in packed} == {((4, 3), "bfloat16"), ((2,), "float32")}
    assert "packed" in str(ledger)


@row("K2", "F3")
@pytest.mark.skipif(not host_memory_is_apart(), reason="JAX 0.10.0 takes all memory of a CPU for host memory")
def test_residuals_on_the_host_are_said_to_be_there():
    with jaxfn.save_on_host():
        ledger = jaxfn.residuals(network, jnp.ones((4, 3)), jnp.ones((4, 3)))
    assert all(r.is_on_host == r.is_packed for r in ledger)
    assert any(r.is_on_host for r in ledger)


@row("K2")
def test_integers_constants_and_outputs():
    table = jnp.arange(6.0)

    def f(x, index):
        y = jnp.exp(x)
        return y, y[index] * table, index

    ledger = jaxfn.residuals(f, jnp.ones(6), jnp.array([0, 2, 1, 1, 5, 3]))
    kinds = {r.role for r in ledger}
    assert {"output", "constant"} <= kinds
    assert ledger.total_bytes == sum(x.nbytes for x in saved_by_jax(f, jnp.ones(6), jnp.array([0, 2, 1, 1, 5, 3])))


@row("K2")
def test_nothing_is_run_and_forward_is_traced_once():
    runs = []

    @jaxfn.function
    def counted(ctx, x):
        runs.append(x)
        ctx.save_for_backward(x)
        return x

    @counted.backward
    def _(ctx, grad_output):
        return grad_output * ctx.saved_tensors[0]

    huge = jax.ShapeDtypeStruct((1 << 40,), jnp.float32)
    assert jaxfn.residuals(counted, huge).total_bytes == 1 << 42
    assert len(runs) == 1


@row("K2", "K4")
@pytest.mark.parametrize("look", [jaxfn.residuals, jaxfn.find_nan])
def test_looking_leaves_nothing_in_programs(look):
    f = jax.jit(jax.grad(lambda x: square(x).sum()))

    def program():
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(jnp.ones(3))))

    before = program()
    look(f, jnp.ones(3))
    assert program() == before


# A transformer block, with Functions for its normalizations, its softmax and its activation.


@jaxfn.function
def normalized(ctx, x, scale):
    centred = x - x.mean(-1, keepdims=True)
    rstd = checkpoint_name(jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5), "rstd")
    ctx.save_for_backward(x=x, scale=scale, rstd=rstd)
    return centred * rstd * scale


@normalized.backward
def _(ctx, grad_output):
    x, scale, rstd = ctx.saved_tensors
    unit = (x - x.mean(-1, keepdims=True)) * rstd
    g = grad_output * scale
    of_x = rstd * (g - g.mean(-1, keepdims=True) - unit * (g * unit).mean(-1, keepdims=True))
    return of_x, grad_output * unit


@jaxfn.function
def softmax(ctx, x):
    y = checkpoint_name(jax.nn.softmax(x), "y")
    ctx.save_for_backward(y=y)
    return y


@softmax.backward
def _(ctx, grad_output):
    y = ctx.saved_variables.y
    return y * (grad_output - (grad_output * y).sum(-1, keepdims=True))


@jaxfn.function
def gelu(ctx, x):
    ctx.save_for_backward(x=x)
    return jax.nn.gelu(x)


@gelu.backward
def _(ctx, grad_output):
    (x,) = ctx.saved_tensors
    return jax.vjp(jax.nn.gelu, x)[1](grad_output)[0]


B, T, D, H, F = 2, 6, 8, 2, 20


def block(p, x):
    y = normalized(x, p["scale1"])
    q, k, v = (jnp.dot(y, p[name]).reshape(B, T, H, D // H) for name in ("q", "k", "v"))
    weights = softmax(jnp.einsum("bihd,bjhd->bhij", q, k))
    mixed = jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(B, T, D)
    x = x + jnp.dot(mixed, p["o"])
    return x + jnp.dot(gelu(jnp.dot(normalized(x, p["scale2"]), p["up"])), p["down"])


def parameters():
    shapes = {"scale1": (D,), "scale2": (D,), "up": (D, F), "down": (F, D)} | dict.fromkeys("qkvo", (D, D))
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
ROWS = B * T
# What each Function of the block saves, a hand count of numbers.
HAND_COUNT = {
    "normalized": 2 * (ROWS * D + D + ROWS),  # x, scale and rstd, twice
    "softmax": B * H * T * T,
    "gelu": ROWS * F,
}
# Both operands of each product: y once for q, k and v; what softmax and gelu returned; softmax's output is counted.
OPERANDS = (
    (ROWS * D + 3 * D * D) + 2 * ROWS * D + ROWS * D + (ROWS * D + D * D) + (ROWS * D + D * F) + (ROWS * F + F * D)
)


@row("K2")
def test_the_ledger_of_a_transformer_block_agrees_with_a_hand_count():
    ledger = jaxfn.residuals(block, parameters(), X)
    assert {name: nbytes // 4 for name, nbytes in ledger.bytes_by_function.items()} == HAND_COUNT | {"JAX": OPERANDS}


@row("K2")
def test_the_ledger_of_a_transformer_block_under_policies():
    def under(policy):
        return jaxfn.residuals(jax.checkpoint(block, policy=policy), parameters(), X)

    policies = jax.checkpoint_policies
    everything = under(policies.everything_saveable).bytes_by_function
    assert {name: everything[name] // 4 for name in HAND_COUNT} == HAND_COUNT
    # Arguments are saved in any case; normalized has saved three of them.
    arguments = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree_util.tree_leaves((parameters(), X)))
    saved = 4 * (ROWS * D + 2 * D)
    assert under(policies.nothing_saveable).bytes_by_function == {"JAX": arguments - saved, "normalized": saved}
    assert under(policies.save_only_these_names("y", "rstd")).bytes_by_function == {
        "JAX": arguments - saved,
        "normalized": saved + 4 * 2 * ROWS,
        "softmax": 4 * B * H * T * T,
    }


@row("K2")
@pytest.mark.parametrize("argnums", [0, 1, -1, -2, (1,), (0, -1), np.int64(1)])
def test_only_what_the_derivative_by_some_arguments_needs(argnums):
    def f(x, w):
        return square(x) @ w

    x, w = jnp.ones(4), jnp.ones((4, 3))
    places = [int(i) % 2 for i in np.atleast_1d(argnums)]

    def of_wanted(*values):
        given = dict(zip(places, values, strict=True))
        return f(given.get(0, x), given.get(1, w))

    kept = jax.tree.leaves(jax.vjp(of_wanted, *([x, w][i] for i in places))[1])
    ledger = jaxfn.residuals(f, x, w, argnums=argnums)
    assert ledger.total_bytes == sum(a.nbytes for a in kept)
    assert ("square" in ledger.bytes_by_function) == (0 in places)


@row("K2")
def test_argnums_beyond_the_arguments_raise():
    with pytest.raises(ValueError, match="argnums=2, but 2 arguments were passed"):
        jaxfn.residuals(jnp.multiply, jnp.ones(4), jnp.ones(4), argnums=2)


def powers(x, count):
    return sum(square(x) ** i for i in range(count))


# Other arguments of a function next to its array, and those it is differentiated with respect to.
STATIC = {
    "text": (lambda x, how: square(x) if how == "square" else x, "square", 0),
    "a function": (lambda x, f: square(f(x)), jnp.sin, 0),
    "None": (lambda x, mask: square(x) if mask is None else x, None, (0, 1)),
    "a whole number": (powers, 3, 0),
    "a whole number, by default": (powers, 3, None),
    "text, by default": (lambda x, how: square(x) if how == "square" else x, "square", None),
    "a truth value": (lambda x, flag: square(x) if flag else x, True, 0),
    "a pytree of many things": (lambda x, d: square(x) * d["w"] * d["n"], {"w": jnp.ones(5), "n": 2, "a": "b"}, 0),
    "a NumPy scalar": (lambda x, s: jnp.sin(x) * s, np.float64(3), 0),
    "a NumPy scalar that is differentiated": (lambda x, s: jnp.sin(x) * s, np.float32(3), (0, 1)),
    "a number that is differentiated": (lambda x, s: square(x) * s, 3.0, (0, 1)),
    "an array of text": (lambda x, names: square(x) * len(names), np.array(["a", "b"]), 0),
}


@row("K2")
@pytest.mark.parametrize("what", STATIC)
def test_other_arguments_than_arrays_are_what_jax_takes_them_for(what):
    f, other, argnums = STATIC[what]
    x = jnp.linspace(1, 2, 5)
    kept = saved_by_jax(*((f, x, other) if argnums == (0, 1) else (lambda x: f(x, other), x)))
    ledger = jaxfn.residuals(f, x, other, argnums=argnums)
    assert [(r.shape, r.dtype) for r in ledger if not r.is_duplicate] == [(k.shape, str(k.dtype)) for k in kept]
    assert ledger.total_bytes == sum(k.nbytes for k in kept)


@row("K2")
@pytest.mark.parametrize(
    ("args", "argnums", "named"),
    [
        (("sin", jnp.ones(3)), (0, 1), r"args\[0\], of type str, "),
        ((3, jnp.ones(3)), 0, r"args\[0\], of type int, "),
        (({"n": 3, "f": jnp.sin}, True), None, r"args\[0\], of type dict, "),
    ],
)
def test_an_argument_without_arrays_is_named(args, argnums, named):
    with pytest.raises(TypeError, match=f"{named}.*has no array or float.*argnums="):
        jaxfn.residuals(lambda a, b: b, *args, argnums=argnums)


@row("K2")
def test_a_model_is_differentiated_with_respect_to_its_arrays():
    def apply(model, x):
        for layer in model["layers"][: model["depth"]]:
            x = square(layer["activation"](x @ layer["w"])) * model["scale"]
        return {"sum": x}[model["name"]]

    layers = [{"w": jnp.ones((3, 3)), "activation": f} for f in (jnp.sin, jnp.tanh, jnp.exp)]
    model = {"layers": layers, "depth": 2, "name": "sum", "scale": 0.5, "is_training": True, "unused": np.arange(3)}

    def of_weights(weights, x):
        new = [layer | {"w": w} for layer, w in zip(layers, weights, strict=True)]
        return apply(model | {"layers": new}, x)

    x = jnp.linspace(-1, 1, 12).reshape(4, 3)
    kept = saved_by_jax(lambda weights: of_weights(weights, x), [layer["w"] for layer in layers])
    ledger = jaxfn.residuals(apply, model, x, argnums=0)
    assert [(r.shape, r.dtype) for r in ledger if not r.is_duplicate] == [(k.shape, str(k.dtype)) for k in kept]
    assert {r.argument for r in ledger} == {"", "args[1]", "args[0]['layers'][1]['w']"}


SOME_POLICIES = {
    "default": None,
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_saveable,
    "everything": POLICIES.everything_saveable,
    "names": POLICIES.save_only_these_names("rstd", "y"),
}


def with_names(x, w):
    return checkpoint_name(network(checkpoint_name(x @ w.T, "y")[:, :3], w), "rstd") @ w.T


COMPARED = {
    **{
        around: AROUND[around](with_names) for around in ("nothing", "jit", "scan of checkpoint", "jit of scan of cond")
    },
    "no residuals": lambda x, w: x + 2 * w,
    "no derivative": lambda x, w: jnp.float32(3),
    "several outputs": lambda x, w: {"a": x, "b": (square(x) @ w.T, 3)},
}


@row("K2b")
@pytest.mark.parametrize("f", COMPARED.values(), ids=COMPARED)
def test_policies_are_compared_by_the_pullbacks_of_checkpoint(f):
    x, w = jnp.linspace(-1, 1, 9).reshape(3, 3), jnp.ones((3, 3))
    comparison = jaxfn.residuals(f, x, w, policies=SOME_POLICIES)
    assert list(comparison) == ["no checkpoint", *SOME_POLICIES]
    for name, table in comparison.items():
        g = f if name == "no checkpoint" else jax.checkpoint(f, policy=SOME_POLICIES[name])
        kept = [k for k in jax.eval_shape(lambda x, w, g=g: jax.tree.leaves(jax.vjp(g, x, w)[1]), x, w) if k.size]
        assert [(r.shape, r.dtype) for r in table if not r.is_duplicate] == [(k.shape, str(k.dtype)) for k in kept]
        assert comparison.total_bytes[name] == table.total_bytes == sum(k.size * k.dtype.itemsize for k in kept)


@row("K2b")
@LOSES_NAMES
def test_a_comparison_of_policies_is_a_table_with_a_column_for_each():
    def f(x, w):
        for _ in range(2):
            x = checkpoint_name(jnp.sin(x @ w), "wave")
        return square(exp(x @ w))  # square saves what Exp has saved

    policies = {
        "default": None,
        "dots": POLICIES.dots_saveable,
        "host": POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["wave"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    comparison = jaxfn.residuals(f, jnp.ones((5, 3)), jnp.ones((3, 3)), argnums=1, policies=policies)
    assert str(comparison) == textwrap.dedent("""\
        Function     saved as          shape   dtype    no checkpoint  default    dots    host
        --------------------------------------------------------------------------------------
        JAX          args[1]           (3, 3)  float32             36       36      36      36
        JAX          args[0]           (5, 3)  float32             60       60      60      60
        JAX          cos               (5, 3)  float32         2 x 60
        JAX          wave              (5, 3)  float32         2 x 60                   2 x 60
        square       x                 (5, 3)  float32             60
        Exp          saved_tensors[0]  (5, 3)  float32              -
        JAX          dot_general       (5, 3)  float32                          3 x 60
        --------------------------------------------------------------------------------------
        JAX                                                       336       96     276     216
        square                                                     60        0       0       0
        Exp                                                         0        0       0       0
        all                                                       396       96     276     216
        on the host                                                 0        0       0     120""")


@row("K2b")
def test_tables_and_comparisons_are_data_and_html():
    comparison = jaxfn.residuals(network, jnp.ones((4, 3)), jnp.ones((4, 3)), policies={"a<b": None})
    content = json.loads(json.dumps(comparison.to_dict()))
    assert list(content) == ["no checkpoint", "a<b"]
    for name, table in comparison.items():
        rows = [
            jaxfn.reports.Residual(**r | {k: tuple(r[k]) for k in ("shape", "enclosing")})
            for r in content[name]["rows"]
        ]
        assert rows == list(table) != []
        assert content[name]["total_bytes"] == table.total_bytes
        assert content[name]["bytes_by_function"] == table.bytes_by_function
    assert "<th>a&lt;b</th>" in comparison._repr_html_()
    assert f"<td>{comparison['a<b'].total_bytes}</td>" in comparison._repr_html_()


@row("K2b")
def test_policies_by_their_names_and_in_a_list():
    args = network, jnp.ones((4, 3)), jnp.ones((4, 3))
    named = jaxfn.residuals(*args, policies={"a": "dots_saveable", "b": None})
    listed = jaxfn.residuals(*args, policies=["dots_saveable", POLICIES.everything_saveable, None])
    assert list(listed) == ["no checkpoint", "dots_saveable", "everything_saveable", "None"]
    assert listed.total_bytes["everything_saveable"] == listed.total_bytes["no checkpoint"]
    assert list(named["a"]) == list(listed["dots_saveable"]) and list(named["b"]) == list(listed["None"])
    choices = [POLICIES.save_only_these_names(name) for name in "ab"]
    with pytest.raises(ValueError, match="policies= has policy, policy. Pass a dict, with a name for each"):
        jaxfn.residuals(*args, policies=choices)


@row("K2")
def test_a_row_has_the_line_that_computes_its_array():
    def forward(ctx, x):
        ctx.save_for_backward(jnp.exp(x))
        return x * 2

    doubled = jaxfn.function(forward, lambda ctx, g: g * ctx.saved_tensors[0])

    def step(x, _):
        return doubled(jnp.sin(x)), None

    def f(x, w):
        return jax.jit(lambda x: jnp.tanh(x) * w)(jax.lax.scan(step, x, length=2)[0])

    table = jaxfn.residuals(f, jnp.ones(3), jnp.ones(3))
    found = {row.name: row.location.removeprefix(f"{__file__}:") for row in table}
    for name, function in (("saved_tensors[0]", forward), ("cos", step), ("tanh", f)):
        line, _, rest = found[name].partition(":")
        assert int(line) == function.__code__.co_firstlineno + 1 and f".{function.__name__}" in rest, found
    assert found["args[1]"] == ""
    assert f"scan of 2, test_residuals.py:{found['cos']}" in str(table)


@row("K2b")
@pytest.mark.parametrize("policies", [{"dots": "dots_savable"}, {"none": False}, {"a": "save_only_these_names"}])
def test_a_policy_that_is_none_is_named(policies):
    ((name, value),) = policies.items()
    with pytest.raises(
        TypeError, match=re.escape(f"policies[{name!r}] is {value!r}, expected a jax.checkpoint policy")
    ):
        jaxfn.residuals(jnp.sin, jnp.ones(3), policies=policies)


@row("K2")
@pytest.mark.parametrize("tool", [jaxfn.residuals, jaxfn.find_nan])
def test_arguments_in_a_tuple_are_noted(tool):
    with pytest.raises(TypeError) as caught:
        tool(jnp.multiply, (jnp.ones(3), jnp.ones(3)))
    assert f"{tool.__name__} takes arguments one by one: {tool.__name__}(f, *inputs)." in caught.value.__notes__


STEPS = {
    "an operation": lambda x, w: jnp.sin(x * w),
    "a Function": lambda x, w: exp(-square(x)) * w,
    "a Function that all save one array for": lambda x, w: modulated(x, w, 1.0),
}


@row("K2", "K4")
@pytest.mark.parametrize("tool", [jaxfn.residuals, jaxfn.find_nan])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_work_is_in_proportion_to_the_length_of_a_chain(step, tool):
    def calls(count):
        def f(x, w):
            for _ in range(count):
                x = step(x, w)
            return x.sum()

        return number_of_calls(lambda: tool(f, jnp.ones(3), jnp.ones(3)))

    calls(1)  # what is traced or compiled once
    assert calls(120) < 4.5 * calls(30)  # a quadratic search has 16
