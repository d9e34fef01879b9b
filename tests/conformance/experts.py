"""Experts of a mixture, and a wrapper that gives any small model parts for each kind of
parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["EXPERTS", "Experts", "InParts"]

EXPERTS = 4


class Experts(nn.Module):
    """Maps tokens (N, D) to (N, D), given the experts (N, K) of each token and their weights (N,
    K).
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, width) / hidden**0.5)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):  # all tokens: on some devices shapes must not vary
            share = torch.where(indices == expert, weights, 0.0).sum(-1, keepdim=True)
            answer = functional.gelu(tokens @ self.up[expert]) @ self.down[expert]
            result = result + (answer * share).to(result.dtype)
        return result


class InParts(nn.Module):
    """Applies a model to each position of a sequence, followed by experts that are all used."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.router = model, nn.Linear(width, EXPERTS)
        self.experts = Experts(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.model(x.flatten(0, 1))
        weights = self.router(tokens).float().softmax(-1)
        indices = torch.arange(EXPERTS, device=x.device).expand_as(weights)
        y: Tensor = tokens + self.experts(tokens, indices, weights)
        return y.view(*x.shape[:2], -1)
