"""Files that lie in a checkpoint's folder before the checkpoint does: a subclass put them there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...checkpoint.manifest import FILE_NAME, MANIFEST
from ..names import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCALER_NAME, SCHEDULER_NAME

__all__ = ["take_along"]


def take_along(folder: Path, place: Path) -> None:
    """Copy them to `place`, which will become `folder`; what is there already stays as it is."""
    for path in _put_in(folder):
        target = place / path.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def _put_in(folder: Path) -> Iterator[Path]:
    """The files in a folder that came without a checkpoint, or after it: where one is replaced,
    its manifest was written last.
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
