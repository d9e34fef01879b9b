"""The loop's state in a checkpoint: its progress, and the losses since the last log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..data.positions import LARGEST, position_from_json, position_to_json
from ..kernel.contract import Session, World
from ..kernel.errors import CheckpointDamaged, DataError
from ..kernel.loop import TrainLoop
from ..kernel.progress import Progress, Window

__all__ = [
    "loop_from_json",
    "loop_to_json",
    "losses_from_json",
    "losses_to_json",
    "progress_from_json",
]


def loop_to_json(loop: TrainLoop) -> dict[str, Any]:
    """Return the part of a checkpoint that is no tensors (JSON types), after an audit. Called by
    all ranks."""
    loop.resolve_pending_outcome()
    if loop.session.world.size > 1:  # else there is nothing to compare
        loop.audit()
    progress, window = loop.progress, loop.window
    return {
        **asdict(progress),
        "position": position_to_json(progress.position),
        "window": {  # so that the first log after a resume covers the steps before it, too
            "first_step": window.first_step + window.empty_steps,
            "losses": losses_to_json(window.loss_sum, loop.session),
        },
    }


def loop_from_json(
    state: Mapping[str, Any], session: Session, where: str
) -> tuple[Progress, Window]:
    """Return what `TrainLoop.restore` takes, of the result of `loop_to_json` at any world size.
    Raises `CheckpointDamaged`, naming `where`, for anything else; an empty state is a new run's."""
    progress = progress_from_json(state, where) if state else Progress()
    window = Window(progress)
    if stored := state.get("window"):
        window.first_step, losses = _checked_window(stored, progress.step, where)
        window.loss_sum = losses_from_json(losses, session.world)
    return progress, window


def _checked_window(value: Any, step: int, where: str) -> tuple[int, list[float | None]]:
    match value:
        case {"first_step": int(first_step), "losses": [_, *_] as losses} if (
            type(first_step) is int
            and 0 <= first_step <= step
            and all(loss is None or type(loss) is float for loss in losses)
        ):
            return first_step, losses
    raise CheckpointDamaged(f"{where}: its window is malformed: {value!r:.200}")


def progress_from_json(value: Mapping[str, Any], where: str = "the checkpoint") -> Progress:
    """Return the progress of a loop. Raises `CheckpointDamaged`, naming `where`, if it is
    malformed."""
    try:
        position = position_from_json(value["position"])
        counts = {name: value[name] for name in asdict(Progress()) if name != "position"}
    except (KeyError, DataError) as error:
        raise CheckpointDamaged(f"{where}: its progress is malformed: {error!r}") from error
    if not all(type(count) is int and 0 <= count < LARGEST for count in counts.values()):
        raise CheckpointDamaged(f"{where}: its counts must be whole numbers: {counts!r:.200}")
    if max(counts["applied"], counts["skipped"]) > counts["step"]:
        raise CheckpointDamaged(f"{where}: more updates than steps: {counts!r:.200}")
    return Progress(**counts, position=position)


def losses_to_json(loss: Any, session: Session) -> list[float | None]:
    """Return each feeder's sum of losses, in order; None for a sum that is not finite."""
    own = float(loss)
    gathered = session.exchange([session.world.feeder_index, own if math.isfinite(own) else None])
    return list(dict(sorted(gathered, key=lambda pair: pair[0])).values())


def losses_from_json(stored: Sequence[float | None], world: World) -> float:
    """Return this feeder's sum, or the mean of all if the number of feeders was another one."""
    losses = [math.nan if loss is None else float(loss) for loss in stored]
    same = len(losses) == world.num_feeders
    return losses[world.feeder_index] if same else math.fsum(losses) / len(losses)
