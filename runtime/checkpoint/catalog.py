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

import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..kernel.errors import CheckpointError, SettingError
from ..kernel.paths import Place, Url, place
from .manifest import FILE_NAME, MANIFEST, Manifest, read_manifest
from .storage.protocol import storage_of

__all__ = [
    "CHECKPOINTS",
    "Found",
    "Listing",
    "Rejected",
    "as_metric",
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
    """The folder of the checkpoint of that step. `digits`: the step is padded to that many."""
    if not 0 <= step < 10**18:
        raise SettingError(f"step is {step}: must be from 0 to 10**18 - 1")
    return root / f"checkpoint-{step:0{digits}d}"


def hidden_path(folder: Place, role: Literal["writing", "removing", "replaced"]) -> Place:
    """The temporary sibling of a checkpoint folder."""
    return folder.with_name(f".{folder.name}.{role}")


def step_of(folder: Place) -> int | None:
    """The step that its name says; None for another name."""
    final = _FINAL.fullmatch(folder.name)
    return int(final[1]) if final else None


def list_checkpoints(root: str | os.PathLike[str] | Url) -> Listing:
    """Look at manifests and file sizes, not at contents (`CheckpointReader.verify` does).
    Changes nothing. A folder that does not exist is empty."""
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
    """The complete checkpoint with the highest step; None when there is none."""
    complete = list_checkpoints(root).complete
    return complete[-1].folder if complete else None


def is_checkpoint(folder: Place) -> bool:
    """True if the checkpoint was committed."""
    return storage_of(folder).is_file(folder / MANIFEST)


def checkpoints_of(folder: Place) -> Place:
    """The folder of all checkpoints of a run folder; any other folder may hold them itself."""
    nested = folder / CHECKPOINTS
    return nested if storage_of(folder).is_folder(nested) else folder


def sweep(root: Place) -> None:
    """Finish what a dead run left half done: put a replaced checkpoint back if nothing took its
    place, and delete other temporary folders. For one process, while nobody saves."""
    storage = storage_of(root)
    for name in storage.names(root):
        if hidden := _HIDDEN.fullmatch(name):
            if hidden[2] == "replaced" and not _is_taken(root / hidden[1]):
                storage.rename(root / name, root / hidden[1])
            else:
                storage.remove(root / name)
        elif not storage.renames and _FINAL.fullmatch(name) and _is_torn(root / name):
            storage.remove(root / name)


def begin(folder: Place) -> None:
    """Make way for a checkpoint; it is then written to `writing_place` and published."""
    storage = storage_of(folder)
    if storage.renames:
        storage.make_folder(writing_place(folder))
    elif is_checkpoint(folder):
        storage.rename(folder, hidden_path(folder, "replaced"))


def writing_place(folder: Place) -> Place:
    """The folder that the files of a checkpoint are written to before it is committed."""
    return hidden_path(folder, "writing") if storage_of(folder).renames else folder


def publish(folder: Place) -> None:
    """Give the finished `.writing` sibling its name: the commit. An older checkpoint of that name
    stays readable, as `.replaced`, until a `sweep` after this."""
    storage = storage_of(folder)
    if not storage.renames:
        return  # the manifest did it
    if storage.exists(folder):
        storage.rename(folder, hidden_path(folder, "replaced"))
    storage.rename(writing_place(folder), folder)
    storage.sync_folder(folder.parent)


def set_aside(folder: Place) -> None:
    """Rename a damaged checkpoint, so that it stays, whatever is saved or retired from here on."""
    storage, numbers = storage_of(folder), itertools.count(2)
    aside = folder.with_name(f"{folder.name}.damaged")
    while storage.exists(aside):
        aside = folder.with_name(f"{folder.name}.damaged-{next(numbers)}")
    storage.rename(folder, aside)
    storage.sync_folder(folder.parent)


def retire(folder: Place) -> None:
    """Delete a checkpoint so that a kill leaves it whole or not listed."""
    storage_of(folder).remove(put_away(folder))


def put_away(folder: Place) -> Place:
    """Take a checkpoint off the list; returns what is left to be removed. Where folders cannot be
    renamed, it is listed until its removal begins."""
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
    """Which complete checkpoints stay. The newest always does, and the best if there is a metric.

    `keep_last`: so many of the newest; None keeps all. `keep_best`: so many by `best_metric`, a
    number in the manifest's `state["metrics"]`; the earlier wins a tie, and NaN never wins.
    `keep_every`: steps divisible by it stay for ever.
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
        """Those with the metric, best first."""
        scored = [(score, f.step, f) for f in complete if (score := self._score(f)) is not None]
        return [found for *_, found in sorted(scored, key=lambda item: item[:2])]

    def surplus(self, complete: Sequence[Found]) -> list[Found]:
        """Those that may go, oldest first."""
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
    """A stored number; None for what is none, or none that a float can be."""
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
