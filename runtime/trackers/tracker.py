"""An observer that sends the figures of a run to an experiment tracker."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint import read_small, storage_of
from ..kernel import events
from ..kernel.errors import OutputError, SettingError, UsageError
from ..kernel.paths import Place
from ..trainer.recovery import RankLost, Reformed, Rejoined
from ..trainer.run_lock import NO_ROOM
from ..trainer.start_checks import json_types
from ..trainer.statistics import Stats
from .libraries import LIBRARIES, Library, Start

__all__ = ["TRACKERS", "Tracker"]

TRACKERS = tuple(LIBRARIES)
"""The names that `Tracker` takes."""

IDENTITIES = "trackers.json"
"""File in a run folder: the identity of the run in each library."""


class Tracker:
    """An observer for `fit`: `fit(recipe, out="runs/a", observers=[Tracker("wandb")])`.

    Rank 0 sends figures under `train/...`, `time/...` (seconds since the last log, by what they
    were spent on), `eval/<data set>/...`, `checkpoint/seconds` and, with the setting
    `stats.trackers`, `stats/<parameter or module>/...`. A run that is resumed in its
    folder continues its curve; `name` is the folder's name by default. If a library fails after its
    start, or because a disk is full or read-only, training continues, and `warn` is called once.

    Raises `SettingError` for a name that is not in `TRACKERS`, `UsageError` if the library is not
    installed, and, in `fit`, errors of the library's start.
    """

    def __init__(
        self,
        library: str,
        *,
        name: str | None = None,
        folder: Path | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        if library not in LIBRARIES:
            raise SettingError(f"there is no tracker {library!r}; known: {', '.join(TRACKERS)}")
        try:
            self._library: Library = LIBRARIES[library]()
        except ImportError as error:
            raise UsageError(
                f"the tracker {library!r} needs its library: {error}; pip install {library}"
            ) from error
        self.library, self.name, self.folder, self.warn = library, name, folder, warn
        self._resumed = self._open = self._takes_stats = False

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Resumed | RankLost | Rejoined):
            self._resumed = True
        elif isinstance(event, events.RunStarted):
            if self._open:  # it starts once more in this process
                self._library.roll_back(event.first_step)
            elif event.world.rank == 0:
                try:
                    self._start(event)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    self._disable(error)
        elif self._open:
            try:
                self._take(event)
            except Exception as error:  # any error: a curve is not worth the run
                self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._open = False
        self.warn(
            f"the tracker {self.library!r} has failed, and gets nothing more of this run: "
            f"{type(error).__name__}: {error}"
        )

    def _start(self, event: events.RunStarted) -> None:
        known = {} if event.out is None else _identities(event.out)
        label = f"{datetime.now():%Y%m%d-%H%M%S}" if event.out is None else event.out.name
        local = event.out if isinstance(event.out, Path) else Path("runs", label)
        identity = self._library.start(
            Start(
                folder=self.folder or local,
                name=self.name or label,
                config={"backend": event.backend, **json_types(event.settings)},
                first_step=event.first_step,
                identity=known.get(self.library) if self._resumed else None,
            )
        )
        if event.out is not None:
            known = {**known, self.library: identity}
            text = json.dumps(known, indent=1) + "\n"
            storage_of(event.out).replace(event.out / IDENTITIES, text.encode())
        self._open, self._takes_stats = True, event.settings.stats.trackers

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.RolledBack):
            self._library.roll_back(event.step)
        elif isinstance(event, events.RunEnded):
            self.close(event.reason)
        elif isinstance(event, Stats) and not self._takes_stats:
            return
        elif figures := _figures(event):
            self._library.log(figures, getattr(event, "step"))  # noqa: B009

    def close(self, reason: str = "failed") -> None:
        """End the curve. Call it if the run ended with an error, for which there is no event. A
        failure of the library is a warning, so that the run's own error stays the one that is
        raised."""
        if self._open:
            self._open = False
            try:
                self._library.end(reason)
            except Exception as error:
                self._disable(error)


def _figures(event: events.Event) -> dict[str, float]:
    if isinstance(event, events.Logged):
        apart = ("step", "losses", "parts")
        figures = {name: it for name, it in vars(event).items() if name not in apart}
        figures |= {f"losses/{turn}": loss for turn, loss in event.losses.items()}
        times = {f"time/{part}": seconds for part, seconds in event.parts.items()}
        return {**{f"train/{name}": value for name, value in figures.items()}, **times}
    if isinstance(event, events.Evaluated):
        return {f"eval/{event.name}/{name}": value for name, value in event.metrics.items()}
    if isinstance(event, events.Saved) and not event.error:
        return {"checkpoint/seconds": event.seconds}
    if isinstance(event, Reformed):
        return {"ranks/standing_still_seconds": event.seconds, "ranks/left": event.world_size}
    if isinstance(event, events.LossSpiked):
        return {"train/spike": event.loss}
    if isinstance(event, Stats):
        return {
            f"stats/{name}/{key}": value
            for name, figures in {**event.parameters, **event.activations}.items()
            for key, value in figures.items()
            if value is not None
        }
    return {}


def _identities(out: Place) -> Mapping[str, Any]:
    path = out / IDENTITIES
    if not storage_of(path).exists(path):
        return {}
    try:
        found = json.loads(read_small(path, 1 << 20))
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(
            f"{path} cannot be read: {error}; delete it to begin new curves"
        ) from error
    if not (isinstance(found, dict) and all(isinstance(each, str) for each in found.values())):
        raise OutputError(f"{path} holds {found!r:.200}; delete it to begin new curves")
    return found
