"""Adapters of drivetrain's own kinds of data for a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ...data.mixed import MixStream
from ...data.mixture import Joined, Mix
from ...data.prebatched import Batches
from ...data.reading import set_epoch_everywhere
from ...data.stream import ReadAgain
from ...data.tar_shards import TarShards
from ..errors import ArgumentError

__all__ = ["Draws", "loadable"]

_STREAMS = (ReadAgain, TarShards)
_AHEAD = 1024
"""Number of draws that are looked up at once."""


class Draws(Sampler[int]):
    """The order of a mixture: a function of the seed and the epoch."""

    def __init__(self, mixture: Mix, seed: int) -> None:
        self.mixture, self.seed, self.epoch = mixture, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.mixture)

    def __iter__(self) -> Iterator[int]:
        order = self.mixture.order(len(self), self.seed, self.epoch)
        for start in range(0, len(self), _AHEAD):
            yield from order[start : start + _AHEAD].tolist()


class _Sources(Dataset[Any]):
    """All samples of a mixture; its length is that of an epoch."""

    def __init__(self, mixture: Mix) -> None:
        self._length, self._joined = len(mixture), Joined(mixture)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._joined[index]


class _Stream(IterableDataset[Any]):
    """A stream, or a mixture with streams, which restarts in each pass."""

    def __init__(self, stream: Any, seed: int) -> None:
        self._stream, self._seed = stream, seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, whose order may depend on it."""
        set_epoch_everywhere(self._stream, epoch)

    def __iter__(self) -> Iterator[Any]:
        mixed = isinstance(self._stream, Mix)
        return iter(MixStream(self._stream, self._seed) if mixed else self._stream)


def loadable(dataset: Any, seed: int, num_workers: int = 0, is_training: bool = False) -> Any:
    """Return the form in which a DataLoader reads one of drivetrain's data sets; any other data set
    is returned unchanged.

    Raises `ArgumentError` for data that a DataLoader cannot read as intended.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, Batches | DataLoader):
        raise ArgumentError(
            f"the data is a {kind}, whose batches are made already, and the Trainer makes its own: "
            "give the data set, or override get_train_dataloader (get_eval_dataloader) to return "
            "the loader"
        )
    if isinstance(dataset, Mix) and not is_training:
        raise ArgumentError(
            "the data to evaluate on is a Mix, which is drawn by weight, some samples often: give "
            "its sources, eval_dataset={name: data}"
        )
    if isinstance(dataset, Mix) and not dataset.streams:
        return _Sources(dataset)
    if not isinstance(dataset, (Mix, *_STREAMS)):
        return dataset
    if num_workers > 1:
        raise ArgumentError(
            f"dataloader_num_workers is {num_workers}, and a {kind} that is read from the front "
            "has one order, which one worker reads: set it to 0 or 1"
        )
    return _Stream(dataset, seed)
