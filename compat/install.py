"""Puts the compat names in place of transformers' own, for libraries that are written for those."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from .arguments import Seq2SeqTrainingArguments, TrainingArguments
from .callbacks.flow_callbacks import DefaultFlowCallback
from .callbacks.progress import PrinterCallback, ProgressCallback
from .trainer.seq2seq import Seq2SeqTrainer
from .trainer.trainer import Trainer

__all__ = ["install", "uninstall"]

_LOG = logging.getLogger(__name__)

# where transformers defines the class of each of these names
_HOMES: dict[type, str] = {
    DefaultFlowCallback: "transformers.trainer_callback",
    PrinterCallback: "transformers.trainer_callback",
    ProgressCallback: "transformers.trainer_callback",
    Seq2SeqTrainer: "transformers.trainer_seq2seq",
    Seq2SeqTrainingArguments: "transformers.training_args_seq2seq",
    Trainer: "transformers.trainer",
    TrainingArguments: "transformers.training_args",
}
_DERIVE = ("trl", "sentence_transformers", "setfit")
"""Libraries that derive classes from these names when they are imported."""

_theirs: dict[type, type] = {}
"""While it is installed: what ours stand in place of."""


def install() -> None:
    """Rebind `transformers.Trainer`, `TrainingArguments`, their Seq2Seq forms and the callbacks
    that a Trainer begins with to drivetrain's.

    Call it before importing what derives from them, such as trl. Raises ImportError where
    transformers is missing, RuntimeError where it comes too late for such a library; of any other
    module that keeps transformers' own a warning says which.
    """
    late = [name for name in _DERIVE if name in sys.modules]
    if late and not _theirs:
        raise RuntimeError(
            f"{', '.join(late)} is imported already, and holds transformers' own Trainer: call "
            "drivetrain.compat.install() before that import"
        )
    for ours, home in _HOMES.items():
        _theirs.setdefault(ours, getattr(importlib.import_module(home), ours.__name__))
    for ours, theirs in _theirs.items():
        _swap(theirs, ours)
    if kept := _kept_by(tuple(_theirs.values())):
        _LOG.warning(
            "drivetrain.compat.install() came after imports of transformers' own classes, which "
            "stay what they are: %s. Call install() before them",
            "; ".join(f"{module} has {', '.join(names)}" for module, names in kept.items()),
        )


def uninstall() -> None:
    """Undo `install`. What was derived meanwhile stays as it is."""
    for ours, theirs in _theirs.items():
        _swap(ours, theirs)
    _theirs.clear()


def _swap(old: type, new: type) -> None:
    """In transformers' modules; what they have not looked up yet they take from the class's home.
    `import transformers` may have given out another module than the one that is there now.
    """
    homes = ("transformers", *_HOMES.values())
    held = [value for module in _loaded().values() for value in vars(module).values()]
    for module in (*_loaded().values(), *held):
        is_theirs = issubclass(type(module), ModuleType) and module.__name__ in homes
        if is_theirs and vars(module).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _kept_by(theirs: tuple[type, ...]) -> dict[str, list[str]]:
    """Modules that hold one of these classes, or one derived from it, by what names."""
    kept: dict[str, list[str]] = {}
    for name, module in sorted(_loaded().items()):
        found = [key for key, value in vars(module).items() if _derives(value, theirs)]
        if found and name.partition(".")[0] not in ("transformers", "drivetrain"):
            kept[name] = sorted(found)
    return kept


def _derives(value: Any, classes: tuple[type, ...]) -> bool:
    # `isinstance` would ask the value itself, and deprecated ones answer with a warning
    return issubclass(type(value), type) and issubclass(value, classes)


def _loaded() -> dict[str, Any]:
    """Without what libraries put there that is no module."""
    held: dict[str, Any] = dict(sys.modules)
    return {name: each for name, each in held.items() if isinstance(each, ModuleType)}
