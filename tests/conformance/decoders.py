"""Small decoders: a plain one, and one whose layers are mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .experts import EXPERTS, Experts

__all__ = ["LENGTH", "VOCABULARY", "WIDTH", "AllChosenModel", "LanguageModel", "MixtureModel"]

VOCABULARY, LENGTH, WIDTH, HEADS = 29, 10, 16, 2


class Block(nn.Module):
    """Causal attention and an MLP, both residual, normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class LanguageModel(nn.Module):
    """Two blocks between an embedding and a head that are one parameter."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(self.block(), self.block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        where = self.position if positions is None else self.position[positions]
        hidden = self.blocks(self.embedding(tokens) + where)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class MixtureBlock(nn.Module):
    """Attention with as many heads as ranks may partition it over, and a mixture of experts."""

    HEADS, CHOSEN, HIDDEN = 4, 2, 2 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mixture_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(WIDTH, self.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // self.HEADS)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        tokens = self.mixture_norm(x).flatten(0, 1)
        weights, indices = self.router(tokens).float().softmax(-1).topk(self.CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        y: Tensor = x + self.experts(tokens, indices, weights).unflatten(0, x.shape[:2])
        return y


class MixtureModel(LanguageModel):
    """A `LanguageModel` whose blocks are mixtures."""

    block = MixtureBlock


class AllChosenBlock(MixtureBlock):
    """A mixture that uses every expert, so that rounding cannot change the choice. Its experts
    together are as large as the MLP of a plain block.
    """

    CHOSEN, HIDDEN = EXPERTS, 2 * WIDTH // EXPERTS


class AllChosenModel(LanguageModel):
    block = AllChosenBlock
