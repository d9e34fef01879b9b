"""One page that compares runs: their state, their curves, and the settings that differ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...checkpoint import CHECKPOINTS, Best, best_of
from ...kernel.errors import CheckpointError, CheckpointNotFound, OutputError
from ...run.charts import MAX_EVALUATED, Chart, Series, evaluated, within_bounds
from ...run.format import of_total
from ...run.html_parts import Cell, html_table, preformatted, section
from ...run.report import (
    Outcome,
    curves_section,
    evaluations_left_out,
    fill,
    key_figures,
    render,
)
from ...run.run_folder import CONFIG, METRICS, read_config
from ...run.run_history import HistoryFile, RunHistory
from ...run.shown_config import ShownConfig, differing_settings

__all__ = ["RunReader", "RunRecords", "page", "read_run"]

_LOGGED = {
    "Training loss": "loss",
    "Learning rate": "learning_rate",
    "Gradient norm (before clipping)": "grad_norm",
    "Items a second": "items_per_second",
    "Memory of the process (bytes)": "process_bytes",
    "Processor load (cores)": "processor_cores",
    "Memory of the device (bytes)": "device_bytes",
}


@dataclass(frozen=True)
class RunRecords:
    """The records in the folder of a run."""

    name: str
    history: RunHistory
    config: ShownConfig
    best: Best | None = None
    """The best checkpoint in the folder."""

    @property
    def state(self) -> str:
        """The end of the run in words, as in `finished at step 40`, or the last step logged."""
        ended, logged = self.history.ended, self.history.logged
        if ended is not None:
            return f"{ended['reason']} at step {ended['step']}"
        if logged is not None:
            return f"step {of_total(logged['step'], logged.get('total_steps'))}"
        return "nothing logged yet"


class RunReader:
    """Reads a run's folder repeatedly, and each line of it once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = HistoryFile(folder / METRICS)
        self._config: tuple[Any, ShownConfig] | None = None
        self._best: tuple[Any, Best | None] = (None, None)

    def read(self) -> RunRecords:
        """Return the records so far. Raises `CheckpointNotFound` for a folder that no run writes
        to, and `OutputError` for files that cannot be read."""
        if not (self.folder / METRICS).is_file():
            raise CheckpointNotFound(
                f"{self.folder} is no run folder: there is no {METRICS} in it; give the folder "
                "that `--out` named"
            )
        try:
            history = self._file.read()
        except OSError as error:
            raise OutputError(f"{self.folder / METRICS} cannot be read: {error}") from error
        return RunRecords(str(self.folder), history, self._config_now(), self._best_now())

    def changes(self) -> Hashable:
        """Return a value that changes whenever there may be something new to read."""
        return tuple(_seen(self.folder / name) for name in (METRICS, CONFIG, CHECKPOINTS))

    def _config_now(self) -> ShownConfig:
        seen = _seen(self.folder / CONFIG)
        if self._config is None or self._config[0] != seen:
            self._config = seen, ShownConfig.of(read_config(self.folder))
        return self._config[1]

    def _best_now(self) -> Best | None:
        seen = _seen(self.folder / CHECKPOINTS)  # changes whenever a checkpoint comes or goes
        if self._best[0] != seen:
            best = None
            with suppress(OSError, CheckpointError):  # one may just be removed
                best = best_of(self.folder)
            self._best = seen, best
        return self._best[1]


def _seen(path: Path) -> Hashable:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_run(folder: Path) -> RunRecords:
    """Read a run once. Raises as `RunReader.read` does."""
    return RunReader(folder).read()


def page(runs: Sequence[RunRecords], every: float | None = None) -> str:
    """Return the HTML page that compares the runs; for one run, its report. `every`: seconds after
    which a page that is served refreshes itself in the browser."""
    if len(runs) == 1:
        (run,) = runs
        return render(run.history, run.config, Outcome(run.state, best=run.best), every)
    measured = _measured(runs)
    missing = evaluations_left_out(list(measured))
    sections = [
        section("Runs", f'<div class="key">{_runs_table(runs)}</div>'),
        curves_section(_charts(runs, measured), [run.history.clock() for run in runs]),
        section("Settings that differ", _differences(runs)),
        section("Left out", preformatted(missing)),
    ]
    return fill(f"{len(runs)} runs", Outcome(""), "", {}, sections, every)


def _measured(runs: Sequence[RunRecords]) -> dict[str, list[Series]]:
    """Return the curves of evaluations by title."""
    charts: dict[str, list[Series]] = {}
    for number, run in enumerate(runs):
        for data, name, line in evaluated(run.history, run.config):
            named = replace(line, name=run.name, colour=number, clock=number)
            charts.setdefault(f"{data}: {name}", []).append(named)
    return charts


def _charts(runs: Sequence[RunRecords], measured: Mapping[str, list[Series]]) -> list[Chart]:
    """Return the charts, with one line for each run that has such figures."""
    logged = {
        title: [
            Series(run.name, run.history.figures(name), number, clock=number)
            for number, run in enumerate(runs)
        ]
        for title, name in _LOGGED.items()
    }
    shown = dict(list(measured.items())[:MAX_EVALUATED])
    titles = ("Training loss", *shown, *list(logged)[1:])
    return within_bounds([Chart(title, {**logged, **shown}[title]) for title in titles])


def _runs_table(runs: Sequence[RunRecords]) -> str:
    facts = [_facts(run) for run in runs]
    heads = list(dict.fromkeys(name for each in facts for name in each))
    rows = [
        [run.name, *(each.get(name, "") for name in heads)]
        for run, each in zip(runs, facts, strict=True)
    ]
    return html_table(["run", *heads], rows)


def _facts(run: RunRecords) -> dict[str, Cell]:
    ranks = run.config.world_size
    backend = run.config.backend + (f" x {ranks}" if ranks != 1 else "")
    return {"state": run.state, "backend": backend, **key_figures(run.history, run.best)}


def _differences(runs: Sequence[RunRecords]) -> str:
    rows = differing_settings([run.config for run in runs])
    return html_table(["setting", *(run.name for run in runs)], rows) if rows else ""
