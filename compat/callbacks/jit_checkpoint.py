"""The placeholder callback of a run that saves a checkpoint when a signal ends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..theirs import theirs
from .base import TrainerCallback

__all__ = ["jit_checkpoint_callbacks", "waits_for_signals"]

_NAME = "JITCheckpointCallback"
_QUIET = ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_epoch_end", "on_train_end")


def jit_checkpoint_callbacks(trainer: Any) -> list[Any]:
    """Return transformers' callback for `enable_jit_checkpoint`, if transformers is installed. Its
    events do nothing: the loop handles the signal, so that all ranks save at the same update.
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
    """Return True if the callback that waits for signals is among `callbacks`."""
    return any(type(each).__name__ == _NAME for each in callbacks)
