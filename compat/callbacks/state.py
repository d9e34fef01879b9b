"""The progress of a run (`TrainerState`) and the flags of callbacks (`TrainerControl`).

One step is one update, however many microbatches it took.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...kernel.errors import CheckpointDamaged, printable

__all__ = ["ExportableState", "TrainerControl", "TrainerState"]

_log = logging.getLogger(__name__)

_Exportable = TypeVar("_Exportable", bound="ExportableState")


class ExportableState(ABC):
    """Mixin of a callback whose state checkpoints should hold.

    `state()` returns `{"args": ..., "attributes": ...}` of JSON values: the arguments to construct
    the callback with, and the attributes to set on it after. Whatever has both methods, such as
    the callbacks of transformers, is an instance.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        if cls is not ExportableState:
            return NotImplemented
        return all(hasattr(other, method) for method in ("state", "from_state"))

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state to save."""

    @classmethod
    def from_state(cls: type[_Exportable], state: Mapping[str, Any]) -> _Exportable:
        """Make a new instance from the result of `state`."""
        made = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(made, name, value)
        return made


@dataclass
class TrainerControl(ExportableState):
    """Flags that callbacks set, and that the training loop obeys and resets."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        """Return all flags, as arguments of the constructor."""
        return {"args": dataclasses.asdict(self), "attributes": {}}


def _is_any(value: Any) -> bool:
    return True


def _is_number(value: Any) -> bool:
    from ...checkpoint.catalog import as_metric  # imported here, since it imports torch

    return as_metric(value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


_KINDS: dict[str, Callable[[Any], bool]] = {
    "best_model_checkpoint": _is_text,
    **dict.fromkeys(
        (
            "epoch",
            "logging_steps",
            "eval_steps",
            "save_steps",
            "train_batch_size",
            "num_train_epochs",
            "num_input_tokens_seen",
            "total_flos",
            "best_metric",
            "best_global_step",
        ),
        _is_number,
    ),
}
"""Checks of the state's fields that are used in computations."""


@dataclass
class TrainerState:
    """The progress of a run; saved with every checkpoint as `trainer_state.json`.

    `stateful_callbacks` may be given as callbacks, and is stored as their exported states by class
    name; several callbacks of one class become a list. Raises TypeError for a callback without an
    exported state.
    """

    epoch: float | None = 0
    """The epoch, with a fraction for the current one."""
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    """Samples in one microbatch of one process."""
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log_history = self.log_history or []
        if not isinstance(self.stateful_callbacks, Mapping):
            self.stateful_callbacks = _exported(self.stateful_callbacks or ())

    def save_to_json(self, json_path: str | Path) -> None:
        """Write all fields: sorted keys, indented by two, numpy and torch scalars as numbers."""
        from ...checkpoint.storage.local import replace_text

        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, default=_number)
        replace_text(Path(json_path), text + "\n")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read what `save_to_json` wrote, here or in transformers. Fields that this version does
        not know are named in a warning; fields that the file lacks keep their defaults. Raises
        ValueError for a file that holds no state.
        """
        from ..common.json_state import read_json

        try:
            stored = read_json(Path(json_path))
        except CheckpointDamaged as error:
            raise ValueError(str(error)) from error
        if not isinstance(stored, dict):
            raise ValueError(f"{json_path} holds no state: {stored!r:.200}")
        for name in ("global_step", "max_steps"):
            value = stored.get(name, 0)
            if type(value) is not int or not -1 <= value < 1 << 62:
                raise ValueError(f"{json_path}: {name} is {value!r:.200}")
        for name, kind in (("log_history", list), ("stateful_callbacks", dict)):
            if not isinstance(stored.get(name) or kind(), kind):
                raise ValueError(f"{json_path}: {name} is {stored[name]!r:.200}")
        for name, value in stored.items():
            if value is not None and not (_KINDS.get(name) or _is_any)(value):
                raise ValueError(f"{json_path}: {name} is {value!r:.200}")
        known = {item.name for item in dataclasses.fields(cls)}
        if strangers := sorted(stored.keys() - known):
            named = printable(", ".join(strangers))[:400]
            _log.warning("%s: unknown fields are left out: %s", json_path, named)
        return cls(**{name: value for name, value in stored.items() if name in known})

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Take the intervals of `args`; one below 1 is a share of `max_steps`, rounded up."""
        for kind in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(args, kind)
            if interval is None:
                continue
            setattr(self, kind, math.ceil(max_steps * interval) if interval < 1 else interval)

    def init_training_references(
        self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any
    ) -> None:
        """Set what a new call of `train` determines: its length, its rank, its trial of a
        search."""
        if trainer.hp_name is not None and trainer._trial is not None:
            self.trial_name = trainer.hp_name(trainer._trial)
        self.trial_params = None if trial is None else dict(getattr(trial, "params", trial))
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def _exported(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the exported states of callbacks, by the names of their classes."""
    by_class: dict[str, list[Any]] = {}
    for callback in callbacks:
        if not isinstance(callback, ExportableState):
            raise TypeError(
                f"{type(callback).__name__} cannot be saved with the state: "
                "mix ExportableState into it and define state()"
            )
        by_class.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: each if len(each) > 1 else each[0] for name, each in by_class.items()}


def _number(value: Any) -> Any:
    """Convert a numpy scalar or a tensor of one element to a Python number."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"a trainer state may hold JSON values only, not {type(value).__name__}")
