"""The time that fetching and collating samples takes, wherever that is done."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel.batches import Microbatch

__all__ = ["FetchTimes"]


@dataclass
class FetchTimes:
    """Sums over the microbatches that this process has received. Workers fetch side by side, so
    that the sum may exceed the time that has passed."""

    samples: int = 0
    batches: int = 0
    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0

    def add(self, received: Microbatch) -> Microbatch:
        """Count a microbatch, and return it."""
        fetched, collated = received.seconds
        self.samples += received.num_samples
        self.batches += 1
        self.fetch_seconds += fetched
        self.collate_seconds += collated
        return received
