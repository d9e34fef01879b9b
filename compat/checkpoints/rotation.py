"""The checkpoint folders of a run: sorted, rotated, and checked before resuming."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...checkpoint import MANIFEST, read_manifest
from ...checkpoint.catalog import retire, set_aside
from ...checkpoint.format.safetensors import TensorFile
from ...kernel.contract import Session
from ...kernel.errors import CheckpointError
from ...trainer.resume import damage
from ..names import FSDP_MODEL_NAME, PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from .model_files import has_weights, unsound
from .shards import has_shards

__all__ = [
    "altered",
    "newest_sound",
    "newest_unaltered",
    "problem_with",
    "rotate_checkpoints",
    "sort_checkpoints",
]

_LOG = logging.getLogger(__name__)
_OWN_FILES = re.compile(r"(weights|optimizer|state)-[0-9]+-of-[0-9]+\.safetensors")


def sort_checkpoints(
    output_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Return the checkpoint folders, oldest first: by number, or by the time of the last change,
    unless all changed within a second, as on a file system without times. The best one is moved
    right before the last.
    """
    numbered = _numbered(Path(output_dir), checkpoint_prefix)
    paths = [path for _, path in numbered]
    if use_mtime and numbered:
        by_time = sorted((path.stat().st_mtime, number, path) for number, path in numbered)
        if by_time[-1][0] - by_time[0][0] >= 1:
            paths = [path for *_, path in by_time]
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    if best in paths[:-1]:
        paths.remove(best)
        paths.insert(-1, best)
    return [str(path) for path in paths]


def rotate_checkpoints(
    output_dir: str | os.PathLike[str],
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
) -> None:
    """Delete the oldest checkpoints until `save_total_limit` are left, but never the newest or the
    best.

    Without a limit, or with a limit of 0 or less, all are kept.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    paths = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    kept = set(paths[-1:])
    if best_model_checkpoint is not None:
        kept.add(str(Path(best_model_checkpoint)))
    num_surplus = len(paths) - max(save_total_limit, len(kept))
    for path in [path for path in paths if path not in kept][: max(num_surplus, 0)]:
        delete(path)


def delete(path: str, why: str = "save_total_limit") -> None:
    """Delete a checkpoint; warn if it cannot be deleted."""
    _LOG.info("deleting the checkpoint %s: %s", path, why)
    try:
        retire(Path(path))
    except OSError as error:
        _LOG.warning("the old checkpoint %s could not be deleted: %s", path, error)


def newest_sound(output_dir: str | os.PathLike[str], besides: Collection[str] = ()) -> str | None:
    """Return the sound checkpoint with the greatest number, except those in `besides`. Damaged ones
    are named in a warning, and kept.
    """
    for _, path in reversed(_numbered(Path(output_dir), PREFIX_CHECKPOINT_DIR)):
        if str(path) in besides:
            continue
        problem = problem_with(path)
        if problem is None:
            return str(path)
        _LOG.warning("%s is left out, and kept: %s", path, problem)
    return None


def problem_with(folder: Path) -> str | None:
    """Describe why a folder, whoever wrote it, cannot be resumed from; None if it can."""
    if not folder.is_dir():
        return "there is no such folder"
    if (folder / MANIFEST).is_file():
        return _bad_pieces(folder) or _bad_state(folder)
    if any(_OWN_FILES.fullmatch(path.name) for path in folder.iterdir()):
        return f"its {MANIFEST} is missing, so it was never finished"
    if not has_weights(folder) and not has_shards(folder):
        return "it holds no weights" + _way_out(folder)
    return unsound(folder) or _bad_state(folder)


def _bad_pieces(folder: Path) -> str | None:
    try:
        for file in read_manifest(folder).files:
            TensorFile(folder / file.name, file.num_bytes)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _way_out(folder: Path) -> str:
    """Return a hint for the formats of other engines, or an empty string."""
    if any(folder.glob(f"{FSDP_MODEL_NAME}*")):
        return (
            " but those of HF's FSDP, which only that reads: `accelerate merge-weights` makes a "
            "model.safetensors of them"
        )
    if (folder / "zero_to_fp32.py").is_file():
        return (
            " but those of DeepSpeed, which only that reads: its zero_to_fp32.py, with "
            "--safe_serialization, makes a model.safetensors of them"
        )
    return ""


def _bad_state(folder: Path) -> str | None:
    from ..callbacks.state import TrainerState

    path = folder / TRAINER_STATE_NAME
    try:
        if path.is_file():
            TrainerState.load_from_json(path)
    except (OSError, ValueError, TypeError) as error:
        return f"its {TRAINER_STATE_NAME} cannot be read: {error}"
    return None


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"{re.escape(prefix)}-([0-9]+)")
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match: Any = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def newest_unaltered(session: Session, output_dir: str) -> str:
    """Return the newest checkpoint whose files are as they were written. Newer, damaged ones are
    renamed, so that they are not overwritten. Raises ValueError if there is none.
    """
    left_out: list[str] = []
    while True:
        mine = newest_sound(output_dir, left_out) if session.world.rank == 0 else None
        path: str | None = session.exchange(mine)[0]
        if path is None:
            raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
        problems = altered(session, path)
        if not problems:
            break
        _LOG.warning("%s is left out, and kept: %s", path, problems[0])
        left_out.append(path)
    if session.world.rank == 0:
        for each in left_out:
            set_aside(Path(each))
    return path


def altered(session: Session, folder: str) -> list[str]:
    """Return the files that changed since they were written; unknown for folders that HF Trainer
    wrote."""
    own = (Path(folder) / MANIFEST).is_file() if session.world.rank == 0 else None
    return damage(session, Path(folder)) if session.exchange(own)[0] else []
