"""Noise on the embeddings while training (NEFTune): https://arxiv.org/abs/2310.05914."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..common.inspection import unwrap_peft

__all__ = ["activate_neftune", "deactivate_neftune"]


def activate_neftune(model: nn.Module, neftune_noise_alpha: float) -> RemovableHandle:
    """Add uniform noise of size alpha / sqrt(length x width) to the output of the input embeddings,
    in training mode only. Return the hook.

    `model`: without a driver's wrapper; a PEFT wrapper is allowed. Raises ValueError for a model
    that does not name its input embeddings.
    """
    embeddings = _input_embeddings(model)
    embeddings.neftune_noise_alpha = neftune_noise_alpha  # type: ignore[assignment]
    return embeddings.register_forward_hook(_add_noise)


def deactivate_neftune(model: nn.Module, handle: RemovableHandle) -> None:
    """Remove the noise."""
    handle.remove()
    embeddings = _input_embeddings(model)
    if hasattr(embeddings, "neftune_noise_alpha"):
        del embeddings.neftune_noise_alpha


def _input_embeddings(model: nn.Module) -> nn.Module:
    model = unwrap_peft(model)
    if not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            f"neftune_noise_alpha needs to know the input embeddings of {type(model).__name__}:"
            " give it a method get_input_embeddings() that returns them"
        )
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    return embeddings


def _add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Add noise to embeddings of shape (batch, length, width) in training mode."""
    if not module.training:
        return output
    alpha: Any = module.neftune_noise_alpha
    size = (alpha / torch.tensor(float(output.size(1) * output.size(2))).sqrt()).item()
    return output + torch.zeros_like(output).uniform_(-size, size)
