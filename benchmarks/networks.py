"""Models of at least 50 million parameters, of several kinds, for measurements of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from .problems import Gpt, GptSize, Tokens, collate

__all__ = ["NETWORKS", "Network"]

Pairs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Network:
    """A model with its data."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: tuple[str, ...]
    """Classes of modules whose activations can be recomputed."""
    batch: int = 8
    parallel: dict[str, Any] = field(default_factory=dict)
    collate: Any = None


def regressed(module: nn.Module, batch: Pairs) -> Tensor:
    """Return the squared error against zero: a sum over samples."""
    result: Tensor = module(*batch).float().square().flatten(1).mean(1).sum()
    return result


GPT = GptSize(vocabulary=16384, sequence=128, width=640, heads=8, layers=9)


def of_tokens(module: nn.Module, batch: Any) -> Tensor:
    """Return the sum over samples of the mean over positions, of which some may be on other
    ranks."""
    mean: Tensor = module(**batch)["loss"]
    return mean * (batch["labels"].numel() / GPT.sequence)


class MixerBlock(nn.Module):
    """Mixes patches, then channels (https://arxiv.org/abs/2105.01601)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.first(x).mT).mT
        mixed: Tensor = x + self.channels(self.second(x))
        return mixed


def mixer() -> nn.Module:
    """An MLP-Mixer on 64 patches."""
    return nn.Sequential(*(MixerBlock(64, 768) for _ in range(11)), nn.Linear(768, 1000))


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut (https://arxiv.org/abs/1512.03385)."""

    def __init__(self, channels: int, grown: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, grown, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(grown, grown, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(grown) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, grown, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def residual() -> nn.Module:
    """A wide residual network for images of 32 x 32."""
    sizes = [64, 320, 320, 640, 640, 992, 992]
    blocks = [
        ResidualBlock(before, after, 1 + (before != after))
        for before, after in itertools.pairwise(sizes)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(992, 1000))
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, *head)


class Stage(nn.Module):
    """A level of a U-Net, with the levels below it."""

    def __init__(self, channels: int, inner: nn.Module | None) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, 2 * channels, 3, 2, padding=1)
        self.norm, self.inner = nn.GroupNorm(8, 2 * channels), inner or nn.Identity()
        self.up = nn.ConvTranspose2d(2 * channels, channels, 4, 2, padding=1)
        self.joined = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        below = self.up(self.inner(F.silu(self.norm(self.down(x)))))
        result: Tensor = self.joined(torch.cat([x, below], 1))
        return result


def unet() -> nn.Module:
    """A U-Net (https://arxiv.org/abs/1505.04597)."""
    inner = None
    for channels in (768, 384, 192, 96):
        inner = Stage(channels, inner)
    return nn.Sequential(nn.Conv2d(3, 96, 3, padding=1), inner, nn.Conv2d(96, 3, 3, padding=1))


class Recurrent(nn.Module):
    """Gated recurrent units over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16384, 1024)
        self.units = nn.GRU(1024, 1024, num_layers=5, batch_first=True)
        self.head = nn.Linear(1024, 4096)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.units(self.embed(x))[0])
        return result


class Recommender(nn.Module):
    """Tables of categories beside figures (https://arxiv.org/abs/1906.00091)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50_000, 64, mode="sum") for _ in range(16))
        self.figures = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 64))
        self.top = nn.Sequential(nn.Linear(64 + 17 * 17, 2048), nn.ReLU(), nn.Linear(2048, 1))

    def forward(self, figures: Tensor, categories: Tensor) -> Tensor:
        dense = self.figures(figures)
        found = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], 1)
        pairs = torch.bmm(vectors, vectors.mT).flatten(1)
        result: Tensor = self.top(torch.cat([dense, pairs], 1))
        return result


class DenseLayer(nn.Module):
    """A wide layer with dropout."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(before, after), nn.LayerNorm(after)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = F.dropout(F.gelu(self.norm(self.layer(x))), 0.1, self.training)
        return result


def autoencoder() -> nn.Module:
    """An autoencoder of vectors."""
    sizes = [4096, 4096, 2048, 512, 2048, 4096, 4096]
    return nn.Sequential(*(DenseLayer(a, b) for a, b in itertools.pairwise(sizes)))


NETWORKS: dict[str, Network] = {
    "GPT": Network(
        model=lambda: Gpt(GPT),
        data=lambda: Tokens(GPT),
        loss=of_tokens,
        blocks=("Block",),
        parallel={
            "tensor": {
                **dict.fromkeys(("blocks.*.qkv", "blocks.*.feed.0"), "column"),
                **dict.fromkeys(("blocks.*.out", "blocks.*.feed.2"), "row"),
            },
            "fused": {"blocks.*.qkv": 3},
            "sequence": {"inputs": 1, "labels": 1},
            "positions": "places",
        },
        collate=collate,
    ),
    "mixer": Network(
        mixer, lambda: TensorDataset(torch.zeros(128, 64, 768)), regressed, ("MixerBlock",)
    ),
    "residual": Network(
        residual, lambda: TensorDataset(torch.zeros(128, 3, 32, 32)), regressed, ("ResidualBlock",)
    ),
    "U-Net": Network(unet, lambda: TensorDataset(torch.zeros(128, 3, 64, 64)), regressed, ()),
    "GRU": Network(
        Recurrent,
        lambda: TensorDataset(torch.zeros(128, 64, dtype=torch.int64)),
        regressed,
        (),
    ),
    "recommender": Network(
        Recommender,
        lambda: TensorDataset(torch.zeros(512, 32), torch.zeros(512, 16, 8, dtype=torch.int64)),
        regressed,
        (),
        batch=128,
    ),
    "autoencoder": Network(
        autoencoder,
        lambda: TensorDataset(torch.zeros(512, 4096)),
        regressed,
        ("DenseLayer",),
        batch=256,
    ),
}
