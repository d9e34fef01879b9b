"""The checkpoints of one run, saved while training waits, or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint import BackgroundSave, CheckpointStore
from ..checkpoint.catalog import as_metric
from ..kernel.errors import CheckpointDamaged, SaveFailed
from ..kernel.events import Event, Request, Saved
from ..kernel.paths import Place, Url
from .settings import CheckpointSettings

__all__ = ["Saves", "checkpoint_store", "stored_metrics"]

T = TypeVar("T")


class Saves:
    """Every method is called by all ranks in the same order."""

    def __init__(
        self, store: CheckpointStore, announce: Callable[[Event], None], stop_on_error: bool
    ) -> None:
        self.store, self.announce, self.stop_on_error = store, announce, stop_on_error
        self.newest: Place | None = None
        """The last one that was completed."""
        self.error = ""
        """Why the last that was to be saved was not."""
        self._step = -1
        self._saving: BackgroundSave | None = None
        self._seconds = self._num_written = self._stood_still = 0.0
        self._told = False

    @property
    def under_way(self) -> bool:
        """A save has begun, and is not committed yet."""
        return self._saving is not None

    def take_seconds(self) -> float:
        """For how long training has stood still since the last call."""
        seconds, self._stood_still = self._stood_still, 0.0
        return seconds

    def is_saved(self, step: int) -> None:
        """The run begins there, and need not save it again."""
        self._step = step

    def save(self, step: int, in_background: bool, what: Callable[[], Mapping[str, Any]]) -> None:
        """Save this step, unless that was done; `in_background`: begin to. `what()`: the
        arguments of `CheckpointStore.save`."""
        self.finish()
        if self._step == step:
            return
        self._step, self._seconds = step, 0.0
        if not in_background:
            self._attempt(lambda: self.store.save(**what()))
            return
        self._told, self._num_written = False, 0.0
        self._saving = self._attempt(lambda: self.store.save_in_background(**what()))

    def after_step(self, requests: Sequence[float]) -> Request | None:
        """Commit a checkpoint that all ranks have written by now. Returns this rank's request,
        if any."""
        if self._saving is None:
            return None
        self._num_written += requests[Request.WRITTEN]
        if self._num_written >= self._saving.saving.session.world.size:
            self.finish()
        elif self._saving.written and not self._told:
            self._told = True
            return Request.WRITTEN
        return None

    def finish(self) -> None:
        """Wait for the save that is under way, if there is one, and commit it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._attempt(saving.finish, saving.buffer_bytes)

    def close(self) -> None:
        """`finish`, and wait until what need not stay has been removed."""
        self.finish()
        self.store.wait()
        if self.error:
            self.store.tidy()

    def _attempt(self, act: Callable[[], T], buffer_bytes: int = 0) -> T | None:
        """Returns the result of `act`; None where saving failed, which is announced and may end
        the run."""
        started, result, error = time.perf_counter(), None, ""
        try:
            result = act()
        except SaveFailed as failed:
            if self.stop_on_error:
                raise
            error = str(failed)
        seconds = time.perf_counter() - started
        self._stood_still += seconds
        self._seconds += seconds
        step, self.error = self._step, error
        if error:
            self._step = -1
            self.announce(Saved(step, self.store.root, self._seconds, error))
        elif isinstance(result, Path | Url):  # and no save that has only begun
            self.newest = result
            self.announce(Saved(step, result, self._seconds, buffer_bytes=buffer_bytes))
        return result


def checkpoint_store(
    folder: Place, keep: CheckpointSettings, guard: Callable[[], None] | None
) -> CheckpointStore:
    """The store that a run saves to, and the checkpoints that it keeps."""
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
    """The metrics of a checkpoint's step. Raises `CheckpointDamaged`, naming `where`, for what are
    none."""
    metrics = state.get("metrics", {})
    if isinstance(metrics, dict):
        found = {name: as_metric(value) for name, value in metrics.items()}
        numbers = {name: value for name, value in found.items() if value is not None}
        if len(numbers) == len(metrics):
            return numbers
    raise CheckpointDamaged(f"{where}: its metrics are malformed: {metrics!r:.200}")
