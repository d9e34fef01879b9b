"""Live progress on a terminal."""

from __future__ import annotations

import os
import pdb  # noqa: T100 - what a breakpoint of the user opens
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from .format import describe, duration, figure, loss_of, of_total, rate
from .quoted import quoted
from .records import Record

__all__ = ["LiveProgress"]


class LiveProgress:
    """A bar with the latest figures; everything else is printed as lines above it."""

    total: int | None = None

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.fields[done]}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self.task = self.progress.add_task(
            "", total=None, visible=False, done="", figures="", left=""
        )

    def __enter__(self) -> LiveProgress:
        self.progress.start()
        self._break, sys.breakpointhook = sys.breakpointhook, self._stopped_for_breakpoint
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.breakpointhook = self._break
        self.progress.stop()

    def _stopped_for_breakpoint(self, *arguments: Any, **options: Any) -> Any:
        """Stop the display for the rest of the run, since it would overwrite a debugger's
        output."""
        self.progress.stop()
        if self._break is not sys.__breakpointhook__ or "PYTHONBREAKPOINT" in os.environ:
            return self._break(*arguments, **options)
        pdb.Pdb().set_trace(sys._getframe(1))  # the debugger's own hook would stop in this method
        return None

    def step(self, step: int) -> None:
        """Show that one more step is done."""
        self.progress.update(self.task, completed=step, done=of_total(step, self.total))

    def sink(self, record: Record) -> None:
        """Show a record."""
        if record["event"] == "logged" and self.progress.live.is_started:
            self.progress.update(
                self.task,
                completed=record["step"],
                done=of_total(record["step"], self.total),
                figures=_figures(record),
                left=f"{duration(record['seconds_left'])} left",
            )
            return
        if record["event"] == "run_started":
            self.total = record["total_steps"]
            self.progress.update(
                self.task,
                total=self.total,
                completed=record["first_step"],
                done=of_total(record["first_step"], self.total),
                visible=True,
            )
        style = _STYLES.get(record["event"], "red" if record.get("error") else "")
        line = describe(record)
        if line is not None:
            # do not fold lines: a command copied from the terminal stays one line
            self.console.print(quoted(line, style), soft_wrap=True)


_STYLES = {
    "warned": "yellow",
    "step_skipped": "yellow",
    "rank_late": "yellow",
    "rank_lost": "yellow",
    "rejoined": "yellow",
    "evaluated": "cyan",
}


def _figures(record: Record) -> str:
    parts = [
        f"[bold]{escape(loss_of(record))}[/]",
        f"lr {record['learning_rate']:.1e}",
        f"|g| {figure(record['grad_norm'])}",
        rate(record),
    ]
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.0%}")
    return "  ".join(parts)
