"""Shows the updates of a model that each rank holds whole (`ShowsUpdates`)."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["ShowsWholeWeights"]


class ShowsWholeWeights:
    """The base of an engine whose rank holds each weight and its gradient whole."""

    own: nn.Module
    """The user's own module."""
    runs_all_modules = True
    _observer: Any = None
    """The observer of the next update; see `show_update`."""

    def show_update(self, observer: Any) -> None:
        """See `ShowsUpdates`."""
        self._observer = observer

    def own_parts(self) -> dict[str, Any]:
        """Return each parameter, which this rank holds whole, and its shape."""
        return {name: (p.detach(), tuple(p.shape)) for name, p in self.own.named_parameters()}

    def _show_update(self) -> None:
        observer, self._observer = self._observer, None
        observer.weights(self.own_parts())
        named = self.own.named_parameters()
        observer.gradients({name: p.grad.detach() for name, p in named if p.grad is not None})
