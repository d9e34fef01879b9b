"""Share of the copying to a device that overlaps with computing, from a trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .harness import Measured

Interval = tuple[float, float]


def overlap_of(events: Iterable[Any]) -> Measured:
    """Return `overlap`, the share of the time of copies to the device when a kernel ran, too."""
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            interval = event.time_range.start, event.time_range.end
            if "HtoD" in event.name:
                copies.append(interval)
            elif not event.name.startswith(("Memcpy", "Memset")):
                kernels.append(interval)
    total = sum(stop - start for start, stop in copies)
    return {"overlap": covered(copies, kernels) / total} if total else {}


def covered(intervals: Iterable[Interval], by: Iterable[Interval]) -> float:
    """Return the length of `intervals` that lies within `by`, whose members may overlap."""
    joined: list[list[float]] = []
    for start, stop in sorted(by):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    return sum(
        max(0.0, min(stop, until) - max(start, since))
        for start, stop in intervals
        for since, until in joined
    )
