"""Whole parameters in the places of sharded ones. `engine`: an `FsdpEngine`."""

from __future__ import annotations

import logging
from collections.abc import Collection, MutableMapping
from typing import Any

import torch
from torch import nn

from ...data.private_names import TRIED, private_name
from ..common import models
from ..common.unwrapping import unwrap
from ..process_group.collectives import naming_collectives
from . import meta_init, sharding
from .hooks import UserHooks

__all__ = ["give_back", "stand_ins"]

_LOG = logging.getLogger(__name__)


def stand_ins(
    engine: Any, given: UserHooks, names: Collection[str] | None, device: torch.device
) -> dict[nn.Parameter, nn.Parameter]:
    """Gather whole parameters of these names, or all, on `device`, each by the one that it stands
    for. Called by all ranks."""
    tied = {name: group[0] for group in engine.tied for name in group}
    wanted = None if names is None else {tied.get(name, name) for name in names}
    with naming_collectives("gathering whole weights", engine.world.rank):
        return {
            parameter: given.stand_in(name, parameter, engine.whole(name, parameter).to(device))
            for name, parameter in engine.module.named_parameters()
            if wanted is None or name in wanted
        }


def give_back(engine: Any) -> bool:
    """Leave the user's module whole, with the trained weights in host memory. Called by all
    ranks."""
    engine.ready()
    full = stand_ins(engine, engine.given, None, torch.device("cpu"))
    engine.buffers.take_for_good()
    for buffer in engine.module.buffers():
        buffer.data = buffer.data.cpu()
    meta_init.replace(engine.module, full)
    unwrap(engine.module, sharding.LIBRARIES, sharding.mixed_in())
    models.release(engine.module)
    states = _states_of_modules()
    for part in engine.module.modules():  # torch has no way to undo `fully_shard`
        states.pop(part, None)
    return True


def _states_of_modules() -> MutableMapping[nn.Module, Any]:
    """Return torch's states of sharded modules; an empty dict, with a warning, if this torch keeps
    them elsewhere."""
    states: MutableMapping[nn.Module, Any] | None = private_name(
        "torch.distributed._composable_state", "_module_state_mapping", None
    )
    if states is not None:
        return states
    _LOG.warning(
        "torch %s has no torch.distributed._composable_state._module_state_mapping: a model that "
        "was trained by fsdp cannot be trained by it again in this process. Build a new model for "
        "the next training, or install torch %s to %s",
        torch.__version__,
        *TRIED,
    )
    return {}
