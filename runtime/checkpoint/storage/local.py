"""The local file system as a storage: what durability and safety depend on, each said once."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...kernel.errors import CheckpointDamaged
from .readers import read_in_parts

__all__ = ["LOCAL", "LocalStorage", "beside", "replace_text", "sync_tree"]


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@contextmanager
def beside(path: Path, name: str = "writing") -> Iterator[Path]:
    """Gives a temporary path whose content replaces `path` when the block ends, all of it or
    nothing. `name`: not used by another process at the same time; what a kill left under it is
    overwritten."""
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
    """Write a text in place of what is there, all of it or nothing. Raises `OSError`."""
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@dataclass(frozen=True)
class _Descriptor:
    """Implements `places.OpenFile`."""

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
            try:
                count = os.preadv(self.fd, [target], start)
            except OSError as error:
                raise CheckpointDamaged(
                    f"{self.path}: cannot be read at byte {start}: {error.strerror}"
                ) from error
            if not count:
                raise CheckpointDamaged(f"{self.path}: ends at byte {start}, within a tensor")
            start, target = start + count, target[count:]


class LocalStorage:
    """Implements `places.Storage` for paths."""

    renames = True
    short_bytes = 64 << 10
    long_bytes = 1 << 20
    stays_open = False

    def check(self, folder: Path) -> None:
        """Left to the first save, which makes the folder."""

    def create(self, path: Path, blocks: Callable[[], Iterable[memoryview]]) -> None:
        """Synced on return; an `OSError` names the file."""
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
        """Claims by linking to a finished file, so that no process reads half of it; where there
        are no links, by creating it."""
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
        """Give a regular file, and no link to one, a second name. Raises `OSError`."""
        before = os.lstat(source)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(source))
        os.link(source, target, follow_symlinks=False)
        if not os.path.samestat(before, os.lstat(target)):  # it was replaced meanwhile
            os.unlink(target)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(source))

    @contextmanager
    def open(self, path: Path) -> Iterator[_Descriptor]:
        """Of regular files only: a link could lead out of the folder, and a pipe would block."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointDamaged(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointDamaged(f"{path}: not a regular file")
            yield _Descriptor(path, fd)
        finally:
            os.close(fd)

    def names(self, folder: Path) -> list[str]:
        """See `Storage`."""
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def sizes(self, folder: Path, names: Sequence[str]) -> list[int]:
        """See `Storage`."""
        found = []
        for name in names:
            try:
                seen = os.lstat(folder / name)
            except OSError as error:
                raise CheckpointDamaged(
                    f"{folder / name}: cannot be opened: {error.strerror}"
                ) from error
            if not stat.S_ISREG(seen.st_mode):
                raise CheckpointDamaged(f"{folder / name}: not a regular file")
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
        """A link is deleted, never what it points to."""
        if path.is_symlink() or not path.is_dir():
            os.unlink(path)
        else:
            shutil.rmtree(path)

    def sync_folder(self, folder: Path) -> None:
        """A rename is not durable until its parent is synced."""
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
    """Have the system write these bytes to the disk while others are produced, so that little is
    left to wait for. Linux does on this advice, and keeps what is not on the disk yet in memory."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


LOCAL = LocalStorage()


def sync_tree(folder: Path) -> None:
    """Make what others wrote below `folder` durable, files and names."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                with _naming(path), open(path, "rb") as file:
                    os.fsync(file.fileno())
        LOCAL.sync_folder(Path(parent))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Calls on a descriptor fail without saying of which file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
