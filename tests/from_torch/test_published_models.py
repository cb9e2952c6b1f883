"""Rows I1 to I3 on whole models: small ones of published packages, unchanged, beside torch in double precision.

A model whose package is not there is skipped: `tests/support/published.py` says where they are looked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row
from tests.support.published import package

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of other packages
    pytest.mark.usefixtures("double_precision"),
]


class Model(NamedTuple):
    """A model, and what it is called with.

    Attributes:
      module: with all dropout at 0.
      batches: two batches for each argument.
      call: how it is called, if not by the batch alone.
      is_single: it makes numbers in single precision, whatever it is given.
    """

    module: Any
    batches: tuple[np.ndarray, ...]
    call: Callable[..., Any] = lambda module, *args: module(*args)
    is_single: bool = False


def tokens(length: int = 7) -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(1).integers(1, 60, (2, 3, length)),)


def normal(*shape: int) -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(2).standard_normal((2, *shape)),)


def transformer(name: str, **sizes: Any) -> Any:
    """A small model of transformers, and its configuration's class."""
    transformers = package("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}


def bert() -> Model:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Model(transformer("BertModel", vocab_size=61, max_position_embeddings=9, **SMALL, **no_dropout), tokens())


def gpt2() -> Model:
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 8, "vocab_size": 61}
    model = transformer("GPT2LMHeadModel", use_cache=False, **sizes, **no_dropout)
    return Model(model, tokens(8))


def llama() -> Model:
    """Heads that share keys, and the loss that the model computes itself."""
    sizes = {"num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 16}
    model = transformer("LlamaForCausalLM", use_cache=False, **SMALL, **sizes)
    return Model(model, tokens(), lambda module, x: module(x, labels=x), is_single=True)


def sew_d() -> Model:
    """Sound; its attention has Functions of its own."""
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 6), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "squeeze_factor": 1}
    dropouts = "hidden_dropout activation_dropout attention_dropout feat_proj_dropout final_dropout layerdrop"
    others = {"max_position_embeddings": 64, "apply_spec_augment": False, **dict.fromkeys(dropouts.split(), 0.0)}
    return Model(transformer("SEWDModel", **SMALL, **convolutions, **positions, **others), normal(2, 330))


def resnet() -> Model:
    model = package("timm").create_model("resnet10t", pretrained=False, num_classes=5, channels=(4, 6, 6, 8))
    return Model(model, normal(2, 3, 32, 32))


def vit() -> Model:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2}
    return Model(package("timm").create_model("vit_tiny_patch16_224", num_classes=5, **sizes), normal(2, 3, 16, 16))


def spiking() -> Model:
    snntorch = package("snntorch")

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.first = nn.Linear(5, 9), snntorch.Leaky(beta=0.9)
            self.out, self.last = nn.Linear(9, 3), snntorch.Leaky(beta=0.7, learn_beta=True)

        def forward(self, x: Any) -> Any:
            charge, last_charge = self.first.init_leaky(), self.last.init_leaky()
            seen = []
            for step in x.unbind(1):
                spikes, charge = self.first(self.hidden(step), charge)
                _, last_charge = self.last(self.out(spikes), last_charge)
                seen.append(last_charge)
            return torch.stack(seen, 1)

    (batches,) = normal(4, 6, 5)
    return Model(Spiking(), (3 * batches.astype(np.float32),), is_single=True)


def compression() -> Model:
    """It draws noise while it trains."""
    return Model(package("compressai.models").FactorizedPrior(4, 6), normal(1, 3, 32, 48))


def unet() -> Model:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.pool = nn.MaxPool2d(2)
            self.middle = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.GroupNorm(3, 6), nn.SiLU())
            self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
            self.head = nn.Conv2d(8, 1, 1)

        def forward(self, x: Any) -> Any:
            fine = self.down(x)
            coarse = self.up(self.middle(self.pool(fine)))
            return F.interpolate(self.head(torch.cat([fine, coarse], 1)), size=(9, 11), mode="bilinear")

    return Model(UNet(), normal(3, 2, 12, 10))


def lstm() -> Model:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(61, 5, padding_idx=1)
            self.recurrent = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(12, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.recurrent(self.embedding(x))[0])

    return Model(Tagger(), tokens())


TRAINED = (bert, gpt2, llama, sew_d, resnet, vit, spiking, unet, lstm)
# Where modes differ, without dropout: batch statistics, and what is drawn while training.
CASES = [*((make, "train") for make in TRAINED), *((make, "eval") for make in (bert, resnet, unet, compression))]


class Called(nn.Module):
    """A module that is called in a way of its own."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.model, *args)


def weight(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """What an output is multiplied by in the loss."""
    return np.random.default_rng(number).standard_normal(shape)


def _plain(value: Any) -> Any:
    """What a model of transformers returns, as a dict."""
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def of_torch(model: Model, args: list[Any]) -> tuple[list[np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs, the gradient of every parameter, and the buffers afterwards, of a copy of the module."""
    module = copy.deepcopy(model.module)
    returned = model.call(module, *args)
    outputs = [x for x in jax.tree.leaves(_plain(returned)) if x.is_floating_point()]
    loss = sum((y * torch.tensor(weight(i, y.shape))).sum() for i, y in enumerate(outputs))
    loss.backward()
    after = {k: x.detach().numpy() for k, x in (*module.named_parameters(), *module.named_buffers())}
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return [y.detach().numpy() for y in outputs], gradients, after


def assert_close(found: Mapping[Any, Any], wanted: Mapping[Any, Any], precision: float, which: str) -> None:
    """To the precision of the largest number: what is left of sums that cancel is rounding."""
    scale = max((float(np.abs(x).max(initial=0)) for x in wanted.values()), default=0.0)
    for name, theirs in wanted.items():
        assert found[name].shape == theirs.shape
        np.testing.assert_allclose(
            found[name], theirs, rtol=100 * precision, atol=precision * scale, err_msg=f"{which} {name}"
        )


@row("I1", "I2", "I3")
@pytest.mark.parametrize(("make", "mode"), CASES, ids=[f"{make.__name__}-{mode}" for make, mode in CASES])
def test_published_models(make: Callable[[], Model], mode: str) -> None:
    """Of one batch under `jit`, and of two under `vmap`, in one program."""
    torch.manual_seed(0)
    model = make()
    model.module.train(mode == "train")
    if not model.is_single:
        model.module.double()
    precision = 1e-5 if model.is_single else 1e-10
    tensors = [torch.tensor(x) for x in model.batches]
    wanted = [of_torch(model, [x[i] for x in tensors]) for i in range(2)]
    net = jaxfn.from_torch(Called(model.module, model.call))

    def loss(parameters: Any, buffers: Any, args: Any) -> Any:
        returned, moved = net.apply(parameters, buffers, *args)
        outputs = [y for y in jax.tree.leaves(returned) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum((y * weight(i, y.shape)).sum() for i, y in enumerate(outputs)), (outputs, moved)

    step = jax.grad(loss, has_aux=True)

    @jax.jit
    def both(parameters: Any, buffers: Any, batches: Any) -> Any:
        one = step(parameters, buffers, [x[0] for x in batches])
        return one, jax.vmap(step, (None, None, 0))(parameters, buffers, batches)

    one, two = jax.device_get(both(net.parameters, net.buffers, [jnp.asarray(x) for x in model.batches]))
    split = [jax.tree.map(lambda x, i=i: x[i], two) for i in range(2)]
    for which, (outputs, gradients, after), got in (
        ("jit", wanted[0], one),
        ("vmap 0", wanted[0], split[0]),
        ("vmap 1", wanted[1], split[1]),
    ):
        slopes, (found, moved) = got
        assert len(found) == len(outputs)
        assert_close(dict(enumerate(found)), dict(enumerate(outputs)), precision, f"{which}, output")
        slopes = {name.removeprefix("model."): x for name, x in slopes.items()}
        assert slopes.keys() == gradients.keys()
        assert_close(slopes, gradients, precision, f"{which}, gradient of")
        moved = {name.removeprefix("model."): x for name, x in moved.items()}
        assert_close(moved, {name: after[name] for name in moved}, precision, f"{which}, buffer")
    for name in net.buffers:
        if name.endswith("running_mean"):
            assert np.array_equal(one[1][1][name], net.buffers[name]) == (mode == "eval")
