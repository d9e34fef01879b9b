"""A rank's part of a stream of samples, under the name that other code imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rank_batches import BatchSharder, RankStream

__all__ = ["IterableDatasetShard"]


@dataclass(frozen=True)
class _Share:
    feeder_index: int
    num_feeders: int


class IterableDatasetShard(RankStream):
    """Deals a stream out over ranks: of each `batch_size * num_processes` samples, this rank's
    `batch_size`, so that all ranks yield equally many.

    At the end a group that is not full is dropped, or filled up from the first group.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ) -> None:
        dealer = BatchSharder(_Share(process_index, num_processes), batch_size, drop_last=drop_last)
        super().__init__(dataset, dealer, batch_size, seed)
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
