"""flax.linen and haiku: Functions inside modules whose parameters are pytrees, and checkpoints of those by orbax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.frameworks.pairs import INPUTS, Dense, DenseOfDict, hand_written_dense, loss_of
from tests.support.marks import row

OPS = {"array": Dense.apply, "dict": lambda x, w: DenseOfDict.apply(x, {"w": w})}


def assert_same_trees(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def linen_layer(op):
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (x.shape[-1], 4))
            seen = self.variable("batch_stats", "seen", jnp.zeros, ())
            if not self.is_initializing():
                seen.value += x.sum()
            return jnp.tanh(op(x, w))

    return Layer


def eager(f):
    return f


def plain(layer):
    return layer()


def rematted(layer):
    nn = pytest.importorskip("flax.linen")
    return nn.remat(layer)()


def scanned(layer):
    nn = pytest.importorskip("flax.linen")

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return layer()(x), None

    repeat = nn.scan(
        Step, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=3, in_axes=nn.broadcast
    )

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            return repeat()(x, None)[0]

    return Deep()


def vmapped(layer):
    nn = pytest.importorskip("flax.linen")
    lifted = nn.vmap(
        layer, in_axes=1, out_axes=1, variable_axes={"params": None, "batch_stats": 0}, split_rngs={"params": False}
    )

    class Batched(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lifted()(x[:, None])

    return Batched()


@row("L4")
@pytest.mark.parametrize(
    "op, lift, wrap",
    [("dict", plain, eager), ("array", rematted, jax.jit), ("dict", scanned, jax.jit), ("array", vmapped, eager)],
)
def test_linen(op, lift, wrap):
    def gradients(op):
        module = lift(linen_layer(op))
        variables = module.init(jax.random.key(0), INPUTS)

        def loss(parameters, x):
            outputs, state = module.apply(
                {"params": parameters, "batch_stats": variables["batch_stats"]}, x, mutable=["batch_stats"]
            )
            return loss_of(outputs), state

        return wrap(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], INPUTS)

    got, state = gradients(OPS[op])
    wanted, wanted_state = gradients(hand_written_dense)
    assert_same_trees(got, wanted)
    assert_same_trees(state, wanted_state)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves((got, state)))


@row("L4")
@pytest.mark.parametrize("op, lift", [("array", "plain"), ("dict", "remat"), ("array", "scan"), ("dict", "vmap")])
def test_haiku(op, lift):
    hk = pytest.importorskip("haiku")

    def gradients(op):
        def layer(x):
            return jnp.tanh(op(x, hk.get_parameter("w", (4, 4), init=hk.initializers.RandomNormal())))

        def forward(x):
            if lift == "remat":
                return hk.remat(layer)(x)
            if lift == "scan":
                return hk.layer_stack(3)(layer)(x)
            if lift == "vmap":
                return hk.vmap(layer, in_axes=1, out_axes=1, split_rng=False)(x[:, None])
            return layer(x)

        transformed = hk.without_apply_rng(hk.transform(forward))
        parameters = transformed.init(jax.random.key(0), INPUTS)
        return jax.jit(jax.grad(lambda p, x: loss_of(transformed.apply(p, x)), argnums=(0, 1)))(parameters, INPUTS)

    got = gradients(OPS[op])
    assert_same_trees(got, gradients(hand_written_dense))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(got))


@row("L4")
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # orbax's own advice
def test_training_goes_on_from_a_checkpoint(tmp_path):
    """Trains with optax and orbax: five steps equal two, a checkpoint, and three."""
    optax = pytest.importorskip("optax")
    checkpoint = pytest.importorskip("orbax.checkpoint")
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(parameters, state):
        gradients = jax.grad(lambda p: loss_of(DenseOfDict.apply(INPUTS, p)))(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state

    def trained(parameters, state, steps):
        for _ in range(steps):
            parameters, state = step(parameters, state)
        return parameters, state

    parameters = {"w": jax.random.normal(jax.random.key(0), (4, 4))}
    start = parameters, optimizer.init(parameters)
    with checkpoint.PyTreeCheckpointer() as keeper:
        keeper.save(tmp_path / "two", trained(*start, 2))
        restored = keeper.restore(tmp_path / "two", item=trained(*start, 0))
    assert_same_trees(trained(*restored, 3), trained(*start, 5))


@row("K2")
def test_residuals_of_a_linen_module():
    layer = linen_layer(Dense.apply)()
    variables = layer.init(jax.random.key(0), INPUTS)

    def mean(layer, variables, x):
        return jnp.mean(layer.apply(variables, x, mutable=["batch_stats"])[0] ** 2)

    table = jaxfn.residuals(mean, layer, variables, INPUTS, argnums=1)
    arguments = {r.argument: r.function for r in table if r.argument}
    assert arguments == {"args[2]": "Dense", "args[1]['params']['w']": "Dense"}
    kept = jax.tree.leaves(jax.vjp(lambda variables: mean(layer, variables, INPUTS), variables)[1])
    assert table.total_bytes == sum(a.nbytes for a in kept)
