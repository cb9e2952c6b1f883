"""Small models of packages that other people published, unchanged, to which `from_torch` is applied."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

# Unpacked together in the folder `models` of the one that `JAXFN_WILD_SRC` names, without what they depend on: that
# would be another build of torch. Those from einops on are what CompressAI imports.
PACKAGES = (
    *("timm==1.0.31", "torchvision==0.28.0", "compressai==1.2.8", "pytorch_msssim==1.0.0", "einops==0.8.2", "pandas"),
    *("python-dateutil", "pytz", "torch_geometric==2.8.1", "xxhash", "requests", "urllib3", "certifi"),
    "charset_normalizer",
)
FOLDER = os.path.join(os.environ.get("JAXFN_WILD_SRC", ""), "models")


def package(name: str) -> Any:
    """A package, or one of its modules; where it cannot be imported, the test is skipped."""
    if os.path.isdir(FOLDER) and FOLDER not in sys.path:
        sys.path.append(FOLDER)  # what the environment has comes first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_torchvision()
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name}: {error}")


def _import_torchvision() -> None:
    """Its wheel is built for another build of torch than the one for CPUs, and says so: its kernels are not there."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    except ImportError:
        pass


class Model(NamedTuple):
    """A model and its arguments.

    Attributes:
      module: with all dropout at 0.
      batches: two batches for each argument.
      call: how it is called, if not with the batch alone.
      is_single: whether it makes numbers in single precision, whatever its inputs.
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
    """Sound; its attention has custom Functions."""
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


def outputs_of(returned: Any) -> list[Any]:
    """The floating-point tensors or arrays that a model returned, those of a dict of transformers too."""

    def plain(value: Any) -> Any:
        return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    return [x for x in jax.tree.leaves(plain(returned)) if "float" in str(x.dtype)]
