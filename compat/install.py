"""Replaces transformers' names by those of compat, for libraries written for transformers."""

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

# the modules in which transformers defines these classes
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
"""While installed: the replaced classes of transformers."""


def install() -> None:
    """Rebind `transformers.Trainer`, `TrainingArguments`, their Seq2Seq forms and the default
    callbacks of a Trainer to drivetrain's.

    Call it before importing libraries that derive from these classes, such as trl. Raises
    ImportError if transformers is missing, and RuntimeError if such a library is already imported.
    Warns about any other module that holds transformers' own classes.
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
    """Undo `install`. Classes derived meanwhile do not change."""
    for ours, theirs in _theirs.items():
        _swap(ours, theirs)
    _theirs.clear()


def _swap(old: type, new: type) -> None:
    """Rebind the names in transformers' modules. Lazy imports, which happen later, take them from
    the class's own module. `import transformers` may have returned another module object than the
    present one.
    """
    homes = ("transformers", *_HOMES.values())
    held = [value for module in _loaded().values() for value in vars(module).values()]
    for module in (*_loaded().values(), *held):
        is_theirs = issubclass(type(module), ModuleType) and module.__name__ in homes
        if is_theirs and vars(module).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _kept_by(theirs: tuple[type, ...]) -> dict[str, list[str]]:
    """Return the modules that hold one of these classes or a subclass, with the names."""
    kept: dict[str, list[str]] = {}
    for name, module in sorted(_loaded().items()):
        found = [key for key, value in vars(module).items() if _derives(value, theirs)]
        if found and name.partition(".")[0] not in ("transformers", "drivetrain"):
            kept[name] = sorted(found)
    return kept


def _derives(value: Any, classes: tuple[type, ...]) -> bool:
    # `isinstance` would call the value itself, and deprecated values then warn
    return issubclass(type(value), type) and issubclass(value, classes)


def _loaded() -> dict[str, Any]:
    """Yield the loaded modules, without other objects that libraries put into `sys.modules`."""
    held: dict[str, Any] = dict(sys.modules)
    return {name: each for name, each in held.items() if isinstance(each, ModuleType)}
