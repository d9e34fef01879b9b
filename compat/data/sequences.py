"""Batches of a causal language model, made ready for a driver that cuts their sequences over ranks.

A model shifts its labels, counts its positions and looks for padding by itself, which a part of a
sequence does not allow. All of that is done here, on whole sequences.
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
"""What a batch may hold, and which dimension of it is the sequence."""

_MASK = "attention_mask"
_FILLING = {"labels": -100, "shift_labels": -100}
_REMEDY = "or set parallelism_config's cp_size and sp_size to 1"


@dataclass(frozen=True)
class WholeSequences:
    """Called with a batch, gives it with `shift_labels`, `position_ids` and a length that divides.

    Raises `ArgumentError` for what cannot be trained on in parts.
    """

    num_parts: int
    reach: int | None = None
    """Positions that attention goes back to; None: all."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Tensors of shape (samples, positions, ...), and as many positions more as are missing."""
        found = _known(batch)
        mask: Tensor | None = found.pop(_MASK, None)
        if "shift_labels" not in found:
            found["shift_labels"] = functional.pad(found["labels"], (0, 1), value=-100)[:, 1:]
        length = found["labels"].shape[1]
        if self.reach is not None and length > self.reach:
            raise ArgumentError(
                f"attention reaches back {self.reach} positions, and a batch has sequences of "
                f"{length}: attention is cut over ranks without a mask only. Cut the data to "
                f"{self.reach} positions, set the model's config.sliding_window to None, {_REMEDY}"
            )
        if mask is not None:
            _check_mask(mask, found["shift_labels"])
        device = found["labels"].device
        start = _start(found.pop(POSITIONS, torch.arange(length, device=device)[None]), mask)
        # a model takes one position for the next word of a generation, where nothing is causal
        parts = max(2, -(-length // self.num_parts))
        missing = parts * self.num_parts - length
        longer = {
            name: _longer(each, missing, _FILLING.get(name, 0)) for name, each in found.items()
        }
        return {**longer, POSITIONS: start + torch.arange(length + missing, device=device)}


def _known(batch: Any) -> dict[str, Tensor]:
    """Without what is None. Raises `ArgumentError` for what nobody knows how to cut."""
    if not isinstance(batch, Mapping):
        raise ArgumentError(
            f"a batch is a {type(batch).__name__}, and sequences are cut of mappings of tensors: "
            f"return one from data_collator, {_REMEDY}"
        )
    found = {name: value for name, value in batch.items() if value is not None}
    known = {*DIMENSIONS, _MASK}
    if unknown := sorted({name for name in found if name not in known}):
        raise ArgumentError(
            f"batches hold {', '.join(unknown)}, which nobody knows how to cut with their "
            f"sequences: known are {', '.join(sorted(known))}. Leave them out of the data "
            f"(remove_unused_columns, or data_collator), {_REMEDY}"
        )
    if "labels" not in found:
        raise ArgumentError(
            f"batches hold {', '.join(found) or 'nothing'} and no labels: what is trained on in "
            f"parts is the model's own loss, which needs them. Add labels, {_REMEDY}"
        )
    return found


def _check_mask(mask: Tensor, targets: Tensor) -> None:
    """Causal attention sees nothing of what lies behind; so a mask may hide that, and can go."""
    seen = mask.bool()
    if mask.dim() == 2 and bool(seen.all()):
        return
    if mask.dim() != 2 or bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise ArgumentError(
            f"{_MASK} of shape {tuple(mask.shape)} hides more than the end of sequences, and "
            "attention is cut over ranks without a mask only: pad at the end (the tokenizer's "
            f"padding_side='right'), {_REMEDY}"
        )
    if bool((targets[~seen] != -100).any()):
        raise ArgumentError(
            f"{_MASK} hides positions whose labels count: give padding the label -100, {_REMEDY}"
        )


def _start(positions: Tensor, mask: Tensor | None) -> Tensor:
    """The first positions, of shape (1 or samples, 1)."""
    counted = positions.dim() == 2
    if counted:
        steps = positions.diff(dim=1) == 1
        counted = bool((steps if mask is None else steps | ~mask[:, 1:].bool()).all())
    if not counted:
        raise ArgumentError(
            f"{POSITIONS} of shape {tuple(positions.shape)} do not go up by one: several sequences "
            "that are packed into one need a mask, and attention is cut over ranks without one. "
            f"Give each sequence a row of its own (packing off), {_REMEDY}"
        )
    return positions[:, :1]


def _longer(tensor: Tensor, more: int, filling: int) -> Tensor:
    """Along dimension 1."""
    if not more:
        return tensor
    return torch.cat([tensor, tensor.new_full((len(tensor), more, *tensor.shape[2:]), filling)], 1)
