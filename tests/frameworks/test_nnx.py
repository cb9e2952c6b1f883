"""flax.nnx: Functions inside modules, and Variables and modules as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.frameworks.pairs import INPUTS, Dense, DenseOfDict, dense_by_hand, loss_of
from tests.support.marks import row

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")


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


def by_hand(x, w):
    return dense_by_hand(x, w[...])


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


def arrays(state):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state) if hasattr(state, "flat_state") else state)


@row("L4")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_gradients_inside_a_module(op, program, wrapping):
    differentiate = WRAPPINGS[wrapping](nnx.value_and_grad(PROGRAMS[program], argnums=(0, 1)))
    value, (of_layer, of_x) = differentiate(Layer(OPS[op], nnx.Rngs(0)), INPUTS)
    wanted, (wanted_of_layer, wanted_of_x) = differentiate(Layer(by_hand, nnx.Rngs(0)), INPUTS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(of_x, wanted_of_x, rtol=1e-5)
    np.testing.assert_allclose(of_layer["w"][...], wanted_of_layer["w"][...], rtol=1e-5)
    assert np.abs(of_x).max() > 0.1


@row("L4")
@pytest.mark.parametrize("op", OPS)
def test_layers_stacked_by_vmap_and_run_by_scan(op):
    def stacked(op):
        make = nnx.vmap(lambda key: Layer(op, nnx.Rngs(key)))
        return make(jax.random.split(jax.random.key(0), 3))

    def deep_loss(layers, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return loss_of(run(x, layers))

    gradients = nnx.jit(nnx.grad(deep_loss))(stacked(OPS[op]), INPUTS)
    wanted = nnx.grad(deep_loss)(stacked(by_hand), INPUTS)
    assert gradients["w"][...].shape == (3, 4, 4)
    np.testing.assert_allclose(gradients["w"][...], wanted["w"][...], rtol=1e-5)


@row("L4")
@pytest.mark.parametrize("op", OPS)
def test_training(op):
    def trained(op):
        layer = Layer(op, nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer, x):
            value, gradients = nnx.value_and_grad(loss)(layer, x)
            optimizer.update(layer, gradients)
            return value

        return [float(step(layer, optimizer, INPUTS)) for _ in range(5)], layer.w[...]

    values, w = trained(OPS[op])
    wanted_values, wanted_w = trained(by_hand)
    np.testing.assert_allclose(values, wanted_values, rtol=1e-5)
    np.testing.assert_allclose(w, wanted_w, rtol=1e-5)
    assert values[-1] < values[0]


@row("L4")
@pytest.mark.parametrize(
    "wrap", [lambda p: p, lambda p: {"w": p}, lambda p: [(p,), None]], ids=["bare", "dict", "list"]
)
@pytest.mark.parametrize("returned", ["array", "variable", "none"])
def test_a_variable_arrives_as_itself_anywhere_in_a_pytree(wrap, returned):
    seen = []

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


class CallsModule(jaxfn.Function):
    """Runs a module that it is handed."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        graph, state = nnx.split(ctx.module)
        _, pull = jax.vjp(lambda x, state: nnx.merge(graph, state)(x), x, state)
        of_x, of_state = pull(grad_output)
        return 2 * of_x, nnx.merge(graph, jax.tree.map(lambda g: 2 * g, of_state))


@row("L4")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_module_as_an_argument(wrapping):
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    differentiate = WRAPPINGS[wrapping](nnx.grad(lambda m, x: loss_of(CallsModule.apply(x, m)), argnums=(0, 1)))
    of_module, of_x = differentiate(linear, INPUTS)
    wanted_of_module, wanted_of_x = nnx.grad(lambda m, x: loss_of(m(x)), argnums=(0, 1))(linear, INPUTS)
    np.testing.assert_allclose(of_x, 2 * wanted_of_x, rtol=1e-5)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(of_module[name][...], 2 * wanted_of_module[name][...], rtol=1e-5)


class Tower(nnx.Module):
    """A module of modules, and a number that is no parameter."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, use_bias=False, rngs=rngs)])
        self.scale = 0.5

    def __call__(self, x):
        for layer in (self.first, *self.layers):
            x = jnp.tanh(layer(x))
        return self.scale * x


# How a backward may return the gradient of a module, of the State that nnx.grad returns.
GRADIENTS_OF_MODULES = {
    "state": lambda module, state: state,
    "state under jit": lambda module, state: jax.jit(lambda s: jax.tree.map(lambda g: 1 * g, s))(state),
    "module": lambda module, state: nnx.merge(nnx.graphdef(module), state),
    "pure dict": lambda module, state: nnx.to_pure_dict(state),
    "dict of variables": lambda module, state: dict(state),
}


def with_gradient_as(kind):
    """A Function of x and a module, whose gradients are twice the true ones."""

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.save_for_backward(x)
            ctx.module = module
            return module(x)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            of_module, of_x = nnx.grad(lambda m, x: 2 * jnp.sum(m(x) * grad_output), argnums=(0, 1))(ctx.module, x)
            return of_x, GRADIENTS_OF_MODULES[kind](ctx.module, of_module)

    return Calls.apply


@row("L4", "C6")
@pytest.mark.parametrize("kind", GRADIENTS_OF_MODULES)
@pytest.mark.parametrize("make", [lambda rngs: nnx.Linear(4, 3, rngs=rngs), Tower], ids=["linear", "tower"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_gradient_of_a_module_may_be_what_flax_returns(wrapping, make, kind):
    module = make(nnx.Rngs(0))
    apply = with_gradient_as(kind)
    differentiate = WRAPPINGS[wrapping](nnx.grad(lambda m, x: loss_of(apply(x, m)), argnums=(0, 1)))
    of_module, of_x = differentiate(module, INPUTS)
    wanted_of_module, wanted_of_x = nnx.grad(lambda m, x: loss_of(m(x)), argnums=(0, 1))(module, INPUTS)
    np.testing.assert_allclose(of_x, 2 * wanted_of_x, rtol=1e-5)
    for ours, wanted in zip(*map(jax.tree.leaves, (of_module, wanted_of_module)), strict=True):
        np.testing.assert_allclose(ours, 2 * wanted, rtol=1e-5, atol=1e-6)


@row("L4", "C6")
@pytest.mark.parametrize("missing", ["kernel", "bias"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_gradient_of_a_module_by_attribute_names_may_leave_some_out(wrapping, missing):
    present = "bias" if missing == "kernel" else "kernel"

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, linear):
            ctx.save_for_backward(x)
            return linear(x)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return None, {present: 3 * (x.T @ grad_output if present == "kernel" else grad_output.sum(0))}

    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    got = WRAPPINGS[wrapping](nnx.grad(lambda m: loss_of(Calls.apply(INPUTS, m))))(linear)
    wanted = nnx.grad(lambda m: loss_of(m(INPUTS)))(linear)
    np.testing.assert_allclose(got[present][...], 3 * wanted[present][...], rtol=1e-5)
    np.testing.assert_array_equal(got[missing][...], 0 * wanted[missing][...])


@row("L4", "C6")
def test_a_gradient_of_a_module_by_a_name_that_it_does_not_have_is_refused():
    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, linear):
            return linear(x)

        @staticmethod
        def backward(ctx, grad_output):
            return None, {"weight": grad_output.sum(0)}

    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match=r"Calls\.backward[\s\S]*input 1 \('linear'\)[\s\S]*weight"):
        nnx.grad(lambda m: loss_of(Calls.apply(INPUTS, m)))(linear)


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


STATES = {"mean": batch_norm, "count": dropout, "": Counting}


@row("L4")
@pytest.mark.parametrize("place", STATES)
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"layer": m}], ids=["bare", "dict"])
@pytest.mark.parametrize("surrounding", ["eager", "grad", "jit"])
def test_state_that_forward_changes_is_refused(place, wrap, surrounding):
    class Same(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, tree):
            return (tree["layer"] if isinstance(tree, dict) else tree)(x)

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output, None

    def run(module, x):
        return Same.apply(x, wrap(module)).sum()

    def differentiated(module, x):
        return jax.grad(lambda x: run(module, x))(x)

    surrounded = {"eager": run, "grad": differentiated, "jit": nnx.jit(run)}[surrounding]
    with pytest.raises(NotImplementedError, match=r"Same\.forward changed input 1 \('tree'\)") as caught:
        surrounded(STATES[place](), INPUTS)
    assert place in str(caught.value) and "Return the new state from forward" in str(caught.value)


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


@row("L4")
@pytest.mark.parametrize(
    "value",
    [(jnp.ones(2), jnp.ones(3)), {"a": jnp.ones(2)}, {"a": jnp.ones(2), "b": 2 * jnp.ones(2)}, None],
    ids=["tuple", "dict of one", "dict", "nothing"],
)
@pytest.mark.parametrize("place", [lambda variable: variable, lambda variable: [variable]], ids=["bare", "in a list"])
def test_a_variable_that_holds_a_pytree(value, place):
    def plain(holder, x):
        return jnp.sin(x) * (1 + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(holder)))

    class Same(jaxfn.Function):
        @staticmethod
        def forward(ctx, holder, x):
            ctx.given = holder, x
            return plain(holder, x)

        @staticmethod
        def backward(ctx, grad_output):
            return jax.vjp(plain, *ctx.given)[1](grad_output)

    def gradient(f):
        return jax.grad(lambda holder, x: loss_of(f(holder, x)), argnums=(0, 1))(place(nnx.Param(value)), INPUTS)

    for ours, wanted in zip(*map(jax.tree.leaves, (gradient(Same.apply), gradient(plain))), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)


class Product(jaxfn.Function):
    """With a batching rule, and gradients that are three times too large."""

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
@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"w": p}], ids=["bare", "dict"])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_batching_rule_is_told_the_axis_of_a_variable(wrap, axis):
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0).reshape(2, 3) + 1
    given = {0: w.T, 1: w, None: w[:, 0]}[axis]
    product = jax.vmap(lambda x, w: Product.apply(x, wrap(nnx.Param(w))), in_axes=(1, axis), out_axes=1)
    factor = w if axis is not None else w[:, :1]
    np.testing.assert_allclose(product(x, given), x * factor)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(product(x, given))))(x)
    np.testing.assert_allclose(gradient, 3 * factor * jnp.cos(x * factor), rtol=1e-5)


@row("L4", "E3")
@pytest.mark.parametrize("surrounding", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_state_that_a_forward_with_a_batching_rule_changes_is_refused(surrounding):
    class Same(Product):
        @staticmethod
        def forward(x, tree):
            return tree(x)

    norm = batch_norm()
    with pytest.raises(NotImplementedError, match=r"Same\.forward changed input 1 \('tree'\)"):
        surrounding(lambda x: Same.apply(x, norm).sum())(INPUTS)


class Block(nnx.Module):
    """A module with lists, dicts, statistics and Python values."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.factors = nnx.Dict(a=nnx.Param(jnp.arange(4.0)), b=nnx.Param(jnp.float32(2)))
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.power = 2

    def __call__(self, x):
        for layer in [self.first, *self.layers]:
            x = jnp.tanh(layer(x))
        return self.norm(self.factors.b * x + self.factors.a) ** self.power


def pulled(module, x, grad_output):
    """Returns the gradients of x and of the module's parameters, an `nnx.State`."""
    graph, parameters, others = nnx.split(module, nnx.Param, ...)
    _, pull = jax.vjp(lambda x, parameters: nnx.merge(graph, parameters, others)(x), x, parameters)
    return pull(grad_output)


def without(names, *, of):
    """Returns a nested dict without one entry, and otherwise the same."""
    name, *rest = names
    return {k: without(rest, of=v) if k == name else v for k, v in of.items() if rest or k != name}


GRADIENTS = {
    "the state of the parameters": lambda gradient: gradient,
    "a pure dict": nnx.to_pure_dict,
    "a dict of dicts and states": dict,
    "a module of such gradients": lambda gradient: nnx.merge(nnx.graphdef(Block(nnx.Rngs(0))), gradient, STATISTICS),
    "a dict, some of it None": lambda gradient: nnx.to_pure_dict(gradient) | {"norm": None},
    "a dict without a module": lambda gradient: without(["norm"], of=nnx.to_pure_dict(gradient)),
    "a dict without a parameter": lambda gradient: without(["norm", "bias"], of=nnx.to_pure_dict(gradient)),
    "a dict without an item": lambda gradient: without(["layers", 1], of=nnx.to_pure_dict(gradient)),
}
STATISTICS = nnx.state(Block(nnx.Rngs(0)), nnx.BatchStat)
LEFT_OUT = {
    "a dict, some of it None": [("norm", "scale"), ("norm", "bias")],
    "a dict without a module": [("norm", "scale"), ("norm", "bias")],
    "a dict without a parameter": [("norm", "bias")],
    "a dict without an item": [("layers", 1, "kernel"), ("layers", 1, "bias")],
}


@row("L4", "C6")
@pytest.mark.parametrize("returned", GRADIENTS)
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"block": [m]}], ids=["bare", "in a dict"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_gradient_of_a_module_with_lists_dicts_and_statistics(returned, wrap, wrapping):
    """It may be what nnx gives for one. What is left out has none."""

    class Calls(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, tree):
            ctx.save_for_backward(x)
            (ctx.module,) = jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, Block))
            return ctx.module(x)

        @staticmethod
        def backward(ctx, grad_output):
            of_x, of_parameters = pulled(ctx.module, *ctx.saved_tensors, grad_output)
            return of_x, wrap(GRADIENTS[returned](jax.tree.map(lambda g: 3 * g, of_parameters)))

    block = Block(nnx.Rngs(0))
    differentiate = WRAPPINGS[wrapping](nnx.grad(lambda m: loss_of(Calls.apply(INPUTS, wrap(m)))))
    wanted = dict(nnx.to_flat_state(nnx.grad(lambda m: loss_of(m(INPUTS)))(block)))
    got = dict(nnx.to_flat_state(differentiate(block)))
    assert got.keys() == wanted.keys()
    for path, gradient in got.items():
        factor = 0 if path in LEFT_OUT.get(returned, ()) else 3
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
