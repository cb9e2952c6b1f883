"""Contract rows E3 and E4: a batching rule of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Pair
from tests.support.contexts import CONTEXTS, eager, jit
from tests.support.derivatives import check, derivative
from tests.support.marks import row

ROWS = jnp.arange(6.0).reshape(3, 2) / 4 - 0.6


class Other(jaxfn.Function):
    """Its vmap returns twice what its forward does, which shows when it is used."""

    @staticmethod
    def forward(x):
        return jnp.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * jnp.cos(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * jnp.cos(ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return 2 * Other.apply(x), in_dims[0]


class Plain(Other):
    """The Function without a rule: batched automatically."""

    vmap = jaxfn.Function.vmap


def recording(log: list[Any], returned: Any = None, forward: Any = lambda *args: args[0]) -> Any:
    """A Function whose vmap logs what it gets and returns `returned(*args)`."""

    class Recording(jaxfn.Function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, *grad_outputs):
            return grad_outputs[0]

        @staticmethod
        def vmap(info, in_dims, *args):
            log.append((info, in_dims))
            return (Recording.forward(*args), 0) if returned is None else returned(*args)

    Recording.forward = staticmethod(forward)
    return Recording


# --- its use


@row("E3")
@pytest.mark.parametrize("context", ["eager", "jit", "checkpoint"])
def test_is_used_instead_of_automatic_batching(context):
    wrap = CONTEXTS[context]
    np.testing.assert_allclose(wrap(jax.vmap(Other.apply))(ROWS), 2 * jnp.sin(ROWS), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(wrap(Other.apply))(ROWS), 2 * jnp.sin(ROWS), rtol=1e-6)
    np.testing.assert_allclose(wrap(Other.apply)(ROWS), jnp.sin(ROWS), rtol=1e-6)
    np.testing.assert_allclose(wrap(jax.vmap(Plain.apply))(ROWS), jnp.sin(ROWS), rtol=1e-6)


@row("E3")
def test_nested_vmaps():
    """Each level asks the rule, which applies the Function again."""
    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_allclose(jax.vmap(jax.vmap(Other.apply))(x), 4 * jnp.sin(x), rtol=1e-6)
    got = jax.vmap(jax.vmap(Other.apply), in_axes=2, out_axes=1)(x)
    np.testing.assert_allclose(got, 4 * jnp.sin(x.transpose(0, 2, 1)), rtol=1e-6)


@row("E3")
def test_in_scan():
    np.testing.assert_allclose(jax.lax.map(jax.vmap(Other.apply), ROWS[None])[0], 2 * jnp.sin(ROWS), rtol=1e-6)
    mapped = jax.vmap(lambda x: jax.lax.scan(lambda c, y: (Other.apply(c + y), c), x[0], x)[0])(ROWS)
    carry = ROWS[:, 0]
    for column in ROWS.T:
        carry = 2 * jnp.sin(carry + column)
    np.testing.assert_allclose(mapped, carry, rtol=1e-6)


@row("E3")
def test_unbatched_calls_do_not_ask():
    log: list[Any] = []
    f = recording(log).apply
    jax.jit(f)(1.0)
    jax.grad(f)(1.0)
    jax.vmap(lambda x: x + f(1.0))(ROWS)
    assert log == []


# --- what it gets


@row("E3")
@pytest.mark.parametrize("wrap", [eager, jit])
def test_info(wrap):
    log: list[Any] = []
    wrap(jax.vmap(recording(log).apply))(ROWS)
    ((info, in_dims),) = log
    assert info.batch_size == 3 and info.randomness == "error" and in_dims == (0,)


@row("E3")
def test_in_dims_have_each_arguments_structure():
    log: list[Any] = []
    f = recording(log, lambda x, *_: (x, 0))

    def g(x, y):
        return f.apply(x, {"b": y, "a": [x, None, 3]}, None, "text", Pair(y, x), y, 2.5)

    jax.vmap(g, in_axes=(0, None))(ROWS, ROWS[0])
    assert log[0][1] == (0, {"b": None, "a": [0, None, None]}, None, None, Pair(None, 0), None, None)


@row("E3")
def test_defaults_and_keywords_are_in_dims_too():
    log: list[Any] = []
    seen: list[Any] = []

    def returned(x, scale, shift):
        seen.append((scale, shift))
        return x * scale, 0

    f = recording(log, returned, lambda x, scale=2.0, *, shift=None: x * scale).apply
    np.testing.assert_array_equal(jax.vmap(lambda x: f(x, shift=5))(ROWS), 2 * ROWS)
    assert log[0][1] == (0, None, None) and seen == [(2.0, 5)]


@row("E3")
@pytest.mark.parametrize("in_axes", [0, 1, -1])
def test_the_batch_axis_wherever_it_is(in_axes):
    """in_dims say where the batch is among the arguments that vmap gets."""

    def vmap(info, in_dims, x):
        assert x.shape[in_dims[0]] == info.batch_size
        return jnp.moveaxis(x, in_dims[0], 0).reshape(info.batch_size, -1).sum(1), 0

    total = jaxfn.function(
        lambda x: x.sum(),
        lambda ctx, grad_output: jnp.broadcast_to(grad_output, ctx.shape),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
        vmap=vmap,
    )
    x = jnp.arange(24.0).reshape(2, 3, 4)
    for of in (lambda f: jax.vmap(f, in_axes), lambda f: jax.grad(lambda x: (jax.vmap(f, in_axes)(x) ** 2).sum())):
        np.testing.assert_array_equal(of(total)(x), of(jnp.sum)(x))


# --- what it returns


def out_dims_case(output: Any, out_dims: Any) -> Any:
    f = recording([], lambda x: (output(x), out_dims), lambda x: output(x)).apply
    return jax.tree.map(np.asarray, jax.vmap(f)(ROWS))


@row("E3")
def test_out_dims():
    tree = lambda x: {"a": x.T, "b": [x, x * 2]}  # noqa: E731
    np.testing.assert_array_equal(out_dims_case(lambda x: x.T, 1), ROWS)
    np.testing.assert_array_equal(out_dims_case(lambda x: x.T, -1), ROWS)
    np.testing.assert_array_equal(out_dims_case(lambda x: x, -2), ROWS)
    np.testing.assert_array_equal(out_dims_case(lambda x: x.T[None], 2), ROWS[:, None])
    np.testing.assert_array_equal(out_dims_case(lambda x: jnp.ones(2), None), np.ones((3, 2)))
    for out_dims in ({"a": 1, "b": [0, 0]}, {"a": -1, "b": 0}):
        got = out_dims_case(tree, out_dims)
        np.testing.assert_array_equal(got["a"], ROWS)
        np.testing.assert_array_equal(got["b"], np.stack([ROWS, ROWS * 2]))
    first, second = out_dims_case(lambda x: (x, jnp.float32(3)), (0, None))
    np.testing.assert_array_equal(first, ROWS)
    np.testing.assert_array_equal(second, [3, 3, 3])
    first, second = out_dims_case(lambda x: (x, x * 2), 0)  # one for all
    np.testing.assert_array_equal(second, ROWS * 2)
    assert isinstance(out_dims_case(lambda x: Pair(x, x), (0, 0)), Pair)


@row("E3")
def test_outputs_that_are_not_arrays():
    f = recording([], lambda x: ((2 * x, "name"), (0, None)), lambda x: (x, "name")).apply
    seen: list[Any] = []

    def call(x):
        y, name = f(x)
        seen.append(name)
        return y

    np.testing.assert_array_equal(jax.vmap(call)(ROWS), 2 * ROWS)
    assert seen == ["name"]


WRONG = {
    "no out_dims": (lambda x: x, "expected to return two values, .* got an array"),
    "three values": (lambda x: (x, 0, 0), "expected to return two values, .* got a tuple of 3"),
    "a list": (lambda x: [x, 0], "expected to return two values, .* got a list"),
    "out_dims of another structure": (lambda x: (x, (0, 0)), "out_dims .* do not have the output's structure"),
    "too few out_dims": (lambda x: ((x, x), (0,)), "out_dims .* do not have the output's structure"),
    "size": (lambda x: (x[:2], 0), "size 2 along its out_dims axis 0: expected the batch size 3"),
    "no such axis": (lambda x: (x, 2), r"2 is not an axis of its output \(array 0\) of shape \(3, 2\)"),
    "no integer": (lambda x: (x, "0"), "'0' is not an axis of its output"),
    "a flag": (lambda x: (x, True), "True is not an axis of its output"),
}


@row("E3")
@pytest.mark.parametrize("what", WRONG)
def test_what_vmap_may_not_return(what):
    returned, message = WRONG[what]
    with pytest.raises(RuntimeError, match=r"Recording\.vmap .*" + message):
        jax.vmap(recording([], returned).apply)(ROWS)


# --- derivatives


class Weighted(jaxfn.Function):
    """A matrix product that saves an intermediate, and whose vmap makes one product of a batch; three outputs."""

    calls_of_vmap = 0

    @staticmethod
    def forward(x, w):
        return {"out": jnp.tanh(x @ w), "norm": (x * x).sum(-1)}, (x > 0).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, jnp.tanh(inputs[0] @ inputs[1]))

    @staticmethod
    def backward(ctx, grads, _):
        x, w, out = ctx.saved_tensors
        inner = grads["out"] * (1 - out**2)
        return inner @ w.T + 2 * x * grads["norm"][..., None], x.reshape(-1, 2).T @ inner.reshape(-1, 2)

    @classmethod
    def vmap(cls, info, in_dims, x, w):
        Weighted.calls_of_vmap += 1
        if in_dims == (0, None):
            return cls.apply(x, w), 0
        rows = [
            [a if d is None else jnp.take(a, i, axis=d) for a, d in zip((x, w), in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return jax.tree.map(lambda *ys: jnp.stack(ys), *(cls.apply(*row) for row in rows)), 0


class WeightedForward(Weighted):
    generate_jvp_rule = True


def weighted(x, w):
    return {"out": jnp.tanh(x @ w), "norm": (x * x).sum(-1)}, (x > 0).sum(-1)


W = jnp.array([[0.3, -0.5], [1.1, 0.2]])


# Of a function of a row and of the weight, or of a weight for each row.
MAPPED = {
    "vmap": partial(jax.vmap, in_axes=(0, None)),
    "vmap over both": jax.vmap,
    "map": lambda f: lambda x, w: jax.lax.map(lambda x: f(x, w), x),
}
IN_REVERSE_MODE = [
    "vmap of grad",
    "vmap over both of grad",
    "grad of vmap",
    "grad of grad of vmap",
    "vmap of grad of grad",
    "jacrev of vmap",
    "grad of vmap of vmap",
    "map of grad of vmap",
]
IN_FORWARD_MODE = ["jvp of vmap", "vmap of jvp", "jacfwd of vmap", "hessian of vmap", "vmap of hessian"]


@row("E3")
@pytest.mark.parametrize(
    ("function", "names"), [(Weighted, IN_REVERSE_MODE), (WeightedForward, IN_REVERSE_MODE + IN_FORWARD_MODE)]
)
def test_composes_with_derivatives_of_every_order(function, names):
    def derivatives(f):
        def of(name):
            is_nested = name.split(" of ")[-2:] == ["vmap", "vmap"] or name.startswith("map")
            weights = jnp.stack([W, W + 1, W - 1]) if "both" in name else W
            return derivative(name, f, **MAPPED)(ROWS[None] if is_nested else ROWS, weights)

        return jax.jit(lambda: {name: of(name) for name in names})()

    Weighted.calls_of_vmap = 0
    check(derivatives(function.apply), derivatives(weighted), 1e-4, 1e-5)
    assert Weighted.calls_of_vmap > 5


@row("E3")
@pytest.mark.parametrize("wrap", [eager, jit])
def test_the_derivative_is_that_of_the_Function_and_not_of_vmap(wrap):
    """vmap says how to compute a batch: what is differentiated is the Function, as in automatic batching."""
    for f in (
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(ROWS),
        lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(ROWS),
        lambda f: jax.jvp(jax.vmap(f), (ROWS,), (ROWS,))[1],
    ):
        np.testing.assert_allclose(wrap(lambda: f(Other.apply))(), f(jnp.sin), rtol=1e-6)


# --- how it is written


@row("E3")
@pytest.mark.parametrize("through", ["decorator", "class"])
def test_registered_on_a_decorated_function(through):
    if through == "class":
        f = type("f", (Other,), {"vmap": staticmethod(lambda info, in_dims, x: (x * 5, in_dims[0]))}).apply
    else:
        f = jaxfn.function(jnp.sin)
        f.setup_context(Other.setup_context)
        f.backward(Other.backward)
        rule = lambda info, in_dims, x: (x * 5, in_dims[0])  # noqa: E731
        assert f.vmap(rule) is rule
    np.testing.assert_array_equal(jax.vmap(f)(ROWS), ROWS * 5)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: f(x).sum()))(ROWS), jnp.cos(ROWS), rtol=1e-6)


@row("E3")
def test_needs_the_separate_style():
    combined = jaxfn.function(lambda ctx, x: x * 2, lambda ctx, grad_output: grad_output * 2, vmap=Other.vmap)
    assert jax.grad(combined)(1.0) == 2
    for f in (jax.vmap(combined), jax.jit(jax.vmap(combined)), jax.vmap(jax.grad(combined))):
        with pytest.raises(RuntimeError, match="vmap over <lambda>, .* setup_context"):
            f(ROWS[:, 0])


@row("E4")
def test_generate_vmap_rule_alone_is_automatic_batching_and_with_a_vmap_an_error():
    class Generated(Plain):
        generate_vmap_rule = True

    np.testing.assert_allclose(jax.vmap(Generated.apply)(ROWS), jnp.sin(ROWS), rtol=1e-6)

    class Both(Other):
        generate_vmap_rule = True

    x = jnp.float32(0)
    assert Both.apply(x) == 0 and jax.grad(Both.apply)(x) == 1
    mapped = jax.vmap(Both.apply)
    for f in (mapped, jax.vmap(jax.grad(Both.apply)), jax.grad(lambda x: mapped(x).sum())):
        with pytest.raises(RuntimeError, match="vmap over Both, .*both generate_vmap_rule=True and a vmap"):
            f(ROWS[:, 0])


# --- compared with torch


@row("E3")
def test_matches_torch():
    """Compares what the rule gets, how often, and the results, with torch.vmap and torch.func.grad run live."""
    torch = pytest.importorskip("torch")

    def define(library: Any, m: Any, log: list[Any]) -> Any:
        class Product(library.Function):
            @staticmethod
            def forward(x, y, power, pair):
                return (x * y) ** power * pair[1], x + 1

            @staticmethod
            def setup_context(ctx, inputs, output):
                x, y, ctx.power, ctx.pair = inputs
                ctx.save_for_backward(x, y)

            @staticmethod
            def backward(ctx, grad_output, grad_other):
                x, y = ctx.saved_tensors
                common = grad_output * ctx.power * (x * y) ** (ctx.power - 1) * ctx.pair[1]
                return common * y + grad_other, common * x, None, None

            @staticmethod
            def vmap(info, in_dims, x, y, power, pair):
                log.append((info.batch_size, info.randomness, tuple(in_dims)))
                x = x if in_dims[0] is None else m.moveaxis(x, in_dims[0], 0)
                y = y if in_dims[1] is None else m.moveaxis(y, in_dims[1], 0)
                if x.ndim == 1 and y.ndim == 2:
                    x = m.broadcast_to(x, y.shape)
                return Product.apply(x, y, power, pair), (0, 0 if x.ndim == 2 else None)

        return lambda x, y: Product.apply(x, y, 3, ("scale", 2.0))

    x, y = np.asarray(ROWS), np.asarray(ROWS[0] + 0.3)
    logs: list[Any] = [[], []]
    in_torch, in_jax = define(torch.autograd, torch, logs[0]), define(jaxfn, jnp, logs[1])

    def results(f, vmap, grad, array):
        a, b = array(x), array(y)
        yield vmap(f, (0, None))(a, b)
        yield vmap(f, (0, 0))(a, a + 1)
        yield vmap(grad(lambda a, b: f(a, b)[0].sum() + f(a, b)[1].sum()), (0, None))(a, b)
        yield grad(lambda b: (vmap(f, (0, None))(a, b)[0] ** 2).sum())(b)
        yield vmap(grad(lambda b: (grad(lambda b: f(a[0], b)[0].sum())(b) ** 2).sum()))(a)

    theirs = results(in_torch, torch.vmap, torch.func.grad, torch.tensor)
    ours = results(in_jax, jax.vmap, jax.grad, jnp.asarray)
    for got, expected in zip(ours, theirs, strict=True):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert logs[1][:1] == logs[0][:1]
        logs[0].clear(), logs[1].clear()
