"""Prepares batches of a causal language model for a driver that partitions sequences over ranks.

A model shifts labels, counts positions and detects padding itself, which needs whole sequences. So
all of this is done here, before sequences are partitioned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ArgumentError

__all__ = ["DIMENSIONS", "POSITIONS", "WholeSequences"]

POSITIONS = "position_ids"
DIMENSIONS = {"input_ids": 1, "inputs_embeds": 1, "labels": 1, "shift_labels": 1, POSITIONS: 1}
"""The names that a batch may hold, each with its sequence dimension."""

_MASK = "attention_mask"
_FILLING = {"labels": -100, "shift_labels": -100}
_REMEDY = "or set parallelism_config's cp_size and sp_size to 1"


@dataclass(frozen=True)
class WholeSequences:
    """Returns a batch with `shift_labels`, `position_ids` and a length that can be partitioned.

    Raises `ArgumentError` for batches that cannot be partitioned.
    """

    num_parts: int
    reach: int | None = None
    """Number of previous positions that attention reaches; None: all."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return tensors of shape (samples, positions, ...), padded to the next length that
        divides."""
        found = _known(batch)
        mask: Tensor | None = found.pop(_MASK, None)
        if "shift_labels" not in found:
            found["shift_labels"] = functional.pad(found["labels"], (0, 1), value=-100)[:, 1:]
        length = found["labels"].shape[1]
        if self.reach is not None and length > self.reach:
            raise ArgumentError(
                f"attention reaches back {self.reach} positions, and a batch has sequences of "
                f"{length}: attention is split over ranks without a mask only. Truncate the data "
                f"to {self.reach} positions, set the model's config.sliding_window to None, "
                f"{_REMEDY}"
            )
        if mask is not None:
            _check_mask(mask, found["shift_labels"])
        device = found["labels"].device
        start = _start(found.pop(POSITIONS, torch.arange(length, device=device)[None]), mask)
        # a model takes a sequence of one position for a step of generation, without a causal mask
        parts = max(2, -(-length // self.num_parts))
        missing = parts * self.num_parts - length
        longer = {
            name: _longer(each, missing, _FILLING.get(name, 0)) for name, each in found.items()
        }
        return {**longer, POSITIONS: start + torch.arange(length + missing, device=device)}


def _known(batch: Any) -> dict[str, Tensor]:
    """Return the batch without None. Raises `ArgumentError` for entries that cannot be
    partitioned."""
    if not isinstance(batch, Mapping):
        raise ArgumentError(
            f"a batch is a {type(batch).__name__}, and only mappings of tensors can be partitioned "
            f"along sequences: return one from data_collator, {_REMEDY}"
        )
    found = {name: value for name, value in batch.items() if value is not None}
    known = {*DIMENSIONS, _MASK}
    if unknown := sorted({name for name in found if name not in known}):
        raise ArgumentError(
            f"batches hold {', '.join(unknown)}, which cannot be partitioned with their sequences: "
            f"known are {', '.join(sorted(known))}. Leave them out of the data "
            f"(remove_unused_columns, or data_collator), {_REMEDY}"
        )
    if "labels" not in found:
        raise ArgumentError(
            f"batches hold {', '.join(found) or 'nothing'} and no labels: what is trained on in "
            f"parts is the model's own loss, which needs them. Add labels, {_REMEDY}"
        )
    return found


def _check_mask(mask: Tensor, targets: Tensor) -> None:
    """Check that a mask hides only padding at the end. Causal attention does not see later
    positions anyway, so such a mask can be dropped."""
    seen = mask.bool()
    if mask.dim() == 2 and bool(seen.all()):
        return
    if mask.dim() != 2 or bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise ArgumentError(
            f"{_MASK} of shape {tuple(mask.shape)} hides more than the end of sequences, and "
            "attention is split over ranks without a mask only: pad at the end (the tokenizer's "
            f"padding_side='right'), {_REMEDY}"
        )
    if bool((targets[~seen] != -100).any()):
        raise ArgumentError(
            f"{_MASK} hides positions whose labels count: give padding the label -100, {_REMEDY}"
        )


def _start(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Return the first positions, of shape (1 or samples, 1)."""
    counted = positions.dim() == 2
    if counted:
        steps = positions.diff(dim=1) == 1
        counted = bool((steps if mask is None else steps | ~mask[:, 1:].bool()).all())
    if not counted:
        raise ArgumentError(
            f"{POSITIONS} of shape {tuple(positions.shape)} do not go up by one: several sequences "
            "that are packed into one need a mask, and attention is split over ranks without one. "
            f"Give each sequence a row of its own (packing off), {_REMEDY}"
        )
    return positions[:, :1]


def _longer(tensor: Tensor, more: int, filling: int) -> Tensor:
    """Pad along dimension 1."""
    if not more:
        return tensor
    return torch.cat([tensor, tensor.new_full((len(tensor), more, *tensor.shape[2:]), filling)], 1)
