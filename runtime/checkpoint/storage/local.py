"""The local file system as a storage."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...kernel.errors import CheckpointDamaged, StorageFailed
from .readers import read_in_parts

__all__ = ["LOCAL", "LocalStorage", "beside", "forget_cached", "replace_text", "sync_tree"]


_T = TypeVar("_T")

_DAMAGE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Read errors that mean damage: a written file is missing. Other errors come from the disk or the
system, and the file may be sound."""
_PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Pauses before each retry of a read."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@contextmanager
def beside(path: Path, name: str = "writing") -> Iterator[Path]:
    """Yield a temporary path whose content atomically replaces `path` when the block ends. `name`:
    a name that no other process uses at the same time; a file that a killed process left under it
    is overwritten."""
    temporary = path.with_name(f".{path.name}.{name}")
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file by a text, atomically. Raises `OSError`."""
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@dataclass(frozen=True)
class _Descriptor:
    """An `OpenFile` of a local file."""

    path: Path
    fd: int

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read_into(self, start: int, target: memoryview) -> None:
        read_in_parts(
            lambda first, last: self._read_part(start + first, target[first:last]),
            len(target),
            LOCAL.long_bytes,
        )

    def _read_part(self, start: int, target: memoryview) -> None:
        while target:
            where, part = start, target
            count = _read(
                f"{self.path}: cannot be read at byte {start}",
                lambda: os.preadv(self.fd, [part], where),  # noqa: B023 - called at once
            )
            if not count:
                raise CheckpointDamaged(f"{self.path}: ends at byte {start}, within a tensor")
            start, target = start + count, target[count:]


def _read(what: str, act: Callable[[], _T]) -> _T:
    """Call `act`, which reads, and retry it after errors that may pass. Raises `CheckpointDamaged`
    for a missing file, and `StorageFailed` after the last try. `what` begins the message."""
    for pause in (*_PAUSES_SECONDS, None):
        try:
            return act()
        except OSError as error:
            if error.errno in _DAMAGE_ERRORS:
                raise CheckpointDamaged(f"{what}: {error.strerror}") from error
            if pause is None:
                raise StorageFailed(
                    f"{what}, tried {len(_PAUSES_SECONDS) + 1} times: {error.strerror}. It may be "
                    "sound, and stays as it is"
                ) from error
            time.sleep(pause)
    raise AssertionError("not reached")


def forget_cached(path: Path) -> None:
    """Have the system read a file from the disk the next time, not from its page cache."""
    with suppress(OSError, AttributeError):  # only Linux has it
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class LocalStorage:
    """A `Storage` for paths."""

    renames = True
    short_bytes = 64 << 10
    long_bytes = 1 << 20
    stays_open = False

    def check(self, folder: Path) -> None:
        """Do nothing: the first save makes the folder."""

    def create(self, path: Path, blocks: Callable[[], Iterable[memoryview]]) -> None:
        """Write a file, which is synced on return. An `OSError` names the file."""
        with _naming(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                started = end = 0
                for block in blocks():
                    while block:
                        count = os.write(fd, block)
                        block, end = block[count:], end + count
                    if end - started >= self.long_bytes:
                        _start_syncing(fd, started, end)
                        started = end
                os.fsync(fd)
            finally:
                os.close(fd)

    def replace(self, path: Path, raw: bytes) -> None:
        """See `Storage`."""
        with beside(path, str(os.getpid())) as temporary:
            temporary.write_bytes(raw)

    def claim(self, path: Path, raw: bytes) -> bool:
        """Create a file if it does not exist, by a hard link to a finished file, so that no process
        reads half of it. On a file system without links the file is created directly."""
        if os.path.lexists(path):
            return False
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(raw)
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                with path.open("xb") as file:
                    file.write(raw)
            except FileExistsError:
                return False
        finally:
            with suppress(OSError):
                temporary.unlink()
        return True

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link to a regular file. Symbolic links are refused. Raises `OSError`."""
        before = os.lstat(source)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(source))
        os.link(source, target, follow_symlinks=False)
        if not os.path.samestat(before, os.lstat(target)):  # the file was replaced meanwhile
            os.unlink(target)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(source))

    @contextmanager
    def open(self, path: Path) -> Iterator[_Descriptor]:
        """Open a regular file. Others are refused: a link could lead out of the folder, and a pipe
        would block.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = _read(f"{path}: cannot be opened", lambda: os.open(path, flags))
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointDamaged(f"{path}: not a regular file")
            yield _Descriptor(path, fd)
        finally:
            os.close(fd)

    def names(self, folder: Path) -> list[str]:
        """See `Storage`."""
        if not folder.is_dir():
            return []
        return sorted(_read(f"{folder}: cannot be listed", lambda: os.listdir(folder)))

    def sizes(self, folder: Path, names: Sequence[str]) -> list[int]:
        """See `Storage`."""
        found = []
        for name in names:
            path = folder / name
            seen = _read(f"{path}: cannot be opened", functools.partial(os.lstat, path))
            if not stat.S_ISREG(seen.st_mode):
                raise CheckpointDamaged(f"{path}: not a regular file")
            found.append(seen.st_size)
        return found

    def exists(self, path: Path) -> bool:
        """See `Storage`."""
        return os.path.lexists(path)

    def is_file(self, path: Path) -> bool:
        """See `Storage`."""
        return path.is_file()

    def is_folder(self, path: Path) -> bool:
        """See `Storage`."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """See `Storage`."""
        return path.is_symlink()

    def make_folder(self, folder: Path) -> None:
        """See `Storage`."""
        folder.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """See `Storage`."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or folder. For a link, only the link is deleted."""
        if path.is_symlink() or not path.is_dir():
            os.unlink(path)
        else:
            shutil.rmtree(path)

    def sync_folder(self, folder: Path) -> None:
        """Sync a folder: a rename is not durable until its parent is synced."""
        with _naming(folder):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free_bytes(self, folder: Path) -> int:
        """See `Storage`."""
        return shutil.disk_usage(folder).free


def _start_syncing(fd: int, start: int, end: int) -> None:
    """Have the system write these bytes to the disk while others are produced, so that the final
    sync is short. Linux follows this advice, and keeps the bytes that are not on the disk yet in
    memory."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


LOCAL = LocalStorage()


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below `folder`, whoever wrote them."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                with _naming(path), open(path, "rb") as file:
                    os.fsync(file.fileno())
        LOCAL.sync_folder(Path(parent))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors in the block: errors of calls on a descriptor lack it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
