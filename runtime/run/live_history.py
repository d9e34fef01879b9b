"""The history of an active run, for its report."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from .record_file import Record, RecordFile
from .record_schema import fitting
from .run_history import RunHistory

__all__ = ["LiveHistory"]

_PAUSE = 10
"""Seconds of pause for each second of reading, which are left to the training."""


class LiveHistory:
    """The history of a resumed run: a background thread reads the older records from the file, and
    new records are added.
    """

    def __init__(self, path: Path) -> None:
        self._history, self._added = RunHistory(), list[Record]()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        size = path.stat().st_size if path.is_file() else 0
        if size:
            file = RecordFile(path, limit=size)
            self._thread = threading.Thread(target=self._read, args=(file,), daemon=True)
            self._thread.start()

    def add(self, record: Record) -> None:
        """Add the next record of this run."""
        self._added.append(record)

    def now(self) -> RunHistory | None:
        """Return the history so far; None while the file is being read."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread = None
        self._history.skipped += len(self._added)
        for group in fitting(self._added):
            self._history.skipped -= len(group.records)
            self._history.add_group(group)
        self._added.clear()
        return self._history

    def wait(self) -> RunHistory:
        """Wait until the file is read, and return the history so far."""
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()
        history = self.now()
        assert history is not None
        return history

    def _read(self, file: RecordFile) -> None:
        began = time.perf_counter()
        with suppress(OSError):  # a page without the earlier runs is better than none
            for group in file.groups():
                self._history.add_group(group)
                self._hurry.wait(_PAUSE * (time.perf_counter() - began))
                began = time.perf_counter()
        self._history.skipped += file.skipped
