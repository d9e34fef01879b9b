"""Changes of weights between updates (`Recipe.after_update`), in ZeRO's masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import CapabilityRefused
from .zero_config import low_precision, swaps
from .zero_state import own_range, partitions, partitions_weights, publish, shape_of

__all__ = ["change_weights", "parts_of", "refuse_where_not_plain"]


def refuse_where_not_plain(config: Mapping[str, Any]) -> None:
    """Raises `CapabilityRefused` where weights lie in files, or in 16 bits beside masters: frozen
    ones have no master, and would lose small changes."""
    for present, what in (
        (low_precision(config) is not None, "weights in 16 bits (fp16 or bf16 enabled in config)"),
        (swaps(config), 'optimizer state in files (offload_optimizer to "nvme")'),
    ):
        if present:
            raise CapabilityRefused(
                f"recipe.after_update with {what}",
                "deepspeed",
                "weights are not all in memory in float32. Leave that section out of "
                "backend.config; the setting precision=bf16 goes with float32 weights",
            )


def change_weights(
    zero: Any, module: nn.Module, change: Callable[[Mapping[str, Any]], None]
) -> None:
    """Call `change` with this rank's part of each parameter, and which elements these are."""
    if partitions_weights(zero):
        zero._partition_all_parameters()  # so that all is in the parts
        change(parts_of(zero, module))
        publish(zero)
        return
    # every rank has the whole of all weights, and masters of some
    named = dict(module.named_parameters())
    change({name: (p.detach(), tuple(p.shape)) for name, p in named.items()})
    with torch.no_grad():
        for part in partitions(zero, module):
            for piece in part.slices:
                whole = named[piece.name].detach().reshape(-1)
                piece.of(part.master).copy_(whole[piece.start : piece.stop])


def parts_of(zero: Any, module: nn.Module) -> dict[str, tuple[Tensor, Any]]:
    """Return this rank's part of each parameter at stage 3, and which elements these are."""
    masters = {
        piece.name: piece.of(part.master)
        for part in partitions(zero, module)
        for piece in part.slices
    }
    found: dict[str, tuple[Tensor, Any]] = {}
    named: Iterable[tuple[str, Any]] = module.named_parameters()
    for name, parameter in named:
        start, stop = own_range(parameter)
        own = masters.get(name)
        if own is None:  # frozen, or this rank's part is padding
            own = parameter.ds_tensor.detach()[: max(stop - start, 0)]
        found[name] = own, (shape_of(parameter), start, stop)
    return found
