"""The files of a run folder that people read. A failure to write them never ends a run.

Content that cannot be written, such as on a full or read-only disk, is kept and written with the
next content. The first failure is reported, and the old file stays meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..checkpoint.storage.local import replace_text
from .records import Record, to_line
from .run_folder import METRICS

__all__ = ["RunFiles"]


class RunFiles:
    """Writes the files without ever raising `OSError`. `report` is called with the first failure
    after each success."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder, report
        self._lines: list[str] = []
        self._whole: dict[str, str] = {}
        self._failing = False

    def add(self, record: Record) -> None:
        """Add a line to the metrics."""
        self._lines.append(to_line(record))
        self._write()

    def replace(self, name: str, text: str) -> None:
        """Replace a whole file."""
        self._whole[name] = text
        self._write()

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
            self.report(
                f"{self.folder} cannot be written ({'; '.join(errors)}): training continues, and "
                "writing is tried again"
            )


def append(path: Path, text: str) -> None:
    """Append whole lines, or nothing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and _last_byte(file.fileno(), end) != b"\n":
            text = f"\n{text}"  # the last line of the file is incomplete
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
