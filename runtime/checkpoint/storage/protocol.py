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

__all__ = ["OpenFile", "Storage", "read_small", "storage_of"]

ENTRY_POINT_GROUP = "drivetrain.storage"


class OpenFile(Protocol):
    """A file that is being read."""

    @property
    def size(self) -> int:
        """In bytes. Raises `CheckpointDamaged` when there is no such file."""
        ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises `CheckpointDamaged` where it ends
        before that or cannot be read."""
        ...


class Storage(Protocol):
    """The operations that saving and reading need. `P` below is a `Path` or a `Url`.

    An operation that fails raises an `OSError` that names the place; `StorageFailed` is one.
    """

    renames: bool
    """True if a folder is renamed atomically, which then commits a checkpoint. Otherwise a
    checkpoint is committed by its manifest."""
    short_bytes: int
    """Reading so much costs about as much as reading a byte."""
    long_bytes: int
    """Reading more at a time is no faster."""
    stays_open: bool
    """True if a file may be read from after it was closed, since nothing was held open."""

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
        """Raises `CheckpointDamaged` for what is not a regular file."""
        ...

    def names(self, folder: Any) -> list[str]:
        """The names in a folder, sorted; none where there is no such folder."""
        ...

    def sizes(self, folder: Any, names: Sequence[str]) -> list[int]:
        """Of these files, in bytes. Raises `CheckpointDamaged` for what is not a regular file."""
        ...

    def exists(self, path: Any) -> bool:
        """True if anything is there, a broken link included."""
        ...

    def is_file(self, path: Any) -> bool:
        """True if a file is there."""
        ...

    def is_folder(self, path: Any) -> bool:
        """True if a folder is there, or a link to one."""
        ...

    def is_link(self, path: Any) -> bool:
        """True for a symbolic link."""
        ...

    def make_folder(self, folder: Any) -> None:
        """With those around it; it may exist."""
        ...

    def rename(self, source: Any, target: Any) -> None:
        """Give a folder another name. Without `renames` it is copied first: a kill leaves its
        manifest at one of the two names, or at both of two equal folders."""
        ...

    def remove(self, path: Any) -> None:
        """Delete a file, or a folder and what is in it, its manifest first."""
        ...

    def sync_folder(self, folder: Any) -> None:
        """Make the names in it durable."""
        ...

    def free_bytes(self, folder: Any) -> int | None:
        """Room for more; None where that is not known."""
        ...


def read_small(path: Place, max_bytes: int) -> bytes:
    """All of a file that must not be larger than `max_bytes`; `CheckpointDamaged` if it is."""
    with storage_of(path).open(path) as file:
        size = file.size
        if size > max_bytes:
            raise CheckpointDamaged(f"{path}: is {size} bytes, larger than {max_bytes}")
        raw = bytearray(size)
        file.read_into(0, memoryview(raw))
    return bytes(raw)


def storage_of(path: Place) -> Storage:
    """The storage of a place. Raises `StorageUnavailable`, with the package that is missing."""
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
