"""The watcher of a run, and the sinks that show and record the run on rank 0."""

from __future__ import annotations

from collections.abc import Callable

from ..kernel.events import Warned
from ..launched import is_first_rank
from .records import Record, record_of
from .run_folder_writer import RunFolderWriter
from .watch import Sink, Watcher

__all__ = ["Display", "ShownRun"]

Display = tuple[Sink, Callable[[int], None] | None]
"""The sink of a display, and what is called with the number of each step, if anything is."""


def _ignore(record: Record) -> None:
    """Show nothing; the sink of all ranks but one."""


class ShownRun:
    """The watcher of a run. Rank 0 shows and records the run, and another rank from the time on
    when it has become rank 0. `display` opens the display, and `write` makes the writer of the run
    folder, if there is one. Both are called on the rank that shows the run."""

    def __init__(
        self,
        item_name: str,
        display: Callable[[], Display],
        write: Callable[[], RunFolderWriter] | None,
    ) -> None:
        self.watcher = Watcher((), item_name)
        self.show: Sink = _ignore
        self.writer: RunFolderWriter | None = None
        """The writer of the run folder, on the rank that records the run."""
        self._display, self._write = display, write
        self._begun = False

    def begin_if_first(self) -> bool:
        """Begin to show and record the run if this rank is rank 0. Return True the first time that
        it is."""
        if self._begun or not is_first_rank():
            return False
        self._begun = True
        self.show, self.watcher.on_step = self._display()
        self.watcher.sinks = (self.show,)
        if self._write is not None:
            self.writer = self._write()
            self.writer.files.report = self.warn
            self.watcher.sinks = (self.writer.sink, self.show)
        return True

    def warn(self, message: str) -> None:
        """Show a warning; it is not recorded."""
        self.show(record_of(Warned(message)))
