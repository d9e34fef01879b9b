"""Files of `torch.save`, read by torch's unpickler for weights alone, which runs nothing."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...kernel.errors import CheckpointDamaged

__all__ = ["read_pickled"]


def read_pickled(path: Path, also: Sequence[Any] = ()) -> Any:
    """The contents of a file: tensors, containers and numbers, and what `also` names, on the host.

    Raises `CheckpointDamaged` for a file that is torn, or holds anything else; none of that is run.
    """
    try:
        _refuse_packed(path)
        with torch.serialization.safe_globals(list(also)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: of the unpickler, of zip archives, of memory
        what = str(error).partition("\n")[0]
        raise CheckpointDamaged(
            f"{path}: is torn, or holds more than tensors and numbers, and is not loaded; none of "
            f"it was run: {type(error).__name__}: {what:.300}"
        ) from error


def _refuse_packed(path: Path) -> None:
    """torch packs nothing; a small file that unpacks to a large one is no work of its."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            packed = [item.filename for item in archive.infolist() if item.compress_type]
        if packed:
            raise ValueError(f"its entry {packed[0]!r:.100} is compressed")
