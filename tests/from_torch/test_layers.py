"""Layers and operations of torch.nn, compared with torch (rows I1 to I4)."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.marks import cells, row  # noqa: E402
from tests.support.module_checks import X, check, frozen, numbers, seeded, tied  # noqa: E402

nn, F = torch.nn, torch.nn.functional


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "chosen": {"mask": torch.arange(35).reshape(5, 7) % 3 > 0},
    "nothing chosen": {"mask": (torch.arange(35).reshape(5, 7) % 3 > 0) & (torch.arange(5) != 2)[:, None]},
    "added": {"mask": torch.linspace(-1, 1, 70).reshape(2, 1, 5, 7)},
    "nothing left": {"mask": torch.where(torch.arange(5) == 2, -torch.inf, 0.5)[:, None].expand(5, 7)},
    "grouped": {"enable_gqa": True, "heads": 2},
    "narrow values": {"width": 2},
}


class Attention(nn.Module):
    """Attention, whose three arguments depend on a weight in different ways."""

    def __init__(self, mask=None, heads=4, width=3, **options):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1.5, 9).reshape(3, 3))
        self.mask, self.heads, self.width, self.options = mask, heads, width, options

    def forward(self, query, key):
        key = key[:, : self.heads] @ self.w
        mask = self.mask if self.mask is None or self.mask.dtype == torch.bool else self.mask.to(key.dtype)
        value = torch.sin(key[..., : self.width])
        return F.scaled_dot_product_attention(query * self.w[0], key, value, attn_mask=mask, **self.options)


@row("I2")
@cells("name", ["causal", "nothing chosen", "added", "grouped"], ATTENTION)
def test_attention_at_every_order(name, double_precision):
    module = Attention(**ATTENTION[name]).double()
    query, key = torch.sin(torch.arange(120.0).double()).reshape(2, 4, 5, 3), torch.cos(torch.arange(168.0).double())
    key = key.reshape(2, 4, 7, 3)
    direction = torch.cos(torch.arange(9.0).double()).reshape(3, 3)

    def of_torch(w):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others have no second derivative
            return (torch.func.functional_call(module, {"w": w}, (query, key)) ** 3).sum(-1)

    net = jaxfn.from_torch(module)
    arrays = [jnp.asarray(x.numpy()) for x in (query, key)]

    def of_jax(w, query=arrays[0], key=arrays[1]):
        return (net.apply({"w": w}, {}, query, key)[0] ** 3).sum(-1)

    w = net.parameters["w"]
    slope = torch.autograd.functional.vjp(lambda w: of_torch(w).sum(), module.w.detach())[1]
    curvature = torch.autograd.functional.hvp(lambda w: of_torch(w).sum(), module.w.detach(), direction)[1]
    tangent = torch.autograd.functional.jvp(of_torch, module.w.detach(), direction)[1]
    along = jnp.asarray(direction.numpy())
    values, tangents = jax.jvp(of_jax, (w,), (along,))
    np.testing.assert_allclose(values, numbers(of_torch(module.w)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tangents, tangent.numpy(), rtol=1e-9, atol=1e-12)
    gradient = jax.jit(jax.grad(lambda w: of_jax(w).sum()))
    np.testing.assert_allclose(gradient(w), slope.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(jax.jvp(gradient, (w,), (along,))[1], curvature.numpy(), rtol=1e-9, atol=1e-12)
    if "mask" not in ATTENTION[name] or module.mask.ndim == 2:
        rows = jax.vmap(lambda q, k: of_jax(w, q[None], k[None])[0])(*arrays)
        np.testing.assert_allclose(rows, values, rtol=1e-9, atol=1e-12)


GROUPS = {  # where groups end, and the product of each one
    "rows": ((8, 4), (3, 4, 8), lambda a, b: jnp.concatenate([a[:2] @ b[0], a[2:7] @ b[2], jnp.zeros((1, 8))])),
    "columns": (
        (3, 8, 4),
        (4, 8),
        lambda a, b: jnp.concatenate([a[0] @ b[:, :2], a[2] @ b[:, 2:7], jnp.zeros((8, 1))], 1),
    ),
    "inner": (
        (4, 8),
        (8, 12),
        lambda a, b: jnp.stack([a[:, :2] @ b[:2], jnp.zeros((4, 12)), a[:, 2:7] @ b[2:7]]),
    ),
    "batched": ((3, 5, 4), (3, 4, 8), lambda a, b: a @ b),
}


@row("I4", "H2")
@cells("name", ["rows", "batched"], GROUPS)
def test_products_of_groups_at_every_order(name):
    *shapes, wanted = GROUPS[name]
    offsets = () if name == "batched" else (torch.tensor([2, 2, 7], dtype=torch.int32),)
    ours = jaxfn.from_torch(lambda a, b: torch._grouped_mm(a, b, *offsets))
    a, b = (jnp.sin(jnp.arange(float(np.prod(shape))) ** 1.1).reshape(shape) for shape in shapes)
    tangents = jnp.cos(a), b**2 - 0.3

    def everything(product):
        def slopes(a, b):
            return jax.grad(lambda a, b: (jnp.sin(product(a, b)) * 1.5).sum(), (0, 1))(a, b)

        along = jax.jvp(product, (a, b), tangents)
        return along, jax.jvp(slopes, (a, b), tangents), jax.vmap(slopes, (0, None))(jnp.stack([a, a + 0.5]), b)

    found = jax.jit(lambda: everything(ours))()
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(everything(wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@row("H9", "I2")
def test_another_attention_replaces_torchs():
    """A fused kernel, where the device has one."""
    used = []

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        used.append(is_causal)
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        found = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
        return jnp.swapaxes(found, 1, 2)

    module = Attention(is_causal=True)
    net = jaxfn.from_torch(module, ops={F.scaled_dot_product_attention: attention})
    query, key = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 7, 3)
    arrays = [jnp.asarray(x.numpy()) for x in (query, key)]
    expected = module(query, key)
    expected.square().sum().backward()
    slope = jax.grad(lambda p: (net.apply(p, {}, *arrays)[0] ** 2).sum())(net.parameters)
    assert used and all(used)
    np.testing.assert_allclose(net(*arrays), numbers(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slope["w"], module.w.grad.numpy(), rtol=1e-4, atol=1e-4)


def doubling():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return module


MODULES = {
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), X),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), X),
    "hook of spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), X),
    "hook of weight norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), X),
    "tied": (tied, X),
    "frozen": (frozen, X),
    "forward hook": (doubling, X),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        torch.linspace(-1, 1, 2 * 2 * 6 * 8).reshape(2, 2, 6, 8).sin(),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        torch.linspace(-1, 1, 40).reshape(2, 5, 4).sin(),
    ),
    "embedding, 32 bits": (
        lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)),
        torch.tensor([[0, 1, 2], [3, 0, 8]], dtype=torch.int32),
    ),
}


@row("I2")
@pytest.mark.parametrize(
    "kind, norm", [(nn.Embedding, 1.0), (nn.Embedding, float("inf")), (nn.EmbeddingBag, 2.0), (nn.EmbeddingBag, 3.5)]
)
def test_embeddings_whose_rows_are_renormalized(kind, norm):
    indices = torch.tensor([[0, 1, 2], [3, 0, 8]])
    check(
        seeded(lambda: nn.Sequential(kind(9, 4, max_norm=0.8, norm_type=norm), nn.Linear(4, 2))),
        indices,
        written=["0.weight"],
    )


@row("I1", "I2")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@cells(
    "name, train",
    [
        *((name, True) for name in MODULES),
        *((name, False) for name in ["spectral norm", "hook of spectral norm", "convolutions", "transformer"]),
    ],
    MODULES,
    [True, False],
)
def test_modules_of_torch(name, train):
    make, x = MODULES[name]
    check(seeded(make), x, train=train)


class Packed(nn.Module):
    """Sequences of lengths that are not multiples of each other, not sorted, and padded to more than the longest."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 5, 2, 5], batch_first=True, enforce_sorted=False)
        output, state = self.layer(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=7, padding_value=1.5)
        return padded, state


SEQUENCES = torch.linspace(-3, 3, 4 * 5 * 3).reshape(4, 5, 3).sin()


RECURRENT = {
    "plain": {},
    "no bias, batch first": {"bias": False, "batch_first": True},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True},
    "projections": {"num_layers": 2, "bidirectional": True, "proj_size": 2},
    "relu": {"nonlinearity": "relu"},
}


@row("I2")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "kind, options",
    [
        ("LSTM", "no bias, batch first"),
        ("LSTM", "projections"),
        ("GRU", "two layers, two directions"),
        ("RNN", "plain"),
        ("RNN", "relu"),
    ],
)
def test_recurrent_layers(kind, options):
    check(seeded(lambda: getattr(nn, kind)(3, 4, **RECURRENT[options])), SEQUENCES)


@row("I2")
@cells("kind", ["LSTM"], ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_one_sequence(kind):
    check(seeded(lambda: getattr(nn, kind)(3, 4)), SEQUENCES[0])


@row("I2")
@cells("kind", ["GRU"], ["LSTM", "GRU", "RNN"])
def test_packed_sequences(kind):
    check(seeded(lambda: Packed(getattr(nn, kind)(3, 4, 2, batch_first=True, bidirectional=True))), SEQUENCES)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        yield from [equation] if not inner else [e for part in inner for e in equations(part)]


@row("I2")
def test_pooling_makes_no_array_of_all_windows():
    net = jaxfn.from_torch(nn.MaxPool2d(5, 1, 2))
    x = jnp.zeros((2, 3, 20, 20))
    program = jax.make_jaxpr(jax.grad(lambda x: net.apply({}, {}, x)[0].sum()))(x)
    assert max(y.aval.size for e in equations(program.jaxpr) for y in e.outvars) <= 2 * 3 * 24 * 24


@row("I2")
@pytest.mark.parametrize(
    "norm, times", [(nn.BatchNorm2d(3), 4), (nn.LayerNorm((20, 21)), 6), (nn.GroupNorm(3, 3), 6)], ids=repr
)
def test_a_norm_sums_over_its_argument_no_more_than_it_must(norm, times):
    """Sums for mean and variance; in reverse for the mean, the variance, the weight (with the variance's) and the bias.

    Batch norm's mean has its gradient from the sums for weight and bias.
    """
    net = jaxfn.from_torch(norm)
    x = jnp.zeros((2, 3, 20, 21))

    def loss(parameters, x):
        return jnp.vdot(net.apply(parameters, net.buffers, x)[0], x)

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(net.parameters, x)
    sums = [e for e in equations(program.jaxpr) if e.primitive.name == "reduce_sum" and e.invars[0].aval.size == x.size]
    assert len(sums) <= times


SECOND_ORDER = {
    "batch norm": (lambda: nn.BatchNorm1d(3, dtype=torch.float64), (5, 3, 4)),
    "batch norm without weights": (lambda: nn.BatchNorm2d(2, affine=False, dtype=torch.float64), (3, 2, 1, 3)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(3, track_running_stats=False, dtype=torch.float64),
        (7, 3),
    ),
    "instance norm": (lambda: nn.InstanceNorm1d(2, affine=True, dtype=torch.float64), (3, 2, 5)),
    "max pool": (lambda: nn.MaxPool2d((3, 2), (2, 1), (1, 0)), (2, 3, 5, 4)),
    "large max pool": (lambda: nn.MaxPool1d(18, 3), (2, 30)),
    "adaptive max pool": (lambda: nn.AdaptiveMaxPool2d((2, 3)), (2, 5, 7)),
    "max pool of one element": (lambda: nn.MaxPool1d(1), (2, 1)),
}


@row("I2", "I3")
@pytest.mark.usefixtures("double_precision")
@cells("name", ["batch norm", "max pool", "large max pool", "adaptive max pool"], SECOND_ORDER)
def test_second_derivatives_of_norms_and_pools(name):
    """Values, what they are multiplied by and their mean, far from zero, all vary."""
    make, shape = SECOND_ORDER[name]
    module, net = make(), jaxfn.from_torch(make())
    x, v = 2 + np.random.default_rng(0).standard_normal((2, *shape))

    def gradient_in_torch(x):
        y = module(x.sin() + x)
        return torch.autograd.grad(((y + 0.3) ** 3).sum(), x, create_graph=True)[0]

    tensor = torch.tensor(x, requires_grad=True)
    wanted = torch.autograd.grad((gradient_in_torch(tensor) * torch.tensor(v)).sum(), tensor)[0]

    def gradient(x):
        def loss(x):
            y, _ = net.apply(net.parameters, net.buffers, jnp.sin(x) + x)
            return ((y + 0.3) ** 3).sum()

        return jax.grad(loss)(x)

    for got in (jax.grad(lambda x: jnp.vdot(gradient(x), v))(x), jax.jvp(gradient, (x,), (v,))[1]):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-9, atol=1e-9)


@row("I2")
def test_a_recurrent_layer_is_one_loop():
    net = jaxfn.from_torch(nn.LSTM(3, 4))
    call = functools.partial(net.apply, net.parameters, {})
    short, long = (str(jax.make_jaxpr(lambda x: call(x)[0][0])(jnp.ones((length, 2, 3)))) for length in (5, 50))
    assert len(re.findall(r"\bscan\[", long)) == 1
    assert long.count("\n") == short.count("\n")


@row("I2")
def test_checkpoints_repeat_their_draws():
    dropout = nn.Dropout(0.5)

    def of_checkpoint(checkpoint):
        def code(x, w):
            y, largest = checkpoint(lambda a, b: (dropout((a @ w).sin()) * b, a.max(0)), x @ w, x + 1)
            return (checkpoint(lambda a: (a @ w).tanh(), y) + largest.values).sum()

        converted = jaxfn.from_torch(code)
        return lambda w: converted(X.numpy(), w, key=jax.random.key(0))

    w = jnp.ones((3, 3))
    expected = jax.grad(of_checkpoint(lambda f, *args: f(*args)))(w)
    taken_before = torch.utils.checkpoint.checkpoint
    for checkpoint in (
        lambda *args: taken_before(*args, use_reentrant=True),
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True),
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False),
    ):
        f = of_checkpoint(checkpoint)
        assert len(re.findall(r"\b(remat\d?|checkpoint)\[", str(jax.make_jaxpr(f)(w)))) == 2
        np.testing.assert_allclose(jax.grad(f)(w), expected, rtol=1e-4, atol=1e-5)


@row("I2")
def test_lengths_that_depend_on_arguments_raise():
    packed = jaxfn.from_torch(lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, lengths).data)
    with pytest.raises(TranslationError, match="lengths depend on the arguments.*Python numbers"):
        packed(jnp.ones((5, 2, 3)), jnp.array([5, 3]))


@row("I4")
def test_dropout_between_recurrent_layers():
    net = jaxfn.from_torch(nn.LSTM(3, 4, 2, dropout=0.5))
    x = jnp.asarray(SEQUENCES.numpy())
    first, again, other = (net(x, key=jax.random.key(seed))[0] for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).any()
