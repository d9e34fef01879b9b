"""The random state of ranks, as a checkpoint holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernel.contract import Session
from ..kernel.errors import CheckpointDamaged
from .reader import CheckpointReader
from .writer import RNG

__all__ = ["FEEDERS", "load_rng", "own_random_state"]

FEEDERS = "num_feeders"
"""Key of a checkpoint's state: the number of feeders, if several ranks were one feeder."""


def load_rng(reader: CheckpointReader, session: Session, driver: str = "") -> list[str]:
    """Restore the random state that this rank saved. Return the names of the generators without a
    state in the checkpoint, which are not changed: all of them, if the checkpoint is of another
    world size or number of feeders, or of a driver with other generators. Raises
    `CheckpointDamaged` before anything is changed. `driver`: the session's driver; a checkpoint of
    the same driver must hold all of its generators.
    """
    rank, size, manifest = session.world.rank, session.world.size, reader.manifest
    current = session.rng_state()
    feeders = manifest.state.get(FEEDERS, manifest.world_size)
    if (manifest.world_size, feeders) != (size, session.world.num_feeders):
        return list(current)
    stored = reader.own("state", rank, f"{RNG}/{rank}/")
    if driver and manifest.driver == driver:
        if current and not stored:
            raise CheckpointDamaged(
                f"{reader.folder}: random state {RNG}/{rank}/{next(iter(current))} is missing, and "
                f"all others of rank {rank}"
            )
    else:
        stored = {name: tensor for name, tensor in stored.items() if name in current}
        if any(_form(current[name]) != _form(tensor) for name, tensor in stored.items()):
            return list(current)
    if stored:
        session.set_rng_state(stored)
    return [name for name in current if name not in stored]


@contextlib.contextmanager
def own_random_state(
    reader: CheckpointReader, session: Session, driver: str
) -> Iterator[list[str]]:
    """Call `load_rng` for the block, which restores a checkpoint; undo it if the block raises."""
    before = session.rng_state()
    unknown = load_rng(reader, session, driver)
    try:
        yield unknown
    except Exception:
        session.set_rng_state(before)
        raise


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
