"""A model's files in the layout of `from_pretrained`: weights, whole or in shards, and adapters.

Weights are written as safetensors. Pickled weights of older versions are read by torch's
weights-only unpickler.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint import CheckpointReader
from ...checkpoint.format.safetensors import Source, read_whole, write
from ...checkpoint.storage.local import beside
from ...kernel.errors import CheckpointDamaged, CheckpointError, printable
from ..common.inspection import is_peft_model
from ..common.json_state import read_json
from .extra_files import tensors_alone
from .unpickling import read_pickled

__all__ = [
    "ADAPTER_FILES",
    "RESHAPED",
    "adapters_in",
    "buffer_shapes",
    "compare_versions",
    "files_beside",
    "frozen_names",
    "has_weights",
    "is_pretrained",
    "load_adapters",
    "load_weights",
    "loads_itself",
    "read_weights",
    "reshape_buffers",
    "stored_weights",
    "unsound",
    "write_weights",
]

_LOG = logging.getLogger(__name__)
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_CARD = "README.md"
_INDEX = tuple(f"{name}.index.json" for name in _WHOLE)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def is_pretrained(model: Any) -> bool:
    """True if the model saves itself as transformers' models do. Imports nothing."""
    transformers = sys.modules.get("transformers")
    return is_peft_model(model) or (
        transformers is not None and isinstance(model, transformers.PreTrainedModel)
    )


# --- what lies in a folder --------------------------------------------------------------------


def has_weights(folder: Path) -> bool:
    """True if a folder holds a model's weights, or an adapter's."""
    names = (*_WHOLE, *_INDEX)
    return any((folder / name).is_file() for name in names) or bool(adapters_in(folder))


def adapters_in(folder: Path) -> list[Path]:
    """Return the folder itself, if it holds an adapter, and its sub-folders that hold one."""
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    return [place for place in places if any((place / name).is_file() for name in ADAPTER_FILES)]


def unsound(folder: Path) -> str | None:
    """Describe the first fault in the safetensors of a folder, by headers and sizes; None if there
    is none."""
    try:
        for path in sorted(folder.glob("*.safetensors")):
            read_whole(path)
        for name in _INDEX:
            if (folder / name).is_file():
                _files_of_index(folder / name)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _files_of_index(index: Path) -> list[Path]:
    """Return the shards of an index. Raises `CheckpointError` if the index is malformed or a shard
    is missing."""
    try:
        parts = list(dict.fromkeys(read_json(index)["weight_map"].values()))
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index}: is no index of weights: {error!r:.200}") from error
    for part in parts or [None]:
        named = isinstance(part, str) and Path(part).name == part and len(part) < 256
        if not named or not (index.parent / part).is_file():
            raise CheckpointError(f"{index}: its part {part!r:.200} is not beside it")
    return [index.parent / part for part in sorted(parts)]


def compare_versions(folder: Path) -> None:
    """Warn when another version of transformers wrote the model."""
    config, transformers = folder / "config.json", sys.modules.get("transformers")
    if transformers is None or not config.is_file():
        return
    stored = read_json(config)
    written = stored.get("transformers_version") if isinstance(stored, dict) else None
    if written not in (None, transformers.__version__):
        _LOG.warning(
            "%s was written by transformers %s, and this is %s",
            folder,
            printable(str(written))[:40],
            transformers.__version__,
        )


# --- weights ----------------------------------------------------------------------------------


def read_weights(folder: Path, *besides: str) -> dict[str, Tensor]:
    """Read all weights of a model in a folder, on the host. `besides`: other files that may hold
    them. Raises `CheckpointError`.
    """
    for name in (*_WHOLE, *besides):
        if (folder / name).is_file():
            return _read_file(folder / name)
    weights: dict[str, Tensor] = {}
    for index in (folder / name for name in _INDEX):
        if index.is_file():
            for path in _files_of_index(index):
                weights |= _read_file(path)
            return weights
    raise CheckpointError(f"{folder}: has none of {', '.join((*_WHOLE, *_INDEX))}")


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_whole(path)
    weights = read_pickled(path)
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise CheckpointDamaged(f"{path}: holds no weights by their names")
    return dict(weights)


def loads_itself(model: nn.Module) -> bool:
    """True if the model or a part of it overrides loading, which may change the module."""
    plain = nn.Module
    return type(model).load_state_dict is not plain.load_state_dict or any(
        type(part)._load_from_state_dict is not plain._load_from_state_dict
        for part in model.modules()
        if not type(part).__module__.startswith("torch.")
    )


def stored_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, each once, and persistent buffers, by FQN."""
    return {**dict(module.named_parameters()), **_buffers(module)}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    persistent = module.state_dict(keep_vars=True)
    return {name: each for name, each in module.named_buffers() if name in persistent}


RESHAPED = "reshaped_buffers"
"""Key of a checkpoint's state: the buffers whose shape has changed since training began."""


def buffer_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the persistent buffers, by FQN."""
    return {name: buffer.shape for name, buffer in _buffers(model).items()}


def reshape_buffers(model: nn.Module, stored: CheckpointReader) -> None:
    """Give buffers whose shape changed in training the shape in which they are stored."""
    reshaped = stored.manifest.state.get(RESHAPED)
    for name, buffer in _buffers(model).items():
        if isinstance(reshaped, list) and name in reshaped and name in stored.names("weights"):
            owner, _, leaf = name.rpartition(".")
            shape = stored.info("weights", name).shape
            model.get_submodule(owner)._buffers[leaf] = buffer.new_empty(shape)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Any:
    """Load the given weights into the model, on any device. The result lists missing and unexpected
    keys. A parameter with several names needs only one of them.
    """
    named: dict[int, list[str]] = {}
    for name, tensor in tensors_alone(model.state_dict(keep_vars=True))[0].items():
        named.setdefault(id(tensor), []).append(name)
    whole = dict(weights)
    for names in named.values():
        stored = [name for name in names if name in weights]
        for name in names if stored else ():
            whole.setdefault(name, weights[stored[0]])
    return model.load_state_dict(whole, strict=False)


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors`. Tensors that share all their memory are written once, under the
    first name. Entries that are no tensors are left out."""
    sources: dict[str, Source] = {}
    seen: set[Any] = set()
    for name, tensor in tensors_alone(weights)[0].items():
        place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        sources[name] = Source.of(tensor)
    path = folder / _WHOLE[0]
    with beside(path) as temporary:
        write(temporary, sources, {"format": "pt"})


_SHARD = re.compile(r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")


@contextmanager
def files_beside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to a writer that would overwrite existing files. When the block
    ends, each file atomically replaces its predecessor, an index last, and shards of an earlier
    model are removed."""
    temporary = folder / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir()
    try:
        if (folder / _CARD).is_file():
            shutil.copy2(folder / _CARD, temporary)  # PEFT adds to it
        yield temporary
        written = [path for path in temporary.rglob("*") if path.is_file()]
        for path in sorted(written, key=lambda path: (path.name in _INDEX, path)):
            place = folder / path.relative_to(temporary)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
        names = {path.name for path in written}
        for path in folder.iterdir() if names & {*_WHOLE, *_INDEX} else ():
            if _SHARD.fullmatch(path.name) and path.name not in names:
                path.unlink()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# --- adapters ---------------------------------------------------------------------------------


def load_adapters(model: Any, folder: Path) -> None:
    """Load the adapters in a folder and its sub-folders into a PEFT model. The adapter that was
    active, or the first of several, stays active.
    """
    active = first_adapter(model)
    places = adapters_in(folder)
    if [place for place in places if place != folder]:
        for place in places:
            name = "default" if place == folder else place.name
            model.load_adapter(str(place), name, is_trainable=name == active)
        model.set_adapter(active)
    elif places:
        model.load_adapter(str(folder), active, is_trainable=True)
    else:
        _LOG.warning(
            "%s holds no adapter, so the model's adapters stay as they are; was it written by a "
            "callback of your own?",
            folder,
        )


def first_adapter(model: Any) -> str:
    """Return the active adapter; the first of several, with a warning."""
    active: list[str] = list(model.active_adapters)
    if len(active) > 1:
        _LOG.warning("of several active adapters (%s) only the first counts", ", ".join(active))
    return active[0]


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the base model's weights, which a checkpoint of adapters leaves out."""
    if not is_peft_model(model):
        return frozenset()
    named = model.named_parameters()
    return frozenset(name for name, parameter in named if not parameter.requires_grad)
