"""Sizes of global batches: one size for the whole run, or sizes that grow at its beginning.

The size of a group depends only on its position in the data. So a resumed run makes the same
groups, on any number of ranks, and after steps that were rolled back or left out.
"""

from __future__ import annotations

from bisect import bisect_right
from math import ceil
from typing import NamedTuple

from ..kernel.errors import SettingError
from .partition import steps_per_epoch

__all__ = ["MOST_WARMUP_STEPS", "BatchSizes", "Stage"]

MOST_WARMUP_STEPS = 10**6
"""Upper bound of `warmup`, since each step may be a stage of its own."""


class Stage(NamedTuple):
    """Steps with global batches of one size."""

    step: int
    """Number of steps before the stage, if the epoch is long enough."""
    samples: int
    """Number of samples before the stage."""
    size: int


class BatchSizes:
    """The size of each global batch, as a function of the number of samples before it.

    With `warmup`, that many first steps have multiples of `start` samples, each multiple for nearly
    the same number of steps; later steps have `global_batch`. Raises `SettingError`.
    """

    def __init__(
        self, global_batch: int, warmup: int | None = None, start: int | None = None
    ) -> None:
        self.global_batch = global_batch
        self.stages = [Stage(0, 0, global_batch)]
        if warmup is not None and start is not None:
            _check(global_batch, start)
            self.stages = _growing(global_batch, warmup, start)
        elif (warmup, start) != (None, None):
            raise SettingError(
                f"data.batch_warmup is {warmup} and data.batch_warmup_from is {start}: set both, "
                "the number of steps and the first global batch, or neither"
            )
        self._begins = [stage.samples for stage in self.stages]

    @property
    def smallest(self) -> int:
        """The first size."""
        return self.stages[0].size

    @property
    def grown_at(self) -> int:
        """Number of samples after which every group has `global_batch` samples."""
        return self._begins[-1]

    def at(self, samples: int) -> int:
        """Return the size of the group that begins after a number of samples."""
        return self.stages[bisect_right(self._begins, samples) - 1].size

    def count(self, first: int, limit: int, end: int, drop_last: bool) -> int:
        """Return the number of groups that begin from `first` to before `limit`, in data that end
        at `end`. `drop_last`: do not count a group that `end` leaves incomplete."""
        groups = 0
        while first < limit:
            number = bisect_right(self._begins, first)
            until = min([limit, *self._begins[number : number + 1]])
            size = self.stages[number - 1].size
            more = -(-(until - first) // size)
            groups, first = groups + more, first + more * size
        return groups - (drop_last and first > end)

    def steps_left(
        self, before: int, length: int, taken: int, left: int, drop_last: bool, part: float = 1.0
    ) -> int:
        """Return the number of groups in the `left` samples of an epoch, or of a part of it.
        `taken` of its `length` samples were consumed. `before`: the samples of earlier epochs."""
        first = before + taken
        wanted = min(left, self.limit(length, drop_last, part) - taken)
        return self.count(first, first + wanted, first + left, drop_last)

    def limit(self, length: int, drop_last: bool, part: float) -> int:
        """Return the place in an epoch before which all groups of a part of the epoch begin."""
        if part == 1:
            return length
        groups = ceil(part * steps_per_epoch(length, self.global_batch, drop_last))
        return groups * self.global_batch

    def steps_in(self, first: int, epochs: float, length: int, drop_last: bool) -> int:
        """Return the number of groups from the beginning of epoch `first` until the run has done
        `epochs` epochs."""
        full = steps_per_epoch(length, self.global_batch, drop_last)
        steps = ceil(max(0, epochs - first) * full)
        for epoch in range(first, ceil(epochs)):
            if epoch * length >= self.grown_at:
                break
            part = min(1, epochs - epoch)
            with_small = self.steps_left(epoch * length, length, 0, length, drop_last, part)
            steps += with_small - ceil(part * full)
        return steps


def _check(global_batch: int, start: int) -> None:
    if start >= global_batch or global_batch % start:
        raise SettingError(
            f"data.batch_warmup_from is {start}, and global_batch is {global_batch}: the first "
            "global batch must be smaller, and divide it, since the batch grows by its multiples"
        )


def _growing(global_batch: int, warmup: int, start: int) -> list[Stage]:
    num_smaller = global_batch // start - 1
    num_stages = min(num_smaller, warmup)
    stages = [Stage(0, 0, start)]
    for number in range(1, num_stages + 1):
        step, (step_before, samples, size) = -(-number * warmup // num_stages), stages[-1]
        samples += (step - step_before) * size
        stages.append(Stage(step, samples, start * (1 + number * num_smaller // num_stages)))
    return stages
