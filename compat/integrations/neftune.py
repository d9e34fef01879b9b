"""Noise on the embeddings while training (NEFTune): https://arxiv.org/abs/2310.05914."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..trainer.inspection import unwrap_peft

__all__ = ["NeftuneMixin", "activate_neftune", "deactivate_neftune"]


def activate_neftune(model: nn.Module, neftune_noise_alpha: float) -> RemovableHandle:
    """Add uniform noise of size alpha / sqrt(length x width) to what the input embeddings give,
    in training mode only. Returns the hook.

    `model`: without a driver's wrapper; PEFT's is looked through. Raises ValueError for a model
    that cannot say which its input embeddings are.
    """
    embeddings = _input_embeddings(model)
    embeddings.neftune_noise_alpha = neftune_noise_alpha  # type: ignore[assignment]
    return embeddings.register_forward_hook(_add_noise)


def deactivate_neftune(model: nn.Module, handle: RemovableHandle) -> None:
    """Take the noise away again."""
    handle.remove()
    embeddings = _input_embeddings(model)
    if hasattr(embeddings, "neftune_noise_alpha"):
        del embeddings.neftune_noise_alpha


class NeftuneMixin:
    """The trainer's two methods around training. The model goes in without a wrapper."""

    neftune_noise_alpha: float | None
    neftune_hook_handle: RemovableHandle

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """The model, its embeddings noisy from now on, by `neftune_noise_alpha`."""
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle = activate_neftune(model, self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Undo it. To be called after an error, too."""
        if hasattr(self, "neftune_hook_handle"):
            deactivate_neftune(model, self.neftune_hook_handle)
            del self.neftune_hook_handle


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
    """Embeddings of shape (batch, length, width), noisy in training mode."""
    if not module.training:
        return output
    alpha: Any = module.neftune_noise_alpha
    size = (alpha / torch.tensor(float(output.size(1) * output.size(2))).sqrt()).item()
    return output + torch.zeros_like(output).uniform_(-size, size)
