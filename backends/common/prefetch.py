"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...data.nested import can_be_moved, map_leaves, map_tensors, tensors_of
from ...kernel.recipe import Batch
from .accelerators import facts_of


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def pin(batch: Batch) -> Batch:
    """The batch in page-locked memory, so that copying it can overlap with computing."""
    return map_tensors(Tensor.pin_memory, batch)


def feed(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Return the batches themselves on the CPU. On an accelerator copy one batch ahead, on a side
    stream, from page-locked memory; on one without streams copy each when it is asked for.
    """
    if device.type == "cpu":
        return iter(batches)
    if not facts_of(device.type).streams:
        return (_with_objects(move(batch, device), device) for batch in batches)
    return _feed_ahead(iter(batches), device)


def _with_objects(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its objects that can be moved on the device, too."""
    return map_leaves(lambda leaf: leaf.to(device) if can_be_moved(leaf) else leaf, batch)


def _feed_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    side = torch.Stream(device)

    def start() -> tuple[Batch, torch.Event] | None:
        try:
            batch = pin(next(batches))
        except StopIteration:
            return None
        with side:
            moved = move(batch, device)
            arrived = side.record_event()
        return moved, arrived

    ahead = start()
    while ahead is not None:
        current, arrived = ahead
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(arrived)
        for tensor in tensors_of(current):
            # the allocator must not hand the memory out again while this stream reads it
            tensor.record_stream(stream)
        ahead = start()
        # an object's own memory cannot be recorded, so it is allocated where it is used
        yield _with_objects(current, device)
