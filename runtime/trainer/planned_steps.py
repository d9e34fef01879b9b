"""The number of steps of a run: planned at its start, and again when the data or the batch
changed.

A run of three epochs is three passes over its data, however long these were. So the plan of a run
is kept in its checkpoints: if nothing has changed it stands; otherwise the steps that are done
count, and what is left of the data at the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..data.open_dataset import Source
from ..kernel.batches import LARGEST, Position
from ..kernel.errors import CheckpointDamaged, DataError, SettingError
from ..kernel.progress import Progress
from .schedule import RecipeSchedule, build_schedule
from .settings import Settings

__all__ = ["Planned"]


class Planned:
    """The steps of one run, and the schedule of learning rates over them. `total`: None until the
    data ends."""

    def __init__(
        self, settings: Settings, source: Source, schedule: Callable[[Any], Any] | None = None
    ) -> None:
        """`schedule`: the recipe's, which counts in place of the settings'."""
        self.settings, self.source, self._schedule = settings, source, schedule
        self._of_recipe: RecipeSchedule | None = None
        self._plan(_total(settings, source.steps_per_epoch))

    def _plan(self, total: int | None) -> None:
        self.total = total
        if self._schedule is None:
            schedule = asdict(self.settings.schedule)
            self._factor = build_schedule(total_steps=total, **schedule)

    def rates(self, applied: int, base: Sequence[float]) -> Sequence[float]:
        """The learning rates of the next update after so many. `base`: those of each group."""
        if self._schedule is None:
            factor = self._factor(applied)
            return [rate * factor for rate in base]
        if self._of_recipe is None:
            self._of_recipe = RecipeSchedule(self._schedule, base)
        return self._of_recipe.rates(applied)

    @property
    def _made_from(self) -> dict[str, Any]:
        source, settings = self.source, self.settings
        return {
            "epochs": settings.epochs,
            "global_batch": settings.global_batch,
            "length": source.epoch_length,
            "steps_per_epoch": source.steps_per_epoch,
        }

    def to_json(self) -> dict[str, Any]:
        """The plan, as `restore` takes it."""
        total = None if self.settings.steps else self.total
        return {**self._made_from, "total": total}

    def resume(self, state: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Continue a begun epoch with the plan of its run; returns notes of what changed. Raises
        `CheckpointDamaged`, naming `where`."""
        progress = Progress.from_json(state, where) if state else Progress()
        try:
            self.source.resume(progress.position, state.get("begun", {}))
        except ValueError as error:
            raise CheckpointDamaged(f"{where}: {error}") from error
        return self.restore(state.get("planned"), progress, where)

    def restore(self, value: Any, progress: Progress, where: str) -> tuple[str, ...]:
        """Continue with a stored plan; returns notes of what another length of the data means.
        `value`: None in checkpoints without one. Raises `CheckpointDamaged`, naming `where`."""
        self._plan(_total(self.settings, self.source.steps_per_epoch))
        if value is None:
            return ()
        then = _checked(value, where)
        if self.settings.steps is None:
            as_planned = then["total"] is not None and self._made_from.items() <= then.items()
            self._plan(then["total"] if as_planned else self._from(progress))
        return self._told(then["length"], progress.position)

    def _from(self, progress: Progress) -> int | None:
        """The steps that are done, and those that are left."""
        epochs, position = self.settings.epochs - progress.position.epoch, progress.position
        per_epoch = self.source.steps_per_epoch
        left = self.source.steps_left(position, min(1, epochs)) if epochs > 0 else 0
        if left is None or per_epoch is None:
            return None
        return progress.step + left + math.ceil(max(0, epochs - 1) * per_epoch)

    def _told(self, then: int | None, position: Position) -> tuple[str, ...]:
        now = self.source.epoch_length
        if None in (then, now) or then == now:
            return ()
        note = f"the length of train_data was {then}, is {now}"
        if position.samples:
            note += f": {self.source.going_on(position)}"
        return (note,)


def _checked(value: Any, where: str) -> Mapping[str, Any]:
    names = ("epochs", "global_batch", "length", "steps_per_epoch", "total")
    if isinstance(value, dict) and all(
        name in value and (value[name] is None or _is_count(value[name])) for name in names
    ):
        return value
    raise CheckpointDamaged(f"{where}: its planned steps are malformed: {value!r:.200}")


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < LARGEST


def _total(settings: Settings, steps_per_epoch: int | None) -> int | None:
    """Of a run from its beginning."""
    if settings.steps is not None:
        return settings.steps
    if steps_per_epoch == 0:
        raise DataError("train_data holds no samples, or none that fill a global batch")
    if steps_per_epoch is not None:
        return math.ceil(settings.epochs * steps_per_epoch)
    if settings.epochs % 1:
        raise SettingError(
            f"epochs is {settings.epochs}, and the data has no length to take a part of: set "
            "whole epochs, or steps"
        )
    return None
