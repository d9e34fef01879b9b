"""Noise on the embeddings during training."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..integrations.neftune import activate_neftune, deactivate_neftune

__all__ = ["NeftuneMixin"]


class NeftuneMixin:
    """The trainer's two methods before and after training. They take the model without a
    wrapper."""

    neftune_noise_alpha: float | None
    neftune_hook_handle: RemovableHandle

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """Return the model with noisy embeddings from now on, by `neftune_noise_alpha`."""
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle = activate_neftune(model, self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Remove the noise; also called after an error."""
        if hasattr(self, "neftune_hook_handle"):
            deactivate_neftune(model, self.neftune_hook_handle)
            del self.neftune_hook_handle
