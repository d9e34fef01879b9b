"""Assembles an optimizer that is sharded over ranks to the state in HF Trainer's files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from ...checkpoint import CheckpointReader, CheckpointStore
from ...checkpoint.optimizer_entries import is_state, nested
from ...kernel.contract import Engine, Session
from ...kernel.shards import Piece
from .groups import aligned

__all__ = ["whole_optimizer"]


def whole_optimizer(
    engine: Engine, session: Session, order: Sequence[Sequence[str | None]], folder: Path
) -> dict[str, Any]:
    """Return, on the first rank, the state that `torch.optim.Optimizer.state_dict` returns in one
    process, and an empty state on the other ranks. All ranks call it, and write their parts to
    files in `folder`, which is deleted at the end. `order`: the names of the parameters in each
    group.
    """
    alone: Any = _OptimizerAlone(engine)
    stored = CheckpointStore(folder).save(0, alone, session, {})
    entries = _entries(CheckpointReader(stored)) if session.world.rank == 0 else {}
    session.exchange(None)  # no rank continues while these files are being deleted
    if session.world.rank == 0:
        shutil.rmtree(folder)
    numbers = dict(zip(chain(*order), count(), strict=False))
    here = aligned(engine.param_groups, order, len(order))
    state = {numbers[name]: nested(each, f"{name}/") for name, each in entries.items()}
    left = count()
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": own}
        for group, own in zip(here, ([next(left) for _ in names] for names in order), strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _entries(stored: CheckpointReader) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of each parameter, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for name in stored.names("optimizer"):
        parameter, _, key = name.rpartition("/")
        if is_state(key):
            found.setdefault(parameter, {})[key] = stored.read("optimizer", name)
    return found


@dataclass(frozen=True)
class _OptimizerAlone:
    """An engine without its weights."""

    engine: Engine
    tied: tuple[tuple[str, ...], ...] = ()

    def shards(self) -> Iterator[Piece]:
        return (piece for piece in self.engine.shards() if piece.kind == "optimizer")
