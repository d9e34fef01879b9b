"""Shows an update of ZeRO: the masters and gradients that this rank holds (`ShowsUpdates`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import CapabilityRefused
from .zero_change import parts_of
from .zero_state import partitions, partitions_weights, shape_of, trained

__all__ = ["refuse_where_unseen", "shown"]


def refuse_where_unseen(zero: Any) -> None:
    """Raise `CapabilityRefused` if masters are in files, or if DeepSpeed replaces gradients by what
    its Muon makes of them before any code sees them."""
    for present, what, why in (
        (
            getattr(zero, "swap_optimizer", False),
            'optimizer state in files (offload_optimizer to "nvme")',
            "weights are not all in memory. Offload to the device cpu",
        ),
        (
            "muon" in type(zero.optimizer).__name__.lower(),
            f"DeepSpeed's {type(zero.optimizer).__name__}",
            "gradients are orthogonalised before they can be measured. Take another optimizer",
        ),
    ):
        if present:
            raise CapabilityRefused(
                f"stats.every with {what}", "deepspeed", f"{why}, or set stats.every=0"
            )


@contextmanager
def shown(zero: Any, module: nn.Module, reached: Collection[str], observer: Any) -> Iterator[None]:
    """Show the update within the block. `reached`: the parameters that have a gradient. ZeRO
    discards an update that overflows before it has put its gradients together: of such an update
    only the weights are shown."""
    parts = partitions(zero, module)
    observer.weights(parts_of(zero, module) if partitions_weights(zero) else _weights(zero, module))
    scale, scale_down = float(zero.loss_scale), zero.unscale_and_clip_grads

    def show(gradients: Any, total_norm: Any) -> None:
        if partitions_weights(zero):  # it is given the number of a group
            part = parts[gradients]
        else:
            part = next(each for each in parts if each.master.grad is gradients[0])
        flat = part.master.grad
        assert flat is not None
        observer.gradients(
            {piece.name: piece.of(flat) / scale for piece in part.slices if piece.name in reached}
        )
        scale_down(gradients, total_norm)

    zero.unscale_and_clip_grads = show
    try:
        yield
    finally:
        zero.unscale_and_clip_grads = scale_down


def _weights(zero: Any, module: nn.Module) -> dict[str, tuple[Tensor, Any]]:
    """Return this rank's stretches of the masters, and whole parameters without masters."""
    masters = {
        piece.name: (piece.of(part.master), (piece.shape, piece.start, piece.stop))
        for part in partitions(zero, module)
        for piece in part.slices
    }
    with_master = trained(zero)
    return {
        name: masters.get(name, (torch.empty(0), ()))
        if id(parameter) in with_master
        else (parameter.detach(), shape_of(parameter))
        for name, parameter in module.named_parameters()
    }
