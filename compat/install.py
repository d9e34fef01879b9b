"""Puts the compat names in place of transformers' own, for libraries that are written for those."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .arguments import Seq2SeqTrainingArguments, TrainingArguments
from .trainer.seq2seq import Seq2SeqTrainer
from .trainer.trainer import Trainer

__all__ = ["install", "uninstall"]

# where transformers defines the class of each of these names
_HOMES: dict[type, str] = {
    Seq2SeqTrainer: "transformers.trainer_seq2seq",
    Seq2SeqTrainingArguments: "transformers.training_args_seq2seq",
    Trainer: "transformers.trainer",
    TrainingArguments: "transformers.training_args",
}
_DERIVE = ("trl", "sentence_transformers", "setfit")
"""Libraries that derive classes from these names when they are imported."""

_before: dict[tuple[str, str], Any] = {}


def install() -> None:
    """Rebind `transformers.Trainer`, `TrainingArguments` and their Seq2Seq forms to drivetrain's.

    Call it before importing what derives from them, such as trl. Raises ImportError where
    transformers is missing, RuntimeError where it comes too late.
    """
    late = [name for name in _DERIVE if name in sys.modules]
    if late and not _before:
        raise RuntimeError(
            f"{', '.join(late)} is imported already, and holds transformers' own Trainer: call "
            "drivetrain.compat.install() before that import"
        )
    for ours, home in _HOMES.items():
        _rebind(home, ours)
    # importing these has put a new module in sys.modules, from which others import
    for ours in _HOMES:
        _rebind("transformers", ours)


def uninstall() -> None:
    """Undo `install`. What was derived meanwhile stays as it is."""
    for (module, name), value in _before.items():
        setattr(sys.modules[module], name, value)
    _before.clear()


def _rebind(module_name: str, ours: type) -> None:
    importlib.import_module(module_name)
    module, name = sys.modules[module_name], ours.__name__
    _before.setdefault((module_name, name), getattr(module, name))
    setattr(module, name, ours)
