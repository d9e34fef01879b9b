"""An optimizer that lies in parts on all ranks, put together as HF Trainer's files hold it."""

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

__all__ = ["whole_optimizer"]


def whole_optimizer(
    engine: Engine, session: Session, order: Sequence[Sequence[str | None]], folder: Path
) -> dict[str, Any]:
    """Its state, as `torch.optim.Optimizer.state_dict` gives it on one process, on the first rank;
    on others an empty one. All ranks call it, and write their parts to files in `folder`, which is
    deleted. `order`: the names of the parameters in each group.
    """
    alone: Any = _OptimizerAlone(engine)
    stored = CheckpointStore(folder).save(0, alone, session, {})
    entries = _entries(CheckpointReader(stored)) if session.world.rank == 0 else {}
    session.exchange(None)  # nobody goes on to files beside those that are being deleted
    if session.world.rank == 0:
        shutil.rmtree(folder)
    numbers = dict(zip(chain(*order), count(), strict=False))
    state = {numbers[name]: nested(each, f"{name}/") for name, each in entries.items()}
    left = count()
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": own}
        for group, own in zip(
            engine.param_groups, ([next(left) for _ in names] for names in order), strict=True
        )
    ]
    return {"state": state, "param_groups": groups}


def _entries(stored: CheckpointReader) -> dict[str, dict[str, Any]]:
    """What each parameter has, by its name."""
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
