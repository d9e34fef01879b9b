"""Reads the records of a run folder incrementally: each line once, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..data.small_files import open_regular
from .json_lines import parsed
from .record_schema import Group, Record, fitting

__all__ = ["Record", "RecordFile", "read_records"]

_BLOCK_BYTES = 1 << 16
"""Bytes read and parsed at once, which is faster than line by line; larger blocks exceed the
caches."""
_MAX_LINE_BYTES = 1 << 20


class RecordFile:
    """A file of JSON lines to which another process may append."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """`limit`: maximum number of bytes to read."""
        self.path, self._limit = path, limit
        self.skipped = 0
        """Number of lines without a record, or with one that does not fit the schema."""
        self.offset = 0
        """Number of bytes that were read, in whole lines."""
        self._file: tuple[int, int] | None = None
        self._in_long_line = False

    def was_replaced(self) -> bool:
        """True if the file was replaced or truncated since it was read: read it again with a new
        `RecordFile`."""
        try:
            seen = os.stat(self.path)
        except OSError:
            return False
        known = self._file in (None, (seen.st_dev, seen.st_ino))
        return not known or seen.st_size < self.offset

    def new(self) -> Iterator[list[Record]]:
        """Yield the records of new lines, some hundreds at a time. An incomplete last line is left
        for the next call. Raises `OSError` for anything but a regular file."""
        for group in self.groups():
            yield group.records

    def groups(self) -> Iterator[Group]:
        """Yield the same records with their columns."""
        with open_regular(self.path) as file:
            seen = os.fstat(file.fileno())
            self._file = (seen.st_dev, seen.st_ino)
            file.seek(self.offset)
            yield from self._blocks(file)

    def _blocks(self, file: BinaryIO) -> Iterator[Group]:
        size = _BLOCK_BYTES
        while raw := file.read(self._room(size)):
            whole = raw.rfind(b"\n") + 1
            if not whole:
                if len(raw) < size:  # the end of the file
                    return
                if size < _MAX_LINE_BYTES:
                    size = _MAX_LINE_BYTES
                else:
                    self._in_long_line, self.offset = True, self.offset + len(raw)
                file.seek(self.offset)
                continue
            size = _BLOCK_BYTES
            self.offset += whole
            file.seek(self.offset)
            lines = raw[: whole - 1]
            if self._in_long_line:
                lines = lines.partition(b"\n")[2]
                self.skipped, self._in_long_line = self.skipped + 1, False
            yield from self._records(lines)

    def _room(self, size: int) -> int:
        return size if self._limit is None else min(size, self._limit - self.offset)

    def _records(self, lines: bytes) -> list[Group]:
        found, num_lines = parsed(lines)
        groups = fitting(found)
        self.skipped += num_lines - sum(len(group.records) for group in groups)
        return groups


def read_records(path: Path) -> list[Record]:
    """Return all records of a file that is known to be small; empty if the file does not exist."""
    if not path.is_file():
        return []
    return [record for records in RecordFile(path).new() for record in records]
