"""The networks in torch."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.has_projection = stride != 1 or channels_in != channels
        if self.has_projection:
            self.conv3 = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.norm3 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return functional.relu(y + (self.norm3(self.conv3(x)) if self.has_projection else x))


class ResNet18(nn.Module):
    """Images of 3 channels, (batch, channel, height, width)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.ModuleList(
            Block(before, after, 1 if before == after else 2) for before, after in itertools.pairwise(widths)
        )
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    """A transformer layer that normalizes first."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ViT(nn.Module):
    """Images of 3 channels, cut into patches."""

    def __init__(self, size: int, patch: int, width: int, heads: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, is_causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class GPT(nn.Module):
    """Tokens (batch, time) become scores of the next ones."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, is_causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LSTM(nn.Module):
    """Tokens (batch, time) become scores of the next ones."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(x))[0])
