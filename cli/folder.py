"""The run folder: `config.json`, `metrics.jsonl`, `report.html`, `sample.txt`, `checkpoints/`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..kernel.checkpoint import CHECKPOINTS, MANIFEST, is_checkpoint
from ..kernel.errors import CheckpointNotFound, OutputError

__all__ = [
    "Earlier",
    "check_folder",
    "default_folder",
    "find_earlier",
    "read_config",
    "write_atomically",
]

CONFIG = "config.json"
METRICS = "metrics.jsonl"
REPORT = "report.html"
SAMPLE = "sample.txt"


@dataclass(frozen=True)
class Earlier:
    """A run that is resumed: its folder, what to restore, and its `config.json`."""

    folder: Path
    source: Path
    """The folder of one checkpoint, or of all."""
    config: Mapping[str, Any]


def default_folder(recipe: Path, label: str | None = None) -> Path:
    """`runs/<recipe>-<label>`; the label is the time by default."""
    label = label or datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("runs", f"{recipe.stem}-{label}")
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")


def check_folder(folder: Path, *, resuming: bool) -> None:
    """Raises `OutputError` when a run cannot be written there. Writes nothing."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--out {folder} is a file; give the path of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not resuming:
        raise OutputError(
            f"--out {folder} is not empty; go on with the run in it by `--resume auto`, or give "
            "another --out"
        )
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise OutputError(
            f"--out {folder} cannot be written: no permission in {parent}; give another --out"
        )


def find_earlier(path: Path) -> Earlier:
    """The run that `--resume PATH` names by its folder, its checkpoints, or one of them.

    Raises `CheckpointNotFound` when it is neither.
    """
    if not path.is_dir():
        raise CheckpointNotFound(
            f"--resume {path} is not a folder; give a run folder, a checkpoint folder, or auto"
        )
    if is_checkpoint(path):
        return Earlier(path.parent.parent, path, read_config(path.parent.parent))
    if path.name == CHECKPOINTS:
        return Earlier(path.parent, path, read_config(path.parent))
    if (path / CHECKPOINTS).is_dir():
        return Earlier(path, path / CHECKPOINTS, read_config(path))
    raise CheckpointNotFound(
        f"--resume {path} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/ is in it"
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """What `config.json` of a run folder holds; nothing where there is none."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{folder / CONFIG} cannot be read: {error}; delete it to resume with "
            "a recipe given on the command line"
        ) from error
    return config if isinstance(config, dict) else {}


def write_atomically(path: Path, text: str) -> None:
    """All of it or nothing, whoever reads meanwhile. Raises `OutputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}; give another --out") from error
