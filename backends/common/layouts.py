"""Estimates: the memory of this machine, and the memory that a model takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import nn

from ...kernel.plan import Layout, Plan
from .models import tied_groups


def host_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def replicated_layout(
    plan: Plan,
    model: nn.Module,
    state_bytes: Mapping[str, int],
    world_size: int = 1,
    *,
    notes: tuple[str, ...] = (),
) -> Layout:
    """The whole of everything on every rank, of however many."""
    parameters = list(model.parameters())
    groups = tied_groups(model)
    tied = tuple(f"{' = '.join(group)} is one parameter" for group in groups)
    compute = plan.precision.compute
    casts: tuple[str, ...] = ()
    cast_bytes = 0
    if compute != plan.precision.params:
        casts = (f"matrix products in {compute}; the casts of the weights are kept in a forward",)
        cast_bytes = sum(p.numel() * compute.itemsize for p in parameters if p.dim() >= 2)
    gradients = [p.nbytes for p in parameters if p.requires_grad]
    accumulates = plan.micro_batch is not None and plan.micro_batch < plan.global_batch
    # from the second microbatch on a gradient exists twice until it has been added
    added_bytes = max(gradients, default=0) if accumulates else 0
    return Layout(
        parameter_bytes=sum(t.nbytes for t in (*parameters, *model.buffers())),
        gradient_bytes=sum(gradients),
        optimizer_bytes=sum(state_bytes.values()),
        transient_bytes=cast_bytes + added_bytes,
        notes=(*tied, *casts, *notes),
    )
