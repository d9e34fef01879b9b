"""Samplers that look at how long samples are, so that little is padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Sampler

from .rank_batches import chunks

__all__ = [
    "BatchRebalanceSampler",
    "LengthGroupedSampler",
    "get_length_grouped_indices",
    "sample_lengths",
]


def sample_lengths(
    dataset: Any, column: str | None = None, model_input_name: str | None = None
) -> list[int]:
    """The length of each sample: its length column, or else the length of its first input.

    Raises ValueError when samples have neither.
    """
    if column is not None and column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    name = model_input_name or "input_ids"
    sample = dataset[0]
    if not isinstance(sample, Mapping) or name not in sample:
        seen = f"keys {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"cannot tell how long samples are: they should be mappings with the key {name!r}, but"
            f" the first is a sample with {seen}. Add a column of lengths"
            " (length_column_name), or use another train_sampling_strategy."
        )
    return [len(dataset[index][name]) for index in range(len(dataset))]


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """All indices, so that each `batch_size` of them in a row are of samples of similar length.

    They are shuffled, cut into pieces of `mega_batch_mult` batches (by default so that there are
    at least four pieces, and at most 50 batches in each), and sorted inside a piece, longest
    first. The longest sample of all is put first, so that a lack of memory shows at once.
    """
    if mega_batch_mult is None:
        mega_batch_mult = max(1, min(len(lengths) // (batch_size * 4), 50))
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    pieces = [
        sorted(piece, key=lengths.__getitem__, reverse=True)
        for piece in chunks(shuffled, mega_batch_mult * batch_size)
    ]
    if pieces:
        longest = max(pieces, key=lambda piece: lengths[piece[0]])
        pieces[0][0], longest[0] = longest[0], pieces[0][0]
    return list(chain.from_iterable(pieces))


class LengthGroupedSampler(Sampler[int]):
    """Gives indices so that neighbours are samples of similar length, in a new order each epoch.

    `lengths` are read from the data set where they are not given (see `sample_lengths`). `seed`:
    the order is a function of seed and epoch; without it `generator` is drawn from, or else
    torch's own.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Iterable[int] | torch.Tensor | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> None:
        if dataset is None and lengths is None:
            raise ValueError("LengthGroupedSampler needs a data set or lengths; both are None")
        self.batch_size = batch_size
        if lengths is None:
            lengths = sample_lengths(dataset, model_input_name=model_input_name)
        self.lengths = [int(length) for length in lengths]
        self.generator = torch.Generator() if seed is not None else generator
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration gives, where there is a seed."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.seed is not None and self.generator is not None:
            self.generator.manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, None, self.generator))

    def __len__(self) -> int:
        return len(self.lengths)


class BatchRebalanceSampler(Sampler[list[int]]):
    """Gives one rank's batches, of different sizes, so that all ranks have as much to do.

    The samples of one update (`effective_batch_size`, over all ranks and microbatches) are sorted
    by length and cut where the dearest part is as cheap as it can be; the parts are dealt out so
    that the ranks' microbatches of one moment cost about the same. A part of n samples, the
    longest of length l, costs n * (l + QUADRATIC_COST_COEF * l**2): padding and attention.

    Raises ValueError when an update has fewer samples than there are parts.
    """

    QUADRATIC_COST_COEF = 0.001
    rank_aware = True

    def __init__(
        self,
        lengths: Sequence[int],
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.num_parts = dp_size * grad_accum
        if effective_batch_size < self.num_parts:
            raise ValueError(
                f"effective_batch_size is {effective_batch_size}, but {dp_size} ranks x"
                f" {grad_accum} microbatches need at least {self.num_parts} samples"
            )
        self.lengths = list(lengths)
        self.effective_batch_size = effective_batch_size
        self.dp_size, self.grad_accum, self.rank = dp_size, grad_accum, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.lengths), self.effective_batch_size)
        return self.grad_accum * (whole + (rest > 0 and not self.drop_last))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for group in chunks(order, self.effective_batch_size):
            if len(group) < self.effective_batch_size and self.drop_last:
                return
            while len(group) < self.num_parts:  # too few to go round: some are seen twice
                group = (group + order)[: self.num_parts]
            parts = sorted(self._cut(group), key=self.cost, reverse=True)
            yield from parts[self.rank :: self.dp_size]

    def cost(self, indices: Sequence[int]) -> float:
        """The cost of a batch of these samples, in arbitrary units."""
        return self._cost(len(indices), max(self.lengths[index] for index in indices))

    def _cost(self, count: int, longest: int) -> float:
        return count * (longest + self.QUADRATIC_COST_COEF * longest**2)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.lengths)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.lengths), generator=generator).tolist()

    def _cut(self, group: list[int]) -> list[list[int]]:
        """The group, sorted by length, in `num_parts` runs, the dearest as cheap as possible."""
        group = sorted(group, key=self.lengths.__getitem__, reverse=True)
        low, high = self.cost(group[:1]), self.cost(group)
        while high - low > 1e-6 * high:  # the smallest limit that num_parts runs can keep
            limit = (low + high) / 2
            if len(self._runs(group, limit)) <= self.num_parts:
                high = limit
            else:
                low = limit
        parts = self._runs(group, high)
        while len(parts) < self.num_parts:
            dearest = max((part for part in parts if len(part) > 1), key=self.cost)
            half = len(dearest) // 2
            parts.append(dearest[half:])
            del dearest[half:]
        return parts

    def _runs(self, group: list[int], limit: float) -> list[list[int]]:
        """The group, longest first, in runs that grow while they cost no more than `limit`."""
        runs: list[list[int]] = []
        for index in group:
            if runs and self._cost(len(runs[-1]) + 1, self.lengths[runs[-1][0]]) <= limit:
                runs[-1].append(index)
            else:
                runs.append([index])
        return runs
