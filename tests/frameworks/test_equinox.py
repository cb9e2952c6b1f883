"""equinox: Functions inside modules, under its filtered transformations, and modules as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.frameworks.pairs import INPUTS, Dense, DenseOfDict, hand_written_dense, loss_of
from tests.support.marks import cells, row

eqx = pytest.importorskip("equinox")


class Layer(eqx.Module):
    w: jax.Array
    op: object = eqx.field(static=True)
    scale: float = 1.0

    def __call__(self, x):
        return self.scale * jnp.tanh(self.op(x, self.w))


def loss(layer, x):
    return loss_of(layer(x))


def vmapped(layer, x):
    return loss_of(eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(None, 1), out_axes=1)(layer, x[:, None]))


def repeated(layer, x):
    return loss_of(jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0])


def rematted(layer, x):
    return loss_of(eqx.filter_checkpoint(lambda layer, x: layer(layer(x)))(layer, x))


def ensemble(layer, x):
    layers = eqx.tree_at(lambda layer: layer.w, layer, jnp.stack([layer.w, 2 * layer.w]))
    return eqx.filter_vmap(loss, in_axes=(eqx.if_array(0), None))(layers, x).sum()


OPS = {"array": Dense.apply, "dict": lambda x, w: DenseOfDict.apply(x, {"w": w})}
PROGRAMS = {"plain": loss, "vmap": vmapped, "scan": repeated, "remat": rematted, "ensemble": ensemble}
WRAPPINGS = {"eager": lambda f: f, "jit": eqx.filter_jit}


@row("L4")
@cells(
    "op, program, wrapping",
    [
        ("dict", "plain", "eager"),
        ("array", "vmap", "jit"),
        ("dict", "scan", "jit"),
        ("array", "remat", "eager"),
        ("dict", "ensemble", "jit"),
    ],
)
def test_gradients_inside_a_module(op, program, wrapping):
    differentiate = WRAPPINGS[wrapping](eqx.filter_value_and_grad(PROGRAMS[program]))
    w = jax.random.normal(jax.random.key(0), (4, 4))
    value, gradients = differentiate(Layer(w, OPS[op]), INPUTS)
    wanted, wanted_gradients = differentiate(Layer(w, hand_written_dense), INPUTS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradients.w, wanted_gradients.w, rtol=1e-5)
    assert np.abs(gradients.w).max() > 0.1


class Pair(eqx.Module):
    first: eqx.nn.Linear
    rest: list[eqx.nn.Linear]
    scale: float = 0.5

    def __call__(self, x):
        for layer in (self.first, *self.rest):
            x = jnp.tanh(layer(x))
        return self.scale * x


def linear(seed=0):
    return eqx.nn.Linear(4, 4, key=jax.random.key(seed))


def twice(layer):
    return eqx.nn.Sequential([layer, layer])


def pair(layer):
    return Pair(layer, [linear(1), linear(2)])


def some_of_pair(g):
    return {
        "first": {"weight": g.first.weight, "bias": None},
        "rest": [g.rest[0], {"bias": g.rest[1].bias}],
    }


# The module built from a layer, how backward returns its gradient, and which leaves of the layer have none.
GRADIENTS_OF_MODULES = {
    "module of gradients": (lambda layer: layer, lambda g: g, ()),
    "dict by attribute": (lambda layer: layer, lambda g: {"weight": g.weight, "bias": g.bias}, ()),
    "dict of some": (lambda layer: layer, lambda g: {"weight": g.weight}, (".bias",)),
    "filtered": (lambda layer: layer, lambda g: eqx.filter(g, eqx.is_inexact_array), ()),
    "one layer twice": (twice, lambda g: g, ()),
    "dict of nested modules": (pair, some_of_pair, (".first.bias", ".rest[1].weight")),
}


def calling(gradient):
    """A Function of x and a module, whose gradient is three times too large and goes through `gradient`."""

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.save_for_backward(x)
            ctx.module = module
            return module(x)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return None, gradient(eqx.filter_grad(lambda m: 3 * jnp.sum(m(x) * grad_output))(ctx.module))

    return Calls.apply


@row("L4", "C6")
@cells(
    "wrapping, kind",
    [
        ("jit", "module of gradients"),
        ("eager", "dict by attribute"),
        ("jit", "dict of some"),
        ("eager", "filtered"),
        ("eager", "one layer twice"),
        ("jit", "dict of nested modules"),
    ],
)
def test_the_gradient_of_a_module_may_be_what_equinox_returns(wrapping, kind):
    make, returned, without = GRADIENTS_OF_MODULES[kind]
    # The gradient by a module of which a layer is a part twice is that by the layer.
    module, build = (linear(), make) if make is twice else (make(linear()), lambda m: m)
    apply = calling(returned)
    got = WRAPPINGS[wrapping](eqx.filter_grad(lambda m, x: loss_of(apply(x, build(m)))))(module, INPUTS[0])
    wanted = eqx.filter_grad(lambda m, x: loss_of(build(m)(x)))(module, INPUTS[0])
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, gradient), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        factor = 0 if jax.tree_util.keystr(path) in without else 3
        np.testing.assert_allclose(gradient, factor * expected, rtol=1e-5, atol=1e-6)


@row("L4")
def test_state_is_returned():
    """equinox's modules cannot be changed; their state comes back as a result, through a Function too.

    It is marked non-differentiable, so that it is not batched if it is equal for all elements.
    """
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")

    class Normalized(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, norm, state):
            y, state = norm(x, state)
            ctx.mark_non_differentiable(*jax.tree.leaves(state))
            return y, state

        @staticmethod
        def backward(ctx, grad_output, _):
            return 2 * grad_output, None, None

    def run(op):
        return jax.vmap(lambda x: op(x, norm, state), axis_name="batch", out_axes=(0, None))(INPUTS)

    outputs, new_state = run(Normalized.apply)
    wanted, wanted_state = run(lambda x, norm, state: norm(x, state))
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-6)
    for got, expected in zip(jax.tree.leaves(new_state), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@row("L4", "C6")
@pytest.mark.parametrize(
    ("gradient", "problem"),
    [
        (lambda g: {"layer": (g,)}, r"there is nothing at \['layer'\]\[0\]"),
        (lambda g: {"layers": ({"weights": g}, None)}, r"there is nothing at \.layers\[0\]\['weights'\]"),
        (lambda g: {"layers": ({"weight": g},)}, r"nothing was returned for \.layers\[1\]\.weight"),
        (lambda g: eqx.nn.Linear(4, 5, key=jax.random.key(0)), r"there is nothing at \.weight"),
    ],
    ids=["name", "inner name", "index", "module"],
)
def test_a_gradient_of_a_module_with_other_names(gradient, problem):
    mlp = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    apply = calling(lambda _: gradient(jnp.ones((5, 4))))
    with pytest.raises(RuntimeError, match=rf"Calls\.backward .*input 1 \('module'\).*{problem}"):
        eqx.filter_grad(lambda m: loss_of(apply(INPUTS[0], m)))(mlp)


@row("K2")
def test_residuals_of_a_whole_model():
    """Activations, sizes, probabilities and flags in a module are static, as under `equinox.filter_vjp`."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.MLP(3, 5, 7, 2, key=keys[0]), eqx.nn.Dropout(0.3), eqx.nn.Linear(5, 2, key=keys[1])]
    model, x = eqx.nn.Sequential(layers), jnp.linspace(-1, 1, 12).reshape(4, 3)

    def mean(model, x, key):
        return jnp.mean(eqx.filter_jit(jax.vmap(lambda x: model(x, key=key)))(x) ** 2)

    table = jaxfn.residuals(mean, model, x, keys[2], argnums=0)
    _, pullback = eqx.filter_vjp(lambda model: mean(model, x, keys[2]), model)
    assert table.total_bytes == sum(a.nbytes for a in jax.tree.leaves(pullback) if eqx.is_array(a))
    names = {r.name for r in table if r.argument}
    assert names == {"args[1]", "args[0].layers[2].weight"} | {f"args[0].layers[0].layers[{i}].weight" for i in (1, 2)}
    # Types of arrays suffice, also in a model.
    types = eqx.filter_eval_shape(lambda: (model, x, keys[2]))
    assert jaxfn.residuals(mean, *types, argnums=0).to_dict() == table.to_dict()
