"""The checkpoints of one run, saved while training waits or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint import BackgroundSave, CheckpointStore
from ..checkpoint.catalog import as_metric
from ..kernel.contract import Session
from ..kernel.errors import (
    CheckpointDamaged,
    CollectiveFailed,
    DrivetrainError,
    RecipeError,
    SaveFailed,
)
from ..kernel.events import Event, Request, Saved, Warned
from ..kernel.paths import Place, Url
from .settings import CheckpointSettings
from .start_checks import on_rank_0

__all__ = ["Saves", "checkpoint_store", "stored_metrics"]

T = TypeVar("T")


class Saves:
    """Saves the checkpoints of one run. All ranks call every method in the same order."""

    def __init__(
        self, store: CheckpointStore, announce: Callable[[Event], None], stop_on_error: bool
    ) -> None:
        self.store, self.announce, self.stop_on_error = store, announce, stop_on_error
        self.newest: Place | None = None
        """The last checkpoint that was completed."""
        self.error = ""
        """Why the last save failed; empty if it succeeded."""
        self.num_saved = 0
        self._step = -1
        self._saving: BackgroundSave | None = None
        self._seconds = self._num_written = self._blocked_seconds = 0.0
        self._written_reported = False

    @property
    def in_progress(self) -> bool:
        """True if a save has begun and is not committed yet."""
        return self._saving is not None

    def take_seconds(self) -> float:
        """Return the seconds that saving has blocked training since the last call."""
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds

    def holds(self, step: int) -> bool:
        """True if the checkpoint of this step exists."""
        return self._step == step and not self.in_progress

    def mark_saved(self, step: int) -> None:
        """Note that the checkpoint of a step exists, so that the run does not save it again."""
        self._step = step

    def save(self, step: int, in_background: bool, what: Callable[[], Mapping[str, Any]]) -> None:
        """Save this step unless it was saved. `in_background`: only begin the save. `what()`
        returns the arguments of `CheckpointStore.save`."""
        self.finish()
        if self._step == step:
            return
        self._step, self._seconds = step, 0.0
        if not in_background:
            self._attempt(lambda: self.store.save(**what()))
            return
        self._written_reported, self._num_written = False, 0.0
        self._saving = self._attempt(lambda: self.store.save_in_background(**what()))

    def amend(self, step: int, session: Session, state: Mapping[str, Any]) -> None:
        """Replace entries of the state in the checkpoint of this step, if there is one in the run's
        folder. A failure is announced."""
        if not self.holds(step):
            return

        def act() -> str:
            try:
                self.store.amend(step, state)
            except (OSError, DrivetrainError) as error:
                return str(error)
            return ""

        if error := on_rank_0(session, act):
            self.announce(
                Warned(
                    f"the metrics of step {step} could not be added to its checkpoint, which is "
                    f"whole: {error}. `@best` and checkpoint.keep_best do not count this step"
                )
            )

    def after_step(self, requests: Sequence[float]) -> Request | None:
        """Commit a checkpoint that all ranks have written by now. Returns this rank's request,
        if any."""
        if self._saving is None:
            return None
        self._num_written += requests[Request.WRITTEN]
        if self._num_written >= self._saving.saving.session.world.size:
            self.finish()
        elif self._saving.written and not self._written_reported:
            self._written_reported = True
            return Request.WRITTEN
        return None

    def finish(self) -> None:
        """Wait for the save in progress, if any, and commit it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                self._attempt(saving.finish, saving.buffer_bytes)
            except CollectiveFailed:
                self._saving = saving  # it is not committed
                raise

    def close(self) -> None:
        """Call `finish`, and wait until old checkpoints have been removed."""
        self.finish()
        self.store.wait()
        if self.error:
            self.store.tidy()

    def _attempt(self, act: Callable[[], T], buffer_bytes: int = 0) -> T | None:
        """Return the result of `act`; None if saving failed, which is announced and may end the
        run."""
        started, result, error = time.perf_counter(), None, ""
        try:
            result = act()
        except SaveFailed as failed:
            if isinstance(failed.__cause__, RecipeError):
                raise failed.__cause__ from None  # no later save would be better
            if self.stop_on_error:
                raise
            error = str(failed)
        except Exception:
            self._step = -1
            raise
        seconds = time.perf_counter() - started
        self._blocked_seconds += seconds
        self._seconds += seconds
        step, self.error = self._step, error
        if error:
            self._step = -1
            self.announce(Saved(step, self.store.root, self._seconds, error))
        elif isinstance(result, Path | Url):  # not a save that has only begun
            self.newest, self.num_saved = result, self.num_saved + 1
            self.announce(Saved(step, result, self._seconds, buffer_bytes=buffer_bytes))
        return result


def checkpoint_store(
    folder: Place, keep: CheckpointSettings, guard: Callable[[], None] | None
) -> CheckpointStore:
    """Return the store that a run saves to, with the rules for which checkpoints it keeps."""
    return CheckpointStore(
        folder,
        keep_last=keep.keep_last,
        keep_best=keep.keep_best,
        best_metric=keep.best_metric,
        best_mode=keep.best_mode,
        keep_every=keep.keep_every,
        guard=guard,
    )


def stored_metrics(state: Mapping[str, Any], where: str) -> dict[str, float]:
    """Return the metrics of a checkpoint's step. Raises `CheckpointDamaged`, naming `where`, if
    they are malformed."""
    metrics = state.get("metrics", {})
    if isinstance(metrics, dict):
        found = {name: as_metric(value) for name, value in metrics.items()}
        numbers = {name: value for name, value in found.items() if value is not None}
        if len(numbers) == len(metrics):
            return numbers
    raise CheckpointDamaged(f"{where}: its metrics are malformed: {metrics!r:.200}")
