"""Low-rank changes of weights in a checkpoint, added to the weights that they change.

`drivetrain.lora` keeps beside `x.weight` its change `x.lora_b @ x.lora_a * x.lora_scale`. Where
whole weights are wanted, as for an export, the change is added, and the three are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernel.paths import Place
from ..kernel.shards import Kind, TensorInfo

__all__ = ["DOWN", "SCALE", "UP", "MergedWeights"]

DOWN, UP, SCALE = "lora_a", "lora_b", "lora_scale"
_PARTS = (DOWN, UP, SCALE)


class MergedWeights:
    """A view of a checkpoint with its low-rank changes added to the weights. Readers see the names
    of the plain model."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        names = set(reader.names("weights"))
        stems = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == DOWN}
        self._changed = {
            _under(stem, "weight"): [_under(stem, part) for part in _PARTS]
            for stem in stems
            if {_under(stem, part) for part in ("weight", *_PARTS)} <= names
        }
        self._left_out = {name for parts in self._changed.values() for name in parts}

    @property
    def folder(self) -> Place:
        """The folder of the checkpoint."""
        found: Place = self._reader.folder
        return found

    def names(self, kind: Kind) -> Sequence[str]:
        """Return the names of the wrapped reader, without the parts of changes."""
        return [name for name in self._reader.names(kind) if name not in self._left_out]

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """Return the information of the wrapped reader."""
        found: TensorInfo = self._reader.info(kind, name)
        return found

    def read(self, kind: Kind, name: str) -> Tensor:
        """Read a whole tensor, with its change added."""
        weight: Tensor = self._reader.read(kind, name)
        if name not in self._changed:
            return weight
        down, up, scale = (self._reader.read(kind, part).float() for part in self._changed[name])
        return torch.addmm(weight.float(), up, down, alpha=float(scale)).to(weight.dtype)


def _under(stem: str, name: str) -> str:
    return f"{stem}.{name}" if stem else name
