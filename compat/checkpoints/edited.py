"""Weights that were edited in a checkpoint, such as by a callback that saves an average.

One rule holds for resuming and for the best model: if the files that `from_pretrained` reads were
changed after the save, their weights are used; else the checkpoint's own pieces, from which the
files were written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ...checkpoint import CheckpointReader
from ...kernel.contract import Session
from ...kernel.errors import CheckpointError, CheckpointMismatch
from .extra_files import is_extra_name
from .key_conversion import converted_weights
from .model_files import ADAPTER_FILES, adapters_in, has_weights, read_weights

__all__ = ["edited_weights", "full_names"]

_LOG = logging.getLogger(__name__)


def edited_weights(
    stored: CheckpointReader, session: Session, model: nn.Module
) -> dict[str, Tensor]:
    """Return the weights in the files beside a checkpoint, by FQN, if they differ from the
    checkpoint's own weights; else an empty dict. Called by all ranks.
    """
    folder = Path(str(stored.folder))
    mine = session.world.rank == 0 and has_weights(folder) and _differ(stored, folder, model)
    if not session.exchange(mine)[0]:
        return {}
    _LOG.warning(
        "%s: the model's files were changed after the checkpoint was saved: their weights count, "
        "with its optimizer and progress. To use its own weights again delete these files",
        folder,
    )
    return dict(_by_fqn(stored, folder, model))


def _differ(stored: CheckpointReader, folder: Path, model: nn.Module) -> bool:
    try:
        return any(
            not _same(tensor, stored.read("weights", name))
            for name, tensor in _by_fqn(stored, folder, model)
        )
    except CheckpointError as error:
        _LOG.warning("the model's files are not used, the checkpoint's own weights are: %s", error)
        return False


def _by_fqn(
    stored: CheckpointReader, folder: Path, model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the model's files that the checkpoint also holds, under the checkpoint's
    names.
    """
    first = {name: group[0] for group in stored.manifest.tied for name in group}
    known, own = set(stored.names("weights")), model.state_dict().keys()
    for place in adapters_in(folder) or [folder]:
        adapter = "default" if place == folder else place.name
        weights = read_weights(place, *ADAPTER_FILES)
        for name, tensor in converted_weights(model, weights, {*known, *first}).items():
            names = [first.get(each, each) for each in full_names(name, adapter)]
            fqn = next((each for each in names if each in known), None)
            if fqn is not None:
                yield fqn, tensor
            elif name not in own and place == folder and not is_extra_name(name):
                raise CheckpointMismatch(
                    f"{folder}: its model's file has {name!r:.200}, which the checkpoint has not"
                )


def full_names(name: str, adapter: str) -> list[str]:
    """Return the possible names of a tensor in the model: PEFT leaves the adapter's name out of a
    file."""
    module, _, last = name.rpartition(".")
    saved_whole = f"{module}.modules_to_save.{adapter}.{last}"
    return [name, f"{module}.{adapter}.{last}", f"{name}.{adapter}", saved_whole]


def _same(tensor: Tensor, stored: Tensor) -> bool:
    """Compare bit by bit in the dtype of the file: a driver may keep higher precision."""
    if tensor.shape != stored.shape:
        return False
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (tensor, stored.to(tensor))]
    return torch.equal(*bits)
