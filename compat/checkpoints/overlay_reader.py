"""A reader that adds tensors to a checkpoint, or replaces one; any driver can restore from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...checkpoint import CheckpointReader
from ...checkpoint.extra_state import extra_key
from ...kernel.errors import CheckpointMismatch
from ...kernel.shards import Flat, Kind, Region, TensorInfo

__all__ = ["OverlayReader"]


@dataclass(frozen=True)
class OverlayReader:
    """The tensors of a checkpoint, of some kinds, together with tensors in memory."""

    below: CheckpointReader | None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole weights by FQN; they take precedence over the checkpoint's."""
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    """Optimizer state by `<fqn>/<state>`."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    kinds: Collection[str] = ("weights", "optimizer", "state")
    """The kinds that are read from the checkpoint; `extra`: of the kind `state` only the extra
    state of modules."""

    def names(self, kind: Kind) -> Sequence[str]:
        """Return all names of a kind, sorted."""
        return sorted({*self._stored(kind), *self._at_hand(kind)})

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """See `contract.Reader`."""
        if (tensor := self._tensor(kind, name)) is not None:
            return TensorInfo(tensor.dtype, tuple(tensor.shape))
        return self._reader(kind, name).info(kind, name)

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `contract.Reader`."""
        tensor = self._tensor(kind, name)
        if tensor is None:
            return self._reader(kind, name).read(kind, name, region, out)
        if isinstance(region, Flat):
            tensor = tensor.flatten()[region.start : region.stop]
        else:
            for dim, (start, size) in enumerate(
                zip(region.offsets, region.sizes, strict=True) if region else ()
            ):
                tensor = tensor.narrow(dim, start, size)
        return tensor.cpu() if out is None else out.copy_(tensor)

    def _stored(self, kind: Kind) -> Sequence[str]:
        if self.below is None:
            return ()
        if kind == "state" and "extra" in self.kinds:
            return [name for name in self.below.names(kind) if extra_key(name) is not None]
        return self.below.names(kind) if kind in self.kinds else ()

    def _at_hand(self, kind: Kind) -> Mapping[str, Tensor]:
        given: dict[Any, Mapping[str, Tensor]] = {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "state": self.state,
        }
        return given.get(kind, {})

    def _tensor(self, kind: Kind, name: str) -> Tensor | None:
        return self._at_hand(kind).get(name)

    def _reader(self, kind: Kind, name: str) -> CheckpointReader:
        if self.below is None or (kind not in self.kinds and name not in self._stored(kind)):
            raise CheckpointMismatch(f"there is no {kind} tensor {name!r} to restore from")
        return self.below
