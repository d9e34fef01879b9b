"""The run folder: `config.json`, `metrics.jsonl`, `report.html`, `sample.txt`, `checkpoints/`.

A run at a URL has its checkpoints there. The other files are written to a local folder, and copied
to the URL whenever the run saves, evaluates or ends (`record_copies`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    checkpoints_of,
    is_checkpoint,
    list_checkpoints,
    named,
    read_small,
    storage_of,
)
from ..kernel.errors import CheckpointDamaged, CheckpointNotFound, OutputError, RecipeError
from ..kernel.paths import Place, Url
from ..trainer.run_lock import LOCK

__all__ = [
    "Earlier",
    "check_folder",
    "default_folder",
    "find_earlier",
    "locate",
    "read_config",
    "recorded_recipe",
    "records_folder",
]

FIT = "fit"
"""The value of `started_by` for a run that was started from Python."""
TRAINER = "Trainer"
"""The value for a run of compat's Trainer, whose checkpoints lie beside the folder."""
CONFIG = "config.json"
METRICS = "metrics.jsonl"
REPORT = "report.html"
SAMPLE = "sample.txt"
_MAX_CONFIG_BYTES = 64 << 20
_MOST_REASONS = 50
"""Most incomplete checkpoints that one message names."""


@dataclass(frozen=True)
class Earlier:
    """A run that is resumed: its folder, what to restore, and its `config.json`."""

    folder: Place
    source: Place
    """The folder of one checkpoint, or of all."""
    config: Mapping[str, Any]


def default_folder(recipe: Path, label: str | None = None) -> Path:
    """Return `runs/<recipe>-<label>`; the label is the time by default."""
    label = label or datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path("runs", f"{recipe.stem}-{label}")
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")


def records_folder(run: Place) -> Path:
    """Return the folder of all files except checkpoints: the run folder, or a local folder if the
    run is at a URL."""
    return (
        Path("runs", run.text.partition("://")[2].replace("/", "-"))
        if (isinstance(run, Url))
        else run
    )


def check_folder(
    folder: Place, *, resuming: bool, option: str = "--out", remedy: str = "--resume auto"
) -> None:
    """Raise `OutputError` if a run cannot be written to the folder. Writes nothing. `option`,
    `remedy`: the names in the message of the folder's argument and of the argument that resumes."""
    if isinstance(folder, Url):
        if not resuming and _used(storage_of(folder).names(folder)):
            raise OutputError(
                f"{option} {folder} is not empty; continue the run in it with `{remedy}`, or give "
                f"another {option}"
            )
        return
    if folder.is_symlink() and not folder.exists():
        raise OutputError(
            f"{option} {folder} is a link to {os.readlink(folder)}, where no folder is; make "
            f"that, or give another {option}"
        )
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{option} {folder} is a file; give the path of a folder")
    if folder.is_dir() and _used(os.listdir(folder)) and not resuming:
        raise OutputError(
            f"{option} {folder} is not empty; continue the run in it with `{remedy}`, or give "
            f"another {option}"
        )
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise OutputError(
            f"{option} {folder} cannot be written: no permission in {parent}; give another {option}"
        )


def _used(names: Iterable[str]) -> bool:
    """True if the folder holds files of a run. A lock file does not count: it has an error of its
    own."""
    return any(not name.startswith(LOCK) for name in names)


def find_earlier(path: Place) -> Earlier:
    """Find the run that `--resume PATH` names by its folder, its checkpoints folder, or one
    checkpoint.

    Raises `CheckpointNotFound` when it is neither.
    """
    path = named(path)
    storage = storage_of(path)
    if not storage.is_folder(path):
        raise CheckpointNotFound(
            f"{path} is not a folder; give a run folder or a checkpoint folder"
        )
    if is_checkpoint(path):
        return Earlier(path.parent.parent, path, read_config(path.parent.parent))
    if path.name == CHECKPOINTS:
        return Earlier(path.parent, path, read_config(path.parent))
    if storage.is_folder(path / CHECKPOINTS):
        return Earlier(path, path / CHECKPOINTS, read_config(path))
    if read_config(path).get("started_by") == TRAINER:
        raise CheckpointNotFound(
            f"{path} has the records of a Trainer of drivetrain.compat, and only the script of "
            "that run can build it again: run the script with replay_step=STEP to replay a step"
        )
    raise CheckpointNotFound(
        f"{path} holds no checkpoint: neither {MANIFEST} nor {CHECKPOINTS}/ is in it"
    )


def locate(path: Place) -> Place:
    """Return the checkpoint that `path` names: itself, or the newest complete one of a run folder.

    Raises `CheckpointNotFound`.
    """
    path = named(path)
    if is_checkpoint(path):
        return path
    listing = list_checkpoints(checkpoints_of(path))
    if listing.complete:
        return listing.complete[-1].folder
    newest = listing.rejected[-_MOST_REASONS:]
    rejected = "".join(f"; {item.folder}: {item.reason}" for item in newest)
    raise CheckpointNotFound(
        f"no complete checkpoint in {path}{rejected}; give a checkpoint folder or a run folder"
    )


def read_config(folder: Place) -> Mapping[str, Any]:
    """Read a run folder's `config.json`; empty if it does not exist."""
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
    config = {name: value for name, value in config.items() if value is not None}
    for name, kind in (("recipe", str), ("backend", str), ("given", dict), ("track", list)):
        if not isinstance(config.get(name, kind()), kind):
            raise OutputError(
                f"{folder / CONFIG}: {name} is {config[name]!r:.200}; mend it, or delete the file "
                "to resume with a recipe given on the command line"
            )
    if not all(isinstance(each, str) for each in config.get("track", ())):
        raise OutputError(f"{folder / CONFIG}: track is {config['track']!r:.200}; mend it")
    return config


def recorded_recipe(earlier: Earlier, built_in: Path) -> Path:
    """Return the recipe file of a run, or `built_in` for a run of the command line without one.

    Raises `RecipeError` if the run does not record its recipe.
    """
    config, folder = earlier.config, earlier.folder
    if config.get("recipe"):
        return Path(config["recipe"])
    if config.get("started_by") != FIT and config:
        return built_in
    if not config and not storage_of(folder).is_folder(folder / CHECKPOINTS):
        return built_in  # nothing is resumed
    why = "was started from Python by fit" if config else f"has no {CONFIG}"
    raise RecipeError(
        f"the run in {folder} {why}, so its recipe cannot be found again; give the recipe file "
        "(a Python file that defines `recipe`) on the command line"
    )
