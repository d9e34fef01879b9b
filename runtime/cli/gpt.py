"""The recipe of `drivetrain train` without a recipe: a small GPT on Python's own source.

Copy this file to start your own (`drivetrain train my.py`). Nothing is downloaded: the text is the
standard library of the Python that runs this, byte by byte, so that the vocabulary is 0..255.
Shapes: B sequences, T positions, C channels, H heads.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.data.parallel import Parallel
from drivetrain.kernel.recipe import Recipe
from drivetrain.trainer.settings import (
    CheckpointSettings,
    EvaluateSettings,
    OptimizerSettings,
    ScheduleSettings,
    Settings,
)

VOCABULARY = 256
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}  # tables and manuals, long enough to sway a split

item_name = "bytes"
"""The name that progress and report use for the items that `count_items` counts."""

settings = Settings(
    steps=700,
    global_batch=8,
    log_every=10,
    optimizer=OptimizerSettings(lr=4e-3, weight_decay=0.1, args={"betas": [0.9, 0.95]}),
    schedule=ScheduleSettings(name="cosine", warmup=30, final=0.1),
    evaluate=EvaluateSettings(every=150, micro_batch=32),
    checkpoint=CheckpointSettings(every=300),
)


@dataclass(frozen=True)
class Config:
    """The values that `--set recipe.KEY=VALUE` changes."""

    width: int = 192
    layers: int = 6
    heads: int = 6
    context: int = 128
    """Bytes that one sequence predicts."""
    dropout: float = 0.0
    eval_sequences: int = 128
    """Held-out sequences that an evaluation goes through."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions (https://arxiv.org/abs/2104.09864)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_size))  # as many heads as are here
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cosine, sine),
            rotate(key, cosine, sine),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.drop(self.attention(self.norm1(x), cosine, sine))
        return cast(Tensor, x + self.drop(self.down(F.gelu(self.up(self.norm2(x))))))


class GPT(nn.Module):
    """A decoder with one matrix for reading and writing bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # what is added to the stream is scaled down with depth, as in GPT-2
                last = name.endswith(("out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * config.layers) if last else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, T) bytes to (B, T, 256) logits of the byte that follows each. `positions`: theirs,
        (1, T), where they do not begin at 0."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cosine, sine = rotations(positions[0], self.config)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return cast(Tensor, self.head(self.norm(x)))


def rotations(positions: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (T, C / H / 2) each."""
    half = config.width // config.heads // 2
    speeds = 1000.0 ** (-torch.arange(half, device=positions.device) / half)
    angles = positions[:, None] * speeds
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the two halves of each head of (B, H, T, C / H) by the angles of its position."""
    left, right = x.chunk(2, dim=-1)
    turned = (left * cosine - right * sine, left * sine + right * cosine)
    return torch.cat(turned, dim=-1).to(x.dtype)


class Windows:
    """Sequences of `context + 1` bytes that share one end byte; a map-style data set."""

    def __init__(self, text: bytes, context: int, limit: int | None = None) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.length = max(0, (len(text) - 1) // context)
        self.stride = 1
        if limit is not None and self.length > limit:
            self.stride, self.length = self.length // limit, limit  # spread over the whole text
        self.offsets = torch.arange(context + 1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """(B, T + 1) bytes, in one read."""
        starts = torch.as_tensor(indices) * (self.context * self.stride)
        return self.text[starts[:, None] + self.offsets]


def collate(samples: Tensor | list[Tensor]) -> dict[str, Tensor]:
    """The bytes of (B, T + 1), and what follows each: (B, T) both."""
    rows = samples if isinstance(samples, Tensor) else torch.stack(samples)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


parallel = Parallel(
    tensor={
        "embed": "vocabulary",
        "head": "vocabulary",
        "blocks.*.attention.qkv": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    },
    fused={"blocks.*.attention.qkv": 3},
    sequence={"tokens": 1, "targets": 1},
    positions="positions",
)
"""How `--backend mesh` may partition the model over ranks."""


def read_library(folder: Path) -> tuple[bytes, bytes]:
    """The source of a library for training, and of its held-out files.

    A hash of its relative path says where a file belongs, so that the split never moves.
    """
    training: list[bytes] = []
    held_out: list[bytes] = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.is_file():
            digest = hashlib.sha256(relative.as_posix().encode()).digest()
            (held_out if digest[0] < 26 else training).append(path.read_bytes())  # 26 of 256: 10 %
    return b"\n".join(training), b"\n".join(held_out)


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of each next byte in nats, summed."""
    logits = module(batch["tokens"].long(), batch.get("positions"))
    targets = batch["targets"].long().flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")


def count_items(batch: Mapping[str, Tensor]) -> int:
    """The number of bytes that are predicted."""
    return batch["targets"].numel()


def measure(module: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The sums that evaluation adds up."""
    return {"nats": loss(module, batch)}


def summarise(sums: Mapping[str, Tensor]) -> Mapping[str, float]:
    """Loss in nats a byte, and in bits."""
    nats = float(sums["nats"] / sums["items"])
    return {"loss": nats, "bits_per_byte": nats / math.log(2)}


def flops_per_item(config: Config) -> float:
    """Forward and backward: 6 a weight in a matrix, and attention's two products."""
    weights = 12 * config.layers * config.width**2 + VOCABULARY * config.width
    attention = 6 * config.layers * config.width * config.context  # causal: half of the square
    return float(6 * weights + attention)


def recipe(config: Config) -> Recipe:
    """The function that `drivetrain train` calls in a recipe file."""
    training, held_out = read_library(Path(sysconfig.get_paths()["stdlib"]))
    return Recipe(
        model=lambda: GPT(config),
        loss=loss,
        train_data=Windows(training, config.context),
        eval_data={"held_out": Windows(held_out, config.context, config.eval_sequences)},
        collate=collate,
        count_items=count_items,
        measure=measure,
        summarise=summarise,
        flops_per_item=flops_per_item(config),
        parallel=parallel,
    )


@torch.no_grad()
def sample(module: nn.Module, length: int = 200) -> str:
    """Text that the model writes after `def `; always the same for the same weights."""
    device = next(module.parameters()).device
    context = 128
    generator = torch.Generator().manual_seed(0)  # private: training's is left alone
    text = list(b"\ndef ")
    for _ in range(length):
        tokens = torch.tensor([text[-context:]], device=device)
        logits = module(tokens)[0, -1].float().cpu()
        best = logits.topk(40)
        weights = (best.values / 0.7).softmax(0)
        choice = torch.multinomial(weights, 1, generator=generator)
        text.append(int(best.indices[choice]))
    return bytes(text).decode("utf-8", errors="replace").strip("\n")
