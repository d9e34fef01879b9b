"""Reports what takes memory, if `memory_parts` requests it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...trainer.memory_account import MemoryAccount, MemoryCounted
from ...trainer.memory_parts import describe, listed, size_of
from ...trainer.optimizer_record import estimated_state_bytes
from ..arguments.backend import settings
from .hf_terms import in_hf_terms

__all__ = ["MemoryParts"]

_LOG = logging.getLogger(__name__)


class MemoryParts(MemoryAccount):
    """The memory of one call of `train`. Called by all ranks in the same order, before the driver
    wraps the model."""

    def __init__(self, trainer: Any) -> None:
        args, session = trainer.args, trainer.driver_session
        own = settings(args, trainer.model)
        recomputed = ("*",) if args.gradient_checkpointing else own.activation_checkpointing
        own = replace(
            own,
            activation_checkpointing=recomputed,
            data=replace(own.data, workers=args.dataloader_num_workers),
        )
        plan, batch = session.plan(), trainer._train_batch_size
        opened, optimizer = session.session, _TrainersOptimizer(trainer)
        super().__init__(session.driver, plan, opened, own, optimizer, batch, None)
        self.noting_model(lambda: trainer.model)()

    def report(self, step: int) -> MemoryCounted | None:
        """Log what takes memory after the first step, of the rank with the most, and return it."""
        counted = self.after_first_step(step)
        if counted is None:
            return None
        named = {part: in_hf_terms(text) for part, text in counted.remedies.items()}
        counted = replace(counted, remedies=named)
        if self.session.world.rank:
            return counted
        parts, estimated = counted.parts, frozenset(counted.estimated)
        where = f" on rank {counted.rank}" if self.session.world.size > 1 else ""
        peak = counted.device_peak_bytes
        most = "" if peak is None else f"; at most {size_of(peak)} were allocated on the device"
        _LOG.warning(
            "memory: after step %s%s: %s%s. %s",
            step,
            where,
            listed(parts, estimated),
            most,
            describe(parts, estimated, counted.modules, counted.remedies),
        )
        return counted

    def largest_parts(self) -> str:
        """Return a sentence on the largest parts, for an error; empty if none is known."""
        with suppress(Exception):  # the error itself is what counts
            return in_hf_terms(self.sentence())
        return ""


class _TrainersOptimizer:
    """The optimizer of a Trainer, once the driver has wrapped the model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        prepared = self._trainer.driver_session.prepared
        return None if prepared is None else prepared.optimizer

    def estimated_state_bytes(self) -> int:
        """Estimate the state that a first step will make on this rank."""
        optimizer = self.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        named = [(type(each).__name__, each) for group in groups for each in group["params"]]
        return estimated_state_bytes(self._build, named)

    def _build(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Build an optimizer of the same class and options for other parameters."""
        optimizer = self.optimizer
        assert optimizer is not None
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: each for name, each in optimizer.defaults.items() if name in accepted}
        kind: Any = type(optimizer)
        made: torch.optim.Optimizer = kind([each for _, each in named], **options)
        return made
