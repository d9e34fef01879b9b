"""Keeps the run folder up to date: configuration, metrics and report, on rank 0."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CHECKPOINTS
from ..kernel.paths import Place
from .failure import say
from .format import of_total
from .program import program
from .records import Record, history, plain
from .report import Outcome, render
from .resolve_settings import Resolved
from .run_files import RunFiles
from .run_folder import CONFIG, METRICS, REPORT, SAMPLE, copy_records, records_folder

__all__ = ["Keeper", "configuration", "result_record"]

_MOODS = {"finished": "good"}
_BEGINNINGS = ("run_started", "resumed", "warned")


def configuration(
    *,
    name: str,
    recipe: Path | None,
    given: Mapping[str, Any],
    resolved: Resolved,
    track: Sequence[str],
) -> Record:
    """The content of `config.json`: enough to repeat the run, and to resume it without a recipe."""
    return {
        "name": name,
        "command": [shlex.quote(word) for word in (*program(), *sys.argv[1:])],
        "recipe": None if recipe is None else str(recipe.resolve()),
        "given": plain(given),
        "track": list(track),
        "settings": {
            key: {"value": plain(value), "source": resolved.sources[key]}
            for key, value in resolved.values.items()
        },
        "drivetrain": version("drivetrain"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


@dataclass
class Keeper:
    """A sink. Nothing is written before the run has started."""

    run: Place
    config: Record
    onward: Callable[[Mapping[str, Any], str], str]
    """From the record of the start, and the reason of the end, to the command that goes on."""
    sample: str = ""
    started: Record | None = None
    files: RunFiles = field(init=False)

    def __post_init__(self) -> None:
        self.files = RunFiles(self.folder, tell=say)

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return records_folder(self.run)

    def sink(self, record: Record) -> None:
        """Keep a record; at an evaluation and at the end, renew the report."""
        event = record["event"]
        if event == "run_started":
            self.started = record
            self.config |= {"backend": record["backend"], "world_size": record["world"]["size"]}
            self.files.replace(CONFIG, json.dumps(self.config, indent=1) + "\n")
        self.files.add(record)
        if event == "evaluated" and self.started:
            step, total = record["step"], self.started["total_steps"]
            if total is None or step < total:
                self.write_report(Outcome(f"running: step {of_total(step, total)}"))
        if event == "run_ended":
            self._end(record)
        if event in ("saved", "evaluated", "run_ended"):
            with suppress(OSError):  # the checkpoints are what counts, and are told of
                copy_records(self.run)

    def command(self, reason: str) -> str:
        """The command that continues a run that ended for that reason."""
        return self.onward(self.started, reason) if self.started else ""

    def fail(self, message: str) -> None:
        """The run ended with an error; says so in the report if there is a run to report on. If it
        had only begun, nothing is left: a folder in use would refuse the mended command."""
        if self.started is None:
            return
        if self._has_only_begun():
            with suppress(OSError):  # something else is in it, or nothing can be changed
                for name in (CONFIG, METRICS):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()
        else:
            self.write_report(Outcome(f"failed: {message}", "bad", self.command("failed")))

    def _has_only_begun(self) -> bool:
        """Nothing was logged or saved, by this run or another that it resumed."""
        begun = all(r["event"] in _BEGINNINGS for r in self.files.records())
        return begun and not (self.folder / CHECKPOINTS).exists()

    def write_report(self, outcome: Outcome) -> None:
        """Render the history so far."""
        records = history(self.files.records())
        self.files.replace(REPORT, render(records, self.config, outcome))

    def _end(self, record: Record) -> None:
        reason = record["reason"]
        if self.sample:
            self.files.replace(SAMPLE, self.sample + "\n")
        text = f"{reason} at step {record['step']}"
        command = self.command(reason)
        self.write_report(Outcome(text, _MOODS.get(reason, ""), command, self.sample))


def result_record(keeper: Keeper, result: Any) -> Record:
    """The last record: where everything is."""
    return {
        "event": "result",
        "step": result.step,
        "reason": result.reason,
        "loss": plain(result.loss),
        "metrics": plain(result.metrics),
        "checkpoint": plain(result.checkpoint),
        "sample": keeper.sample,
        "report": str(keeper.folder / REPORT),
        "command": keeper.command(result.reason),
    }
