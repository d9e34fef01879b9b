"""Which checkpoints lie in a folder, which of them are complete, and which are kept.

Folder names are the protocol that survives a kill at any moment. `checkpoint-000100` is complete
if its manifest and files are there. Beside it may lie `.checkpoint-000100.writing` (being saved),
`.removing` (being deleted) and `.replaced`, which is the old one while a new one takes its name;
it counts as `checkpoint-000100` as long as nothing else has that name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError, SettingError
from . import files
from .manifest import MANIFEST, Manifest, read_manifest

__all__ = [
    "CHECKPOINTS",
    "Found",
    "Listing",
    "Rejected",
    "checkpoint_path",
    "checkpoints_of",
    "is_checkpoint",
    "list_checkpoints",
    "newest",
]

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""
_FINAL = re.compile(r"checkpoint-([0-9]{1,18})")
_HIDDEN = re.compile(r"\.(checkpoint-[0-9]{1,18})\.(writing|removing|replaced)")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    step: int
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Rejected:
    """What looks like a checkpoint and cannot be resumed from; kept."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Listing:
    """What lies in a folder. `complete` is sorted by step."""

    complete: tuple[Found, ...]
    rejected: tuple[Rejected, ...]


def checkpoint_path(root: Path, step: int, digits: int = 6) -> Path:
    """Where the checkpoint of that step is, or will be. `digits`: the step is padded to so many."""
    if not 0 <= step < 10**18:
        raise SettingError(f"step is {step}: must be from 0 to 10**18 - 1")
    return root / f"checkpoint-{step:0{digits}d}"


def hidden_path(folder: Path, role: Literal["writing", "removing", "replaced"]) -> Path:
    """The temporary sibling of a checkpoint folder."""
    return folder.with_name(f".{folder.name}.{role}")


def list_checkpoints(root: str | Path) -> Listing:
    """Look at manifests and file sizes, not at contents (`CheckpointReader.verify` does).
    Changes nothing. A folder that does not exist is empty."""
    root = Path(root)
    complete, rejected = [], []
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        hidden = _HIDDEN.fullmatch(name)
        final = _FINAL.fullmatch(hidden[1] if hidden else name)
        if final is None or (hidden and os.path.lexists(root / hidden[1])):
            continue
        if hidden and hidden[2] != "replaced":
            rejected.append(Rejected(root / name, f"{hidden[2]} it was interrupted"))
            continue
        try:
            complete.append(_check(root / name, int(final[1])))
        except CheckpointError as error:
            rejected.append(Rejected(root / name, str(error)))
    return Listing(tuple(sorted(complete, key=lambda found: found.step)), tuple(rejected))


def newest(root: str | Path) -> Path | None:
    """The complete checkpoint with the highest step; None when there is none."""
    complete = list_checkpoints(root).complete
    return complete[-1].folder if complete else None


def is_checkpoint(folder: Path) -> bool:
    """Whether it was committed."""
    return (folder / MANIFEST).is_file()


def checkpoints_of(folder: Path) -> Path:
    """The folder of all checkpoints of a run folder; any other folder may hold them itself."""
    nested = folder / CHECKPOINTS
    return nested if nested.is_dir() else folder


def sweep(root: Path) -> None:
    """Finish what a dead run left half done: put a replaced checkpoint back if nothing took its
    place, and delete other temporary folders. For one process, while nobody saves."""
    for name in sorted(os.listdir(root)):
        if hidden := _HIDDEN.fullmatch(name):
            if hidden[2] == "replaced" and not os.path.lexists(root / hidden[1]):
                os.rename(root / name, root / hidden[1])
            else:
                files.remove(root / name)


def publish(folder: Path) -> None:
    """Give the finished `.writing` sibling its name: the commit. An older checkpoint of that name
    stays readable, as `.replaced`, until a `sweep` after this."""
    replaced = hidden_path(folder, "replaced")
    if os.path.lexists(folder):
        os.rename(folder, replaced)
    os.rename(hidden_path(folder, "writing"), folder)
    files.sync_folder(folder.parent)


def retire(folder: Path) -> None:
    """Delete a checkpoint so that a kill leaves it whole or not listed."""
    removing = hidden_path(folder, "removing")
    os.rename(folder, removing)
    files.remove(removing)


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
        value = metrics.get(self.best_metric) if isinstance(metrics, dict) else None
        if not isinstance(value, int | float) or math.isnan(value):
            return None
        return float(value if self.best_mode == "min" else -value)


def _check(folder: Path, step: int) -> Found:
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a link; name it to resume from it")
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise CheckpointError(f"{folder}: its manifest is of step {manifest.step}")
    for file in manifest.files:
        with files.open_regular(folder / file.name) as fd:
            size = os.fstat(fd).st_size
        if size != file.num_bytes:
            raise CheckpointError(
                f"{folder / file.name}: is {size} bytes, and should be {file.num_bytes}"
            )
    return Found(step, folder, manifest)
