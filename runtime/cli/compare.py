"""Several runs on one page: where they stand, their curves over each other, and what they differ
in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..kernel.errors import CheckpointNotFound
from .curves import Series, draw
from .format import of_total
from .records import Record, history, last, read_records
from .report import Outcome, fill, html_table, key_figures, render, section
from .run_folder import METRICS, read_config

__all__ = ["RunRecords", "page", "read_run"]


_LOGGED = {
    "Training loss": "loss",
    "Learning rate": "learning_rate",
    "Gradient norm (before clipping)": "grad_norm",
    "Items a second": "items_per_second",
}


@dataclass(frozen=True)
class RunRecords:
    """A run as its folder tells it."""

    name: str
    records: Sequence[Record]
    config: Mapping[str, Any]

    @property
    def state(self) -> str:
        """In words: `finished at step 40`, or the step that it has come to."""
        ended, logged = last(self.records, "run_ended"), last(self.records, "logged")
        if ended is not None:
            return f"{ended['reason']} at step {ended['step']}"
        if logged is not None:
            return f"step {of_total(logged['step'], logged['total_steps'])}"
        return "nothing logged yet"


def read_run(folder: Path) -> RunRecords:
    """Raises `CheckpointNotFound` for a folder that no run writes to, `OutputError` for a
    `config.json` that cannot be read."""
    if not (folder / METRICS).is_file():
        raise CheckpointNotFound(
            f"{folder} is no run folder: there is no {METRICS} in it; give what `--out` named"
        )
    return RunRecords(str(folder), history(read_records(folder / METRICS)), read_config(folder))


def page(runs: Sequence[RunRecords]) -> str:
    """The HTML page; of one run its own."""
    if len(runs) == 1:
        return render(runs[0].records, runs[0].config, Outcome(runs[0].state))
    drawn = [
        f"<figure><figcaption>{escape(title)}</figcaption>{draw(title, lines)}</figure>"
        for title, lines in _charts(runs).items()
    ]
    sections = [
        section("Runs", f'<div class="key">{_runs_table(runs)}</div>'),
        section("Curves", f'<div class="curves">{"".join(drawn)}</div>' if drawn else ""),
        section("Settings that differ", _differences(runs)),
    ]
    return fill(f"{len(runs)} runs", Outcome(""), "", {}, sections)


def _charts(runs: Sequence[RunRecords]) -> dict[str, list[Series]]:
    """Title -> one line for each run that has such figures."""
    charts: dict[str, list[Series]] = {}
    for number, run in enumerate(runs):
        for title, points in _points(run.records).items():
            steps, values = zip(*points, strict=True)
            line = Series(run.name, steps, values, colour=number)
            charts.setdefault(title, []).append(line)
    return charts


def _points(records: Sequence[Record]) -> dict[str, list[tuple[int, float | None]]]:
    """Title -> step and value."""
    points: dict[str, list[tuple[int, float | None]]] = {}
    for record in records:
        figures: Mapping[str, float | None] = {}
        if record["event"] == "logged":
            figures = {title: record[key] for title, key in _LOGGED.items()}
        elif record["event"] == "evaluated":
            figures = {f"{record['name']}: {k}": value for k, value in record["metrics"].items()}
        for title, value in figures.items():
            points.setdefault(title, []).append((record["step"], value))
    return points


def _runs_table(runs: Sequence[RunRecords]) -> str:
    facts = [_facts(run) for run in runs]
    heads = list(dict.fromkeys(name for each in facts for name in each))
    rows = [
        [run.name, *(each.get(name, "") for name in heads)]
        for run, each in zip(runs, facts, strict=True)
    ]
    return html_table(["run", *heads], rows)


def _facts(run: RunRecords) -> dict[str, str]:
    ranks = run.config.get("world_size", 1)
    backend = str(run.config.get("backend", "?")) + (f" x {ranks}" if ranks != 1 else "")
    return {"state": run.state, "backend": backend, **key_figures(run.records)}


def _differences(runs: Sequence[RunRecords]) -> str:
    settings = [
        {key: str(entry["value"]) for key, entry in run.config.get("settings", {}).items()}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    rows = [[key, *(each.get(key, "") for each in settings)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return html_table(["setting", *(run.name for run in runs)], rows) if rows else ""
