"""Extra state of modules (`get_extra_state`, hooks of `state_dict`) beside a model's files.

The files of HF hold tensors. A checkpoint of the kernel holds all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint import MANIFEST, CheckpointReader
from ...checkpoint.extra_state import (
    EXTRA,
    encode,
    extra_state,
    give_extra_state,
    read_extra_state,
)

__all__ = ["as_stored", "is_extra_name", "load_stored", "tensors_alone", "without_extra_keys"]

_LOG = logging.getLogger(__name__)
_LEAF = "_extra_state"


def is_extra_name(name: str) -> bool:
    """True for a key of `get_extra_state` in a `state_dict`."""
    return name.rpartition(".")[2] == _LEAF


def tensors_alone(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a `state_dict`, and the names of its other entries."""
    tensors = {name: each for name, each in weights.items() if isinstance(each, Tensor)}
    return tensors, [name for name in weights if name not in tensors]


def load_stored(model: nn.Module, folder: Path, device: torch.device) -> list[str]:
    """Give the model the extra state of a checkpoint of the kernel, of rank 0; return the keys.
    Does nothing for another folder."""
    if not (folder / MANIFEST).is_file():
        return []
    values = read_extra_state(CheckpointReader(folder), device)
    left_out = give_extra_state(model, values)
    return [key for key in values if key not in left_out]


def without_extra_keys(model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Take the keys of extra state out of both lists, with a warning that names them."""
    extra = extra_state(model)
    lacked = [name for name in missing if name in extra]
    surplus = [name for name in unexpected if is_extra_name(name)]
    missing[:] = [name for name in missing if name not in lacked]
    unexpected[:] = [name for name in unexpected if name not in surplus]
    if lacked:
        _LOG.warning(
            "the checkpoint's model files lack extra state of modules, which stays as it is: %s",
            ", ".join(lacked),
        )
    if surplus:
        _LOG.warning(
            "the checkpoint's model files have extra state of modules that the model has not, "
            "which is left out: %s",
            ", ".join(surplus),
        )


def as_stored(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the extra state among weights of a file under the names of a checkpoint's tensors."""
    return {
        f"{EXTRA}/{key}/{part}": tensor
        for key in extra_state(model).keys() & weights.keys()
        for part, tensor in encode(key, weights[key]).items()
    }
