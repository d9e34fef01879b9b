"""Check that the non-tensor state in a checkpoint has the types that this run's parts keep.

The checks run before anything is changed: torch accepts any state, and fails in the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from ..optim.parameters import hyper_parameters

__all__ = ["check_groups", "check_schedule", "refuse_part_of_optimizer"]


def check_groups(saved: Any, own: Iterable[Mapping[str, Any]], where: str) -> None:
    """Check the hyper-parameters of an optimizer's groups. Raises `CheckpointDamaged`, naming
    `where` and the entry."""
    if not (isinstance(saved, list) and all(isinstance(values, Mapping) for values in saved)):
        raise CheckpointDamaged(f"{where}: the groups of its optimizer are {saved!r:.80}")
    for number, (values, group) in enumerate(zip(saved, own, strict=False)):
        for name, value in hyper_parameters(values).items():
            if name in group and not _fits(value, group[name]) and (name, value) != ("lr", None):
                raise CheckpointDamaged(
                    f"{where}: {name!r} of the optimizer's group {number} is {value!r:.80}, and "
                    f"that of this run {group[name]!r:.80}"
                )


def check_schedule(saved: Any, scheduler: Any, where: str) -> None:
    """Check the numbers of a learning rate schedule. Raises `CheckpointDamaged`, naming `where` and
    the entry."""
    if not isinstance(saved, Mapping):
        raise CheckpointDamaged(f"{where}: its schedule is {saved!r:.80}")
    for name, own in scheduler.state_dict().items():
        if name in saved and not _fits(saved[name], own, as_many=False):
            raise CheckpointDamaged(
                f"{where}: {name!r} of the schedule is {saved[name]!r:.80}, and that of this run "
                f"{own!r:.80}"
            )


def _fits(value: Any, own: Any, as_many: bool = True) -> bool:
    """True if both values are numbers, both strings, or both lists (`as_many`: of the same length).
    Values of other types are not checked."""
    if _is_number(own):
        return _is_number(value)
    if isinstance(own, str):
        return isinstance(value, str)
    if isinstance(own, list | tuple):
        alike = isinstance(value, list | tuple) and (len(value) == len(own) or not as_many)
        return alike and all(map(_fits, value, own))
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def refuse_part_of_optimizer(folder: Path, unsaved: list[str] | None) -> None:
    """Raises `CheckpointMismatch` if a part of the optimizer's state is not in the checkpoint."""
    if unsaved:
        raise CheckpointMismatch(
            f"{folder} cannot be resumed from: it lacks {', '.join(unsaved)} of its optimizer, and "
            "training would not continue exactly. Load its weights, by from_pretrained or "
            "load_state_dict, and start over, or use an `optim` whose state is saved (adamw_torch)"
        )
