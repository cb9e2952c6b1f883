"""flax.nnx: Functions inside modules, and Variables and modules as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.frameworks.pairs import INPUTS, Dense, DenseOfDict, hand_written_dense, loss_of
from tests.support.marks import cells, row

nnx = pytest.importorskip("flax.nnx")


class Layer(nnx.Module):
    def __init__(self, op, rngs):
        self.op = op
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x):
        return jnp.tanh(self.op(x, self.w))


OPS = {
    "variable": Dense.apply,
    "variable in a dict": lambda x, w: DenseOfDict.apply(x, {"w": w}),
    "value": lambda x, w: Dense.apply(x, w[...]),
}


def hand_written(x, w):
    return hand_written_dense(x, w[...])


def loss(layer, x):
    return loss_of(layer(x))


def vmapped(layer, x):
    return loss_of(
        nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 1), out_axes=1)(layer, x[:, :, None].swapaxes(1, 2))
    )


def repeated(layer, x):
    def step(x, _):
        return layer(x), None

    return loss_of(jax.lax.scan(step, x, None, length=3)[0])


def rematted(layer, x):
    return loss_of(nnx.remat(lambda layer, x: layer(layer(x)))(layer, x))


def chosen(layer, x):
    return nnx.cond(x.sum() > 0, lambda layer, x: loss(layer, x), lambda layer, x: 2 * loss(layer, x), layer, x)


PROGRAMS = {"plain": loss, "vmap": vmapped, "scan": repeated, "remat": rematted, "cond": chosen}
WRAPPINGS = {"eager": lambda f: f, "jit": nnx.jit}
# A Variable or a module as an argument, or in a pytree that is one.
TREES = {"bare": lambda v: v, "dict": lambda v: {"w": v}, "list": lambda v: [(v,), None]}


@row("L4")
@cells(
    "op, program, wrapping",
    [
        ("variable", "plain", "eager"),
        ("value", "vmap", "eager"),
        ("variable in a dict", "vmap", "jit"),
        ("variable", "scan", "jit"),
        ("variable in a dict", "remat", "eager"),
        ("variable", "cond", "jit"),
    ],
)
def test_gradients_inside_a_module(op, program, wrapping):
    differentiate = WRAPPINGS[wrapping](nnx.value_and_grad(PROGRAMS[program], argnums=(0, 1)))
    value, (of_layer, of_x) = differentiate(Layer(OPS[op], nnx.Rngs(0)), INPUTS)
    wanted, (wanted_of_layer, wanted_of_x) = differentiate(Layer(hand_written, nnx.Rngs(0)), INPUTS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(of_x, wanted_of_x, rtol=1e-5)
    np.testing.assert_allclose(of_layer["w"][...], wanted_of_layer["w"][...], rtol=1e-5)
    assert np.abs(of_x).max() > 0.1


@row("L4")
def test_layers_stacked_by_vmap_and_run_by_scan():
    def stacked(op):
        make = nnx.vmap(lambda key: Layer(op, nnx.Rngs(key)))
        return make(jax.random.split(jax.random.key(0), 3))

    def deep_loss(layers, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return loss_of(run(x, layers))

    gradients = nnx.jit(nnx.grad(deep_loss))(stacked(OPS["variable in a dict"]), INPUTS)
    wanted = nnx.grad(deep_loss)(stacked(hand_written), INPUTS)
    assert gradients["w"][...].shape == (3, 4, 4)
    np.testing.assert_allclose(gradients["w"][...], wanted["w"][...], rtol=1e-5)


@row("L4")
@pytest.mark.parametrize(
    "tree, returned", [("bare", "array"), ("dict", "variable"), ("list", "variable"), ("list", "none")]
)
def test_a_variable_arrives_as_itself_anywhere_in_a_pytree(tree, returned):
    wrap, seen = TREES[tree], []

    class Scale(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, tree):
            (box,) = jax.tree.leaves(tree, is_leaf=lambda v: isinstance(v, nnx.Variable))
            seen.append(type(box))
            ctx.save_for_backward(x, box)
            ctx.tree = tree
            return x * box

        @staticmethod
        def backward(ctx, grad_output):
            x, box = ctx.saved_tensors
            seen.append(type(box))
            gradient = {"array": 5 * x, "variable": nnx.Param(5 * x), "none": None}[returned]
            return grad_output * box, None if gradient is None else wrap(gradient)

    x, w = jnp.arange(3.0), jnp.arange(3.0) + 1
    assert jnp.array_equal(Scale.apply(x, wrap(nnx.Param(w))), x * w)
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        gradient = differentiate(lambda w: Scale.apply(x, wrap(nnx.Param(w))).sum())(w)
        assert jnp.array_equal(gradient, 5 * x if returned != "none" else 0 * x)
    assert set(seen) == {nnx.Param}


@row("L4")
@pytest.mark.parametrize(
    "value",
    [(jnp.ones(2), jnp.ones(3)), {"a": jnp.ones(2)}, {"a": jnp.ones(2), "b": 2 * jnp.ones(2)}, None],
    ids=["tuple", "dict of one", "dict", "nothing"],
)
@pytest.mark.parametrize("tree", ["bare", "list"])
def test_a_variable_that_holds_a_pytree(value, tree):
    def plain(holder, x):
        return jnp.sin(x) * (1 + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(holder)))

    class Same(jaxfn.Function):
        @staticmethod
        def forward(ctx, holder, x):
            ctx.stored = holder, x
            return plain(holder, x)

        @staticmethod
        def backward(ctx, grad_output):
            return jax.vjp(plain, *ctx.stored)[1](grad_output)

    def gradient(f):
        return jax.grad(lambda holder, x: loss_of(f(holder, x)), argnums=(0, 1))(TREES[tree](nnx.Param(value)), INPUTS)

    for ours, wanted in zip(*map(jax.tree.leaves, (gradient(Same.apply), gradient(plain))), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)


class Product(jaxfn.Function):
    """A product with a batching rule, and gradients that are three times too large."""

    @staticmethod
    def forward(x, tree):
        return x * jax.tree.leaves(tree)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(jax.tree.leaves(inputs[1])[0])

    @staticmethod
    def backward(ctx, grad_output):
        (w,) = ctx.saved_tensors
        return 3 * grad_output * w, None

    @staticmethod
    def vmap(info, in_dims, x, tree):
        (dim,) = jax.tree.leaves(in_dims[1], is_leaf=lambda v: v is None)
        assert dim is None or isinstance(dim, int)
        move = [
            a if d is None else jnp.moveaxis(a, d, 0) for a, d in ((x, in_dims[0]), (jax.tree.leaves(tree)[0], dim))
        ]
        return move[0] * move[1], 0


@row("L4", "E3")
@pytest.mark.parametrize("tree, axis", [("bare", 0), ("dict", 0), ("dict", 1), ("bare", None)])
def test_a_batching_rule_receives_the_axis_of_a_variable(tree, axis):
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0).reshape(2, 3) + 1
    variable = {0: w.T, 1: w, None: w[:, 0]}[axis]
    product = jax.vmap(lambda x, w: Product.apply(x, TREES[tree](nnx.Param(w))), in_axes=(1, axis), out_axes=1)
    factor = w if axis is not None else w[:, :1]
    np.testing.assert_allclose(product(x, variable), x * factor)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(product(x, variable))))(x)
    np.testing.assert_allclose(gradient, 3 * factor * jnp.cos(x * factor), rtol=1e-5)


def batch_norm():
    return nnx.BatchNorm(4, rngs=nnx.Rngs(0))


def dropout():
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class Counting(nnx.Module):
    """Counts in a Python number."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x


class RunsModule(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, tree):
        return jax.tree.leaves(tree, is_leaf=callable)[0](x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class RunsModuleWithBatchingRule(Product):
    @staticmethod
    def forward(x, tree):
        return tree(x)


def eager(f):
    return f


def grad_by_x(f):
    return lambda module, x: jax.grad(lambda x: f(module, x))(x)


@row("L4")
@pytest.mark.parametrize(
    "function, make, changed, tree, surround",
    [
        (RunsModule, batch_norm, "mean", "bare", eager),
        (RunsModule, batch_norm, "mean", "dict", nnx.jit),
        (RunsModule, dropout, "count", "dict", eager),
        (RunsModule, dropout, "count", "bare", grad_by_x),
        (RunsModule, Counting, "", "bare", nnx.jit),
        (RunsModule, Counting, "", "dict", grad_by_x),
        (RunsModuleWithBatchingRule, batch_norm, "", "bare", eager),
        (RunsModuleWithBatchingRule, batch_norm, "", "bare", grad_by_x),
    ],
)
def test_state_that_forward_changes_raises(function, make, changed, tree, surround):
    run = surround(lambda module, x: function.apply(x, TREES[tree](module)).sum())
    with pytest.raises(
        NotImplementedError, match=rf"{function.__name__}\.forward changed input 1 \('tree'\)"
    ) as caught:
        run(make(), INPUTS)
    assert changed in str(caught.value) and "Return the new state from forward" in str(caught.value)


@row("L4")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_state_that_forward_returns(wrapping):
    class Normalized(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, norm):
            return norm(x), nnx.state(norm, nnx.BatchStat)

        @staticmethod
        def backward(ctx, grad_output, _):
            return grad_output, None

    def step(norm, x):
        y, state = Normalized.apply(x, norm)
        nnx.update(norm, state)
        return y

    norm, plain = batch_norm(), batch_norm()
    np.testing.assert_allclose(WRAPPINGS[wrapping](step)(norm, INPUTS), plain(INPUTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.mean[...], plain.mean[...], rtol=1e-5)
    assert np.abs(norm.mean[...]).max() > 0


class Block(nnx.Module):
    """A module with lists, dicts, statistics and Python values, and one layer without a bias."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 2, use_bias=False, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])
        self.factors = nnx.Dict(a=nnx.Param(jnp.arange(2.0)), b=nnx.Param(jnp.float32(2)))
        self.norm = nnx.BatchNorm(2, use_running_average=True, rngs=rngs)
        self.power = 2

    def __call__(self, x):
        for layer in [self.first, *self.layers]:
            x = jnp.tanh(layer(x))
        return self.norm(self.factors.b * x + self.factors.a) ** self.power


def without(names, *, of):
    """Returns a nested dict without one entry."""
    name, *rest = names
    return {k: without(rest, of=v) if k == name else v for k, v in of.items() if rest or k != name}


STATISTICS = nnx.state(Block(nnx.Rngs(0)), nnx.BatchStat)
NORM, LAST = [("norm", "scale"), ("norm", "bias")], [("layers", 1, "kernel"), ("layers", 1, "bias")]
# How backward returns the gradient of a module, from the `nnx.State` of its parameters; and what of it is left out.
GRADIENTS = {
    "a state": (lambda gradient: gradient, []),
    "a state from jit": (jax.jit(lambda gradient: jax.tree.map(lambda g: 1 * g, gradient)), []),
    "a pure dict": (nnx.to_pure_dict, []),
    "a dict of dicts and states": (dict, []),
    "a module": (lambda gradient: nnx.merge(nnx.graphdef(Block(nnx.Rngs(0))), gradient, STATISTICS), []),
    "a dict, some of it None": (lambda gradient: nnx.to_pure_dict(gradient) | {"norm": None}, NORM),
    "a dict without a module": (lambda gradient: without(["norm"], of=nnx.to_pure_dict(gradient)), NORM),
    "a dict without a parameter": (
        lambda gradient: without(["norm", "bias"], of=nnx.to_pure_dict(gradient)), [("norm", "bias")],
    ),
    "a dict without an item": (lambda gradient: without(["layers", 1], of=nnx.to_pure_dict(gradient)), LAST),
}  # fmt: skip


@row("L4", "C6")
@pytest.mark.parametrize(
    "returned, tree, wrapping",
    [
        ("a state", "bare", "eager"),
        ("a state from jit", "dict", "jit"),
        ("a pure dict", "list", "jit"),
        ("a dict of dicts and states", "bare", "jit"),
        ("a module", "bare", "eager"),
        ("a module", "list", "jit"),
        ("a dict, some of it None", "dict", "eager"),
        ("a dict without a module", "bare", "jit"),
        ("a dict without a parameter", "list", "eager"),
        ("a dict without an item", "dict", "jit"),
    ],
)
def test_the_gradient_of_a_module_may_be_what_flax_returns(returned, tree, wrapping):
    """It is three times too large. What is left out has none."""
    wrap, (convert, left_out) = TREES[tree], GRADIENTS[returned]

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, tree):
            ctx.save_for_backward(x)
            (ctx.module,) = jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, Block))
            return ctx.module(x)

        @staticmethod
        def backward(ctx, grad_output):
            graph, parameters, others = nnx.split(ctx.module, nnx.Param, ...)
            _, pullback = jax.vjp(lambda x, p: nnx.merge(graph, p, others)(x), *ctx.saved_tensors, parameters)
            of_x, of_parameters = pullback(3 * grad_output)
            return of_x, wrap(convert(of_parameters))

    block = Block(nnx.Rngs(0))
    differentiate = WRAPPINGS[wrapping](nnx.grad(lambda m, x: loss_of(Calls.apply(x, wrap(m))), argnums=(0, 1)))
    wanted, wanted_of_x = nnx.grad(lambda m, x: loss_of(m(x)), argnums=(0, 1))(block, INPUTS)
    got, of_x = differentiate(block, INPUTS)
    np.testing.assert_allclose(of_x, 3 * wanted_of_x, rtol=1e-3, atol=1e-3)
    got, wanted = dict(nnx.to_flat_state(got)), dict(nnx.to_flat_state(wanted))
    assert got.keys() == wanted.keys()
    for path, gradient in got.items():
        factor = 0 if path in left_out else 3
        np.testing.assert_allclose(gradient[...], factor * wanted[path][...], rtol=1e-3, atol=1e-3, err_msg=str(path))
        assert np.abs(wanted[path][...]).max() > 0.1


@row("L4", "C6")
@pytest.mark.parametrize(
    ("gradient", "problem"),
    [
        (lambda g: {"first": {"kernels": g}}, r"there is nothing at \.first\['kernels'\]"),
        (lambda g: {"layers": {2: {"kernel": g}}}, r"there is nothing at \.layers\[2\]\['kernel'\]"),
        (lambda g: {"first": g}, r"one value was returned at \.first, where several leaves belong"),
        (lambda g: nnx.State({"first": {"kernel": {"w": g}}}), r"nothing was returned for \.first\.kernel"),
        (lambda g: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), r"there is nothing at \.bias"),
    ],
    ids=["name", "index", "array", "subtree", "module"],
)
def test_a_gradient_of_a_module_with_other_names(gradient, problem):
    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, module):
            return module(x)

        @staticmethod
        def backward(ctx, grad_output):
            return None, gradient(jnp.ones((4, 4)))

    with pytest.raises(RuntimeError, match=rf"Calls\.backward .*input 1 \('module'\).*{problem}"):
        nnx.grad(lambda m: loss_of(Calls.apply(INPUTS, m)))(Block(nnx.Rngs(0)))


class Stateful(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.activation = nnx.gelu

    def __call__(self, x):
        return self.dropout(self.norm(self.activation(self.dense(x))))


@row("K2")
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_residuals_of_a_module_with_state(argnums):
    model, x = Stateful(nnx.Rngs(0)), jnp.linspace(-1, 1, 12).reshape(4, 3)
    structure, state = nnx.split(model)

    def mean(model, x):
        return jnp.mean(model(x) ** 2)

    def of_differentiated(*values):
        merged = dict(zip([argnums] if isinstance(argnums, int) else argnums, values, strict=True))
        return mean(nnx.merge(structure, merged.get(0) or jax.tree.map(lambda a: a, state)), merged.get(1, x))

    differentiated = [(state, x)[i] for i in ([argnums] if isinstance(argnums, int) else argnums)]
    kept = jax.eval_shape(lambda *args: jax.tree.leaves(jax.vjp(of_differentiated, *args)[1]), *differentiated)
    table = jaxfn.residuals(mean, model, x, argnums=argnums, policies={"default": None})
    assert table.total_bytes["no checkpoint"] == sum(a.size * a.dtype.itemsize for a in kept)
    assert {r.argument for r in table["default"]} >= {"args[0].norm.scale.value", "args[0].dropout.rngs.key.value"}
    assert float(jnp.abs(model.norm.mean[...]).sum()) == 0  # the caller's module is unchanged
