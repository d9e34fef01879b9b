"""An observer of a run that sends its figures to the library of an experiment tracker."""

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
from ..trainer.run_lock import NO_ROOM
from ..trainer.start_checks import json_types
from .libraries import LIBRARIES, Library, Start

__all__ = ["TRACKERS", "Tracker"]

TRACKERS = tuple(LIBRARIES)
"""The names that `Tracker` takes."""

IDENTITIES = "trackers.json"
"""In a run folder: by which identity each library knows the run."""


class Tracker:
    """Give it to `fit` as an observer: `fit(recipe, out="runs/a", observers=[Tracker("wandb")])`.

    Figures go out on rank 0, under `train/...`, `eval/<data set>/...` and `checkpoint/seconds`. A
    run that is resumed in its folder goes on with its curve; `name` is the folder's by default.
    Where a library fails once it has started, or because a disk is full or read-only, training goes
    on, and `warn` is told once.

    Raises `SettingError` for a name that is not in `TRACKERS`, `UsageError` where the library is
    not installed; and, in `fit`, what the library raises when it starts.
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
        self._resumed = self._open = False

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Resumed):
            self._resumed = True
        elif isinstance(event, events.RunStarted):
            if event.world.rank == 0:
                try:
                    self._start(event)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    self._give_up(error)
        elif self._open:
            try:
                self._take(event)
            except Exception as error:  # whatever: a curve is not worth a run
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
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
        self._open = True

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.RolledBack):
            self._library.roll_back(event.step)
        elif isinstance(event, events.RunEnded):
            self.close(event.reason)
        elif figures := _figures(event):
            self._library.log(figures, getattr(event, "step"))  # noqa: B009

    def close(self, reason: str = "failed") -> None:
        """The run is over; to be called where it ended with an error, which no event tells of."""
        if self._open:
            self._open = False
            self._library.end(reason)


def _figures(event: events.Event) -> dict[str, float]:
    if isinstance(event, events.Logged):
        figures = {name: it for name, it in vars(event).items() if name not in ("step", "losses")}
        figures |= {f"losses/{turn}": loss for turn, loss in event.losses.items()}
        return {f"train/{name}": value for name, value in figures.items()}
    if isinstance(event, events.Evaluated):
        return {f"eval/{event.name}/{name}": value for name, value in event.metrics.items()}
    if isinstance(event, events.Saved) and not event.error:
        return {"checkpoint/seconds": event.seconds}
    if isinstance(event, events.LossSpiked):
        return {"train/spike": event.loss}
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
