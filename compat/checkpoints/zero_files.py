"""Reads checkpoints of DeepSpeed's engine, with ZeRO at any stage, without DeepSpeed.

Each rank's file holds a part of the flat weights, in float32, and of each moment. DeepSpeed's
classes in these files are read as records; none of their code is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from .unpickling import read_pickled

__all__ = ["ZeroFiles", "has_zero_files", "read_zero"]

_LATEST = "latest"
_RANKS = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_OTHERS = re.compile(r"(bf16_zero|layer_\d|expert_|.*mp_rank_(?!00)\d).*\.pt")
"""Files of tensor and pipeline parallelism, of experts, and of DeepSpeed's bf16 optimizer."""


class _InertObject:
    """The attributes of a DeepSpeed object in a file; its class is never looked up."""

    def __init__(self, *args: Any) -> None:
        self.args = args


_CLASSES: list[Any] = [
    (_InertObject, f"deepspeed.{name}")
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
]
Make = Callable[[], Tensor]


@dataclass
class ZeroFiles:
    """Functions that assemble the tensors, and the other state."""

    weights: dict[str, Make] = field(default_factory=dict)
    optimizer: dict[str, Make] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Tensor] = field(default_factory=dict)


def has_zero_files(folder: Path) -> bool:
    """True if the folder holds a checkpoint of DeepSpeed's engine with a ZeRO optimizer."""
    place = _place(folder)
    return place is not None and any(_RANKS.fullmatch(path.name) for path in place.iterdir())


def _place(folder: Path) -> Path | None:
    latest = folder / _LATEST
    tag = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    place = folder / tag
    return place if tag and Path(tag).name == tag and place.is_dir() else None


def read_zero(folder: Path) -> ZeroFiles:
    """Read the checkpoint that `latest` names. Raises `CheckpointDamaged`, and `CheckpointMismatch`
    for kinds that are not supported."""
    place = _place(folder)
    assert place is not None
    for path in place.iterdir():
        if _OTHERS.fullmatch(path.name):
            raise CheckpointMismatch(
                f"{path}: of DeepSpeed's checkpoints those of ZeRO alone are read, and this is of "
                "model parallelism, of experts, or of its optimizer for bf16: resume with what "
                "wrote it, and save by ds_to_universal or save_model"
            )
    try:
        return _Reading(place).result()
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointDamaged(f"{place}: is no checkpoint of ZeRO: {error!r:.200}") from error


class _Reading:
    def __init__(self, place: Path) -> None:
        numbers = sorted(
            int(match[1]) for path in place.iterdir() if (match := _RANKS.fullmatch(path.name))
        )
        named = [f"zero_pp_rank_{number}_mp_rank_00" for number in numbers]
        files = [_read(place / f"{name}_optim_states.pt") for name in named]
        self.ranks = [file["optimizer_state_dict"] for file in files]
        self.is_stage_3 = "fp32_flat_groups" in self.ranks[0]
        models = named if self.is_stage_3 else ["mp_rank_00"]
        self.models = [_read(place / f"{name}_model_states.pt") for name in models]
        count = self.models[0]["dp_world_size"]
        if numbers != list(range(count)):
            raise ValueError(f"it has the files of ranks {numbers}, of {count}")

    def result(self) -> ZeroFiles:
        found, model = ZeroFiles(), self.models[0]
        shapes = model["param_shapes"]
        shapes = shapes if isinstance(shapes, list) else [shapes]
        if self.is_stage_3:
            places = self._places_at_stage_3([item for each in shapes for item in each.items()])
        else:
            places = self._places()
        for shape_of in shapes:
            for name, shape in shape_of.items():
                self._add(found, name, torch.Size(shape), places[name])
        for name, source in (model.get("shared_params") or {}).items():
            found.weights[name] = found.weights[source]
        self._add_others(found)
        settings = self._optimizer(self.ranks[0])["param_groups"]
        found.groups = [
            {**group, "params": list(names)} for group, names in zip(settings, shapes, strict=True)
        ]
        scaler = self.ranks[0].get("loss_scaler")
        if getattr(scaler, "dynamic", False) or hasattr(scaler, "last_overflow_iter"):
            good = scaler.cur_iter - scaler.last_overflow_iter - 1
            found.scaler = {
                "loss_scale": torch.tensor(float(scaler.cur_scale)),
                "loss_scale_good_steps": torch.tensor(good, dtype=torch.int32),
                "loss_scale_hysteresis": torch.tensor(scaler.cur_hysteresis, dtype=torch.int32),
            }
        return found

    def _optimizer(self, rank: Any) -> Any:
        return rank["optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"]

    def _places(self) -> dict[str, list[_Stretch]]:
        """Return the places of each tensor's parts, by name, rank by rank."""
        places: dict[str, list[_Stretch]] = {}
        for rank in self.ranks:
            weights, states = (
                rank["single_partition_of_fp32_groups"],
                self._optimizer(rank)["state"],
            )
            for number, parts in enumerate(rank["param_slice_mappings"]):
                for name, part in parts.items():
                    stretch = _Stretch(
                        weights[number], states.get(number, {}), part.start, part.numel
                    )
                    places.setdefault(name, []).append(stretch)
        return places

    def _places_at_stage_3(self, shapes: list[tuple[str, Any]]) -> dict[str, list[_Stretch]]:
        """Return the places at stage 3, where each weight is sharded over all ranks, after the
        weight before it."""
        places: dict[str, list[_Stretch]] = {name: [] for name, _ in shapes}
        for rank in self.ranks:
            weights, states = rank["fp32_flat_groups"], self._optimizer(rank)["state"]
            number = start = 0
            for name, shape in shapes:
                length = math.ceil(math.prod(shape) / len(self.ranks))
                if start == len(weights[number]):
                    number, start = number + 1, 0
                if start + length > len(weights[number]):
                    raise ValueError(f"{name!r} does not fit into its group")
                stretch = _Stretch(weights[number], states.get(number, {}), start, length)
                places[name].append(stretch)
                start += length
        return places

    def _add(self, found: ZeroFiles, name: str, shape: torch.Size, places: list[_Stretch]) -> None:
        found.weights[name] = lambda: _joined([each.of(each.weights) for each in places], shape)
        for key, value in places[0].states.items():
            if not isinstance(value, Tensor) or not value.dim():
                number = torch.as_tensor(value)
                found.optimizer[f"{name}/{key}"] = lambda number=number: number.clone()  # type: ignore[misc]
                continue
            found.optimizer[f"{name}/{key}"] = lambda key=key: _joined(  # type: ignore[misc]
                [each.of(each.states[key]) for each in places], shape
            )

    def _add_others(self, found: ZeroFiles) -> None:
        """Add frozen weights, if they were saved, and buffers."""
        model = self.models[0]
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            parts = [each["frozen_param_fragments"][name] for each in self.models]
            found.weights[name] = lambda parts=parts, shape=shape: _joined(  # type: ignore[misc]
                parts, torch.Size(shape)
            )
        for name in model.get("buffer_names") or ():
            if (buffer := model["module"].get(name)) is not None:
                found.weights[name] = lambda buffer=buffer: buffer.detach().clone()  # type: ignore[misc]


@dataclass(frozen=True)
class _Stretch:
    weights: Tensor
    """The flat weights of a rank in one group."""
    states: dict[str, Any]
    start: int
    length: int

    def of(self, values: Tensor) -> Tensor:
        return values.detach().flatten()[self.start : self.start + self.length]


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """Concatenate parts, and remove the padding of the last one."""
    return torch.cat([part.detach().flatten() for part in parts])[: shape.numel()].reshape(shape)


def _read(path: Path) -> Any:
    return read_pickled(path, _CLASSES, in_place=True)
