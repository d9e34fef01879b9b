"""The operations on storage that checkpoints need; a place is a `Path`, or a `Url` such as
`s3://bucket/run`.

The local file system is `local.LOCAL`. Others come from the entry-point group `drivetrain.storage`:
the name is a URL's scheme, and its target is called with the scheme and returns a `Storage`. Other
schemes are left to `fsspec_storage`, which asks fsspec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from ...kernel.errors import CheckpointDamaged, StorageUnavailable
from ...kernel.paths import Place, Url
from .local import LOCAL

__all__ = ["MANIFEST", "OpenFile", "Storage", "read_small", "storage_of"]

ENTRY_POINT_GROUP = "drivetrain.storage"
MANIFEST = "manifest.json"
"""The file that commits a checkpoint: written last, removed first."""


class OpenFile(Protocol):
    """A file that is being read."""

    @property
    def size(self) -> int:
        """The size in bytes. Raises `CheckpointDamaged` if the file does not exist."""
        ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises `CheckpointDamaged` if the file is
        too short or cannot be read."""
        ...


class Storage(Protocol):
    """The operations that saving and reading need. `P` below is a `Path` or a `Url`.

    An operation that fails raises an `OSError` that names the place; `StorageFailed` is one.
    """

    renames: bool
    """True if a folder is renamed atomically, which then commits a checkpoint. Otherwise a
    checkpoint is committed by its manifest."""
    short_bytes: int
    """Reading this many bytes costs about as much as reading one."""
    long_bytes: int
    """Reading more bytes than this at a time is no faster."""
    stays_open: bool
    """True if a file can be read after it was closed, since no handle is held open."""

    def check(self, folder: Any) -> None:
        """Raises `OutputError` for a folder that nothing can be written to."""
        ...

    def create(self, path: Any, blocks: Callable[[], Iterable[memoryview]]) -> None:
        """Write a new file of these blocks, durable on return. `blocks` is called again if writing
        has to start again."""
        ...

    def replace(self, path: Any, raw: bytes) -> None:
        """Replace a small file atomically, also if several processes do."""
        ...

    def claim(self, path: Any, raw: bytes) -> bool:
        """Write a small file if there is none, and return True; otherwise change nothing and return
        False. Of several processes that try at once, one gets True, as far as the storage can
        guarantee it."""
        ...

    def open(self, path: Any) -> AbstractContextManager[OpenFile]:
        """Open a file to read it. Raises `CheckpointDamaged` for anything but a regular file."""
        ...

    def names(self, folder: Any) -> list[str]:
        """Return the names in a folder, sorted; an empty list if the folder does not exist."""
        ...

    def sizes(self, folder: Any, names: Sequence[str]) -> list[int]:
        """Return the sizes of these files, in bytes. Raises `CheckpointDamaged` if one is not a
        regular file.
        """
        ...

    def exists(self, path: Any) -> bool:
        """True if the path exists, also as a broken link."""
        ...

    def is_file(self, path: Any) -> bool:
        """True if the path is a file."""
        ...

    def is_folder(self, path: Any) -> bool:
        """True if the path is a folder, or a link to one."""
        ...

    def is_link(self, path: Any) -> bool:
        """True for a symbolic link."""
        ...

    def make_folder(self, folder: Any) -> None:
        """Make a folder and its parents. The folder may exist."""
        ...

    def rename(self, source: Any, target: Any) -> None:
        """Give a folder another name. Without `renames` it is copied first: a kill leaves its
        manifest at one of the two names, or at both of two equal folders."""
        ...

    def remove(self, path: Any) -> None:
        """Delete a file, or a folder with its content, the manifest first."""
        ...

    def sync_folder(self, folder: Any) -> None:
        """Make the names in a folder durable."""
        ...

    def free_bytes(self, folder: Any) -> int | None:
        """Return the free space in bytes; None if it is unknown."""
        ...


def read_small(path: Place, max_bytes: int) -> bytes:
    """Read a whole file. Raises `CheckpointDamaged` if it is larger than `max_bytes`."""
    with storage_of(path).open(path) as file:
        size = file.size
        if size > max_bytes:
            raise CheckpointDamaged(f"{path}: is {size} bytes, larger than {max_bytes}")
        raw = bytearray(size)
        file.read_into(0, memoryview(raw))
    return bytes(raw)


def storage_of(path: Place) -> Storage:
    """Return the storage of a place. Raises `StorageUnavailable`, naming the missing package."""
    if isinstance(path, Url):
        return _remote(path.scheme)
    return LOCAL


@cache
def _remote(scheme: str) -> Storage:
    shipped = EntryPoint(scheme, f"{__package__}.fsspec_storage:FsspecStorage", ENTRY_POINT_GROUP)
    (target, *_) = *entry_points(group=ENTRY_POINT_GROUP, name=scheme), shipped
    try:
        storage: Storage = target.load()(scheme)
    except (ImportError, AttributeError) as error:
        raise StorageUnavailable(
            f"{scheme}:// cannot be used: {target.value} cannot be loaded: {error}. Install what "
            "is missing, or name a folder"
        ) from error
    return storage
