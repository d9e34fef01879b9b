"""Reads files of `torch.save` by torch's weights-only unpickler, which runs no code."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...kernel.errors import CheckpointDamaged

__all__ = ["read_pickled"]


def read_pickled(path: Path, also: Sequence[Any] = (), in_place: bool = False) -> Any:
    """Read a file of tensors, containers, numbers, and the classes in `also`, on the host.
    `in_place`: map tensors into memory, so that they are read on access.

    Raises `CheckpointDamaged` for a truncated file, or one that holds anything else, which is not
    run.
    """
    try:
        _refuse_packed(path)
        with torch.serialization.safe_globals(list(also)):
            return torch.load(path, map_location="cpu", mmap=in_place, weights_only=True)
    except Exception as error:  # errors of the unpickler, of zip archives, of memory
        what = str(error).partition("\n")[0]
        raise CheckpointDamaged(
            f"{path}: is torn, or holds more than tensors and numbers, and is not loaded; none of "
            f"it was run: {type(error).__name__}: {what:.300}"
        ) from error


def _refuse_packed(path: Path) -> None:
    """Refuse compressed entries: torch never compresses, and a small file could expand to a huge
    one."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            packed = [item.filename for item in archive.infolist() if item.compress_type]
        if packed:
            raise ValueError(f"its entry {packed[0]!r:.100} is compressed")
