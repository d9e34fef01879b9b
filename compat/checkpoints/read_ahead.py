"""The random state of data loading, in the training process and in data workers.

When a checkpoint is written, the loader has already read the next batch, and a resumed run reads
this batch again. So a checkpoint holds the state of the generators before that batch was read, as
tensors `read_ahead/<rank>/<name>`, besides the state with which training continues. If data workers
read, the checkpoint holds their states: `data_workers/<rank>/states`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import MANIFEST, CheckpointReader
from ...data.random_state import set_host_state
from ...kernel.contract import Engine, Session
from ...kernel.shards import Piece

__all__ = ["read_again", "stored_workers", "with_read_ahead", "with_workers"]

_AHEAD = "read_ahead"
_WORKERS, _STATES = "data_workers", "states"


@dataclass(frozen=True)
class WithOwnState:
    """An engine to save, with this rank's further tensors `<kind>/<rank>/<name>`."""

    engine: Engine
    session: Session
    kind: str
    tensors: Mapping[str, Tensor]

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of tied parameters of the engine."""
        return self.engine.tied

    def shards(self) -> Iterator[Piece]:
        """Return the engine's pieces, and the pieces of the state."""
        yield from self.engine.shards()
        for name, tensor in self.tensors.items():
            name = f"{self.kind}/{self.session.world.rank}/{name}"
            yield Piece("state", name, tensor, tuple(tensor.shape))


def with_read_ahead(engine: Any, session: Session, state: tuple[Any, ...]) -> WithOwnState:
    """Add the state before the next batch was read to the engine. `state`: the result of
    `host_state`."""
    now = session.rng_state()
    try:
        set_host_state(state)
        return WithOwnState(engine, session, _AHEAD, session.rng_state())
    finally:
        session.set_rng_state(now)


def with_workers(engine: Any, session: Session, states: bytes) -> WithOwnState:
    """Add the states of this rank's data workers to the engine."""
    stored = torch.frombuffer(bytearray(states), dtype=torch.uint8)
    return WithOwnState(engine, session, _WORKERS, {_STATES: stored})


def stored_workers(session: Session, checkpoint: str) -> bytes | None:
    """Return the states of this rank's data workers; None if the checkpoint holds none for this
    rank."""
    stored = _own(session, Path(checkpoint), _WORKERS).get(_STATES)
    return None if stored is None else stored.numpy().tobytes()


def read_again(session: Session, checkpoint: str | None) -> contextlib.AbstractContextManager[None]:
    """Read the first batch of a resumed run in the block. If the state is known, the batch draws
    the same random numbers as when it was first read, and later code draws as if the batch had not
    been read again. Raises `CheckpointDamaged` before the block for an invalid state."""
    after = session.rng_state()
    ahead = {} if checkpoint is None else _stored(session, Path(checkpoint))
    if ahead:
        session.set_rng_state(ahead)  # raises
        session.set_rng_state(after)
    return _around(session, ahead, after)


@contextlib.contextmanager
def _around(session: Session, ahead: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[None]:
    if ahead:
        session.set_rng_state(ahead)
    try:
        yield
    finally:
        session.set_rng_state(after)


def _stored(session: Session, folder: Path) -> dict[str, Tensor]:
    """Return the stored state; empty if the checkpoint holds none for this rank, or one of other
    generators."""
    stored = _own(session, folder, _AHEAD)
    known = session.rng_state()
    if stored.keys() != known.keys():
        return {}
    return stored if all(stored[name].shape == known[name].shape for name in known) else {}


def _own(session: Session, folder: Path, kind: str) -> dict[str, Tensor]:
    """Return this rank's tensors of a kind; empty if the checkpoint holds none."""
    if not (folder / MANIFEST).is_file():
        return {}
    reader, world = CheckpointReader(folder), session.world
    if reader.manifest.world_size != world.size:
        return {}
    return reader.own("state", world.rank, f"{kind}/{world.rank}/")
