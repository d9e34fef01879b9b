"""Check that the optimizer state in a checkpoint fits this model and this optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import AVERAGE, flat, is_state
from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from ...kernel.shards import Reader
from . import models

__all__ = ["check"]


def check(
    reader: Reader,
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str | None]],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Raises `CheckpointMismatch` for state of another model or optimizer, and `CheckpointDamaged`
    for an entry that is missing or malformed; looks at names, dtypes and shapes only.

    `names`: of the parameters in each group of `optimizer`. `shapes`: of all of the model's. What
    an optimizer keeps is known of torch's own alone, which are tried on a small parameter.
    """
    stored: dict[str, dict[str, str]] = {}
    for name in reader.names("optimizer"):
        fqn, _, key = name.rpartition("/")
        if fqn not in shapes:
            raise CheckpointMismatch(
                f"the checkpoint holds optimizer state {key!r} of {fqn!r}, which is no parameter "
                "of this model"
            )
        if key == AVERAGE:
            like = torch.empty(tuple(range(2, 2 + len(shapes[fqn]))), device="meta")
            _compare_entry(reader, name, like, tuple(shapes[fqn]))
        elif is_state(key):
            stored.setdefault(fqn, {})[key.partition(":")[0]] = name
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        present = [name for name in of_group if name is not None and name in stored]
        for dims in sorted({len(shapes[name]) for name in present}):
            alike = {n: stored[n] for n in present if len(shapes[n]) == dims}
            kind = models.kind_of(optimizer, group)
            if (kept := _kept_by(kind, group, dims)) is not None:
                _compare_keys(kind, alike, kept)
                for fqn, entries in alike.items():
                    for key, name in entries.items():
                        _compare_entry(reader, name, kept[key], tuple(shapes[fqn]))


def _kept_by(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int
) -> dict[str, Tensor] | None:
    """Key -> what one of torch's optimizers keeps of a parameter of so many dimensions (of sizes 2,
    3, ...) after two updates; None for others."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return None
    plain = {"lr": 1e-3, "capturable": False, "differentiable": False, "foreach": False}
    settings = {key: plain.get(key, value) for key, value in group.items() if key != "fused"}
    tried = nn.Parameter(torch.zeros(tuple(range(2, 2 + dims))))
    try:
        twin = kind([{**settings, "params": [tried]}])
        for _ in range(2):
            tried.grad = torch.ones_like(tried)
            twin.step()
    except (TypeError, ValueError, RuntimeError):  # it wants a closure, or sparse gradients
        return None
    return {
        name.partition(":")[0]: tensor
        for key, value in twin.state[tried].items()
        for name, tensor in flat(key, value)
    }


def _compare_keys(
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Mapping[str, str]],
    kept: Mapping[str, Tensor],
) -> None:
    found = {key for entries in stored.values() for key in entries}
    if found != kept.keys():
        raise CheckpointMismatch(
            f"the checkpoint's optimizer kept {_listed(found)} of each parameter, and this "
            f"{type(optimizer).__name__} keeps {_listed(kept)}: it was another one, or had other "
            "options. Take that one, or start this one fresh with resume.optimizer=fresh"
        )
    for fqn, entries in stored.items():
        for key in sorted(kept.keys() - entries.keys()):
            raise CheckpointDamaged(f"optimizer {f'{fqn}/{key}'!r} is missing in the checkpoint")


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _compare_entry(reader: Reader, name: str, kept: Tensor, shape: tuple[int, ...]) -> None:
    info, like_parameter = reader.info("optimizer", name), tuple(range(2, 2 + len(shape)))
    wanted = shape if kept.dim() and tuple(kept.shape) == like_parameter else None
    wanted = () if not kept.dim() else wanted
    if wanted is not None and info.shape != wanted:
        raise CheckpointDamaged(
            f"optimizer {name!r} has shape {info.shape} in the checkpoint, and must have {wanted}"
        )
    fqn = name.rpartition("/")[0]
    if info.dtype.is_complex and wanted == shape and fqn in reader.names("weights"):
        of_same_kind = reader.info("weights", fqn).dtype.is_complex
    else:
        of_same_kind = info.dtype.is_floating_point == kept.dtype.is_floating_point
    if not of_same_kind:
        raise CheckpointDamaged(f"optimizer {name!r} is of {info.dtype} in the checkpoint")
