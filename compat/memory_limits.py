"""Going on with smaller batches when memory runs out."""

from __future__ import annotations

import torch

__all__ = ["out_of_memory", "smaller_batch"]

_WORDS = ("out of memory", "can't allocate memory", "failed to allocate")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of a step says that a device, or the host, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def smaller_batch(batch_size: int, error: BaseException) -> tuple[int, int]:
    """The largest batch of at most half the size that divides it, and how many make up one of it.

    Raises RuntimeError when even one sample does not fit.
    """
    if batch_size == 1:
        raise RuntimeError(
            "out of memory with a batch of one sample: no executable batch size is left. Recompute "
            "activations (gradient_checkpointing=True), shard the model (backend='fsdp'), or cut "
            "the samples shorter"
        ) from error
    size = next(n for n in range(batch_size // 2, 0, -1) if batch_size % n == 0)
    return size, batch_size // size
