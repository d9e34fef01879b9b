"""The files of a run folder that people read: no failure to write them ends a run.

Content that cannot be written, for a disk that is full or read-only, is kept and written with the
next content; the first failure is reported. The old file stays until then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..checkpoint.storage.local import replace_text
from .records import Record, read_records, to_line
from .run_folder import METRICS

__all__ = ["RunFiles"]


class RunFiles:
    """Never raises an `OSError`. `tell` is called with the failure, once each time that failures
    begin."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder, self.tell = folder, tell
        self._lines: list[str] = []
        self._whole: dict[str, str] = {}
        self._failing = False

    def add(self, record: Record) -> None:
        """One more line of the metrics."""
        self._lines.append(to_line(record))
        self._write()

    def replace(self, name: str, text: str) -> None:
        """A whole file, in place of the one of that name."""
        self._whole[name] = text
        self._write()

    def records(self) -> list[Record]:
        """The metrics, those that are still to be written too."""
        written: list[Record] = []
        with suppress(OSError):
            written = read_records(self.folder / METRICS)
        return written + [json.loads(line) for line in self._lines]

    def _write(self) -> None:
        errors = []
        if self._lines:
            try:
                append(self.folder / METRICS, "".join(self._lines))
                self._lines.clear()
            except OSError as error:
                errors.append(f"{METRICS}: {error.strerror or error}")
        for name, text in list(self._whole.items()):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_text(self.folder / name, text)
                del self._whole[name]
            except OSError as error:
                errors.append(f"{name}: {error.strerror or error}")
        began, self._failing = errors and not self._failing, bool(errors)
        if began:
            self.tell(
                f"{self.folder} cannot be written ({'; '.join(errors)}): training goes on, and it "
                "is tried again"
            )


def append(path: Path, text: str) -> None:
    """All of it, on lines of its own, or nothing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and _last_byte(file.fileno(), end) != b"\n":
            text = f"\n{text}"  # after a line that was cut off
        raw = memoryview(text.encode())
        try:
            while raw:
                raw = raw[file.write(raw) or 0 :]
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def _last_byte(descriptor: int, end: int) -> bytes:
    return os.pread(descriptor, 1, end - 1)
