"""The parameters that updates of ZeRO have reached so far.

DeepSpeed keeps the optimizer's state for a whole group of parameters. What some of them have not
had yet, the others share (a count of steps), or begin for them (moments).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch

from ...checkpoint.optimizer_entries import is_state
from ...kernel.errors import CapabilityRefused
from ...kernel.shards import Reader
from . import twins, zero_state

__all__ = ["UpdatedParameters"]

_LOG = logging.getLogger(__name__)


class UpdatedParameters:
    """The names of the parameters that have been updated, by the groups that they are in."""

    def __init__(
        self,
        zero: Any,
        groups: Iterable[Collection[str]],
        given: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        """`given`: the recipe's optimizer; None where DeepSpeed made its own, which begins all
        state as zeros."""
        self._zero, self._groups = zero, [set(names) for names in groups]
        self._first_differs = {
            name
            for names, group in zip(self._groups, zero.param_groups, strict=True)
            if given is not None and twins.first_update_differs(given, group, device)
            for name in names
        }
        self._kind = type(given).__name__
        self._before = frozenset[str]()
        self._warned = False

    def check(self, reached: Collection[str], absent: Collection[str]) -> None:
        """Check an update of the parameters `reached`; no rank has a gradient of the `absent`.
        Raises `CapabilityRefused`, on all ranks, where a later first update would be another."""
        self._refuse(set(absent) - self._before, "no gradient has reached")
        parted = {
            name
            for group in self._groups
            if self._before & group and group.intersection(reached)
            for name in self._before.symmetric_difference(reached) & group
        }
        if parted and not self._warned and zero_state.counts_steps(self._zero):
            self._warned = True
            _LOG.warning(
                "no gradient reaches %s in some steps: these parameters and their moments are left "
                "as they were, and the optimizer's count of steps, which DeepSpeed keeps once for "
                "a group, still increases: their bias correction is that of the others",
                ", ".join(sorted(parted)[:10]),
            )

    def done(self, reached: Collection[str]) -> None:
        """Note that an update of these parameters was applied."""
        self._before = self._before.union(reached)

    def read(self, reader: Reader) -> frozenset[str]:
        """Return the parameters whose state is in a checkpoint. Raises as `check` does."""
        stored = {
            fqn
            for fqn, _, key in (name.rpartition("/") for name in reader.names("optimizer"))
            if is_state(key)
        }
        some = [group for group in self._groups if group & stored]
        self._refuse(set().union(*some) - stored, "the checkpoint has no state of")
        return frozenset(stored)

    def restored(self, stored: frozenset[str]) -> None:
        """Note the parameters whose state was restored."""
        self._before = stored

    def _refuse(self, late: Collection[str], why: str) -> None:
        if found := self._first_differs.intersection(late):
            raise CapabilityRefused(
                f"the optimizer {self._kind}, whose first update of a weight is unlike the later "
                f"ones (as with dampening), where {why} {', '.join(sorted(found)[:10])}",
                "deepspeed",
                "DeepSpeed keeps one state for all weights of a group, so that the first update of "
                "these would be another than in one process. Freeze them (requires_grad=False), "
                "set dampening=0, or take the backend fsdp or ddp",
            )
