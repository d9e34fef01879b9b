"""The few file operations that durability and safety depend on, each said once."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointDamaged

__all__ = ["create", "open_regular", "read_small", "remove", "sync_folder", "sync_tree"]


@contextmanager
def create(path: Path) -> Iterator[int]:
    """A descriptor of a new file, on disk when the block ends. An `OSError` names the file."""
    with _naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file. Raises `CheckpointDamaged` for anything else: a link
    could lead out of the folder, and a pipe would block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointDamaged(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointDamaged(f"{path}: not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of a file that must not be larger than `max_bytes`; `CheckpointDamaged` if it is."""
    with open_regular(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise CheckpointDamaged(f"{path}: larger than {max_bytes} bytes")
    return raw


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable; a rename is not until its parent is synced."""
    with _naming(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make what others wrote below `folder` durable, files and names."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                with _naming(path), open(path, "rb") as file:
                    os.fsync(file.fileno())
        sync_folder(Path(parent))


def remove(path: Path) -> None:
    """Delete a folder and what is in it, or a file or link (never what a link points to)."""
    if path.is_symlink() or not path.is_dir():
        os.unlink(path)
    else:
        shutil.rmtree(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Calls on a descriptor fail without saying of which file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
