"""The number of steps of a run: planned at its start, and again if the data or the batch changed.

A run of three epochs makes three passes over its data, whatever the length of the data. So
checkpoints hold the plan of a run. If nothing has changed, the plan stays; otherwise the number of
steps is the steps done plus the steps in the rest of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..data.open_dataset import Source
from ..data.positions import LARGEST
from ..kernel.batches import Position
from ..kernel.errors import CheckpointDamaged, DataError, SettingError
from ..kernel.progress import Progress
from .loop_state import progress_from_json
from .plateau import Plateau
from .schedule import RecipeSchedule
from .settings import Settings

__all__ = ["Planned"]


class Planned:
    """The steps of one run, and the schedule of learning rates over them. `total`: None until the
    data ends."""

    def __init__(
        self,
        settings: Settings,
        source: Source,
        schedule: Callable[[Any], Any] | None = None,
        plateau: Plateau | None = None,
    ) -> None:
        """`schedule`: the recipe's own, which replaces the schedule of the settings. `plateau`:
        multiplies the settings' rates."""
        self.settings, self.source, self._schedule = settings, source, schedule
        self._of_recipe: RecipeSchedule | None = None
        self._plateau = plateau
        self._plan(_total(settings, source))

    def _plan(self, total: int | None) -> None:
        self.total = total
        if self._schedule is None:
            self._factor = self.settings.schedule.build(total)

    def rates(self, applied: int, base: Sequence[float]) -> Sequence[float]:
        """Return the learning rates of the next update after `applied` updates. `base`: the base
        rate of each group."""
        if self._schedule is None:
            fallen = 1.0 if self._plateau is None else self._plateau.factor
            factor = self._factor(applied) * fallen
            return [rate * factor for rate in base]
        if self._of_recipe is None or self._of_recipe.num_groups != len(base):
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
            "batch_warmup": settings.data.batch_warmup,
            "batch_warmup_from": settings.data.batch_warmup_from,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the plan for `restore`."""
        total = None if self.settings.steps else self.total
        return {**self._made_from, "total": total}

    def resume(self, state: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """Continue a begun epoch with the plan of its run; return notes on what changed. Raises
        `CheckpointDamaged`, naming `where`."""
        progress = progress_from_json(state, where) if state else Progress()
        try:
            self.source.resume(progress.position, state.get("begun", {}))
        except ValueError as error:
            raise CheckpointDamaged(f"{where}: {error}") from error
        return self.restore(state.get("planned"), progress, where)

    def restore(self, value: Any, progress: Progress, where: str) -> tuple[str, ...]:
        """Continue with a stored plan; return notes on a changed length of the data. `value`: None
        in checkpoints without one. Raises `CheckpointDamaged`, naming `where`."""
        self._plan(_total(self.settings, self.source))
        if value is None:
            return ()
        then = _checked(value, where)
        if self.settings.steps is None:
            as_planned = then["total"] is not None and all(
                then.get(name) == now for name, now in self._made_from.items()
            )
            self._plan(then["total"] if as_planned else self._from(progress))
        return self._length_notes(then["length"], progress.position)

    def _from(self, progress: Progress) -> int | None:
        """Return the number of steps done plus the number of steps left."""
        epochs, position = self.settings.epochs - progress.position.epoch, progress.position
        left = self.source.steps_left(position, min(1, epochs)) if epochs > 0 else 0
        later = self.source.steps_in(position.epoch + 1, self.settings.epochs)
        return None if left is None or later is None else progress.step + left + later

    def _length_notes(self, then: int | None, position: Position) -> tuple[str, ...]:
        now = self.source.epoch_length
        if None in (then, now) or then == now:
            return ()
        note = f"the length of train_data was {then}, is {now}"
        if position.samples:
            note += f": {self.source.describe_continuation(position)}"
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


def _total(settings: Settings, source: Source) -> int | None:
    """Return the number of steps of a run from its beginning."""
    if settings.steps is not None:
        return settings.steps
    if source.steps_per_epoch == 0:
        raise DataError("train_data holds no samples, or none that fill a global batch")
    if source.steps_per_epoch is not None:
        return source.steps_in(0, settings.epochs)
    if settings.epochs % 1:
        raise SettingError(
            f"epochs is {settings.epochs}, and the data has no length to take a part of: set "
            "whole epochs, or steps"
        )
    return None
