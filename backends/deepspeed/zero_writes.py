"""Writes of user's code to weights of ZeRO, which have masters beside them.

An update begins with the masters, and so does a save. What is written to a weight is carried over
to this rank's part of its master at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError
from ..common.data_writes import noting_writes
from ..common.masters import ExactMasters
from ..common.writes import AFTER_UPDATE, Writes
from ..process_group.used_layers import UsedLayers
from .zero_config import swaps
from .zero_state import Slice, own_range, partitions, partitions_weights

__all__ = ["WeightWrites"]

_ADVICE = f"Changes after each update belong in {AFTER_UPDATE}"


class WeightWrites:
    """The weights that user's code writes to between forwards. `forwards`: watches the others."""

    def __init__(
        self,
        zero: Any,
        module: nn.Module,
        config: Mapping[str, Any],
        forwards: Writes,
        layers: UsedLayers,
    ) -> None:
        self._zero, self._module, self._forwards, self._layers = zero, module, forwards, layers
        self._named: dict[str, Any] = dict(module.named_parameters())
        self._is_partitioned, self._in_files = partitions_weights(zero), swaps(config)
        self._is_updating = False
        self._exact = ExactMasters()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Enclose an update: until its end weights and masters differ."""
        self._is_updating = True
        self._exact.updated()
        try:
            yield
        finally:
            self._is_updating = False

    @contextmanager
    def open(self, where: str) -> Iterator[None]:
        """See `KeepsWrites`."""
        before = self._shard_versions()
        # at stage 3 a gathered weight is shared out by the memory that it has
        noting = noting_writes(self._named, keep_memory=not self._is_partitioned)
        with self._forwards.leaving_out():
            with noting as written:
                yield
            after = self._shard_versions()
            gathered = {name for name in after if after[name] != before[name]}
            if written or gathered:
                self._refuse(written, gathered, where)
                self._layers.written()
                with torch.no_grad():
                    self._carry(written, gathered)

    def _shard_versions(self) -> dict[str, int]:
        """Return the versions of this rank's shards at stage 3. They change when
        `GatheredParameters` with a `modifier_rank` ends."""
        if not self._is_partitioned:
            return {}
        return {name: parameter.ds_tensor._version for name, parameter in self._named.items()}

    def _refuse(self, written: Collection[str], gathered: Collection[str], where: str) -> None:
        """Raise `RecipeError` for writes that would be lost."""
        names = ", ".join(sorted({*written, *gathered})[:10])
        if self._is_updating:
            raise RecipeError(
                f"{where} wrote to {names} within an update of deepspeed, in which weights are not "
                f"the masters that it updates. Write after the update (on_step_end). {_ADVICE}"
            )
        if self._in_files:
            raise RecipeError(
                f"{where} wrote to {names}, whose masters lie in files on deepspeed "
                '(offload_optimizer to "nvme"). Leave that section out of backend.config. '
                f"{_ADVICE}"
            )
        if lost := sorted(n for n in {*written} - {*gathered} if self._is_elsewhere(n)):
            raise RecipeError(
                f"{where} wrote to {', '.join(lost[:10])}, of which a rank holds a shard alone on "
                "deepspeed with stage=3, so that the write has no effect. Write within "
                "deepspeed.zero.GatheredParameters([weight], modifier_rank=0), which gathers the "
                f"weight and shares out what rank 0 has written; or set backend.stage=2. {_ADVICE}"
            )

    def _is_elsewhere(self, name: str) -> bool:
        """True if the weight is sharded, and not whole on this rank as small ones are."""
        parameter = self._named[name]
        whole = not self._is_partitioned or parameter.numel() == parameter.ds_numel
        start, stop = own_range(parameter) if self._is_partitioned else (0, 1)
        return not whole and start < stop

    def _carry(self, written: Collection[str], gathered: Collection[str]) -> None:
        """Take over this rank's parts of what was written."""
        if self._is_partitioned:
            for name in {*written} - {*gathered}:
                start, stop = own_range(parameter := self._named[name])
                if start < stop:
                    own = parameter.detach().reshape(-1)[start:stop]
                    parameter.ds_tensor[: stop - start].copy_(own)
        for part in partitions(self._zero, self._module):
            for piece in part.slices:
                if piece.name in written or piece.name in gathered:
                    self._take(piece, piece.of(part.master))

    def _take(self, piece: Slice, master: Tensor) -> None:
        parameter = self._named[piece.name]
        if self._is_partitioned:
            own = parameter.ds_tensor[: piece.stop - piece.start]
        else:
            own = parameter.detach().reshape(-1)[piece.start : piece.stop]
        self._exact.take((piece.name, piece.start), own, master)
