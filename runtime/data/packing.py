"""Sequences of uneven length without padding: several in one row, and none attends to another.

A row holds as many whole sequences as fit. Positions restart with each sequence, attention stays
within each, and no sequence predicts the first token of the next. So the loss of a batch is the
same sum as with one sequence per row. Packing happens within a microbatch: it changes neither which
samples train together, nor their order, nor the gradient of a step (law 1).

Krell et al., "Efficient Sequence Packing without Cross-contamination",
https://arxiv.org/abs/2107.02027.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..kernel.errors import DataError, SettingError

__all__ = ["IGNORED", "Pack", "rows_of"]

IGNORED = -100
"""The label of tokens that are not predicted, the default of
`torch.nn.functional.cross_entropy`."""

POSITIONS, MASK, SEQUENCES = "position_ids", "attention_mask", "sequence_ids"
BOUNDS, LONGEST = "cu_seqlens", "max_seqlen"


_Mask = Literal["dense", "varlen", "none"]


def rows_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign sequences to rows of `capacity` tokens: the longest first, each to the first row where
    it fits. The number of rows is at most 11/9 of the optimum, plus one.

    Johnson et al., https://doi.org/10.1137/0203025. Raises `DataError` for a sequence that is
    longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > capacity:
            raise DataError(
                f"a sequence of {length} tokens does not fit into a row of {capacity}: "
                "truncate it, or raise the capacity"
            )
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return rows


@dataclass(frozen=True)
class Pack:
    """A `Recipe.collate` that packs samples, which are dicts of one-dimensional sequences, into
    rows.

    The batch holds, beside each key of the samples as (rows, capacity):

    - `position_ids`, int64 (rows, capacity): from 0 in each sequence, 0 in the rest of a row;
    - `sequence_ids`, int64 (rows, capacity): 1, 2, ... in each row, 0 in the rest of a row;
    - with `mask="dense"`, `attention_mask`, bool (rows, 1, capacity, capacity): true where a token
      (third dimension) attends (fourth): to its own sequence, and with `causal` not to later
      tokens. Tokens in the rest of a row attend to themselves, since a softmax over nothing is NaN;
    - with `mask="varlen"`, `cu_seqlens`, int32, and `max_seqlen`, an int, the arguments of
      variable-length attention (flash-attention's, `torch.nn.attention.varlen`) on joined rows:
      the start of each sequence, with the total at the end, and the longest length. The rest of a
      row is a sequence of its own.

    Missing `labels` are made from `input_ids`. The first label of each sequence is ignored: models
    that predict the next token shift labels, and nothing may predict across a boundary.
    """

    capacity: int
    """Tokens in a row."""
    mask: _Mask = "dense"
    """`none` for kernels that distinguish sequences by `position_ids` or `sequence_ids`."""
    causal: bool = True
    padding: Mapping[str, int] = field(default_factory=dict)
    """The values that fill the rest of a row, by key; by default 0, and ignored labels."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise SettingError(f"capacity is {self.capacity}; it must be at least 1")
        if self.mask not in (kinds := get_args(_Mask)):
            raise SettingError(f"mask is {self.mask!r}; it must be one of {', '.join(kinds)}")

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See the class. Raises `DataError` for samples that cannot be packed."""
        whole = [self._sample(sample) for sample in samples]
        lengths = [len(sample["input_ids"]) for sample in whole]
        rows = rows_of(lengths, self.capacity)
        batch = {
            key: self._filled(rows, [sample[key] for sample in whole], self._padding(key))
            for key in whole[0]
        }
        positions = [torch.arange(length) for length in lengths]
        batch[POSITIONS] = self._filled(rows, positions, 0)
        places = {index: place for row in rows for place, index in enumerate(row, 1)}
        numbers = [torch.full((length,), places[index]) for index, length in enumerate(lengths)]
        batch[SEQUENCES] = self._filled(rows, numbers, 0)
        if self.mask == "dense":
            batch[MASK] = self._mask(batch[SEQUENCES])
        if self.mask == "varlen":
            return {**batch, **self._bounds([[lengths[index] for index in row] for row in rows])}
        return batch

    @staticmethod
    def count_items(batch: Mapping[str, Tensor]) -> int:
        """Count the tokens that are predicted; a `Recipe.count_items`."""
        return int((batch["labels"] != IGNORED).sum())

    def _sample(self, sample: Any) -> dict[str, Tensor]:
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            raise DataError(f"a sample to pack is a dict with 'input_ids', not {sample!r:.200}")
        # the mask of one sequence is not needed: it is all ones, or its padding would be packed
        tensors = {k: torch.as_tensor(v) for k, v in sample.items() if k not in (MASK, POSITIONS)}
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        if len(set(shapes.values())) > 1 or len(shapes["input_ids"]) != 1:
            raise DataError(f"what is packed together must be of one length: {shapes}")
        if not len(tensors["input_ids"]):
            raise DataError("a sample to pack has no tokens")
        labels = tensors.get("labels", tensors["input_ids"]).clone()
        labels[0] = IGNORED
        return {**tensors, "labels": labels}

    def _padding(self, key: str) -> int:
        return self.padding.get(key, IGNORED if key == "labels" else 0)

    def _filled(
        self, rows: Sequence[Sequence[int]], values: Sequence[Tensor], padding: int
    ) -> Tensor:
        out = values[0].new_full((len(rows), self.capacity), padding)
        for row, members in enumerate(rows):
            joined = torch.cat([values[index] for index in members])
            out[row, : len(joined)] = joined
        return out

    def _bounds(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        whole = [(*row, self.capacity - sum(row)) for row in rows]
        lengths = [length for row in whole for length in row if length]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return {BOUNDS: starts, LONGEST: max(lengths)}

    def _mask(self, sequences: Tensor) -> Tensor:
        same = sequences[:, :, None] == sequences[:, None, :]
        if self.causal:
            same = same.tril()
        rest = sequences == 0
        same &= ~(rest[:, :, None] | rest[:, None, :])
        same |= torch.eye(self.capacity, dtype=torch.bool) & rest[:, :, None]
        return same[:, None]
