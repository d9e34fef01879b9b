"""Figures of the gradients that the update of a logged step is made with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernel.contract import Session
from ..kernel.errors import CapabilityRefused
from ..kernel.optional import ShowsUpdates
from ..kernel.plan import Parts
from .shown_updates import CountedParts
from .tensor_figures import PartFigures

__all__ = ["GradientDigests"]


class GradientDigests:
    """Takes the figures of each gradient on one rank; see `UpdateObserver`. Without an engine that
    shows its updates there are none."""

    def __init__(self, engine: object, session: Session) -> None:
        self._engine = engine if isinstance(engine, ShowsUpdates) and _can_show(engine) else None
        self._counted, self._found = CountedParts(session), PartFigures()

    def watch(self) -> None:
        """Watch the next update. Called by all ranks."""
        self._found = PartFigures()
        if self._engine is not None:
            self._engine.show_update(self)

    def take(self) -> PartFigures:
        """Return the figures of the last update that was watched."""
        found, self._found = self._found, PartFigures()
        return found

    # --- an update (see `UpdateObserver`) -------------------------------------------------------

    def weights(self, parts: Parts) -> None:
        self._counted.choose(parts)

    @torch.no_grad()
    def gradients(self, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            if name in self._counted.own:
                self._found.add(name, part)


def _can_show(engine: ShowsUpdates) -> bool:
    try:
        engine.show_update(None)
    except CapabilityRefused:
        return False
    return True
