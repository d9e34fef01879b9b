"""LoRA: a linear layer learns a change of low rank, and its weight stays unchanged.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernel.errors import RecipeError

__all__ = ["LoraLinear", "lora"]


def lora(
    module: nn.Module, pattern: str, rank: int = 8, *, alpha: float | None = None
) -> nn.Module:
    """Freeze a model but for changes of rank `rank` to the linear layers in whose name `pattern`
    (a regular expression) is found; returns the model, for `Recipe.model`.

    A change counts `alpha / rank` times; by default once. What else is to learn, such as a new
    head, is unfrozen afterwards with `requires_grad_()`. Weights keep their names, and
    `drivetrain checkpoint export` writes them whole, with their changes added.

    Raises `RecipeError` where nothing is found, for a rank out of range, and for a weight that is
    shared with another layer.
    """
    found = {name: part for name, part in module.named_modules() if _changes(part, name, pattern)}
    if not found:
        linear = [name for name, part in module.named_modules() if type(part) is nn.Linear]
        raise RecipeError(
            f"no linear layer of {type(module).__name__} has {pattern!r} in its name; there are "
            f"{', '.join(linear[:10]) or 'none'}{' and others' * (len(linear) > 10)}"
        )
    used = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    module.requires_grad_(False)
    for name, linear_layer in found.items():
        assert isinstance(linear_layer, nn.Linear), "as it was chosen"
        if used[id(linear_layer.weight)] > 1:
            raise RecipeError(
                f"the weight of {name!r} is another layer's, too, and cannot change for one of "
                "them: leave it out of the pattern"
            )
        changed = LoraLinear(linear_layer, name, rank, rank if alpha is None else alpha)
        if not name:
            return changed
        module.set_submodule(name, changed)
    return module


class LoraLinear(nn.Linear):
    """A linear layer with a change of low rank beside its weight."""

    lora_scale: Tensor

    def __init__(self, linear: nn.Linear, name: str, rank: int, alpha: float) -> None:
        most = min(linear.in_features, linear.out_features)
        if not 1 <= rank <= most:
            raise RecipeError(f"rank is {rank}; for {name!r} it must be from 1 to {most}")
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        like = linear.weight
        self.lora_a = nn.Parameter(like.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(like.new_empty(linear.out_features, rank))
        self.register_buffer("lora_scale", torch.tensor(alpha / rank, device=like.device))
        self._reset_change()

    def reset_parameters(self) -> None:
        """Initialize weight and bias as torch does, and set the change to zero."""
        super().reset_parameters()
        self._reset_change()

    def _reset_change(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, input: Tensor) -> Tensor:
        change = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return F.linear(input, self.weight, self.bias) + change * self.lora_scale.to(change.dtype)


def _changes(part: nn.Module, name: str, pattern: str) -> bool:
    return type(part) is nn.Linear and re.search(pattern, name) is not None
