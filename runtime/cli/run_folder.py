"""The run folder: `config.json`, `metrics.jsonl`, `report.html`, `sample.txt`, `checkpoints/`.

Of a run at a URL the checkpoints are there. The other files are written to a folder here, and
copied there as they are whenever the run saves, evaluates or ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint import CHECKPOINTS, MANIFEST, is_checkpoint, read_small, storage_of
from ..kernel.errors import CheckpointDamaged, CheckpointNotFound, OutputError
from ..kernel.paths import Place, Url
from ..trainer.run_lock import LOCK

__all__ = [
    "Earlier",
    "check_folder",
    "copy_records",
    "default_folder",
    "find_earlier",
    "read_config",
    "records_folder",
]

CONFIG = "config.json"
METRICS = "metrics.jsonl"
REPORT = "report.html"
SAMPLE = "sample.txt"
_MAX_CONFIG_BYTES = 64 << 20


@dataclass(frozen=True)
class Earlier:
    """A run that is resumed: its folder, what to restore, and its `config.json`."""

    folder: Place
    source: Place
    """The folder of one checkpoint, or of all."""
    config: Mapping[str, Any]


def default_folder(recipe: Path, label: str | None = None) -> Path:
    """`runs/<recipe>-<label>`; the label is the time by default."""
    label = label or datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("runs", f"{recipe.stem}-{label}")
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")


def records_folder(run: Place) -> Path:
    """The folder of the files beside the checkpoints: the run folder, or a local one for its
    URL."""
    return (
        Path("runs", run.text.partition("://")[2].replace("/", "-"))
        if (isinstance(run, Url))
        else run
    )


def copy_records(run: Place) -> None:
    """Copy them to the URL of the run, if it has one. Raises `StorageFailed`."""
    if isinstance(run, Url):
        for name in (CONFIG, METRICS, REPORT, SAMPLE):
            if (path := records_folder(run) / name).is_file():
                storage_of(run).replace(run / name, path.read_bytes())


def check_folder(folder: Place, *, resuming: bool) -> None:
    """Raises `OutputError` when a run cannot be written there. Writes nothing. What is at a URL is
    looked at when the run starts."""
    if isinstance(folder, Url):
        if not resuming and _used(storage_of(folder).names(folder)):
            raise OutputError(
                f"--out {folder} is not empty; go on with the run in it by `--resume auto`, or "
                "give another --out"
            )
        return
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--out {folder} is a file; give the path of a folder")
    if folder.is_dir() and _used(os.listdir(folder)) and not resuming:
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


def _used(names: Iterable[str]) -> bool:
    """True if the folder has files of a run; a lock does not count, since it names its holder."""
    return any(not name.startswith(LOCK) for name in names)


def find_earlier(path: Place) -> Earlier:
    """The run that `--resume PATH` names by its folder, its checkpoints, or one of them.

    Raises `CheckpointNotFound` when it is neither.
    """
    storage = storage_of(path)
    if not storage.is_folder(path):
        raise CheckpointNotFound(
            f"--resume {path} is not a folder; give a run folder, a checkpoint folder, or auto"
        )
    if is_checkpoint(path):
        return Earlier(path.parent.parent, path, read_config(path.parent.parent))
    if path.name == CHECKPOINTS:
        return Earlier(path.parent, path, read_config(path.parent))
    if storage.is_folder(path / CHECKPOINTS):
        return Earlier(path, path / CHECKPOINTS, read_config(path))
    raise CheckpointNotFound(
        f"--resume {path} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/ is in it"
    )


def read_config(folder: Place) -> Mapping[str, Any]:
    """The content of a run folder's `config.json`; empty where there is none."""
    if not storage_of(folder).exists(folder / CONFIG):
        return {}
    try:
        config = json.loads(read_small(folder / CONFIG, _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, CheckpointDamaged) as error:
        raise OutputError(
            f"{folder / CONFIG} cannot be read: {error}; delete it to resume with "
            "a recipe given on the command line"
        ) from error
    if not isinstance(config, dict):
        return {}
    for name, kind in (("recipe", str), ("backend", str), ("given", dict), ("track", list)):
        if not isinstance(config.get(name) or kind(), kind):
            raise OutputError(
                f"{folder / CONFIG}: {name} is {config[name]!r:.200}; mend it, or delete the file "
                "to resume with a recipe given on the command line"
            )
    return config
