"""Export and import of weights in the folder layout that `from_pretrained` and others read.

Whole tensors are in `model.safetensors`, or in several files with an index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from ..kernel.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    OutputError,
    SettingError,
)
from ..kernel.paths import Place, Url, place
from . import catalog
from .averages import averaged_reader
from .buffers import num_bytes
from .format import safetensors, strict_json
from .format.safetensors import Source, read_whole
from .low_rank import MergedWeights
from .manifest import FileEntry, Manifest, file_name, write_manifest
from .reader import CheckpointReader
from .storage.local import LOCAL
from .storage.protocol import read_small, storage_of

__all__ = ["export_weights", "import_weights", "write_weights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_METADATA = {"format": "pt"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def export_weights(
    checkpoint: str | Path | Url,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    weights: Literal["present", "average"] = "present",
) -> Path:
    """Write the weights of a checkpoint of any driver, or their averages (`weights="average"`), as
    whole tensors. Return `folder`.

    Tied weights are written once; changes of low rank (`drivetrain.lora`) are added to the weights
    that they change. One tensor at a time is in memory (one that is larger than `max_shard_bytes`
    gets a file of its own). The folder appears complete or not at all. Raises `OutputError` if the
    folder exists and is not empty, or cannot be written, and `CheckpointMismatch` if the checkpoint
    has no averages.
    """
    if max_shard_bytes < 1:
        raise SettingError(f"max_shard_bytes is {max_shard_bytes}: must be at least 1")
    opened = averaged_reader if weights == "average" else CheckpointReader
    reader, folder = MergedWeights(opened(checkpoint)), Path(folder).absolute()
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder}: exists and is not an empty folder; choose another")
    if not reader.names("weights"):
        raise CheckpointNotFound(f"{reader.folder}: holds no weights")
    temporary = folder.with_name(f".{folder.name}.writing")
    with building(temporary, folder):
        shards = _shards(reader, max_shard_bytes)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            name = _SINGLE if len(shards) == 1 else name
            weight_map |= dict.fromkeys(names, name)
            safetensors.write(
                temporary / name, {key: _source(reader, key) for key in names}, _METADATA
            )
        if len(shards) > 1:
            total = sum(_num_bytes(reader, key) for key in weight_map)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            raw = memoryview(strict_json.dump(index))
            LOCAL.create(temporary / _INDEX, lambda: [raw])
        LOCAL.sync_folder(temporary)
        os.rename(temporary, folder)
        LOCAL.sync_folder(folder.parent)
    return folder


def import_weights(
    folder: str | Path, root: str | Path | Url, *, tied: Sequence[Sequence[str]] = ()
) -> Place:
    """Make a checkpoint of step 0 in `root` out of such a folder; any driver can start from it.

    `tied`: groups of names that are one parameter, the first of each the one that is stored.
    Raises `CheckpointNotFound` or `CheckpointDamaged` for the folder, `CheckpointError` when it
    holds pickles only, `OutputError` when `root` has a step 0 already or cannot be written.
    """
    found = _find_weights(Path(folder))
    files = [{key: Source.of(tensor) for key, tensor in tensors.items()} for tensors in found]
    return write_weights(root, files, tied)


def write_weights(
    root: str | os.PathLike[str] | Url,
    files: Sequence[Mapping[str, Source]],
    tied: Sequence[Sequence[str]],
) -> Place:
    """Write a checkpoint of step 0 in `root` with nothing but weights. Raises `OutputError` when
    `root` has a step 0 already or cannot be written.
    """
    target = catalog.checkpoint_path(place(root), 0)
    if storage_of(target).exists(target):
        raise OutputError(f"{target}: exists; choose another folder than {root}")
    temporary = catalog.writing_place(target)
    with building(temporary, target):
        entries = []
        for number, sources in enumerate(files):
            name = file_name("weights", number, len(files))
            written = safetensors.write(temporary / name, sources, _METADATA)
            entries.append(FileEntry(name, *written))
        groups = tuple(tuple(group) for group in tied)
        write_manifest(temporary, Manifest(0, tuple(entries), tied=groups))
        catalog.publish(target)
    return target


@contextmanager
def building(temporary: Place, target: Place) -> Iterator[None]:
    """Create the empty folder `temporary` for the block, which renames it to `target`; delete it if
    the block fails."""
    storage = storage_of(temporary)
    try:
        if storage.exists(temporary):
            storage.remove(temporary)
        storage.make_folder(temporary)
        try:
            yield
        except Exception:
            storage.remove(temporary)
            raise
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error}") from error


def _num_bytes(reader: MergedWeights, name: str) -> int:
    info = reader.info("weights", name)
    return num_bytes(info.dtype, info.shape)


def _shards(reader: MergedWeights, max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in reader.names("weights"):
        size = _num_bytes(reader, name)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _source(reader: MergedWeights, name: str) -> Source:
    info = reader.info("weights", name)
    return Source(info.dtype, info.shape, partial(reader.read, "weights", name))


def _find_weights(folder: Path) -> list[dict[str, Tensor]]:
    """Find the tensors of a folder, file by file."""
    if (single := folder / _SINGLE).exists():
        return [read_whole(single)]
    if (index := folder / _INDEX).exists():
        value = strict_json.parse(read_small(index.resolve(), _MAX_INDEX_BYTES), str(index))
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointDamaged(f"{index}: has no weight_map")
        whole: dict[str, dict[str, Tensor]] = {}
        found: dict[str, dict[str, Tensor]] = {}
        for name, part in weight_map.items():
            if not isinstance(part, str) or os.path.basename(part) != part or part in ("", ".."):
                raise CheckpointDamaged(f"{index}: {name!r:.200} is said to be in {part!r:.200}")
            if part not in whole:
                whole[part], found[part] = read_whole(folder / part), {}
            if name not in whole[part]:
                raise CheckpointDamaged(f"{index}: {name!r:.200} is not in {part}")
            found[part][name] = whole[part][name]
        return list(found.values())
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise CheckpointError(
            f"{folder}: holds {pickles[0]}, a pickle, which can run any code when it is read and "
            "is refused; where you trust it, load it and save it again as safetensors"
        )
    raise CheckpointNotFound(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
