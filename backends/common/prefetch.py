"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ...kernel.recipe import Batch


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed; containers keep their type."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(value, change) for key, value in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Batch) -> Batch:
    """The batch in page-locked memory, so that copying it can overlap with computing."""
    return map_tensors(batch, Tensor.pin_memory)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


def feed(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """On the CPU the batches themselves; on an accelerator one batch ahead, copied on a side
    stream from page-locked memory.
    """
    if device.type == "cpu":
        return iter(batches)
    return _feed_ahead(iter(batches), device)


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
        yield current
