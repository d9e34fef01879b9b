"""`drivetrain checkpoint`: look into checkpoints, check them, and trade weights with others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ..checkpoint import CheckpointReader, checkpoints_of, is_checkpoint, list_checkpoints
from ..checkpoint.frozen import shared_bytes
from ..kernel.errors import CheckpointError, CheckpointNotFound
from ..kernel.paths import Place
from ..kernel.shards import Kind
from .quoted import quoted
from .tables import table

__all__ = ["all_of", "inspect", "locate", "show", "verify"]

KINDS: tuple[Kind, ...] = ("weights", "optimizer", "state")


def locate(path: Place) -> Place:
    """The checkpoint that `path` names: itself, or the newest complete one of a run folder."""
    if is_checkpoint(path):
        return path
    listing = list_checkpoints(checkpoints_of(path))
    if listing.complete:
        return listing.complete[-1].folder
    rejected = "".join(f"; {item.folder}: {item.reason}" for item in listing.rejected)
    raise CheckpointNotFound(
        f"no complete checkpoint in {path}{rejected}; give a checkpoint folder or a run folder"
    )


def all_of(path: Place) -> list[Place]:
    """The checkpoint that `path` names, or all complete ones of a run folder."""
    newest = locate(path)  # raises
    if newest == path:
        return [path]
    return [found.folder for found in list_checkpoints(checkpoints_of(path)).complete]


def inspect(path: Place) -> dict[str, Any]:
    """The contents of a checkpoint, without reading its tensors."""
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
    """`inspect` for people."""
    console.print(quoted(record["path"], "bold"))
    size = f"{record['num_bytes'] / 1e6:.1f} MB in {len(record['files'])} files"
    if shared := record["shared_bytes"]:
        size += f", {shared / 1e6:.1f} MB of it linked to by others"
    by = f"{record['driver']:.80} on {record['world_size']} rank(s)"
    console.print(quoted(f"step {record['step']}, written by {by}, {size}"))
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
    """The checkpoints below `path` that were read in whole, and the problems found, a line each."""
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
    return read, problems


def _problems(checkpoint: Place) -> list[str]:
    try:
        return CheckpointReader(checkpoint).verify()
    except CheckpointError as error:
        return [str(error)]
