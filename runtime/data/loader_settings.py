"""The settings that sources of single samples share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..kernel.errors import SettingError
from ..kernel.recipe import Batch
from .batch_sizes import BatchSizes
from .fetch_times import FetchTimes
from .partition import Part, pad_by_repeating, partition

__all__ = ["LoaderSettings"]


@dataclass(eq=False, repr=False, kw_only=True)
class LoaderSettings:
    """The settings by which samples are partitioned over readers, split, collated and fetched.

    Raises `SettingError` for numbers out of range.
    """

    global_batch: int
    micro_batch: int
    batch_warmup: int | None = None
    """Steps in which the global batch grows to `global_batch`; see `BatchSizes`."""
    batch_warmup_from: int | None = None
    """Samples of the first global batch."""
    seed: int = 0
    collate: Callable[[list[Any]], Batch] | None = None
    """By default `torch.utils.data.default_collate`."""
    reader_index: int = 0
    num_readers: int = 1
    drop_last: bool = False
    """Leave out the last group of an epoch when it is not full."""
    fixed_size: bool = False
    """Give every microbatch exactly `micro_batch` rows, by repeating samples if there are fewer."""
    counts_rows: bool = False
    """Count the samples that are there, if `collate` leaves some out; see `left_out`."""
    workers: int = 0
    """Number of processes that fetch; with 0 nothing is fetched ahead."""
    prefetch: int = 2
    """Microbatches that each worker keeps ready."""
    start_method: str | None = None
    """The start method of workers: fork, forkserver or spawn; None is the platform's default."""
    sizes: BatchSizes = field(init=False)
    times: FetchTimes = field(init=False, default_factory=FetchTimes)

    def __post_init__(self) -> None:
        if not 0 <= self.reader_index < self.num_readers:
            raise SettingError(f"reader_index is {self.reader_index}, of {self.num_readers}")
        if self.micro_batch < 1 or self.workers < 0 or self.prefetch < 1:
            raise SettingError(
                f"micro_batch ({self.micro_batch}) and prefetch ({self.prefetch}) must be 1 or "
                f"more, workers ({self.workers}) 0 or more"
            )
        if self.global_batch < self.num_readers:
            raise SettingError(
                f"a global batch of {self.global_batch} samples cannot be partitioned over "
                f"{self.num_readers} readers: raise it, or start fewer processes"
            )
        self.sizes = BatchSizes(self.global_batch, self.batch_warmup, self.batch_warmup_from)
        if self.sizes.smallest < self.num_readers:
            raise SettingError(
                f"data.batch_warmup_from is {self.batch_warmup_from}, which cannot be partitioned "
                f"over {self.num_readers} readers: raise it, or start fewer processes"
            )

    def parts(self, num_samples: int) -> tuple[Part, ...]:
        """Return this reader's microbatches of a group of `num_samples` samples."""
        divide = pad_by_repeating if self.fixed_size else partition
        return divide(num_samples, self.micro_batch, self.reader_index, self.num_readers)
