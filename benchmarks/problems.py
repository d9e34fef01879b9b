"""Models whose forward returns the mean loss, and their data. All candidates train these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


def collate(samples: list[Batch]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def summed_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The loss as the kernel takes it, of a model that knows means: a sum over samples."""
    mean: Tensor = module(**batch)["loss"]
    return mean * len(batch["labels"])


@dataclass(frozen=True)
class Problem:
    """Every candidate trains `model()` on `data()`, in order, `batch` samples a forward."""

    model: Callable[[], nn.Module]
    data: Callable[[], torch.utils.data.Dataset[Batch]]
    batch: int
    log_every: int
    sum: Callable[[nn.Module, Batch], Tensor] = summed_loss
    """Sum of the losses, for the kernel, which divides sums itself."""


# --- a tiny MLP: the trainer is most of the work ------------------------------------------------

FEATURES = 16


class Rows(torch.utils.data.Dataset[Batch]):
    """Samples as Hugging Face's collator wants them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(4096, FEATURES, generator=generator)
        self.labels = self.inputs.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Mlp(nn.Module):
    """An MLP whose forward returns the squared error under `loss`, reduced like torch's losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor, labels: Tensor, reduction: str = "mean") -> dict[str, Tensor]:
        errors = (self.layers(inputs) - labels).square()
        return {"loss": errors.mean() if reduction == "mean" else errors.sum()}


def summed_error(module: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = module(**batch, reduction="sum")["loss"]
    return loss


MLP = Problem(Mlp, Rows, batch=8, log_every=500, sum=summed_error)


# --- a GPT: the model is most of the work ---------------------------------------------------------


@dataclass(frozen=True)
class GptSize:
    """Size of a GPT, by default 10 million parameters."""

    vocabulary: int = 8192
    sequence: int = 128
    width: int = 320
    heads: int = 8
    layers: int = 6


SMALL = GptSize()


class Tokens(torch.utils.data.Dataset[Batch]):
    """Random sequences; what they say does not change how long a step takes."""

    def __init__(self, size: GptSize = SMALL) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (512, size.sequence + 1)
        self.tokens = torch.randint(size.vocabulary, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        return {"inputs": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Attention, whose heads are split by their size, and what `feed` builds."""

    def __init__(self, size: GptSize, feed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        width = size.width
        self.head_size = width // size.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = feed(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, length, 3, -1, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        fed: Tensor = self.feed(self.second_norm(x))
        return x + fed


class Gpt(nn.Module):
    """A GPT whose forward returns the mean cross-entropy under `loss`."""

    def __init__(
        self, size: GptSize = SMALL, feed: Callable[[int], nn.Module] = feed_forward
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.Sequential(*(Block(size, feed) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(
        self, inputs: Tensor, labels: Tensor, places: Tensor | None = None
    ) -> dict[str, Tensor]:
        if places is None:
            places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.norm(self.blocks(self.tokens(inputs) + self.positions(places)))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


GPT = Problem(Gpt, Tokens, batch=8, log_every=10)

PROBLEMS = {"mlp": MLP, "gpt": GPT}


def checksum(module: nn.Module) -> float:
    """The sum of the squares of the weights: equal where equal work was done."""
    return sum(float(p.detach().double().square().sum()) for p in module.parameters())


def plain(module: Any) -> nn.Module:
    """The user's own module, without a wrapper's shell."""
    return getattr(module, "module", module)
