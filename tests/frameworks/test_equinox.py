"""equinox: Functions inside modules, under its filtered transformations, and modules as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.frameworks.pairs import INPUTS, Dense, DenseOfDict, dense_by_hand, loss_of
from tests.support.marks import row

eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")


class Layer(eqx.Module):
    w: jax.Array
    op: object = eqx.field(static=True)
    scale: float = 1.0

    def __call__(self, x):
        return self.scale * jnp.tanh(self.op(x, self.w))


def layer(op, seed=0):
    return Layer(jax.random.normal(jax.random.key(seed), (4, 4)), op)


OPS = {"array": Dense.apply, "dict": lambda x, w: DenseOfDict.apply(x, {"w": w})}


def loss(layer, x):
    return loss_of(layer(x))


def vmapped(layer, x):
    return loss_of(eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(None, 1), out_axes=1)(layer, x[:, None]))


def repeated(layer, x):
    return loss_of(jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0])


def rematted(layer, x):
    return loss_of(eqx.filter_checkpoint(lambda layer, x: layer(layer(x)))(layer, x))


PROGRAMS = {"plain": loss, "vmap": vmapped, "scan": repeated, "remat": rematted}


@row("L4")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_gradients_inside_a_module(op, program, wrap):
    differentiate = wrap(eqx.filter_value_and_grad(PROGRAMS[program]))
    value, gradients = differentiate(layer(OPS[op]), INPUTS)
    wanted, wanted_gradients = differentiate(layer(dense_by_hand), INPUTS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradients.w, wanted_gradients.w, rtol=1e-5)
    assert np.abs(gradients.w).max() > 0.1


@row("L4")
@pytest.mark.parametrize("op", OPS)
def test_an_ensemble(op):
    def losses(op):
        layers = eqx.filter_vmap(lambda seed: layer(op, 0) if seed is None else eqx.tree_at(_w, layer(op), seed))(
            jax.random.normal(jax.random.key(2), (3, 4, 4))
        )
        return eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(eqx.if_array(0), None))(layers, INPUTS)

    np.testing.assert_allclose(losses(OPS[op]).w, losses(dense_by_hand).w, rtol=1e-5)


def _w(layer):
    return layer.w


@row("L4")
def test_training():
    def trained(op):
        model = layer(op)
        optimizer = optax.adam(0.1)
        state = optimizer.init(eqx.filter(model, eqx.is_array))

        @eqx.filter_jit
        def step(model, state, x):
            value, gradients = eqx.filter_value_and_grad(loss)(model, x)
            updates, state = optimizer.update(gradients, state)
            return eqx.apply_updates(model, updates), state, value

        values = []
        for _ in range(5):
            model, state, value = step(model, state, INPUTS)
            values.append(float(value))
        return values

    values = trained(Dense.apply)
    np.testing.assert_allclose(values, trained(dense_by_hand), rtol=1e-5)
    assert values[-1] < values[0]


class CallsModule(jaxfn.Function):
    """Runs a module that it is handed, and doubles all gradients."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        arrays, static = eqx.partition(ctx.module, eqx.is_inexact_array)
        _, pull = jax.vjp(lambda x, arrays: eqx.combine(arrays, static)(x), x, arrays)
        of_x, of_module = pull(grad_output)
        return 2 * of_x, jax.tree.map(lambda g: 2 * g, of_module)


@row("L4")
@pytest.mark.parametrize("nested", [lambda m: m, lambda m: eqx.nn.Sequential([m, m])], ids=["one", "shared twice"])
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_a_module_as_an_argument(nested, wrap):
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    x = INPUTS[0]
    gradients = wrap(eqx.filter_grad(lambda m, x: loss_of(CallsModule.apply(x, nested(m)))))(linear, x)
    wanted = eqx.filter_grad(lambda m, x: loss_of(nested(m)(x)))(linear, x)
    np.testing.assert_allclose(gradients.weight, 2 * wanted.weight, rtol=1e-5)
    np.testing.assert_allclose(gradients.bias, 2 * wanted.bias, rtol=1e-5)


# How a backward may return the gradient of a module, of the module of gradients that equinox returns.
GRADIENTS_OF_MODULES = {
    "module of gradients": lambda gradients: gradients,
    "dict by attribute": lambda gradients: {"weight": gradients.weight, "bias": gradients.bias},
    "dict of some": lambda gradients: {"weight": gradients.weight},
    "filtered": lambda gradients: eqx.filter(gradients, eqx.is_inexact_array),
}


@row("L4", "C6")
@pytest.mark.parametrize("kind", GRADIENTS_OF_MODULES)
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_the_gradient_of_a_module_may_be_what_equinox_returns(wrap, kind):
    """Three times too large."""

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.given = x, module
            return module(x)

        @staticmethod
        def backward(ctx, grad_output):
            x, module = ctx.given
            gradients = eqx.filter_grad(lambda m: 3 * jnp.sum(m(x) * grad_output))(module)
            return None, GRADIENTS_OF_MODULES[kind](gradients)

    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    gradients = wrap(eqx.filter_grad(lambda m, x: loss_of(Calls.apply(x, m))))(linear, INPUTS[0])
    wanted = eqx.filter_grad(lambda m, x: loss_of(m(x)))(linear, INPUTS[0])
    np.testing.assert_allclose(gradients.weight, 3 * wanted.weight, rtol=1e-5)
    np.testing.assert_allclose(
        gradients.bias, 0 * wanted.bias if kind == "dict of some" else 3 * wanted.bias, rtol=1e-5
    )


@row("L4", "C6")
@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_the_gradient_of_nested_modules_by_attribute_names(wrap):
    class Pair(eqx.Module):
        first: eqx.nn.Linear
        rest: list[eqx.nn.Linear]
        scale: float = 0.5

        def __call__(self, x):
            for layer in (self.first, *self.rest):
                x = jnp.tanh(layer(x))
            return self.scale * x

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.given = x, module
            return module(x)

        @staticmethod
        def backward(ctx, grad_output):
            x, module = ctx.given
            g = eqx.filter_grad(lambda m: 3 * jnp.sum(m(x) * grad_output))(module)
            return None, {
                "first": {"weight": g.first.weight, "bias": None},
                "rest": [g.rest[0], {"bias": g.rest[1].bias}],
            }

    keys = jax.random.split(jax.random.key(0), 3)
    pair = Pair(eqx.nn.Linear(4, 4, key=keys[0]), [eqx.nn.Linear(4, 4, key=key) for key in keys[1:]])
    got = wrap(eqx.filter_grad(lambda m, x: loss_of(Calls.apply(x, m))))(pair, INPUTS[0])
    wanted = eqx.filter_grad(lambda m, x: loss_of(m(x)))(pair, INPUTS[0])
    for name, factor in (("weight", 3), ("bias", 0)):
        np.testing.assert_allclose(getattr(got.first, name), factor * getattr(wanted.first, name), rtol=1e-5)
    for layer, factors in ((0, (3, 3)), (1, (0, 3))):
        for name, factor in zip(("weight", "bias"), factors, strict=True):
            ours, theirs = getattr(got.rest[layer], name), getattr(wanted.rest[layer], name)
            np.testing.assert_allclose(ours, factor * theirs, rtol=1e-5, atol=1e-6)


@row("L4")
def test_state_is_returned():
    """equinox's modules cannot be changed; their state comes back as a result, through a Function too.

    It is marked non-differentiable, so that it has no batch where it is the same for all elements.
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
    class Calls(CallsModule):
        @staticmethod
        def backward(ctx, grad_output):
            return None, gradient(jnp.ones((5, 4)))

    mlp = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    with pytest.raises(RuntimeError, match=rf"Calls\.backward .*input 1 \('module'\).*{problem}"):
        eqx.filter_grad(lambda m: loss_of(Calls.apply(INPUTS[0], m)))(mlp)
