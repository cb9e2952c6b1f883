"""Contract rows A: calling a Function."""

import functools
import inspect
import pickle
import threading
from collections import namedtuple
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import _compat
from tests.support.cases import MulConstant, Square, function_of, hand_written_of
from tests.support.either_library import G, X, assert_gradients, function_in, in_each_library
from tests.support.marks import EXPERIMENTAL, row


class Keywords(jaxfn.Function):
    """Every kind of parameter."""

    seen = None

    @staticmethod
    def forward(ctx, x, scale=2.0, *rest, offset=1.0, **extra):
        Keywords.seen = (scale, len(rest), offset, sorted(extra))
        ctx.scale = scale
        return x * scale + sum(rest, start=0.0) + offset + sum(extra.values(), start=0.0)

    @staticmethod
    def backward(ctx, grad_output):
        gradients = {"x": grad_output * ctx.scale}
        if hasattr(ctx.needs_input_grad, "rest"):
            gradients |= {"rest": (grad_output,) * len(ctx.needs_input_grad.rest)}
        return gradients


@row("A1")
@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [
        ((), {}, (2.0, 0, 1.0, [])),
        ((3.0,), {}, (3.0, 0, 1.0, [])),
        ((), {"scale": 3.0}, (3.0, 0, 1.0, [])),
        ((3.0, np.ones(2, np.float32)), {"offset": 5.0}, (3.0, 1, 5.0, [])),
        ((), {"offset": 2.0, "more": 7.0}, (2.0, 0, 2.0, ["more"])),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arguments_bind_to_the_signature(args, kwargs, seen, wrap):
    def f(x):
        return Keywords.apply(x, *args, **kwargs)

    if EXPERIMENTAL:
        jax.clear_caches()  # which hold traces, and the test needs a run of forward
    x = jnp.arange(2.0)
    scale, num_rest, offset, extra = seen
    expected = x * scale + num_rest + offset + sum(kwargs[k] for k in extra)
    np.testing.assert_allclose(wrap(f)(x), expected)
    assert Keywords.seen == seen
    np.testing.assert_allclose(wrap(jax.grad(lambda x: f(x).sum()))(x), [scale, scale])


@row("A1")
def test_gradients_of_variadic_arguments():
    x = jnp.arange(2.0)
    grads = jax.grad(lambda *a: Keywords.apply(a[0], 2.0, *a[1:]).sum(), argnums=(0, 1, 2))(x, x, x)
    np.testing.assert_allclose(grads, [[2, 2], [1, 1], [1, 1]])


@row("A1")
@in_each_library
@pytest.mark.parametrize(
    ("call", "factor"),
    [
        (lambda apply, x, y: apply(x, y), 2.0),
        (lambda apply, x, y: apply(y=y, x=x), 2.0),
        (lambda apply, x, y: apply(x, y=y, scale=3.0), 3.0),
        (lambda apply, x, y: apply(x, shift=1.0, scale=3.0, y=y), 3.0),
    ],
    ids=["positions", "all by keyword", "a keyword", "keywords in another order"],
)
def test_keywords_and_defaults_as_in_torch(lib, call, factor):
    def setup_context(ctx, inputs, output):
        x, y, ctx.scale, _ = inputs
        ctx.save_for_backward(x, y)

    def backward(ctx, grad_output):
        x, y = ctx.saved_tensors
        return y * ctx.scale * grad_output, 3 * x * ctx.scale * grad_output, None, None

    affine = function_in(
        lib,
        lambda x, y, scale=2.0, shift=0.5: x * y * scale + shift,
        backward,
        setup_context=staticmethod(setup_context),
    )
    args = [X, X + 1]
    assert_gradients(lib, lambda x, y: call(affine, x, y), args, (X + 1) * factor * G, 3 * X * factor * G)


@row("A1")
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1.0, 2.0, 3.0), {}), ((1.0,), {"wrong": 1})])
def test_wrong_arguments_name_the_function(args, kwargs):
    with pytest.raises(TypeError, match=r"MulConstant\.apply\(tensor, constant\)"):
        MulConstant.apply(*args, **kwargs)


@row("A1")
def test_one_name_for_two_inputs_raises():
    f = jaxfn.autograd_function(lambda ctx, x, /, **kw: x * kw["x"], lambda ctx, g: {"x": g})
    with pytest.raises(TypeError, match="'x' names two inputs"):
        f(1.0, x=2.0)


@row("A2", "A3")
@in_each_library
def test_static_arguments_arrive_as_identical_objects(lib):
    static_args = print, {"a": 1}, [1, 2], "text", object(), slice(1, 2), None, 3, True
    received = []

    def forward(ctx, x, *rest):
        received.append(rest)
        return x * 1

    takes = function_in(lib, forward, lambda ctx, grad_output: (grad_output, *(None,) * len(static_args)))

    assert_gradients(lib, lambda x: takes(x, *static_args), [X], G)
    (static,) = received
    assert static[1:3] == static_args[1:3]  # a list and a dict: looked into by jaxfn
    assert all(a is b for a, b in zip(static[:1] + static[3:], static_args[:1] + static_args[3:], strict=True))


@row("A2")
def test_a_torch_tensor_raises():
    torch = pytest.importorskip("torch")
    for value in (torch.ones(2), {"deep": [torch.nn.Parameter(torch.ones(2))]}):
        with pytest.raises(TypeError, match=r"Square: input 0 \('x'\) is a torch tensor.*from_torch"):
            Square.apply(value)


Point = namedtuple("Point", "x y")


class Tree(jaxfn.Function):
    statics = None

    @staticmethod
    def forward(ctx, tree, config):
        Tree.statics = (tree["mode"], tree["nested"][1], config)
        ctx.factor = tree["factor"]
        a, b = tree["nested"][0]
        return a * tree["factor"] + b

    @staticmethod
    def backward(ctx, grad_output):
        return {"nested": [Point(grad_output * ctx.factor, grad_output), None], "factor": None, "mode": None}, None


@row("A2")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_pytrees_of_arrays_and_statics(wrap):
    marker = object()

    def f(point):
        return Tree.apply({"nested": [point, None], "factor": 3, "mode": "fast"}, marker).sum()

    grads = wrap(jax.grad(f))(Point(jnp.ones(2), jnp.ones(2)))
    np.testing.assert_allclose(grads, [[3, 3], [1, 1]])
    mode, none, config = Tree.statics
    assert (mode, none) == ("fast", None)
    assert config is marker


@row("A2")
def test_array_leaves_of_other_kinds():
    class Box:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return self.value

    kinds = []

    @jaxfn.function
    def f(ctx, x):
        kinds.append(isinstance(x, jax.Array))
        return x * 2

    f.backward(lambda ctx, g: g * 2)
    for x in (np.ones(2, np.float32), np.float32(1), Box(jnp.ones(2)), jnp.ones(2)):
        assert isinstance(f(x), jax.Array)
    assert all(kinds)
    np.testing.assert_allclose(jax.grad(lambda v: f(Box(v)).sum())(jnp.ones(2)), [2, 2])


@row("A3")
def test_python_scalars_are_static_unless_traced():
    @jaxfn.function
    def power(ctx, x, n):
        ctx.is_static = isinstance(n, int)
        ctx.x, ctx.n = x, n
        if ctx.is_static:  # Python control flow on it
            return x if n == 1 else x * power(x, n - 1)
        return x**n

    @power.backward
    def _(ctx, g):
        x, n = ctx.x, ctx.n
        if ctx.is_static:
            return g * n * x ** (n - 1), None
        return g * n * x ** (n - 1), g * x**n * jnp.log(x)

    assert power(2.0, 3) == 8.0
    assert jax.grad(power)(2.0, 3) == 12.0
    x, n = jnp.float32(2), jnp.float32(3)
    np.testing.assert_allclose(jax.grad(power, argnums=1)(x, n), 8 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(power)(x, n), 8, rtol=1e-6)


@row("A4")
def test_apply_is_one_picklable_hashable_object():
    assert Square.apply is Square.apply
    assert hash(Square.apply) == hash(Square.apply)
    assert pickle.loads(pickle.dumps(Square.apply)) is Square.apply

    class Child(Square):
        pass

    assert Child.apply is not Square.apply
    assert Child.apply(jnp.float32(3)) == 9.0


@row("A4", "A7")
def test_a_call_is_traced_once_for_arguments_of_equal_shapes():
    traces = []

    @jaxfn.function
    def counted(ctx, x):
        traces.append("forward")
        return x

    counted.backward(lambda ctx, g: g)

    @jax.jit
    def step(w, x):
        traces.append("step")
        return w - 0.1 * jax.grad(lambda w: Square.apply(MulConstant.apply(w * x, 2)).sum())(w)

    w = jnp.ones(3)
    for i in range(5):
        jax.jit(counted)(w)
        w = step(w, jnp.full(3, float(i)))
    assert traces == ["forward", "step"]


def test_threads_that_meet_one_unknown_compiler_option(monkeypatch):
    """Both find that this XLA does not know it; neither fails."""
    monkeypatch.setattr(_compat, "_QUICK", [{"xla_no_such_option": True}, {}])
    lowered = [jax.jit(lambda x, k=k: x + k).lower(jnp.float32(0)) for k in range(4)]
    results, errors = [], []
    together = threading.Barrier(len(lowered))

    def compile_one(program):
        together.wait()
        try:
            results.append(float(_compat.compile_quickly(program)(jnp.float32(0))))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_one, args=(program,)) for program in lowered]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    np.testing.assert_allclose(sorted(results), range(4))


@row("A5")
def test_forward_runs_directly_where_none_of_its_arrays_is_traced():
    """Forward gets tracers, and cannot read values, if a rule is attached."""
    values, of_gradient = [], []

    @jaxfn.function
    def square(ctx, x):
        values.append(float(x))
        return x * x

    square.backward(lambda ctx, g: of_gradient.append(g) or 2 * g)
    three = jnp.float32(3)
    for result in (
        square(three),
        jax.grad(lambda w: w * square(three))(2.0),  # a constant of what is being differentiated
        jax.vmap(lambda w: w * square(three))(jnp.ones(2))[1],
        jax.jvp(lambda w: w * square(three), (2.0,), (1.0,))[1],
    ):
        assert result == 9.0
    assert values == [3.0] * 4 and not of_gradient


@row("E2")
def test_an_eager_shard_map():
    """JAX cannot call a custom_vjp of this kind there, and nothing is differentiated."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(Square.apply, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(mapped(jnp.full(2, 2.0)), np.full(2, 4.0))


@row("A6")
def test_a_function_without_forward_or_ctx():
    """test_messages.py asserts that an instance is rejected."""
    assert hasattr(jaxfn.Function, "apply")
    with pytest.raises(NotImplementedError, match=r"^Function defines no forward.*static method of a subclass"):
        jaxfn.Function.apply(1.0)
    with pytest.raises(NotImplementedError, match="Empty defines no forward"):
        type("Empty", (jaxfn.Function,), {}).apply(1.0)
    no_ctx = type("NoCtx", (jaxfn.Function,), {"forward": staticmethod(lambda: 1.0)})
    with pytest.raises(TypeError, match="takes no ctx"):
        no_ctx.apply()


def counting_products(calls, pack, unpack):
    """A Function and its hand-written custom_vjp, of two packed arguments; `calls` gets what user code ran."""

    def value(*packed):
        calls.append("forward")
        x, w = unpack(*packed)
        return x * w

    def pull(saved, grad_output):
        calls.append("backward")
        x, w = saved
        return pack(grad_output * w, grad_output * x)

    def saved(args, output):
        return unpack(*args)

    functions = function_of("backward", value, None, pull, saved), hand_written_of(value, pull, saved)
    return [lambda x, w, f=f: f(*pack(x, w)) for f in functions]


PACKINGS = {
    "two arguments": (lambda x, w: (x, w), lambda x, w: (x, w)),
    "a dict": (lambda x, w: ({"x": x, "pair": (w, None)},), lambda packed: (packed["x"], packed["pair"][0])),
}


def by_both_arguments(f):
    return jax.grad(f, (0, 1))


DIFFERENTIATED_AT_THE_CALL = (jax.grad, by_both_arguments)


@row("A7")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "derivative",
    [jax.grad, lambda f: jax.grad(jax.jit(f)), by_both_arguments, jax.checkpoint, jax.vmap],
    ids=["grad", "grad of jit", "both arguments", "checkpoint", "vmap"],
)
def test_user_code_is_traced_as_often_as_a_hand_written_rule(derivative, packing):
    """That has two traces if JAX stages a call before it differentiates: the primal, and its `fwd`."""
    calls = []
    counts = []
    for f in counting_products(calls, *PACKINGS[packing]):

        def chain(x, w, f=f):
            for _ in range(8):
                x = f(x, w)
            return x

        x = jnp.ones(3) if derivative is jax.vmap else jnp.ones(())
        calls.clear()
        for _ in range(2):  # what is traced again must not grow
            jax.jit(derivative(lambda x, w, chain=chain: chain(x, w))).trace(x, x)
        counts.append((calls.count("forward"), calls.count("backward")))
    ours, hand_written = counts
    runs_twice = bool(hand_written[1]) and derivative not in DIFFERENTIATED_AT_THE_CALL
    assert EXPERIMENTAL or ours[0] == 16 + 16 * runs_twice  # JAX_CUSTOM_VJP3 retraces the primal
    assert ours == hand_written


@row("A7")
def test_weak_types_are_preserved():
    assert jax.typeof(Square.apply(jnp.asarray(2.0))).weak_type
    out = jax.jit(Square.apply)(2.0)
    assert jax.typeof(out).weak_type == jax.typeof(jax.jit(lambda x: x * x)(2.0)).weak_type
    low = jnp.ones(2, jnp.bfloat16)
    assert jax.jit(lambda x, c: x * Square.apply(c))(low, 2.0).dtype == jnp.bfloat16
    assert jax.grad(lambda c: (low * Square.apply(c)).sum().astype(jnp.float32))(2.0).dtype == jnp.float32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["k"])
@dataclass
class WithMeta:
    x: jax.Array
    k: float = field(metadata={"static": True})


Packed = namedtuple("Packed", "x k")
# Puts an array and a static value into a container, takes both out again, and makes the container's gradient.
CONTAINERS = {
    "metadata": (WithMeta, lambda m: (m.x, m.k), WithMeta),
    "dict": (lambda x, k: {"x": x, "y": k}, lambda d: d.values(), lambda g, k: {"x": g, "y": None}),
    "list": (lambda x, k: [x, k], lambda pair: pair, lambda g, k: [g, None]),
    "namedtuple": (Packed, lambda pair: pair, lambda g, k: Packed(g, None)),
    "key of a dict": (lambda x, k: {k: x}, lambda d: (*d.values(), *d), lambda g, k: ({k: g},)),
}


@row("A2", "A3")
@pytest.mark.parametrize("container", CONTAINERS)
def test_static_values_in_containers_are_distinguished(container):
    pack, unpack, pack_gradient = CONTAINERS[container]

    def forward(ctx, packed):
        x, ctx.k = unpack(packed)
        return x * 1.0

    def backward(ctx, g):
        return pack_gradient(g * (np.copysign(1, ctx.k) + isinstance(ctx.k, bool)), ctx.k)

    f = jaxfn.autograd_function(forward, backward)
    got = [float(jax.grad(lambda x, k=k: f(pack(x, k)))(1.0)) for k in (0.0, -0.0, 1, True, 1.0)]
    assert got == [1.0, -1.0, 1.0, 2.0, 1.0]


@row("A4")
def test_apply_may_be_overridden():
    class WithDefault(MulConstant):
        @classmethod
        def apply(cls, x):
            return super().apply(x, jnp.float32(2))

    assert WithDefault.apply(jnp.float32(3)) == 6.0
    assert jax.grad(WithDefault.apply)(3.0) == 2.0


@row("A1")
def test_the_signature_of_apply_is_that_of_the_forward_it_calls():
    """An overridden `apply` has its own behavior, also that of a base class."""

    class Scaled(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, scale):
            return x * scale

    class Doubled(Scaled):
        @classmethod
        def apply(cls, x, *, factor=2):
            return super().apply(x, factor)

    class Renamed(Doubled):
        @staticmethod
        def forward(ctx, a, b):
            return a * b

    assert str(inspect.signature(Scaled.apply)) == "(x, scale)"
    assert str(inspect.signature(Doubled.apply)) == str(inspect.signature(Renamed.apply)) == "(x, *, factor=2)"
    assert str(inspect.signature(super(Doubled, Doubled).apply)) == "(x, scale)"
    assert jax.jit(Doubled.apply, static_argnames="factor")(2.0, factor=3) == 6


@row("G1")
@pytest.mark.parametrize("how", ["apply", "decorated"])
def test_a_report_names_the_inputs_of_a_forward_that_was_replaced(how):
    @jaxfn.function
    def wrong(ctx, a, b):
        return a * 2 + b

    @wrong.backward
    def _(ctx, grad_output):
        return grad_output, grad_output

    wrong.Function.forward = staticmethod(lambda ctx, first, second: first * 2 + second)
    checked = wrong if how == "decorated" else wrong.Function.apply
    with pytest.raises(jaxfn.GradcheckError, match="input 0 .'first'."):
        jaxfn.gradcheck(checked, (np.ones(2), np.ones(2)))
