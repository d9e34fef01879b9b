"""Copies of a run folder's files at the URL of the run.

The metrics grow all the time, so they are copied in parts: `metrics.jsonl`, and `metrics.jsonl.N`,
which begins at byte N. A copy sends the bytes since the last copy, and with them the parts before
that are not larger. Each byte is therefore sent at most about log2(number of copies) times, and the
parts are few. A part is stored before the parts that it replaces are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..checkpoint import read_small, storage_of
from ..checkpoint.storage.local import beside
from ..kernel.errors import CheckpointDamaged
from ..kernel.paths import Place, Url
from .run_folder import CONFIG, METRICS, REPORT, SAMPLE, records_folder

__all__ = ["RecordCopies"]

_MAX_PART_BYTES = 1 << 40


class RecordCopies:
    """Copies the files of a run to its URL; does nothing for a run in a local folder. `report` is
    called with failures."""

    def __init__(self, run: Place, report: Callable[[str], None]) -> None:
        self.url, self.folder = run if isinstance(run, Url) else None, records_folder(run)
        self.report = report
        self._starts = list[int]()
        """The bytes at which the parts begin; empty before the first copy."""
        self._stored = set[int]()
        """The same for all parts at the URL, including those that will be removed."""
        self._size = 0
        self._unread = False
        self._sent: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Write the metrics from the URL to the local folder, unless the folder has at least as
        many: a run that is resumed on another machine continues the file."""
        if self.url is None:
            return
        try:
            self._fetch(self.url, self.folder / METRICS)
        except (OSError, CheckpointDamaged) as error:
            self._unread = True
            self.report(
                f"the metrics at {self.url} cannot be read: {error}. They stay as they are; the "
                f"metrics of this run are kept in {self.folder} alone"
            )

    def copy(self, *, whole: bool = False) -> None:
        """Copy what has changed since the last copy. `whole`: leave the metrics in one file. Raises
        `OSError`."""
        if self.url is None:
            return
        if (self.folder / METRICS).is_file() and not self._unread:
            self._copy_metrics(self.url, self.folder / METRICS, whole)
        for name in (CONFIG, REPORT, SAMPLE):
            path = self.folder / name
            if not path.is_file():
                continue
            status = path.stat()
            version = (status.st_mtime_ns, status.st_ino)
            if self._sent.get(name) != version:
                storage_of(self.url).replace(self.url / name, path.read_bytes())
                self._sent[name] = version

    def _fetch(self, url: Url, path: Path) -> None:
        starts = sorted(self._find_parts(url))
        sizes = storage_of(url).sizes(url, [_part(start) for start in starts])
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        if max(ends, default=0) <= (path.stat().st_size if path.is_file() else 0):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as temporary, temporary.open("wb") as file:
            for start in starts:
                raw = read_small(url / _part(start), _MAX_PART_BYTES)
                if start > file.tell():
                    raise CheckpointDamaged(f"{url / _part(start)}: the part before it is missing")
                file.write(raw[file.tell() - start :])  # skip what is stored

    def _copy_metrics(self, url: Url, path: Path, whole: bool) -> None:
        storage, size = storage_of(url), path.stat().st_size
        if not self._starts:
            self._stored = self._find_parts(url)
        starts = [*self._starts, self._size]
        while len(starts) > 1 and size - starts[-1] >= starts[-1] - starts[-2]:
            starts.pop()
        if whole or not self._starts or size < self._size:
            starts = [0]
        if size != self._size or (whole and self._starts != [0]):
            storage.replace(url / _part(starts[-1]), _bytes_from(path, starts[-1]))
            self._stored.add(starts[-1])
            self._starts, self._size = starts, size
        for start in sorted(self._stored.difference(self._starts)):
            storage.remove(url / _part(start))
            self._stored.remove(start)

    def _find_parts(self, url: Url) -> set[int]:
        names = set(storage_of(url).names(url))
        ends = {name.removeprefix(f"{METRICS}.") for name in names if name != METRICS}
        found = {int(end) for end in ends if end.isdecimal() and _part(int(end)) in names}
        return found | ({0} if METRICS in names else set())


def _part(start: int) -> str:
    """Return the name of the part that begins at a byte. Sorting by name gives the order of
    parts."""
    return f"{METRICS}.{start:015d}" if start else METRICS


def _bytes_from(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()
