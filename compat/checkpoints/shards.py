"""Sharded checkpoints of HF's Trainer: FSDP's sharded kind, and DeepSpeed's ZeRO.

They are assembled by the names of weights, so that any driver resumes them at any world size. A
tensor is read when it is requested.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.optimizer_entries import flat
from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from ..names import FSDP_MODEL_NAME
from .pickled_records import Record, read_records
from .zero_files import has_zero_files, read_zero

__all__ = ["LazyTensors", "Shards", "check_names", "has_shards", "read_shards"]

_INDEX = ".metadata"
_OPTIMIZER = "optimizer_0"


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each assembled whenever it is requested."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self.makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self.makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


@dataclass(frozen=True)
class Shards:
    """An assembled sharded checkpoint."""

    weights: Mapping[str, Tensor]
    """Weights by FQN."""
    optimizer: Mapping[str, Tensor]
    """Optimizer state by `<fqn>/<state>`."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's groups, with the names of their parameters."""
    scaler: Mapping[str, Tensor] = field(default_factory=dict)
    """The loss scaler's state by the drivers' names."""


def has_shards(folder: Path) -> bool:
    """True if a folder holds a sharded checkpoint with weights."""
    return (folder / f"{FSDP_MODEL_NAME}_0" / _INDEX).is_file() or has_zero_files(folder)


def read_shards(folder: Path) -> Shards | None:
    """Read the sharded checkpoint in a folder; None if there is none. Raises `CheckpointDamaged`,
    and `CheckpointMismatch` for kinds that are not supported."""
    if has_zero_files(folder):
        zero = read_zero(folder)
        return Shards(
            LazyTensors(zero.weights), LazyTensors(zero.optimizer), zero.groups, zero.scaler
        )
    if not has_shards(folder):
        return None
    weights = {path[-1]: make for path, make in _entries(folder / f"{FSDP_MODEL_NAME}_0").items()}
    optimizer: dict[str, Callable[[], Tensor]] = {}
    groups: dict[int, dict[str, Any]] = {}
    place = folder / _OPTIMIZER
    for path, make in _entries(place).items() if (place / _INDEX).is_file() else ():
        match path:
            case ("optimizer", "state", str(name), str(key)):
                optimizer |= _flat_makers(f"{name}/", key, make)
            case ("optimizer", "param_groups", int(number), str(key)):
                groups.setdefault(number, {})[key] = make()
            case _:
                raise CheckpointDamaged(f"{place}: holds {path!r:.200}, which is no optimizer's")
    return Shards(
        LazyTensors(weights), LazyTensors(optimizer), [groups[number] for number in sorted(groups)]
    )


def check_names(shards: Shards, order: Sequence[Sequence[str | None]], folder: Path) -> None:
    """Raises `CheckpointMismatch` unless the groups hold the same parameters as this run's."""
    here = [sorted(map(str, names)) for names in order if names]
    there = [sorted(group["params"]) for group in shards.groups if group["params"]]
    if here != there:
        strange = sorted({*sum(here, [])} ^ {*sum(there, [])})[:4]
        raise CheckpointMismatch(
            f"{folder}: its optimizer has groups of {[len(each) for each in there]} parameters, "
            f"this one of {[len(each) for each in here]}, and {strange} are not in both: resume "
            "with the model and the optimizer that wrote it"
        )


def _flat_makers(prefix: str, key: str, make: Callable[[], Any]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that read an optimizer entry; values that are not tensors are read now."""
    if isinstance(make, _Tensors):
        return {prefix + key: make}
    made = dict(flat(key, make()))
    return {prefix + name: (lambda tensor=tensor: tensor.clone()) for name, tensor in made.items()}  # type: ignore[misc]


# --- torch.distributed.checkpoint ---------------------------------------------------------------


def _entries(folder: Path) -> dict[tuple[Any, ...], Callable[[], Any]]:
    """Return the entries of a sharded checkpoint folder, by their path in the state dict, each as a
    function that reads it.
    """
    index = read_records(folder / _INDEX)
    try:
        kinds, paths = index.state["state_dict_metadata"], index.state["planner_data"]
        stored: dict[str, list[_Chunk]] = {}
        for key, info in index.state["storage_data"].items():
            stored.setdefault(key.state["fqn"], []).append(_Chunk.of(folder, key, info))
        found: dict[tuple[Any, ...], Callable[[], Any]] = {}
        for name, kind in kinds.items():
            chunks = stored[name]
            size = kind.state.get("size")
            whole = None if size is None else tuple(size.plain())
            found[tuple(paths[name])] = (
                chunks[0].read if whole is None else _Tensors(name, whole, tuple(chunks))
            )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{folder / _INDEX}: is no index: {error!r:.200}") from error
    return found


@dataclass(frozen=True)
class _Chunk:
    path: Path
    start: int
    length: int
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path, key: Record, info: Record) -> _Chunk:
        name, place = info.state["relative_path"], key.state.get("offset")
        if Path(name).name != name:
            raise ValueError(f"its file {name!r:.100} is not beside it")
        if info.state.get("transform_descriptors"):
            raise ValueError("its files are compressed")
        offsets = () if place is None else tuple(place.plain())
        return cls(folder / name, int(info.state["offset"]), int(info.state["length"]), offsets)

    def read(self) -> Any:
        """Read the content: tensors, containers and numbers."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                part = io.BytesIO(file.read(self.length))
            with zipfile.ZipFile(part) as archive:
                if any(item.compress_type for item in archive.infolist()):
                    raise ValueError("it is compressed")
            part.seek(0)
            return torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # errors of the unpickler, of zip archives, of memory
            raise CheckpointDamaged(
                f"{self.path}: the part at {self.start} is torn, or holds more than tensors and "
                f"numbers, and is not loaded; none of it was run: {error!r:.200}"
            ) from error


@dataclass(frozen=True)
class _Tensors:
    """A tensor that is stored in chunks."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    def __call__(self) -> Tensor:
        parts = [chunk.read() for chunk in self.chunks]
        sound = all(isinstance(part, Tensor) for part in parts)
        if not sound or sum(part.numel() for part in parts) != math.prod(self.shape):
            raise CheckpointMismatch(
                f"{self.chunks[0].path.parent}: the parts of {self.name!r} do not make a tensor of "
                f"the shape {self.shape}"
            )
        if len(parts) == 1:
            whole: Tensor = parts[0].reshape(self.shape)
            return whole
        whole = parts[0].new_empty(self.shape)
        for chunk, part in zip(self.chunks, parts, strict=True):
            target = whole
            for dim, (start, length) in enumerate(zip(chunk.offsets, part.shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(part)
        return whole
