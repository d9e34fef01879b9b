"""The memory of each phase of a Trainer, which transformers measures where it is asked for."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..theirs import theirs

__all__ = ["memory_tracker"]


class _Nothing:
    """Measures nothing."""

    def start(self) -> None: ...

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None: ...


def memory_tracker(skip_memory_metrics: bool) -> Any:
    """transformers' `TrainerMemoryTracker`, which knows phases by the names of the methods that
    call it. Raises ImportError where psutil is missing, with which it measures.
    """
    if skip_memory_metrics:
        return _Nothing()
    if importlib.util.find_spec("psutil") is None:
        raise ImportError("skip_memory_metrics=False measures by psutil: pip install psutil")
    return theirs("trainer_utils", "TrainerMemoryTracker")()
