"""The callback that stands in a run's list where it saves a checkpoint when a signal ends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..theirs import theirs
from .base import TrainerCallback

__all__ = ["jit_checkpoint_callbacks", "waits_for_signals"]

_NAME = "JITCheckpointCallback"
_QUIET = ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_epoch_end", "on_train_end")


def jit_checkpoint_callbacks(trainer: Any) -> list[Any]:
    """With `enable_jit_checkpoint` one of transformers' kind, where that is installed. Its events
    do nothing: the loop waits for the signal, so that all ranks save at the same update.
    """
    if not trainer.args.enable_jit_checkpoint:
        return []
    try:
        kind, manager = (theirs("trainer_jit_checkpoint", n) for n in (_NAME, "CheckpointManager"))
    except ImportError:
        kind, manager = TrainerCallback, lambda _: None
    quiet = {event: getattr(TrainerCallback, event) for event in _QUIET}
    callback = type(_NAME, (kind,), quiet)()
    callback.trainer, callback.jit_manager = trainer, manager(trainer)
    return [callback]


def waits_for_signals(callbacks: Iterable[Any]) -> bool:
    """That callback is still there."""
    return any(type(each).__name__ == _NAME for each in callbacks)
