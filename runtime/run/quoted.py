"""Prints untrusted text on the terminal: every such text is escaped here."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console
from rich.text import Text

from ..kernel.errors import printable

__all__ = ["quoted", "say", "shortened"]

_MOST = 20_000
"""Maximum number of characters of one message."""


def quoted(text: str, style: str = "") -> Text:
    """Escape a text for a console or a table: no markup, no control sequences of terminals, and no
    characters that cannot be encoded."""
    return Text(printable(text), style)


def shortened(text: str) -> str:
    """Remove the middle of a message that is too long to read."""
    if len(text) <= _MOST:
        return text
    half = _MOST // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} ... [{left_out} characters left out] ... {text[-half:]}"


def say(text: str, *, label: str = "", style: str = "") -> None:
    """Print one message on stderr, coloured on a terminal."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with suppress(OSError):  # it may go to a file on a disk that is full
        if label:
            console.print(label, style=style, end=" ", markup=False)
        console.print(quoted(shortened(text)))
