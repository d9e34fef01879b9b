"""Tables for people: nothing is cut. A terminal folds them, in a pipe a row is one line."""

from __future__ import annotations

import os
from collections.abc import Collection

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["open_console", "table", "text_of"]

_UNFOLDED = 10_000


def open_console() -> Console:
    """As wide as the terminal, or as COLUMNS says; anything else is as wide as what is printed."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNFOLDED
    return console


def table(*titles: str, figures: Collection[str] = ()) -> Table:
    """With these columns; `figures` stand on the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        made.add_column(title, overflow="fold", justify="right" if title in figures else "left")
    return made


def text_of(made: Table) -> str:
    """As lines of text, as wide as they are."""
    console = Console(width=_UNFOLDED, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
