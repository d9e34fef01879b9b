"""Networks of a few weights that train in a moment, for jobs that change or watch them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

SETTINGS = {
    "steps": 3,
    "global_batch": 8,
    "micro_batch": 2,
    "data.shuffle": False,
    "schedule.name": "constant",
    "max_grad_norm": None,
}
"""Settings of a run in which nothing but the network acts on the gradients."""


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy on the CPU of the module's state."""
    state = module.state_dict()
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


class TwoLayers(nn.Module):
    """Two linear layers, from rows of four numbers to rows of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.first(x)))
        return made


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


class Blocks(nn.Module):
    """Two blocks between two linear layers. One weight of a block and one weight of the root carry
    the attribute `_no_weight_decay`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(4, 4)
        for weight in (self.last.weight, self.blocks[0].up.weight):
            weight._no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.last(x)
        return made


class Attention(nn.Module):
    """Attention of two heads, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        made: Tensor = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return made


class AttentionBlock(nn.Module):
    """A residual block of attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), Attention()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        made: Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


class Transformer(nn.Module):
    """Two blocks with attention between an embedding and a head of eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([AttentionBlock() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.norm(x))
        return made
