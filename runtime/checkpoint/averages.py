"""The averages of weights that a checkpoint holds."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from ..kernel.errors import CheckpointMismatch
from ..kernel.paths import Url
from ..kernel.shards import Kind, Region
from .optimizer_entries import AVERAGE
from .reader import CheckpointReader, WithoutOptimizer

__all__ = [
    "AveragedWeights",
    "WithoutAverages",
    "averaged_reader",
    "has_averages",
]


def has_averages(reader: CheckpointReader) -> bool:
    """True if the checkpoint holds averages of its weights."""
    return any(name.endswith(f"/{AVERAGE}") for name in reader.names("optimizer"))


def averaged_reader(checkpoint: str | os.PathLike[str] | Url) -> AveragedWeights:
    """Return a reader of a checkpoint's averages. Raises `CheckpointMismatch` if it holds none."""
    if not has_averages(CheckpointReader(checkpoint)):
        raise CheckpointMismatch(
            f"{checkpoint} holds no averages of weights: the run that wrote it kept none "
            "(average.decay), or had not started to (average.start). Use its weights as they are, "
            "or the mean of several checkpoints: `drivetrain checkpoint average`"
        )
    return AveragedWeights(checkpoint)


class WithoutAverages(CheckpointReader):
    """A view of a checkpoint without the averages of its weights."""

    def names(self, kind: Kind) -> Sequence[str]:
        """Return the names of the wrapped reader, without the averages."""
        names = super().names(kind)
        if kind != "optimizer":
            return names
        return [name for name in names if not name.endswith(f"/{AVERAGE}")]


class AveragedWeights(WithoutOptimizer):
    """A view of a checkpoint whose weights are replaced by their averages where it holds them,
    rounded to the dtype of the weights. The view holds nothing of the optimizer."""

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `CheckpointReader.read`."""
        average = f"{self._aliases.get(name, name)}/{AVERAGE}"
        if kind != "weights" or average not in self._lookup.tensors("optimizer"):
            return super().read(kind, name, region, out)
        found = super().read("optimizer", average, region).to(self.info("weights", name).dtype)
        return found if out is None else out.copy_(found)
