"""Lengths of data sets and of their samples, and samplers by length, which reduce padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from ..theirs import theirs

__all__ = ["LengthsByEpoch", "has_length", "is_rebalancing", "sample_lengths"]


def has_length(dataset: Any) -> bool:
    """True if a data set has a length."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):  # some data sets without a length raise the latter
        return False


def sample_lengths(
    dataset: Any, column: str | None = None, model_input_name: str | None = None
) -> list[int]:
    """Return the length of each sample: its length column, or else the length of its first input.

    Raises ValueError when samples have neither.
    """
    if column is not None and column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    name = model_input_name or "input_ids"
    sample = dataset[0]
    if not isinstance(sample, Mapping) or name not in sample:
        seen = f"keys {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"the length of samples is unknown: they should be mappings with the key {name!r}, but "
            f"the first is a sample with {seen}. Add a column of lengths (length_column_name), or "
            "use another train_sampling_strategy."
        )
    return [len(dataset[index][name]) for index in range(len(dataset))]


class LengthsByEpoch(Sampler[int]):
    """The order of transformers' `LengthGroupedSampler` as a function of seed and epoch."""

    def __init__(self, batch_size: int, lengths: Sequence[int], seed: int) -> None:
        self.seed, self.epoch = seed, 0
        self._generator = torch.Generator()
        kind = theirs("trainer_pt_utils", "LengthGroupedSampler")
        self._grouped: Any = kind(batch_size, lengths=lengths, generator=self._generator)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration uses."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._generator.manual_seed(self.seed + self.epoch)
        return iter(self._grouped)

    def __len__(self) -> int:
        return len(self._grouped)


def is_rebalancing(sampler: Any) -> bool:
    """True for transformers' `BatchRebalanceSampler`, which yields the batches of one rank."""
    return any(kind.__name__ == "BatchRebalanceSampler" for kind in type(sampler).__mro__)
