"""`fit` with a run folder and a display: what `drivetrain.fit` does on each rank."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Literal

from rich.console import Console
from torch import nn

from ..checkpoint.catalog import checkpoints_of, newest
from ..kernel.errors import CheckpointError, printable
from ..kernel.events import Event, Observer, StepEnded
from ..kernel.paths import Place, Url, place
from ..kernel.recipe import Recipe
from ..launched import is_first_rank, restarts, shared_folder
from ..trainer.fit import fit
from ..trainer.recipe_checks import check_observers, check_recipe
from ..trainer.result import Result
from ..trainer.setting_values import flatten, override
from ..trainer.settings import Settings
from .format import describe
from .live import LiveProgress
from .notebook import NotebookProgress
from .output import write_now
from .record_channel import RecordChannel
from .records import Record, record_of
from .run_folder import check_folder
from .run_folder_writer import FIT, RunFolderWriter, configuration, result_record
from .shown_run import Display, ShownRun
from .where_shown import in_notebook, script_command

__all__ = ["fit_recorded", "refuse_used"]

_LOG = logging.getLogger("drivetrain")
_TROUBLE = (
    "warned",
    "step_skipped",
    "non_finite_found",
    "loss_spiked",
    "rolled_back",
    "rank_late",
    "rank_lost",
    "rejoined",
    "reformed",
)
"""Events that a run without progress logs. It also logs failed saves, and what a resume changed."""


def fit_recorded(
    recipe: Recipe,
    settings: Settings | None = None,
    *,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | Url | None = None,
    resume: str | os.PathLike[str] | Url | None = None,
    observers: Sequence[Observer] = (),
    finish: Callable[[nn.Module], Any] | None = None,
    progress: bool | Literal["lines"] = True,
    display: RecordChannel | None = None,
) -> Result:
    """Train on this rank; rank 0 shows the progress and writes the run folder. `display`: the sink
    of records, instead of a display of this process. Without progress, troubles are logged."""
    check_recipe(recipe)
    settings = settings or Settings()
    if restarts() > 0 and out is not None:
        resume = resume or "auto"  # the launcher has restarted the ranks: continue
    refuse_used(out, resume)
    options = dict(backend_options or {})
    check_observers(observers, "observers")
    if backend == "auto" and not options and shared_folder() is not None:
        backend, options, settings = _automatic(recipe, settings, shows=bool(progress))
    with ExitStack() as stack:
        write = None if out is None else partial(_writer, place(out), recipe, settings, options)
        open_display = partial(_display, progress, display, stack)
        shown = ShownRun(_item_name(recipe), open_display, write)
        logs_only = not progress and write is None
        try:
            result = fit(
                recipe,
                settings,
                backend=backend,
                backend_options=options,
                out=out,
                resume=resume,
                observers=lambda: [*_observers(shown, logs_only), *observers],
                finish=finish,
            )
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if shown.writer is not None:
                shown.writer.fail(f"{type(error).__name__}: {error}")
                if isinstance(error, KeyboardInterrupt):
                    shown.warn(_stopped_at_once(shown.writer))
            raise
        if shown.writer is not None:
            shown.show(result_record(shown.writer, result))
        elif write is None and result.reason == "preempted":
            shown.warn(f"stopped at step {result.step}, and nothing is saved: fit was given no out")
        return result


def _automatic(
    recipe: Recipe, settings: Settings, shows: bool
) -> tuple[str, dict[str, Any], Settings]:
    """Return the backend that `auto` takes on these ranks, its options, and the settings of the
    run. The rank that compares the ways to place the run prints the result, or logs it."""
    from ..planning.automatic import Watchers, taken  # slow to import

    def report(line: str) -> None:
        if shows:
            write_now(f"{printable(line)}\n", sys.stderr)
        else:
            _LOG.info("%s", printable(line))

    defaults = Settings()
    given = [key for key, value in vars(settings).items() if value != getattr(defaults, key)]
    way = taken(recipe, settings, given, Watchers(report))
    if way is None:
        return "auto", {}, settings
    return way.backend, dict(way.options), override(settings, way.settings)


def _observers(shown: ShownRun, logs_only: bool) -> list[Observer]:
    """Return the observers of this process by its present rank. `logs_only`: the run is neither
    shown nor recorded, and rank 0 logs troubles."""
    shown.begin_if_first()
    if logs_only:
        return [_observe_trouble] if is_first_rank() else []
    return [shown.watcher]


def refuse_used(
    out: str | os.PathLike[str] | Url | None, resume: str | os.PathLike[str] | Url | None
) -> None:
    """Raises `OutputError` if `out` holds another run or cannot be written. Rank 0 checks this, or
    the process that starts the ranks."""
    if out is not None and is_first_rank():
        check_folder(place(out), resuming=resume is not None, option="out", remedy='resume="auto"')


def _writer(
    folder: Place,
    recipe: Recipe,
    settings: Settings,
    options: Mapping[str, Any],
) -> RunFolderWriter:
    values, defaults = flatten(settings), flatten(Settings())
    given = {key: value for key, value in values.items() if value != defaults[key]}
    given |= {f"backend.{key}": value for key, value in options.items()}
    values = {**values, **given}
    config = configuration(
        name=folder.name,
        recipe=None,
        command=script_command("fit(...)"),
        given=given,
        values=values,
        sources={key: FIT if key in given else "default" for key in values},
        track=(),
    )

    def call(started: Mapping[str, Any], reason: str) -> str:
        same = f'fit(recipe, settings, out="{folder}", resume="auto")'
        return "" if reason == "finished" else same

    return RunFolderWriter(folder, config | {"started_by": FIT}, call)


def _stopped_at_once(writer: RunFolderWriter) -> str:
    """Report the last checkpoint of a run that stopped without saving."""
    saved = None
    with suppress(OSError, CheckpointError):
        saved = newest(checkpoints_of(writer.run))
    if saved is None:
        return "stopped without saving: there is no checkpoint"
    return f"stopped without saving; to resume from {saved}:\n  {writer.command('failed')}"


def _item_name(recipe: Recipe) -> str:
    return "items" if recipe.count_items else "samples"


def _display(
    progress: bool | Literal["lines"], display: RecordChannel | None, stack: ExitStack
) -> Display:
    """Return the display: `display` if there is one, or else a table in a notebook, a bar on a
    terminal, or plain lines. The last two go to stderr, so that stdout holds only the script's own
    output. Without progress, troubles are logged. `stack` closes the display at the end."""
    if not progress:
        return _log_trouble, None
    if progress == "lines":
        return _print_line, None
    if display is not None:
        return display.sink, display.step
    live: NotebookProgress | LiveProgress
    if in_notebook():
        live = stack.enter_context(NotebookProgress())
    elif (console := Console(stderr=True)).is_terminal:
        live = stack.enter_context(LiveProgress(console))
    else:
        return _print_line, None
    return live.sink, live.step


def _log_trouble(record: Record) -> None:
    """Log what a run without progress must not hide; a sink."""
    if record["event"] in _TROUBLE or record.get("notes") or record.get("error"):
        _LOG.warning("%s", printable(describe(record) or "").removeprefix("warning: "))


def _observe_trouble(event: Event) -> None:
    """Do the same for an event; an observer."""
    if not isinstance(event, StepEnded):
        _log_trouble(record_of(event))


def _print_line(record: Record) -> None:
    line = describe(record)
    if line is not None:
        write_now(f"{printable(line)}\n", sys.stderr)
