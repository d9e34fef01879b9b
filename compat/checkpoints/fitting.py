"""Whether what a checkpoint holds beside tensors is of the kinds that this run's parts keep.

Looked at before anything is changed: torch takes over whatever it is given, and fails on it in the
first step.
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
    """The hyper-parameters of an optimizer's groups. Raises `CheckpointDamaged`, naming `where` and
    the entry."""
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
    """The numbers of a learning rate schedule. Raises `CheckpointDamaged`, naming `where` and the
    entry."""
    if not isinstance(saved, Mapping):
        raise CheckpointDamaged(f"{where}: its schedule is {saved!r:.80}")
    if "num_resting" in saved:  # of the time when drivetrain had its own
        return
    for name, own in scheduler.state_dict().items():
        if name in saved and not _fits(saved[name], own, as_many=False):
            raise CheckpointDamaged(
                f"{where}: {name!r} of the schedule is {saved[name]!r:.80}, and that of this run "
                f"{own!r:.80}"
            )


def _fits(value: Any, own: Any, as_many: bool = True) -> bool:
    """Numbers in the place of numbers, words of words, lists (`as_many`: of one length) of lists;
    of other things nothing is known."""
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
    """Raises `CheckpointMismatch` where something of the optimizer is not in the checkpoint."""
    if unsaved:
        raise CheckpointMismatch(
            f"{folder} cannot be resumed from: it lacks {', '.join(unsaved)} of its optimizer, and "
            "training would not go on as it was. Load its weights, by from_pretrained or "
            "load_state_dict, and train anew, or with an `optim` whose state is saved (adamw_torch)"
        )
