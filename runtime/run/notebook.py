"""Live progress in a notebook: a bar with the time left, and a table of losses and metrics."""

from __future__ import annotations

import time
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from ..kernel.errors import printable
from .format import describe, duration, figure, loss_of, of_total, rate
from .records import Record

__all__ = ["NotebookProgress"]

_MAX_ROWS = 30
_MAX_NOTES = 20
_REDRAW_SECONDS = 0.25


class NotebookProgress:
    """The progress in the output of a cell, redrawn in place. `display`: IPython's by default."""

    def __init__(self, display: Any = None) -> None:
        self._ipython = display or import_module("IPython.display")
        self._handle: Any = None
        self._drawn_at = 0.0
        self.total: int | None = None
        self._step = 0
        self._figures = self._left = ""
        self._rows: dict[int, dict[str, str]] = {}
        self._notes: list[str] = []

    def __enter__(self) -> NotebookProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._draw()

    def step(self, step: int) -> None:
        """Count one more step; the display is redrawn a few times a second."""
        self._step = step
        if time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
            self._draw()

    def sink(self, record: Record) -> None:
        """Show a record."""
        event = record["event"]
        if event == "logged":
            self._step = record["step"]
            self._row(record["step"])["training loss"] = figure(record["loss"])
            self._figures = f"{loss_of(record)}  {rate(record)}"
            self._left = f"{duration(record['seconds_left'])} left"
        elif event == "evaluated":
            row = self._row(record["step"])
            for name, value in record["metrics"].items():
                row[f"{record['name']} {name}"] = figure(value)
        else:
            if event == "run_started":
                self.total, self._step = record["total_steps"], record["first_step"]
            elif event == "run_ended":
                self._left = ""
            line = describe(record)
            if line is not None:
                self._notes = [*self._notes, printable(line)][-_MAX_NOTES:]
        self._draw()

    def _row(self, step: int) -> dict[str, str]:
        row = self._rows.setdefault(step, {})
        for old in list(self._rows)[:-_MAX_ROWS]:
            del self._rows[old]
        return row

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        page = self._ipython.HTML(self.html())
        if self._handle is None:
            self._handle = self._ipython.display(page, display_id=True)
        else:
            self._handle.update(page)

    def html(self) -> str:
        """Return the bar, the table and the notes as HTML."""
        bar = "" if self.total is None else f' value="{self._step}" max="{self.total}"'
        shown = [of_total(self._step, self.total), self._figures, self._left]
        figures = escape("  ".join(filter(None, shown)))
        notes = "".join(f"<pre>{escape(note)}</pre>" for note in self._notes)
        return f"<div><progress{bar}></progress> {figures}{self._table()}{notes}</div>"

    def _table(self) -> str:
        columns = list(dict.fromkeys(name for row in self._rows.values() for name in row))
        if not columns:
            return ""
        head = "".join(f"<th>{escape(name)}</th>" for name in ("step", *columns))
        body = "".join(
            f"<tr><td>{step}</td>"
            + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns)
            + "</tr>"
            for step, row in self._rows.items()
        )
        return f"<table><tr>{head}</tr>{body}</table>"
