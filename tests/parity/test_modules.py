"""H6b: a ported module next to the torch one, and the first layer of it that deviates."""

import functools
import inspect
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")
nn = torch.nn

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), MLP()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A convolution, batch statistics, two transformer blocks, and a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(6 * WIDTH, 5)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x))).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(self.flatten(self.norm(x)))


def network(is_training=False):
    torch.manual_seed(0)
    net = Net()
    net.train(is_training)
    for block in net.blocks:
        block.drop.eval()
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return net


def load(arrays):
    """Returns the parameters in JAX's layouts, (in, out) and HWIO, and the statistics."""
    axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
    parameters = {
        name.replace("weight", "kernel" if x.ndim > 1 else "scale"): x.transpose(axes[x.ndim])
        for name, x in arrays.items()
        if not name.startswith("bn.") or name in ("bn.weight", "bn.bias")
    }
    return parameters | {"bn": {"mean": arrays["bn.running_mean"], "var": arrays["bn.running_var"]}}


def load_pair(arrays):
    parameters = load(arrays)
    return parameters, {"bn": parameters.pop("bn")}


INPUTS = [np.random.default_rng(1).standard_normal((3, 3, 6, 8)).astype(np.float32)]


class Port:
    """The port of `Net`, with channels last, and one mistake of a kind in a layer."""

    def __init__(self, p, stats, wrong=(None, None), is_training=False):
        self.p, self.stats, self.wrong, self.is_training = p, stats, wrong, is_training

    def has(self, kind, name):
        return self.wrong == (kind, name)

    def out(self, name, y):
        return jax.lax.stop_gradient(y) if self.has("stop", name) else y

    def linear(self, name, x):
        kernel = self.p[f"{name}.kernel"]
        kernel = kernel.T if self.has("transposed", name) else kernel
        kernel = jax.lax.stop_gradient(kernel) if self.has("stop parameter", name) else kernel
        bias = 0 if self.has("no bias", name) else self.p[f"{name}.bias"]
        return self.out(name, x @ kernel + bias)

    def normalize(self, name, x, mean, var):
        eps = 1e-6 if self.has("eps", name) else 1e-5
        scale = self.p[f"{name}.scale"]
        scale = jax.lax.stop_gradient(scale) if self.has("stop parameter", name) else scale
        return self.out(name, (x - mean) * jax.lax.rsqrt(var + eps) * scale + self.p[f"{name}.bias"])

    def layer_norm(self, name, x):
        return self.normalize(name, x, x.mean(-1, keepdims=True), x.var(-1, keepdims=True))

    def batch_norm(self, x):
        if not (self.is_training or self.has("mode", "bn")):
            return self.normalize("bn", x, self.stats["mean"], self.stats["var"])
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        n = x.size // x.shape[-1]
        unbiased = 1 if self.has("biased", "bn") else n / (n - 1)
        self.stats = {
            "mean": 0.9 * self.stats["mean"] + 0.1 * mean,
            "var": 0.9 * self.stats["var"] + 0.1 * var * unbiased,
        }
        return self.normalize("bn", x, mean, var)

    def attention(self, name, x):
        batch, length, _ = x.shape
        y = self.linear(f"{name}.qkv", x).reshape(batch, length, 3, HEADS, -1)
        q, k, v = y[:, :, 0], y[:, :, 1], y[:, :, 2]
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        logits = logits if self.has("scale", name) else logits / q.shape[-1] ** 0.5
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(batch, length, -1)
        return self.out(name, self.linear(f"{name}.proj", y))

    def dropout(self, name, x):
        if not self.has("mode", name):
            return self.out(name, x)
        mask = jax.random.bernoulli(jax.random.key(0), 0.7, x.shape)
        return jnp.where(mask, x / 0.7, 0)

    def mlp(self, name, x):
        y = self.linear(f"{name}.fc1", x)
        y = self.out(f"{name}.act", jax.nn.gelu(y, approximate=self.has("tanh", f"{name}.act")))
        return self.linear(f"{name}.fc2", y)

    def block(self, name, x):
        y = self.dropout(f"{name}.drop", self.attention(f"{name}.attn", self.layer_norm(f"{name}.norm1", x)))
        x = y if self.has("residual 1", name) else x + y
        y = self.mlp(f"{name}.mlp", self.layer_norm(f"{name}.norm2", x))
        return y if self.has("residual 2", name) else x + y

    def __call__(self, x):
        x = x.transpose(0, 2, 3, 1)
        x = jax.lax.conv_general_dilated(
            x, self.p["conv.kernel"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = self.batch_norm(self.out("conv", x))
        x = x if self.has("missing", "relu") else self.out("relu", jax.nn.relu(x))
        x = x.reshape(x.shape[0], -1, WIDTH)
        for i in range(2):
            x = self.block(f"blocks.{i}", x)
        x = self.layer_norm("norm", x)
        x = x.mT if self.has("order", "flatten") else x
        return self.linear("head", x.reshape(x.shape[0], -1))


compare = functools.partial(jaxfn.paritycheck, raise_exception=False)


def check(wrong=(None, None), net=None, **options):
    net = net or network()
    return compare(lambda p, x: Port(p, p["bn"], wrong)(x), net, INPUTS, load=load, **options)


def verdicts(report):
    return {row.what: row.verdict for row in report.rows}


@row("H6b")
def test_a_right_port():
    net = network()
    report = check(net=net)
    assert report, report
    assert report.first_deviation is None
    names = [name for name, _ in net.named_parameters()]
    assert {f"gradient of {name}" for name in names} < set(verdicts(report))
    assert max(row.max_error for row in report.rows) < 1e-12
    assert all(x.grad is None for x in net.parameters())


MISTAKES = {
    "transposed": "blocks.0.attn.proj blocks.1.attn.proj blocks.0.mlp.fc1 blocks.1.mlp.fc2",
    "eps": "bn blocks.0.norm1 blocks.1.norm2 norm",
    "residual 1": "blocks.0 blocks.1",
    "residual 2": "blocks.0 blocks.1",
    "mode": "bn blocks.0.drop blocks.1.drop",
    "missing": "relu",
    "tanh": "blocks.1.mlp.act",
    "scale": "blocks.1.attn",
    "order": "flatten",
    "no bias": "blocks.0.attn.qkv",
    "stop": "conv bn relu norm blocks.0.norm1 blocks.0.attn.qkv blocks.1.attn.proj blocks.0.mlp.fc1 blocks.1.mlp.act "
    "blocks.0.mlp.fc2",
    "stop parameter": "blocks.0.norm2 blocks.1.attn.qkv head",
}


@row("H6b")
@pytest.mark.parametrize(("kind", "name"), [(kind, x) for kind, names in MISTAKES.items() for x in names.split()])
def test_one_mistake_is_named(kind, name):
    report = check((kind, name))
    assert not report
    first = report.first_deviation
    assert first is not None, report
    what = "gradient" if kind.startswith("stop") else "output"
    assert (first.layer, first.what.split()[0]) == (name, what), report


@row("H6b")
@pytest.mark.parametrize("wrong", [None, "biased", "stop"])
def test_training_mode_with_buffers(wrong):
    net = network(is_training=True)

    def port(p, buffers, x):
        p = Port(p, buffers["bn"], (wrong, "bn"), is_training=True)
        y = p(x)
        return y, {"bn": p.stats}

    report = compare(port, net, INPUTS, load=load_pair, has_buffers=True)
    assert bool(report) is (wrong is None), report
    found = verdicts(report)
    assert found["buffer bn.running_mean"] == "equal"
    assert "not compared: buffer bn.num_batches_tracked, which is not among the port's new buffers" in str(report)
    if wrong == "biased":
        failed = {row.what for row in report.failures}
        assert failed == {"buffer bn.running_var"}
        assert report.first_deviation is None and "no layer" not in str(report)
    if wrong == "stop":
        assert report.first_deviation.layer == "bn"


@row("H6b")
def test_a_layer_is_not_stopped_by_an_operation_that_stops_gradients_inside():
    """A max pooling that compares stopped values follows the layer after the one whose gradient is stopped."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = torch.nn.InstanceNorm1d(3, affine=True), torch.nn.LeakyReLU(0.1)

        def forward(self, x):
            return torch.nn.functional.max_pool1d(self.act(self.norm(x)), 2)

    def port(p, x):
        centered = x - x.mean(2, keepdims=True)
        normal = centered / jnp.sqrt(jnp.square(centered).mean(2, keepdims=True) + 1e-5)
        y = jax.lax.stop_gradient(normal * p["weight"][:, None] + p["bias"][:, None])
        y = jnp.where(y > 0, y, 0.1 * y)
        pairs = y.reshape(*y.shape[:2], -1, 2)
        first = jax.lax.stop_gradient(y).reshape(pairs.shape).argmax(-1, keepdims=True)
        return jnp.take_along_axis(pairs, first, 3)[..., 0]

    net, x = Net(), np.random.default_rng(0).standard_normal((2, 3, 6)).astype(np.float32)
    with torch.no_grad():
        net.norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
        net.norm.bias.copy_(torch.tensor([0.5, 0.1, 0.2]))

    def load(arrays):
        return {"weight": arrays["norm.weight"], "bias": arrays["norm.bias"]}

    report = compare(port, net, [x], load=load)
    assert report.first_deviation.layer == "norm", report


@row("H6b")
def test_buffers_that_are_not_compared_are_named():
    net = network(is_training=True)
    report = jaxfn.paritycheck(lambda p, x: Port(p, p["bn"], is_training=True)(x), net, INPUTS, load=load)
    assert all(f"not compared: buffer {name}" in str(report) for name, _ in net.named_buffers())


@row("H6b")
def test_wrong_numbers_are_found_in_the_layer_that_has_them():
    def scaled(arrays):
        return load(arrays | {"blocks.1.mlp.fc1.weight": 2 * arrays["blocks.1.mlp.fc1.weight"]})

    report = compare(lambda p, x: Port(p, p["bn"])(x), network(), INPUTS, load=scaled)
    assert report.first_deviation.layer == "blocks.1.mlp.fc1"


LOST = "not loaded: nothing that `load` returns is differentiable by head.bias"


@row("H6b")
@pytest.mark.parametrize(
    "lose",
    [
        jnp.zeros_like,
        jax.lax.stop_gradient,
        lambda x: jnp.arange(5),
        lambda x: (1000 * x).astype(int),
        lambda x: jnp.asarray(np.asarray(network().head.bias.detach()), x.dtype),
    ],
)
def test_a_parameter_that_load_loses(lose):
    def port(p, x):
        return Port(p, p["bn"])(x)

    def losing(arrays):
        return load(arrays | {"head.bias": lose(arrays["head.bias"])})

    report = compare(port, network(), INPUTS, load=losing)
    assert verdicts(report)["gradient of head.bias"] == "not loaded"
    assert LOST in str(report), report


@row("H6b")
def test_all_parameters_are_lost_by_arrays_that_load_captured():
    net = network()
    captured = load({name: x.double().numpy() for name, x in net.state_dict().items()})
    report = compare(lambda p, x: Port(p, p["bn"])(x), net, INPUTS, load=lambda arrays: captured)
    lost = {row.what for row in report.failures if row.verdict == "not loaded"}
    assert lost == {f"gradient of {name}" for name, _ in net.named_parameters()}


@row("H6b")
@pytest.mark.parametrize(
    "convert",
    [np.asarray, lambda x: torch.from_numpy(np.array(x)), lambda x: jnp.full(5, float(x[0])), lambda x: x.tolist()],
    ids=["numpy", "torch", "number", "list"],
)
def test_a_load_that_cannot_be_differentiated(convert):
    def converting(arrays):
        return load(arrays | {"head.bias": jnp.asarray(convert(arrays["head.bias"]))})

    with pytest.raises(TypeError, match="`load` cannot be differentiated by head.bias: it makes NumPy arrays or"):
        jaxfn.paritycheck(lambda p, x: x, network(), INPUTS, load=converting)


@row("H6b")
def test_an_error_of_load_is_the_users():
    with pytest.raises(KeyError, match="haed.bias"):
        jaxfn.paritycheck(lambda p, x: x, network(), INPUTS, load=lambda arrays: arrays["haed.bias"])


@row("H6b")
def test_a_parameter_that_torch_does_not_have():
    def port(p, x):
        return Port(p, p["bn"])(x) + p["more"]

    report = compare(port, network(), INPUTS, load=lambda arrays: load(arrays) | {"more": jnp.zeros(5)})
    assert {row.what: row.verdict for row in report.failures} == {"gradient of the port's ['more']": "extra"}
    assert "the port has a gradient by ['more'], which `load` makes of none of torch's arrays" in str(report)


class Stack(nn.Module):
    """Layers that begin with equal numbers, and are stacked in the port."""

    def __init__(self, zeros):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(3)])
        for layer in self.layers:
            nn.init.zeros_(layer.bias) if zeros else None

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.tanh(layer(x)))
        return x


def load_stack(arrays):
    def stacked(group, name):
        return jnp.stack([arrays[f"{group}.{i}.{name}"].T for i in range(3)])

    return {g: {n: stacked(g, n) for n in ("weight", "bias")} for g in ("layers", "norms")}


def stack_port(p, x, wrong=None):
    def step(x, p):
        i, layer, norm = p
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        eps = jnp.where(i == wrong, 1e-6, 1e-5) if wrong is not None else 1e-5
        return (x - mean) / jnp.sqrt(var + eps) * norm["weight"] + norm["bias"], None

    return jax.lax.scan(step, x, (jnp.arange(3), p["layers"], p["norms"]))[0]


@row("H6b")
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_stacked_layers_in_a_scan(wrong):
    """All biases are 0 and all scales 1."""
    module = Stack(zeros=True)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    report = compare(lambda p, x: stack_port(p, x, wrong), module, [x], load=load_stack)
    assert bool(report) is (wrong is None), report
    assert {f"gradient of {name}" for name in module.state_dict()} < set(verdicts(report))
    if wrong is not None:
        assert report.first_deviation.layer == f"norms.{wrong}"


class SplitAttention(nn.Module):
    """Single-head attention with a linear layer for each of q, k and v."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))
        nn.init.eye_(self.out.weight)

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).mT / 2).softmax(-1)
        return self.out(weights @ self.v(x))


def load_fused(arrays):
    fused = {kind: jnp.concatenate([arrays[f"{n}.{kind}"] for n in "qkv"]) for kind in ("weight", "bias")}
    return {"qkv": fused["weight"].T, "bias": fused["bias"], "out": arrays["out.weight"].T, "b": arrays["out.bias"]}


def swapped(arrays, first, second):
    return arrays | {first: arrays[second], second: arrays[first]}


@row("H6b")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("wrong", "layer"),
    [(None, None), ("swapped", "q"), ("transposed", "out"), ("stopped", "v"), ("half", "v")],
)
def test_fused_weights_and_a_weight_that_equals_its_transpose(wrong, layer, dtype):
    def load(arrays):
        arrays = swapped(arrays, "q.weight", "k.weight") if wrong == "swapped" else arrays
        arrays = arrays | {"out.weight": arrays["out.weight"].T} if wrong == "transposed" else arrays
        half = jnp.where(jnp.arange(4) < 2, arrays["v.bias"], 0)
        return load_fused(arrays | {"v.bias": half} if wrong == "half" else arrays)

    def port(p, x):
        q, k, v = jnp.split(x @ p["qkv"] + p["bias"], 3, -1)
        v = jax.lax.stop_gradient(v) if wrong == "stopped" else v
        return jax.nn.softmax(q @ k.mT / 2) @ v @ p["out"] + p["b"]

    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(dtype)
    module = SplitAttention().to(torch.float64 if dtype is np.float64 else torch.float32)
    report = compare(port, module, [x], load=load)
    assert bool(report) is (wrong is None), report
    assert (report.first_deviation and report.first_deviation.layer) == layer, report


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's, a frozen parameter, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(5)
        self.norm.weight.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


@row("H6b")
def test_a_converted_module_is_a_right_port():
    module = Tied()
    port = jaxfn.from_torch(module)

    def load(arrays):
        return [{name: arrays[name] for name in tree} for tree in (port.parameters, port.buffers)]

    tokens = np.random.default_rng(0).integers(0, 7, (3, 5))
    report = compare(port.apply, module, [tokens], load=load, has_buffers=True)
    assert report, report
    assert verdicts(report)["buffer norm.num_batches_tracked"] == "equal"
    assert "gradient of norm.weight" not in verdicts(report)  # it is frozen


@row("H6b")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("names", [("embed", "embed"), ("embed", "head")])
@pytest.mark.parametrize(("wrong", "layer"), [(None, None), ("stopped", "embed"), ("scaled", "head")])
def test_tied_weights_have_all_their_names(wrong, layer, names, dtype):
    module = Tied().to(torch.float64 if dtype is np.float64 else torch.float32)
    module.norm.weight.requires_grad_(True)

    def load(arrays):
        embed, head = (arrays[f"{name}.weight"] for name in names)
        rest = {name: x for name, x in arrays.items() if name.startswith("norm.") or name == "head.bias"}
        head = jax.lax.stop_gradient(head) if wrong == "stopped" else 1.001 * head if wrong == "scaled" else head
        return {"embed": embed, "head": head.T} | rest, {"var": arrays["norm.running_var"]}

    def port(p, buffers, tokens):
        x = p["embed"][tokens]
        mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
        x = (x - mean) / jnp.sqrt(var + 1e-5) * p["norm.weight"][:, None] + p["norm.bias"][:, None]
        n = x.shape[0] * x.shape[2]
        return x @ p["head"] + p["head.bias"], {"var": 0.9 * buffers["var"] + 0.1 * var.ravel() * n / (n - 1)}

    tokens = np.random.default_rng(0).integers(0, 7, (3, 5))
    report = compare(port, module, [tokens], load=load, has_buffers=True)
    failed = {row.what for row in report.failures}
    assert failed >= {"buffer norm.running_mean"}, report  # torch updates it, and the port does not return it
    assert (failed == {"buffer norm.running_mean"}) is (wrong is None), report
    assert (report.first_deviation and report.first_deviation.layer) == layer, report


@row("H6b")
def test_gradients_that_are_zero_and_random_numbers_are_notes():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    with torch.no_grad():
        module[0].bias.fill_(-100.0)  # no unit is active

    def port(p, x):
        return jax.nn.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["3.weight"].T + p["3.bias"]

    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    report = jaxfn.paritycheck(port, module, [x], load=dict)
    assert "torch draws random numbers" in str(report)
    assert "zero in torch are the gradients of 0.weight, 0.bias, 3.weight, input 0" in str(report), report
    assert "random numbers" not in str(jaxfn.paritycheck(port, module.eval(), [x], load=dict))


@row("H6b")
def test_a_value_is_named_by_checkpoint_name():
    """The port never computes the output of the first layer, and says where it would be."""
    from jax.ad_checkpoint import checkpoint_name

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()

    def port(p, x):
        y = checkpoint_name(x @ p["0.weight"].T + p["0.bias"], "0")
        y = checkpoint_name(2 * y, "1")
        return y @ p["2.weight"].T + p["2.bias"]

    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    first = compare(port, module, [x], load=dict).first_deviation
    assert (first.layer, first.what) == ("1", "output")
    assert first.jax == pytest.approx(2 * first.torch)


@row("H6b")
def test_single_precision_inside_the_port_is_a_note():
    net = network()
    stats = {"mean": jnp.asarray(net.bn.running_mean.numpy()), "var": jnp.asarray(net.bn.running_var.numpy())}
    report = jaxfn.paritycheck(lambda p, x: Port(p, stats)(x), net, INPUTS, load=load)
    (note,) = report.notes
    assert "tolerance of float32" in note and "test_modules.py" in note


@row("H6b")
def test_constants_that_the_module_computes_are_in_float64():
    class Weighted(nn.Linear):
        def forward(self, x):
            return super().forward(x) @ torch.exp(torch.arange(2) / 3)

    def port(p, x):
        return (x @ p["weight"].T + p["bias"]) @ jnp.exp(jnp.arange(2) / 3)

    report = jaxfn.paritycheck(port, Weighted(3, 2), [np.random.default_rng(0).standard_normal((4, 3))], load=dict)
    assert report and not report.notes and torch.get_default_dtype() == torch.float32, report


@row("H6b")
def test_the_report_as_text_json_and_html():
    report = check(("transposed", "blocks.1.attn.proj"))
    content = json.loads(report.to_json())
    assert content["first_deviation"]["layer"] == "blocks.1.attn.proj"
    assert content["first_deviation"]["torch"] != content["first_deviation"]["jax"]
    reason = content["first_deviation"]["reason"]  # it says which value of the port is the input
    assert reason.startswith("its input is in the port (") and "(Port.attention)" in reason
    line = "first layer that deviates: blocks.1.attn.proj (Linear), output"
    assert line in str(report) and line in report._repr_html_()
    with pytest.raises(jaxfn.CheckError, match="first layer that deviates: norm"):
        jaxfn.paritycheck(lambda p, x: Port(p, p["bn"], ("eps", "norm"))(x), network(), INPUTS, load=load)


@row("H7", "H6b")
def test_a_recorded_module_without_torch(tmp_path):
    module = Stack(zeros=False)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    jaxfn.record_reference(module, [x], tmp_path / "stack.npz")
    script = f"""
        import sys
        sys.modules["torch"] = None  # importing it fails
        sys.path.insert(0, {str(tmp_path)!r})
        import jaxfn, port
        for wrong in None, 1:
            report = jaxfn.paritycheck(
                lambda p, x: port.stack_port(p, x, wrong), {str(tmp_path / "stack.npz")!r}, load=port.load_stack,
                raise_exception=False)
            print(bool(report), report.first_deviation and report.first_deviation.layer, len(report.rows))
    """
    source = "\n".join(map(inspect.getsource, (load_stack, stack_port)))
    (tmp_path / "port.py").write_text(f"import jax, jax.numpy as jnp\n{source}")
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert run.stdout == f"True None {1 + 13}\nFalse norms.1 {1 + 13}\n"
    jaxfn.record_reference(torch.sin, [x], tmp_path / "sin.npz")
    with pytest.raises(TypeError, match="sin.npz is not of a module"):
        jaxfn.paritycheck(stack_port, tmp_path / "sin.npz", load=load_stack)


@row("H6b")
def test_the_end_of_the_module_deviates():
    net = network()
    report = compare(lambda p, x: 2 * Port(p, p["bn"])(x), net, INPUTS, load=load)
    first = report.first_deviation
    assert (first.layer, first.layer_class) == ("", "Net") and first.jax == pytest.approx(2 * first.torch)


@row("H6b")
def test_wrong_arguments():
    net = network()
    with pytest.raises(TypeError, match="needs `load`"):
        jaxfn.paritycheck(lambda x: x, net, INPUTS, has_buffers=True)
    with pytest.raises(TypeError, match="the reference has to be a torch module, got"):
        jaxfn.paritycheck(lambda p, x: x, torch.sin, INPUTS, load=load)
    with pytest.raises(TypeError, match=r"`load` has to return \(parameters, buffers\), got dict"):
        jaxfn.paritycheck(lambda p, b, x: x, net, INPUTS, load=load, has_buffers=True)
    with pytest.raises(TypeError, match=r"the port has to return \(outputs, new buffers\)"):
        jaxfn.paritycheck(lambda p, b, x: x, net, INPUTS, load=load_pair, has_buffers=True)
    with pytest.raises(ValueError, match=r"Only one of them returns \['bn'\]\['var'\]"):
        jaxfn.paritycheck(
            lambda p, b, x: (x, {"bn": {"mean": b["bn"]["mean"]}}), net, INPUTS, load=load_pair, has_buffers=True
        )


def digits_net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 6)
    )


IMAGES = [np.random.default_rng(2).standard_normal((5, 1, 6, 6)).astype(np.float32)]


@row("H6b")
@pytest.mark.parametrize("wrong", [None, "eps"])
def test_an_equinox_module(wrong):
    eqx = pytest.importorskip("equinox")
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    eps = 1e-5 if wrong is None else 1e-6
    keys = jax.random.split(jax.random.key(0), 2)

    def load(arrays):
        new = [eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.LayerNorm(4, eps=eps), eqx.nn.Lambda(jnp.tanh)]
        new.append(eqx.nn.Linear(4, 2, key=keys[1]))
        for i in (0, 1, 3):
            loaded = [arrays[f"{i}.weight"], arrays[f"{i}.bias"]]
            new[i] = eqx.tree_at(lambda layer: [layer.weight, layer.bias], new[i], loaded)
        return eqx.nn.Sequential(new)

    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    report = compare(lambda model, x: jax.vmap(model)(x), module, [x], load=load)
    assert bool(report) is (wrong is None), report
    assert wrong is None or report.first_deviation.layer == "1"


@row("H6b")
@pytest.mark.parametrize("wrong", [None, "order", "mode"])
def test_a_flax_nnx_module(wrong):
    nnx = pytest.importorskip("flax.nnx")
    module = digits_net().eval()

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.bn = nnx.BatchNorm(4, use_running_average=wrong != "mode", rngs=rngs)
            self.head = nnx.Linear(36, 6, rngs=rngs)

        def __call__(self, x):
            x = jax.nn.relu(self.bn(self.conv(x.transpose(0, 2, 3, 1))))
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
            x = x if wrong == "order" else x.transpose(0, 3, 1, 2)
            return self.head(x.reshape(x.shape[0], -1))

    graphdef, _ = nnx.split(Model(nnx.Rngs(0)))

    def load(arrays):
        model = Model(nnx.Rngs(0))
        model.conv.kernel.set_value(arrays["0.weight"].transpose(2, 3, 1, 0))
        model.head.kernel.set_value(arrays["5.weight"].T)
        for layer, name in (model.conv, "0"), (model.bn, "1"), (model.head, "5"):
            layer.bias.set_value(arrays[f"{name}.bias"])
        model.bn.scale.set_value(arrays["1.weight"])
        model.bn.mean.set_value(arrays["1.running_mean"])
        model.bn.var.set_value(arrays["1.running_var"])
        return nnx.split(model)[1]

    report = compare(lambda state, x: nnx.merge(graphdef, state)(x), module, IMAGES, load=load)
    assert bool(report) is (wrong is None), report
    assert wrong is None or report.first_deviation.layer == {"order": "4", "mode": "1"}[wrong]


@row("H6b")
@pytest.mark.parametrize("momentum", [0.9, 0.1])
def test_flax_linen_in_training(momentum):
    """flax updates the variance with the biased one, torch with the unbiased one."""
    linen = pytest.importorskip("flax.linen")
    module = digits_net()

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(4, (3, 3))(x.transpose(0, 2, 3, 1))
            x = jax.nn.relu(linen.BatchNorm(use_running_average=False, momentum=momentum, epsilon=1e-5)(x))
            x = linen.avg_pool(x, (2, 2), strides=(2, 2)).transpose(0, 3, 1, 2)
            return linen.Dense(6)(x.reshape(x.shape[0], -1))

    def load(arrays):
        parameters = {
            "Conv_0": {"kernel": arrays["0.weight"].transpose(2, 3, 1, 0), "bias": arrays["0.bias"]},
            "BatchNorm_0": {"scale": arrays["1.weight"], "bias": arrays["1.bias"]},
            "Dense_0": {"kernel": arrays["5.weight"].T, "bias": arrays["5.bias"]},
        }
        return parameters, {"BatchNorm_0": {"mean": arrays["1.running_mean"], "var": arrays["1.running_var"]}}

    def port(p, buffers, x):
        y, updated = Model().apply({"params": p, "batch_stats": buffers}, x, mutable=["batch_stats"])
        return y, updated["batch_stats"]

    report = compare(port, module, IMAGES, load=load, has_buffers=True)
    failed = {row.what for row in report.failures}
    assert failed == {"buffer 1.running_var"} | ({"buffer 1.running_mean"} if momentum == 0.1 else set()), report
