"""Files that a subclass wrote into a checkpoint's folder before the checkpoint was written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...checkpoint import MANIFEST
from ...checkpoint.manifest import FILE_NAME
from ..names import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCALER_NAME, SCHEDULER_NAME

__all__ = ["copy_earlier_files"]


def copy_earlier_files(folder: Path, place: Path) -> None:
    """Copy these files to `place`, which will become `folder`; existing files are not
    overwritten."""
    for path in _earlier_files(folder):
        target = place / path.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def _earlier_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder without a checkpoint, or those written after the checkpoint that
    is replaced, whose manifest was written last.
    """
    manifest = folder / MANIFEST
    since = manifest.stat().st_ctime_ns if manifest.is_file() else 0
    for path in sorted(folder.rglob("*")):
        own = path.parent == folder and _OWN.fullmatch(path.name)
        if path.is_file() and not own and path.stat().st_ctime_ns >= since:
            yield path


_HF = (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME, SCALER_NAME)
_OWN = re.compile(
    "|".join((FILE_NAME.pattern, *map(re.escape, (MANIFEST, *_HF)), r"rng_state(_\d+)?\.pth"))
)
"""The files that a checkpoint writes itself, in either format."""
