"""Parts of an HTML page: sections, texts and tables. Texts of a run are escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape

from .format import figure

__all__ = ["Cell", "Moment", "cell", "html_table", "preformatted", "section"]

_END_OF_CALENDAR = 253_402_300_800
_FEW, _SOME = 3, 7
"""Numbers of columns that fit a phone, and a small window; rows with more columns become cards
there."""
_MOST = 12
"""Columns that fit any window."""


class Moment(float):
    """A time in seconds since 1970; the page's script adds how long ago it was."""


Cell = str | Moment


def cell(value: Cell) -> str:
    """HTML of a text or a time."""
    if not isinstance(value, Moment):
        return escape(value)
    if not 0 <= value < _END_OF_CALENDAR:
        return escape(figure(value))
    text = datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f'<time data-at="{value:.0f}">{text}</time>'


def section(title: str, content: str) -> str:
    """Return a section as HTML; empty if there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def preformatted(text: str) -> str:
    """Return HTML of a text that keeps its lines; empty if there is no text."""
    return f'<pre class="wrap">{escape(text)}</pre>' if text else ""


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], chosen: Sequence[bool] = ()
) -> str:
    """Return a table whose rows become cards if the columns do not fit; `chosen` rows are
    highlighted."""
    num = len(head)
    size = "" if num <= _FEW else "some" if num <= _SOME else "many" if num <= _MOST else "all"
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    labels = [f' data-label="{escape(name)}"' if size else "" for name in head]
    marks = [*chosen, *[False] * (len(rows) - len(chosen))]
    body = "".join(
        f"<tr{' class=chosen' * mark}>{_cells(row, labels)}</tr>"
        for row, mark in zip(rows, marks, strict=True)
    )
    return f'<div class="scroll {size}"><table><tr>{heads}</tr>{body}</table></div>'


def _cells(row: Sequence[Cell], labels: Sequence[str]) -> str:
    return "".join(
        f"<td{label}>{cell(value)}</td>" for value, label in zip(row, labels, strict=True)
    )
