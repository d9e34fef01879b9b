"""Shows how far a search is, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["looking"]


@contextmanager
def looking(what: str) -> Iterator[Callable[[int, int, int], None]]:
    """Yield a function of the number of ways that were looked at, of all, and of those that fit."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int, fitting: int) -> None:
            text = f"{what}, {fitting} fit"
            progress.update(task, completed=done, total=total, description=text)

        yield show
