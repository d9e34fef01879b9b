"""Lists the checkpoints in a folder, finds which are complete, and deletes those that are not kept.

Folder names are the protocol that survives a kill at any moment. `checkpoint-000100` is complete if
its manifest and files are there. Beside it may lie `.checkpoint-000100.writing` (being saved),
`.removing` (being deleted) and `.replaced`, which is the old one while a new one takes its name; it
counts as `checkpoint-000100` as long as no other folder has that name. `checkpoint-000100.damaged`
was set aside as damaged by a run that resumed from an older checkpoint; it is never listed or
deleted.

Where folders cannot be renamed (`Storage.renames`), a checkpoint is written under its own name, the
manifest last, and deleted manifest first: without a manifest it does not count.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..kernel.errors import CheckpointError, CheckpointNotFound, SettingError
from ..kernel.paths import Place, Url, place
from .manifest import FILE_NAME, Manifest, read_manifest
from .storage.protocol import MANIFEST, storage_of

__all__ = [
    "CHECKPOINTS",
    "Best",
    "Found",
    "Listing",
    "Rejected",
    "as_metric",
    "best_of",
    "checkpoint_path",
    "checkpoints_of",
    "is_checkpoint",
    "list_checkpoints",
    "newest",
    "step_of",
]

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""
_FINAL = re.compile(r"checkpoint-([0-9]{1,18})")
_MOST_NAMED = 20
"""Most names of metrics in an error."""
_HIDDEN = re.compile(r"\.(checkpoint-[0-9]{1,18})\.(writing|removing|replaced)")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    step: int
    folder: Place
    manifest: Manifest


@dataclass(frozen=True)
class Rejected:
    """A folder that looks like a checkpoint and cannot be resumed from; kept."""

    folder: Place
    reason: str


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder. `complete` is sorted by step."""

    complete: tuple[Found, ...]
    rejected: tuple[Rejected, ...]


def checkpoint_path(root: Place, step: int, digits: int = 6) -> Place:
    """Return the folder of a step's checkpoint. `digits`: the step is padded to this many
    digits."""
    if not 0 <= step < 10**18:
        raise SettingError(f"step is {step}: must be from 0 to 10**18 - 1")
    return root / f"checkpoint-{step:0{digits}d}"


def hidden_path(folder: Place, role: Literal["writing", "removing", "replaced"]) -> Place:
    """Return the temporary sibling of a checkpoint folder."""
    return folder.with_name(f".{folder.name}.{role}")


def step_of(folder: Place) -> int | None:
    """Return the step in a checkpoint folder's name; None for any other name."""
    final = _FINAL.fullmatch(folder.name)
    return int(final[1]) if final else None


def list_checkpoints(root: str | os.PathLike[str] | Url) -> Listing:
    """List the checkpoints in a folder by manifests and file sizes, without reading contents
    (`CheckpointReader.verify` reads them). Changes nothing. A folder that does not exist counts as
    empty."""
    root = place(root)
    complete, rejected = [], []
    for name in storage_of(root).names(root):
        hidden = _HIDDEN.fullmatch(name)
        final = _FINAL.fullmatch(hidden[1] if hidden else name)
        if final is None or (hidden and _is_taken(root / hidden[1])):
            continue
        if hidden and hidden[2] != "replaced":
            rejected.append(Rejected(root / name, f"{hidden[2]} it was interrupted"))
            continue
        try:
            complete.append(_check(root / name, int(final[1])))
        except CheckpointError as error:
            rejected.append(Rejected(root / name, str(error)))
    return Listing(tuple(sorted(complete, key=lambda found: found.step)), tuple(rejected))


def newest(root: str | os.PathLike[str] | Url) -> Place | None:
    """Return the complete checkpoint with the highest step; None if there is none."""
    complete = list_checkpoints(root).complete
    return complete[-1].folder if complete else None


def is_checkpoint(folder: Place) -> bool:
    """True if the checkpoint was committed."""
    return storage_of(folder).is_file(folder / MANIFEST)


def named(folder: Place) -> Place:
    """Resolve `RUN@best` to the best checkpoint of that run by its setting
    `checkpoint.best_metric`; return any other folder unchanged. Raises `CheckpointNotFound` if no
    checkpoint has that metric."""
    name, at, which = folder.name.rpartition("@")
    if not at or which != "best" or storage_of(folder).is_folder(folder):
        return folder
    run = folder.with_name(name)
    complete = list_checkpoints(checkpoints_of(run)).complete
    retention = _recorded_retention(complete)
    if best := retention.best(complete):
        return best[0].folder
    recorded = [found.manifest.state.get("metrics") for found in complete]
    names = sorted({name for each in recorded if isinstance(each, dict) for name in each})
    others = f"; they have {', '.join(names[:_MOST_NAMED])}" if names else ""
    raise CheckpointNotFound(
        f"{folder}: no complete checkpoint of {run} has the metric {retention.best_metric!r}, "
        f"which checkpoint.best_metric names (complete checkpoints: {len(complete)}{others}); "
        "name a checkpoint, or the run for its newest, and set checkpoint.best_metric in the next "
        "run"
    )


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run, by its setting `checkpoint.best_metric`."""

    step: int
    metric: str
    value: float
    folder: Place
    name: str
    """The name `RUN@best`, which commands accept."""


def best_of(run: Place) -> Best | None:
    """Return the best checkpoint in a run folder; None if no checkpoint has the metric. Raises
    `OSError` and `CheckpointError`."""
    folder = checkpoints_of(run)
    complete = list_checkpoints(folder).complete if storage_of(folder).is_folder(folder) else ()
    retention = _recorded_retention(complete)
    for found in retention.best(complete)[:1]:
        metric = retention.best_metric or ""
        value = float(found.manifest.state["metrics"][metric])
        return Best(found.step, metric, value, found.folder, f"{run}@best")
    return None


def _recorded_retention(complete: Sequence[Found]) -> Retention:
    """Return the rule for the best checkpoint, as recorded in the newest checkpoint."""
    settings = complete[-1].manifest.settings if complete else {}
    metric, mode = (settings.get(f"checkpoint.best_{key}") for key in ("metric", "mode"))
    return Retention(best_metric=str(metric), best_mode="max" if mode == "max" else "min")


def checkpoints_of(folder: Place) -> Place:
    """Return the checkpoints folder of a run folder. Any other folder is returned: it may hold
    checkpoints itself."""
    nested = folder / CHECKPOINTS
    return nested if storage_of(folder).is_folder(nested) else folder


def sweep(root: Place) -> None:
    """Clean up after a run that was killed: put a replaced checkpoint back if nothing took its
    place, and delete other temporary folders. Call it in one process, while no checkpoint is
    saved."""
    storage = storage_of(root)
    for name in storage.names(root):
        if hidden := _HIDDEN.fullmatch(name):
            if hidden[2] == "replaced" and not _is_taken(root / hidden[1]):
                storage.rename(root / name, root / hidden[1])
            else:
                storage.remove(root / name)
        elif not storage.renames and _FINAL.fullmatch(name) and _is_torn(root / name):
            storage.remove(root / name)


def tidy(root: Place) -> None:
    """Call `sweep`, and ignore errors of the storage."""
    with contextlib.suppress(OSError):
        sweep(root)


def begin(folder: Place) -> None:
    """Prepare the folder for a new checkpoint, which is then written to `writing_place` and
    published."""
    storage = storage_of(folder)
    if storage.renames:
        storage.make_folder(writing_place(folder))
    elif is_checkpoint(folder):
        storage.rename(folder, hidden_path(folder, "replaced"))


def writing_place(folder: Place) -> Place:
    """Return the folder to which the files of a checkpoint are written before the commit."""
    return hidden_path(folder, "writing") if storage_of(folder).renames else folder


def publish(folder: Place) -> None:
    """Rename the finished `.writing` sibling to the checkpoint's name: this is the commit. An older
    checkpoint of that name stays readable, as `.replaced`, until a `sweep` after this."""
    storage = storage_of(folder)
    if not storage.renames:
        return  # the manifest was the commit
    if storage.exists(folder):
        storage.rename(folder, hidden_path(folder, "replaced"))
    storage.rename(writing_place(folder), folder)
    storage.sync_folder(folder.parent)


def set_aside(folder: Place) -> None:
    """Rename a damaged checkpoint, so that later saves and clean-ups keep it."""
    storage, numbers = storage_of(folder), itertools.count(2)
    aside = folder.with_name(f"{folder.name}.damaged")
    while storage.exists(aside):
        aside = folder.with_name(f"{folder.name}.damaged-{next(numbers)}")
    storage.rename(folder, aside)
    storage.sync_folder(folder.parent)


def retire(folder: Place) -> None:
    """Delete a checkpoint. If the process is killed meanwhile, the checkpoint is whole or no longer
    listed."""
    storage_of(folder).remove(unlist(folder))


def unlist(folder: Place) -> Place:
    """Rename a checkpoint so that it is no longer listed, and return the folder that is left to
    remove. If folders cannot be renamed, the checkpoint is listed until its removal begins."""
    storage, removing = storage_of(folder), hidden_path(folder, "removing")
    if not storage.renames:
        return folder
    storage.rename(folder, removing)
    return removing


def _is_taken(folder: Place) -> bool:
    """True if a checkpoint that was set aside has been replaced."""
    storage = storage_of(folder)
    return storage.exists(folder) if storage.renames else is_checkpoint(folder)


def _is_torn(folder: Place) -> bool:
    """True if the folder holds only files of a save that was not committed."""
    names = storage_of(folder).names(folder)
    return MANIFEST not in names and all(map(FILE_NAME.fullmatch, names))


@dataclass(frozen=True)
class Retention:
    """The rule for which complete checkpoints are kept. The newest is always kept, and the best if
    a metric exists.

    `keep_last`: number of the newest to keep; None keeps all. `keep_best`: number of the best to
    keep by `best_metric`, a number in the manifest's `state["metrics"]`; the earlier one wins a
    tie, and NaN never wins. `keep_every`: checkpoints of steps divisible by it are never deleted.
    """

    keep_last: int | None = None
    keep_best: int = 1
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} is {value}: must be at least 1")
        if self.best_mode not in ("min", "max"):
            raise SettingError(f"best_mode is {self.best_mode!r}: must be 'min' or 'max'")

    def best(self, complete: Sequence[Found]) -> list[Found]:
        """Return the checkpoints that have the metric, best first."""
        scored = [(score, f.step, f) for f in complete if (score := self._score(f)) is not None]
        return [found for *_, found in sorted(scored, key=lambda item: item[:2])]

    def surplus(self, complete: Sequence[Found]) -> list[Found]:
        """Return the checkpoints that may be deleted, oldest first."""
        if self.keep_last is None:
            return []
        by_step = sorted(complete, key=lambda found: found.step)
        kept = {found.step for found in by_step[-self.keep_last :]}
        kept |= {found.step for found in self.best(complete)[: self.keep_best]}
        return [
            found
            for found in by_step
            if found.step not in kept
            and not (self.keep_every and found.step % self.keep_every == 0)
        ]

    def _score(self, found: Found) -> float | None:
        metrics = found.manifest.state.get("metrics")
        value = as_metric(metrics.get(self.best_metric)) if isinstance(metrics, dict) else None
        if value is None or math.isnan(value):
            return None
        return value if self.best_mode == "min" else -value


def as_metric(value: Any) -> float | None:
    """Return a stored metric as a float; None if it is not a number, or does not fit into a
    float."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _check(folder: Place, step: int) -> Found:
    storage = storage_of(folder)
    if storage.is_link(folder):
        raise CheckpointError(f"{folder}: is a link; name it to resume from it")
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise CheckpointError(f"{folder}: its manifest is of step {manifest.step}")
    sizes = storage.sizes(folder, [file.name for file in manifest.files])
    for file, size in zip(manifest.files, sizes, strict=True):
        if size != file.num_bytes:
            raise CheckpointError(
                f"{folder / file.name}: is {size} bytes, and should be {file.num_bytes}"
            )
    return Found(step, folder, manifest)
