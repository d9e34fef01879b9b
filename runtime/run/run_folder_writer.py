"""Keeps the run folder up to date: configuration, metrics and report, on rank 0."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CHECKPOINTS, Best, best_of
from ..kernel.errors import CheckpointError
from ..kernel.paths import Place
from .format import of_total
from .live_history import LiveHistory
from .lost_time import whole_percents
from .quoted import say, shortened
from .record_copies import RecordCopies
from .records import Record, plain
from .report import Outcome, render
from .run_files import RunFiles
from .run_folder import CONFIG, FIT, METRICS, REPORT, SAMPLE, records_folder
from .run_history import RunHistory
from .shown_config import ShownConfig
from .unsaved_best import unsaved_best

__all__ = ["FIT", "RunFolderWriter", "configuration", "result_record"]

_MOODS = {"finished": "good"}


def configuration(
    *,
    name: str,
    recipe: Path | None,
    command: Sequence[str],
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    track: Sequence[str],
) -> Record:
    """Return the content of `config.json`: enough to repeat the run, and to resume it without
    giving a recipe."""
    return {
        "name": name,
        "command": [shlex.quote(word) for word in command],
        "recipe": None if recipe is None else str(recipe.resolve()),
        "given": plain(given),
        "track": list(track),
        "settings": {
            key: {"value": plain(value), "source": sources[key]} for key, value in values.items()
        },
        "drivetrain": version("drivetrain"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


@dataclass
class RunFolderWriter:
    """The sink of records that writes the run folder. Nothing is written before the run has
    started."""

    run: Place
    config: Record
    next_command: Callable[[Mapping[str, Any], str], str]
    """Returns the command that continues the run, from the record of its start and the reason of
    its end."""
    sample: str = ""
    started: Record | None = None
    files: RunFiles = field(init=False)
    copies: RecordCopies = field(init=False)
    history: LiveHistory | None = None
    """From the first record on."""
    best: Best | None = None
    """The best checkpoint, once the run has ended."""
    _undrawn_reported: bool = False

    def __post_init__(self) -> None:
        self.files = RunFiles(self.folder, report=say)
        self.copies = RecordCopies(self.run, report=say)

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return records_folder(self.run)

    def sink(self, record: Record) -> None:
        """Store a record. At each evaluation and at the end, render the report."""
        event = record["event"]
        if event == "run_started":
            self.started = record
            self.config |= {"backend": record["backend"], "world_size": record["world"]["size"]}
            self.files.replace(CONFIG, json.dumps(self.config, indent=1) + "\n")
        if self.history is None:
            self.copies.fetch()
            self.history = LiveHistory(self.folder / METRICS)
        self.history.add(record)
        self.files.add(record)
        if event == "evaluated" and self.started:
            step, total = record["step"], self.started["total_steps"]
            if total is None or step < total:
                history = self.history.now()
                if history is not None:
                    self.write_report(history, Outcome(f"running: step {of_total(step, total)}"))
        if event == "run_ended":
            self._end(record)
        if event in ("saved", "evaluated", "run_ended"):
            with suppress(OSError):  # the checkpoints matter more, and their failures are reported
                self.copies.copy(whole=event == "run_ended")

    def time_percents(self) -> dict[str, int]:
        """Percents of the time of all starts of the run, by what it went into."""
        percents: Mapping[str, int] = {}
        with self._reporting_undrawn():
            percents = whole_percents(self._whole_history().lost.seconds())
        return {kind: percent for kind, percent in percents.items() if percent}

    def command(self, reason: str) -> str:
        """Return the command that continues a run that ended for this reason."""
        return self.next_command(self.started, reason) if self.started else ""

    def fail(self, message: str) -> None:
        """Record the error that ended the run in its report, if the run has one. Remove the files
        of a run that had only begun: a used folder would refuse the corrected command."""
        if self.started is None:
            return
        history = self._whole_history()
        if history.only_begun and not (self.folder / CHECKPOINTS).exists():
            with suppress(OSError):  # the folder holds other files, or cannot be changed
                for name in (CONFIG, METRICS):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()
        else:
            text = shortened(f"failed: {message}")
            outcome = Outcome(text, "bad", self.command("failed"), best=self._find_best())
            self.write_report(history, outcome)

    @contextmanager
    def _reporting_undrawn(self) -> Iterator[None]:
        """Warn once if the block raises: what the records are summarised for is not worth the run,
        and can be had from them later."""
        try:
            yield
        except Exception as error:
            if not self._undrawn_reported:
                self._undrawn_reported = True
                self.files.report(
                    f"the report cannot be drawn: {type(error).__name__}: {error}. The run is not "
                    f"affected; to draw it again: drivetrain report {shlex.quote(str(self.run))}"
                )

    def _whole_history(self) -> RunHistory:
        """Return the history, including the runs that this one resumed."""
        return RunHistory() if self.history is None else self.history.wait()

    def write_report(self, history: RunHistory, outcome: Outcome) -> None:
        """Render the history so far; takes some hundredths of a second at any length."""
        with self._reporting_undrawn():
            self.files.replace(REPORT, render(history, ShownConfig.of(self.config), outcome))

    def _end(self, record: Record) -> None:
        reason = record["reason"]
        if self.sample:
            self.files.replace(SAMPLE, self.sample + "\n")
        text = f"{reason} at step {record['step']}"
        command = self.command(reason)
        self.best = self._find_best()
        outcome = Outcome(text, _MOODS.get(reason, ""), command, self.sample, self.best)
        with self._reporting_undrawn():
            self.write_report(self._whole_history(), outcome)

    def unsaved_best(self) -> Record | None:
        """Return the best evaluation, once the run has ended, if it is better than the best
        checkpoint."""
        found: list[Record | None] = [None]
        with self._reporting_undrawn():
            found = [unsaved_best(self._whole_history(), ShownConfig.of(self.config), self.best)]
        return found[0]

    def _find_best(self) -> Best | None:
        with suppress(OSError, CheckpointError):  # a page without it is better than none
            return best_of(self.run)
        return None


def result_record(writer: RunFolderWriter, result: Any) -> Record:
    """Return the last record: the places of all results."""
    return {
        "event": "result",
        "step": result.step,
        "reason": result.reason,
        "loss": plain(result.loss),
        "metrics": plain(result.metrics),
        "checkpoint": plain(result.checkpoint),
        "best": None if writer.best is None else plain(asdict(writer.best)),
        "unsaved_best": writer.unsaved_best(),
        "sample": writer.sample,
        "report": str(writer.folder / REPORT),
        "time": writer.time_percents(),
        "command": writer.command(result.reason),
    }
