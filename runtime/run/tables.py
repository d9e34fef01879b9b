"""Tables for people, without truncation. A terminal folds long rows; in a pipe a row is one
line."""

from __future__ import annotations

import os
from collections.abc import Collection

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["open_console", "table", "text_of"]

_UNFOLDED = 10_000


def open_console(*, stderr: bool = False) -> Console:
    """Open a console as wide as the terminal, or as COLUMNS says. Without a terminal it is as wide
    as its content. `stderr`: on stderr, in place of stdout.
    """
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNFOLDED
    return console


def table(*titles: str, figures: Collection[str] = ()) -> Table:
    """Make a table with these columns; `figures` are right-aligned."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        made.add_column(title, overflow="fold", justify="right" if title in figures else "left")
    return made


def text_of(made: Table) -> str:
    """Return the table as lines of text, as wide as needed."""
    console = Console(width=_UNFOLDED, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
