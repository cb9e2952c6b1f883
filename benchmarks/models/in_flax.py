"""The networks in idiomatic flax NNX: images have their channels last."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_RNGS = nnx.Rngs(0)  # the initial values are replaced by torch's


def _norm(channels: int) -> nnx.BatchNorm:
    return nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, rngs=_RNGS)


def _layer_norm(width: int) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, rngs=_RNGS)


def _conv(channels_in: int, channels: int, size: int, stride: int, padding: int) -> nnx.Conv:
    return nnx.Conv(channels_in, channels, (size, size), stride, padding=padding, use_bias=False, rngs=_RNGS)


class Block(nnx.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        self.conv1, self.norm1 = _conv(channels_in, channels, 3, stride, 1), _norm(channels)
        self.conv2, self.norm2 = _conv(channels, channels, 3, 1, 1), _norm(channels)
        self.has_projection = stride != 1 or channels_in != channels
        if self.has_projection:
            self.conv3, self.norm3 = _conv(channels_in, channels, 1, stride, 0), _norm(channels)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (self.norm3(self.conv3(x)) if self.has_projection else x))


class ResNet18(nnx.Module):
    def __init__(self, num_classes: int) -> None:
        self.conv, self.norm = _conv(3, 64, 7, 2, 3), _norm(64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nnx.List(
            [Block(before, after, 1 if before == after else 2) for before, after in itertools.pairwise(widths)]
        )
        self.head = nnx.Linear(512, num_classes, rngs=_RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Layer(nnx.Module):
    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = _layer_norm(width), _layer_norm(width)
        self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=_RNGS), nnx.Linear(width, width, rngs=_RNGS)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=_RNGS), nnx.Linear(4 * width, width, rngs=_RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], self.heads, -1)
        query, key, value = (part.reshape(shape) for part in jnp.split(self.qkv(self.norm1(x)), 3, -1))
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(self, size: int, patch: int, width: int, heads: int, depth: int, num_classes: int) -> None:
        self.patches = nnx.Conv(3, width, (patch, patch), patch, padding="VALID", rngs=_RNGS)
        self.positions = nnx.Param(jnp.zeros((1, (size // patch) ** 2, width)))
        self.layers = nnx.List([Layer(width, heads, is_causal=False) for _ in range(depth)])
        self.norm, self.head = _layer_norm(width), nnx.Linear(width, num_classes, rngs=_RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        patches = self.patches(x)
        x = patches.reshape(x.shape[0], -1, patches.shape[-1]) + self.positions[...]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class GPT(nnx.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        self.tokens = nnx.Embed(vocabulary, width, rngs=_RNGS)
        self.positions = nnx.Param(jnp.zeros((length, width)))
        self.layers = nnx.List([Layer(width, heads, is_causal=True) for _ in range(depth)])
        self.norm, self.head = _layer_norm(width), nnx.Linear(width, vocabulary, use_bias=False, rngs=_RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.tokens(x) + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LSTM(nnx.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        self.tokens = nnx.Embed(vocabulary, width, rngs=_RNGS)
        self.lstm = nnx.List([nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=_RNGS)) for _ in range(depth)])
        self.head = nnx.Linear(width, vocabulary, rngs=_RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.tokens(x)
        for layer in self.lstm:
            x = layer(x)
        return self.head(x)


_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}


def load(model: nnx.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Loads the parameters of the torch network into this one."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    loaded = [(path, variable.replace(jnp.asarray(_of(arrays, [str(p) for p in path])))) for path, variable in state]
    nnx.update(model, nnx.from_flat_state(loaded))


def _of(arrays: Mapping[str, np.ndarray], path: list[str]) -> np.ndarray:
    *parents, name = path
    if parents[:1] == ["lstm"]:
        array = _of_lstm(arrays, parents[1], parents[-1], name)
    else:
        array = arrays[".".join([*parents, _NAMES.get(name, name)])]
    if name != "kernel":
        return array
    return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)


def _of_lstm(arrays: Mapping[str, np.ndarray], layer: str, part: str, name: str) -> np.ndarray:
    if name == "kernel":
        return arrays[f"lstm.weight_{'ih' if part == 'dense_i' else 'hh'}_l{layer}"]
    return arrays[f"lstm.bias_ih_l{layer}"] + arrays[f"lstm.bias_hh_l{layer}"]  # one bias for both
