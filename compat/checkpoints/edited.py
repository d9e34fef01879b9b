"""Weights that were edited in a checkpoint, as by a callback that saves an average of them.

One rule, for resuming and for the best model: the files that `from_pretrained` reads count where
somebody changed them after the save, and else the checkpoint's own pieces, from which they came.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint import CheckpointReader
from ...kernel.contract import Session
from ...kernel.errors import CheckpointError
from .model_files import ADAPTER_FILES, adapters_in, has_weights, read_weights

__all__ = ["edited_weights"]

_LOG = logging.getLogger(__name__)


def edited_weights(stored: CheckpointReader, session: Session) -> dict[str, Tensor]:
    """By FQN, the weights of the files beside a checkpoint, where they are not those that it holds;
    else empty. Called by all ranks.
    """
    folder = Path(str(stored.folder))
    mine = session.world.rank == 0 and has_weights(folder) and _differ(stored, folder)
    if not session.exchange(mine)[0]:
        return {}
    _LOG.warning(
        "%s: the model's files were changed after the checkpoint was saved: their weights count, "
        "with its optimizer and progress. To have its own weights back delete these files",
        folder,
    )
    return dict(_by_fqn(stored, folder))


def _differ(stored: CheckpointReader, folder: Path) -> bool:
    try:
        return any(
            not _same(tensor, stored.read("weights", name))
            for name, tensor in _by_fqn(stored, folder)
        )
    except CheckpointError as error:
        _LOG.warning("%s: the checkpoint's own weights count", error)
        return False


def _by_fqn(stored: CheckpointReader, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Those that the checkpoint holds, too, by the name that it has for them."""
    first = {name: group[0] for group in stored.manifest.tied for name in group}
    known = set(stored.names("weights"))
    for place in adapters_in(folder) or [folder]:
        adapter = "default" if place == folder else place.name
        for name, tensor in read_weights(place, *ADAPTER_FILES).items():
            for each in _full_names(name, adapter):
                if (fqn := first.get(each, each)) in known:
                    yield fqn, tensor
                    break


def _full_names(name: str, adapter: str) -> list[str]:
    """The names of a tensor in the model: PEFT leaves its adapter's name out of a file."""
    module, _, last = name.rpartition(".")
    saved_whole = f"{module}.modules_to_save.{adapter}.{last}"
    return [name, f"{module}.{adapter}.{last}", f"{name}.{adapter}", saved_whole]


def _same(tensor: Tensor, stored: Tensor) -> bool:
    """Bit by bit, in the dtype of the file: a driver may keep more of it."""
    if tensor.shape != stored.shape:
        return False
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (tensor, stored.to(tensor))]
    return torch.equal(*bits)
