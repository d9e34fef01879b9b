"""Step an elementwise optimizer on this rank's parts of tensors, one kind of tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..common.update_random import UpdateRandom
from . import dtensor
from .counted import first_step

__all__ = ["StepByKind"]

_Kind = tuple[Any, str]
"""A mesh, None for tensors that ranks hold whole, and the rank's part of what is sharded over
it."""


class StepByKind:
    """Steps an optimizer on what is sharded over one mesh after the other, and on what every rank
    holds whole: torch's kernels take tensors of one kind at a time. With an optimizer that is not
    torch's own, tensors of a kind are also sharded over the same ranks, so that each part can draw
    its own random numbers."""

    def __init__(self, optimizer: torch.optim.Optimizer, draws: UpdateRandom) -> None:
        self.optimizer, self.draws = optimizer, draws
        self._may_draw = not dtensor.steps_tensors(optimizer)
        self._stepped = False
        self._kind_of: dict[Tensor, _Kind] = {}
        self._kinds: list[_Kind] = []
        self._follow()

    @property
    def is_needed(self) -> bool:
        """False if one plain call of the optimizer's step does the same."""
        return self._may_draw or len(self._kinds) > 1

    def _follow(self) -> None:
        """Note the kinds of parameters that are new."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._kind_of:
                    mesh = getattr(parameter, "device_mesh", None)
                    kind = mesh, _part_of(parameter) if self._may_draw else ""
                    self._kind_of[parameter] = kind
                    self._kinds += [] if kind in self._kinds else [kind]

    def step(self) -> None:
        """Update the parameters, each kind in its own way."""
        self._follow()
        all_of_it = [(group, group["params"]) for group in self.optimizer.param_groups]
        try:
            for kind in self._kinds:
                for group, parameters in all_of_it:
                    group["params"] = [p for p in parameters if self._kind_of[p] == kind]
                self._step(*kind)
        finally:
            for group, parameters in all_of_it:
                group["params"] = parameters

    def _step(self, mesh: Any, part: str) -> None:
        with ExitStack() as stack:
            if self._may_draw and mesh is not None:
                stack.enter_context(_drawing_locally(mesh))
            if part:
                stack.enter_context(self.draws.of_part(self.optimizer, part))
            if self._stepped or len(self._kinds) == 1:
                self.optimizer.step()
            else:
                first_step(self.optimizer, "parts")
        self._stepped = True


def _part_of(tensor: Tensor) -> str:
    """Describe this rank's part of all tensors that are sharded as this one is; empty for a tensor
    that is not sharded."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    places = [
        f"{mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis} {mesh.get_local_rank(axis)}"
        for axis, each in enumerate(getattr(tensor, "placements", ()))
        if not each.is_replicate() and mesh.size(axis) > 1
    ]
    return ", ".join(places)


@contextmanager
def _drawing_locally(mesh: Any) -> Iterator[None]:
    """Let random operations on `DTensor`s draw from this rank's generators within the block. By
    themselves they draw from the first rank's on an accelerator, and wait for the device."""
    if mesh.device_type == "cpu":
        yield
        return
    from torch.distributed.tensor import _random

    if _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    tracker = _random._rng_tracker
    before, tracker.distribute_region_enabled = tracker.distribute_region_enabled, False
    try:
        yield
    finally:
        tracker.distribute_region_enabled = before
