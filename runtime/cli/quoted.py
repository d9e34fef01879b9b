"""Text that others wrote, on its way to the terminal: every such text goes through here."""

from __future__ import annotations

from rich.text import Text

from ..kernel.errors import printable

__all__ = ["quoted"]


def quoted(text: str, style: str = "") -> Text:
    """For a console or a table: as it is, without markup, and with nothing that steers a terminal
    or cannot be encoded."""
    return Text(printable(text), style)
