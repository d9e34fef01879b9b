"""A `Storage` for the file systems of fsspec.

Nothing is renamed: a checkpoint's files are uploaded under their own names, the manifest last,
which is the commit. Failed requests are retried. Listings are not cached, since other processes
write to the storage, too.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations
from fsspec.spec import AbstractBufferedFile

from ...kernel.errors import CheckpointDamaged, OutputError, StorageFailed, StorageUnavailable
from ...kernel.paths import Url
from .protocol import ENTRY_POINT_GROUP, MANIFEST
from .retry import Patience

__all__ = ["FsspecStorage"]

PART_BYTES = 32 << 20
"""Bytes of a part in a multi-part upload; S3 allows 10,000 parts, so a file may have 320 GB."""
RANGE_BYTES = 8 << 20
RANGES_AT_ONCE = 8
AHEAD_BYTES = 64 << 10
"""Least number of bytes per request: a header is read in two steps, and small tensors lie side by
side."""
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"})
"""Object stores, which have no folders to make; s3fs would make a bucket instead."""


class FsspecStorage:
    """A `Storage` for the URLs of one scheme."""

    renames = False
    short_bytes = 1 << 20
    long_bytes = RANGE_BYTES * RANGES_AT_ONCE
    stays_open = True

    def __init__(self, scheme: str, patience: Patience | None = None) -> None:
        """Raises `StorageUnavailable`."""
        try:
            fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise StorageUnavailable(
                f"{scheme}:// needs a package that is not installed: {error}"
            ) from error
        except ValueError as error:
            near = difflib.get_close_matches(scheme, known_implementations, n=1)
            hint = f" Did you mean {near[0]}://?" if near else ""
            raise StorageUnavailable(
                f"no installed package reaches {scheme}://.{hint} fsspec knows s3:// (install "
                "s3fs), gs:// (gcsfs), az:// (adlfs), hf:// (huggingface_hub) and others; a "
                f"package may add its own by the entry-point group {ENTRY_POINT_GROUP}"
            ) from error
        self.scheme, self.patience = scheme, patience or Patience()

    # --- looking --------------------------------------------------------------------------

    def names(self, folder: Url) -> list[str]:
        """See `Storage`."""
        return sorted(self._listing(folder))

    def sizes(self, folder: Url, names: Sequence[str]) -> list[int]:
        """Return the sizes of files by one listing, whatever their number."""
        found = self._listing(folder)
        for name in names:
            if found.get(name, {}).get("type") != "file":
                raise CheckpointDamaged(f"{folder / name}: no such file")
        return [int(found[name]["size"]) for name in names]

    def exists(self, path: Url) -> bool:
        """See `Storage`."""
        return self.info(path) is not None

    def is_file(self, path: Url) -> bool:
        """See `Storage`."""
        return (self.info(path) or {}).get("type") == "file"

    def is_folder(self, path: Url) -> bool:
        """True for a folder; in a store without folders, if any object lies under the name."""
        return bool(self._listing(path))

    def is_link(self, path: Url) -> bool:
        """Return False: object stores have no links."""
        return False

    def free_bytes(self, folder: Url) -> None:
        """Return None: the free space is unknown."""

    def check(self, folder: Url) -> None:
        """Write a small file and delete it, to check that the folder can be written."""
        probe = folder / ".drivetrain-probe"
        try:
            self.create(probe, lambda: [memoryview(b"may this be written?")])
        except StorageFailed as error:
            raise OutputError(f"{folder}: nothing can be saved there: {error}") from error
        with contextlib.suppress(OSError):  # without permission to delete, old files stay
            self.remove(probe)

    def info(self, path: Url) -> dict[str, Any] | None:
        """Return fsspec's record of a file or folder; None if it does not exist."""
        fs, key = _reach(path)
        try:
            found: dict[str, Any] = self.patience.persist(
                f"{path}: cannot be looked at", lambda: fs.info(key)
            )
        except FileNotFoundError:
            return None
        return found

    def _listing(self, folder: Url) -> dict[str, dict[str, Any]]:
        fs, key = _reach(folder)
        try:
            listed = self.patience.persist(
                f"{folder}: cannot be listed", lambda: fs.ls(key, detail=True)
            )
        except (FileNotFoundError, NotADirectoryError):
            return {}
        by_name = {item["name"].rstrip("/").rpartition("/")[2]: item for item in listed}
        by_name.pop("", None)
        # An empty object may stand for the folder itself, and a file lists itself.
        own = key.rstrip("/")
        return {n: item for n, item in by_name.items() if item["name"].rstrip("/") != own}

    # --- reading --------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self, path: Url) -> Iterator[_Object]:
        """Open a file without sending a request yet."""
        yield _Object(self, path)

    def fetch(self, path: Url, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on, by several requests at once. Raises
        `CheckpointDamaged`."""
        fs, key = _reach(path)
        begins = list(range(0, len(target), RANGE_BYTES))
        ends = [min(begin + RANGE_BYTES, len(target)) for begin in begins]

        def act() -> None:
            starts, stops = ([start + at for at in edges] for edges in (begins, ends))
            parts = fs.cat_ranges([key] * len(begins), starts, stops, on_error="return")
            for begin, end, part in zip(begins, ends, parts, strict=True):
                if isinstance(part, BaseException):
                    raise part
                if len(part) != end - begin:
                    raise OSError(f"{len(part)} bytes came where {end - begin} were asked for")
                target[begin:end] = part

        try:
            self.patience.persist(f"{path}: cannot be read at byte {start}", act)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{path}: no such file") from error

    # --- writing --------------------------------------------------------------------------

    def create(self, path: Url, blocks: Callable[[], Iterable[memoryview]]) -> None:
        """Upload a file, in parts if it is large. The file appears once it is complete."""
        what = f"{path}: cannot be written"
        try:
            self.patience.persist(what, lambda: _upload(path, blocks()))
        except FileNotFoundError as error:
            raise StorageFailed(f"{what}: {type(error).__name__}: {error}") from error

    def replace(self, path: Url, raw: bytes) -> None:
        """Replace a file by uploading it: objects are replaced atomically."""
        self.create(path, lambda: [memoryview(raw)])

    def claim(self, path: Url, raw: bytes) -> bool:
        """Create a file if it does not exist, atomically where the storage supports it, as S3 does.
        Elsewhere, of several processes that try at the same time, the last one gets it."""
        if self.exists(path):
            return False
        fs, key = _reach(path)
        try:
            fs.pipe_file(key, raw, mode="create")
        except FileExistsError:
            return False
        except Exception:  # unsupported, or no answer: retry below
            if self.exists(path):
                return False
            self.replace(path, raw)
        return True

    def make_folder(self, folder: Url) -> None:
        """See `Storage`."""
        fs, key = _reach(folder)
        if self.scheme not in _FLAT:
            self.patience.persist(
                f"{folder}: cannot be made", lambda: fs.makedirs(key, exist_ok=True)
            )

    def rename(self, source: Url, target: Url) -> None:
        """Rename a folder by copies within the storage."""
        self.remove(target)
        self.make_folder(target)
        for name in sorted(self.names(source), key=lambda name: name == MANIFEST):
            fs, old = _reach(source / name)
            _, new = _reach(target / name)
            copy = functools.partial(fs.cp_file, old, new)
            self.patience.persist(f"{source / name}: cannot be copied to {target}", copy)
        self.remove(source)

    def remove(self, path: Url) -> None:
        """Remove a file or folder. One that does not exist is no error."""
        fs, key = _reach(path)
        _, manifest = _reach(path / MANIFEST)

        def act() -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fs.rm_file(manifest)
            with contextlib.suppress(FileNotFoundError):
                fs.rm(key, recursive=True)

        self.patience.persist(f"{path}: cannot be deleted", act)

    def sync_folder(self, folder: Url) -> None:
        """Do nothing: the storage itself is durable."""


class _Object:
    """An `OpenFile` of an object. Reads ahead, and further ahead as long as it is read in order."""

    def __init__(self, storage: FsspecStorage, path: Url) -> None:
        self.storage, self.path = storage, path
        self._window, self._window_start, self._ahead = bytearray(), 0, AHEAD_BYTES

    @functools.cached_property
    def size(self) -> int:
        info = self.storage.info(self.path)
        if info is None or info["type"] != "file":
            raise CheckpointDamaged(f"{self.path}: no such file")
        return int(info["size"])

    def read_into(self, start: int, target: memoryview) -> None:
        if len(target) < self.storage.short_bytes and start + len(target) <= self.size:
            offset = self._within_window(start, len(target))
            target[:] = self._window[offset : offset + len(target)]
            return
        step = self.storage.long_bytes
        for begin in range(0, len(target), step):
            self.storage.fetch(self.path, start + begin, target[begin : begin + step])

    def _within_window(self, start: int, num_bytes: int) -> int:
        """Return the position of bytes in the window, which is read if needed."""
        end = self._window_start + len(self._window)
        if not self._window_start <= start <= start + num_bytes <= end:
            in_order = self._window_start < start <= end + AHEAD_BYTES
            most = self.storage.short_bytes
            self._ahead = min(2 * self._ahead, most) if in_order else AHEAD_BYTES
            window = bytearray(min(max(num_bytes, self._ahead), self.size - start))
            self.storage.fetch(self.path, start, memoryview(window))
            self._window, self._window_start = window, start
        return start - self._window_start


def _reach(path: Url) -> tuple[Any, str]:
    """Return the file system (one object for each scheme and account) and the path of a place in
    it."""
    fs, key = url_to_fs(str(path), use_listings_cache=False)
    return fs, key


def _upload(path: Url, blocks: Iterable[memoryview]) -> None:
    fs, key = _reach(path)
    size = 0
    file = fs.open(key, "wb", block_size=PART_BYTES)
    try:
        for block in blocks:
            file.write(block)
            size += len(block)
        file.close()
    except BaseException:
        _abandon(file)
        raise
    stored = fs.info(key)["size"]
    if stored != size:
        raise OSError(f"{size} bytes were sent and {stored} are there")


def _abandon(file: Any) -> None:
    """Discard a file that is being written without closing it, since closing commits it."""
    with contextlib.suppress(Exception):
        file.discard()
    if isinstance(file, AbstractBufferedFile):
        file.closed = True
