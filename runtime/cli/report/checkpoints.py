"""`drivetrain checkpoint`: inspects and verifies checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ...checkpoint import (
    CheckpointReader,
    best_of,
    checkpoints_of,
    is_checkpoint,
    list_checkpoints,
    named,
)
from ...checkpoint.frozen import shared_bytes
from ...kernel.errors import CheckpointError, CheckpointNotFound, OutputError
from ...kernel.paths import Place
from ...kernel.shards import Kind
from ...run.format import describe_unsaved, figure
from ...run.lost_time import whole_percents
from ...run.quoted import quoted
from ...run.records import plain
from ...run.run_folder import METRICS, locate, read_config, records_folder
from ...run.run_history import HistoryFile, RunHistory
from ...run.shown_config import ShownConfig
from ...run.tables import table
from ...run.unsaved_best import unsaved_best

__all__ = ["all_of", "inspect", "inspect_named", "show", "verify"]

_MOST_SHOWN = 50
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "state")


def all_of(path: Place) -> list[Place]:
    """Return the checkpoint that `path` names, or all complete ones of a run folder."""
    path = named(path)
    newest = locate(path)  # raises
    if newest == path:
        return [path]
    return [found.folder for found in list_checkpoints(checkpoints_of(path)).complete]


def inspect_named(path: Place) -> dict[str, Any]:
    """Inspect the checkpoint that `path` names; for a run, add its best checkpoint and where its
    hours went."""
    record = inspect(locate(path))
    is_one = is_checkpoint(named(path))
    best = None if is_one else best_of(path)
    history, config = (RunHistory(), ShownConfig()) if is_one else _records(path)
    percents = whole_percents(history.lost.seconds())
    return {
        **record,
        "best": None if best is None else plain(asdict(best)),
        "unsaved_best": unsaved_best(history, config, best),
        "time": {kind: percent for kind, percent in percents.items() if percent},
    }


def _records(run: Place) -> tuple[RunHistory, ShownConfig]:
    """Return the history and configuration of a run; empty where it has no records here."""
    history, config, folder = RunHistory(), ShownConfig(), records_folder(run)
    with suppress(OSError, OutputError):
        history = HistoryFile(folder / METRICS).read()
        config = ShownConfig.of(read_config(folder))
    return history, config


def inspect(path: Place) -> dict[str, Any]:
    """Return the contents of a checkpoint, without reading its tensors."""
    reader = CheckpointReader(path)
    manifest = reader.manifest
    tensors = {
        kind: {
            name: {"dtype": str(info.dtype).removeprefix("torch."), "shape": list(info.shape)}
            for name in reader.names(kind)
            for info in (reader.info(kind, name),)
        }
        for kind in KINDS
    }
    return {
        "path": str(path),
        "step": manifest.step,
        "driver": manifest.driver,
        "world_size": manifest.world_size,
        "num_bytes": sum(file.num_bytes for file in manifest.files),
        "shared_bytes": shared_bytes(reader.folder, manifest.files),
        "files": [file.name for file in manifest.files],
        "tied": [list(group) for group in manifest.tied],
        "state": dict(manifest.state),
        "settings": dict(manifest.settings),
        "tensors": tensors,
    }


def show(record: Mapping[str, Any], console: Console) -> None:
    """Print the contents of a checkpoint as a table."""
    console.print(quoted(record["path"], "bold"))
    size = f"{record['num_bytes'] / 1e6:.1f} MB in {len(record['files'])} files"
    if shared := record["shared_bytes"]:
        size += f", {shared / 1e6:.1f} MB of it linked to by others"
    by = f"{record['driver']:.80} on {record['world_size']} rank(s)"
    console.print(quoted(f"step {record['step']}, written by {by}, {size}"))
    if best := record.get("best"):
        value = f"{best['metric']} {figure(best['value'])}"
        text = f"best checkpoint: step {best['step']}, {value}: {best['folder']}"
        console.print(quoted(f"{text} (name it as {best['name']})"))
    if better := record.get("unsaved_best"):
        console.print(quoted(describe_unsaved(better)))
    if times := record.get("time"):
        text = ", ".join(f"{kind} {percent} %" for kind, percent in times.items())
        console.print(quoted(f"time of the run: {text}"))
    shown = table("weights", "dtype", "shape", "elements", figures=("elements",))
    for name, info in record["tensors"]["weights"].items():
        shape = " x ".join(map(str, info["shape"])) or "scalar"
        shown.add_row(quoted(name), info["dtype"], shape, f"{math.prod(info['shape']):,}")
    console.print(shown)
    for group in record["tied"]:
        console.print(quoted(f"one parameter: {', '.join(group)}"))
    counts = ", ".join(f"{len(record['tensors'][kind])} {kind}" for kind in KINDS)
    console.print(f"tensors: {counts}", highlight=False)


def verify(path: Place) -> tuple[list[Place], list[str]]:
    """Read all checkpoints below `path`; return them, and the problems found, a line each."""
    path = named(path)
    if is_checkpoint(path):
        return [path], _problems(path)
    listing = list_checkpoints(checkpoints_of(path))
    problems = [f"{item.folder}: {item.reason}" for item in listing.rejected]
    read = [found.folder for found in listing.complete]
    if not read and not problems:
        raise CheckpointNotFound(
            f"there is no checkpoint in {path}; give a checkpoint folder or a run folder"
        )
    for checkpoint in read:
        problems += _problems(checkpoint)
    if (more := len(problems) - _MOST_SHOWN) > 0:
        problems[_MOST_SHOWN:] = [f"{path}: {more} more problems"]
    return read, problems


def _problems(checkpoint: Place) -> list[str]:
    try:
        return CheckpointReader(checkpoint).verify()
    except CheckpointError as error:
        return [str(error)]
