"""Lowers the learning rate when evaluations no longer improve: `schedule.name=plateau`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernel import events
from .settings import ScheduleSettings
from .watched_metric import WatchesMetric

__all__ = ["Plateau"]


class Plateau(WatchesMetric):
    """An observer that counts the falls of the learning rate. One comes after `schedule.patience`
    consecutive evaluations without a better value of `schedule.metric`, and the next one at the
    earliest after as many more (torch.optim.lr_scheduler.ReduceLROnPlateau with a patience of one
    less). Its state is saved with each checkpoint.
    """

    decides = "lower its learning rate"

    def __init__(self, settings: ScheduleSettings) -> None:
        """Raises `SettingError`."""
        metric, patience = str(settings.metric), settings.patience
        super().__init__(metric, patience, settings.mode, settings.min_change)
        self._gamma, self._falls = settings.gamma, 0

    @property
    def factor(self) -> float:
        """Factor of the learning rates in the next update."""
        return float(self._gamma**self._falls)

    def __call__(self, event: events.Event) -> None:
        if self.add(event) and self.is_exhausted:
            self._falls, self._misses = self._falls + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the metric, and the falls so far."""
        return {**super().state_dict(), "falls": self._falls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; the falls also where another metric decides now.
        Raises ValueError for another structure."""
        falls = state.get("falls")
        if not isinstance(falls, int) or falls < 0:
            raise ValueError(f"falls is {falls!r:.40}")
        super().load_state_dict(state)
        self._falls = falls
